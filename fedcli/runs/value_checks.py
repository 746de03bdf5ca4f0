"""Checks of values from a file: each refuses a value that is not what it must be, and says where it stands."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedcli.errors import UserError

Check = Callable[[Any], None]  # raises `Fault` for a value that it refuses


class Fault(Exception):
    """What is wrong with a value; `place` says where it stands, from the inside to the outside."""

    def __init__(self, text: str):
        super().__init__(text)
        self.place: list[str] = []

    def __str__(self) -> str:
        key = ".".join(reversed(self.place))
        return f"'{key}' {super().__str__()}" if key else f"it {super().__str__()}"


def wrong(must_be: str, value: Any) -> Fault:
    """Returns a fault, to be raised by the caller, of a value that is not what it must be."""
    return Fault(f"must be {must_be} (got {value!r:.80})")


class Place:
    """Says of a fault inside that it is in this place, a part of what is checked.

    A class, since by `contextmanager` reading a record would take half as long again.
    """

    __slots__ = ("place",)

    def __init__(self, place: object):
        """Takes the name or the index of a part."""
        self.place = place

    def __enter__(self) -> None:
        """Nothing is needed before."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Adds the place to a fault, which goes on."""
        if isinstance(error, Fault):
            error.place.append(str(self.place))


LARGEST_WHOLE = 2**63 - 1  # of whole numbers elsewhere


def whole(low: int = 0, high: int = LARGEST_WHOLE) -> Check:
    """Returns the check of a whole number."""
    span = f"from {low}" if high == LARGEST_WHOLE else f"from {low} to {high}"

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise wrong(f"a whole number {span}", value)

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """Returns the check of a finite number."""
    span = ""
    if math.isfinite(low):
        span += f" from {low:g}"
    if math.isfinite(high):
        span += f" to {high:g}"

    def check(value: Any) -> None:
        is_number = type(value) is float or (type(value) is int and abs(value) <= LARGEST_WHOLE)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise wrong(f"a finite number{span}", value)

    return check


def text(value: Any) -> None:
    """A text that can be written."""
    if type(value) is not str or "\0" in value or value.encode(errors="replace").decode() != value:
        raise wrong("a text", value)


def one_of(*allowed: Any) -> Check:
    """Returns the check of one of some values, of their type."""

    def check(value: Any) -> None:
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise wrong(" or ".join(map(str, allowed)), value)

    return check


def optional(of_value: Check) -> Check:
    """Returns the check of a value that may be missing."""

    def check(value: Any) -> None:
        if value is not None:
            of_value(value)

    return check


def each(of_entry: Check, length: int | None = None) -> Check:
    """Returns the check of a list of entries."""

    def check(value: Any) -> None:
        if length is None and type(value) is not list:
            raise wrong("a list", value)
        if length is not None and (type(value) is not list or len(value) != length):
            raise wrong(f"a list of {length}", value)
        for index, entry in enumerate(value):
            with Place(index):
                of_entry(entry)

    return check


def by_name(of_value: Check) -> Check:
    """Returns the check of values by names of any kind."""

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise wrong("values by name", value)
        for name, entry in value.items():
            with Place(name):
                text(name)
                of_value(entry)

    return check


def mapping(required: Mapping[str, Check], allowed: Mapping[str, Check] | None = None) -> Check:
    """Returns the check of values by name: those that there must be, and others that there may be."""
    checks = {**required, **(allowed or {})}

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise wrong("parts by name", value)
        lacking = [name for name in required if name not in value]
        if lacking:
            raise Fault(f"lacks {', '.join(lacking)}")
        for name, entry in value.items():
            if name in checks:
                with Place(name):
                    checks[name](entry)

    return check


def refuse_wrong(of_value: Check, value: Any) -> None:
    """Refuses a value.

    Raises:
        UserError: Says which part of it is wrong, and what it must be.
    """
    try:
        of_value(value)
    except Fault as fault:
        raise UserError(str(fault)) from None
