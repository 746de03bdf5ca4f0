"""The benchmark's engine and plain loop do the same work."""

import json
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fedcli import registry
from fedcli.bench import engine_rounds, random_images, workloads
from fedcli.data import imports
from fedcli.runs import prepare
from fedcli.runs.rounds import one_round
from tests import laws
from tests.bench_parts import (
    OF_ENGINE,
    TINY_CNN,
    TINY_RESNET,
    TINY_SMALL,
    WRITTEN,
    prepare_sides,
    time_tiny,
)

pytestmark = pytest.mark.usefixtures("reduced_workloads")


def test_real_images_are_taken_where_they_are_there(tmp_path, monkeypatch):
    arrays = random_images.draw_images((28, 28), num_train=100, num_test=20)
    np.savez(tmp_path / "own.npz", **arrays)
    imports.import_path("own", tmp_path / "own.npz")
    trained_on = []  # the images of each measurement
    prepare_run = prepare.prepare

    def watched(setup):
        prepared = prepare_run(setup)
        dataset, *_ = prepared
        trained_on.append({image.numpy().tobytes() for image in dataset.x_train})
        return prepared

    monkeypatch.setattr(engine_rounds, "prepare", watched)
    assert time_tiny(TINY_CNN).images == "random"
    assert time_tiny(replace(TINY_CNN, dataset="own")).images == "real"

    drawn, imported = trained_on
    assert len(drawn) == len(imported) == 80  # of 90 and 100, as many as the clients hold
    assert imported <= {image.tobytes() for image in arrays["x_train"]}


class RoundOfBothSides(NamedTuple):
    """Sizes of minibatches of each side in the first round, and the images that the plain loop has seen."""

    engine_sizes: list[int]
    plain_sizes: list[int]
    plain_images: list[bytes]
    images: list[bytes]  # of the round's clients


def run_both_sides(chunk):
    engine_sizes = []
    plain_sizes = []
    plain_images = []
    setup, fed, plain = prepare_sides(TINY_CNN, clients_per_chunk=chunk)
    fed.engine.runner.listen(engine_sizes.append)

    def watch(module, inputs, output):
        (x,) = inputs
        plain_sizes.append(len(x))
        plain_images.extend(image.numpy().tobytes() for image in x)

    plain.model.register_forward_hook(watch)
    cohort = fed.cohort(0)
    one_round(setup, fed, laws.initial_state(setup, fed), cohort)
    plain.run_round(cohort.client_ids)

    tensors, _ = fed.engine.gather(np.concatenate([fed.training[client] for client in cohort.client_ids]))
    images = [image.contiguous().numpy().tobytes() for image in tensors]
    return RoundOfBothSides(engine_sizes, plain_sizes, plain_images, images)


@pytest.mark.parametrize("chunk", ["1", "2"])
def test_both_sides_take_the_same_steps_on_the_same_images(chunk):
    both = run_both_sides(chunk)
    assert sum(both.engine_sizes) == sum(both.plain_sizes) == 80
    assert sorted(both.plain_sizes) == 4 * [4] + 8 * [8]
    epochs = 2
    assert sorted(both.plain_images) == sorted(epochs * both.images)


def test_one_client_after_the_other_both_sides_have_minibatches_of_the_same_sizes():
    both = run_both_sides("1")
    assert sorted(both.engine_sizes) == sorted(both.plain_sizes)


@pytest.mark.slow
@pytest.mark.parametrize("workload", [TINY_CNN, TINY_SMALL, TINY_RESNET], ids=["cnn", "small", "resnet"])
def test_both_sides_end_with_the_same_model_where_the_order_of_examples_does_not_matter(workload):
    setup, fed, plain = prepare_sides(replace(workload, batch_size=workload.train_examples // 4), precision="float64")
    state = laws.initial_state(setup, fed)
    buffers = [name for name, _ in plain.model.named_buffers() if "num_batches_tracked" not in name]
    names = [name for name, _ in plain.model.named_parameters()] + buffers
    assert bool(buffers) == (workload is TINY_RESNET)

    for name, value in zip(names, [*state.params.values(), *state.buffers.values()], strict=True):
        plain.state[name].copy_(value)
    for number in range(2):
        state, _ = one_round(setup, fed, state, fed.cohort(number))
        plain.run_round(fed.cohort(number).client_ids)
    for name, value in zip(names, [*state.params.values(), *state.buffers.values()], strict=True):
        torch.testing.assert_close(plain.state[name], value, rtol=1e-7, atol=1e-9)


def test_no_value_of_a_protocol_enters():
    for method in registry.methods().values():
        setup = workloads.prepare_workload(TINY_CNN, method=method.name, device="cpu")
        config = setup.config
        assert config.lr == 0.01
        assert config.momentum == 0.9
        assert config.weight_decay == 0
        assert config.lr_decay == 1
        assert config.optimizer == "sgd"
        assert config.validation == 0
        assert config.drop_last is False
        assert config.partition == "iid"
        assert setup.data_setting is None
        assert config.num_clients == 4
        assert config.cohort_size == 2
        assert config.local_epochs == 2
        assert config.batch_size == 8
        assert setup.method_config == method.config()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedmd", "fccl", "fedgen"])
def test_a_method_of_each_kind_can_be_timed_on_a_workload(name):
    result = time_tiny(method=name, clients_per_chunk="2", seed=3).as_dict()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    expected = {
        "workload": "tiny", "method": name, "mode": "stacked x 2", "device": "cpu", "seed": 3, "cohort_size": 2,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    assert result.items() >= expected.items()
    assert result["peak_bytes"] > 2**20
    assert list(result) == (WRITTEN if name == "fedavg" else OF_ENGINE)
