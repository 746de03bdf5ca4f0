"""FedMatch's consistency: votes, whom a client listens to, and the exchange against a plain loop."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines import fedmatch
from fedcli.papers.baselines.fedmatch import Config, agreed_labels, consistency, find_helpers
from tests import laws
from tests.toys import TWO_NETWORKS


def logs(*rows):
    """Logits of these probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


def test_votes():
    logits = logs([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4])
    helpers = torch.tensor([[[0.0, 0, 1], [1, 0, 0], [0, 1, 0]], [[0.0, 1, 0], [1, 0, 0], [1, 0, 0]]])
    assert agreed_labels(logits, helpers).tolist() == [2, 0, 0]  # the last one is tied
    assert consistency(logits, helpers, Config(confidence=0.9)) == (0, 0)  # nothing that is not sure counts


def test_ties_between_helpers_go_to_the_lower_id_in_any_order():
    predictions = torch.zeros(4, 2, 3)
    assert find_helpers(predictions[:2], np.arange(2), 2).tolist() == [[1], [0]]  # there are no more
    assert find_helpers(predictions, np.arange(4), 2).tolist() == [[1, 2], [0, 2], [0, 1], [0, 1]]
    ids = np.array([7, 3, 9, 5])
    named = [[ids[place] for place in row] for row in find_helpers(predictions, ids, 2).tolist()]
    assert named == [[3, 5], [5, 7], [3, 5], [3, 7]]


def test_the_public_phase_against_a_plain_loop():
    options = {"confidence": 0.4, "consistency_weight": 0.7, "agreement_weight": 0.3, "helpers": 2}
    setup, fed = laws.federation("fedmatch", options, momentum=0.9, weight_decay=0.1, **TWO_NETWORKS)
    states = laws.simulate(setup, fed, 1).clients

    def objective(k, features, logits, everyone):
        p = [said.softmax(1) for _, said in everyone]
        others = sorted((c for c in range(4) if c != k), key=lambda c: ((p[c] - p[k]) ** 2).sum().item())[:2]
        mine = F.log_softmax(logits, 1)
        divergence = agreement = 0 * mine.sum()
        sure = [i for i in range(len(mine)) if p[k][i].max() >= 0.4]
        for i in sure:
            terms = [F.kl_div(mine[i], p[c][i], reduction="sum") for c in others]
            divergence = divergence + sum(terms) / 2 / len(sure)
            votes = [int(p[c][i].argmax()) for c in (k, *others)]
            label = max(range(3), key=lambda y: votes.count(y))
            agreement = agreement - mine[i][label] / len(sure)
        return 0.7 * divergence + 0.3 * agreement, divergence, agreement

    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)  # no weight decay
    terms, means = laws.assert_public_phase_agrees(
        setup, fed, fed.cohort(1), states, fedmatch.agree, objective, optimizer, fresh=False
    )
    for name, mean in zip(("consistency", "agreement"), means, strict=True):
        assert terms[name].tolist() == pytest.approx(mean)
