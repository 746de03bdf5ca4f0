"""Divisions made elsewhere: lists of positions in a file, as a partition, and the folders that PFLlib writes.

Positions count the training images from 0 in the order of the files that a data set came from, the official ones for a
set known by name, and then the test images.
"""

import json
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcli.core.batches import generator
from fedcli.core.partition import FlagParameter, Labels, partitioner
from fedcli.data.files import PARTS, Arrays, checked, converted, one_line
from fedcli.errors import UserError

FORMS = (
    'it must be JSON, {"train": [[0, 3], [2]], "test": [[5], [4, 6]]} or a list of lists, or .npz with train_0, '
    "train_1, ... and perhaps test_0, ..."
)


class Split(list[np.ndarray]):
    """Positions of each client's examples; where the file names them, its own test part comes first.

    Attributes:
        num_test: Of each client, how many examples that part has; None where the file names none.
    """

    num_test: list[int] | None = None


@partitioner({"": FlagParameter("path", "file", "file:split.json", str, None)}, needs="place")
def file(labels: Labels, num_clients: int, place: Labels, seed: int, path: str) -> Split:
    """Gives every client the examples that a file lists, mixed by a fixed seed; `seed` changes nothing.

    `place` `[N]` is where each example stands in the files that the data came from.
    """
    train, test = read_split(Path(path))
    if len(train) != num_clients:
        raise UserError(
            f"the split '{path}' has another number of clients than --num-clients (got {len(train)} lists, "
            f"{num_clients} clients); use --num-clients {len(train)}."
        )
    place = np.asarray(place)
    positions = np.concatenate([*train, *test])
    absent = positions[~np.isin(positions, place)]
    if len(absent):
        raise UserError(
            f"the split '{path}' names an image that the run does not have (got position {absent[0]}, of "
            f"{len(place)} images); positions of test images, after those of the training images, need a protocol "
            "that tests on the clients' own parts, and no split goes with --train-examples; mend the lists, or "
            "choose another protocol."
        )
    testing = test or [np.empty(0, np.int64)] * len(train)
    tested = np.unique(np.concatenate(testing))  # clients may share images to test on
    positions, times = np.unique(np.concatenate([*train, tested]), return_counts=True)
    if (times > 1).any():
        raise UserError(
            f"the split '{path}' uses an image twice (got position {positions[times.argmax()]}); one that is trained "
            "on may be in no other list; mend the lists."
        )
    rank = np.empty(place.max() + 1, np.int64)  # of the example at each position
    rank[place] = np.arange(len(place))
    rng = generator(0, "split")
    parts = Split(
        rank[np.concatenate([held, rng.permutation(kept)])] for held, kept in zip(testing, train, strict=True)
    )
    parts.num_test = [len(positions) for positions in test] or None
    return parts


def read_split(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The lists of a split file, int64, `train` of K clients and `test` of as many, or of none.

    Raises:
        UserError: There is no such file, or it is in none of `FORMS`.
    """
    if not path.is_file():
        raise UserError(f"there is no split at '{path}'; {FORMS}; give the path of such a file.")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                clients = {part: {} for part in PARTS}
                for name in arrays.files:
                    part, _, number = name.partition("_")
                    clients[part][number] = arrays[name]
        else:
            clients = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(clients, dict) or "train" not in clients:
                clients = {"train": clients}
        train, test = (_lists(clients.get(part, ())) for part in PARTS)
        if not train or not sum(map(len, train)) or (test and len(test) != len(train)):
            raise ValueError(f"{len(train)} lists to train on, {len(test)} to test on")
    except Exception as error:  # of zipfile, zlib, numpy and json there are about ten kinds
        raise UserError(f"'{path}' is not a split (got {one_line(error)}); {FORMS}; write it so.") from error
    return train, test


def _lists(clients: Mapping[str, Any] | Sequence[Any]) -> list[np.ndarray]:
    """The lists of the clients, which may be numbered from 0 by name."""
    if isinstance(clients, Mapping):
        clients = [clients[str(number)] for number in range(len(clients))]
    lists = []
    for number, positions in enumerate(clients):
        positions = np.asarray(positions) if len(positions) else np.empty(0, np.int64)
        if positions.ndim != 1 or not np.issubdtype(positions.dtype, np.integer):
            raise ValueError(f"{positions.dtype} of {positions.ndim} dimensions for client {number}")
        lists.append(positions.astype(np.int64))
    return lists


# PFLlib's folders: train/K.npz and test/K.npz, each a pickled dict of images x and labels y


def read_pfllib(folder: Path) -> tuple[Arrays, dict[str, np.ndarray]]:
    """The images of all clients, one client after the other, and the split that gives each its own.

    Pixels are those of before PFLlib's normalisation, which maps [0, 1] to [-1, 1], as 8 bits.

    Args:
        folder: `DIR` with `train/0.npz`, `test/0.npz` and so on, as PFLlib's `generate_*.py` write it.

    Raises:
        UserError: Files are missing or not in that form.
    """
    number = len(list(folder.glob("train/*.npz")))
    clients = {part: [_client(folder / part / f"{k}.npz") for k in range(number)] for part in PARTS}
    if not number:
        raise UserError(
            f"'{folder}' has no train/0.npz (got no client); it must be a folder that PFLlib's generate_*.py wrote, as "
            "dataset/FashionMNIST; give that one."
        )
    arrays: Arrays = {}
    split, first = {}, 0
    for part in PARTS:
        images, labels = zip(*clients[part], strict=True)
        if len({image.shape[1:] for image in images}) > 1:
            raise UserError(f"the images in '{folder}' differ in size (got several); generate the folder again.")
        arrays |= {f"x_{part}": np.concatenate(images), f"y_{part}": np.concatenate(labels)}
        for client, client_labels in enumerate(labels):
            split[f"{part}_{client}"] = np.arange(first, first + len(client_labels))
            first += len(client_labels)
    return checked(converted(arrays, folder), folder), split


def _client(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one client's file."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as member:
            np.lib.format.read_magic(member)
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            if shape or not dtype.hasobject:
                raise ValueError(f"{dtype} of shape {shape} in the place of a dict")
            content = _Unpickler(member).load().array.item()
        images, labels = content["x"].array, content["y"].array
        if labels.shape != images.shape[:1]:
            raise ValueError(f"{len(images)} images, labels of shape {labels.shape}")
    except Exception as error:  # of zipfile, zlib, numpy and pickle there are about ten kinds
        raise UserError(
            f"'{path}' cannot be read ({one_line(error)}); it must be an image set's file as PFLlib writes it, a dict "
            "of arrays x and y; generate it again."
        ) from error
    return images, labels


class _Type:
    """A dtype in a pickle: one number, or an object where the array holds a dict."""

    def __init__(self, text: str, *_: Any):
        if not re.fullmatch(r"b1|[iuf][1248]|O8?", text):
            raise pickle.UnpicklingError(f"dtype {text}")
        self.text = text

    def __setstate__(self, state: tuple) -> None:
        self.text = {"<": "<", ">": ">"}.get(state[1], "") + self.text


class _Array:
    """An array in a pickle, made of its shape, dtype and bytes alone."""

    def __init__(self, *_: Any):
        self.array = np.empty(0)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, by_column, content = state
        if "O" in dtype.text:
            self.array = np.empty((), object)
            (self.array[()],) = content
            return
        order = "F" if by_column else "C"
        self.array = np.frombuffer(content, dtype.text).reshape(shape, order=order)


class _Unpickler(pickle.Unpickler):
    """Reads a pickle that holds numbers, texts, dicts and arrays only.

    A pickle may name any function and have it called. The three names that an array needs stand for classes of this
    module here, every other one is refused, and so nothing that the file says is run, not even NumPy's own code.
    """

    def find_class(self, module: str, name: str) -> Any:
        classes = {"_reconstruct": _Array, "ndarray": _Array, "dtype": _Type}
        if module not in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") or name not in classes:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return classes[name]
