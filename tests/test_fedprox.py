"""FedProx: the term by hand, its gradient in the local objective, and the proximal optimum of a quadratic."""

import pytest
import torch

from fedcli.core.batches import Batch
from fedcli.papers.baselines import fedavg, fedprox
from fedcli.registry import find_method
from tests import laws

FEDPROX = find_method("fedprox")


def test_proximal_term_by_hand():
    params = {"weight": torch.tensor([[1.0, 2.0], [3.0, 5.0]]), "bias": torch.tensor([1.0])}
    received = {"bias": torch.tensor([-1.0]), "weight": torch.tensor([[1.0, 0.0], [3.0, 2.0]])}
    assert fedprox.proximal_term(params, received).item() == (4 + 9 + 4) / 2
    assert fedprox.proximal_term(params, params).item() == 0


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


def test_the_term_holds_to_the_model_of_this_round():
    setup, fed = laws.federation(FEDPROX, {"proximal_weight": 1.0})
    state = laws.simulate(setup, fed, 1)
    context, _ = fedprox.local_context(state, fed.cohort(1), fed, setup.options)
    assert laws.distance(context.global_params, state.params) == 0
    assert laws.distance(context.global_params, fed.initial_model()[0]) > 1e-3
