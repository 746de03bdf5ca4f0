"""RHFL: its losses and the clients' weights by hand, and the exchange against a plain loop."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines import rhfl
from fedcli.papers.baselines.rhfl import Config, confidence_weights, symmetric_cross_entropy
from tests import laws
from tests.reference import stacked_by_network
from tests.toys import TWO_NETWORKS, randn, with_different_models

YES = torch.tensor([True, True, True])


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_symmetric_cross_entropy_by_its_equation_with_bounded_logarithms():
    logits, labels = 3 * randn(6, 4), torch.tensor([0, 1, 3, 2, 0, 1])
    logits[1, 2] = 1000.0  # the other classes' p is 1e-7 at least
    truth = F.one_hot(labels, 4).double().clamp(min=1e-4)
    reverse = -(logits.softmax(1).clamp(min=1e-7) * truth.log()).sum(1)
    expected = 0.3 * F.cross_entropy(logits, labels) + 2 * reverse.mean()
    config = Config(cross_entropy_weight=0.3, reverse_weight=2.0)
    torch.testing.assert_close(symmetric_cross_entropy(logits, labels, config), expected)


def test_weights_by_hand():
    # q = (2-1)/1 = 1, (3-2)/2 = 1/2, (1-2)/2 = -1/2, sum 1; a = 1/2 + 1/2 (1, 1/2, -1/2) = 1, 3/4, 1/4
    weights = confidence_weights(vector(2, 3, 1), vector(1, 2, 2), YES, 0.5)
    powers = [math.exp(a) for a in (1.0, 0.75, 0.25)]
    assert weights.tolist() == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)


def test_weights_where_there_is_nothing_to_compare():
    assert confidence_weights(vector(0, 0, 0), vector(1, 2, 2), ~YES, 0.5).tolist() == [0.5] * 3
    third = pytest.approx([1 / 3] * 3)
    assert confidence_weights(vector(2, 2, 2), vector(2, 2, 2), YES, 0.5).tolist() == third
    assert confidence_weights(vector(3, 1, 2), vector(2, 2, 2), YES, 0.5).tolist() == third  # 1/2 - 1/2 + 0
    # A newcomer and a client without examples have q = 0: a = 1/2 + 1/2 (1, 0, 0)
    newcomer = confidence_weights(vector(3, 0, 5), vector(2, 4, 0), torch.tensor([True, False, True]), 0.5)
    powers = [math.exp(1), math.exp(0.5), math.exp(0.5)]
    assert newcomer.tolist() == pytest.approx([power / sum(powers) for power in powers])
    assert confidence_weights(vector(0), vector(1), torch.tensor([False]), 0.5).tolist() == [1]


def test_the_public_phase_against_a_plain_loop():
    setup, fed = laws.federation("rhfl", optimizer="adam", lr=0.01, **TWO_NETWORKS)
    states, weights = laws.simulate(setup, fed, 1).clients, vector(0.1, 0.2, 0.3, 0.4)

    def objective(k, features, logits, everyone):
        targets = {j: said.softmax(1) for j, (_, said) in enumerate(everyone) if j != k}
        own = F.log_softmax(logits, 1)
        loss = sum(weights[j] * F.kl_div(own, target, reduction="batchmean") for j, target in targets.items())
        return loss, loss

    def phase(clients, *rest):
        return rhfl.align(clients, weights, *rest)

    optimizer = partial(torch.optim.Adam, lr=0.01)
    terms, (losses,) = laws.assert_public_phase_agrees(setup, fed, fed.cohort(1), states, phase, objective, optimizer)
    assert terms["alignment"].tolist() == pytest.approx(losses)


def test_losses_are_those_of_the_training_parts():
    run = {"validation": 0.3, "parts": laws.toy_parts((0, 13, 7, 10)), **TWO_NETWORKS}
    _, fed, cohort, states = with_different_models("local", **run)
    losses = rhfl.own_losses(stacked_by_network(fed, cohort, states), cohort, fed, Config())
    assert losses[0] == 0
    for client in (1, 2, 3):
        _, logits, y = fed.predict(*states[client], fed.training[client], fed.networks[client % 2])
        torch.testing.assert_close(losses[client], symmetric_cross_entropy(logits, y, Config()))


def test_the_previous_loss_is_that_of_a_clients_last_round(monkeypatch):
    seen = []
    original = rhfl.confidence_weights
    monkeypatch.setattr(rhfl, "confidence_weights", lambda *given: seen.append(given) or original(*given))
    setup, fed = laws.federation("rhfl", cohort_size=2)
    state = laws.simulate(setup, fed, 3, [[0, 1], [2, 0], [1, 3]])
    assert [given[2].tolist() for given in seen] == [[False, False], [False, True], [True, False]]
    assert seen[1][0][1] == seen[0][1][0]  # client 0
    assert seen[2][0][0] == seen[0][1][1]  # client 1
    assert state.clients[0].loss == seen[1][1][1]
    assert seen[1][1][1] < seen[0][1][0]  # it has learned
