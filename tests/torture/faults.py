"""What goes wrong in a call, and in the trials of a kind."""

from collections.abc import Callable

from fedcli.errors import UserError


def fault_of(call: Callable[[], object], description: str, must_say: tuple[str, ...] = ()) -> str:
    """What is wrong with how a call ends; empty where it returns, or is refused in a line that says these words."""
    try:
        call()
    except UserError as error:
        message = str(error)
        if "\n" in message:
            return f"{description}: a refusal of several lines"
        missing = [word for word in must_say if word not in message]
        return f"{description}: {message}" if missing else ""
    except Exception as error:
        return f"{description}: {type(error).__name__}: {error}"
    return ""


def faults_of(trial: Callable[[int], str], count: int) -> list[str]:
    """What goes wrong in the first so many trials of a kind."""
    outcomes = [trial(number) for number in range(count)]
    return [fault for fault in outcomes if fault]
