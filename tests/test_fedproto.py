"""FedProto, its general form and FedDistill: what clients share of each class, against a plain loop of training."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core.class_vectors import mean_over_owners
from fedcli.papers.baselines.feddistill import distillation
from fedcli.papers.baselines.fedproto import prototype_distance
from tests import laws
from tests.plain_loops import means_by_class, train_plainly
from tests.tensors import randn

PARTS = [np.array(part) for part in ([0, 3, 1, 6, 4, 9], [7, 10, 13, 16, 19], [12, 15], [18, 22])]  # without class 2


class Contribution(NamedTuple):
    """What a client shares of an example, and what pulls that to what all share of the example's class."""

    vector: torch.Tensor
    pull: torch.Tensor  # a scalar of the loss


def feature_of(features, logits, prototype, options):
    """The contribution of an example in FedProto and its general form."""
    distance = 0.0 * features.sum() if prototype is None else F.mse_loss(features, prototype)
    return Contribution(features, options.prototype_weight * distance)


def output_of(features, logits, teacher, options):
    """The contribution of an example in FedDistill."""
    softened = options.averaged == "probabilities"
    output = logits.softmax(-1) if softened else logits
    if teacher is None:
        return Contribution(output, 0.0 * logits.sum())
    target = teacher if softened else teacher.softmax(-1)
    return Contribution(output, -options.distillation_weight * (target * logits.log_softmax(-1)).sum())


def plain_round(fed, setup, round, models, shared):
    """One round of all clients by plain torch; returns their models and what they share now by class."""
    sent = {c: [] for c in range(fed.num_classes)}
    after = {}
    is_distilled = setup.method.name == "feddistill"
    contribution_of = output_of if is_distilled else feature_of
    of_all_epochs = is_distilled or getattr(setup.method_config, "gathered_epochs", "last") == "all"
    for client in range(fed.num_clients):
        seen = []  # label and vector of every example of every epoch

        def objective(module, features, logits, y, seen=seen):
            pulls = []
            for label, feature, output in zip(y.tolist(), features, logits, strict=True):
                contribution = contribution_of(feature, output, shared.get(label), setup.method_config)
                pulls.append(contribution.pull)
                seen.append((label, contribution.vector.detach()))
            return F.cross_entropy(logits, y) + torch.stack(pulls).mean()

        after[client] = train_plainly(fed, round, client, models.get(client, fed.initial_model()), objective)

        if not of_all_epochs:
            of_one_epoch = len(seen) // fed.config.local_epochs
            seen = seen[len(seen) - of_one_epoch :]
        gathered = {c: [] for c in sent}
        for label, vector in seen:
            gathered[label].append(vector)
        for label, mean in means_by_class(gathered).items():
            sent[label].append(mean)
    return after, means_by_class(sent)


def by_class(vectors, has_class):
    """The vectors of the classes that have one."""
    return {label: vectors[label] for label in range(3) if has_class[label]}


def prototypes_of(state):
    return by_class(state.prototypes, state.has_prototype)


def teacher_of(state):
    return by_class(state.teacher, state.has_teacher)


@pytest.mark.parametrize(
    ("method", "epochs", "shared_of", "options"),
    [
        pytest.param(
            "fedproto",
            2,
            prototypes_of,
            {"prototype_weight": 3.0, "gathered_epochs": "last"},
            id="FedProto, last epoch",
        ),
        pytest.param(
            "fedproto", 3, prototypes_of, {"prototype_weight": 3.0, "gathered_epochs": "all"}, id="FedProto, all epochs"
        ),
        pytest.param(
            "feddistill",
            2,
            teacher_of,
            {"distillation_weight": 0.7, "averaged": "probabilities"},
            id="FedDistill, probabilities",
        ),
        pytest.param(
            "feddistill", 2, teacher_of, {"distillation_weight": 0.7, "averaged": "logits"}, id="FedDistill, logits"
        ),
    ],
)
def test_three_rounds_are_those_of_a_plain_loop(method, epochs, shared_of, options):
    setup, fed = toy.federation(method, options, parts=PARTS, local_epochs=epochs)
    state = laws.assert_rounds_agree(setup, fed, plain_round, {}, shared_of)
    assert shared_of(state).keys() == {0, 1}  # nobody has class 2


@pytest.mark.parametrize("drop_last", [False, True])
def test_generalised_prototypes_are_of_the_last_epoch_of_training(drop_last):
    positions = ([0, 3, 1, 6, 4, 9, 2], [7, 10, 13, 16, 19], [12, 15], [18, 22, 5, 8])
    parts = list(map(np.array, positions))
    setup, fed = toy.federation("fedproto-general", parts=parts, local_epochs=3, drop_last=drop_last)
    assert bool(fed.plan(fed.cohort(0)).num_steps[2]) != drop_last  # a batch has 4: the third client may take no step
    _, prototypes = plain_round(fed, setup, 0, {}, {})
    laws.assert_agree(prototypes_of(toy.simulate(setup, fed, 1)), prototypes, "the prototypes")


HAS = torch.tensor([True, True, False, True])
LABELS = torch.tensor([0, 1, 3, 2, 0, 3])


def test_the_generalised_distance_is_a_mean_of_squares():
    """An unknown class counts as 0."""
    features = randn(6, 5)
    prototypes = randn(4, 5, seed=1)
    each = F.mse_loss(features, prototypes[LABELS], reduction="none").mean(1) * HAS[LABELS]
    torch.testing.assert_close(prototype_distance(features, LABELS, prototypes, HAS), each.mean())


def test_each_owner_of_a_class_counts_once_in_a_generalised_prototype():
    nothing = [torch.nan, torch.nan]
    means = torch.tensor([[[1.0, 1.0], nothing, [4.0, 0.0]], [[3.0, 5.0], nothing, nothing]])
    counts = torch.tensor([[1, 0, 2], [300, 0, 0]])
    prototypes = mean_over_owners(means, counts, torch.full((3, 2), 7.0))
    torch.testing.assert_close(prototypes, torch.tensor([[2.0, 3.0], [7.0, 7.0], [4.0, 0.0]]))


@pytest.mark.parametrize("averaged", ["probabilities", "logits"])
def test_the_squared_distance_to_a_teacher_is_torchs_and_0_where_there_is_none(averaged):
    logits = randn(6, 4)
    teacher = randn(4, 4, seed=1)
    outputs = logits
    if averaged == "probabilities":
        outputs = logits.softmax(-1)
        teacher = teacher.softmax(-1)
    each = F.mse_loss(outputs, teacher[LABELS], reduction="none").mean(-1) * HAS[LABELS]
    torch.testing.assert_close(distillation(logits, LABELS, teacher, HAS, averaged, "squared"), each.mean())
