"""Finds parts of nested lists and dictionaries, of which records and states consist; has other values for them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

VALUES = (
    None, True, False, 0, 1, -1, -0.5, 1.5, 1e300, 10**30, float("nan"), float("inf"), "", "text", "\ud800", "\0", "1",
    [], {}, [0], {"a": 0}, [[0]], "x" * 300,
)  # fmt: skip


class Entry(NamedTuple):
    """A place in nested lists and dictionaries."""

    container: Any  # the list or dictionary
    key: Any  # the part's key or index there


def text_entries(container: Any) -> list[Entry]:
    """Returns the entries of all texts inside a list or a dictionary."""
    keys = container if isinstance(container, dict) else range(len(container))
    entries = []
    for key in keys:
        part = container[key]
        if isinstance(part, str):
            entries.append(Entry(container, key))
        elif isinstance(part, dict | list):
            entries += text_entries(part)
    return entries


def paths_in(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Returns the paths to all parts of a value, each a tuple of keys.

    Of a list with more than four entries, only the first and the last one are taken.
    """
    keys: list = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list) and len(value) <= 4:
        keys = list(range(len(value)))
    elif isinstance(value, list):
        keys = [0, len(value) - 1]
    for key in keys:
        yield (*path, key)
        yield from paths_in(value[key], (*path, key))


def part_at(parts: Any, path: tuple) -> Any:
    """Returns the part of nested lists and dictionaries at a path."""
    for key in path:
        parts = parts[key]
    return parts


def entry_at(parts: Any, path: tuple) -> Entry:
    """Returns the entry of the part at a path, at which another part can be put."""
    return Entry(part_at(parts, path[:-1]), path[-1])
