"""How often Python waits for the device outside of the steps of clients, on the fake CUDA device."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from fedcli import toy
from fedcli.core.client_states import refuse_non_finite
from fedcli.core.federation import Federation
from fedcli.core.tree_files import save_tree
from fedcli.registry import find_method
from tests import laws
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_runs import on_fake_cuda


class Start(NamedTuple):
    """FedAvg before its first round."""

    state: Any
    fed: Federation


def start_on_device():
    setup, fed = toy.federation("fedavg", device="cuda")
    return Start(laws.initial_state(setup, fed), fed)


@on_fake_cuda
def test_the_state_of_a_round_is_looked_at_once():
    with FakeCuda.running() as device:
        state, _ = start_on_device()
        before = device.waits.total()
        refuse_non_finite(state, 0)
        assert device.waits.total() - before == 1


@on_fake_cuda
def test_the_state_of_a_round_is_written_in_one_copy():
    with FakeCuda.running() as device, TemporaryDirectory() as folder:
        state, _ = start_on_device()
        before = device.waits.total()
        save_tree(Path(folder, "state"), state, {})
        assert device.waits.total() - before == 1


@on_fake_cuda
def test_features_cost_no_copy_more_than_logits():
    with FakeCuda.running() as device:
        state, fed = start_on_device()
        fed.predict(state.params, state.buffers)  # the first one in a process copies the constants of normalisation

        before = device.waits.total()
        features, *_ = fed.predict(state.params, state.buffers, with_features=True)
        waits_with_features = device.waits.total() - before
        assert features is not None

        before = device.waits.total()
        features, *_ = fed.predict(state.params, state.buffers, with_features=False)
        waits_without = device.waits.total() - before
        assert features is None
        assert waits_with_features == waits_without <= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method_name", "function_name", "expected"), [("fedtgp", "train_network", 1), ("fedkd", "exchange", 0)]
)
@on_fake_cuda
def test_what_a_server_does_waits_once_at_most(method_name, function_name, expected):
    method = find_method(method_name)
    function = getattr(method.module, function_name)
    waits = []

    with FakeCuda.running() as device:

        def counted(*arguments):
            before = device.waits.total()
            result = function(*arguments)
            waits.append(device.waits.total() - before)
            return result

        setup, fed = toy.federation(method, {}, device="cuda", local_epochs=1)
        with patch.object(method.module, function_name, counted):
            toy.simulate(setup, fed, 1)

    assert waits == [expected]
