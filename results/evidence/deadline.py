"""The end in time: runs stop early enough for what comes after them, and one that does not is interrupted."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from fedcli.cli.options import parse_seconds
from fedcli.runs.signals import ENDING_SIGNALS, interrupt_on_signals, set_time_limit, time_left

RESERVE = 45  # seconds of --time for last checkpoints, `fedcli quality` and the archive
OVERTIME = 15  # seconds after which a round that did not end in time is interrupted


def start_time_limit(time: str) -> None:
    """Starts the time of `--time`, of which runs have all but `RESERVE`.

    Raises:
        UserError: If it is no time.
    """
    set_time_limit(parse_seconds(time, "--time") - RESERVE)


@contextmanager
def late_runs_interrupted() -> Iterator[None]:
    """Lets an alarm interrupt the runs that go on `OVERTIME` seconds after their time, as SIGTERM does at any time."""
    interrupt_on_signals((*ENDING_SIGNALS, signal.SIGALRM))
    if time_left() < math.inf:
        seconds = max(1, time_left() + OVERTIME)
        signal.alarm(math.ceil(seconds))
    try:
        yield
    finally:
        signal.alarm(0)
