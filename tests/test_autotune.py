"""How many clients train together on a device where that is tried out."""

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
GIB = 2**30


def choose(found, sizes=(10, 5, 2), room=10 * GIB):
    """The choice where a way takes the milliseconds and GiB in `found`, or is too large."""
    costs = {(way, size): (100, 0) for way in ("stacked", "branches") for size in sizes} | {("stacked", 1): (100, 0)}
    tried = {which: cost and (cost[0] / 1e3, int(cost[1] * GIB)) for which, cost in (costs | found).items()}
    return autotune.choose(tried, room)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({("stacked", 5): (2, 1)}, ("stacked", 5)),
        ({("branches", 10): (2, 1), ("stacked", 10): (3, 1)}, ("branches", 10)),
        ({("stacked", 1): (2, 1)}, ("stacked", 1)),
        ({("stacked", 10): (1, 6.1), ("stacked", 5): (2, 1)}, ("stacked", 5)),  # more than its share of the memory
        ({("stacked", 10): None, ("stacked", 5): (2, 1)}, ("stacked", 5)),  # out of memory
        ({(way, size): (1, 9) for way in ("stacked", "branches") for size in (1, 2, 5, 10)}, ("stacked", 1)),
    ],
)
def test_the_fastest_way_that_leaves_memory_is_taken_or_one_client_at_a_time(found, expected):
    way, size, reason = choose(found)
    assert (way, size) == expected
    assert ("none of" if ("stacked", 2) in found else "of 7 ways tried") in reason


def test_a_trial_takes_steps_and_leaves_the_federation_as_it_was(monkeypatch):
    monkeypatch.setattr(autotune, "STEPS", 2)
    seen = []
    _, fed = laws.federation(FEDAVG, clients_per_chunk="2")
    fed.engine.on_samples = seen.append
    for way, size in (("stacked", 4), ("branches", 3), ("stacked", 1)):
        assert min(autotune._try_out(fed, way, size)) > 0
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


@pytest.fixture
def tried(monkeypatch):
    """A CUDA device as far as `autotune` asks for one, with memory for two clients; yields the trials."""
    ways = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)

    def try_out(fed, way, size):
        ways.append((way, size))
        return 1 / size + (way != "stacked"), 3 * size * GIB

    monkeypatch.setattr(autotune, "_try_out", try_out)
    return ways


def test_auto_is_chosen_on_cuda_and_nothing_else_is(tried):
    _, fed = laws.federation(FEDAVG, clients_per_chunk="auto")
    assert autotune.autotune(fed) is None
    assert fed.engine.clients_per_chunk == 1
    fed.device = torch.device("cuda")
    reason = "fastest of 5 ways tried, 500 ms for a step of one client"
    assert autotune.autotune(fed) == reason
    assert (fed.engine.way, fed.engine.clients_per_chunk) == ("stacked", 2)
    assert tried == [*((way, size) for way in ("stacked", "branches") for size in (4, 2)), ("stacked", 1)]
    _, fed = laws.federation(FEDAVG, clients_per_chunk="branches:3")
    fed.device = torch.device("cuda")
    assert autotune.autotune(fed) is None
    assert (fed.engine.way, fed.engine.clients_per_chunk) == ("branches", 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", ("stacked", 7)), ("1", ("stacked", 1)), ("12", ("stacked", 12)), ("branches:3", ("branches", 3))],
)
def test_the_option_says_how_many_and_how(text, expected):
    assert engine.parse_chunk(text, 7) == expected


@pytest.mark.parametrize("text", ["0", "many", "branches", "branches:0", "1.5", "stacked:2"])
def test_other_values_of_the_option_are_refused(text):
    with pytest.raises(UserError, match="--clients-per-chunk must be auto, a whole number from 1"):
        engine.parse_chunk(text, 1)
