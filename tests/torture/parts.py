"""The parts of nested lists and dictionaries, of which records and states consist, and other values for them."""

from collections.abc import Iterator
from typing import Any

VALUES = (
    None, True, False, 0, 1, -1, -0.5, 1.5, 1e300, 10**30, float("nan"), float("inf"), "", "text", "\ud800", "\0", "1",
    [], {}, [0], {"a": 0}, [[0]], "x" * 300,
)  # fmt: skip


def text_places(value: Any) -> list[tuple[Any, Any]]:
    """Every dictionary or list inside a value, with each of its keys that has a text."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, part in entries:
        if isinstance(part, str):
            found.append((value, key))
        elif isinstance(part, dict | list):
            found += text_places(part)
    return found


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths to all parts of a value; of a list with more than four entries the first and the last alone."""
    keys: list = []
    if isinstance(value, dict):
        keys = [*value]
    elif isinstance(value, list):
        keys = [*range(len(value))] if len(value) <= 4 else [0, len(value) - 1]
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def part_at(parts: Any, path: tuple) -> Any:
    """The part of nested lists and dicts at a path."""
    for key in path:
        parts = parts[key]
    return parts
