"""Runs that are killed at random moments, also while a file is written."""

import os
import random
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fedcli
from fedcli import registry
from fedcli.declarations import Method
from fedcli.runs.record import read_record
from fedcli.runs.resolve import default_dataset
from fedcli.runs.rounds import Listener
from tests.run_options import SHORT_RUN
from tests.run_parts import file_names, reproducible_parts
from tests.torture.processes import CommandEnd, run_in_fork

KILLED_METHODS = (
    "fedavg", "scaffold", "fedproto", "fedfm", "feddyn", "moon", "local", "fedgen", "fedtgp", "fedcme", "fml",
    "fccl-plus",
)  # fmt: skip
KILLS = 4  # of a run, until it may end
MOMENTS = 24  # at most, until a kill; a round has about 12
NEVER = -1  # moments until a kill that does not come


def options_of_small_run(method: Method) -> dict[str, Any]:
    """Options of a run that takes a second, with a checkpoint after every round and states that are spilled to disk."""
    options = {**SHORT_RUN, "dataset": default_dataset(method), "checkpoint_every": 1, "state_memory": "300K"}
    if method.uses_public_data:
        options |= {"public_examples": 12, "public_batch_size": 5}
    return options


class KillingListener(Listener):
    """Kills its process at the so-many-th moment: in a batch, in a file half written, before or after its renaming."""

    def __init__(self, moments: int):
        self.moments_left = moments
        self.watch_files()

    def watch_files(self) -> None:
        """Makes moments of what this process, a fork for this one run, does with files."""
        fsync = os.fsync
        replace = Path.replace

        def half_written(file: int) -> None:
            if self.moments_left == 1:
                os.ftruncate(file, os.fstat(file).st_size // 2)
            self.pass_moment()
            fsync(file)

        def renamed(path: Path, target: Path) -> None:
            self.pass_moment()
            replace(path, target)
            self.pass_moment()

        os.fsync = half_written
        Path.replace = renamed

    def pass_moment(self) -> None:
        self.moments_left -= 1
        if self.moments_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def samples(self, count: int) -> None:
        self.pass_moment()


def kill_repeatedly(number: int) -> str | None:
    """A run that is killed four times at random moments ends in the same numbers and leaves the same files."""
    draw = random.Random(number)
    method = registry.find_method(KILLED_METHODS[number % len(KILLED_METHODS)])
    options = options_of_small_run(method)
    with TemporaryDirectory() as parent:
        whole = Path(parent, "whole")
        killed = Path(parent, "killed")
        fedcli.run(method.name, out=whole, **options)

        def go_on(moments: int) -> CommandEnd:
            """Goes on with the run in a fork, which is killed after so many moments."""

            def run() -> None:
                fedcli.run(method.name, out=killed, continue_=True, progress=KillingListener(moments), **options)

            return run_in_fork(run)

        moments_until_kill = [draw.randint(1, MOMENTS) for _ in range(KILLS)]
        for kills, moments in enumerate([*moments_until_kill, NEVER]):
            end = go_on(moments)
            if end.code == 0 and kills > 0:
                break
            if end.code != -signal.SIGKILL:
                return f"{method.name}: {end.errors.strip()}"

        record = reproducible_parts(read_record(killed))
        expected = reproducible_parts(read_record(whole))
        if record["rounds"] != expected["rounds"] or record["summary"] != expected["summary"]:
            return f"{method.name}: other numbers"
        if file_names(killed) != file_names(whole):
            return f"{method.name}: other files"
        return None
