"""The laws over the registry and a method that keeps client state; law 7 over the registry is in test_runs.py."""

import dataclasses

import pytest

from fedcli.declarations import is_idle
from fedcli.registry import find_method, methods
from tests import laws
from tests.toys import STATEFUL

METHODS = [*methods().values(), STATEFUL]
REDUCING = [method for method in METHODS if method.reduces_to is not None]
KEEPING = [method for method in METHODS if laws.keeps(method)]


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
    rate, more = {"sgd": (0.05, ("branches:4",)), "adam": (0.003, ())}[optimizer]
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


IDLE = {
    f"{method.name} {field.name}": (method.name, field)
    for method in methods().values()
    for field in dataclasses.fields(method.config)
    if field.metadata["only_with"]
}
CHANGED = {
    "teacher": "collaborative", "distillation_factor": "one", "matching": "many-to-one", "calibration_optimizer": "sgd",
    "temperature": 0.7, "calibration_lr": 0.1, "ewc_weight": 2.0, "plain_share": 0.5, "renormalize": True,
    "generator_steps": 3, "generator_lr": 0.9, "prototype_momentum": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE)
def test_an_option_changes_nothing_but_beside_the_choices_it_is_declared_for(name):
    method, field = find_method(IDLE[name][0]), IDLE[name][1]
    (switch, tells), own = next(iter(field.metadata["only_with"].items())), method.config.__dataclass_fields__
    active = {key: value for key, value in {"start_round": 0, "model_interval": 1}.items() if key in own}
    moved = []
    for choice in own[switch].metadata["choices"]:
        models = []
        for value in (field.default, CHANGED[field.name]):
            setup, fed = laws.federation(method, {**active, switch: choice, field.name: value}, local_epochs=2)
            models.append(laws.model_of(setup, laws.simulate(setup, fed, 3)))
        assert is_idle(field.metadata, {switch: choice}) == (choice not in tells)
        if choice not in tells:
            assert laws.distance(*models) == 0
        moved.append(laws.distance(*models) > 0)
    assert any(moved)
