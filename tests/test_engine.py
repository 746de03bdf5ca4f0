"""The engine against the plain loop of tests/plain_federation.py, and its optimizers against torch.optim."""

import os
import subprocess
import sys
import threading
from functools import cache

import numpy as np
import pytest
import torch

from fedcli import toy
from fedcli.core import federation
from fedcli.core.aggregate import class_means, cross_entropy, masked_mean, weighted_mean
from fedcli.core.augment import Transform
from fedcli.core.clients import Aux, Client, Step
from fedcli.core.layers import LiveConv2d, by_places
from fedcli.core.trees import select, tree_map
from fedcli.errors import NonFiniteLoss
from fedcli.registry import find_method
from tests import laws
from tests.first_rounds import limit_memory, prepare_first_round
from tests.plain_federation import PlainFederation
from tests.user_errors import raises_user_error

FEDAVG = find_method("fedavg")


@cache
def trained_in_two_phases(federation_type=None, chunk="auto"):
    """Clients whose parameters were all trained and then some of them, clipped, on images that leave taps dead."""
    run = {
        "backbone": "resnet10", "data": toy.toy_dataset(15, channels=3, size=32), "lr": 0.01, "num_clients": 3,
        "parts": toy.toy_parts((7, 2, 6)), "local_epochs": 1, "weight_decay": 0.1, "clients_per_chunk": chunk,
    }  # fmt: skip
    setup, fed = toy.federation(FEDAVG, federation_type=federation_type, **run)
    has_live_taps = any(isinstance(layer, LiveConv2d) for layer in fed.network.module.modules())
    assert has_live_taps == (federation_type is None)
    assert fed.engine.by_places
    loss = setup.method.module.make_local_loss(fed.network)
    cohort = fed.cohort(0)
    clients = fed.broadcast(*fed.initial_model(), cohort)
    clients, _ = fed.train(clients, cohort, fed.optimizer_step(loss, clip_norm=0.5))
    some = [name for name in clients.params if "layer4" in name and "conv" in name]
    step = fed.optimizer_step(loss, names=some, key="some", clip_norm=0.5)
    clients, _ = fed.train(clients._replace(optimizer={}), cohort, step)
    return clients.params, clients.buffers


@pytest.mark.parametrize(
    "chunk", ["1", pytest.param("3", marks=pytest.mark.slow), pytest.param("branches:2", marks=pytest.mark.slow)]
)
def test_dead_taps_frozen_parameters_and_clipping_agree_with_the_plain_loop(chunk, monkeypatch):
    """Clients are unequal, with partial batches, weight decay and momentum; one by one they also go place by place."""
    place_by_place = LiveConv2d.convolve_by_places
    calls = 0

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return place_by_place(*arguments)

    monkeypatch.setattr(LiveConv2d, "convolve_by_places", counted)
    trained = trained_in_two_phases(chunk=chunk)
    assert (calls > 0) == (chunk != "3")  # of three clients in branches of two one is left alone
    assert by_places.get() is False
    laws.assert_agree(trained, trained_in_two_phases(PlainFederation), "with dead taps")


@pytest.mark.parametrize("drop_last", [True, False])
def test_engine_agrees_under_augmentation_and_dropped_batches(drop_last):
    def simulate(augmentation, **options):
        setup, fed = toy.federation(FEDAVG, drop_last=drop_last, **options)
        fed.transform = Transform((0.5,), (0.5,), augmentation, fed.dtype)
        fed.engine.transform = fed.transform
        assert not fed.engine.by_places  # without dead taps a network goes on to train to the bits that it always has
        return toy.simulate(setup, fed, 2)

    expected = simulate("crop-flip-rotate", federation_type=PlainFederation)
    laws.assert_agree(simulate("crop-flip-rotate", clients_per_chunk="1"), expected, "looped")
    laws.assert_agree(simulate("crop-flip-rotate", clients_per_chunk="4"), expected, "stacked")
    assert toy.distance(simulate("none"), expected) > 1e-3  # the augmentation did something


def quadratic(params, buffers, batch, context):
    """Half the squared distance of both parameters to the context."""
    loss = sum((value - context).square().sum() for value in params.values()) / 2
    return loss, Aux(buffers, {"distance": loss})


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_context_axes_give_each_client_its_own(chunk):
    _, fed = toy.federation(FEDAVG, clients_per_chunk=str(chunk))
    cohort = fed.cohort(0)
    targets = torch.arange(4, dtype=torch.float64)
    start = Client({"a": torch.zeros(4, 2, dtype=torch.float64)}, {}, {})
    step = fed.optimizer_step(quadratic, momentum=0.0, weight_decay=0.0)
    trained, terms = fed.engine.train(step, start, fed.plan(cohort), 0.5, targets, 0)

    steps = torch.tensor(fed.plan(cohort).num_steps)
    expected = targets * (1 - 0.5**steps)
    torch.testing.assert_close(trained.params["a"], expected[:, None].expand(4, 2), rtol=1e-12, atol=1e-12)

    # The loss is half of two coordinates' squares at first, and a quarter of it after each step.
    means = []
    for target, num_steps in zip(targets.tolist(), steps.tolist(), strict=True):
        losses = [target**2 * 0.25**step for step in range(num_steps)]
        means.append(sum(losses) / num_steps)
    expected_terms = torch.tensor(means, dtype=torch.float64)
    torch.testing.assert_close(terms["distance"], expected_terms, rtol=1e-12, atol=1e-12)


def test_a_term_that_is_not_finite_names_round_clients_and_term():
    fed, _, start, _ = prepare_first_round()

    def loss(params, buffers, batch, context):
        value, aux = quadratic(params, buffers, batch, 0.0)
        return value, aux._replace(terms={"fine": value, "broken": value / context})

    with pytest.raises(NonFiniteLoss, match=r"'broken' is not finite in round 4 for client\(s\) 1, 2;"):
        fed.train(start, fed.cohort(3), loss, torch.tensor([1.0, 0, 0, 1.0]), 0)  # the fourth round


@pytest.mark.parametrize("chunk", ["1", "2", "branches:2"])
def test_clients_may_be_without_steps_and_epochs_in_two_calls_are_those_in_one(chunk):
    run = {"drop_last": True, "batch_size": 8, "parts": toy.toy_parts((7, 4, 13, 10)), "clients_per_chunk": chunk}
    fed, cohort, start, loss = prepare_first_round(**run)
    whole, terms = fed.train(start, cohort, loss)
    assert toy.distance(select(whole.params, slice(0, 2)), select(start.params, slice(0, 2))) == 0
    assert (terms["cross_entropy"] > 0).tolist() == [False, False, True, True]

    part, _ = fed.train(start, cohort, loss, epochs=range(0))
    assert toy.distance(part.params, start.params) == 0

    part, _ = fed.train(part, cohort, loss, epochs=range(1))
    part, _ = fed.train(part, cohort, loss, epochs=range(1, 2))
    assert toy.distance((part.params, part.optimizer), (whole.params, whole.optimizer)) == 0


def test_a_weighted_mean_rounds_whole_numbers():
    tree = {"a": torch.tensor([[1.0, 2.0], [3.0, 6.0]]), "n": torch.tensor([1, 4])}
    mean = weighted_mean(tree, torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(mean["a"], torch.tensor([2.5, 5.0]))
    assert mean["n"] == 3  # 3.25, rounded
    assert mean["n"].dtype == torch.int64


def test_class_means_by_loop():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(20, 3, dtype=torch.float64, generator=draw)
    labels = torch.randint(0, 4, (20,), generator=draw)
    labels[labels == 2] = 1  # class 2 is absent
    mask = torch.rand(20, generator=draw) < 0.7
    features[~mask] = torch.nan
    means, counts = class_means(features, labels, 4, mask)
    for label in range(4):
        members = [features[i] for i in range(20) if mask[i] and labels[i] == label]
        assert counts[label] == len(members)
        expected = sum(members) / len(members) if members else torch.zeros(3, dtype=torch.float64)
        torch.testing.assert_close(means[label], expected)


def test_masked_mean_ignores_what_is_masked_even_in_the_gradient():
    logits = torch.tensor([[1.0, 2.0], [torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False])
    values = torch.where(mask[:, None], logits, 0.0)
    loss = cross_entropy(values, torch.tensor([0, 0]), mask)
    loss.backward()
    assert loss.item() == pytest.approx(np.log(1 + np.e))
    assert torch.isfinite(logits.grad).all()
    assert masked_mean(torch.tensor([3.0, 5.0]), torch.tensor([False, False])) == 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["1", "3"])
def test_the_number_of_threads_is_invisible(chunk, two_threads):
    run = {"backbone": "resnet10-3x3", "data": toy.toy_dataset(num_train=19, channels=3), "precision": "float32"}
    run |= {"clients_per_chunk": chunk, "parts": toy.toy_parts((7, 4, 2, 6)), "local_epochs": 1}

    def train_and_predict(threads):
        torch.set_num_threads(threads)
        setup, fed = toy.federation("fedfm", {"start_round": 0}, **run)
        state = toy.simulate(setup, fed, 2)
        outputs = fed.predict(*toy.tested_models(setup, state), np.arange(19))
        assert torch.get_num_threads() == threads
        return state, outputs

    state_of_two, outputs_of_two = train_and_predict(threads=2)
    state_of_one, outputs_of_one = train_and_predict(threads=1)
    assert toy.distance(state_of_two, state_of_one) == 0
    assert toy.distance(outputs_of_two, outputs_of_one) == 0


@pytest.mark.parametrize(("given", "expected"), [({}, "3000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")])
def test_waiting_threads_are_to_sleep_soon_before_torch_is_loaded(given, expected):
    program = "import fedcli, os, sys; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **given}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", expected]


def test_threads_run_side_by_side_in_order_and_one_failure_stops_the_others(two_threads):
    _, fed = toy.federation(FEDAVG)
    meeting = threading.Barrier(2, timeout=30)  # passed only by two threads at once

    def meet(item):
        meeting.wait()
        return 2 * item

    assert fed.engine.runner.map("meet", meet, [1, 2]) == [2, 4]

    stopped = []

    def fail(item):
        if item == 0:
            meeting.wait()
            raise ValueError("broken")
        meeting.wait()
        stopped.append(fed.engine.runner.stopping.wait(30))

    with pytest.raises(ValueError, match="broken"):
        fed.engine.runner.map("fail", fail, [0, 1])
    assert stopped == [True]
    assert not fed.engine.runner.stopping.is_set()


def test_a_stopped_thread_ends_before_its_data_does(two_threads):
    fed, cohort, start, loss = prepare_first_round()
    steps = []

    def count(samples):
        steps.append(samples)
        raise KeyboardInterrupt

    fed.engine.runner.listen(count)
    with pytest.raises(KeyboardInterrupt):
        fed.train(start, cohort, loss)
    assert 1 <= len(steps) <= 4  # of 20


@pytest.mark.parametrize("chunk", ["1", "4"])
def test_a_step_made_of_others_may_look_at_the_parameters_from_before(chunk):
    fed, cohort, start, loss = prepare_first_round(clients_per_chunk=chunk)
    plain = fed.optimizer_step(loss)

    def update(client, batch, context):
        after, aux = plain.update(client, batch, context)
        moved = {name: value + after.params[name] - client.params[name] for name, value in client.memory.items()}
        return after._replace(memory=moved), aux

    start = start._replace(memory=tree_map(torch.zeros_like, start.params))
    trained, _ = fed.train(start, cohort, Step(update, plain.init_optimizer))
    laws.assert_agree(trained.memory, tree_map(torch.sub, trained.params, start.params), "the sum of the moves")


@pytest.mark.parametrize("prepared", [1, 2**9 * 3, 2**30])
def test_how_many_images_are_made_ready_at_a_time_is_invisible(prepared, monkeypatch):
    """An image is 8 x 8 in float64, 2^9 bytes, a batch four of them."""
    setup, fed = toy.federation(FEDAVG)
    fed.transform = Transform((0.5,), (0.5,), "crop-flip", fed.dtype)
    fed.engine.transform = fed.transform
    expected = toy.simulate(setup, fed, 1)
    monkeypatch.setattr("fedcli.core.engine.PREPARED_BYTES", prepared)
    assert toy.distance(toy.simulate(setup, fed, 1), expected) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet18-3x3-gn-projection", 8), ("efficientnet-b0-32", 16), ("mobilenet-v2-32", 8), ("googlenet-512", 16)],
)
def test_networks_of_all_kinds_of_layers_agree_with_the_plain_loop(name, size):
    """With fewer images the last maps, of one pixel, have next to no variance, and rounding errors grow."""
    run = {"parts": toy.toy_parts((6, 5)), "data": toy.toy_dataset(11, channels=3, size=size), "batch_size": 6}
    run |= {"num_clients": 2, "local_epochs": 1, "lr": 1e-3, "backbone": name}
    laws.law_4_chunking_is_invisible(FEDAVG, rounds=1, chunks=(2,), **run)


# Too little memory


@pytest.fixture
def memory_for_two(monkeypatch):
    """How many clients every step that was tried had, where a second step of more than two does not fit."""
    return limit_memory(monkeypatch, 2)


@pytest.mark.parametrize("way", ["", "branches:"])
def test_out_of_memory_halves_the_chunk_and_changes_nothing_else(way, memory_for_two):
    expected = laws.state_after_rounds(2, FEDAVG, clients_per_chunk=f"{way}2")
    memory_for_two.clear()
    setup, fed = toy.federation(FEDAVG, clients_per_chunk=f"{way}4")
    assert toy.distance(toy.simulate(setup, fed, 2), expected) == 0

    assert fed.engine.clients_per_chunk == 2
    assert fed.engine.notes == ["out of memory with 4 clients together; 2 from here on"]
    first, failed, *others = memory_for_two
    assert first == failed == 4
    assert set(others) == {2}


def test_chunks_that_follow_are_cut_too_and_an_odd_one_is_rounded_up(memory_for_two):
    parts = toy.toy_parts((13, 7, 10, 4, 6, 5, 4))
    run = {"parts": parts, "num_clients": 7, "local_epochs": 1}
    expected = laws.state_after_rounds(1, FEDAVG, clients_per_chunk="1", **run)
    setup, fed = toy.federation(FEDAVG, clients_per_chunk="3", **run)
    laws.assert_agree(toy.simulate(setup, fed, 1), expected, "three together, then two")
    assert fed.engine.clients_per_chunk == 2
    assert len(fed.engine.notes) == 1


def test_where_not_even_one_client_fits_the_error_comes_through():
    fed, cohort, start, _ = prepare_first_round(clients_per_chunk="4")

    def loss(params, buffers, batch, context):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        fed.train(start, cohort, loss)
    assert fed.engine.clients_per_chunk == 1
    assert len(fed.engine.notes) == 2


# What clients keep, and what models give


def test_states_of_two_devices_are_moved_before_they_are_stacked(monkeypatch):
    _, fed = toy.federation(FEDAVG)
    fed.device = torch.device("meta")
    on_host = {"a": torch.ones(3)}
    on_device = {"a": torch.zeros(3, device="meta")}
    stack = torch.stack
    devices = []

    def watched(parts):
        devices.append({part.device.type for part in parts})
        return stack(parts)

    monkeypatch.setattr(torch, "stack", watched)
    states = fed.recall({0: on_host, 2: on_device}, fed.cohort(0), {"a": torch.zeros(3)})
    assert states["a"].shape == (4, 3)
    assert devices == [{"meta"}]


@pytest.mark.parametrize("of_test_images", [True, False])
def test_predictions_for_some_images_are_theirs_among_all(of_test_images):
    _, fed = toy.federation(FEDAVG)
    model = fed.initial_model()
    index = np.array([7, 2, 11])

    features, logits, labels = fed.predict(*model, index, test=of_test_images)

    all_features, all_logits, _ = fed.predict(*model) if of_test_images else fed.predict(*model, np.arange(34))
    torch.testing.assert_close(features, all_features[index], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, all_logits[index], rtol=1e-12, atol=1e-12)
    all_labels = fed.test_labels if of_test_images else fed.engine.labels
    assert torch.equal(labels, all_labels[index])


def test_reported_predictions_come_in_portions(monkeypatch):
    """They are those that enter a result but for rounding."""
    monkeypatch.setattr(federation, "QUICK_BATCH", 8)
    _, fed = toy.federation(FEDAVG)
    model = fed.initial_model()
    portions = []
    channel_strides = set()

    def watch(params, buffers, x, **options):
        portions.append(len(x))
        for value in (x, *params.values()):
            if value.dim() == 4:
                _, channel_stride, _, _ = value.stride()
                channel_strides.add(channel_stride)
        return fed.network(params, buffers, x, **options)

    watch.module = fed.network.module
    reported = fed.predict(*model, network=watch, quick=True)
    for part, whole in zip(reported, fed.predict(*model), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)
    assert sorted(portions) == [4, 8, 8]
    assert channel_strides == {1}  # the channels last


@pytest.mark.parametrize("chunk", ["1", "branches:2"])
def test_a_term_that_only_some_steps_have_is_summed_over_those(chunk):
    parts = toy.toy_parts((8, 8, 8, 8))  # so that epochs end together
    fed, cohort, start, loss = prepare_first_round(clients_per_chunk=chunk, parts=parts)

    def with_some_terms(params, buffers, batch, context):
        value, aux = loss(params, buffers, batch, context)
        ones = torch.ones_like(value)
        return value, aux.with_term("last" if bool(batch.epoch_end) else "others", ones)

    _, terms = fed.train(start, cohort, with_some_terms)
    steps = fed.local_steps(cohort)
    torch.testing.assert_close(terms["last"], fed.local_epochs / steps)
    torch.testing.assert_close(terms["others"], 1 - fed.local_epochs / steps)


@pytest.mark.parametrize("chunk", ["1", "2"])
def test_a_step_that_moves_no_parameter_is_refused(chunk):
    fed, cohort, start, loss = prepare_first_round(clients_per_chunk=chunk)
    step = fed.optimizer_step(loss, names=["absent"])
    with raises_user_error("moves no parameter", "names=['absent']"):
        fed.train(start, cohort, step)


def test_an_unknown_optimizer_of_a_step_is_refused():
    fed, _, _, loss = prepare_first_round()
    with raises_user_error("unknown optimizer", "rmsprop"):
        fed.optimizer_step(loss, optimizer="rmsprop")
