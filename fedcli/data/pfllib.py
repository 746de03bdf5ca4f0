"""Reads images of clients as PFLlib's generators write them, a pickle for each client, of which nothing is run."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedcli.data.image_arrays import SPLITS, Columns, join_rows
from fedcli.data.source import Source
from fedcli.reading import reading


def read_pfllib(source: Source) -> Columns:
    """Returns the columns of all clients' images, of `train/*.npz` and then `test/*.npz`, with their `client` `[N]`.

    Raises:
        UserError: Files are missing or are none of PFLlib's.
    """
    # Not hidden ones, as macOS leaves: `source.names` has none of these.
    num_clients = sum(re.fullmatch(r"train/[^/]*\.npz", name) is not None for name in source.names)
    read = {f"{split}/{client}.npz" for split in SPLITS for client in range(num_clients)}
    for name in source.names:
        if re.fullmatch(r"(train|test)/[^/]*\.npz", name) and name not in read:
            raise ValueError(f"'{name}' is of none of the {num_clients} clients in train")
    files: list[Columns] = []
    for split in SPLITS:
        for client in range(num_clients):
            path = source.folder / split / f"{client}.npz"
            with reading(path, "an image set's file as PFLlib's generate_*.py write it, a dict of arrays x and y"):
                content = _read_pickled_dict(path)
                x = _stored_array(content["x"])
                y = _stored_array(content["y"])
                if len(x) != len(y):
                    raise ValueError(f"{len(x)} images, {len(y)} labels")
                client_of_image = np.full(len(y), client)
                is_test = np.full(len(y), split == "test")
                files.append({"x": x, "y": y, "client": client_of_image, "test": is_test})
    return join_rows(files)


def _read_pickled_dict(path: Path) -> dict[str, Any]:
    """Returns the dict that an `.npz` file holds pickled, as its only array `data`."""
    with zipfile.ZipFile(path) as archive, archive.open("data.npy") as member:
        np.lib.format.read_magic(member)
        np.lib.format.read_array_header_1_0(member)
        (content,) = _Unpickler(member).load().state[4]
    return content


class _Stored:
    """The arguments and the state of an array or a dtype in a pickle; nothing is made of them."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: tuple) -> None:
        self.state = state


def _stored_array(stored: _Stored) -> np.ndarray:
    """Returns the array of numbers that a pickle describes by shape, dtype, order and bytes; NumPy refuses objects."""
    _, shape, dtype, is_fortran, content = stored.state
    number_type, *_ = dtype.arguments  # as "f8"
    _, byte_order, *_ = dtype.state
    values = np.frombuffer(content, byte_order + number_type)
    return values.reshape(shape, order="F" if is_fortran else "C")


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of numbers, texts, dicts and arrays, and runs nothing that it says.

    A pickle may have any function called. Here the three that an array needs stand for `_Stored`; others are refused.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" or name not in ("_reconstruct", "ndarray", "dtype"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return _Stored
