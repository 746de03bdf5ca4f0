"""The time limit of a session: its runs stop early enough for what comes after them, and late ones are interrupted."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from fedcli.cli.options import parse_seconds
from fedcli.runs.signals import ENDING_SIGNALS, interrupt_on_signals, set_time_limit, time_left

RESERVE = 45  # seconds of --time for last checkpoints, `fedcli quality` and the archive
OVERTIME = 15  # seconds after which a round that did not end in time is interrupted
PACKING = 10  # seconds of the reserve for the archive


def start_time_limit(time: str) -> None:
    """Starts the time of `--time`, of which runs have all but `RESERVE`.

    Raises:
        UserError: If it is no time.
    """
    set_time_limit(parse_seconds(time, "--time") - RESERVE)


def seconds_to_measure() -> float | None:
    """Returns how long `fedcli quality` may take from now on, so that `PACKING` is left; None without a time limit."""
    if time_left() == math.inf:
        return None
    return max(1.0, time_left() + RESERVE - PACKING)


@contextmanager
def late_runs_interrupted() -> Iterator[None]:
    """Interrupts the runs in its block that go on for `OVERTIME` seconds after their time is over.

    An alarm does it as SIGTERM would, which interrupts them at any time.
    """
    interrupt_on_signals((*ENDING_SIGNALS, signal.SIGALRM))
    if time_left() < math.inf:
        seconds = max(1, time_left() + OVERTIME)
        signal.alarm(math.ceil(seconds))
    try:
        yield
    finally:
        signal.alarm(0)
