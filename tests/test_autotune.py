"""How clients train together on a device where that is tried out."""

import gc

import pytest
import torch

from fedcli.core import engine
from fedcli.core.stacked import Stack
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs import autotune
from tests import laws
from tests.test_graphs import ListGraphs

FEDAVG = find_method("fedavg")


def test_a_trial_takes_steps_and_leaves_the_federation_as_it_was(monkeypatch):
    monkeypatch.setattr(autotune, "STEPS", 2)
    seen = []
    _, fed = laws.federation(FEDAVG, clients_per_chunk="2")
    fed.engine.on_samples = seen.append
    for way, size in (("stacked", 4), ("branches", 3), ("stacked", 1)):
        seconds, together = autotune._try_out(fed, way, size)
        assert (seconds > 0, together) == (True, size)
    assert seen == []
    assert (fed.engine.clients_per_chunk, fed.engine.way, fed.engine.notes) == (2, "stacked", [])


def test_a_trial_leaves_no_graph_behind_that_would_hold_memory(monkeypatch):
    monkeypatch.setattr(autotune, "STEPS", 6)
    _, fed = laws.federation(FEDAVG, clients_per_chunk="2")
    fed.engine.graphs = ListGraphs()
    gc.collect()
    gc.disable()
    try:
        autotune._try_out(fed, "stacked", 4)
        assert fed.engine.graphs.captured
        assert not any(type(thing) is Stack for thing in gc.get_objects())
    finally:
        gc.enable()


def test_auto_is_chosen_on_cuda_and_nothing_else_is(monkeypatch):
    tried = []

    def try_out(fed, way, size):
        tried.append((way, size))
        return (0.5, 2) if way == "branches" else (0.7, size)  # the memory was too small for four branches

    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(autotune, "_try_out", try_out)
    _, fed = laws.federation(FEDAVG, clients_per_chunk="auto")
    assert autotune.autotune(fed) is None
    assert fed.engine.clients_per_chunk == 1
    fed.device = torch.device("cuda")
    assert autotune.autotune(fed) == "fastest of 2 ways tried, 500 ms for a step of one client"
    assert (fed.engine.way, fed.engine.clients_per_chunk) == ("branches", 2)
    assert tried == [("stacked", 4), ("branches", 4)]
    _, fed = laws.federation(FEDAVG, clients_per_chunk="branches:3")
    fed.device = torch.device("cuda")
    assert autotune.autotune(fed) is None
    assert (fed.engine.way, fed.engine.clients_per_chunk) == ("branches", 3)


def test_the_option_says_how_many_and_how():
    for text, expected in (("auto", ("stacked", 7)), ("12", ("stacked", 12)), ("branches:3", ("branches", 3))):
        assert engine.parse_chunk(text, 7) == expected
    for text in ("0", "many", "branches", "branches:0", "1.5", "stacked:2"):
        with pytest.raises(UserError, match="--clients-per-chunk must be auto, a whole number from 1"):
            engine.parse_chunk(text, 1)
