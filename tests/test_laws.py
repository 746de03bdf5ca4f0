"""The laws over the registry and a method that keeps client state; law 7 over the registry is in test_runs.py."""

import pytest

from fedcli.registry import methods
from tests import laws
from tests.toys import STATEFUL

METHODS = [*methods().values(), STATEFUL]
REDUCING = [method for method in METHODS if method.reduces_to is not None]
KEEPING = [method for method in METHODS if any(kind.__name__ == "ClientState" for kind in method.state_types)]


def named(method):
    return method.name


@pytest.mark.parametrize("method", REDUCING, ids=named)
def test_law_1_off_is_the_simpler_method(method):
    laws.law_1_off_is_the_simpler_method(method)


@pytest.mark.parametrize("method", REDUCING, ids=named)
def test_law_2_on_is_not(method):
    laws.law_2_on_is_not(method)


@pytest.mark.parametrize("method", KEEPING, ids=named)
def test_law_3_state_survives(method):
    laws.law_3_state_survives(method)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS, ids=named)
def test_law_4_chunking_is_invisible(method, optimizer):
    active = {"start_round": 0} if "start_round" in method.config.__dataclass_fields__ else {}
    rate, more = {"sgd": (0.05, ("patches:4", "branches:4")), "adam": (0.003, ())}[optimizer]
    chunks = (1, 2, 4, *more)
    laws.law_4_chunking_is_invisible(method, overrides=active, chunks=chunks, optimizer=optimizer, lr=rate)


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_law_5_order_is_invisible(method):
    laws.law_5_order_is_invisible(method)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("method", METHODS, ids=named)
def test_law_6_edge_data(method, chunk):
    laws.law_6_edge_data(method, chunk)


def test_law_7_resume_is_invisible():
    found = laws.law_7_resume_is_invisible(STATEFUL)
    assert [one.figure for one in found] == [0, 0]
