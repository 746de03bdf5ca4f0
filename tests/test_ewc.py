"""EWC's penalty and Fisher information against known answers."""

import pytest
import torch

from fedcli.core.clients import Output
from fedcli.core.trees import select
from fedcli.papers.baselines import ewc, fedavg
from fedcli.papers.baselines.ewc import Anchor, draw_labels, fisher_diagonal, penalty
from tests import laws
from tests.toys import minibatch, randn


def linear(params, buffers, x, mask=None, train=True):
    """Logits W x + b of two classes."""
    features = x.flatten(1)
    return Output(features, features @ params["W"].T + params["b"], buffers)


def test_penalty_by_hand():
    anchor = Anchor(
        {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])},
        {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([2.0])},
    )
    params = {"w": torch.tensor([3.0, 9.0]), "b": torch.tensor([-1.0])}
    assert penalty(params, anchor) == (3 * 4 + 0 + 2 * 1) / 2


def test_labels_are_drawn_in_proportion():
    logits = torch.tensor([0.2, 0.5, 0.3]).double().log().expand(6, 3)
    assert draw_labels(logits, torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1.0])).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("label", [0, 1])
def test_fisher_squares_the_gradient_of_each_image(label):
    params, x = {"W": randn(2, 4), "b": randn(2)}, randn(3, 1, 2, 2, seed=1)
    ours = fisher_diagonal(linear, params, {}, x, torch.full((3,), float(label)).double())
    errors = linear(params, {}, x).logits.softmax(1) - torch.eye(2)[label]  # of the logits, for that label
    expected = {"W": (errors[:, :, None] * x.flatten(1)[:, None]).square().mean(0), "b": errors.square().mean(0)}
    torch.testing.assert_close(ours, expected)


def test_fisher_is_of_the_model_in_evaluation_mode():
    _, fed = laws.federation("fedmd", backbone=laws.NORMED)
    params, buffers = fed.initial_model()
    shifted = {name: value + 0.5 for name, value in buffers.items()}
    x, uniform = minibatch(fed, 1).x, torch.tensor([0.3]).double()
    ours, other = (fisher_diagonal(fed.network, params, own, x, uniform) for own in (buffers, shifted))
    assert laws.distance(ours, other) > 0.01  # running statistics matter, and training would not look at them


def test_each_client_has_draws_of_its_own_in_any_order():
    _, fed = laws.federation("fedmd")
    fisher = []
    for ids in ([0, 1], [1, 0]):
        cohort = fed.cohort_of(1, ids)
        clients = fed.broadcast(*fed.initial_model(), cohort)
        fisher.append(ewc.anchors(clients, cohort, fed, minibatch(fed, 5).x).fisher)
    assert laws.distance(select(fisher[0], [0, 1]), select(fisher[1], [1, 0])) == 0
    assert laws.distance(select(fisher[0], 0), select(fisher[0], 1)) > 0


def test_objective_is_the_cross_entropy_and_the_weighted_penalty():
    _, fed = laws.federation("fedmd")
    params, buffers = fed.initial_model()
    anchor, batch = Anchor({name: value + 1 for name, value in params.items()}, params), minibatch(fed, 5)
    value, aux = ewc.make_local_loss(fed.network, 0.7)(params, buffers, batch, anchor)
    plain, _ = fedavg.make_local_loss(fed.network)(params, buffers, batch, None)
    torch.testing.assert_close(value, plain + 0.7 * penalty(params, anchor))
    torch.testing.assert_close(aux.terms["ewc"], penalty(params, anchor))
