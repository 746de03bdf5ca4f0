"""The one exception that a user's mistake raises, and the wording of "did you mean"."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType


def printable(text: object) -> str:
    """A text for a terminal: what would move the cursor, colour or begin a line is written as `\\x1b`."""
    return "".join(
        one if one.isprintable() or one == "\u00a0" else one.encode("unicode_escape", "surrogatepass").decode()
        for one in str(text)
    )


class UserError(Exception):
    """A mistake of the user's: one line that says what is wrong, what was given, what is allowed and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


def needed(module: str, what: str, extra: str) -> ModuleType:
    """Imports a module that only some users have; `what` needs it, and it comes with the optional part `extra`.

    Raises:
        UserError: If it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what} needs a package that is not installed (got {error}); it comes with an optional part; run "
            f"pip install 'fedcli[{extra}]'."
        ) from error


def nearest(name: str, known: Iterable[str], number: int = 5) -> str:
    """The known names that are most like a name, as a list with commas."""
    return ", ".join(get_close_matches(name, list(known), number, cutoff=0))


def unknown(kind: str, name: str, known: Iterable[str], remedy: str) -> UserError:
    """An error for a name that is not known, with the nearest known one.

    Args:
        kind: What the name stands for, for example "method".
        name: What was given.
        known: The names that would have been right.
        remedy: A sentence that says where to see them all.

    Returns:
        The exception, to be raised by the caller.
    """
    near = get_close_matches(name, list(known), n=3, cutoff=0.5)
    near.sort(key=lambda other: sorted(other) != sorted(name))  # two letters that changed places come first
    guess = f"did you mean '{near[0]}'? " if near else ""
    return UserError(f"unknown {kind} '{name}'; {guess}{remedy}")
