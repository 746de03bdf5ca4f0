"""Federated distillation: the distance against torch's, the teacher against a plain loop of training."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines.feddistill import distillation
from tests import laws
from tests.reference import means_by_class, train_plainly
from tests.toys import randn

C = 4


@pytest.mark.parametrize("averaged", ["probabilities", "logits"])
@pytest.mark.parametrize("distance", ["cross-entropy", "squared"])
def test_distance_is_torchs_and_0_where_there_is_no_teacher(averaged, distance):
    logits, labels, teacher = randn(6, C), torch.tensor([0, 1, 2, 3, 2, 0]), randn(C, C, seed=1)
    softened, has_teacher = averaged == "probabilities", torch.tensor([True, True, True, False])
    teacher = teacher.softmax(-1) if softened else teacher
    target = teacher[labels]
    if distance == "squared":
        each = F.mse_loss(logits.softmax(-1) if softened else logits, target, reduction="none").mean(-1)
    else:
        each = F.cross_entropy(logits, target if softened else target.softmax(-1), reduction="none")
    ours = distillation(logits, labels, teacher, has_teacher, averaged, distance)
    torch.testing.assert_close(ours, (each * has_teacher[labels]).mean())


def slow_round(fed, setup, number, models, teacher):
    """One round of all clients by plain torch; returns their models and the new teacher by class."""
    sent, after, options = {c: [] for c in range(fed.num_classes)}, {}, setup.options
    for client in range(fed.num_clients):
        outputs = {c: [] for c in sent}

        def objective(module, features, logits, y, outputs=outputs):
            loss = F.cross_entropy(logits, y)
            for row, label in zip(logits, y.tolist(), strict=True):
                if label in teacher:
                    target = teacher[label] if options.averaged == "probabilities" else teacher[label].softmax(-1)
                    loss = loss - options.distillation_weight * (target * row.log_softmax(-1)).sum() / len(y)
                outputs[label].append((row if options.averaged == "logits" else row.softmax(-1)).detach())
            return loss

        after[client] = train_plainly(fed, number, client, models.get(client, fed.initial_model()), objective), {}
        for label, mean in means_by_class(outputs).items():
            sent[label].append(mean)
    return after, means_by_class(sent)


def teacher_of(state):
    return {label: state.teacher[label] for label in range(3) if state.has_teacher[label]}


@pytest.mark.parametrize("averaged", ["probabilities", "logits"])
def test_two_rounds_are_those_of_a_plain_loop(averaged):
    parts = [np.array([0, 3, 1, 6, 4, 9]), np.array([7, 10, 13, 16, 19]), np.array([12, 15]), np.array([18, 22])]
    setup, fed = laws.federation("feddistill", {"averaged": averaged, "distillation_weight": 0.7}, parts=parts)
    state = laws.assert_rounds_agree(setup, fed, slow_round, {}, teacher_of, rounds=2)
    assert state.has_teacher.tolist() == [True, True, False]  # nobody has class 2
