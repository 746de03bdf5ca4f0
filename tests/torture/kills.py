"""Kills at random moments, also in a file half written: the same command ends in the same bits."""

import os
import random
import shutil
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fedcli
from fedcli import smoke
from fedcli.data import files
from fedcli.registry import find_method
from fedcli.runs.checkpoints import STATES
from fedcli.runs.config import flags_of
from fedcli.runs.records import RECORD, read_record
from fedcli.runs.rounds import Listener
from tests.programs import Program, start
from tests.test_lock import names
from tests.test_runs import TINY, essence
from tests.torture.forks import Ended, fork

METHODS = (
    "fedavg", "scaffold", "fedproto", "fedfm", "feddyn", "moon", "local", "fedgen", "fedtgp", "fedcme", "fml",
    "fccl-plus",
)  # fmt: skip
MOMENTS = 24  # at most, until a kill; a round has about 12
LONG = 600  # seconds, for a run by workers


class Doom(Listener):
    """Kills its process at the so-many-th moment: in a batch, in a file half written, before or after its renaming."""

    def __init__(self, moments: int):
        self.left = moments
        fsync, replace = os.fsync, Path.replace

        def half(file: int) -> None:
            if self.left == 1:
                os.ftruncate(file, os.fstat(file).st_size // 2)
            self.moment()
            fsync(file)

        def renamed(path: Path, target: Path) -> None:
            self.moment()
            replace(path, target)
            self.moment()

        files.os.fsync, Path.replace = half, renamed

    def moment(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def samples(self, count: int) -> None:
        self.moment()


def options_of(method: str) -> dict[str, Any]:
    chosen = find_method(method)
    protocol, dataset = smoke.built_in(chosen)
    public = {"public_examples": 12, "public_batch_size": 5} if chosen.uses_public_data else {}
    return {**TINY, "protocol": protocol, "dataset": dataset, "checkpoint_every": 1, "state_memory": "300K", **public}


def chain(method: str, folder: Path, kills: int, seed: int = 0) -> tuple[int, str]:
    """Kills a run so often, each time after it was taken up by the same call, and lets it end.

    Returns:
        The number of kills that hit, and how its end differs from that of a run that nobody has killed.
    """
    options, chance = options_of(method), random.Random(f"{method} {seed}")
    whole = fedcli.run(method, out=folder / "whole", **options).record

    def again(moment: int) -> Ended:
        progress = {"out": folder / "killed", "continue_": True}
        return fork(lambda: fedcli.run(method, progress=Doom(moment), **progress, **options))

    hits = 0
    while hits < kills:
        end = again(chance.randint(1, MOMENTS))
        if end.code == -signal.SIGKILL:
            hits += 1
        elif end.code == 0:  # it has come to its end, and begins anew
            if fault := _difference(folder, whole):
                return hits, fault
            shutil.rmtree(folder / "killed")
        else:
            return hits, end.err.strip().splitlines()[-1]
    end = again(-1)
    return hits, end.err.strip() or _difference(folder, whole)


def kill_worker(method: str, folder: Path, seed: int = 0) -> tuple[int, str]:
    """Kills one of two workers of a run at a random moment; the same command goes on.

    Returns:
        Whether the kill hit, and how the run's end differs from that of a run by one process.
    """
    options, chance = {**options_of(method), "rounds": 12}, random.Random(f"{method} {seed}")
    whole = fedcli.run(method, out=folder / "whole", **options).record
    command = ("run", method, *flags_of(options), "--workers", "2", "--out", "killed")
    with (folder / "said").open("w+") as said:
        program = start(folder, *command, stdout=said, stderr=said)
        running, ended, hit = folder / "killed" / RECORD, False, 0
        wait = partial(_has_ended, program)
        while not ended and not (len(_workers(program.pid)) == 2 and (running.is_file() or chance.random() < 0.02)):
            ended = wait(0.05)
        if not ended and not wait(chance.uniform(0, 2)) and (workers := _workers(program.pid)):
            os.kill(chance.choice(workers), signal.SIGKILL)
            hit = 1
            wait(LONG)
            program = start(folder, *command, "--continue", stdout=said, stderr=said)
            wait = partial(_has_ended, program)
        if not wait(LONG):
            program.kill()
            return hit, "hangs"
        said.seek(0)
        return hit, (said.read().strip() if program.returncode else _other_numbers(folder, whole))


def _has_ended(program: Program, seconds: float) -> bool:
    try:
        program.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _workers(launcher: int) -> list[int]:
    """The processes that PyTorch's launcher has started."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    return []


def _difference(folder: Path, whole: dict[str, Any]) -> str:
    if fault := _other_numbers(folder, whole):
        return fault
    kept = [[names(folder / name), _states(folder / name)] for name in ("killed", "whole")]
    return "" if kept[0] == kept[1] else "other files"


def _other_numbers(folder: Path, whole: dict[str, Any]) -> str:
    record = read_record(folder / "killed")
    same = essence(record)["rounds"] == essence(whole)["rounds"] and record["summary"] == whole["summary"]
    return "" if same else "other numbers"


def _states(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / STATES).glob("*"))
