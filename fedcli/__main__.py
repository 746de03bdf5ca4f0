"""`python -m fedcli` is the program `fedcli`."""

import atexit
import os
import sys

from fedcli.runs.signals import interrupt_on_signals, interruptions


def main() -> None:
    """Run a command; a signal ends it in a line at any moment, also while its modules are imported.

    Raises:
        SystemExit: At its end, with its exit code.
    """
    interrupt_on_signals()
    try:
        from fedcli.cli.app import main as run

        run()
    except BaseException:
        if not interruptions:
            raise
        sys.stderr.write("interrupted.\n")  # whatever a library has made of it
        sys.exit(interruptions[0].code)


def program() -> None:
    """Run a command as a process of its own, which ends when the command has."""
    exit_codes: list[int] = []
    atexit.register(_end_at_once, exit_codes)  # the first to be registered is the last to be called
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            exit_codes.append(end.code)
        raise


def _end_at_once(exit_codes: list[int]) -> None:
    """End without the half second in which Python takes PyTorch apart; an error of ours, which has no code, as ever."""
    if not exit_codes:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_codes[0])


if __name__ == "__main__":
    program()
