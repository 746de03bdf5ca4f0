"""FedSA: equations against slow loops and hand numbers, rounds against plain torch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli.papers import fedsa
from tests import laws
from tests.reference import means_by_class, train_plainly
from tests.toys import randn

C, D = 4, 5


LABELS = torch.tensor([0, 1, 2, 2, 0, 2, 1])  # class 3 is absent


def test_regularization_of_the_code_is_a_mean_of_squares():
    features, anchors = randn(7, D), randn(C, D, seed=1)
    ours = fedsa.regularization(features, LABELS, anchors, form="code")
    torch.testing.assert_close(ours, F.mse_loss(features, anchors[LABELS]))


def test_no_loss_is_nan_where_a_feature_is_its_anchor():
    anchors = randn(C, D)
    for loss in (
        fedsa.regularization,
        lambda *given: fedsa.regularization(*given, form="code"),
        lambda *given: fedsa.margin_contrastive(*given, margin=2.0),
    ):
        features = anchors[LABELS].clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(features, LABELS, anchors), features)
        assert torch.isfinite(grad).all()
    assert fedsa.regularization(anchors, torch.arange(C), anchors).item() == 0


def test_margin_by_hand():
    points, everyone = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 16.0]]).double(), torch.ones(3, dtype=torch.bool)
    far = math.hypot(3, 16)  # between the first and the last; the others are 5 and 12 apart
    assert fedsa.margin(points, everyone).item() == pytest.approx((5 + 5 + 12) / 3)
    assert fedsa.margin(points, everyone, "pairs").item() == pytest.approx((5 + 12 + far) / 3)
    for form in ("nearest", "pairs"):
        assert fedsa.margin(points, torch.tensor([True, False, True]), form).item() == pytest.approx(far)
        assert fedsa.margin(points, torch.tensor([False, True, False]), form).item() == 0
        assert fedsa.margin(points, ~everyone, form).item() == 0


def test_semantic_anchors_are_one_pass_through_the_embedding():
    dim = 512
    draw = np.random.default_rng(3)
    points = torch.from_numpy(draw.standard_normal((C, dim)))
    linear = [nn.Linear(dim, dim).double() for _ in range(2)]  # their biases are torch's own and must not matter
    for layer in linear:
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(draw.uniform(-(dim**-0.5), dim**-0.5, (dim, dim))))
    norms = [nn.BatchNorm1d(dim).double() for _ in range(2)]
    embedding = nn.Sequential(linear[0], norms[0], nn.ReLU(), linear[1], norms[1], nn.ReLU())
    assert sum(value.numel() for value in embedding.parameters()) == 527_360
    anchors = fedsa.semantic_anchors(C, dim, np.random.default_rng(3))
    torch.testing.assert_close(anchors, embedding(points).detach(), rtol=0, atol=1e-9)
    assert not anchors.requires_grad
    torch.testing.assert_close(fedsa.class_anchors(C, dim, np.random.default_rng(3)), points)


def test_global_prototypes_and_anchors_by_hand():
    local = torch.tensor([[[1.0, 1.0], [0.0, 0.0], [4.0, 0.0]], [[3.0, 5.0], [0.0, 0.0], [0.0, 0.0]]])
    counts = torch.tensor([[1, 0, 2], [3, 0, 0]])
    clients = fedsa.aggregate_prototypes(local, counts)
    torch.testing.assert_close(clients, torch.tensor([[2.0, 3.0], [0.0, 0.0], [4.0, 0.0]]))
    examples = fedsa.aggregate_prototypes(local, counts, "examples")
    torch.testing.assert_close(examples, torch.tensor([[2.5, 4.0], [0.0, 0.0], [4.0, 0.0]]))
    anchors = fedsa.update_anchors(torch.full((3, 2), 8.0), clients, torch.tensor([True, False, True]), 0.75)
    torch.testing.assert_close(anchors, torch.tensor([[6.5, 6.75], [8.0, 8.0], [7.0, 6.0]]))


def slow_margin(points):
    others = [[float((p - q).norm()) for j, q in enumerate(points) if j != i] for i, p in enumerate(points)]
    return float(np.mean([min(row) for row in others])) if len(points) > 1 else 0.0


def slow_round(fed, setup, number, kept, shared):
    """One round of all clients by plain torch; returns what the clients keep, and anchors and prototypes."""
    config, (anchors, _), sent, after = setup.options, shared, {c: [] for c in range(fed.num_classes)}, {}
    for client in range(fed.num_clients):
        *model, own_margin = kept.get(client, (*fed.initial_model(), torch.tensor(0.0)))
        margin, gathered = max(own_margin.item(), slow_margin(list(anchors))), {c: [] for c in sent}

        def objective(module, features, logits, y, margin=margin, gathered=gathered):
            squares = [(features[y == c].mean(0) - anchors[c]).norm() for c in y.unique()]
            distances = torch.cdist(features, anchors) + margin * F.one_hot(y, fed.num_classes)
            loss = F.cross_entropy(logits, y) + config.regularization_weight * sum(squares)
            loss = loss + config.contrastive_weight * F.cross_entropy(-distances, y)
            for feature, label in zip(features.detach(), y.tolist(), strict=True):
                gathered[label].append(feature)
            calibration = F.cross_entropy(module.head(anchors), torch.arange(len(anchors)))
            return loss + config.calibration_weight * calibration

        params, own = train_plainly(fed, number, client, model, objective), means_by_class(gathered)
        for c, prototype in own.items():
            sent[c].append(prototype)
        after[client] = params, {}, torch.tensor(slow_margin(list(own.values())))
    prototypes = means_by_class(sent)
    moved = {c: config.anchor_decay * anchors[c] + (1 - config.anchor_decay) * p for c, p in prototypes.items()}
    return after, (torch.stack([moved.get(c, anchors[c]) for c in range(len(anchors))]), prototypes)


@pytest.mark.parametrize("drop_last", [False, True])
def test_three_rounds_are_those_of_a_plain_loop(drop_last):
    parts = [np.array([0, 3, 1, 6, 4, 5, 8, 11, 14, 2]), np.array([7, 10, 13, 16, 19]), np.array([9, 12]),
             np.array([15, 18, 21, 24, 22])]  # fmt: skip
    weights = {"regularization_weight": 0.3, "contrastive_weight": 0.5, "calibration_weight": 0.7, "anchor_decay": 0.1}
    setup, fed = laws.federation("fedsa", weights, parts=parts, drop_last=drop_last)

    def shared_of(state):
        return state.anchors, {c: state.prototypes[c] for c in range(3) if state.has_class[c]}

    first = setup.method.init(fed, setup.options).anchors
    state = laws.assert_rounds_agree(setup, fed, slow_round, (first, {}), shared_of)
    assert state.clients[1].margin == state.clients[2].margin == 0  # of one class each
    if not drop_last:  # in the third round either margin is the larger one of some client
        second = laws.simulate(setup, fed, 2)
        assert second.clients[3].margin > slow_margin(list(second.anchors)) > second.clients[0].margin > 0
