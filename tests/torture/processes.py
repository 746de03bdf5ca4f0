"""Commands in forks of this process, which has imported everything, so that they cost milliseconds."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

import fedcli
from fedcli import registry
from fedcli.cli import app
from tests.programs import start_program
from tests.run_options import SHORT_RUN

MEMORY = 4 << 30  # bytes that a command may ask for beyond what this process has
GRACE = 20  # seconds in which an interrupted command must end


class CommandEnd(NamedTuple):
    """How a command ended: its exit code, minus a signal's number, and what it printed."""

    code: int
    output: str
    errors: str

    @property
    def fault(self) -> str | None:
        """What is wrong with this end, whatever the command was; None where nothing is."""
        printed = self.output + self.errors
        error_lines = self.errors.strip().splitlines()
        if "Traceback (most recent call last)" in printed:
            return error_lines[-1][:200]
        if self.code not in (0, 1, 2, 130):
            return f"exit code {self.code}"  # -9 where it hung
        if self.code and not printed.strip():
            return f"exit code {self.code} without a word"
        has_error = any(line.startswith("error: ") for line in error_lines)
        if has_error and not error_lines[-1].startswith("error: "):
            return "an error of several lines"
        if "\x1b" in printed:
            return "an escape sequence"
        return None


def import_commands() -> None:
    """Imports what commands import late, by a run with its table."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    registry.methods()
    with TemporaryDirectory() as folder:
        run = fedcli.run("fedavg", out=Path(folder, "run"), **{**SHORT_RUN, "rounds": 1})
        run_command_in_fork(Path(folder), "table", run.path)


def run_command_in_fork(folder: Path, *arguments: object, seconds: float = 60) -> CommandEnd:
    """Runs `fedcli` with arguments in a folder, in a fork of this process."""
    return run_in_fork(app.main, *arguments, folder=folder, seconds=seconds)


def run_in_fork(
    action: Callable[[], object], *arguments: object, folder: Path = Path(), seconds: float = 60
) -> CommandEnd:
    """Does something in a fork of this process; after so many seconds it is interrupted, and then killed."""

    def limited() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        action()

    program = start_program(folder, *arguments, main=limited)
    program.join(seconds)
    if program.is_alive():
        program.send_signal(signal.SIGINT)
        program.join(GRACE)
    if program.is_alive():
        program.send_signal(signal.SIGKILL)
    output, errors = program.communicate()
    return CommandEnd(program.returncode, output, errors)
