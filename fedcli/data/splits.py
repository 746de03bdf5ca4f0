"""Divisions made elsewhere: lists of positions in a file, as a partition.

Positions count the training images from 0 in the order of the data set's original files, and then the test images.
"""

import json
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcli.core.draws import generator
from fedcli.core.partition import Option, PartitionKind
from fedcli.core.parts import ListedParts
from fedcli.data.image_arrays import PARTS, Arrays
from fedcli.data.reading import reading

CONTENT = (
    'lists in JSON, {"train": [[0, 3], [2]], "test": [[5], [4]]}, or train_0, train_1, ..., test_0, ... in an .npz'
)


def from_file(labels: np.ndarray, num_clients: int, place: np.ndarray, seed: int, path: str) -> ListedParts:
    """Gives every client the examples that a file lists, by their `place` `[N]` in the files that the data came from.

    They are mixed by a fixed seed. Clients may share images to test on, and no others.
    """
    with reading(path, CONTENT):
        lists = read_split(Path(path))
        if len(lists.train) != num_clients:
            count = len(lists.train)
            raise ValueError(f"it has lists of {count} clients, not {num_clients}: use --num-clients {count}")
        tested = np.unique(np.concatenate([*lists.test, np.empty(0, np.int64)]))
        positions, times = np.unique(np.concatenate([*lists.train, tested]), return_counts=True)
        if (times > 1).any():
            raise ValueError(f"position {positions[times.argmax()]} is in two lists, one of them to train on")
        absent = np.setdiff1d(positions, place)
        if len(absent):
            need = "test images need a protocol that tests on the clients' own parts"
            raise ValueError(f"position {absent[0]} is not among the {len(place)} images of the run: {need}")
    order = np.argsort(place)
    rng = generator(0, "split")
    tests = lists.test or [tested] * num_clients
    parts = ListedParts()
    for own_test, own_train in zip(tests, lists.train, strict=True):
        positions = np.concatenate([own_test, rng.permutation(own_train)])
        parts.append(order[np.searchsorted(place, positions, sorter=order)])
    if lists.test:
        parts.num_test = [len(own_test) for own_test in lists.test]
    return parts


FROM_FILE = PartitionKind(
    from_file, "file:PATH, such as file:split.json", options=(Option("", "path", str),), needs="place"
)


class Lists(NamedTuple):
    """The lists of a split file, int64, one for each client."""

    train: list[np.ndarray]
    test: list[np.ndarray]  # none where nothing is said of tests


def read_split(path: Path) -> Lists:
    """The lists of a split file."""
    content: dict[str, list] = {}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            for part in PARTS:
                count = sum(name.startswith(f"{part}_") for name in arrays)
                content[part] = [arrays[f"{part}_{client}"] for client in range(count)]
    else:
        read = json.loads(path.read_text(encoding="utf-8"))
        content = read if isinstance(read, dict) else {"train": read}
    train = [_positions(listed) for listed in content.get("train", ())]
    test = [_positions(listed) for listed in content.get("test", ())]
    if not sum(map(len, train)) or len(test) not in (0, len(train)):
        raise ValueError(f"{len(train)} lists to train on, {len(test)} to test on")
    return Lists(train, test)


def _positions(listed: Iterable) -> np.ndarray:
    """Whole numbers as int64; anything else is refused."""
    return np.fromiter(map(index, listed), np.int64)


def lists_of(clients: np.ndarray, test: np.ndarray) -> Arrays:
    """The lists of a split file, by name, that give each image to its client, `clients` `[N]`, to `test` on or not."""
    lists = {}
    for part in PARTS:
        is_in_part = test == (part == "test")
        for client in range(clients.max() + 1):
            lists[f"{part}_{client}"] = np.flatnonzero((clients == client) & is_in_part)
    return lists
