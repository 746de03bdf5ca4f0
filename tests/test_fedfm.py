"""FedFM's equations against slow loops and hand numbers, its schedule, its costs and its protocols."""

import math

import numpy as np
import pytest
import torch

from fedcli import partition
from fedcli.config import resolve
from fedcli.registry import find_method, find_protocol
from fedcli.runs import one_round
from papers.fedfm import aggregate_anchors, contrastive_guiding, l2_guiding
from tests import laws

FEDFM = find_method("fedfm")


def example(seed=0, samples=7, num_classes=4, width=5):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, width, dtype=torch.float64, generator=draw)
    anchors = 3 * torch.randn(num_classes, width, dtype=torch.float64, generator=draw)
    return features, torch.randint(0, num_classes, (samples,), generator=draw), anchors


def cosine(a, b):
    return float((a * b).sum() / math.sqrt(float((a * a).sum())) / math.sqrt(float((b * b).sum())))


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_contrastive_guiding_against_a_loop(temperature):
    features, labels, anchors = example()
    losses = []
    for feature, label in zip(features, labels, strict=True):
        scores = [math.exp(cosine(anchor, feature) / temperature) for anchor in anchors]
        losses.append(-math.log(scores[label] / sum(scores)))
    ours = contrastive_guiding(features, labels, anchors, temperature)
    assert ours.item() == pytest.approx(np.mean(losses), rel=1e-12)


def test_contrastive_guiding_by_hand():
    features = torch.tensor([[2.0, 0.0]])  # cosine 1 with anchor 0 and 0 with anchor 1
    anchors = torch.tensor([[5.0, 0.0], [0.0, 0.1]])
    loss = contrastive_guiding(features, torch.tensor([0]), anchors, temperature=0.1)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-10)), rel=1e-3)


def test_l2_guiding_is_two_minus_two_cosines_over_the_width():
    features, labels, anchors = example()
    values = [(2 - 2 * cosine(f, anchors[y])) / 5 for f, y in zip(features, labels, strict=True)]
    assert l2_guiding(features, labels, anchors).item() == pytest.approx(np.mean(values), rel=1e-12)


@pytest.mark.parametrize("guiding", [lambda *a, **k: contrastive_guiding(*a, 0.1, **k), l2_guiding])
class TestGuiding:
    def test_minds_no_length(self, guiding):
        features, labels, anchors = example()
        torch.testing.assert_close(guiding(7 * features, labels, 0.3 * anchors), guiding(features, labels, anchors))

    def test_masked_samples_do_not_count(self, guiding):
        features, labels, anchors = example()
        mask = torch.tensor([True, False, True, True, False, True, True])
        kept = guiding(features[mask], labels[mask], anchors)
        torch.testing.assert_close(guiding(features, labels, anchors, mask=mask), kept)

    def test_a_class_without_anchor_is_left_out(self, guiding):
        features, labels, anchors = example()
        labels[:] = torch.tensor([0, 1, 3, 2, 0, 3, 1])
        has_class = torch.tensor([True, True, False, True])
        keep = labels != 2
        renumbered = torch.where(labels == 3, 2, labels)
        expected = guiding(features[keep], renumbered[keep], anchors[has_class])
        anchors[2] = 0
        torch.testing.assert_close(guiding(features, labels, anchors, has_class=has_class), expected)
        none = torch.zeros(4, dtype=torch.bool)
        assert guiding(features, labels, anchors, has_class=none) == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("length", [0.0, 1e-20, 1e-8])
    def test_a_feature_without_direction_has_a_bounded_gradient(self, guiding, dtype, length):
        features, labels, anchors = (value.to(dtype) if value.is_floating_point() else value for value in example())
        features[2] = length
        features.requires_grad_()
        guiding(features, labels, anchors).backward()
        assert torch.isfinite(features.grad).all()
        assert features.grad.abs().max() < 100
        assert features.grad[[0, 1, 3]].abs().max() > 0

    def test_gradient_is_the_difference_quotient(self, guiding):
        features, labels, anchors = example()
        assert torch.autograd.gradcheck(lambda f: guiding(f, labels, anchors), features.requires_grad_())


def prototypes():
    means = torch.tensor([[[1.0, 1.0], [9.0, 9.0], [4.0, 0.0]], [[3.0, 5.0], [9.0, 9.0], [torch.nan, torch.nan]]])
    return means, torch.tensor([[1, 0, 2], [3, 0, 0]]), torch.full((3, 2), 7.0)


def test_weighted_anchors_by_hand():
    anchors = aggregate_anchors(*prototypes(), "weighted")
    torch.testing.assert_close(anchors, torch.tensor([[2.5, 4.0], [7.0, 7.0], [4.0, 0.0]]))


def test_uniform_anchors_take_the_previous_one_from_a_client_without_the_class():
    anchors = aggregate_anchors(*prototypes(), "uniform")
    torch.testing.assert_close(anchors, torch.tensor([[2.0, 3.0], [7.0, 7.0], [5.5, 3.5]]))


@pytest.mark.parametrize("backbone", ["cnn-small", "resnet10-3x3"])  # the latter's features depend on the mode
def test_weighted_anchors_are_the_class_means_over_all_examples(backbone):
    run = {"data": laws.toy_dataset(num_train=16, channels=3), "parts": laws.toy_parts((6, 5, 3, 2)), "validation": 0.2}
    setup, fed = laws.federation(FEDFM, backbone=backbone, local_epochs=1, **run)
    state = setup.method.init(fed, setup.options)
    after, _ = setup.method.run_round(state, fed.cohort(0), fed, setup.options)
    features, labels = [], []
    for part in fed.training:
        x, y = fed.engine.gather(part)
        features.append(fed.network(state.params, state.buffers, x, train=False).features)
        labels.append(y)
    features, labels = torch.cat(features), torch.cat(labels)
    assert len(labels) == 14  # two are held out
    for label in range(3):  # the anchors of round 0 are those of the received, initial model
        torch.testing.assert_close(after.anchors[label], features[labels == label].mean(0).detach())
    assert after.has_anchor.all()


def test_buffers_are_averaged_as_in_fedavg():
    run = {"data": laws.toy_dataset(num_train=12, channels=3), "parts": laws.toy_parts((4, 3, 2, 3))}
    laws.law_1_off_is_the_simpler_method(FEDFM, rounds=2, backbone="resnet10-3x3", local_epochs=1, **run)


def test_a_class_absent_from_a_cohort_keeps_its_anchor():
    data = laws.toy_dataset(num_train=12)  # classes 0, 1, 2, 0, 1, 2, ...
    parts = [np.array([0, 3, 6]), np.array([1, 4, 7]), np.array([9, 10]), np.array([2, 5, 8, 11])]
    setup, fed = laws.federation(FEDFM, data=data, parts=parts, cohort_size=2)
    state = setup.method.init(fed, setup.options)
    first, _ = setup.method.run_round(state, fed.cohort_of(0, [0, 1]), fed, setup.options)
    assert first.has_anchor.tolist() == [True, True, False]
    second, _ = setup.method.run_round(first, fed.cohort_of(1, [2, 3]), fed, setup.options)
    third, _ = setup.method.run_round(second, fed.cohort_of(2, [0, 1]), fed, setup.options)
    assert third.has_anchor.all()
    assert torch.equal(third.anchors[2], second.anchors[2])
    assert not torch.equal(third.anchors[0], second.anchors[0])


def test_rounds_before_start_round_are_fedavg_and_that_round_is_not():
    options = {"start_round": 2, "match_weight": 1.0}
    ours, base = laws.federation(FEDFM, options), laws.federation("fedavg")
    for rounds in (1, 2):
        laws.assert_agree(laws.simulate(*ours, rounds).params, laws.simulate(*base, rounds).params, "before T_s")
    assert laws.distance(laws.simulate(*ours, 3).params, laws.simulate(*base, 3).params) > 1e-6


def test_the_two_guidings_and_the_two_weightings_differ():
    base = laws.simulate(*laws.federation(FEDFM, {"start_round": 0}), 2).params
    for other in ({"guiding": "l2"}, {"anchor_weighting": "uniform"}, {"temperature": 1.0}):
        assert laws.distance(laws.simulate(*laws.federation(FEDFM, {"start_round": 0, **other}), 2).params, base) > 1e-6


def test_terms_and_costs_of_a_round():
    setup, fed = laws.federation(FEDFM, {"start_round": 0})
    _, entry = one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort(0))
    assert set(entry["terms"]) == {"cross_entropy", "matching"}
    model, anchors = fed.sizes.parameters, fed.num_classes * fed.feature_dim
    assert fed.sent_down["params"] + fed.sent_down["other"] == 4 * (model + anchors)  # four clients
    assert fed.sent_up["params"] + fed.sent_up["other"] == 4 * (model + anchors)
    assert setup.method.client_memory(fed.sizes) == model + anchors


@pytest.mark.parametrize(
    ("protocol", "dataset", "classes", "counts"),
    [
        ("fedfm:niid-2", "cifar10", 10, {300: 9, 2300: 1}),
        ("fedfm:niid-2", "cifar100", 100, {30: 90, 230: 10}),
        ("fedfm:niid-3", "cifar10", 10, {0: 3, 714: 7}),
    ],
)
def test_partitions_of_the_protocols_have_the_papers_sizes(protocol, dataset, classes, counts):
    chosen = find_protocol(protocol, FEDFM)
    flag = {**chosen.settings, **chosen.datasets[dataset].settings}["partition"]
    labels = np.repeat(np.arange(classes), 50_000 // classes)
    parts = partition.from_flag(flag)(labels, 10, 0)
    for row in partition.describe(parts, labels, classes):
        sizes, times = np.unique(row, return_counts=True)
        assert dict(zip(sizes.tolist(), times.tolist(), strict=True)) == counts


def test_the_papers_values_are_the_defaults(monkeypatch):
    monkeypatch.setattr("fedcli.datasets.available", lambda name: None)
    setup = resolve(FEDFM, {"dataset": "cifar10"})
    assert setup.protocol.name == "fedfm:niid-1"
    assert setup.options == FEDFM.config(50.0, 0.1, 20, "contrastive", "weighted")
    run = setup.run
    assert (run.rounds, run.local_epochs, run.batch_size, run.lr, run.momentum) == (100, 10, 64, 0.01, 0.9)
    assert (run.weight_decay, run.validation, run.drop_last, run.backbone) == (1e-5, 0.2, True, "resnet18")
    assert (run.num_clients, run.cohort_size, setup.selection) == (10, 10, "best-validation")
