"""Federated distillation: the distance against slow loops, the teacher against a plain loop of training."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines.feddistill import distillation
from fedcli.registry import find_method
from tests import laws
from tests.reference import means_by_class, train_plainly

FEDDISTILL = find_method("feddistill")
FORMS = list(itertools.product(("probabilities", "logits"), ("cross-entropy", "squared")))
C = 4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("averaged", "distance"), FORMS)
def test_distance_is_torchs_and_0_where_there_is_no_teacher(averaged, distance, padded):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, C, dtype=torch.float64, generator=draw)
    labels, known = torch.tensor([0, 1, 2, 3, 2, 0]), torch.tensor([True, True, True, False])
    teacher = torch.randn(C, C, dtype=torch.float64, generator=draw)
    teacher = teacher.softmax(-1) if averaged == "probabilities" else teacher
    mask = torch.tensor([True, False, True, True, True, False]) if padded else None
    target, softened = teacher[labels], averaged == "probabilities"
    if distance == "squared":
        each = F.mse_loss(logits.softmax(-1) if softened else logits, target, reduction="none").mean(-1)
    else:
        each = F.cross_entropy(logits, target if softened else target.softmax(-1), reduction="none")
    expected = (each * known[labels])[slice(None) if mask is None else mask].mean()
    loss = lambda scores: distillation(scores, labels, teacher, known, averaged, distance, mask)  # noqa: E731
    torch.testing.assert_close(loss(logits), expected)
    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def slow_round(fed, setup, number, models, teacher):
    """One round of all clients by plain torch; returns their models and the new teacher by class."""
    sent, after, options = {c: [] for c in range(fed.num_classes)}, {}, setup.options
    for client in range(fed.num_clients):
        found = {c: [] for c in sent}

        def objective(module, features, logits, y, found=found):
            loss = F.cross_entropy(logits, y)
            for row, label in zip(logits, y.tolist(), strict=True):
                if label in teacher:
                    target = teacher[label] if options.averaged == "probabilities" else teacher[label].softmax(-1)
                    loss = loss - options.distillation_weight * (target * row.log_softmax(-1)).sum() / len(y)
                found[label].append((row if options.averaged == "logits" else row.softmax(-1)).detach())
            return loss

        after[client] = train_plainly(fed, number, client, models.get(client, fed.initial_model()), objective), {}
        for label, mean in means_by_class(found).items():
            sent[label].append(mean)
    return after, means_by_class(sent)


@pytest.mark.parametrize("averaged", ["probabilities", "logits"])
def test_two_rounds_are_those_of_a_plain_loop(averaged):
    parts = [np.array([0, 3, 1, 6, 4, 9]), np.array([7, 10, 13, 16, 19]), np.array([12, 15]), np.array([18, 22])]
    setup, fed = laws.federation(FEDDISTILL, {"averaged": averaged, "distillation_weight": 0.7}, parts=parts)
    state, models, teacher = setup.method.init(fed, setup.options), {}, {}
    for number in range(2):
        models, teacher = slow_round(fed, setup, number, models, teacher)
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        assert state.has_teacher.tolist() == [True, True, False]  # nobody has class 2
        for label, output in teacher.items():
            torch.testing.assert_close(state.teacher[label], output, rtol=1e-9, atol=1e-12)
        for client, model in models.items():
            laws.assert_agree(tuple(state.clients[client]), model, f"client {client} in round {number}")
