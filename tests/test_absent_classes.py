"""What a method's class vectors become where a cohort has no example of a class."""

import numpy as np
import pytest
import torch

from tests import laws

PARTS = [
    np.array([0, 3, 6]),
    np.array([1, 4, 7]),
    np.array([9, 10]),
    np.array([2, 5, 8, 11]),
]  # of labels 0, 1, 2, 0, …
COHORTS = ([0, 1], [2, 3], [0, 1])  # only the second has class 2


def states(method, vectors, has_vector):
    """The class vectors after each of three rounds, and which classes have one."""
    run = {"data": laws.toy_dataset(num_train=12), "parts": PARTS, "cohort_size": 2}
    setup, fed = laws.federation(method, **run)
    after = [laws.simulate(setup, fed, rounds, COHORTS) for rounds in (1, 2, 3)]
    return [(getattr(state, vectors), getattr(state, has_vector).tolist()) for state in after]


@pytest.mark.parametrize(
    ("method", "vectors", "has_vector"),
    [
        ("fedfm", "anchors", "has_anchor"), ("fedproc", "prototypes", "has_prototype"),
        ("fedproto-general", "prototypes", "has_prototype"), ("fedcme", "global_features", "has_class"),
    ],
)  # fmt: skip
def test_a_class_absent_from_a_cohort_keeps_its_vector(method, vectors, has_vector):
    (_, first), (before, second), (after, third) = states(method, vectors, has_vector)
    assert (first, second, third) == ([True, True, False], [True] * 3, [True] * 3)
    assert torch.equal(after[2], before[2])
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize(
    ("method", "vectors", "has_vector"),
    [("fedproto", "prototypes", "has_prototype"), ("feddistill", "teacher", "has_teacher")],
)
def test_a_class_that_the_last_cohort_lacks_has_no_vector(method, vectors, has_vector):
    (_, first), (_, second), (_, third) = states(method, vectors, has_vector)
    assert (first, second, third) == ([True, True, False], [True] * 3, [True, True, False])
