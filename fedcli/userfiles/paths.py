"""How a user's file is named: `./file.py:NAME` in an option."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedcli.errors import UserError

# A reference to a user's file. Commas separate several, so no path has one. Whatever asks whether a text names a file
# asks this, so that what `trust_files` does not see is not opened either.
_USER_FILE = re.compile(r"([^,]*\.py)(?::([^,]+))?", re.DOTALL)

_LISTED = "file:"  # begins a partition that a file of data lists


def names_user_file(text: str) -> bool:
    """Whether a text is `./file.py:NAME`, something in a user's file, or `./file.py` alone."""
    return _USER_FILE.fullmatch(text) is not None


class UserReference(NamedTuple):
    """What `./file.py:NAME` names."""

    path: str  # absolute, of the file
    name: str  # in it; may be empty


def path_and_name(text: str) -> UserReference:
    """Returns the absolute path and the name in `./file.py:NAME`.

    Raises:
        UserError: No file can have this path, or the absolute one has a comma.
    """
    match = _USER_FILE.fullmatch(text)
    assert match is not None  # `names_user_file` has said so
    path, name = match.groups()
    if "\0" in path:
        raise UserError(f"the path {path!r} is none (got a zero byte in it); give the path of a Python file.")
    full = os.path.realpath(path)
    if not _is_text(full):
        raise UserError(
            f"the file {full!r} cannot be named (got a path that is no UTF-8); move it, or rename its folder."
        )
    if "," in full:
        raise UserError(f"the file '{full}' cannot be named (got a comma in its path); move it, or rename its folder.")
    return UserReference(full, name or "")


def _is_text(path: str) -> bool:
    """Whether a path can stand in a record; Python reads bytes that are no UTF-8 as what no encoding writes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def short_name(text: str) -> str:
    """Returns a name without a path: `NAME` of `./file.py:NAME`, the text itself of others."""
    if not names_user_file(text):
        return text
    return path_and_name(text).name or Path(text).stem


def make_absolute(value: Any) -> Any:
    """Returns an option's value with absolute paths of user's files, and of the file that lists a partition."""
    if value == _LISTED:  # no path, which whoever reads the partition refuses
        return value
    if isinstance(value, str) and value.startswith(_LISTED):
        return f"{_LISTED}{os.path.realpath(value.removeprefix(_LISTED))}"
    return _map_user_files(value, lambda path: path)


def resolve_beside(folder: Path, value: Any) -> Any:
    """Returns an option's value as a file in a folder means it, with absolute paths.

    Where a protocol in `mine/protocols.py` says `nets.py:tiny`, that is `mine/nets.py:tiny`, whatever the working
    directory is. Only if the folder `mine` has no `nets.py`, it is the one of the working directory.
    """
    if not isinstance(value, str):
        return value
    if value.startswith(_LISTED):
        beside = folder / value.removeprefix(_LISTED)
        return make_absolute(f"{_LISTED}{beside}" if beside.is_file() else value)
    resolved = []
    for text in value.split(","):
        match = _USER_FILE.fullmatch(text)
        is_beside = match is not None and (folder / match[1]).is_file()
        resolved.append(str(folder / text) if is_beside else text)
    return make_absolute(",".join(resolved))


def user_paths(values: Iterable[Any]) -> list[str]:
    """Returns the absolute paths of the user's files in a run's method and options, each once."""
    texts: list[str] = []
    for value in values:
        if isinstance(value, str):
            texts += value.split(",")
    paths = [path_and_name(text).path for text in texts if names_user_file(text)]
    return list(dict.fromkeys(paths))


def replace_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """Returns an option's value with absolute paths of user's files, or in their place what `paths` says."""
    return _map_user_files(value, lambda path: paths.get(path, path))


def _map_user_files(value: Any, new_path: Callable[[str], str]) -> Any:
    """An option's value with `new_path` of the absolute path of each user's file, also of several between commas."""
    if not isinstance(value, str):
        return value
    replaced = []
    for text in value.split(","):
        if names_user_file(text):
            path, name = path_and_name(text)
            text = f"{new_path(path)}:{name}" if name else new_path(path)
        replaced.append(text)
    return ",".join(replaced)
