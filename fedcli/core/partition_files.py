"""Partitions that were made elsewhere: a file lists the positions of each client's images.

Positions count the training images from 0 in the order of the data set's original files, and then the test images.
"""

import json
import re
from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcli.core.draws import generator
from fedcli.core.parts import Parts
from fedcli.reading import reading

SPLITS = ("train", "test")
LIST_NAME = re.compile(r"(train|test)_\d+")  # of a client's array in an .npz
CONTENT = (
    'lists in JSON, {"train": [[0, 3], [2]], "test": [[5], [4]]}, or train_0, train_1, ..., test_0, ... in an .npz'
)


def listed_parts(labels: np.ndarray, num_clients: int, place: np.ndarray, seed: int, path: str) -> Parts:
    """Gives every client the examples that a file lists, by their `place` `[N]` in the files that the data came from.

    They are mixed by a fixed seed. Clients may share images to test on, and no others.
    """
    with reading(path, CONTENT):
        lists = read_lists(Path(path))
        if len(lists.train) != num_clients:
            count = len(lists.train)
            raise ValueError(f"it has lists of {count} clients, not {num_clients}: use --num-clients {count}")
        for listed in (*lists.train, *lists.test):
            repeated = _find_repeated(listed)
            if len(repeated):
                raise ValueError(f"position {repeated[0]} is twice in one list")
        test_positions = np.unique(np.concatenate([*lists.test, np.empty(0, np.int64)]))
        all_listed = np.concatenate([*lists.train, test_positions])
        repeated = _find_repeated(all_listed)
        if len(repeated):
            raise ValueError(f"position {repeated[0]} is in two lists, one of them to train on")
        absent = np.setdiff1d(all_listed, place)
        if len(absent):
            need = "test images need a protocol that tests on the clients' own parts"
            raise ValueError(f"position {absent[0]} is not among the {len(place)} images of the run: {need}")
    by_place = np.argsort(place)
    rng = generator(0, "split")
    parts = []
    for client, to_train in enumerate(lists.train):
        to_test = lists.test[client] if lists.test else test_positions
        places = np.concatenate([to_test, rng.permutation(to_train)])
        parts.append(by_place[np.searchsorted(place, places, sorter=by_place)])
    num_test = [len(to_test) for to_test in lists.test] if lists.test else None
    return Parts(parts, num_test)


def _find_repeated(positions: np.ndarray) -> np.ndarray:
    """Returns the positions that are there more than once."""
    ascending = np.sort(positions)
    is_as_before = ascending[1:] == ascending[:-1]
    return ascending[1:][is_as_before]


class Lists(NamedTuple):
    """What a file lists: positions int64, an array for each client."""

    train: list[np.ndarray]
    test: list[np.ndarray]  # no arrays where nothing is said of tests


def read_lists(path: Path) -> Lists:
    """The lists of a file in JSON or an `.npz`."""
    content: dict[str, list] = {}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            # Others are of the images, where the data set's own file has the lists too.
            unread = {name for name in arrays if name.lower().startswith(SPLITS)}
            list_names = [name for name in arrays if LIST_NAME.fullmatch(name)]
            for split in SPLITS:
                count = sum(name.startswith(f"{split}_") for name in list_names)
                names = [f"{split}_{client}" for client in range(count)]
                content[split] = [arrays[name] for name in names]
                unread -= set(names)
    else:
        # Bytes, which a mark of the encoding may begin.
        read = json.loads(path.read_bytes(), object_pairs_hook=_dict_of_pairs)
        content = read if isinstance(read, dict) else {"train": read}
        unread = content.keys() - set(SPLITS)
    if unread:
        raise ValueError(f"it has the unknown name '{min(unread)}'")
    train = [_read_positions(listed) for listed in content.get("train", ())]
    test = [_read_positions(listed) for listed in content.get("test", ())]
    if not sum(map(len, train)) or len(test) not in (0, len(train)):
        raise ValueError(f"{len(train)} lists to train on, {len(test)} to test on")
    return Lists(train, test)


def _dict_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of the pairs of a JSON object; refuses a name that stands twice, of which JSON takes the last."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"it has the name '{name}' twice")
        content[name] = value
    return content


def _read_positions(listed: Iterable) -> np.ndarray:
    """Whole numbers as int64; anything else is refused, also true and false, which Python takes for 1 and 0."""
    if any(isinstance(position, bool) for position in listed):
        raise ValueError("a list has true or false in it")
    return np.fromiter(map(index, listed), np.int64)


def lists_of_clients(clients: np.ndarray, is_test: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of such a file, by name, where images `[N]` belong to `clients` and are to test on or not."""
    lists = {}
    for split in SPLITS:
        is_in_split = is_test == (split == "test")
        for client in range(clients.max() + 1):
            lists[f"{split}_{client}"] = np.flatnonzero((clients == client) & is_in_split)
    return lists
