"""Steps as graphs, on a device that is made up: its graphs are lists of operations, done again into the same memory."""

import gc
import weakref
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import MagicMock, call

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedcli.core import engine
from fedcli.core.clients import Client
from fedcli.core.graphs import KEPT, TOLERANCE, WARM_UP, CudaGraphs, Unrepeatable, agree, graph_key
from fedcli.core.stacked import Stack
from fedcli.core.trees import Flat, tree_map
from fedcli.errors import UserError
from fedcli.registry import find_method, methods
from fedcli.runs import autotune
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
    "fedfa": (find_method("fedfa"), {}, {}),  # uses the number of a client's batches
    "stateful": (STATEFUL, {}, {}),
    "adam": (FEDAVG, {}, {"optimizer": "adam", "lr": 0.003}),
}


@pytest.mark.parametrize("name", list(methods()))
def test_the_steps_of_every_method_can_be_graphs(name):
    method = find_method(name)
    active = {"start_round": 0} if "start_round" in method.config.__dataclass_fields__ else {}
    state, graphs, fed = by_graphs(method, active, clients_per_chunk="4", rounds=2)
    laws.assert_agree(state, eagerly(method, active, clients_per_chunk="4", rounds=2), f"{name} by graphs")
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
    assert graphs.warmed == (WARM_UP + 1) * graphs.captured  # every other step of the three rounds was a replay
    assert fed.engine.notes == []


@pytest.fixture
def bursts(monkeypatch):
    """Graphs of three steps, for four clients of whom one has 24 examples, six steps in an epoch."""
    monkeypatch.setattr("fedcli.core.graphs.BURST", 3)
    monkeypatch.setattr("fedcli.core.graphs.WARM_UP", 1)
    use_tiny_network(monkeypatch)
    return {"parts": laws.toy_parts((13, 16, 24, 7)), "lr": 0.01, "local_epochs": 4}


@pytest.mark.parametrize("chunk", ["4", "branches:4"])
def test_a_graph_of_several_steps_takes_as_many(chunk, bursts):
    state, graphs, fed = by_graphs(FEDAVG, clients_per_chunk=chunk, **bursts)
    laws.assert_agree(state, eagerly(FEDAVG, clients_per_chunk=chunk, **bursts), "several steps a graph")
    (stack,) = fed.engine.stacks.values()
    assert set(stack.graphs.replays) == {(False, 1), (False, 3), (True, 1)}
    steps = 3 * 4 * 6  # three rounds
    assert graphs.replayed < 2 * steps / 3


def test_after_a_graph_of_several_steps_that_is_wrong_all_steps_are_taken(bursts):
    setup, fed = laws.federation(FEDAVG, clients_per_chunk="4", **bursts)
    fed.engine.graphs = graphs = Wrong(first=3)
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
    assert len(fed.engine.stacks) == KEPT == 4
    fed.train(start, cohort, fed.optimizer_step(loss, weight_decay=0.5))
    assert len(fed.engine.stacks) == KEPT  # the oldest went


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


class Wrong(ListGraphs):
    """Graphs that move a parameter too far, from the `first` on."""

    def __init__(self, first=1):
        super().__init__()
        self.first = first

    def capture(self, work):
        replay = super().capture(work)

        def wrong():
            replay()
            stack = work.func.__self__
            Flat(stack.clients.params[""], stack.like.params.shapes)["head.bias"].mul_(1.0001)

        return wrong if self.captured >= self.first else replay


class Incapable(ListGraphs):
    """Graphs of a device on which no capture succeeds."""

    def capture(self, work):
        raise RuntimeError("no graphs")


@pytest.mark.parametrize("chunk", ["4", "branches:3", "1"])
def test_a_graph_that_replays_wrong_numbers_is_not_used(chunk):
    states = []
    for graphs in (Incapable(), Wrong()):
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


@pytest.fixture
def cuda(monkeypatch):
    """A device that is made up, in the place of `torch.cuda`; it keeps in which order it is asked for what."""
    cuda = MagicMock()
    cuda.Stream.side_effect = [cuda.own, cuda.first, cuda.second]
    cuda.current_stream.return_value = cuda.ambient
    cuda.graph.return_value.__exit__.return_value = False  # an error passes
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda


def test_warm_ups_and_branches_wait_for_what_was_before_and_are_waited_for(cuda):
    graphs, works = CudaGraphs(torch.device("cuda")), [lambda: cuda.work(1), lambda: cuda.work(2)]

    def order():
        calls = [made for made in cuda.mock_calls if made[0].split(".")[-1] in ("stream", "work", "wait_stream")]
        cuda.reset_mock()
        return calls

    graphs.warm_up(works[0])
    assert order() == [
        call.own.wait_stream(cuda.ambient), call.stream(cuda.own), call.work(1), call.ambient.wait_stream(cuda.own),
    ]  # fmt: skip
    assert graphs.fork(works) == [cuda.work.return_value] * 2
    assert order() == [
        call.first.wait_stream(cuda.ambient), call.stream(cuda.first), call.work(1),
        call.second.wait_stream(cuda.ambient), call.stream(cuda.second), call.work(2),
        call.ambient.wait_stream(cuda.first), call.ambient.wait_stream(cuda.second),
    ]  # fmt: skip
    graphs.fork(works[:1])
    assert cuda.Stream.call_count == 0  # streams are used again


@pytest.mark.parametrize("enabled", [True, False])
def test_a_capture_ends_on_the_stream_it_began_on_and_collects_no_garbage(enabled, cuda):
    """Among it may be older graphs, and to give one up ends the capture of another."""
    graphs, log = CudaGraphs(torch.device("cuda")), []
    assert graphs.capture(lambda: None) is cuda.CUDAGraph.return_value.replay
    assert cuda.graph.call_args.kwargs == {"pool": cuda.graph_pool_handle.return_value, "stream": cuda.own}
    (gc.enable if enabled else gc.disable)()
    try:
        old = ListGraphs()
        old.itself = old
        weakref.finalize(old, log.append, "old one given up")
        del old
        graphs.capture(lambda: log.append(f"collecting: {gc.isenabled()}"))
        assert log == ["old one given up", "collecting: False"]
        assert gc.isenabled() == enabled
        cuda.set_stream.reset_mock()
        with pytest.raises(ZeroDivisionError):
            graphs.capture(lambda: 1 / 0)
        assert gc.isenabled() == enabled
        cuda.set_stream.assert_called_once_with(cuda.ambient)
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
    assert any(stack.graphs.replays for stack in fed.engine.stacks.values())


# Whether two results of a step agree, by which a graph is checked


def results(dtype):
    """Clients and totals before a step, and after it; one of the parameters is large and hardly moves."""
    before = Client(
        {"a": torch.linspace(-1, 1, 9, dtype=dtype), "b": torch.full((4,), 10.0, dtype=dtype)},
        {"count": torch.tensor(3)},
        {"local": {"velocity": torch.ones(3, dtype=dtype)}},
        {"least": torch.tensor([torch.inf, 1.0], dtype=dtype)},
    )
    params = {"a": before.params["a"] - 1e-3, "b": before.params["b"] * (1 - 1e-7)}
    after = before._replace(params=params, buffers={"count": torch.tensor(4)})
    return (before, {"loss": torch.zeros((), dtype=dtype)}), (after, {"loss": torch.ones((), dtype=dtype)})


def changed(state, part, name, change):
    clients, totals = state
    if part == "totals":
        return clients, {name: change(totals[name])}
    values = getattr(clients, part)
    if part == "optimizer":
        return clients._replace(optimizer={"local": {name: change(values["local"][name])}}), totals
    return clients._replace(**{part: {**values, name: change(values[name])}}), totals


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_differs_by_rounding_agrees(dtype):
    before, after = results(dtype)
    assert agree(after, after, before)
    share = 0.3 * TOLERANCE[dtype]
    nearly = changed(after, "params", "a", lambda value: value + share * 1e-3)
    assert agree(nearly, after, before)
    shifted = changed(after, "params", "b", lambda value: value * (1 + torch.finfo(dtype).eps))
    assert agree(shifted, after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("part", "name", "change"),
    [
        ("params", "a", lambda value: value + 5e-5),  # a twentieth of the way, 1e-4 of the parameters
        ("params", "a", lambda value: value * torch.nan),
        ("optimizer", "velocity", torch.zeros_like),
        ("totals", "loss", lambda value: 2 * value),
        ("buffers", "count", lambda value: value - 1),
        ("memory", "least", lambda value: value - 1e-3),
    ],
)
def test_what_differs_by_more_does_not(part, name, change, dtype):
    before, after = results(dtype)
    assert not agree(changed(after, part, name, change), after, before)


# How many operations a joint step does: it decides the speed of a graph of many


# Operations that neither read nor write a value.
FREE = (torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default)


class Count(TorchDispatchMode):
    """Counts operations that do something, views apart; each is at least one kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = (value.alias_info is not None and not value.alias_info.is_write for value in function._schema.returns)
        self.operations += function not in FREE and not any(views)
        return function(*args, **(kwargs or {}))


def joint_step(monkeypatch, chunk, num_clients, backbone, images, batch_size, **run) -> int:
    """The operations of a joint step that is neither the first nor the last."""
    counts, step = [], Stack.step

    def counted(self, *arguments):
        with Count() as mode:
            step(self, *arguments)
        counts.append(mode.operations)

    monkeypatch.setattr(Stack, "step", counted)
    own = 3 * batch_size
    data = laws.toy_dataset(num_clients * own, *images, num_classes=10)
    run |= {"backbone": backbone, "batch_size": batch_size, "local_epochs": 1, "precision": "float32"}
    parts = laws.toy_parts([own] * num_clients)
    setup, fed = laws.federation(
        "fedavg", data=data, parts=parts, num_clients=num_clients, clients_per_chunk=chunk.format(num_clients), **run
    )
    laws.simulate(setup, fed, 1)
    assert len(counts) == 3
    return counts[1]


SGD = {"momentum": 0.9, "weight_decay": 0.0}
W1 = (10, "cnn-mcmahan", (1, 28), 4)
W2 = (20, "cnn-mcmahan", (1, 28), 4)
RESNET = (10, "resnet18", (3, 32), 4)
JOINT_STEPS = {  # way and workload, options, and the most operations of a joint step
    "w1, stacked": ("{}", W1, SGD, 104),
    "w1, branches": ("branches:{}", W1, SGD, 350),
    "w2, branches": ("branches:{}", W2, SGD, 680),
    "FedFM's network, stacked": ("{}", RESNET, {"momentum": 0.9, "weight_decay": 1e-5}, 552),
    "FedFM's network, branches": ("branches:{}", RESNET, {"momentum": 0.9, "weight_decay": 1e-5}, 1612),
}


@pytest.mark.parametrize("case", JOINT_STEPS)
def test_a_joint_step_does_few_operations(case, monkeypatch):
    way, workload, run, most = JOINT_STEPS[case]
    assert joint_step(monkeypatch, way, *workload, **run) <= most


# Which way clients train together where that is tried out


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
