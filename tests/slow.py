"""Which tests are slow: `make test` leaves them to `make test-all`, which continuous integration runs.

Slow are tests that run whole scripts, texts and notebooks, several programs or all committed results; those of steps as
CUDA graphs, on the fake device; single tests of three seconds and more; and what is tested of every method, but for
FedAvg, FedFM and one method of each kind.
"""

import pytest

from fedcli import check
from tests.toy_methods import STATEFUL

KINDS = [method.name for method in check.one_of_each_kind()]
QUICK_METHODS = {"fedavg", "fedfm", STATEFUL.name, *KINDS}


def marks_of_method(name):
    """Returns the marks of a test of a method, or as `fedfm (l2)` of a variant: none if it is quick, or `slow`."""
    return [] if name in QUICK_METHODS else [pytest.mark.slow]


def parameters_of(values):
    """Returns the parameters of a test of each of several methods, which are given as such or by name."""
    parameters = []
    for value in values:
        name = getattr(value, "name", value)
        parameters.append(pytest.param(value, id=name, marks=marks_of_method(name)))
    return parameters
