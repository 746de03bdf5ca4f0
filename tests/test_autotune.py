"""Which way clients train together: as an option says, or the one that was fastest where that is tried out."""

import gc
from unittest.mock import patch

import pytest
import torch

from fedcli import toy
from fedcli.core import engine
from fedcli.core.stacked import Stack
from fedcli.errors import UserError
from fedcli.runs import autotune
from fedcli.runs.chunking import parse_chunking
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_runs import early_captures, on_fake_cuda


def test_a_trial_takes_steps_and_leaves_the_federation_as_it_was(monkeypatch):
    monkeypatch.setattr(autotune, "STEPS_PER_PASS", 2)
    counted = []
    _, fed = toy.federation("fedavg", clients_per_chunk="2")
    fed.engine.runner.listen(counted.append)

    for way, size in (("stacked", 4), ("branches", 3), ("stacked", 1)):
        trial = autotune.try_out(fed, way, size)
        assert trial.seconds > 0
        assert trial.clients_per_chunk == size

    assert counted == []
    assert fed.engine.clients_per_chunk == 2
    assert fed.engine.way == "stacked"
    assert fed.engine.notes == []


@pytest.mark.slow
@on_fake_cuda
def test_a_trial_leaves_no_graph_behind_that_would_hold_memory():
    with FakeCuda.running() as device, patch.object(autotune, "STEPS_PER_PASS", 6), early_captures():
        _, fed = toy.federation("fedavg", device="cuda", clients_per_chunk="2")
        gc.collect()
        gc.disable()
        try:
            autotune.try_out(fed, "stacked", 4)
            assert device.captures
            assert not any(type(value) is Stack for value in gc.get_objects())
        finally:
            gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("examples", [38, 11])  # 9 full batches of 4 and one that is not; 2 and one
@on_fake_cuda
def test_a_trial_measures_replays_alone(examples):
    train = engine.Engine.train
    not_replays = {}  # steps of the last pass of each way that were captured, or taken without a graph

    def counted(self, *arguments):
        before = self.graphs.num_captured + self.graphs.num_plain
        results = train(self, *arguments)
        not_replays[self.way] = self.graphs.num_captured + self.graphs.num_plain - before
        return results

    with FakeCuda.running() as device:
        run = {"data": toy.toy_dataset(4 * examples), "parts": toy.toy_parts([examples] * 4)}
        _, fed = toy.federation("fedavg", device="cuda", clients_per_chunk="auto", **run)
        with patch.object(engine.Engine, "train", counted):
            assert "fastest of 2 ways tried" in autotune.autotune(fed)
        assert device.replays

    assert not_replays == {"stacked": 0, "branches": 0}


def test_a_way_that_fails_is_not_taken_and_all_that_fail_are_an_error(monkeypatch):
    failing = ["stacked"]

    def try_out(fed, way, size):
        if way in failing:
            raise RuntimeError(f"no deterministic form of {way}\nand more")
        return autotune.Trial(0.5, size)

    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(autotune, "try_out", try_out)
    _, fed = toy.federation("fedavg", clients_per_chunk="auto")
    fed.device = torch.device("cuda")
    chosen = autotune.autotune(fed)
    assert chosen == (
        "fastest of 1 ways tried, 500 ms for a step of one client; stacked failed: no deterministic form of stacked"
    )
    assert fed.engine.way == "branches"

    failing.append("branches")
    with pytest.raises(RuntimeError, match="no deterministic form of stacked"):
        autotune.autotune(fed)


def test_auto_is_chosen_on_cuda_and_nothing_else_is(monkeypatch):
    tried = []

    def try_out(fed, way, size):
        tried.append((way, size))
        if way == "branches":
            return autotune.Trial(0.5, 2)  # the memory was too small for four
        return autotune.Trial(0.7, size)

    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(autotune, "try_out", try_out)
    _, fed = toy.federation("fedavg", clients_per_chunk="auto")
    assert autotune.autotune(fed) is None
    assert fed.engine.clients_per_chunk == 1

    fed.device = torch.device("cuda")
    assert autotune.autotune(fed) == "fastest of 2 ways tried, 500 ms for a step of one client"
    assert fed.engine.way == "branches"
    assert fed.engine.clients_per_chunk == 2
    assert tried == [("stacked", 4), ("branches", 4)]

    _, fed = toy.federation("fedavg", clients_per_chunk="branches:3")
    fed.device = torch.device("cuda")
    assert autotune.autotune(fed) is None
    assert fed.engine.way == "branches"
    assert fed.engine.clients_per_chunk == 3


def test_the_option_says_how_many_and_how():
    assert parse_chunking("auto") is None
    assert parse_chunking("12") == ("stacked", 12)
    assert parse_chunking("branches:3") == ("branches", 3)
    for text in ("0", "many", "branches", "branches:0", "1.5", "stacked:2"):
        with pytest.raises(UserError, match="--clients-per-chunk must be auto, a whole number from 1"):
            parse_chunking(text)
