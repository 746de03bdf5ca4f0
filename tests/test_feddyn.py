"""FedDyn: its regularizer, its rest point on known problems, what alpha = 0 is, its state, and FedFA's form of it."""

import torch

from fedcli.papers.baselines.fedavg import make_local_loss
from fedcli.papers.baselines.feddyn import (
    client_alphas,
    dynamic_regularizer,
    linear_regularizer,
    update_dual,
    update_server,
)
from fedcli.registry import find_method
from tests import laws

FEDDYN = find_method("feddyn")
COHORTS = ([0, 1], [1, 3], [0, 2])


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_regularizer_and_its_gradient():
    w = {"a": float64([1.0, 2.0]).requires_grad_(), "b": float64(3.0).requires_grad_()}
    start, h_i = {"a": float64([0.0, 4.0]), "b": float64(1.0)}, {"a": float64([5.0, -1.0]), "b": float64(2.0)}
    value = dynamic_regularizer(w, start, h_i, float64(0.5))
    assert value.item() == 0.5 * (5 - 2 + 6) + 0.25 * (1 + 4 + 4)
    value.backward()
    assert w["a"].grad.tolist() == [0.5 * (5 + 1), 0.5 * (-1 - 2)]
    assert w["b"].grad.item() == 0.5 * (2 + 2)
    assert linear_regularizer(w, h_i, float64(0.5)).item() == 0.5 * (5 - 2 + 6)


def test_the_server_and_what_clients_keep_by_hand():
    h_i = update_dual({"w": float64([[7.0], [1.0]])}, {"w": float64([1.0])}, {"w": float64([[2.0], [5.0]])})
    assert h_i["w"].tolist() == [[8], [5]]
    params, h = update_server({"w": float64([1.0])}, {"w": float64([0.5])}, {"w": float64([[2.0], [5.0]])}, 10)
    assert h["w"].tolist() == [0.5 + (1 + 4) / 10]
    assert params["w"].tolist() == [3.5 + 1.0]


def test_alpha_is_larger_for_small_clients_and_zero_without_examples():
    assert client_alphas(0.1, float64([20.0, 5.0, 0.0]), 10.0).tolist() == [0.05, 0.2, 0]


def test_the_regularizer_of_a_round_is_that_of_the_clients_own_size_and_state():
    """One full-batch step a round, by plain gradients."""
    run = {"local_epochs": 1, "batch_size": 16, "momentum": 0.0, "weight_decay": 0.0, "cohort_size": 2}
    setup, fed = laws.federation(FEDDYN, {"alpha": 0.2}, **run)
    before, after = (laws.simulate(setup, fed, rounds, COHORTS) for rounds in (1, 2))
    module = fed.network.module
    for name, value in module.named_parameters():
        value.data.copy_(before.params[name])
    for client, n in ((1, 7), (3, 4)):
        x, y = fed.engine.gather(fed.training[client])
        names, values = zip(*module.named_parameters(), strict=True)
        grads = torch.autograd.grad(torch.nn.functional.cross_entropy(module(x)[1], y), values)
        for name, grad in zip(names, grads, strict=True):
            old = before.clients[client].dual[name] if client in before.clients else torch.zeros_like(grad)
            moved = -setup.run.lr * (grad + 0.2 / (n / 8.5) * old)  # at w = w_g the quadratic term has no gradient
            torch.testing.assert_close(after.clients[client].dual[name], old + moved, rtol=1e-8, atol=1e-11)


def test_without_clipping_and_with_clients_of_one_size_it_is_algorithm_1_in_a_slow_loop():
    """Three rounds with two of four clients, in h_i, with one alpha for all and plain means."""
    run = {"parts": laws.toy_parts((5, 5, 5, 5)), "cohort_size": 2}
    ours = laws.simulate(*laws.federation(FEDDYN, {"alpha": 0.2, "clip_norm": 0.0}, **run), 3, COHORTS)
    _, fed = laws.federation(FEDDYN, reference=True, **run)
    task, w = make_local_loss(fed.network), fed.initial_model()[0]
    h = [{name: torch.zeros_like(value) for name, value in w.items()} for _ in range(4)]

    def objective(params, buffers, batch, context):
        loss, aux = task(params, buffers, batch, None)
        for name, value in params.items():
            loss = loss + 0.2 * (value * context[name]).sum() + 0.1 * (value - w[name]).square().sum()
        return loss, aux

    for number, members in enumerate(COHORTS):
        cohort = fed.cohort_of(number, members)
        own = {name: torch.stack([h[client][name] for client in members]) for name in w}
        ends = fed.train(fed.broadcast(w, {}, cohort), cohort, objective, own, 0)[0].params
        for place, client in enumerate(members):
            h[client] = {name: h[client][name] + ends[name][place] - w[name] for name in w}
        w = {name: (ends[name][0] + ends[name][1]) / 2 + sum(one[name] for one in h) / 4 for name in w}
    for name, value in w.items():
        torch.testing.assert_close(ours.params[name], value, rtol=1e-12, atol=1e-12)


def test_buffers_are_averaged_as_the_models_are():
    data, parts = laws.toy_dataset(num_train=12, channels=3), laws.toy_parts((6, 2, 2, 2))
    run = {"backbone": laws.NORMED, "data": data, "parts": parts, "local_epochs": 1}
    setup, fed = laws.federation(FEDDYN, {"alpha": 0.0, "clip_norm": 0.0}, **run)
    cohort = fed.cohort(0)
    clients, _ = fed.train(fed.broadcast(*fed.initial_model(), cohort), cohort, make_local_loss(fed.network))
    buffers = laws.simulate(setup, fed, 1).buffers
    assert buffers
    for name, value in buffers.items():
        torch.testing.assert_close(value, sum(clients.buffers[name]) / 4, rtol=1e-10, atol=1e-12)


def test_the_simplified_form_is_fedavg_in_its_first_round_and_keeps_the_last_models():
    ours = laws.federation(FEDDYN, {"form": "simplified", "alpha": 0.1}, cohort_size=2)
    base = laws.federation("fedavg", cohort_size=2)
    first = laws.simulate(*ours, 1, COHORTS)
    laws.assert_agree(first.params, laws.simulate(*base, 1, COHORTS).params, "the first round")
    start = ours[1].initial_model()[0]
    mean = {name: (13 * first.clients[0].dual[name] + 7 * first.clients[1].dual[name]) / 20 for name in start}
    laws.assert_agree(first.params, mean, "the mean of what the clients keep")
    off = laws.federation(FEDDYN, {"form": "simplified", "alpha": 0.0}, cohort_size=2)
    laws.assert_agree(laws.simulate(*off, 3, COHORTS).params, laws.simulate(*base, 3, COHORTS).params, "alpha = 0")


def test_the_simplified_form_pulls_from_the_last_local_model_to_the_global_one():
    """One full-batch step: the second round differs from a plain one by -lr alpha_i (w_i of before - w_g)."""
    run = {"local_epochs": 1, "batch_size": 16, "momentum": 0.0, "cohort_size": 2}
    setup, fed = laws.federation(FEDDYN, {"form": "simplified", "alpha": 0.2}, **run)
    plain, _ = laws.federation(FEDDYN, {"form": "simplified", "alpha": 0.0}, **run)
    first = laws.simulate(setup, fed, 1, COHORTS)
    ends = [s.method.run_round(first, fed.cohort_of(1, [0, 1]), fed, s.options)[0].clients for s in (setup, plain)]
    for client, n in ((0, 13), (1, 7)):
        for name, value in first.params.items():
            pull = 0.2 / (n / 8.5) * (first.clients[client].dual[name] - value)
            difference = ends[0][client].dual[name] - ends[1][client].dual[name]
            torch.testing.assert_close(difference, -setup.run.lr * pull, rtol=1e-7, atol=1e-12)
