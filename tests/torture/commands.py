"""Runs commands in forks of this process, which has imported everything and so costs milliseconds."""

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

import fedcli
from fedcli import registry
from fedcli.cli import app
from tests.test_runs import TINY

MEMORY = 4 << 30  # bytes that a command may ask for beyond what this process has
GRACE = 20  # seconds in which an interrupted command must end


class Ended(NamedTuple):
    """How a command ended: its exit code, minus a signal's number, and what it printed."""

    code: int
    output: str
    errors: str

    @property
    def fault(self) -> str:
        """What is wrong with this end, whatever the command was; empty for a good end."""
        lines = self.errors.strip().splitlines()
        if "Traceback (most recent call last)" in self.errors + self.output:
            return lines[-1]
        if self.code not in (0, 1, 2, 130):
            return f"exit code {self.code}"  # -9 where it hung
        if self.code and not lines:
            return f"exit code {self.code} without a word"
        if any(line.startswith("error: ") for line in lines) and not lines[-1].startswith("error: "):
            return "an error of several lines"
        return "an escape sequence" if "\x1b" in self.output + self.errors else ""


def load() -> None:
    """Imports what commands import late, by a run with its table."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    registry.methods()
    with TemporaryDirectory() as folder:
        run = fedcli.run("fedavg", out=Path(folder, "run"), **{**TINY, "rounds": 1})
        call(Path(folder), "table", run.path)


def call(folder: Path, *arguments: object, seconds: float = 60) -> Ended:
    """Runs `fedcli` with arguments in a folder."""

    def command() -> None:
        os.chdir(folder)
        sys.argv = ["fedcli", *map(str, arguments)]
        app.main()

    return fork(command, seconds)


def fork(action: Callable[[], object], seconds: float = 60) -> Ended:
    """Does something in a process of its own; after so many seconds it is interrupted, and then killed."""
    with TemporaryDirectory() as folder:
        files = Path(folder, "output"), Path(folder, "errors")
        child = get_context("fork").Process(target=_live, args=(action, *files))
        child.start()
        for end, patience in ((signal.SIGINT, seconds), (signal.SIGKILL, GRACE)):
            child.join(patience)
            if child.is_alive():
                os.kill(child.pid, end)
        child.join()
        return Ended(child.exitcode, *(file.read_text(errors="replace") for file in files))


def _live(action: Callable[[], object], output: Path, errors: Path) -> None:
    """The life of a child; it never returns."""
    code = 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with Path(os.devnull).open() as sys.stdin, output.open("w") as sys.stdout, errors.open("w") as sys.stderr:
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        try:
            action()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
    os._exit(code)
