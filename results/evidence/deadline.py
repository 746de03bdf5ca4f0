"""The time limit of a session: its runs stop early enough for what comes after them, and late ones are interrupted."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from fedcli.cli.options import parse_seconds
from fedcli.runs.signals import ENDING_SIGNALS, Interrupted, interrupt_on_signals, set_time_limit, time_left

OVERTIME_SECONDS = 15  # after which a round that did not end in time is interrupted
MEASURING_SECONDS = 20  # for last checkpoints and `fedcli quality`
PACKING_SECONDS = 10  # for the archive
RESERVED_SECONDS = OVERTIME_SECONDS + MEASURING_SECONDS + PACKING_SECONDS  # of --time


def start_time_limit(time_limit: str) -> None:
    """Starts the time of `--time`, of which runs have all but `RESERVED_SECONDS`.

    Raises:
        UserError: If it is no time.
    """
    set_time_limit(parse_seconds(time_limit, "--time") - RESERVED_SECONDS)


def seconds_to_measure() -> float | None:
    """Returns how long `fedcli quality` may take from now on, so that `PACKING_SECONDS` are left.

    None without a time limit.
    """
    if time_left() == math.inf:
        return None
    return max(1.0, time_left() + RESERVED_SECONDS - PACKING_SECONDS)


@contextmanager
def late_runs_interrupted() -> Iterator[None]:
    """Interrupts the runs in its block that go on for `OVERTIME_SECONDS` after their time is over.

    An alarm does it as SIGTERM would, which interrupts them at any time. It ends the block alone, since time is kept
    for what comes after; SIGTERM and Control-C go on to the caller.
    """
    interrupt_on_signals((*ENDING_SIGNALS, signal.SIGALRM))
    if time_left() < math.inf:
        seconds = max(1, time_left() + OVERTIME_SECONDS)
        signal.alarm(math.ceil(seconds))
    try:
        yield
    except Interrupted as interruption:
        if interruption.code != 128 + signal.SIGALRM:
            raise
        print(interruption)
    finally:
        signal.alarm(0)
