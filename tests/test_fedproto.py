"""FedProto and its general form: rounds against a plain loop of training, prototypes of the last cohort."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines.fedproto_general import aggregate_prototypes, prototype_distance
from tests import laws
from tests.reference import means_by_class, train_plainly
from tests.toys import randn


def slow_round(fed, setup, number, models, prototypes):
    """One round of all clients by plain torch; returns their models and the new prototypes by class."""
    sent, after = {c: [] for c in range(fed.num_classes)}, {}
    for client in range(fed.num_clients):
        seen = []  # label and features of every example of every epoch

        def objective(module, features, logits, y, seen=seen):
            pulled = []
            for feature, label in zip(features, y.tolist(), strict=True):
                pulled.append(F.mse_loss(feature, prototypes[label]) if label in prototypes else 0.0 * feature.sum())
                seen.append((label, feature.detach()))
            return F.cross_entropy(logits, y) + setup.options.prototype_weight * torch.stack(pulled).mean()

        after[client] = train_plainly(fed, number, client, models.get(client, fed.initial_model()), objective), {}
        last = len(seen) // fed.config.local_epochs
        gathered = seen if getattr(setup.options, "gathered_epochs", "last") == "all" else seen[len(seen) - last :]
        for label, mean in means_by_class({c: [row for own, row in gathered if own == c] for c in sent}).items():
            sent[label].append(mean)
    return after, means_by_class(sent)


def prototypes_of(state):
    return {label: state.prototypes[label] for label in range(3) if state.has_prototype[label]}


@pytest.mark.parametrize(("epochs", "gathered"), [(2, "last"), (3, "all")])
def test_three_rounds_are_those_of_a_plain_loop(epochs, gathered):
    parts = [np.array([0, 3, 1, 6, 4, 9]), np.array([7, 10, 13, 16, 19]), np.array([12, 15]), np.array([18, 22])]
    options = {"prototype_weight": 3.0, "gathered_epochs": gathered}
    setup, fed = laws.federation("fedproto", options, parts=parts, local_epochs=epochs)
    state = laws.assert_rounds_agree(setup, fed, slow_round, {}, prototypes_of)
    assert state.has_prototype.tolist() == [True, True, False]  # nobody has class 2


def test_the_generalised_distance_is_a_mean_of_squares_where_an_unknown_class_counts_as_0():
    features, prototypes, labels = randn(6, 5), randn(4, 5, seed=1), torch.tensor([0, 1, 3, 2, 0, 3])
    has_prototype = torch.tensor([True, True, False, True])
    each = F.mse_loss(features, prototypes[labels], reduction="none").mean(1) * has_prototype[labels]
    torch.testing.assert_close(prototype_distance(features, labels, prototypes, has_prototype), each.mean())


def test_generalised_prototypes_by_hand_each_owner_counts_once():
    nothing = [torch.nan, torch.nan]
    means = torch.tensor([[[1.0, 1.0], nothing, [4.0, 0.0]], [[3.0, 5.0], nothing, nothing]])
    counts = torch.tensor([[1, 0, 2], [300, 0, 0]])
    prototypes = aggregate_prototypes(means, counts, torch.full((3, 2), 7.0))
    torch.testing.assert_close(prototypes, torch.tensor([[2.0, 3.0], [7.0, 7.0], [4.0, 0.0]]))


@pytest.mark.parametrize("drop_last", [False, True])
def test_generalised_prototypes_are_of_the_last_epoch_of_training(drop_last):
    parts = [np.array(own) for own in ([0, 3, 1, 6, 4, 9, 2], [7, 10, 13, 16, 19], [12, 15], [18, 22, 5, 8])]
    setup, fed = laws.federation("fedproto-general", parts=parts, local_epochs=3, drop_last=drop_last)
    assert bool(fed.plan(fed.cohort(0)).steps[2]) != drop_last  # a batch has 4: the third client may take no step
    _, prototypes = slow_round(fed, setup, 0, {}, {})
    laws.assert_agree(prototypes_of(laws.simulate(setup, fed, 1)), prototypes, "the prototypes")
