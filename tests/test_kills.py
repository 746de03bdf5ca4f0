"""Kills at random moments, also while a file is written: the same command ends in the same bits."""

import pytest

import fedcli
from fedcli.runs.checkpoints import CHECKPOINT
from tests.test_lock import NO_PROCESS, names
from tests.torture.kills import chain, options_of


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedproto"])
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bits(method, tmp_path):
    hits, fault = chain(method, tmp_path, kills=4)
    assert not fault
    assert hits > 0


def test_a_kill_after_the_last_record_leaves_nothing_after_the_same_command(tmp_path):
    options = {**options_of("fedavg"), "out": tmp_path / "run", "continue_": True}
    fedcli.run("fedavg", **options)
    whole = names(tmp_path / "run")
    for name in (".lock", f".record.json.{NO_PROCESS}.partial"):
        (tmp_path / "run" / name).touch()
    fedcli.run("fedavg", **options)
    assert names(tmp_path / "run") == whole
    assert {CHECKPOINT, "record.json"} <= set(whole)
