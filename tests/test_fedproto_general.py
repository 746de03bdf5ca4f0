"""Generalized FedProto: its term and its means by hand, and what is gathered against a plain training loop."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines.fedproto_general import aggregate_prototypes, prototype_distance
from fedcli.registry import find_method
from fedcli.runs.rounds import one_round
from tests import laws
from tests.reference import load, optimizer_of

FEDPROTO = find_method("fedproto-general")


def example():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(6, 5, dtype=torch.float64, generator=draw)
    prototypes = torch.randn(4, 5, dtype=torch.float64, generator=draw)
    return features, torch.tensor([0, 1, 3, 2, 0, 3]), prototypes, torch.tensor([True, True, False, True])


def test_the_distance_against_a_loop_where_an_unknown_class_counts_as_0():
    features, labels, prototypes, has_prototype = example()
    mask = torch.tensor([True, True, False, True, True, True])
    values = []
    for feature, label, real in zip(features, labels, mask, strict=True):
        if real:
            pairs = zip(feature, prototypes[label], strict=True)
            values.append(float(sum((a - b) ** 2 for a, b in pairs)) / 5 if has_prototype[label] else 0.0)
    assert len(values) == 5
    assert values.count(0.0) == 1
    ours = prototype_distance(features, labels, prototypes, has_prototype, mask)
    assert ours.item() == pytest.approx(np.mean(values), rel=1e-12)


def test_the_distance_by_hand_is_of_vectors_as_they_are():
    features = torch.tensor([[3.0, 0.0], [1.0, 1.0]], requires_grad=True)
    prototypes = torch.tensor([[1.0, 4.0], [9.0, 9.0]])
    loss = prototype_distance(features, torch.tensor([0, 1]), prototypes, torch.tensor([True, False]))
    assert loss.item() == (4 + 16) / 2 / 2
    loss.backward()
    torch.testing.assert_close(features.grad, torch.tensor([[1.0, -2.0], [0.0, 0.0]]))


def test_prototypes_by_hand_each_owner_counts_once():
    nothing = [torch.nan, torch.nan]
    means = torch.tensor([[[1.0, 1.0], nothing, [4.0, 0.0]], [[3.0, 5.0], nothing, nothing]])
    counts = torch.tensor([[1, 0, 2], [300, 0, 0]])
    prototypes = aggregate_prototypes(means, counts, torch.full((3, 2), 7.0))
    torch.testing.assert_close(prototypes, torch.tensor([[2.0, 3.0], [7.0, 7.0], [4.0, 0.0]]))


def gathered_by_hand(setup, fed, client):
    """Class means of the features of a client's last epoch of round 0, by a plain loop of SGD."""
    module = load(copy.deepcopy(fed.network.module), *fed.initial_model())
    optimizer, epochs = optimizer_of(module, setup.run, setup.run.lr), setup.run.local_epochs
    by_class = {label: [] for label in range(fed.num_classes)}
    for epoch in range(epochs):
        plan = fed.plan(fed.cohort_of(0, [client]), range(epoch, epoch + 1))
        for t in range(int(plan.steps[0])):
            x, y = fed.engine.gather(plan.index[t, 0, : plan.size[t, 0]])
            features, logits = module(x)
            if epoch == epochs - 1:
                for feature, label in zip(features, y.tolist(), strict=True):
                    by_class[label].append(feature.detach())
            optimizer.zero_grad()
            F.cross_entropy(logits, y).backward()
            optimizer.step()
    return {label: torch.stack(found).mean(0) for label, found in by_class.items() if found}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("chunk", ["1", "4"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_prototypes_are_of_the_last_epoch_of_training(epochs, chunk, drop_last):
    run = {"clients_per_chunk": chunk, "local_epochs": epochs, "drop_last": drop_last}
    setup, fed = laws.federation(FEDPROTO, parts=laws.toy_parts((13, 7, 2, 5)), **run)
    state = laws.simulate(setup, fed, 1)
    means = [gathered_by_hand(setup, fed, client) for client in range(4)]
    assert bool(means[2]) != drop_last  # a batch has 4: the third client may take no step
    for label in range(3):
        own = [found[label] for found in means if label in found]
        torch.testing.assert_close(state.prototypes[label], torch.stack(own).mean(0))
    assert state.has_prototype.all()


def test_the_first_round_is_fedavg_and_the_second_is_not():
    ours, base = laws.federation(FEDPROTO), laws.federation("fedavg")
    laws.assert_agree(laws.simulate(*ours, 1).params, laws.simulate(*base, 1).params, "the first round")
    assert laws.distance(laws.simulate(*ours, 2).params, laws.simulate(*base, 2).params) > 1e-6
    heavy = laws.federation(FEDPROTO, {"prototype_weight": 10.0})
    assert laws.distance(laws.simulate(*heavy, 2).params, laws.simulate(*ours, 2).params) > 1e-6


def test_a_class_absent_from_a_cohort_keeps_its_prototype():
    data = laws.toy_dataset(num_train=12)  # classes 0, 1, 2, 0, 1, 2, ...
    parts = [np.array([0, 3, 6]), np.array([1, 4, 7]), np.array([9, 10]), np.array([2, 5, 8, 11])]
    setup, fed = laws.federation(FEDPROTO, data=data, parts=parts, cohort_size=2)
    first = laws.simulate(setup, fed, 1, [[0, 1]])
    assert first.has_prototype.tolist() == [True, True, False]
    second, _ = setup.method.run_round(first, fed.cohort_of(1, [2, 3]), fed, setup.options)
    third, _ = setup.method.run_round(second, fed.cohort_of(2, [0, 1]), fed, setup.options)
    assert third.has_prototype.all()
    assert torch.equal(third.prototypes[2], second.prototypes[2])
    assert not torch.equal(third.prototypes[0], second.prototypes[0])


def test_terms_and_costs_of_a_round():
    setup, fed = laws.federation(FEDPROTO)
    _, entry = one_round(setup, fed, laws.simulate(setup, fed, 1), fed.cohort(1))
    assert set(entry["terms"]) == {"cross_entropy", "prototype"}
    assert entry["terms"]["prototype"] > 0
    fed.start_round()
    setup.method.run_round(setup.method.init(fed, setup.options), fed.cohort(0), fed, setup.options)
    model, prototypes = fed.sizes.parameters, fed.num_classes * fed.feature_dim
    assert fed.sent_down == {"params": 4 * model, "buffers": 0, "other": 4 * prototypes}
    assert fed.sent_up == {"params": 4 * model, "buffers": 0, "other": 4 * prototypes}
    assert setup.method.client_memory(fed.sizes) == model + prototypes
