"""Divisions made elsewhere: lists of positions in a file, as a partition.

Positions count the training images from 0 in the order of the data set's original files, and then the test images.
"""

import json
from operator import index
from pathlib import Path

import numpy as np

from fedcli.core.batches import generator
from fedcli.core.partition import PARTITIONS
from fedcli.core.parts import Split
from fedcli.data.files import PARTS, Arrays, reading

FORM = 'lists in JSON, {"train": [[0, 3], [2]], "test": [[5], [4]]}, or train_0, train_1, ..., test_0, ... in an .npz'


def file(labels: np.ndarray, num_clients: int, place: np.ndarray, seed: int, path: str) -> Split:
    """Gives every client the examples that a file lists, by their `place` `[N]` in the files that the data came from.

    They are mixed by a fixed seed. Clients may share images to test on, and no others.
    """
    with reading(path, FORM):
        train, test = read_split(Path(path))
        if len(train) != num_clients:
            raise ValueError(f"it has lists of {len(train)} clients, not {num_clients}: use --num-clients {len(train)}")
        tested = np.unique(np.concatenate([*test, np.empty(0, np.int64)]))
        positions, times = np.unique(np.concatenate([*train, tested]), return_counts=True)
        if (times > 1).any():
            raise ValueError(f"position {positions[times.argmax()]} is in two lists, one of them to train on")
        absent = np.setdiff1d(positions, place)
        if len(absent):
            need = "test images need a protocol that tests on the clients' own parts"
            raise ValueError(f"position {absent[0]} is not among the {len(place)} images of the run: {need}")
    order, rng, parts = np.argsort(place), generator(0, "split"), Split()
    for held_out, kept in zip(test or [tested] * len(train), train, strict=True):
        positions = np.concatenate([held_out, rng.permutation(kept)])
        parts.append(order[np.searchsorted(place, positions, sorter=order)])
    parts.num_test = [len(positions) for positions in test] or None
    return parts


PARTITIONS["file"] = (file, "file:PATH, such as file:split.json", {"": ("path", str)}, "place")


def read_split(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The lists of a split file, int64, `train` of K clients and `test` of as many, or of none."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            counts = {part: sum(name.startswith(f"{part}_") for name in file) for part in PARTS}
            content = {part: [file[f"{part}_{k}"] for k in range(count)] for part, count in counts.items()}
    else:
        content = json.loads(path.read_text(encoding="utf-8"))
        content = content if isinstance(content, dict) else {"train": content}
    train, test = ([np.fromiter(map(index, each), np.int64) for each in content.get(part, ())] for part in PARTS)
    if not sum(map(len, train)) or len(test) not in (0, len(train)):
        raise ValueError(f"{len(train)} lists to train on, {len(test)} to test on")
    return train, test


def lists_of(clients: np.ndarray, test: np.ndarray) -> Arrays:
    """The lists of a split file, by name, that give each image to its client, `clients` `[N]`, to `test` on or not."""
    return {
        f"{part}_{client}": np.flatnonzero((clients == client) & (test == (part == "test")))
        for part in PARTS
        for client in range(clients.max() + 1)
    }
