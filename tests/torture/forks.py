"""Commands in forks of this process, which has imported everything: one costs milliseconds and not the import."""

import contextlib
import gc
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import NamedTuple

import torch

import fedcli
from fedcli import registry
from fedcli.cli import app, describe, display  # noqa: F401  what the commands would import late
from fedcli.figures import charts
from fedcli.results import comparison, pages, tune  # noqa: F401
from fedcli.runs import verify  # noqa: F401
from tests.test_runs import TINY

ROOM = 4 << 30  # bytes of memory that a command may ask for beyond what this process has
GRACE = 20  # seconds in which an interrupted command must end


class Ended(NamedTuple):
    """How a command ended: its exit code, minus a signal's number, and what it printed."""

    code: int
    out: str
    err: str
    hung: bool = False  # it had to be killed

    @property
    def fault(self) -> str:
        """What is wrong with an end, whatever the command was; empty for a good end."""
        if self.hung:
            return "hangs"
        if "Traceback (most recent call last)" in self.err + self.out:
            return self.err.strip().splitlines()[-1]
        if self.code not in (0, 1, 2, 130):
            return f"exit code {self.code}"
        if self.code and not self.err.strip():
            return f"exit code {self.code} without a word"
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        if errors and errors[-1] != self.err.splitlines()[-1]:
            return "an error of several lines"
        return "an escape sequence" if "\x1b" in self.out + self.err else ""


def load() -> None:
    """Imports what commands import when they are used, some of it only by a run and its figures."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    registry.methods()
    charts()
    with TemporaryDirectory() as folder:
        run = fedcli.run("fedavg", out=Path(folder, "run"), **{**TINY, "rounds": 1})
        display.draw(run.record, run.path)
    gc.collect()
    gc.freeze()


def fork(action: Callable[[], object], seconds: float = 60, folder: Path | None = None) -> Ended:
    """Does something in a process of its own; after so many seconds it is interrupted as by Control-C."""
    with TemporaryFile() as out, TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _act(action, folder, out.fileno(), err.fileno())
        hung = not _ended(child, seconds)
        if hung:
            os.kill(child, signal.SIGINT)
            if hung := not _ended(child, GRACE):
                os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Ended(code, *texts, hung)


def call(folder: Path, *arguments: object, seconds: float = 60) -> Ended:
    """Runs `fedcli` with arguments in a folder."""

    def command() -> None:
        sys.argv = ["fedcli", *map(str, arguments)]
        app.main()

    return fork(command, seconds, folder)


def _ended(child: int, seconds: float) -> bool:
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    ready = bool(poll.poll(1000 * seconds))
    os.close(handle)
    return ready


def _act(action: Callable[[], object], folder: Path | None, out: int, err: int) -> None:
    """The life of a child; it never returns."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        streams = [os.fdopen(number, mode, closefd=False) for number, mode in ((0, "r"), (1, "w"), (2, "w"))]
        sys.stdin, sys.stdout, sys.stderr = streams
        if folder is not None:
            os.chdir(folder)
        action()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
