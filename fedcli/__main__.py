"""`python -m fedcli` is the program `fedcli`."""

import sys

from fedcli.runs.signals import interrupt_on_signals, interruptions


def main() -> None:
    """Run the program; a signal ends it in a line at any moment, also while its modules are imported."""
    interrupt_on_signals()
    try:
        from fedcli.cli.app import main as run

        run()
    except BaseException:
        if not interruptions:
            raise
        sys.stderr.write("interrupted.\n")  # whatever a library has made of it
        sys.exit(interruptions[0].code)


if __name__ == "__main__":
    main()
