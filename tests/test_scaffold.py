"""SCAFFOLD: its equations by hand, two rounds by plain gradients, and the server's rate."""

import pytest
import torch

from fedcli.papers.baselines.scaffold import step_length, update_control
from tests import laws

ONE_STEP = {"local_epochs": 1, "batch_size": 16, "momentum": 0.0}  # one full batch for the toy clients


def full_gradient(fed, params, client, weight_decay=0.0):
    """Gradient of a client's whole objective."""
    params = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    x, y = fed.engine.gather(fed.training[client])
    loss = torch.nn.functional.cross_entropy(fed.network(params, {}, x).logits, y)
    grads = torch.autograd.grad(loss, list(params.values()))
    return {name: g + weight_decay * params[name].detach() for name, g in zip(params, grads, strict=True)}


def test_option_two_by_hand_and_a_client_without_steps():
    c_i = {"w": torch.tensor([[1.0, 2.0], [5.0, 6.0]])}
    local = {"w": torch.tensor([[0.0, 1.0], [1.0, 1.0]])}
    new = update_control(
        c_i, {"w": torch.tensor([0.5, 1.0])}, {"w": torch.ones(2)}, local, torch.tensor([4.0, 0.0]), 0.1
    )
    torch.testing.assert_close(new["w"], torch.tensor([[1 - 0.5 + 1 / 0.4, 2 - 1.0], [5.0, 6.0]]))


def test_the_length_of_a_local_step_by_hand():
    assert step_length(0.1, "sgd", 0.9) == pytest.approx(1.0)
    assert step_length(0.1, "adam", 0.9) == 0.1


def test_two_rounds_by_plain_gradients():
    """One full-batch step a round: c_i is the gradient with its weight decay, c a mean weighted by n_i / 34."""
    setup, fed = laws.federation("scaffold", cohort_size=2, lr_decay=0.5, **ONE_STEP)
    lr, decay = setup.run.lr / 2, setup.run.weight_decay  # of the second round
    start, cohorts = fed.initial_model()[0], ([0, 1], [0, 2])
    before, after = (laws.simulate(setup, fed, rounds, cohorts) for rounds in (1, 2))
    first = {client: full_gradient(fed, start, client, decay) for client in (0, 1)}
    for client, g in first.items():
        laws.assert_agree(before.clients[client].c_i, g, f"c_i of client {client}")
    c = {name: (13 * first[0][name] + 7 * first[1][name]) / 34 for name in start}
    laws.assert_agree(before.c, c, "c")
    second = {client: full_gradient(fed, before.params, client, decay) for client in (0, 2)}
    for name, x in before.params.items():
        direction = 13 / 23 * (second[0][name] - first[0][name]) + 10 / 23 * second[2][name] + c[name]
        torch.testing.assert_close(after.params[name], x - lr * direction, rtol=1e-9, atol=1e-12)
        mean = c[name] + (13 * (second[0][name] - first[0][name]) + 10 * second[2][name]) / 34
        torch.testing.assert_close(after.c[name], mean, rtol=1e-8, atol=1e-11)
    for client in (0, 2):  # option II gives back the gradient that the correction was added to
        laws.assert_agree(after.clients[client].c_i, second[client], f"c_i of client {client}")


def test_with_momentum_a_client_has_gone_as_far_as_it_would_along_a_constant_gradient():
    """After a single step, which has no momentum yet, c_i is (1 - rho) times the gradient."""
    setup, fed = laws.federation("scaffold", **{**ONE_STEP, "momentum": 0.9, "weight_decay": 0.0})
    gradient = full_gradient(fed, fed.initial_model()[0], 1)
    expected = {name: 0.1 * value for name, value in gradient.items()}
    laws.assert_agree(laws.simulate(setup, fed, 1).clients[1].c_i, expected, "c_i")


def test_the_servers_rate_scales_the_parameters_and_not_the_buffers():
    run = {"backbone": laws.NORMED, "local_epochs": 1}
    setup, fed = laws.federation("scaffold", {"server_lr": 0.5, "clip_norm": 0.0}, **run)
    state, average = laws.simulate(setup, fed, 1), laws.simulate(*laws.federation("fedavg", **run), 1)
    half = {name: (value + average.params[name]) / 2 for name, value in fed.initial_model()[0].items()}
    laws.assert_agree((state.params, state.buffers), (half, average.buffers), "half the way, and all of the buffers")
