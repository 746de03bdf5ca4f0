"""FedRS: shares, scales and the restricted softmax against slow loops."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines.fedrs import class_scales, class_shares, restricted_cross_entropy
from tests import laws
from tests.toys import randn


def test_shares_are_those_of_the_training_part():
    parts = [np.array([0, 3, 1, 6, 4, 5, 8, 11, 14, 2]), np.array([7, 9]), np.array([], int), np.array([10, 12])]
    _, fed = laws.federation("fedrs", parts=parts, validation=0.2)  # labels 0, 1, 2, 0, 1, 2, ...
    cohort = fed.cohort_of(0, [1, 0, 2])
    expected = []
    for client in cohort.client_ids:
        labels = [int(fed.engine.labels[i]) for i in fed.training[client]]
        expected.append([labels.count(c) / max(len(labels), 1) for c in range(3)])
    assert len(fed.training[0]) == 8
    assert class_shares(fed, cohort).tolist() == expected


def test_scales_by_hand():
    shares = torch.tensor([[0.5, 0.0, 0.4, 0.1], [0.0, 0.0, 0.0, 0.0]])
    hard, soft = (class_scales(shares, 0.5, form) for form in ("hard", "soft"))
    assert hard.tolist() == [[1, 0.5, 1, 1], [0.5] * 4]
    assert soft[0].tolist() == pytest.approx([1, 0.5, 0.9, 0.6])
    assert soft[1].tolist() == [0.5] * 4


def test_restricted_softmax_scales_the_logits():
    logits, labels, scales = randn(6, 4), torch.tensor([0, 1, 2, 0, 2, 1]), torch.tensor([1.0, 1.0, 1.0, 0.3])
    expected = F.cross_entropy(scales * logits, labels)
    torch.testing.assert_close(restricted_cross_entropy(logits, labels, scales), expected)
