"""FedCM, FedSAM and MoFedSAM: a momentum that the server sends, and two gradients a step, against plain loops."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core.trees import tree_map
from fedcli.papers.baselines import fedsam
from fedcli.papers.baselines.fedcm import mean_direction
from tests import laws
from tests.networks import replace_all_networks
from tests.plain_loops import buffers_of, copy_tensors, load_model, minibatches, modules_of, params_of, sgd_of

COHORTS = ([0, 1, 3], [1, 2, 3], [0, 2, 3])
SIZES = (3, 13, 8, 4)  # with batches of 4 and --drop-last the first has no step, the others 3, 2 and 1 an epoch


def gradients(module, x, y):
    """The gradients of the cross-entropy, by autograd."""
    module.zero_grad()
    _, logits = module(x)
    F.cross_entropy(logits, y).backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def climbed_gradients(module, x, y, rho):
    """The gradients at w + rho g / |g|, with the running statistics of the pass at w."""
    grads = gradients(module, x, y)
    params = copy_tensors(dict(module.named_parameters()))
    statistics = copy_tensors(dict(module.named_buffers()))
    length = torch.cat([g.flatten() for g in grads]).norm()
    with torch.no_grad():
        for parameter, g in zip(module.parameters(), grads, strict=True):
            parameter += rho / length * g
    climbed = gradients(module, x, y)

    load_model(module, params, statistics)
    return climbed


class TrainedClient(NamedTuple):
    """A client after a round."""

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    num_steps: int


def train_client(fed, round, client, model, direction, alpha, rho):
    """What a client comes to in a round of torch.optim with the mixed gradient."""
    (module,) = modules_of(fed, {client: model})
    steps = 0
    optimizer = sgd_of(fed, module.parameters(), fed.lr(round))
    for x, y in minibatches(fed, round, client):
        grads = climbed_gradients(module, x, y, rho) if rho else gradients(module, x, y)
        for (name, parameter), g in zip(module.named_parameters(), grads, strict=True):
            parameter.grad = alpha * g + (1 - alpha) * direction[name]
        optimizer.step()
        steps += 1
    return TrainedClient(params_of(module), buffers_of(module), steps)


class Sent(NamedTuple):
    """What the server sends: a model, its statistics, and the direction of FedCM."""

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    direction: dict[str, torch.Tensor]


def rounds_by_a_plain_loop(fed, alpha, rho, server_lr):
    """What the server sends after three rounds."""
    x, buffers = fed.initial_model()
    direction = {name: torch.zeros_like(value) for name, value in x.items()}
    for round, members in enumerate(COHORTS):
        total = sum(SIZES[client] for client in members)
        length = fed.lr(round) / (1 - fed.config.momentum)  # of a step along a constant gradient
        moved = tree_map(torch.zeros_like, x)
        mean_buffers = tree_map(torch.zeros_like, buffers)
        new_direction = tree_map(torch.zeros_like, x)
        for client in members:
            share = SIZES[client] / total
            trained = train_client(fed, round, client, (x, buffers), direction, alpha, rho)
            for name, end in trained.params.items():
                moved[name] += share * (end - x[name])
                if trained.num_steps:
                    new_direction[name] += share * (x[name] - end) / (trained.num_steps * length)
            for name in buffers:
                mean_buffers[name] = mean_buffers[name] + share * trained.buffers[name]
        x = {name: x[name] + server_lr * moved[name] for name in x}
        buffers = mean_buffers
        direction = new_direction
    return Sent(x, buffers, direction)


class Case(NamedTuple):
    """Options of a method, and what its equations have in their place."""

    options: dict[str, float]
    alpha: float
    rho: float
    server_lr: float


CASES = {
    "fedcm": Case({"gradient_share": 0.3, "server_lr": 0.5}, alpha=0.3, rho=0, server_lr=0.5),
    "fedsam": Case({"perturbation": 0.2}, alpha=1, rho=0.2, server_lr=1),
    "mofedsam": Case({"gradient_share": 0.3, "perturbation": 0.2, "server_lr": 0.5}, alpha=0.3, rho=0.2, server_lr=0.5),
}


class ThreeRounds(NamedTuple):
    """The state of a method after three rounds, and what a plain loop comes to."""

    state: Any
    expected: Sent


@cache
def three_rounds(method, momentum):
    run = {
        "parts": toy.toy_parts(SIZES), "drop_last": True, "cohort_size": 3, "lr_decay": 0.5, "momentum": momentum,
        "backbone": toy.BATCHNORM,
    }  # fmt: skip
    case = CASES[method]
    state = laws.state_after_rounds(3, method, case.options, cohorts=COHORTS, **run)
    _, fed = toy.federation("fedavg", **run)
    return ThreeRounds(state, rounds_by_a_plain_loop(fed, case.alpha, case.rho, case.server_lr))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("method", CASES)
def test_three_rounds_are_those_of_a_plain_loop(method, momentum):
    state, expected = three_rounds(method, momentum)
    model = (state.params, state.buffers)
    laws.assert_agree(model, (expected.params, expected.buffers), "the model and its statistics")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("method", ["fedcm", "mofedsam"])
def test_the_direction_that_is_sent_is_that_of_a_plain_loop(method, momentum):
    state, expected = three_rounds(method, momentum)
    laws.assert_agree(state.direction, expected.direction, "the direction")


def test_the_direction_points_against_the_change_of_clients_that_took_a_step():
    x = {"w": torch.tensor([1.0])}
    local = {"w": torch.tensor([[0.0], [5.0], [3.0]])}
    direction = mean_direction(x, local, torch.tensor([2.0, 4.0, 0.0]), 0.5, torch.tensor([0.5, 0.25, 0.25]))
    assert direction["w"].tolist() == [0.5 * 1 / 1 + 0.25 * -4 / 2]


def test_the_climb_has_one_length_over_all_parameters():
    w = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([2.0])}
    g = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}  # of length 5
    climbed = fedsam.climb(w, g, 10.0)
    assert climbed["a"].tolist() == [7.0, 1.0]
    assert climbed["b"].tolist() == [10.0]


def test_without_a_gradient_there_is_no_climb():
    w = {"a": torch.tensor([1.0, 1.0])}
    assert torch.equal(fedsam.climb(w, {"a": torch.zeros(2)}, 10.0)["a"], w["a"])


@pytest.mark.parametrize("chunk", ["1", "4", "branches:4"])
def test_both_passes_of_a_step_have_the_same_dropout(monkeypatch, chunk):
    replace_all_networks(monkeypatch)
    setup, fed = toy.federation("fedsam", {"perturbation": 1e-9}, clients_per_chunk=chunk, local_epochs=1)
    cohort = fed.cohort(0)
    _, terms = laws.method_round(setup, fed, laws.initial_state(setup, fed), cohort)
    torch.testing.assert_close(terms["climbed"], terms["cross_entropy"], rtol=0, atol=1e-7)


def test_without_the_servers_momentum_mofedsam_is_fedsam():
    ours = laws.state_after_rounds(3, "mofedsam", {"gradient_share": 1.0})
    theirs = laws.state_after_rounds(3, "fedsam")
    laws.assert_agree(ours.params, theirs.params, "the model")
