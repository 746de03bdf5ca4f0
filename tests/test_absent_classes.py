"""What a method's class vectors become where a cohort has no example of a class."""

import numpy as np
import pytest
import torch

from tests import laws

PARTS = [np.array(part) for part in ([0, 3, 6], [1, 4, 7], [9, 10], [2, 5, 8, 11])]  # of labels 0, 1, 2, 0, …
COHORTS = ([0, 1], [2, 3], [0, 1])  # only the second has class 2


@pytest.mark.parametrize(
    ("method", "vectors", "has_vector", "keeps"),
    [
        ("fedfm", "anchors", "has_anchor", True),
        ("fedproc", "prototypes", "has_prototype", True),
        ("fedproto-general", "prototypes", "has_prototype", True),
        ("fedcme", "global_features", "has_class", True),
        ("fedproto", "prototypes", "has_prototype", False),
        ("feddistill", "teacher", "has_teacher", False),
    ],
)
def test_a_class_absent_from_a_cohort_keeps_its_vector_or_has_none(method, vectors, has_vector, keeps):
    setup, fed = laws.federation(method, data=laws.toy_dataset(num_train=12), parts=PARTS, cohort_size=2)
    states = [laws.simulate(setup, fed, rounds, COHORTS) for rounds in (1, 2, 3)]
    has = [getattr(state, has_vector).tolist() for state in states]
    assert has == [[True, True, False], [True] * 3, [True, True, keeps]]
    _, before, after = (getattr(state, vectors) for state in states)
    assert not keeps or torch.equal(after[2], before[2])
    assert not torch.equal(after[0], before[0])
