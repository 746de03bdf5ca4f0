"""`python -m fedcli` is the program `fedcli`."""

import signal
import sys
from typing import NoReturn


def main() -> None:
    """Run the program; Control-C ends it in a line at any moment, also while its modules are imported."""
    interrupted = []

    def interrupt(number: int, frame: object) -> NoReturn:
        interrupted.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as in the background
        signal.signal(signal.SIGINT, interrupt)
    try:
        from fedcli.cli.app import main as run

        run()
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):  # Typer's, without a word
            sys.stderr.write("interrupted.\n")
        raise
    except (Exception, KeyboardInterrupt):
        if not interrupted:
            raise
        sys.stderr.write("interrupted.\n")  # whatever a module has made of it
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
