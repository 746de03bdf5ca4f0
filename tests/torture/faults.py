"""Finds what goes wrong in a call, and in the trials of a kind."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fedcli.errors import UserError


class Attempt(NamedTuple):
    """How a call ended."""

    value: Any  # what it returned; None where it was refused or failed
    fault: str | None  # what is wrong with this end; None where it returned, or was refused as a user should be


def attempt(call: Callable[[], object], description: str, *, must_say: tuple[str, ...] = ()) -> Attempt:
    """Calls a function, which may refuse by a `UserError` of one line that says all of these words."""
    try:
        value = call()
    except UserError as error:
        return Attempt(None, fault_of_refusal(str(error), description, must_say))
    except Exception as error:
        return Attempt(None, f"{description}: {type(error).__name__}: {error}")
    return Attempt(value, None)


def fault_of_refusal(message: str, description: str, must_say: tuple[str, ...]) -> str | None:
    """Returns what is wrong with the message of a refusal; None where it is as it should be."""
    if "\n" in message:
        return f"{description}: a refusal of several lines"
    if any(word not in message for word in must_say):
        return f"{description}: {message}"
    return None


def faults_of(trial: Callable[[int], str | None], count: int) -> list[str]:
    """Does the first `count` trials of a kind; returns their faults."""
    return found_faults(trial(number) for number in range(count))


def found_faults(faults: Iterable[str | None]) -> list[str]:
    """Returns the faults among the results of trials, which are None where nothing went wrong."""
    return [fault for fault in faults if fault is not None]
