"""The files that data sets are kept in: an `.npz` of a set's `image_arrays.canonical_arrays`, by its name."""

import os
import re
import time
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from fedcli.data.catalog import BUILT_IN
from fedcli.data.image_arrays import Arrays
from fedcli.errors import UserError
from fedcli.files import partials, write_atomically

DAY = 86_400  # seconds, longer than it takes to write a file
_NAME = re.compile("[a-z0-9][a-z0-9-]*")


def is_name(text: str) -> bool:
    """Whether a text can be the name of a data set, here or elsewhere."""
    return _NAME.fullmatch(text) is not None


def cache_folder() -> Path:
    """Where the data sets are kept: `$FEDCLI_DATA`, or `~/.cache/fedcli`."""
    # `expanduser` leaves ~ where a user has no home, as in a container.
    return Path(os.path.expanduser(os.environ.get("FEDCLI_DATA") or "~/.cache/fedcli"))


def cache_file(name: str) -> Path:
    """Returns the file of a set, whether it is there or not."""
    return cache_folder() / f"{name}.npz"


def is_in_cache(name: str) -> bool:
    """Whether a set comes from the cache."""
    return name not in BUILT_IN and os.path.isfile(cache_file(name))  # also False where it may not be looked for


def names_in_cache() -> list[str]:
    """Returns the names of the sets that have a file, in order."""
    folder = cache_folder()
    names = []
    for file in sorted(glob("*.npz", root_dir=folder)):
        name, _ = os.path.splitext(file)
        if (folder / file).is_file() and is_name(name):
            names.append(name)
    return names


def write_to_cache(name: str, arrays: Arrays) -> Path:
    """Writes the file of a set, and returns its path.

    Raises:
        UserError: It cannot be written.
    """
    path = cache_file(name)
    if path.parts[0] == "~":
        raise UserError(f"the data set cannot be kept as '{path}' (got no home folder); set FEDCLI_DATA to a folder.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_partials(path.parent)
        named: dict[str, Any] = dict(arrays)  # no array has the name of an option of NumPy's
        write_atomically(path, lambda temporary: np.savez(temporary, **named))
    except OSError as error:
        fault = f"the data set cannot be kept as '{path}' ({error.strerror})"
        raise UserError(f"{fault}; set FEDCLI_DATA to another folder.") from error
    path.with_suffix(".split.npz").unlink(missing_ok=True)  # where earlier versions kept the lists of clients
    return path


def _remove_partials(folder: Path) -> None:
    """Removes what processes left that were killed while they wrote."""
    for file in partials(folder):
        with suppress(FileNotFoundError):  # another process has just ended it
            if time.time() - file.stat().st_mtime > DAY:
                file.unlink()
