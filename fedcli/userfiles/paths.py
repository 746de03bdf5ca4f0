"""How a user's file is named: `./file.py:NAME` in an option."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedcli.errors import UserError

# A part in a user's file. Commas separate several parts, so no path has one. Whatever asks whether a text names a file
# asks this, so that what `trust_files` does not see is not opened either.
_FROM_FILE = re.compile(r"([^,]*\.py)(?::([^,]+))?", re.DOTALL)


def is_from_file(text: str) -> bool:
    """Whether a text is `./file.py:NAME`, a part in a user's file, or `./file.py` alone."""
    return _FROM_FILE.fullmatch(text) is not None


class UserPart(NamedTuple):
    """Where a part of the user's own is."""

    path: str  # absolute, of the file
    name: str  # in it; may be empty


def path_and_name(text: str) -> UserPart:
    """The absolute path and the name in `./file.py:NAME`.

    Raises:
        UserError: No file can have this path, or the absolute one has a comma.
    """
    match = _FROM_FILE.fullmatch(text)
    assert match is not None  # `is_from_file` has said so
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
    return UserPart(full, name or "")


def _is_text(path: str) -> bool:
    """Whether a path can stand in a record; Python reads bytes that are no UTF-8 as what no encoding writes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def short_name(text: str) -> str:
    """A part's name without a path: `NAME` of `./file.py:NAME`, the text itself of others."""
    if not is_from_file(text):
        return text
    return path_and_name(text).name or Path(text).stem


def absolute(text: str) -> str:
    """The text with absolute paths of user's files, in each of its parts between commas."""
    if text.startswith("file:"):  # a partition
        return f"file:{os.path.realpath(text.removeprefix('file:'))}"
    return replace_paths(text, {})


def seen_from(folder: Path, value: Any) -> Any:
    """An option's value with absolute paths, as a file in a folder means them: what is there comes before the rest."""
    if not isinstance(value, str):
        return value
    if value.startswith("file:"):
        beside = folder / value.removeprefix("file:")
        return absolute(f"file:{beside}" if beside.is_file() else value)
    parts = []
    for part in value.split(","):
        match = _FROM_FILE.fullmatch(part)
        if match is not None and (folder / match[1]).is_file():
            part = str(folder / part)
        parts.append(part)
    return absolute(",".join(parts))


def own_paths(values: Iterable[Any]) -> list[str]:
    """The absolute paths of the user's files in a run's method and options, each once."""
    parts: list[str] = []
    for value in values:
        if isinstance(value, str):
            parts += value.split(",")
    paths = [path_and_name(part).path for part in parts if is_from_file(part)]
    return list(dict.fromkeys(paths))


def replace_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """An option's value with absolute paths of user's files, or in their place what `paths` says."""
    if not isinstance(value, str):
        return value
    parts = []
    for part in value.split(","):
        if is_from_file(part):
            path, name = path_and_name(part)
            new_path = paths.get(path, path)
            part = f"{new_path}:{name}" if name else new_path
        parts.append(part)
    return ",".join(parts)
