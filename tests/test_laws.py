"""The laws over the registry, the declared variants and a method that keeps client state.

Law 7 over the registry is in test_runs.py, law 8 in test_workers.py.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedcli import check, toy
from fedcli.core.federation import Federation
from fedcli.core.trees import leaves
from fedcli.declarations import spec_of
from fedcli.registry import find_method, methods
from fedcli.runs.rounds import one_round
from tests import laws
from tests.networks import MIXED_NETWORKS
from tests.run_options import FEW_STEPS
from tests.slow import marks_of_method, parameters_of
from tests.toy_methods import QUICK_OPTIONS, STATEFUL, make_quick
from tests.user_errors import raises_user_error

ROOT = Path(__file__).parent.parent


def averages_parameters(method):
    """Returns whether a method averages the parameters of its clients, for which they need one network."""
    return getattr(method.config(), "average_parameters", False)


METHODS = [*map(make_quick, methods().values()), STATEFUL]
VARIANTS = list(chain.from_iterable(map(check.variants_of, METHODS)))
ALL_METHODS = [*METHODS, *VARIANTS]
REDUCING_METHODS = [method for method in ALL_METHODS if method.reduces_to is not None]
STATEFUL_METHODS = [method for method in ALL_METHODS if check.keeps_state(method)]
MIXED_METHODS = [method for method in ALL_METHODS if method.mixed_networks and not averages_parameters(method)]
ADAM_METHODS = [method for method in METHODS if check.allows(method, "adam")]
COSTED_METHODS = [method for method in ALL_METHODS if method.costs]
COSTED_WITH_PUBLIC_DATA = [method for method in COSTED_METHODS if method.uses_public_data]
COSTED_WITHOUT_PUBLIC_DATA = [method for method in COSTED_METHODS if not method.uses_public_data]
PARTS_WITHOUT_A_CLASS = toy.toy_parts((13, 7, 10, 2))  # the last client lacks a class
# In batches of 4, the last batches have 1, 3, 2 and 2 examples; the last client lacks a class.
PARTS_OF_ODD_SIZES = toy.toy_parts((5, 3, 6, 2))


class Case(NamedTuple):
    """A law, the methods that it is held against, and the options of the runs."""

    law: Callable
    methods: list
    options: dict[str, Any]


ADAM = {"optimizer": "adam", "lr": 0.003, **FEW_STEPS}
ADAMW = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.1, **FEW_STEPS}
CASES = [
    Case(laws.law_1_off_is_the_simpler_method, REDUCING_METHODS, {"backbone": toy.BATCHNORM, "batch_size": 8}),
    Case(laws.law_2_on_is_not, REDUCING_METHODS, {}),
    Case(laws.law_3_state_survives, STATEFUL_METHODS, {"backbone": toy.BATCHNORM, **FEW_STEPS}),
    Case(laws.law_4_chunking_is_invisible, METHODS, {"chunks": (1, 2, "branches:4"), "parts": PARTS_OF_ODD_SIZES}),
    Case(laws.law_4_chunking_is_invisible, VARIANTS, {"chunks": (2,), "parts": PARTS_OF_ODD_SIZES, "local_epochs": 1}),
    Case(laws.law_4_chunking_is_invisible, ADAM_METHODS, {"chunks": (4,), **ADAM}),
    Case(laws.law_4_chunking_is_invisible, [make_quick(find_method("fedavg"))], {"chunks": (2, "branches:4"), **ADAMW}),
    Case(
        laws.law_4_chunking_is_invisible,
        MIXED_METHODS,
        {"chunks": (2,), "backbone": MIXED_NETWORKS, **FEW_STEPS},
    ),
    Case(laws.law_5_order_is_invisible, ALL_METHODS, {"parts": PARTS_WITHOUT_A_CLASS, **FEW_STEPS}),
    Case(laws.law_5_order_is_invisible, MIXED_METHODS, {"backbone": MIXED_NETWORKS, **FEW_STEPS}),
    Case(laws.law_6_edge_data, METHODS, {"chunk": 1, **FEW_STEPS}),
    Case(laws.law_6_edge_data, ALL_METHODS, {"chunk": 4, **FEW_STEPS}),
    Case(laws.law_7_resume_is_invisible, [STATEFUL, *VARIANTS], FEW_STEPS),
    Case(laws.law_9_costs_are_what_is_sent, COSTED_WITHOUT_PUBLIC_DATA, FEW_STEPS),
    Case(laws.law_9_costs_are_what_is_sent, COSTED_WITHOUT_PUBLIC_DATA, {"backbone": toy.BATCHNORM, **FEW_STEPS}),
    # The last batch of public images has one.
    Case(laws.law_9_costs_are_what_is_sent, COSTED_WITH_PUBLIC_DATA, {"public_batch_size": 11, **FEW_STEPS}),
]


def cases_of_methods():
    """Returns each law with each of its methods, as a test."""
    tests = []
    for law, methods_of_law, options in CASES:
        for method in methods_of_law:
            name = f"{law.__name__}-{method.name}"
            tests.append(pytest.param(law, method, options, id=name, marks=marks_of_method(method.name)))
    return tests


MODELS_AFTER = check.models_after


@cache
def models_by_name(name, rounds, options):
    """Returns the models of a registered method with its default options, which laws compare to those of others."""
    return MODELS_AFTER(name, None, rounds, **dict(options))


def models_after_cached(method, overrides, rounds, **run_options):
    """Returns the same as `check.models_after`, but trains a method that many others reduce to once for all of them."""
    if isinstance(method, str) and overrides is None:
        return models_by_name(method, rounds, tuple(run_options.items()))
    return MODELS_AFTER(method, overrides, rounds, **run_options)


@pytest.mark.parametrize(("law", "method", "options"), cases_of_methods())
def test_a_law_holds(law, method, options, monkeypatch):
    monkeypatch.setattr(check, "models_after", models_after_cached)
    law(method, **options)


@pytest.mark.parametrize("sizes", [(9, 0, 5, 0), (0, 9, 0, 5)])
@pytest.mark.parametrize("method", parameters_of(MIXED_METHODS))
def test_a_round_is_finite_where_no_client_of_a_network_takes_a_step(method, sizes):
    setup, fed = toy.federation(method, backbone=MIXED_NETWORKS, parts=toy.toy_parts(sizes), **FEW_STEPS)
    state, entry = one_round(setup, fed, toy.simulate(setup, fed, 1), fed.cohort(1))
    assert all(torch.isfinite(leaf).all() for leaf in leaves(state))
    assert entry["terms"]


@pytest.mark.parametrize(
    ("name", "options"), [("fedmatch", {}), ("rhfl", {"cross_entropy_weight": 1.0, "reverse_weight": 0.0})]
)
def test_a_client_alone_in_its_cohort_has_nobody_to_learn_from(name, options):
    alone = laws.state_after_rounds(2, name, options, cohort_size=1)
    local = laws.state_after_rounds(2, "local", cohort_size=1)
    for client, state in alone.clients.items():
        laws.assert_agree(state.params, local.clients[client].params, f"client {client}")


# The labels of a toy data set are 0, 1, 2, 0, …
PARTS_OF_TWO_CLASSES = [np.array(part) for part in ([0, 3, 6], [1, 4, 7], [9, 10], [2, 5, 8, 11])]
COHORTS_OF_ROUNDS = ([0, 1], [2, 3], [0, 1])  # only the second has class 2


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
    setup, fed = toy.federation(method, data=toy.toy_dataset(num_train=12), parts=PARTS_OF_TWO_CLASSES, cohort_size=2)
    first, second, third = [toy.simulate(setup, fed, rounds, COHORTS_OF_ROUNDS) for rounds in (1, 2, 3)]

    assert getattr(first, has_vector).tolist() == [True, True, False]
    assert getattr(second, has_vector).tolist() == [True, True, True]
    assert getattr(third, has_vector).tolist() == [True, True, keeps]

    present_before, _, absent_before = getattr(second, vectors)
    present_after, _, absent_after = getattr(third, vectors)
    assert not torch.equal(present_after, present_before)
    assert not keeps or torch.equal(absent_after, absent_before)


class MomentumWatch(Federation):
    """A federation that sees whether the file of a method reads the momentum of the clients' SGD."""

    momentum_was_read = False

    @property
    def momentum(self):
        caller = inspect.currentframe().f_back.f_code.co_filename
        self.momentum_was_read |= Path(caller).is_relative_to(ROOT / "papers")
        return self.sgd_momentum

    @momentum.setter
    def momentum(self, value):
        self.sgd_momentum = value


@pytest.mark.parametrize("method", parameters_of(METHODS))
def test_only_a_method_that_counts_on_sgd_refuses_other_optimizers(method):
    setup, fed = check.federation(method, federation_type=MomentumWatch, **FEW_STEPS)
    toy.simulate(setup, fed, 1)
    assert fed.momentum_was_read == (not check.allows(method, "adam"))
    if fed.momentum_was_read:
        with raises_user_error(f"'{method.name}' counts on ", " choose --optimizer sgd"):
            toy.federation(method, optimizer="adam")


# Options

OPTIONS_TO_ACT = {  # what an option needs to act in the first rounds
    "fccl": {"similarity_weight": 3.0}, "fccl-plus": {"plain_share": 0.5}, "fedfm-lite": {"model_interval": 1},
    "fedmatch": {"confidence": 0.4}, "fedsa": {"contrastive_weight": 1.0}, **QUICK_OPTIONS,
}  # fmt: skip
BETWEEN_EPOCHS = ("fccl", "fccl-plus", "fedcme", "fedproto")  # some of their options act there
OTHER_VALUES = {  # of options for which twice the default will not do
    "anchor_decay": 0.25, "clip_norm": 0.01, "confidence": 0.6, "cross_entropy_weight": 0.5, "energy_end": 0.6,
    "energy_start": 0.5, "generator_steps": 3, "helpers": 1, "margin_threshold": 1e-3, "model_interval": 2,
    "off_diagonal_target": 0.0, "plain_share": 1.0, "pretrain_epochs": 1, "prototype_momentum": 0.5,
    "ramp_rounds": 4, "server_batch_size": 3, "server_momentum": 0.5, "square_momentum": 0.5,
    "start_round": 2,
}  # fmt: skip


def value_with_effect(field, value):
    """Returns a value for an option that is not this one, and far enough from it to be seen after two rounds."""
    choices = spec_of(field).choices
    if choices:
        return next(choice for choice in choices if choice != value)
    if field.name in OTHER_VALUES:
        return OTHER_VALUES[field.name]
    if isinstance(value, bool):
        return not value
    return 2 * (value or 0)


@cache
def models_of_options(name, options, rounds):
    """Returns the tested models of a method with these options, which are as `non_default_options` gives them."""
    epochs = {"local_epochs": 2} if name in BETWEEN_EPOCHS else {}
    run_options = {**FEW_STEPS, **epochs, "parts": PARTS_WITHOUT_A_CLASS, "backbone": toy.BATCHNORM}
    setup, fed = toy.federation(name, dict(options), **run_options)
    return toy.tested_models(setup, toy.simulate(setup, fed, rounds))


def non_default_options(fields, options):
    """Returns the options whose values are not their defaults, as sorted pairs, so that equal runs are trained once."""
    return tuple(sorted((name, value) for name, value in options.items() if value != fields[name].default))


def options_of_methods():
    """Returns the name of each method with each of its options, as a test."""
    tests = []
    for method in methods().values():
        for field in dataclasses.fields(method.config):
            tests.append(pytest.param(method.name, field.name, marks=marks_of_method(method.name)))
    return tests


@pytest.mark.parametrize(("name", "option"), options_of_methods())
def test_every_option_matters_but_beside_the_choices_it_is_declared_for(name, option):
    fields = find_method(name).config.__dataclass_fields__
    field = fields[option]
    acting = {"start_round": 0} if "start_round" in fields else {}
    acting |= OPTIONS_TO_ACT.get(name, {})
    value = acting.get(option, field.default)
    rounds = 3 if option == "prototype_momentum" else 2  # which acts on the second round's prototypes

    def distance(**choice):
        """How far another value of the option moves the models."""
        before = {**acting, **choice, option: value}
        after = {**before, option: value_with_effect(field, value)}
        model = models_of_options(name, non_default_options(fields, before), rounds)
        other_model = models_of_options(name, non_default_options(fields, after), rounds)
        return toy.distance(model, other_model)

    spec = spec_of(field)
    if not spec.only_with:
        assert distance() > 1e-9
        return

    ((switch, choices_with_effect),) = spec.only_with.items()
    distances = {choice: distance(**{switch: choice}) for choice in spec_of(fields[switch]).choices}
    for choice in distances:
        has_effect = choice in choices_with_effect
        assert spec.is_idle({switch: choice}) == (not has_effect)
        if has_effect:
            assert distances[choice] > 1e-9, choice
        else:
            assert distances[choice] == 0, choice
