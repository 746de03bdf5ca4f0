"""Steps as graphs, on the fake CUDA device: the bits of the CPU's steps, and how often Python waits and launches."""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from fedcli import check, toy
from fedcli.core.aggregate import weighted_mean
from fedcli.core.clients import Aux, Client, Step
from fedcli.core.federation import NOTHING_STAYS, Federation
from fedcli.core.graphs import MAX_STACKS, CudaGraphs
from fedcli.core.network import NetworkOutput
from fedcli.core.public_images import make_public_loss
from fedcli.core.stacked import Stack
from fedcli.core.trees import Flat, leaves, tree_map
from fedcli.errors import UserError
from fedcli.registry import find_method, methods
from fedcli.runs.rounds import one_round
from tests import fake_cuda, laws
from tests.fake_cuda import FakeCuda, fused_sgd, to_host
from tests.fake_cuda_runs import early_captures, on_fake_cuda, run_on_cpu, run_on_fake_cuda
from tests.first_rounds import prepare_first_round
from tests.networks import replace_all_networks
from tests.slow import KINDS, parameters_of
from tests.toy_methods import STATEFUL, MethodCase, fedavg_round, make_quick

pytestmark = pytest.mark.slow

FEDAVG = find_method("fedavg")
FEDFM = find_method("fedfm")


CASES = {
    "fedavg": MethodCase(FEDAVG, overrides={}, run_options={"lr_decay": 0.5}),
    "fedfm": MethodCase(FEDFM, overrides={"start_round": 1}, run_options={}),
    "fedfa": MethodCase(find_method("fedfa"), overrides={}, run_options={}),  # uses the number of a client's batches
    # Two gradients a step, and a direction that the server sends.
    "mofedsam": MethodCase(find_method("mofedsam"), overrides={}, run_options={}),
    "stateful": MethodCase(STATEFUL, overrides={}, run_options={}),
    "adam": MethodCase(FEDAVG, overrides={}, run_options={"optimizer": "adam", "lr": 0.003}),
}


class Limits(NamedTuple):
    """How often Python waits for the device in a round at most, and how many kernels it launches."""

    waits: int
    launches: int


# In the third round of each method.
LIMITS_OF_A_NEW_METHOD = Limits(waits=120, launches=1100)
LIMITS = {
    "fccl-plus": Limits(waits=74, launches=1009),
    "fccl": Limits(waits=61, launches=994),
    "fedcme": Limits(waits=65, launches=388),
    "fedfa": Limits(waits=43, launches=313),
    "fedfm": Limits(waits=34, launches=350),
    "fedfm-lite": Limits(waits=34, launches=540),
    "fedprox-fm": Limits(waits=34, launches=365),
    "fednova-fm": Limits(waits=36, launches=383),
    "moon-fm": Limits(waits=35, launches=575),
    "fedsa": Limits(waits=36, launches=558),
    "apfl": Limits(waits=47, launches=578),
    "ditto": Limits(waits=54, launches=602),
    "fedavg": Limits(waits=28, launches=216),
    "fedavgm": Limits(waits=28, launches=296),
    "fedbabu": Limits(waits=53, launches=527),
    "fedbn": Limits(waits=28, launches=224),
    "fedcm": Limits(waits=30, launches=318),
    "feddecorr": Limits(waits=28, launches=223),
    "feddf": Limits(waits=57, launches=544),
    "feddf-client": Limits(waits=63, launches=641),
    "feddistill": Limits(waits=36, launches=428),
    "feddyn": Limits(waits=29, launches=552),
    "fedgen": Limits(waits=50, launches=584),
    "fedkd": Limits(waits=52, launches=619),
    "fedlc": Limits(waits=36, launches=237),
    "fedmatch": Limits(waits=72, launches=746),
    "fedmd": Limits(waits=68, launches=718),
    "fednova": Limits(waits=30, launches=249),
    "fedntd": Limits(waits=28, launches=231),
    "fedadam": Limits(waits=28, launches=400),
    "fedyogi": Limits(waits=28, launches=424),
    "fedadagrad": Limits(waits=28, launches=384),
    "fedper": Limits(waits=28, launches=262),
    "fedproc": Limits(waits=47, launches=327),
    "fedproto": Limits(waits=36, launches=428),
    "fedproto-general": Limits(waits=31, launches=256),
    "fedprox": Limits(waits=28, launches=231),
    "fedrep": Limits(waits=46, launches=363),
    "fedrod": Limits(waits=40, launches=330),
    "fedrs": Limits(waits=36, launches=238),
    "fedsam": Limits(waits=28, launches=223),
    "mofedsam": Limits(waits=30, launches=325),
    "fedtgp": Limits(waits=41, launches=779),
    "fml": Limits(waits=48, launches=576),
    "lg-fedavg": Limits(waits=32, launches=348),
    "local": Limits(waits=33, launches=383),
    "moon": Limits(waits=29, launches=441),
    "pfedme": Limits(waits=36, launches=458),
    "rhfl": Limits(waits=105, launches=946),
    "scaffold": Limits(waits=31, launches=602),
}


def test_every_limit_is_of_a_method_that_there_is():
    assert LIMITS.keys() <= methods().keys()


def assert_sound(name: str, chunk: str) -> None:
    """Holds three rounds of a method to those of the CPU, to captures in the first two, and to `LIMITS`."""
    method = make_quick(find_method(name))
    parts = toy.toy_parts((7, 3, 6, 2))  # no full batch of 4 for all: one graph
    run = {"clients_per_chunk": chunk, "local_epochs": 1, "parts": parts}

    with early_captures():
        ran = run_on_fake_cuda(method, **run)
        assert {*ran.fed.engine.notes} <= {NOTHING_STAYS}  # with FedBN, as the network has no batch normalisation
        assert ran.device.captures, "a local objective is closed over what may change; that belongs into its context"
        assert toy.distance(ran.state, run_on_cpu(method, **run)) == 0

    assert bool(ran.fed.engine.calls) == method.uses_public_data  # these steps are graphs as well
    last = ran.rounds[-1]
    assert last["captures"] == 0
    if chunk == "4":
        limits = LIMITS.get(name, LIMITS_OF_A_NEW_METHOD)
        assert last["waits"] <= limits.waits
        assert last["launches"] <= limits.launches


@pytest.mark.parametrize("name", parameters_of(methods()))
@on_fake_cuda
def test_every_method_is_sound_with_its_clients_stacked(name):
    assert_sound(name, "4")


@pytest.mark.parametrize("name", KINDS)
@on_fake_cuda
def test_a_method_of_each_kind_is_sound_with_its_clients_in_branches(name):
    assert_sound(name, "branches:4")


@pytest.mark.parametrize("chunk", ["4", "branches:3", "1"])
@pytest.mark.parametrize("case", CASES)
@on_fake_cuda
def test_replayed_steps_are_the_steps(case, chunk):
    """A new learning rate, new contexts and new clients in every round must reach a graph of the first."""
    method, overrides, run = CASES[case]
    with early_captures():
        ran = run_on_fake_cuda(method, overrides, clients_per_chunk=chunk, **run)
        assert toy.distance(ran.state, run_on_cpu(method, overrides, clients_per_chunk=chunk, **run)) == 0

    captured = ran.fed.engine.graphs.num_captured
    assert captured >= 1
    assert ran.device.captures == 1 + captured
    assert ran.rounds[-1]["captures"] == 0
    assert ran.fed.engine.notes == []


@contextmanager
def fused_calls():
    """The calls of the fused SGD, each by how many parameters it updates."""
    calls = []

    def watched(params, *lists, **options):
        calls.append(len(params))
        fused_sgd(params, *lists, **options)

    with patch.dict(fake_cuda.OWN_KERNELS, {torch.ops.aten._fused_sgd_: watched}):
        yield calls


@pytest.mark.parametrize("chunk", ["4", "branches:4"])
@on_fake_cuda
def test_graphs_update_in_place_in_float32_with_the_bits_of_the_plain_formulas(chunk):
    """Clients of unequal size stand still in some steps."""
    common = {"clients_per_chunk": chunk, "precision": "float32", "local_epochs": 1}
    without_momentum = {**common, "momentum": 0.0, "weight_decay": 0.0, "backbone": toy.BATCHNORM}
    calls = 0

    for run in (common, without_momentum):
        with early_captures(), fused_calls() as fused:
            ran = run_on_fake_cuda(FEDAVG, **run)
            plain = run_on_fake_cuda(FEDAVG, graphs=False, **run)
        calls += len(fused)
        assert toy.distance(ran.state, plain.state) == 0
        assert ran.fed.engine.notes == []
        assert toy.distance(ran.state, run_on_cpu(FEDAVG, **run)) == 0

    assert calls > 4 * 3


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@on_fake_cuda
def test_steps_of_adam_in_float32_are_not_those_of_the_fused_sgd(optimizer):
    """Clients of unequal size stand still in some steps, which SGD leaves out by its own operation."""
    run = {"clients_per_chunk": "4", "precision": "float32", "local_epochs": 1, "optimizer": optimizer, "lr": 0.003}
    with early_captures():
        ran = run_on_fake_cuda(FEDAVG, **run)
    assert ran.fed.engine.graphs.num_captured > 0
    assert toy.distance(ran.state, run_on_cpu(FEDAVG, **run)) == 0


@on_fake_cuda
def test_mixed_precision_has_the_same_bits_in_a_graph():
    with early_captures():
        ran = run_on_fake_cuda(FEDAVG, clients_per_chunk="4", precision="bf16")
        one_by_one = run_on_fake_cuda(FEDAVG, clients_per_chunk="4", precision="bf16", graphs=False)
    assert toy.distance(ran.state, one_by_one.state) == 0
    assert ran.fed.engine.graphs.num_captured == 2
    assert ran.fed.engine.notes == []


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@on_fake_cuda
def test_a_run_on_the_device_goes_on_from_a_checkpoint_with_the_same_bits(name):
    with FakeCuda.running(), early_captures(), patch.dict(check.MAX_ROUNDING_OF, cuda=0.0):
        laws.law_7_resume_is_invisible(
            make_quick(find_method(name)), device="cuda", clients_per_chunk="4", local_epochs=1
        )


# Four clients of whom one has 24 examples, six steps in an epoch.
MANY_STEPS = {"parts": toy.toy_parts((13, 16, 24, 7)), "lr": 0.01, "local_epochs": 4}


@pytest.mark.parametrize("chunk", ["4", "branches:4"])
@on_fake_cuda
def test_a_graph_of_several_steps_takes_as_many(chunk):
    run = {"clients_per_chunk": chunk, **MANY_STEPS}
    with pytest.MonkeyPatch.context() as monkeypatch, early_captures(burst=3):
        replace_all_networks(monkeypatch)
        ran = run_on_fake_cuda(FEDAVG, **run)
        assert toy.distance(ran.state, run_on_cpu(FEDAVG, **run)) == 0

    (stack,) = ran.fed.engine.stacks.values()
    assert set(stack.graphs.replays) == {(False, 1), (False, 3), (True, 1)}

    rounds, epochs, steps_of_an_epoch = 3, 4, 6
    assert ran.device.replays < 2 * rounds * epochs * steps_of_an_epoch / 3


@on_fake_cuda
def test_after_a_graph_of_several_steps_that_is_wrong_all_steps_are_taken():
    run = {"rounds": 1, "clients_per_chunk": "4", **MANY_STEPS}
    with pytest.MonkeyPatch.context() as monkeypatch, early_captures(burst=3), wrong_graphs(first=3):
        replace_all_networks(monkeypatch)
        ran = run_on_fake_cuda(FEDAVG, **run)
        assert toy.distance(ran.state, run_on_cpu(FEDAVG, **run)) == 0

    assert ran.device.captures == 1 + 3
    assert ran.fed.engine.graphs is None


def use_augmentation(augmentation, fed):
    fed.transform = replace(fed.transform, augmentation=augmentation)
    fed.engine.transform = fed.transform


@pytest.mark.parametrize("augmentation", ["crop-flip-rotate", "resized-crop-colour"])
@on_fake_cuda
def test_augmentation_is_in_the_graph(augmentation):
    run = {"rounds": 2, "clients_per_chunk": "4", "local_epochs": 1}
    run["change"] = partial(use_augmentation, augmentation)
    with early_captures():
        ran = run_on_fake_cuda(FEDAVG, **run)
        assert toy.distance(ran.state, run_on_cpu(FEDAVG, **run)) == 0
    assert ran.device.replays > 0


@on_fake_cuda
def test_pixels_are_multiplied_in_full_precision_where_networks_are_not():
    products = torch.backends.cuda.matmul
    of_pixels = set()  # whether TF32 was allowed in each product
    of_layers = set()

    def watched(left, right):
        is_of_pixels = left.shape == right.shape  # images are square, and no layer is
        allowed = of_pixels if is_of_pixels else of_layers
        allowed.add(products.allow_tf32)
        return torch.bmm(left, right)

    products.allow_tf32 = True
    try:
        with patch.dict(fake_cuda.OWN_KERNELS, {torch.ops.aten.bmm: watched}):
            run = {"rounds": 1, "clients_per_chunk": "4", "local_epochs": 1, "graphs": False}
            run_on_fake_cuda(FEDAVG, change=partial(use_augmentation, "resized-crop"), **run)
        assert products.allow_tf32
    finally:
        products.allow_tf32 = False

    assert of_pixels == {False}
    assert of_layers == {True}


class Memory(NamedTuple):
    """What clients gather."""

    loss: torch.Tensor  # [K], its sum


@on_fake_cuda
def test_what_clients_gather_in_half_precision_is_compared_too():
    def gathers(state, cohort, fed, config):
        plain = fed.optimizer_step(FEDAVG.module.make_local_loss(fed.network))

        def update(client, batch, context):
            after, aux = plain.update(client, batch, context)
            memory = Memory(client.memory.loss + aux.terms["cross_entropy"].bfloat16())
            return after._replace(memory=memory), aux

        start = fed.broadcast(state.params, state.buffers, cohort)
        memory = Memory(torch.zeros(len(cohort.client_ids), dtype=torch.bfloat16, device=fed.device))
        clients, terms = fed.train(start._replace(memory=memory), cohort, Step(update, plain.init_optimizer))
        assert (clients.memory.loss > 0).all()
        params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
        return state._replace(params=params, buffers=buffers), terms

    with early_captures():
        ran = run_on_fake_cuda(replace(FEDAVG, run_round=gathers), clients_per_chunk="4")
        assert toy.distance(ran.state, run_on_cpu(FEDAVG, clients_per_chunk="4")) == 0
    assert ran.fed.engine.notes == []
    assert ran.fed.engine.graphs.num_captured == 2


class PublicSteps(NamedTuple):
    """Clients after some steps on public images, and what the last one gave."""

    clients: Client
    aux: Aux
    outputs: NetworkOutput
    fed: Federation

    @property
    def tensors(self):
        return self.clients, self.aux, self.outputs


def make_mean_loss(network):
    """An objective that pulls the outputs of a client to the mean of all."""
    return make_public_loss(network, "distance", lambda logits, mean: (logits - mean).norm())


def make_reading_loss(network):
    """The same objective, which brings a value to Python, as no graph can."""
    mean_loss = make_mean_loss(network)

    def loss(params, buffers, batch, context):
        assert batch.lr.item() > 0
        return mean_loss(params, buffers, batch, context)

    return loss


def learn_in_public(chunk, make_loss=make_mean_loss, graphs=True, **run) -> PublicSteps:
    """Takes steps on public batches of 5, 5 and 2 images, five times, towards the clients' own mean outputs."""
    _, fed = toy.federation("fedmd", clients_per_chunk=chunk, backbone=toy.BATCHNORM, **run)
    if not graphs:
        fed.engine.graphs = None
    loss = make_loss(fed.network)
    cohort = fed.cohort(0)
    clients = fed.broadcast(*fed.initial_model(), cohort)
    for round in range(5):
        for batch in fed.public_batches(round):
            outputs = fed.forward(clients, cohort, batch.x)
            clients, aux = fed.step(clients, cohort, loss, batch, outputs.logits.mean(0))
    return PublicSteps(to_host(clients), to_host(aux), to_host(outputs), fed)


@pytest.mark.parametrize("chunk", ["4", "branches:3"])
@on_fake_cuda
def test_steps_and_outputs_on_public_images_are_graphs(chunk):
    with early_captures():
        with FakeCuda.running() as device:
            public = learn_in_public(chunk, device="cuda")
        one_by_one = learn_in_public("1")
        laws.assert_agree(public.clients, one_by_one.clients, "clients after public images")
        laws.assert_agree(public.aux, one_by_one.aux, "terms of public images")
        laws.assert_agree(public.outputs, one_by_one.outputs, "outputs for public images")

    chunk_sizes = 1 if chunk == "4" else 2  # 3 clients and 1
    kinds = 2 * 2 * chunk_sizes  # steps and outputs, of 5 and of 2 images
    assert len(public.fed.engine.calls) == kinds
    assert device.captures == 1 + kinds
    assert public.fed.engine.notes == []


@on_fake_cuda
def test_graphs_of_steps_on_public_images_update_in_place_with_the_same_bits():
    run = {"device": "cuda", "precision": "float32"}
    with early_captures(), fused_calls() as fused:
        with FakeCuda.running():
            public = learn_in_public("4", **run)
        with FakeCuda.running():
            without_graphs = learn_in_public("4", graphs=False, **run)
    assert toy.distance(public.tensors, without_graphs.tensors) == 0
    assert fused


@on_fake_cuda
def test_a_public_step_that_cannot_be_captured_goes_on_without_a_graph_and_says_so_once():
    with early_captures():
        with FakeCuda.running() as device:
            public = learn_in_public("4", make_reading_loss, device="cuda")
        laws.assert_agree(public.clients, learn_in_public("1").clients, "public images")

    assert public.fed.engine.graphs is None
    assert public.fed.engine.calls == {}

    (note,) = public.fed.engine.notes
    assert "operation not permitted when stream is capturing" in note
    assert device.captures == 2  # the memory, and the outputs before the first step that failed


@on_fake_cuda
def test_a_stack_is_kept_for_steps_of_the_same_kind_and_shape():
    assert MAX_STACKS == 4

    with early_captures(), FakeCuda.running() as device:
        setup, fed = toy.federation(FEDAVG, device="cuda", clients_per_chunk="4")
        toy.simulate(setup, fed, 4)
        assert device.captures == 1 + 2  # the memory, and steps with and without a mask

        before = device.captures
        setup, fed = toy.federation(FEDAVG, device="cuda", clients_per_chunk="3")
        toy.simulate(setup, fed, 4)
        assert device.captures - before == 1 + 3  # chunks of 3 and 1, of which that never has a mask
        assert len(fed.engine.stacks) == 2

        fed.engine.way = "branches"
        cohort = fed.cohort(0)
        start = fed.broadcast(*fed.initial_model(), cohort)
        loss = FEDAVG.module.make_local_loss(fed.network)
        fed.train(start, cohort, loss)
        assert len(fed.engine.stacks) == MAX_STACKS

        fed.train(start, cohort, fed.optimizer_step(loss, weight_decay=0.5))
        assert len(fed.engine.stacks) == MAX_STACKS  # the oldest went


@on_fake_cuda
def test_a_step_that_cannot_be_known_again_is_captured_for_one_call():
    def trained_twice(**run):
        fed, cohort, start, plain = prepare_first_round(
            clients_per_chunk="4", parts=toy.toy_parts((8, 12, 16, 12)), **run
        )
        for factor in (1.0, 2.0):
            # Not in the context, as it should be, so that it may be another one the next time.
            scale = torch.full((), factor, dtype=fed.dtype, device=fed.device)

            def loss(params, buffers, batch, context, scale=scale):
                value, aux = plain(params, buffers, batch, context)
                return scale * value, aux

            trained, _ = fed.train(start, cohort, loss)
            yield to_host(trained.params), fed

    params_on_cpu = [params for params, _ in trained_twice()]
    with early_captures(), FakeCuda.running() as device:
        for expected, (params, fed) in zip(params_on_cpu, trained_twice(device="cuda"), strict=True):
            laws.assert_agree(params, expected, "the loss times a factor")
            assert fed.engine.stacks == {}
        assert device.captures == 1 + 2


def reading_method():
    """FedAvg with an objective that brings a value to Python, which no graph can hold."""

    def run_round(state, cohort, fed, config):
        plain = FEDAVG.module.make_local_loss(fed.network)

        def loss(params, buffers, batch, context):
            value, aux = plain(params, buffers, batch, context)
            assert batch.lr.item() > 0
            return value, aux

        return fedavg_round(state, cohort, fed, loss)

    return replace(FEDAVG, run_round=run_round)


@pytest.mark.parametrize("chunk", ["4", "branches:4"])
@on_fake_cuda
def test_a_step_that_cannot_be_captured_goes_on_without_a_graph_and_says_so_once(chunk):
    with early_captures():
        ran = run_on_fake_cuda(reading_method(), clients_per_chunk=chunk)
        assert toy.distance(ran.state, run_on_cpu(FEDAVG, clients_per_chunk=chunk)) == 0

    assert ran.device.replays == 0
    assert ran.fed.engine.graphs is None
    (note,) = ran.fed.engine.notes
    assert "operation not permitted when stream is capturing" in note


def wrong_graphs(first=1):
    """Graphs whose replay moves a parameter too far, from the `first` on."""
    capture = CudaGraphs.capture

    def wrong_capture(self, work):
        replay = capture(self, work)

        def wrong():
            replay()
            stack = work.func.__self__
            Flat(stack.clients.params[""], stack.template.params.shapes)["head.bias"].mul_(1.0001)

        return wrong if self.num_captured >= first else replay

    return patch.object(CudaGraphs, "capture", wrong_capture)


@pytest.mark.parametrize("chunk", ["4", "branches:3", "1"])
@on_fake_cuda
def test_a_graph_that_replays_wrong_numbers_is_not_used(chunk):
    with early_captures(), wrong_graphs():
        ran = run_on_fake_cuda(FEDAVG, rounds=2, clients_per_chunk=chunk)
        right = run_on_cpu(FEDAVG, rounds=2, clients_per_chunk=chunk)
    if chunk == "1":  # then each client trains alone
        laws.assert_agree(ran.state, right, "without graphs")
    else:
        assert toy.distance(ran.state, right) == 0  # not a bit of it is left

    assert ran.fed.engine.graphs is None
    assert ran.fed.engine.stacks == {}
    assert ran.rounds[-1]["captures"] == 0

    (note,) = ran.fed.engine.notes
    assert "gave other numbers than the step" in note


@on_fake_cuda
def test_a_capture_that_runs_out_of_memory_halves_the_chunk():
    capture = CudaGraphs.capture

    def limited(self, work):
        def too_large():
            work()
            raise torch.OutOfMemoryError("no memory")

        stack = work.func.__self__
        num_clients = len(stack.clients.params[""])
        return capture(self, too_large if num_clients == 4 else work)

    with early_captures(), patch.object(CudaGraphs, "capture", limited):
        ran = run_on_fake_cuda(FEDAVG, rounds=2, clients_per_chunk="4")
    assert toy.distance(ran.state, run_on_cpu(FEDAVG, rounds=2, clients_per_chunk="2")) == 0
    assert ran.fed.engine.clients_per_chunk == 2
    assert ran.fed.engine.notes == ["out of memory with 4 clients together; 2 from here on"]
    assert ran.device.captures


@pytest.mark.parametrize("enabled", [True, False])
@on_fake_cuda
def test_a_capture_ends_on_the_stream_it_began_on_and_collects_no_garbage(enabled):
    """Among it may be older graphs, and to give one up ends the capture of another."""

    class Garbage:
        pass

    with FakeCuda.running() as device:
        graphs = CudaGraphs(torch.device("cuda"))
        log = []
        if enabled:
            gc.enable()
        else:
            gc.disable()
        try:
            garbage = Garbage()
            garbage.itself = garbage
            weakref.finalize(garbage, log.append, "collected")
            del garbage
            graphs.capture(lambda: log.append(f"collecting: {gc.isenabled()}"))
            assert log == ["collected", "collecting: False"]
            assert gc.isenabled() == enabled

            with pytest.raises(RuntimeError, match="previous error"):
                graphs.capture(lambda: torch.ones(1, device="cuda").item())
            assert gc.isenabled() == enabled
            assert torch.cuda.current_stream() is device.races.main

            graphs.capture(lambda: torch.ones(1, device="cuda"))  # in other memory
        finally:
            gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", ["4", "branches:4", "1"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_cuda_device_steps_are_graphs_and_agree_with_the_cpu(case, chunk):
    method, overrides, run = CASES[case]
    setup, fed = toy.federation(method, overrides, clients_per_chunk=chunk, device="cuda", **run)
    state = tree_map(torch.Tensor.cpu, toy.simulate(setup, fed, 3))
    laws.assert_agree(state, laws.state_after_rounds(3, method, overrides, **run), f"{case} on CUDA")
    assert fed.engine.notes == []
    assert any(stack.graphs.replays for stack in fed.engine.stacks.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_failed_capture_on_cuda_leaves_the_next_run_its_graphs():
    setup, fed = toy.federation(reading_method(), clients_per_chunk="4", device="cuda")
    toy.simulate(setup, fed, 3)
    assert len(fed.engine.notes) == 1

    setup, fed = toy.federation(FEDAVG, clients_per_chunk="4", device="cuda")
    toy.simulate(setup, fed, 3)
    assert fed.engine.notes == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_whatever_the_device_says_of_its_memory_halves_the_chunk(error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    fed, cohort, start, loss = prepare_first_round(clients_per_chunk="4")
    step = Stack.take_step
    raised = error

    def limited(self, *arguments):
        first_leaf, *_ = leaves(self.clients)
        if len(first_leaf) > 2:
            raise raised
        step(self, *arguments)

    monkeypatch.setattr(Stack, "take_step", limited)
    fed.train(start, cohort, loss)
    assert fed.engine.notes == ["out of memory with 4 clients together; 2 from here on"]

    raised = RuntimeError("another error")
    fed.engine.clients_per_chunk = 4
    with pytest.raises(RuntimeError, match="another error"):
        fed.train(start, cohort, loss)


@on_fake_cuda
def test_a_round_that_draws_on_the_device_is_refused():
    def draws(state, cohort, fed, config):
        torch.rand(1, device=fed.device)
        return FEDAVG.run_round(state, cohort, fed, config)

    with FakeCuda.running():
        setup, fed = toy.federation(replace(FEDAVG, run_round=draws), device="cuda")
        state = laws.initial_state(setup, fed)
        with pytest.raises(UserError, match="draws from PyTorch's global generator in round 1"):
            one_round(setup, fed, state, fed.cohort(0))
