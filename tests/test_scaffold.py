"""SCAFFOLD: its equations by hand, where it is FedAvg and where it is not, and that it removes the clients' drift."""

import pytest
import torch

from fedcli.papers.baselines.scaffold import correction, step_length, update_control, update_mean_control, update_model
from fedcli.registry import find_method
from tests import laws

SCAFFOLD = find_method("scaffold")
ONE_STEP = {"local_epochs": 1, "batch_size": 16, "momentum": 0.0}  # one full batch for the toy clients


def vector(*values):
    return {"w": torch.tensor(values, dtype=torch.float64)}


def full_gradient(fed, params, client, weight_decay=0.0):
    """Gradient of a client's whole objective."""
    module = fed.network.module
    for name, value in module.named_parameters():
        value.data.copy_(params[name])
    x, y = fed.engine.gather(fed.training[client])
    names, values = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(torch.nn.functional.cross_entropy(module(x)[1], y), values)
    return {name: g + weight_decay * params[name] for name, g in zip(names, grads, strict=True)}


def test_the_gradient_of_the_correction_is_c_minus_c_i():
    params = {name: value.requires_grad_() for name, value in (vector(1.0, 2.0) | {"b": torch.ones(())}).items()}
    c, c_i = vector(3.0, -1.0) | {"b": torch.tensor(0.5)}, vector(1.0, 4.0) | {"b": torch.tensor(2.0)}
    value = correction(params, c, c_i)
    assert value.item() == 1 * 2 + 2 * -5 - 1.5
    value.backward()
    assert params["w"].grad.tolist() == [2, -5]
    assert params["b"].grad.item() == -1.5


def test_option_two_by_hand_and_a_client_without_steps():
    c_i = {"w": torch.tensor([[1.0, 2.0], [5.0, 6.0]])}
    local = {"w": torch.tensor([[0.0, 1.0], [1.0, 1.0]])}
    new = update_control(
        c_i, {"w": torch.tensor([0.5, 1.0])}, {"w": torch.ones(2)}, local, torch.tensor([4.0, 0.0]), 0.1
    )
    torch.testing.assert_close(new["w"], torch.tensor([[1 - 0.5 + 1 / 0.4, 2 - 1.0], [5.0, 6.0]]))


def test_the_servers_step_and_the_length_of_a_local_one_by_hand():
    assert step_length(0.1, "sgd", 0.9) == pytest.approx(1.0)
    assert step_length(0.1, "adam", 0.9) == 0.1
    assert update_model(vector(1.0, 2.0), vector(3.0, 1.0), 0.5)["w"].tolist() == [2, 1.5]
    change = {"w": torch.tensor([[1.0, 2.0], [3.0, 0.0]])}  # clients with a half and an eighth of all examples
    shares = torch.tensor([0.5, 0.125])
    assert update_mean_control({"w": torch.tensor([1.0, 1.0])}, change, shares)["w"].tolist() == [1.875, 2.0]


def test_two_rounds_by_plain_gradients():
    """One full-batch step a round: c_i is the gradient with its weight decay, c a mean weighted by n_i / 34."""
    setup, fed = laws.federation(SCAFFOLD, cohort_size=2, lr_decay=0.5, **ONE_STEP)
    lr, decay = setup.run.lr / 2, setup.run.weight_decay  # of the second round
    start, cohorts = fed.initial_model()[0], ([0, 1], [0, 2])
    states = [laws.simulate(setup, fed, rounds, cohorts) for rounds in (1, 2)]
    first = {client: full_gradient(fed, start, client, decay) for client in (0, 1)}
    for client, g in first.items():
        laws.assert_agree(states[0].clients[client].c_i, g, f"c_i of client {client}")
    c = {name: (13 * first[0][name] + 7 * first[1][name]) / 34 for name in start}
    laws.assert_agree(states[0].c, c, "c")

    x = states[0].params
    second = {client: full_gradient(fed, x, client, decay) for client in (0, 2)}
    weights = {0: 13 / 23, 2: 10 / 23}
    for name in x:
        direction = {0: second[0][name] + c[name] - first[0][name], 2: second[2][name] + c[name]}
        step = sum(weights[client] * direction[client] for client in weights)
        torch.testing.assert_close(states[1].params[name], x[name] - lr * step, rtol=1e-9, atol=1e-12)
        mean = c[name] + (13 * (second[0][name] - first[0][name]) + 10 * second[2][name]) / 34
        torch.testing.assert_close(states[1].c[name], mean, rtol=1e-8, atol=1e-11)
    for client in (0, 2):  # option II gives back the gradient that the correction was added to
        laws.assert_agree(states[1].clients[client].c_i, second[client], f"c_i of client {client}")
    laws.assert_agree(states[1].clients[1].c_i, first[1], "client 1 sat out")


def test_with_momentum_a_client_has_gone_as_far_as_it_would_along_a_constant_gradient():
    """After a single step, which has no momentum yet, c_i is (1 - rho) times the gradient."""
    setup, fed = laws.federation(SCAFFOLD, **{**ONE_STEP, "momentum": 0.9, "weight_decay": 0.0})
    start, state = fed.initial_model()[0], laws.simulate(setup, fed, 1)
    expected = {name: 0.1 * value for name, value in full_gradient(fed, start, 1).items()}
    laws.assert_agree(state.clients[1].c_i, expected, "c_i")


def test_the_servers_rate_scales_the_parameters_and_not_the_buffers():
    run = {"backbone": laws.NORMED, "data": laws.toy_dataset(num_train=12, channels=3), "local_epochs": 1}
    run["parts"] = laws.toy_parts((4, 3, 2, 3))
    ours, base = (
        laws.federation(SCAFFOLD, {"server_lr": 0.5, "clip_norm": 0.0}, **run),
        laws.federation("fedavg", **run),
    )
    start = base[1].initial_model()[0]
    state, average = laws.simulate(*ours, 1), laws.simulate(*base, 1)
    laws.assert_agree(state.params, {name: (start[name] + average.params[name]) / 2 for name in start}, "half the way")
    laws.assert_agree(state.buffers, average.buffers, "buffers")
