"""Generalized FedProto: its term and its means by hand, and what is gathered against a plain training loop."""

import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines.fedproto_general import aggregate_prototypes, prototype_distance
from fedcli.registry import find_method
from tests import laws
from tests.reference import means_by_class, train_plainly

FEDPROTO = find_method("fedproto-general")


def example():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(6, 5, dtype=torch.float64, generator=draw)
    prototypes = torch.randn(4, 5, dtype=torch.float64, generator=draw)
    return features, torch.tensor([0, 1, 3, 2, 0, 3]), prototypes, torch.tensor([True, True, False, True])


def test_the_distance_is_a_mean_of_squares_where_an_unknown_class_counts_as_0():
    features, labels, prototypes, has_prototype = example()
    mask = torch.tensor([True, True, False, True, True, True])
    each = F.mse_loss(features, prototypes[labels], reduction="none").mean(1) * has_prototype[labels]
    ours = prototype_distance(features, labels, prototypes, has_prototype, mask)
    torch.testing.assert_close(ours, each[mask].mean())


def test_prototypes_by_hand_each_owner_counts_once():
    nothing = [torch.nan, torch.nan]
    means = torch.tensor([[[1.0, 1.0], nothing, [4.0, 0.0]], [[3.0, 5.0], nothing, nothing]])
    counts = torch.tensor([[1, 0, 2], [300, 0, 0]])
    prototypes = aggregate_prototypes(means, counts, torch.full((3, 2), 7.0))
    torch.testing.assert_close(prototypes, torch.tensor([[2.0, 3.0], [7.0, 7.0], [4.0, 0.0]]))


def gathered_by_hand(fed, client, epochs):
    """Class means of the features of a client's last epoch of round 0, by a plain loop of SGD."""
    seen, by_class = [], {label: [] for label in range(fed.num_classes)}

    def objective(module, features, logits, y):
        seen.append((y.tolist(), features.detach()))
        return F.cross_entropy(logits, y)

    train_plainly(fed, 0, client, fed.initial_model(), objective)
    for labels, features in seen[len(seen) - len(seen) // epochs :]:
        for label, feature in zip(labels, features, strict=True):
            by_class[label].append(feature)
    return means_by_class(by_class)


@pytest.mark.parametrize("drop_last", [False, True])
def test_prototypes_are_of_the_last_epoch_of_training(drop_last):
    run = {"local_epochs": 3, "drop_last": drop_last}
    setup, fed = laws.federation(FEDPROTO, parts=laws.toy_parts((13, 7, 2, 5)), **run)
    state = laws.simulate(setup, fed, 1)
    means = [gathered_by_hand(fed, client, 3) for client in range(4)]
    assert bool(means[2]) != drop_last  # a batch has 4: the third client may take no step
    for label in range(3):
        own = [found[label] for found in means if label in found]
        torch.testing.assert_close(state.prototypes[label], torch.stack(own).mean(0))
    assert state.has_prototype.all()
