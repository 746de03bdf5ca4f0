"""Arguments of a call in Python as the command line has them: plain numbers, and a tuple for several values."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedcli.declarations import flag_of
from fedcli.errors import UserError

MOST_BITS = 4096  # of a whole number; Python writes at most 4,300 digits


def as_list(value: Any) -> list[Any]:
    """One value or several, as a list; a text is one."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return list(value)
    return [value]


def convert_jobs(jobs: Any) -> int:
    """Returns a number of parallel runs as Python's own; refuses what is none."""
    plain = _convert_entry(jobs)
    if type(plain) is not int or plain < 1:
        raise UserError(f"--jobs must be a whole number from 1 on (got {plain!r}); leave it out for one run at a time.")
    return plain


def convert_trials(trials: Any) -> int | None:
    """Returns a number of trials as Python's own, or None; refuses what is neither."""
    plain = _convert_entry(trials)
    if plain is not None and (type(plain) is not int or plain < 1):
        raise UserError(
            f"--trials must be a whole number from 1 on (got {plain!r}); leave it out to try the smallest grid."
        )
    return plain


def spell_methods(methods: Any) -> str:
    """One method or several, as the command line has them."""
    return ",".join(map(str, as_list(methods)))


def convert_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are given, as they are typed, a tuple for several values; refuses an empty one.

    None counts as not given.
    """
    plain = {name: _convert(value) for name, value in options.items() if value is not None}
    for name, value in plain.items():
        if value == ():
            raise UserError(f"{flag_of(name)} has no value (got {options[name]!r}); give one or several.")
    return plain


def convert_method_options(method_options: Any) -> dict[str, Any]:
    """Returns the options of single methods, likewise; what are no options of a method stays, to be refused."""
    if not isinstance(method_options, Mapping):
        raise UserError(
            f"--set must have the options of each method by its name (got {method_options!r}); write "
            "set={'fedprox': {'lr': 0.1}}."
        )
    return {
        name: convert_options(options) if isinstance(options, Mapping) else options
        for name, options in method_options.items()
    }


def convert_seeds(seeds: Any) -> list[Any] | None:
    """Returns the seeds of several runs, likewise; None for those of a single one."""
    if seeds is None:
        return None
    plain = _convert(seeds)
    if isinstance(plain, str | bytes):
        raise UserError(
            f"--seeds must be numbers and no text (got {plain!r}); write seeds=[0, 1, 2] or seeds=range(3)."
        )
    if not isinstance(plain, Iterable):
        raise UserError(f"--seeds must be several (got {plain!r}); write seed={plain!r}, or seeds=range({plain!r}).")
    return list(plain)


def spell_grid(grid: Mapping[str, Any] | str | Sequence[str]) -> list[str]:
    """Returns the values to try, as `--grid` has them."""
    if not isinstance(grid, Mapping):
        return as_list(grid)
    texts = []
    for name, values in convert_options(grid).items():
        listed = values if isinstance(values, tuple) else (values,)
        texts.append(f"{name}={','.join(map(str, listed))}")
    return texts


def _convert(value: Any) -> Any:
    """Returns a number of NumPy or PyTorch as Python's, and a list, tuple, range or array as a tuple of such."""
    if hasattr(value, "tolist"):  # also of pandas
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return tuple(map(_convert_entry, value))
    return _convert_entry(value)


def _convert_entry(value: Any) -> Any:
    """One value as Python's own; refuses a whole number that is too large for a message."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise UserError(
            f"a whole number is larger than any option's (got one of {value.bit_length():,} bits); give a smaller one."
        )
    return value
