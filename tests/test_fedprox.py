"""FedProx: the term by hand, its gradient in the local objective, and the proximal optimum of a quadratic."""

import pytest
import torch

from fedcli.core.batches import Batch
from fedcli.core.clients import Aux, Client, sgd_step
from fedcli.papers.baselines import fedavg, fedprox
from fedcli.registry import find_method
from fedcli.runs.rounds import one_round
from tests import laws

FEDPROX = find_method("fedprox")


def test_proximal_term_by_hand():
    params = {"weight": torch.tensor([[1.0, 2.0], [3.0, 5.0]]), "bias": torch.tensor([1.0])}
    received = {"bias": torch.tensor([-1.0]), "weight": torch.tensor([[1.0, 0.0], [3.0, 2.0]])}
    assert fedprox.proximal_term(params, received).item() == (4 + 9 + 4) / 2
    assert fedprox.proximal_term(params, params).item() == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_steps_converge_to_the_proximal_optimum_of_a_quadratic(momentum):
    draw = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, dtype=torch.float64, generator=draw)
    hessian = root @ root.T / 5 + 0.1 * torch.eye(5, dtype=torch.float64)
    least, received = torch.randn(2, 5, dtype=torch.float64, generator=draw)
    weight = 0.3

    def local_loss(params, buffers, batch, context):
        away = params["w"] - least
        loss = 0.5 * away @ hessian @ away + weight * fedprox.proximal_term(params, context.global_params)
        return loss, Aux(buffers, {})

    step = sgd_step(local_loss, momentum)
    client = Client({"w": received.clone()}, {}, step.init_optimizer({"w": received}))
    batch = Batch(None, None, None, None, None, lr=torch.tensor(0.1, dtype=torch.float64))
    for _ in range(600):
        client, _ = step.update(client, batch, fedprox.Context({"w": received}))
    # (H + mu) w = H w_least + mu w_received
    optimum = torch.linalg.solve(hessian + weight * torch.eye(5).double(), hessian @ least + weight * received)
    torch.testing.assert_close(client.params["w"], optimum, rtol=1e-8, atol=1e-8)


def test_the_local_objective_adds_mu_times_the_distance_to_fedavgs_gradient():
    _, fed = laws.federation(FEDPROX)
    received, buffers = fed.initial_model()
    draw = torch.Generator().manual_seed(1)
    moved = {k: v + 0.1 * torch.randn(v.shape, dtype=v.dtype, generator=draw) for k, v in received.items()}
    moved = {name: value.requires_grad_() for name, value in moved.items()}
    x, y = fed.engine.gather(fed.training[0])
    batch = Batch(x, y, None, None, None, None)
    ours = fedprox.make_local_loss(fed.network, fedprox.Config(proximal_weight=0.7))
    loss, aux = ours(moved, buffers, batch, fedprox.Context(received))
    base, base_aux = fedavg.make_local_loss(fed.network)(moved, buffers, batch, None)
    for name, grad in zip(moved, torch.autograd.grad(loss, list(moved.values()), retain_graph=True), strict=True):
        expected = torch.autograd.grad(base, moved[name], retain_graph=True)[0] + 0.7 * (moved[name] - received[name])
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)
    squares = sum((moved[name] - received[name]).square().sum() for name in received)
    assert aux.terms["proximal"].item() == pytest.approx(squares.item() / 2, rel=1e-12)
    assert aux.terms["cross_entropy"] == base
    assert torch.equal(aux.outputs, base_aux.outputs)


def test_a_large_weight_holds_clients_near_the_model_they_received():
    moves = []
    for weight in (0.0, 1.0, 5.0):
        setup, fed = laws.federation(FEDPROX, {"proximal_weight": weight})
        moves.append(laws.distance(laws.simulate(setup, fed, 1).params, fed.initial_model()[0]))
    assert moves[0] > 1.2 * moves[1] > 1.2**2 * moves[2]


def test_the_term_holds_to_the_model_of_this_round():
    setup, fed = laws.federation(FEDPROX, {"proximal_weight": 1.0})
    state = laws.simulate(setup, fed, 1)
    context, _ = fedprox.local_context(state, fed.cohort(1), fed, setup.options)
    assert laws.distance(context.global_params, state.params) == 0
    assert laws.distance(context.global_params, fed.initial_model()[0]) > 1e-3


def test_terms_and_costs_of_a_round():
    setup, fed = laws.federation(FEDPROX)
    _, entry = one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort(0))
    assert set(entry["terms"]) == {"cross_entropy", "proximal"}
    model = 4 * fed.sizes.parameters  # four clients; w_g travels once
    assert fed.sent_down == fed.sent_up == {"params": model, "buffers": 0, "other": 0}
    assert setup.method.client_memory(fed.sizes) == 2 * fed.sizes.parameters


def test_buffers_are_averaged_as_in_fedavg():
    run = {"data": laws.toy_dataset(num_train=6, channels=3), "parts": laws.toy_parts((4, 2)), "num_clients": 2}
    laws.law_1_off_is_the_simpler_method(FEDPROX, rounds=2, backbone="resnet10-3x3", local_epochs=1, **run)
