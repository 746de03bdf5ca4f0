"""EWC's penalty and Fisher information against known answers."""

import numpy as np
import pytest
import torch

from fedcli.core.clients import Output
from fedcli.papers.baselines import ewc
from fedcli.papers.baselines.ewc import Anchor, draw_labels, fisher_diagonal, penalty
from fedcli.registry import find_method
from tests import laws


def linear(params, buffers, x, mask=None, train=True):
    """Logits W x + b of two classes."""
    features = x.flatten(1)
    return Output(features, features @ params["W"].T + params["b"], buffers)


def model():
    draw = torch.Generator().manual_seed(0)
    return {
        "W": torch.randn(2, 4, dtype=torch.float64, generator=draw),
        "b": torch.randn(2, dtype=torch.float64, generator=draw),
    }


def test_penalty_by_hand():
    anchor = Anchor(
        {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])},
        {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([2.0])},
    )
    params = {"w": torch.tensor([3.0, 9.0]), "b": torch.tensor([-1.0])}
    assert penalty(params, anchor) == (3 * 4 + 0 + 2 * 1) / 2


def test_labels_are_drawn_in_proportion():
    logits = torch.tensor([0.2, 0.5, 0.3]).double().log().expand(4, 3)
    assert draw_labels(logits, torch.tensor([0.0, 0.19, 0.21, 0.69]).double()).tolist() == [0, 0, 1, 1]
    assert draw_labels(logits[:2], torch.tensor([0.71, 1.0]).double()).tolist() == [2, 2]
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = draw_labels(logits[:1].expand(20_000, 3), uniform).bincount() / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.5, 0.3]), atol=0.01, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 1.0])
def test_fisher_squares_the_gradient_of_each_image(uniform):
    params, x = model(), torch.randn(3, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = fisher_diagonal(linear, params, {}, x, torch.full((3,), uniform).double())
    label = int(uniform)
    expected = {name: torch.zeros_like(value) for name, value in params.items()}
    for image in x.flatten(1):
        p = (params["W"] @ image + params["b"]).softmax(0)
        error = p - torch.eye(2)[label]  # of the logits, for that label
        expected["W"] += (error[:, None] * image).square() / 3
        expected["b"] += error.square() / 3
    torch.testing.assert_close(found, expected)


def test_fisher_is_of_the_model_in_evaluation_mode():
    _, fed = laws.federation("fedmd", backbone=laws.NORMED, data=laws.toy_dataset(num_train=34))
    params, buffers = fed.initial_model()
    shifted = {name: value + 0.5 for name, value in buffers.items()}
    x, uniform = next(iter(fed.public_batches(0))).x[:1], torch.tensor([0.3]).double()
    found, other = (fisher_diagonal(fed.network, params, own, x, uniform) for own in (buffers, shifted))
    assert laws.distance(found, other) > 0.01  # running statistics matter, and training would not look at them


def test_anchors_go_by_the_clients_ids():
    _, fed = laws.federation("fedmd")
    x = next(iter(fed.public_batches(0))).x
    found = []
    for ids in ([0, 1, 2, 3], [2, 0, 3, 1]):
        cohort = fed.cohort_of(1, np.array(ids))
        clients = fed.broadcast(*fed.initial_model(), cohort)
        anchor = ewc.anchors(clients, cohort, fed, x)
        found.append({id: {name: value[k] for name, value in anchor.fisher.items()} for k, id in enumerate(ids)})
    for client in range(4):
        assert laws.distance(found[0][client], found[1][client]) == 0
    assert laws.distance(found[0][0], found[0][1]) > 0  # each has draws of its own


def test_objective_is_the_cross_entropy_and_the_weighted_penalty():
    _, fed = laws.federation("fedmd")
    params, buffers = fed.initial_model()
    batch = next(iter(fed.public_batches(0)))
    anchor = Anchor({name: value + 1 for name, value in params.items()}, params)
    value, aux = ewc.make_local_loss(fed.network, 0.7)(params, buffers, batch, anchor)
    plain, _ = find_method("fedavg").module.make_local_loss(fed.network)(params, buffers, batch, None)
    held = sum(weights.sum() for weights in params.values()) / 2
    torch.testing.assert_close(value, plain + 0.7 * held)
    torch.testing.assert_close(aux.terms["ewc"], held)
