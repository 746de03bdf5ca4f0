"""FedProx: the term by hand, the local objective, and the model that the term holds to."""

import torch

from fedcli.papers.baselines import fedavg, fedprox
from tests.toys import minibatch, with_different_models


def test_proximal_term_by_hand():
    params = {"weight": torch.tensor([[1.0, 2.0], [3.0, 5.0]]), "bias": torch.tensor([1.0])}
    received = {"bias": torch.tensor([-1.0]), "weight": torch.tensor([[1.0, 0.0], [3.0, 2.0]])}
    assert fedprox.proximal_term(params, received).item() == (4 + 9 + 4) / 2


def test_the_local_objective_adds_mu_times_the_distance_to_fedavgs_gradient():
    _, fed, _, states = with_different_models("local")
    received, buffers = fed.initial_model()
    moved = {name: value.requires_grad_() for name, value in states[0].params.items()}
    batch, ours = minibatch(fed, 5), fedprox.make_local_loss(fed.network, fedprox.Config(proximal_weight=0.7))
    loss, aux = ours(moved, buffers, batch, fedprox.Context(received))
    base, _ = fedavg.make_local_loss(fed.network)(moved, buffers, batch, None)
    for name, value in moved.items():
        grad, plain = (torch.autograd.grad(each, value, retain_graph=True)[0] for each in (loss, base))
        torch.testing.assert_close(grad, plain + 0.7 * (value - received[name]), rtol=1e-10, atol=1e-12)
    assert aux.terms["cross_entropy"] == base
    assert aux.terms["proximal"] == fedprox.proximal_term(moved, received)
