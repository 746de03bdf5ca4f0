"""FedAdam, FedYogi and FedAdagrad: the server's step by hand and against a plain loop."""

import math
from types import SimpleNamespace

import pytest
import torch

from fedcli import toy
from fedcli.papers.baselines import fedopt
from fedcli.registry import find_method
from tests import laws
from tests.tensors import doubles


def second_moment(name, v, delta, beta):
    """The new second moment of one coordinate."""
    if name == "fedadagrad":
        return v + delta**2
    if name == "fedadam":
        return beta * v + (1 - beta) * delta**2
    if v == delta**2:
        return v
    return v - (1 - beta) * delta**2 if v > delta**2 else v + (1 - beta) * delta**2


def federation_of(local, buffers):
    """A federation whose two clients come out of training with these parameters `[2, D]` and buffers `[2]`."""
    clients = SimpleNamespace(params={"w": local}, buffers={"mean": buffers})
    return SimpleNamespace(
        network=None, broadcast=lambda *model: None, train=lambda *arguments: (clients, {}),
        upload_model=lambda trained: (trained.params, trained.buffers),
    )  # fmt: skip


OPTIONS = {"server_lr": 0.1, "server_momentum": 0.5, "adaptivity": 0.5}


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_three_rounds_of_a_server_are_those_of_a_plain_loop(name):
    method = find_method(name)
    options = OPTIONS if name == "fedadagrad" else {**OPTIONS, "square_momentum": 0.75}
    config = method.config(**options)
    x = [1.0, -2.0, 0.0]
    m = [0.0, 0.0, 0.0]
    v = [0.25, 0.25, 0.25]
    cohort = SimpleNamespace(weights=doubles([0.25, 0.75]))
    state = fedopt.ServerState(
        params={"w": doubles(x)}, buffers={"mean": doubles(0)}, mean={"w": doubles(m)}, square={"w": doubles(v)}
    )
    changes_of_rounds = [  # of the first client and of the second
        ([2.0, 0.0, 0.5], [-0.4, 0.8, 0.5]),  # the last is 0.5, whose square is tau^2: sign(0) in FedYogi
        ([0.0, 0.0, 0.1], [0.0, 0.2, 0.3]),
        ([1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]),
    ]
    for round, (first, second) in enumerate(changes_of_rounds):
        local = doubles(x) + doubles([first, second])
        fed = federation_of(local, doubles([1.0, 5.0]) + round)
        state, _ = method.run_round(state, cohort, fed, config)

        for j in range(3):
            delta = 0.25 * first[j] + 0.75 * second[j]
            m[j] = 0.5 * m[j] + 0.5 * delta
            v[j] = second_moment(name, v[j], delta, 0.75)
            x[j] = x[j] + 0.1 * m[j] / (math.sqrt(v[j]) + 0.5)
        torch.testing.assert_close(state.params["w"], doubles(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state.mean["w"], doubles(m), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state.square["w"], doubles(v), rtol=1e-12, atol=1e-12)
        assert state.buffers["mean"].item() == 4.0 + round  # the mean by weights, whatever went before


def test_fedyogis_second_moment_stands_still_where_it_equals_the_square():
    square = {"w": torch.tensor([0.25, 1.0])}
    delta = {"w": torch.tensor([-0.5, 0.0])}
    assert fedopt.yogi_square(square, delta, fedopt.Config())["w"].tolist() == [0.25, 1.0]


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_the_second_moment_starts_at_tau_squared_and_statistics_are_averaged_as_in_fedavg(name):
    run = {"backbone": toy.BATCHNORM, "local_epochs": 1}
    setup, fed = toy.federation(name, {"adaptivity": 0.3}, **run)
    start = laws.initial_state(setup, fed)
    for name in start.params:
        assert (start.square[name] == 0.3**2).all()
        assert (start.mean[name] == 0).all()
    average = laws.state_after_rounds(1, "fedavg", **run)
    laws.assert_agree(toy.simulate(setup, fed, 1).buffers, average.buffers, "running statistics")
