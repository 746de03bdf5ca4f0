"""FedSA: equations against slow loops and hand numbers, rounds against plain torch, and the paper's set-ups."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli.papers import fedsa
from fedcli.registry import find_method
from fedcli.runs.config import resolve
from tests import laws
from tests.reference import means_by_class, train_plainly

FEDSA = find_method("fedsa")
C, D = 4, 5


def example(seed=0):
    """Features, labels (class 3 is absent) and anchors."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(7, D, dtype=torch.float64, generator=draw)
    return features, torch.tensor([0, 1, 2, 2, 0, 2, 1]), torch.randn(C, D, dtype=torch.float64, generator=draw)


MASK = torch.tensor([True, True, True, False, True, True, False])


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("form", ["paper", "code"])
def test_regularization_against_a_loop(form, mask):
    features, labels, anchors = example()
    rows = slice(None) if mask is None else mask
    own, of = features[rows], labels[rows]
    by_class = sum((own[of == c].mean(0) - anchors[c]).norm() for c in of.unique())
    expected = {"code": F.mse_loss(own, anchors[of]), "paper": by_class}[form]
    torch.testing.assert_close(fedsa.regularization(features, labels, anchors, mask, form), expected)
    loss = lambda f: fedsa.regularization(f, labels, anchors, mask, form)  # noqa: E731
    assert torch.autograd.gradcheck(loss, features.requires_grad_())


@pytest.mark.parametrize("mask", [None, MASK])
def test_margin_contrastive_against_a_loop(mask):
    features, labels, anchors = example()
    rows = slice(None) if mask is None else mask
    far = torch.cdist(features, anchors) + 1.5 * F.one_hot(labels, C)
    expected = F.cross_entropy(-far[rows], labels[rows])
    torch.testing.assert_close(fedsa.margin_contrastive(features, labels, anchors, 1.5, mask), expected)
    loss = lambda f: fedsa.margin_contrastive(f, labels, anchors, 1.5, mask)  # noqa: E731
    assert torch.autograd.gradcheck(loss, features.requires_grad_())


def test_no_loss_is_nan_where_a_feature_is_its_anchor():
    _, labels, anchors = example()
    for loss in (
        fedsa.regularization,
        lambda *given: fedsa.regularization(*given, form="code"),
        lambda *given: fedsa.margin_contrastive(*given, margin=2.0),
    ):
        features = anchors[labels].clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(features, labels, anchors), features)
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


def test_classifier_calibration_is_the_cross_entropy_of_the_classifier_on_the_anchors():
    weight, bias, anchors = example(1)[2], torch.arange(C).double(), example()[2]
    expected = F.cross_entropy(anchors @ weight.T + bias, torch.arange(C))
    torch.testing.assert_close(fedsa.classifier_calibration(weight, bias, anchors), expected)


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


def slow_round(fed, config, number, anchors, kept):
    """One round of all clients by plain torch; returns anchors, prototypes and what the clients keep."""
    sent, after = {c: [] for c in range(fed.num_classes)}, {}
    for client in range(fed.num_clients):
        model, own_margin = kept.get(client, (fed.initial_model(), 0.0))
        margin, found = max(own_margin, slow_margin(list(anchors))), {c: [] for c in sent}

        def objective(module, features, logits, y, margin=margin, found=found):
            squares = [(features[y == c].mean(0) - anchors[c]).norm() for c in y.unique()]
            distances = torch.cdist(features, anchors) + margin * F.one_hot(y, fed.num_classes)
            loss = F.cross_entropy(logits, y) + config.regularization_weight * sum(squares)
            loss = loss + config.contrastive_weight * F.cross_entropy(-distances, y)
            for feature, label in zip(features.detach(), y.tolist(), strict=True):
                found[label].append(feature)
            calibration = F.cross_entropy(module.head(anchors), torch.arange(len(anchors)))
            return loss + config.calibration_weight * calibration

        params = train_plainly(fed, number, client, model, objective)
        own = means_by_class(found)
        for c, prototype in own.items():
            sent[c].append(prototype)
        after[client] = (params, {}), slow_margin(list(own.values()))
    prototypes = means_by_class(sent)
    moved = {c: config.anchor_decay * anchors[c] + (1 - config.anchor_decay) * p for c, p in prototypes.items()}
    return torch.stack([moved.get(c, anchors[c]) for c in range(len(anchors))]), prototypes, after


@pytest.mark.parametrize("drop_last", [False, True])
def test_three_rounds_are_those_of_a_plain_loop(drop_last):
    parts = [np.array([0, 3, 1, 6, 4, 5, 8, 11, 14, 2]), np.array([7, 10, 13, 16, 19]), np.array([9, 12]),
             np.array([15, 18, 21, 24, 22])]  # fmt: skip
    weights = {"regularization_weight": 0.3, "contrastive_weight": 0.5, "calibration_weight": 0.7, "anchor_decay": 0.9}
    setup, fed = laws.federation(FEDSA, weights, parts=parts, drop_last=drop_last, lr=0.01)
    state, kept = setup.method.init(fed, setup.options), {}
    anchors = state.anchors
    for number in range(3):
        anchors, prototypes, kept = slow_round(fed, setup.options, number, anchors, kept)
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        torch.testing.assert_close(state.anchors, anchors, rtol=1e-9, atol=1e-9)
        assert state.has_class.tolist() == [c in prototypes for c in range(3)]
        for c, prototype in prototypes.items():
            torch.testing.assert_close(state.prototypes[c], prototype, rtol=1e-9, atol=1e-9)
        for client, (model, margin) in kept.items():
            laws.assert_agree(state.clients[client][:2], model, f"client {client} in round {number}")
            assert state.clients[client].margin.item() == pytest.approx(margin, rel=1e-9)
    assert state.clients[1].margin == state.clients[2].margin == 0  # of one class each
    assert state.clients[0].margin > 0


def test_the_larger_margin_counts():
    setup, fed = laws.federation(FEDSA, {"contrastive_weight": 1.0})
    state = laws.simulate(setup, fed, 1)

    def after(margin):
        clients = {c: own._replace(margin=torch.tensor(margin).double()) for c, own in state.clients.items()}
        new, _ = setup.method.run_round(state._replace(clients=clients), fed.cohort(1), fed, setup.options)
        return laws.model_of(setup, new)

    least = fedsa.margin(state.anchors, torch.ones(3, dtype=torch.bool)).item()
    assert laws.distance(after(0.0), after(0.9 * least)) == 0
    assert laws.distance(after(0.0), after(1.1 * least)) > 1e-9


def test_the_papers_values():
    setup = resolve(FEDSA, {"protocol": "fedsa:cifar10-silo", "dataset": "cifar10"}, need_data=False)
    assert FEDSA.config() == fedsa.Config(0.1, "paper", 0.01, "nearest", 1.0, 0.9999, "clients", True)
    assert setup.options == fedsa.Config(10.0, "code", 0.01, "nearest", 1.0, 0.9999, "clients", True)
    run = setup.run
    assert (run.num_clients, run.cohort_size, run.rounds, run.local_epochs, run.batch_size) == (20, 20, 1000, 1, 10)
    assert (run.optimizer, run.lr, run.lr_decay, run.momentum, run.weight_decay) == ("sgd", 0.01, 1.0, 0.0, 0.0)
    assert (run.local_test, run.validation, run.drop_last, run.partition_seed) == (0.25, 0.0, True, 1)
    assert (setup.partition.flag, setup.selection, setup.protocol.evaluation) == (
        "dirichlet:0.1:min=1:draw=pfllib", "best-test", "clients",
    )  # fmt: skip
    assert (setup.setting.mean, setup.setting.std) == ((0.5,) * 3, (0.5,) * 3)
    setup = resolve(FEDSA, {"protocol": "fedsa:cifar100-htfe8", "dataset": "cifar100"}, need_data=False)
    assert (setup.run.num_clients, setup.run.cohort_size, setup.options.contrastive_weight) == (100, 10, 1.0)
