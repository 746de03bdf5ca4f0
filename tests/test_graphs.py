"""Steps as graphs, on a device that is made up: its graphs are lists of operations, done again into the same memory."""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedcli.core import stacked
from fedcli.core.graphs import CudaGraphs, Unrepeatable, graph_key
from fedcli.core.trees import Flat, tree_map
from fedcli.registry import find_method, methods
from tests import laws
from tests.toys import STATEFUL, fedavg_round, first_round, use_tiny_network

FEDAVG, FEDFM = find_method("fedavg"), find_method("fedfm")


class Recorder(TorchDispatchMode):
    """Keeps every operation with its arguments and results; none may bring a value to Python."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        results = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, results))
        return results


class ListGraphs:
    """In the place of CudaGraphs. Python is not asked again, and every result lands where the first one did."""

    def __init__(self):
        self.warmed, self.captured, self.replayed, self.forked = 0, 0, 0, 0

    def warm_up(self, work):
        self.warmed += 1
        work()

    def capture(self, work):
        recorder, done = Recorder(), True
        with recorder:
            work()
        self.captured += 1

        def replay():
            nonlocal done
            self.replayed += 1
            if done:  # by the recording, which a real device does not do
                done = False
                return
            with torch.no_grad():
                for function, args, kwargs, results in recorder.operations:
                    again = function(*args, **kwargs)
                    for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return replay

    def fork(self, works):
        self.forked += 1
        return [work() for work in works]


def by_graphs(method, overrides=None, rounds=3, **run):
    """State after some rounds whose steps are graphs as far as possible, the graphs, and the federation."""
    setup, fed = laws.federation(method, overrides, **run)
    fed.engine.graphs = graphs = ListGraphs()
    return laws.simulate(setup, fed, rounds), graphs, fed


def eagerly(method, overrides=None, rounds=3, **run):
    return laws.simulate(*laws.federation(method, overrides, **run), rounds)


CASES = {
    "fedavg": (FEDAVG, {}, {"lr_decay": 0.5}),
    "fedfm": (FEDFM, {"start_round": 1}, {}),
    "stateful": (STATEFUL, {}, {}),
    "adam": (FEDAVG, {}, {"optimizer": "adam", "lr": 0.003}),
}


@pytest.mark.parametrize("name", list(methods()))
def test_the_steps_of_every_method_can_be_graphs(name):
    method = find_method(name)
    active = {"start_round": 0} if "start_round" in method.config.__dataclass_fields__ else {}
    run = {"clients_per_chunk": "4", "rounds": 2}
    state, graphs, fed = by_graphs(method, active, **run)
    laws.assert_agree(state, eagerly(method, active, **run), f"{name} by graphs")
    assert fed.engine.notes == []
    assert graphs.captured, "a local objective is closed over what may change; that belongs into its context"


@pytest.mark.parametrize("chunk", ["4", "branches:3", "1"])
@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_the_steps(case, chunk):
    """A new learning rate, new contexts and new clients in every round must reach a graph of the first."""
    method, overrides, run = CASES[case]
    state, graphs, fed = by_graphs(method, overrides, clients_per_chunk=chunk, **run)
    laws.assert_agree(state, eagerly(method, overrides, clients_per_chunk=chunk, **run), f"{case} by graphs")
    assert graphs.captured >= 1
    assert graphs.warmed == (stacked.WARM_UP + 1) * graphs.captured  # every other step of the three rounds was a replay
    assert fed.engine.notes == []


@pytest.fixture
def bursts(monkeypatch):
    """Graphs of three steps, for four clients of whom one has 24 examples, six steps in an epoch."""
    monkeypatch.setattr(stacked, "BURST", 3)
    monkeypatch.setattr(stacked, "WARM_UP", 1)
    use_tiny_network(monkeypatch)
    return {"parts": laws.toy_parts((13, 16, 24, 7)), "lr": 0.01, "local_epochs": 4}


@pytest.mark.parametrize("chunk", ["4", "branches:4"])
def test_a_graph_of_several_steps_takes_as_many(chunk, bursts):
    state, graphs, fed = by_graphs(FEDAVG, clients_per_chunk=chunk, **bursts)
    laws.assert_agree(state, eagerly(FEDAVG, clients_per_chunk=chunk, **bursts), "several steps a graph")
    (stack,) = fed.engine.stacks.values()
    assert set(stack.replays) == {(False, 1), (False, 3), (True, 1)}
    steps = 3 * 4 * 6  # three rounds
    assert graphs.replayed < 2 * steps / 3


def test_after_a_graph_of_several_steps_that_is_wrong_all_steps_are_taken(bursts):
    setup, fed = laws.federation(FEDAVG, clients_per_chunk="4", **bursts)
    fed.engine.graphs = graphs = Planted(moves_too_far, first=3)
    laws.assert_agree(laws.simulate(setup, fed, 1), eagerly(FEDAVG, rounds=1, **bursts), "without graphs")
    assert (graphs.captured, fed.engine.graphs) == (3, None)


def test_augmentation_is_in_the_graph():
    states = []
    for graphs in (None, ListGraphs()):
        setup, fed = laws.federation(FEDAVG, clients_per_chunk="4")
        fed.transform = fed.transform.__class__((0.5,), (0.5,), "crop-flip-rotate", fed.dtype)
        fed.engine.transform, fed.engine.graphs = fed.transform, graphs
        states.append(laws.simulate(setup, fed, 2))
    laws.assert_agree(states[1], states[0], "augmented")
    assert graphs.replayed > 0


def test_a_stack_is_kept_for_steps_of_the_same_kind_and_shape():
    _, graphs, fed = by_graphs(FEDAVG, clients_per_chunk="4", rounds=4)
    assert (graphs.captured, len(fed.engine.stacks)) == (2, 1)  # with and without a mask
    _, graphs, fed = by_graphs(FEDAVG, clients_per_chunk="3", rounds=4)  # chunks of 3 and 1
    assert (graphs.captured, len(fed.engine.stacks)) == (3, 2)
    fed.engine.way, cohort = "branches", fed.cohort(0)
    start, loss = fed.broadcast(*fed.initial_model(), cohort), FEDAVG.module.make_local_loss(fed.network)
    fed.train(start, cohort, loss)
    assert len(fed.engine.stacks) == stacked.KEPT == 4
    fed.train(start, cohort, fed.optimizer_step(loss, weight_decay=0.5))
    assert len(fed.engine.stacks) == stacked.KEPT  # the oldest went


def test_what_training_returns_outlives_the_next_round():
    fed, cohort, start, loss = first_round(clients_per_chunk="4")
    fed.engine.graphs = ListGraphs()
    first, terms = fed.train(start, cohort, loss)
    before = tree_map(torch.clone, (first.params, terms))
    fed.train(first, fed.cohort(1), loss)
    assert laws.distance((first.params, terms), before) == 0


def test_a_step_that_cannot_be_known_again_is_captured_for_one_call():
    fed, cohort, start, plain = first_round(clients_per_chunk="4", parts=laws.toy_parts((8, 12, 16, 12)))
    fed.engine.graphs = graphs = ListGraphs()
    for factor in (1.0, 2.0):
        scale = torch.tensor(factor, dtype=fed.dtype)  # not in the context, as it should be: may be another next time

        def loss(params, buffers, batch, context, scale=scale):
            value, aux = plain(params, buffers, batch, context)
            return scale * value, aux

        trained, _ = fed.train(start, cohort, loss)
        fed.engine.graphs = None
        expected, _ = fed.train(start, cohort, loss)
        fed.engine.graphs = graphs
        laws.assert_agree(trained.params, expected.params, f"the loss times {factor}")
    assert (graphs.captured, fed.engine.stacks) == (2, {})


def test_a_step_that_cannot_be_captured_goes_on_without_a_graph_and_says_so_once():
    def reads(state, cohort, fed, config):
        plain = FEDAVG.module.make_local_loss(fed.network)

        def loss(params, buffers, batch, context):
            value, aux = plain(params, buffers, batch, context)
            assert batch.lr.item() > 0
            return value, aux

        return fedavg_round(state, cohort, fed, loss)

    method = replace(FEDAVG, run_round=reads)
    for chunk in ("4", "branches:4"):
        state, graphs, fed = by_graphs(method, clients_per_chunk=chunk)
        laws.assert_agree(state, eagerly(method, clients_per_chunk=chunk), "without graphs")
        assert (graphs.captured, fed.engine.graphs) == (0, None)
        (note,) = fed.engine.notes
        assert "operation not permitted when stream is capturing)" in note


class Planted(ListGraphs):
    """Graphs that have a defect, from the `first` on, by the clients that the step is of."""

    def __init__(self, defect, first=1):
        super().__init__()
        self.defect, self.first = defect, first

    def capture(self, work):
        replay = super().capture(work)

        def wrong():
            replay()
            self.defect(work.func.__self__)

        return wrong if self.captured >= self.first else replay


class Incapable(ListGraphs):
    """Graphs of a device on which no capture succeeds."""

    def capture(self, work):
        raise RuntimeError("no graphs")


def head_bias(own, packed):
    """A parameter's place in the clients' tensors, which are packed."""
    return Flat(packed[""], own.like.params.shapes)["head.bias"]


def moves_too_far(own):
    head_bias(own, own.clients.params).mul_(1.0001)


def forgets_the_velocity(own):
    head_bias(own, own.clients.optimizer["local"]).zero_()


def counts_a_term_twice(own):
    own.totals["cross_entropy"].mul_(2)


def breaks(own):
    head_bias(own, own.clients.params)[0] = torch.nan


@pytest.mark.parametrize("defect", [moves_too_far, forgets_the_velocity, counts_a_term_twice, breaks])
@pytest.mark.parametrize("chunk", ["4", "branches:3", "1"])
def test_a_graph_that_replays_wrong_numbers_is_not_used(chunk, defect):
    states = []
    for graphs in (Incapable(), Planted(defect)):
        setup, fed = laws.federation(FEDAVG, clients_per_chunk=chunk)
        fed.engine.graphs = graphs
        states.append(laws.simulate(setup, fed, 2))
    assert laws.distance(*states) == 0  # not a bit of it is left
    laws.assert_agree(states[1], eagerly(FEDAVG, rounds=2, clients_per_chunk=chunk), "without graphs")
    assert (graphs.captured, graphs.replayed, fed.engine.graphs, fed.engine.stacks) == (1, 1, None, {})
    (note,) = fed.engine.notes
    assert "gave other numbers than the step" in note


def test_a_capture_that_runs_out_of_memory_halves_the_chunk(monkeypatch):
    setup, fed = laws.federation(FEDAVG, clients_per_chunk="4")
    fed.engine.graphs = graphs = ListGraphs()
    capture = graphs.capture

    def limited(work):
        if len(work.func.__self__.clients.params[""]) < 4:
            return capture(work)
        try:
            raise torch.OutOfMemoryError("no memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(graphs, "capture", limited)
    state = laws.simulate(setup, fed, 2)
    laws.assert_agree(state, eagerly(FEDAVG, rounds=2, clients_per_chunk="2"), "halved")
    assert fed.engine.clients_per_chunk == 2
    assert fed.engine.graphs is graphs
    assert fed.engine.notes == ["out of memory with 4 clients together; 2 from here on"]


# What identifies a step


@dataclass(frozen=True)
class Options:
    weight: float


def make(network, weight=0.5, more=(1, {"a": None}), start=1, thing=None):
    scale = 2.0

    def inner(x):
        return scale * x + Options(weight).weight

    def loss(x, *, start=start):
        return inner(x) + start + len(more), network, thing

    return partial(loss, weight)


def test_a_function_made_again_from_equal_parts_is_the_same():
    network, other = (laws.federation(FEDAVG)[1].network for _ in "ab")
    same = graph_key(make(network))
    assert same == graph_key(make(network))
    assert hash(same) == hash(graph_key(make(network)))
    changes = [{"weight": 0.6}, {"more": (1.0, {"a": None})}, {"more": (1, {"b": None})}, {"more": [1, {"a": None}]}]
    for change in (*changes, {"start": 2}, {"network": other}, {"thing": Options(0.5)}):
        assert graph_key(make(**{"network": network, **change})) != same
    assert graph_key(lambda x: x) != same


@pytest.mark.parametrize("thing", [torch.zeros(1), object(), partial(print), {"a": torch.zeros(1)}])
def test_what_may_change_has_no_identity(thing):
    with pytest.raises(Unrepeatable):
        graph_key(make(None, thing=thing))


def test_where_shapes_count_a_tree_is_its_structure_and_shapes():
    def tree(shape=(2, 3), name="b", last=None, dtype=torch.float32):
        return graph_key({"a": torch.zeros(shape, dtype=dtype), name: (torch.zeros(1), last)}, shapes=True)

    assert tree() == tree()
    for other in ({"shape": (3, 2)}, {"dtype": torch.float64}, {"name": "c"}, {"last": torch.zeros(1)}, {"last": 1}):
        assert tree(**other) != tree()


# The device


class Events:
    """Streams and graphs of a device that is made up; keeps what happened in which order."""

    def __init__(self, monkeypatch):
        self.log, self.names = [], iter(["ambient", "own", "first", "second"])
        self.current = self.ambient = self.stream()
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", lambda device: self.stream())
        monkeypatch.setattr(cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(cuda, "stream", self.on)
        monkeypatch.setattr(cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: self.log.append("replay")))
        monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "the pool of all graphs")
        monkeypatch.setattr(cuda, "graph", self.graph)

    def stream(self):
        name = next(self.names)
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    @contextmanager
    def on(self, stream, capture=False):
        before, self.current = self.current, stream
        yield
        self.current = before  # not after an error, as in torch's capture

    def graph(self, graph, pool, stream):
        assert pool == "the pool of all graphs"
        return self.on(stream, capture=True)

    def work(self):
        self.log.append(f"work on {self.current.name}")
        return self.current.name


def test_warm_ups_and_branches_wait_for_what_was_before_and_are_waited_for(monkeypatch):
    events = Events(monkeypatch)
    graphs = CudaGraphs(torch.device("cuda"))
    graphs.warm_up(events.work)
    assert events.log == ["own waits for ambient", "work on own", "ambient waits for own"]
    events.log.clear()
    assert graphs.fork([events.work, events.work]) == ["first", "second"]
    assert events.log == [
        "first waits for ambient", "work on first", "second waits for ambient", "work on second",
        "ambient waits for first", "ambient waits for second",
    ]  # fmt: skip
    assert graphs.fork([events.work]) == ["first"]  # streams are used again


@pytest.mark.parametrize("enabled", [True, False])
def test_a_capture_ends_on_the_stream_it_began_on_and_collects_no_garbage(enabled, monkeypatch):
    """Among it may be older graphs, and to give one up ends the capture of another."""
    events = Events(monkeypatch)
    graphs = CudaGraphs(torch.device("cuda"))
    graphs.capture(events.work)()
    assert events.log == ["work on own", "replay"]
    events.log.clear()
    (gc.enable if enabled else gc.disable)()
    try:
        old = ListGraphs()
        old.itself = old
        weakref.finalize(old, events.log.append, "old one given up")
        del old
        graphs.capture(lambda: events.log.append(f"collecting: {gc.isenabled()}"))
        assert events.log == ["old one given up", "collecting: False"]
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError):
            graphs.capture(lambda: 1 / 0)
        assert gc.isenabled() == enabled
        assert events.current is events.ambient
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", ["4", "branches:4", "1"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_cuda_device_steps_are_graphs_and_agree_with_the_cpu(case, chunk):
    method, overrides, run = CASES[case]
    setup, fed = laws.federation(method, overrides, clients_per_chunk=chunk, device="cuda", **run)
    state = tree_map(torch.Tensor.cpu, laws.simulate(setup, fed, 3))
    laws.assert_agree(state, eagerly(method, overrides, **run), f"{case} on CUDA")
    assert fed.engine.notes == []
    assert any(stack.replays for stack in fed.engine.stacks.values())
