"""How a program ends: by a signal as by Control-C, and with the process that started it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)  # of a batch system that stops a job, and of a terminal that is closed
GRACE = 10.0  # seconds to end in, after which a process whose parent is dead is killed


class Ended(KeyboardInterrupt):
    """The end by a signal other than Control-C's; whoever handles that one handles this.

    Attributes:
        code: Exit code, 128 and the signal's number as in a shell: 143 for SIGTERM, 129 for SIGHUP.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


def exit_code(error: KeyboardInterrupt) -> int:
    """The exit code of a program that an interruption has ended; 130 for Control-C."""
    return getattr(error, "code", 128 + signal.SIGINT)


@contextmanager
def as_interruptions() -> Iterator[None]:
    """Raises `Ended` inside for `ENDING`, but for those that are ignored, as under `nohup`, or handled already."""
    main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
    taken = [number for number in ENDING if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: object) -> NoReturn:
    raise Ended(number)


def end_with_parent(pipe: int = 0) -> None:
    """Ends this process when a pipe does, standard input or another that its parent holds open while it lives.

    The pipe closes however the parent ends, by SIGKILL too. This process ends as by SIGTERM, or hard after `GRACE`.
    """

    def watch() -> None:
        while os.read(pipe, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
