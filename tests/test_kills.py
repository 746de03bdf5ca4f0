"""Kills at random moments, also while a file is written: the same command ends in the same bits."""

import os
import random
import signal
from pathlib import Path

import pytest

import fedcli
from fedcli import smoke
from fedcli.data import files
from fedcli.registry import find_method
from fedcli.runs.checkpoints import CHECKPOINT, STATES
from fedcli.runs.records import read_record
from fedcli.runs.run import Listener
from tests.test_lock import NO_PROCESS, names
from tests.test_runs import TINY, essence

KILLS = 4  # of each run
MOMENTS = 24  # at most, until a kill; a round has about 12


class Doom(Listener):
    """Kills its process at the so-many-th moment: in a batch, in a file half written, before or after its renaming."""

    def __init__(self, moments):
        self.left = moments
        fsync, replace = os.fsync, Path.replace

        def half(file):
            if self.left == 1:
                os.ftruncate(file, os.fstat(file).st_size // 2)
            self.moment()
            fsync(file)

        def renamed(path, target):
            self.moment()
            replace(path, target)
            self.moment()

        files.os.fsync, Path.replace = half, renamed

    def moment(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def samples(self, count):
        self.moment()


def in_a_child(function):
    """Runs a function in a process of its own, which has its memory, and returns how that ended."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def options_of(method):
    chosen = find_method(method)
    protocol, dataset = smoke.built_in(chosen)
    public = {"public_examples": 12, "public_batch_size": 5} if chosen.uses_public_data else {}
    return {**TINY, "protocol": protocol, "dataset": dataset, "checkpoint_every": 1, "state_memory": "300K", **public}


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedproto"])
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bits(method, tmp_path):
    options, chance = options_of(method), random.Random(method)
    moments = [chance.randint(1, MOMENTS) for _ in range(KILLS)]
    whole = fedcli.run(method, out=tmp_path / "whole", **options)

    def again(moment):
        fedcli.run(method, out=tmp_path / "killed", continue_=True, progress=Doom(moment), **options)

    ends = [in_a_child(lambda moment=moment: again(moment)) for moment in moments]
    assert set(ends) <= {-signal.SIGKILL, 0}
    assert ends[0] == -signal.SIGKILL
    assert in_a_child(lambda: again(-1)) == 0
    record = read_record(tmp_path / "killed")
    assert essence(record)["rounds"] == essence(whole.record)["rounds"]
    assert record["summary"] == whole.record["summary"]
    assert names(tmp_path / "killed") == names(tmp_path / "whole")
    kept = [sorted(path.name for path in (tmp_path / name / STATES).glob("*")) for name in ("killed", "whole")]
    assert kept[0] == kept[1]


def test_a_kill_after_the_last_record_leaves_nothing_after_the_same_command(tmp_path):
    options = {**options_of("fedavg"), "out": tmp_path / "run", "continue_": True}
    fedcli.run("fedavg", **options)
    whole = names(tmp_path / "run")
    for name in (".lock", f".record.json.{NO_PROCESS}.partial"):
        (tmp_path / "run" / name).touch()
    fedcli.run("fedavg", **options)
    assert names(tmp_path / "run") == whole
    assert {CHECKPOINT, "record.json"} <= set(whole)
