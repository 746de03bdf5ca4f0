"""Federated distillation: the distance against slow loops, the teacher against a plain loop of training."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines.feddistill import distillation
from fedcli.registry import find_method
from fedcli.runs.rounds import one_round
from tests import laws
from tests.reference import load, optimizer_of

FEDDISTILL = find_method("feddistill")
FORMS = list(itertools.product(("probabilities", "logits"), ("cross-entropy", "squared")))
C = 4


def softmax(scores):
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def slow(logits, teacher, averaged, distance):
    """The distance of one sample's output to its teacher."""
    likely = softmax(logits)
    if distance == "squared":
        own = logits if averaged == "logits" else likely
        return sum((a - b) ** 2 for a, b in zip(own, teacher, strict=True)) / C
    target = softmax(teacher) if averaged == "logits" else teacher
    return -sum(q * math.log(p) for p, q in zip(likely, target, strict=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("averaged", "distance"), FORMS)
def test_distance_against_a_loop(averaged, distance, padded):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, C, dtype=torch.float64, generator=draw)
    labels, known = torch.tensor([0, 1, 2, 3, 2, 0]), torch.tensor([True, True, True, False])
    teacher = torch.randn(C, C, dtype=torch.float64, generator=draw)
    teacher = teacher.softmax(-1) if averaged == "probabilities" else teacher
    mask = torch.tensor([True, False, True, True, True, False]) if padded else None
    rows = [i for i in range(6) if mask is None or mask[i]]
    each = [
        slow(logits[i].tolist(), teacher[labels[i]].tolist(), averaged, distance) if known[labels[i]] else 0.0
        for i in rows
    ]
    loss = lambda scores: distillation(scores, labels, teacher, known, averaged, distance, mask)  # noqa: E731
    assert loss(logits).item() == pytest.approx(np.mean(each), rel=1e-12)
    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def slow_round(fed, setup, number, models, teacher):
    """One round of all clients by plain torch; returns their models and the new teacher by class."""
    sent, after, options = {c: [] for c in range(fed.num_classes)}, {}, setup.options
    for client in range(fed.num_clients):
        module = load(copy.deepcopy(fed.network.module), *models.get(client, fed.initial_model())).train()
        optimizer = optimizer_of(module, setup.run, setup.run.lr)
        plan, found = fed.plan(fed.cohort_of(number, [client])), {c: [] for c in sent}
        for t in range(int(plan.steps[0])):
            x, y = fed.engine.gather(plan.index[t, 0, : plan.size[t, 0]])
            _, logits = module(x)
            loss = F.cross_entropy(logits, y)
            for row, label in zip(logits, y.tolist(), strict=True):
                if label in teacher:
                    target = teacher[label] if options.averaged == "probabilities" else teacher[label].softmax(-1)
                    loss = loss - options.distillation_weight * (target * row.log_softmax(-1)).sum() / len(y)
                found[label].append((row if options.averaged == "logits" else row.softmax(-1)).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        after[client] = {name: value.detach() for name, value in module.named_parameters()}, {}
        for label, rows in found.items():
            if rows:
                sent[label].append(torch.stack(rows).mean(0))
    return after, {label: torch.stack(rows).mean(0) for label, rows in sent.items() if rows}


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


def test_a_class_that_the_last_cohort_lacks_has_no_teacher():
    parts = [np.array([0, 3, 6]), np.array([1, 4, 7]), np.array([9, 12]), np.array([2, 5])]
    setup, fed = laws.federation(FEDDISTILL, parts=parts, cohort_size=2)
    assert laws.simulate(setup, fed, 1, [[0, 1]]).has_teacher.tolist() == [True, True, False]
    assert laws.simulate(setup, fed, 2, [[0, 1], [2, 3]]).has_teacher.tolist() == [True, False, True]


def test_the_first_round_is_local_and_every_option_matters():
    local = laws.simulate(*laws.federation("local"), 1)
    laws.assert_agree(laws.simulate(*laws.federation(FEDDISTILL), 1).clients, local.clients, "the first round")
    found = [laws.simulate(*laws.federation(FEDDISTILL, {"averaged": a, "distance": d}), 2).clients for a, d in FORMS]
    for one, other in itertools.combinations(found, 2):
        assert laws.distance(one, other) > 1e-6


@pytest.mark.parametrize(("averaged", "distance"), FORMS[1:])
def test_chunking_is_invisible_in_every_form(averaged, distance):
    laws.law_4_chunking_is_invisible(FEDDISTILL, overrides={"averaged": averaged, "distance": distance}, chunks=(1, 4))


def test_terms_and_costs_of_a_round():
    parts = [np.array([0, 3, 6, 9, 12, 1, 4]), np.array([2, 5]), np.array([7, 8]), np.array([], int)]
    setup, fed = laws.federation(FEDDISTILL, parts=parts)
    _, entry = one_round(setup, fed, laws.simulate(setup, fed, 1), fed.cohort(1))
    assert set(entry["terms"]) == {"cross_entropy", "distillation"}
    assert entry["terms"]["distillation"] > 0
    assert fed.sent_down == {"params": 0, "buffers": 0, "other": 4 * 3 * 3}
    assert fed.sent_up == {"params": 0, "buffers": 0, "other": 5 * 3}  # two classes, one, two, none
    assert setup.method.client_memory(fed.sizes) == fed.sizes.parameters + 2 * 9
