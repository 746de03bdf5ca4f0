"""The exceptions that a user meets, and the wording of "did you mean"."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType


def printable(text: object) -> str:
    """Returns a text for a terminal; what would move the cursor, colour or begin a line is written as `\\x1b`."""
    characters = []
    for character in str(text):
        is_plain = character.isprintable() or character == "\u00a0"
        characters.append(character if is_plain else repr(character)[1:-1])
    return "".join(characters)


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, at most 300 characters, or its type where it says nothing."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


class UserError(Exception):
    """A user's mistake in a line: what is wrong, what was given, what is allowed and what to do.

    It names options as the command line has them, `--num-clients`, wherever in the package it is raised. The command
    line prints it without a traceback and exits with code 2; from Python it is told in keyword arguments, see
    `fedcli.keywords`.
    """


class NonFiniteLoss(Exception):
    """A term of the objective has become infinite or NaN; the text names the round and the clients."""


def import_optional(module: str, feature: str, extra: str) -> ModuleType:
    """Imports a module that a `feature` needs and the optional part `extra` brings.

    Raises:
        UserError: It is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"{feature} needs a package (got {error}); run pip install 'fedcli[{extra}]'.") from error


def unknown(noun: str, name: str, names: Iterable[str], remedy: str, guess: str = "") -> UserError:
    """Returns an error for an unknown name, to be raised by the caller, with the one that was probably meant.

    Args:
        noun: What the name stands for, for example "method".
        name: What was given.
        names: The names that would have been right.
        remedy: A sentence that says where to see them all.
        guess: The one that was meant, if the caller knows it.
    """
    by_letters = {other.lower().lstrip("-"): other for other in names}
    nearest = get_close_matches(name.lower().lstrip("-"), by_letters, 1)
    if nearest and not guess:
        (letters,) = nearest
        guess = by_letters[letters]
    meant = f"did you mean '{guess}'? " if guess else ""
    return UserError(f"unknown {noun} '{name}'; {meant}{remedy}")
