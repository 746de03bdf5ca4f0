"""Divisions made elsewhere: lists of positions in a file, as a partition.

Positions count the training images from 0 in the order of the data set's original files, and then the test images.
"""

import json
from collections.abc import Iterable
from operator import index
from pathlib import Path

import numpy as np

from fedcli.core.batches import generator
from fedcli.core.partition import PARTITIONS, Kind, Option
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
    order = np.argsort(place)
    rng = generator(0, "split")
    held_out = test or [tested] * len(train)
    parts = Split()
    for own_test, own_train in zip(held_out, train, strict=True):
        positions = np.concatenate([own_test, rng.permutation(own_train)])
        parts.append(order[np.searchsorted(place, positions, sorter=order)])
    parts.num_test = [len(positions) for positions in test] or None
    return parts


PARTITIONS["file"] = Kind(file, "file:PATH, such as file:split.json", options=(Option("", "path", str),), needs="place")


def read_split(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The lists of a split file, int64, `train` of K clients and `test` of as many, or of none."""
    content: dict[str, list] = {}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            for part in PARTS:
                count = sum(name.startswith(f"{part}_") for name in file)
                content[part] = [file[f"{part}_{client}"] for client in range(count)]
    else:
        read = json.loads(path.read_text(encoding="utf-8"))
        content = read if isinstance(read, dict) else {"train": read}
    train = [_positions(listed) for listed in content.get("train", ())]
    test = [_positions(listed) for listed in content.get("test", ())]
    if not sum(map(len, train)) or len(test) not in (0, len(train)):
        raise ValueError(f"{len(train)} lists to train on, {len(test)} to test on")
    return train, test


def _positions(listed: Iterable) -> np.ndarray:
    """Whole numbers as int64; anything else is refused."""
    return np.fromiter(map(index, listed), np.int64)


def lists_of(clients: np.ndarray, test: np.ndarray) -> Arrays:
    """The lists of a split file, by name, that give each image to its client, `clients` `[N]`, to `test` on or not."""
    return {
        f"{part}_{client}": np.flatnonzero((clients == client) & (test == (part == "test")))
        for part in PARTS
        for client in range(clients.max() + 1)
    }
