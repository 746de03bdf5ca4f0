"""How a program ends from outside: by a signal as by Control-C, at a time limit, with the process that started it."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))  # no SIGHUP on Windows
GRACE_SECONDS = 10.0  # in which a process whose parent is dead writes its checkpoint
_deadline = math.inf  # of this program's runs, by `time.monotonic`


class Interrupted(KeyboardInterrupt):
    """The end of a program from outside, handled as Control-C is.

    It passes from one process to another, which makes it again from its text and then gives it its attributes.

    Attributes:
        code: Exit code; of a signal 128 and its number, as in a shell.
    """

    def __init__(self, text: str, code: int = 128 + signal.SIGINT):
        super().__init__(text)
        self.code = code


class OutOfTime(Interrupted):
    """The end by `--time-limit`."""

    def __init__(self, text: str = "time limit reached"):
        super().__init__(text, 0)


def exit_code(error: KeyboardInterrupt) -> int:
    """Returns the exit code after an interruption; 130 for Control-C."""
    return getattr(error, "code", 128 + signal.SIGINT)


interruptions: list[Interrupted] = []  # not yet told; kept, as PyTorch swallows the exception while it imports NumPy


def interrupt_on_signals(numbers: Iterable[signal.Signals] = ENDING_SIGNALS) -> None:
    """Lets signals raise `Interrupted`, unless ignored, as under `nohup`."""

    def end(number: int, frame: object) -> NoReturn:
        interruptions.append(Interrupted("interrupted", 128 + number))
        raise interruptions[-1]

    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)


def set_time_limit(seconds: float) -> None:
    """Ends the runs of this program after so many seconds."""
    global _deadline
    _deadline = time.monotonic() + seconds


def time_left() -> float:
    """Returns the seconds until the time limit, below 0 after it."""
    return _deadline - time.monotonic()


def end_with_parent() -> None:
    """Ends this process by SIGTERM, and after `GRACE_SECONDS` without more ado, once its parent is dead."""
    parent = os.getppid()

    def end_after_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)  # a process of a pool goes on after its interrupted run, to wait for another one
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=end_after_parent, daemon=True).start()
