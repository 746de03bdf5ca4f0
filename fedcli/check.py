"""The laws that every method must pass, and the engine with them, on the toy federation.

Each law is a function that yields what it has measured, each figure with its bound.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedcli import registry
from fedcli.core.client_states import types_by_name
from fedcli.core.engine import Engine
from fedcli.core.federation import Federation
from fedcli.core.tree_files import load_tree, save_tree
from fedcli.core.trees import Tree, tree_map
from fedcli.declarations import START, Method, fields_of, flag_of
from fedcli.errors import NonFiniteLoss, UserError, first_line, unknown
from fedcli.runs.machine import deterministic
from fedcli.runs.method_calls import StateCopy, refuse_other_kind
from fedcli.runs.rounds import one_round
from fedcli.toy import BATCHNORM, distance, federation, models_after, simulate, tested_models, toy_dataset, toy_parts

# Differences of two states over the norm of one, in float64.
MAX_ROUNDING = 1e-8  # of states that differ by rounding alone, at most
MIN_DIFFERENCE = 1e-6  # of different ones, at least
# What training may make of rounding: Adam divides by what is small, and CUDA sums in other orders.
MAX_ROUNDING_OF = {"sgd": 1e-8, "adam": 1e-7, "adamw": 1e-7, "cuda": 1e-5}
COHORTS = ([0, 1], [2, 3], [1, 2], [0, 3])  # clients 0 and 3 sit rounds out between two that they take part in


class Finding(NamedTuple):
    """What a law has measured: in words, as a number, and the bound that the number must keep."""

    label: str
    figure: float
    at_most: float | None = None
    more_than: float | None = None  # in place of `at_most`

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; NaN keeps none."""
        if self.more_than is not None:
            return self.figure > self.more_than
        return self.at_most is not None and self.figure <= self.at_most

    @property
    def tolerance(self) -> str:
        """What the figure must be, as text."""
        return f"<= {self.at_most:g}" if self.more_than is None else f"> {self.more_than:g}"

    def __str__(self) -> str:
        """Return the figure and the bound, as a broken law is reported."""
        return f"{self.label}: {self.figure:.2e}, must be {self.tolerance}"


class Failure(NamedTuple):
    """An error with which a method has ended a law's measurement, which so does not hold."""

    label: str
    error: Exception

    @property
    def holds(self) -> bool:
        """Never, as a law that ends with an error is broken."""
        return False

    def __str__(self) -> str:
        """Return what the method has raised."""
        return f"{type(self.error).__name__}: {first_line(self.error)}"


# The laws


class SimplerMethod(NamedTuple):
    """The method that another one is under some options."""

    name: str
    overrides: dict[str, Any]  # options of the other method, which switch its terms off


def simpler_method(method: Method) -> SimplerMethod:
    """Return what a method, which has a `reduces_to`, is under which options.

    Raises:
        UserError: If one has a global model and the other personal ones, which cannot be compared.
    """
    assert method.reduces_to is not None  # the `need` of both laws says so
    simpler = SimplerMethod(*method.reduces_to)
    tested_of_simpler = registry.find_method(simpler.name).tested
    if method.tested != tested_of_simpler:
        raise UserError(
            f"the tested models of '{method.name}' are {method.tested} and those of '{simpler.name}' "
            f"{tested_of_simpler}, which cannot be compared; let reduces_to name a method with models of the same "
            "kind, or leave it out."
        )
    return simpler


def law_1_off_is_the_simpler_method(method: Method, rounds: int = 3, **run: Any) -> Iterator[Finding]:
    """Hold a method to its `reduces_to`: with these options its model is the simpler method's."""
    simpler = simpler_method(method)
    flags = " ".join(f"{flag_of(name)} {value}" for name, value in simpler.overrides.items())
    models = models_after(method, simpler.overrides, rounds, **run)
    simpler_models = models_after(simpler.name, None, rounds, **run)
    bound = MAX_ROUNDING_OF[run.get("optimizer", "sgd")]
    yield Finding(f"{flags} against {simpler.name}", distance(models, simpler_models), at_most=bound)


def law_2_on_is_not(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to be another than the simpler one, after 22 rounds, when its options have their defaults."""
    simpler = simpler_method(method)
    run = {"local_epochs": 1, "parts": toy_parts((13, 7, 10, 2)), **run}  # the last client lacks a class
    for rounds in (2, 22):  # most show it early
        models = models_after(method, None, rounds, **run)
        simpler_models = models_after(method, simpler.overrides, rounds, **run)
        difference = distance(models, simpler_models)
        if difference > MIN_DIFFERENCE:
            break
    label = f"difference from {simpler.name} under the defaults, 0 where your terms have no effect on the tested model"
    yield Finding(label, difference, more_than=MIN_DIFFERENCE)


def law_3_state_survives(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to store what its clients keep, to leave alone who sits out, and to read what was stored."""
    setup, fed = federation(method, rounds=len(COHORTS), cohort_size=2, **run)
    state = setup.method.init(fed, setup.method_config)
    taken_part: set[int] = set()
    num_wrong = 0  # clients that took part without a state, or have one without
    changes_of_idle = [0.0]
    changes_of_active: list[float] = []
    for number, cohort in enumerate(COHORTS):
        state_before = state
        stored_before = tree_map(torch.clone, dict(state.clients))
        state = simulate(setup, fed, number + 1, COHORTS, state=state_before, first=number)
        taken_part |= set(cohort)
        num_wrong += len(taken_part ^ set(state.clients))
        for client in set(stored_before) & set(state.clients):
            change = distance(state.clients[client], stored_before[client])
            changes = changes_of_active if client in cohort else changes_of_idle
            changes.append(change)
    yield Finding("clients that took part whose state is not kept, or kept of others", num_wrong, at_most=0)
    yield Finding("change of the state of a client that sat out", max(changes_of_idle), at_most=0)
    change = min(changes_of_active, default=0.0)
    yield Finding("change of the state of a client that took part", change, more_than=0)
    if 0 not in stored_before:
        return
    # In the last round the first client, which takes part in it, finds another state.
    changed = tree_map(lambda leaf: ~leaf if leaf.dtype == torch.bool else leaf + 1, stored_before[0])
    other_state = state_before._replace(clients={**stored_before, 0: changed})
    other_end = simulate(setup, fed, len(COHORTS), COHORTS, state=other_state, first=len(COHORTS) - 1)
    effect = distance(tested_models(setup, state), tested_models(setup, other_end))
    yield Finding("effect of what a client stored on its next round", effect, more_than=1e-9)


class TrainingResult(NamedTuple):
    """How clients have trained, and what that gave."""

    mode: str  # how its clients were trained, in words
    models: Tree  # the tested ones
    state: Any


def law_4_chunking_is_invisible(
    method: Method, rounds: int = 2, chunks: Sequence[int | str] = (1, 2, 4),
    reference_type: type[Federation] | None = None, **run: Any,
) -> Iterator[Finding]:  # fmt: skip
    """Hold the engine, under a method, to train clients together as it trains them one after the other.

    Each of `chunks`, values of `--clients-per-chunk`, is compared without graphs, and with them where the device has
    any, to a federation of the class `reference_type` or to clients one by one. A `start_round` is 0, so that all terms
    act.
    """
    overrides = {START: 0} if hasattr(method.config, START) else {}
    bound = MAX_ROUNDING_OF[run.get("optimizer", "sgd")]
    if run.get("device", "cpu").startswith("cuda"):
        run = {"local_epochs": 4, **run}  # enough steps for a graph of each
        bound = MAX_ROUNDING_OF["cuda"]

    def result_of(
        chunk: int | str, with_graphs: bool = False, federation_type: type[Federation] | None = None
    ) -> TrainingResult:
        options = {**run, "clients_per_chunk": str(chunk)}
        setup, fed = federation(method, overrides, federation_type=federation_type, **options)
        if not with_graphs:
            fed.engine.disable_graphs()
        state = simulate(setup, fed, rounds)
        return TrainingResult(_mode_after(fed.engine), tested_models(setup, state), state)

    _, fed = federation(method, overrides, **run)
    has_graphs = fed.engine.graphs is not None
    expected = result_of(1, federation_type=reference_type)
    name = reference_type.__name__ if reference_type else expected.mode
    graph_choices = (False, True) if has_graphs else (False,)
    for with_graphs in graph_choices:
        for chunk in chunks:
            result = result_of(chunk, with_graphs)
            model_distance = distance(result.models, expected.models)
            state_distance = distance(result.state, expected.state)
            yield Finding(f"{result.mode} against {name}", max(model_distance, state_distance), at_most=bound)


def _mode_after(engine: Engine) -> str:
    """Return how clients have trained together, in words, and the changes of plan on the way."""
    mode = engine.mode
    if engine.graphs is not None and engine.graphs.num_captured == 0:
        mode = f"{engine.mode_without_graphs}, but no step captured"
    return ": ".join([mode, *engine.notes])


def law_5_order_is_invisible(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to give the same whatever the order of a round's clients, and to leave its state as it was given.

    A round that changes the state in place would begin with another one in the other order.
    """
    setup, fed = federation(method, clients_per_chunk="2", **run)
    first = simulate(setup, fed, 1)
    before = StateCopy(first)
    order = np.array([2, 0, 1, 3])  # which no reversal and no rotation leaves as it is
    state, terms = setup.method.run_round(first, fed.cohort_of(1, np.arange(4)), fed, setup.method_config)
    changed = before.changes(first)
    permuted, permuted_terms = setup.method.run_round(first, fed.cohort_of(1, order), fed, setup.method_config)
    expected = tree_map(lambda values: values[order], terms)
    bound = MAX_ROUNDING_OF[run.get("optimizer", "sgd")]
    yield Finding("parts of the state that a round has changed in place", len(changed), at_most=0)
    yield Finding("state after a permuted cohort", distance(permuted, state), at_most=bound)
    yield Finding("terms of a permuted cohort's clients", distance(permuted_terms, expected), at_most=bound)


def law_6_edge_data(method: Method, chunk: int, **run: Any) -> Iterator[Finding]:
    """Hold a method to finite numbers on data at the edge, `chunk` clients together."""
    cases: dict[str, dict[str, Any]] = {
        "a client with one example": {"parts": toy_parts((1, 7, 10, 4))},
        "a class nobody has": {"data": toy_dataset(absent=(1,))},
        "a cohort of one": {"cohort_size": 1},
        "a client without examples": {"parts": toy_parts((0, 7, 10, 4))},
    }
    if chunk > 1:  # once is enough: what fails on a batch of one fails on it alone and together
        cases["batches of one"] = {"parts": toy_parts((2, 1, 1, 2)), "batch_size": 1, "local_epochs": 1}
    for name, case in cases.items():
        setup, fed = federation(method, clients_per_chunk=str(chunk), **{**run, **case})
        state = setup.method.init(fed, setup.method_config)
        wrong = 0
        try:
            for number in range(2):
                state, _ = one_round(setup, fed, state, fed.cohort(number))
        except NonFiniteLoss:  # of a loss or of the state after the round
            wrong = 1
        yield Finding(f"rounds with numbers that are not finite, {name}", wrong, at_most=0)


def law_7_resume_is_invisible(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to go on from a checkpoint as if nothing had happened: all it knows is in its state."""
    setup, fed = federation(method, **run)
    expected = simulate(setup, fed, 3)
    # On CUDA an operation may have no deterministic form.
    bound = 0.0 if fed.device.type == "cpu" else MAX_ROUNDING_OF["cuda"]
    types = types_by_name(method.state_types)
    for rounds in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "state"
            save_tree(file, simulate(*federation(method, **run), rounds), {})
            setup, fed = federation(method, **run)
            state = load_tree(file, types, fed.device).tree
        refuse_other_kind(method, state, setup.method.init(fed, setup.method_config), fed)
        state = simulate(setup, fed, 3, state=state, first=rounds)
        yield Finding(f"resumed after round {rounds} of 3", distance(state, expected), at_most=bound)


def law_9_costs_are_what_is_sent(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to send as many floats, buffers apart, as it declares."""
    run = {"parts": toy_parts((13, 7, 2, 0)), "rounds": 4, **run}  # one client lacks a class, one has no example
    setup, fed = federation(method, **run)
    state = setup.method.init(fed, setup.method_config)
    largest_error = np.zeros(2)  # of the floats down and up
    for number, clients in enumerate(([0, 1, 2], [0, 1, 2, 3], [2, 3], [1])):
        cohort = fed.cohort_of(number, clients)
        assert method.costs is not None
        declared = method.costs(state, cohort, fed, setup.method_config)
        fed.start_round()
        state, _ = setup.method.run_round(state, cohort, fed, setup.method_config)
        counted = [sent["params"] + sent["other"] for sent in (fed.traffic.down, fed.traffic.up)]
        largest_error = np.maximum(largest_error, np.abs(np.subtract(counted, declared)))
    down, up = largest_error
    yield Finding("floats that clients are sent, counted less declared", down, at_most=0)
    yield Finding("floats that clients send, counted less declared", up, at_most=0)


# Holding methods to the laws


def with_defaults(method: Method, name: str, defaults: Mapping[str, Any]) -> Method:
    """Return a method of this name whose options have other defaults."""
    options = fields_of(method.config)
    changed = []
    for option, value in defaults.items():
        declared = options[option]
        changed.append((option, declared.type, field(default=value, metadata=declared.metadata)))
    config = make_dataclass("Config", changed, bases=(method.config,), frozen=True)
    return replace(method, name=name, config=config, variants={})


def variants_of(method: Method) -> list[Method]:
    """Return the variants that a method declares, each as a method.

    Raises:
        UserError: If one has an option that the method has not.
    """
    options = fields_of(method.config)
    variants = []
    for name, defaults in method.variants.items():
        for option in defaults:
            if option not in options:
                noun = f"option in the variant '{name}' of '{method.name}'"
                raise unknown(noun, option, options, f"the method has {', '.join(options) or 'no options'}.")
        variants.append(with_defaults(method, f"{method.name} ({name})", defaults))
    return variants


class Case(NamedTuple):
    """Options under which a law is held."""

    label: str  # before its findings; empty for none
    options: dict[str, Any]  # of the law's function

    def name_finding(self, text: str) -> str:
        """Return what a finding under these options is called."""
        return f"{self.label}, {text}" if self.label else text


PLAIN = Case("", {})


def keeps_state(method: Method) -> bool:
    """Whether its clients keep something between rounds, so that law 3 concerns it."""
    return any(kind.__name__ == "ClientState" for kind in method.state_types)


class Need(NamedTuple):
    """What a method must declare for a law to have a meaning."""

    name: str  # as it stands in a method's file
    is_met: Callable[[Method], bool]


SIMPLER_METHOD = Need("reduces_to", lambda method: method.reduces_to is not None)
CLIENT_STATE = Need("ClientState", keeps_state)
COSTS = Need("costs", lambda method: method.costs is not None)


class Law(NamedTuple):
    """A law as it is held against a method."""

    measure: Callable[..., Iterator[Finding]]
    cases: tuple[Case, ...] = (PLAIN,)
    need: Need | None = None  # None where it has a meaning for every method

    def concerns(self, method: Method) -> bool:
        """Whether it has a meaning for a method."""
        return self.need is None or self.need.is_met(method)


LAWS = {
    1: Law(
        law_1_off_is_the_simpler_method,
        (PLAIN, Case("BatchNorm", {"backbone": BATCHNORM})),  # whose buffers must come out, too
        need=SIMPLER_METHOD,
    ),
    2: Law(law_2_on_is_not, need=SIMPLER_METHOD),
    3: Law(
        law_3_state_survives,
        (Case("", {"backbone": BATCHNORM}),),  # with BatchNorm, which may be all that a client keeps
        need=CLIENT_STATE,
    ),
    4: Law(
        law_4_chunking_is_invisible,
        (
            Case("", {"chunks": (2, 4, "branches:4")}),
            Case("Adam", {"chunks": (2, 4), "optimizer": "adam", "lr": 0.003}),
            Case("BatchNorm", {"chunks": (2, "branches:4"), "backbone": BATCHNORM}),
        ),
    ),
    5: Law(law_5_order_is_invisible),
    6: Law(law_6_edge_data, (Case("", {"chunk": 1}), Case("together", {"chunk": 4}))),
    7: Law(law_7_resume_is_invisible),
    9: Law(
        law_9_costs_are_what_is_sent,
        (PLAIN, Case("BatchNorm", {"backbone": BATCHNORM})),  # whose buffers are counted apart
        need=COSTS,
    ),
}


def allows(method: Method, optimizer: str) -> bool:
    """Whether a method runs with this value of `--optimizer`."""
    return not method.optimizers or optimizer in method.optimizers


def training_options(method: Method) -> dict[str, Any]:
    """The options with which the laws train a method that allows no SGD: its first optimizer, and a rate for Adam's."""
    if allows(method, "sgd"):
        return {}
    return {"optimizer": method.optimizers[0], "lr": 0.003}


def one_of_each_kind() -> list[Method]:
    """Return the last registered method of each kind: by models of the clients' own, public images and kept states."""
    by_kind = {}  # a later method takes the place of one of its kind
    for method in registry.methods().values():
        kind = (bool(method.personal), method.uses_public_data, keeps_state(method))
        by_kind[kind] = method
    return list(by_kind.values())


def check(method: Method, number: int, device: str) -> list[Finding | Failure]:
    """Hold a method to the law of that number on a device; an error ends only its measurement.

    Returns nothing where the method does not declare what the law needs.
    """
    law = LAWS[number]
    if not law.concerns(method):
        return []
    findings: list[Finding | Failure] = []
    for case in law.cases:
        options = {**training_options(method), **case.options}
        if not allows(method, options.get("optimizer", "sgd")):
            continue
        try:
            with deterministic(torch.device(device).type == "cuda"):  # as in a run
                for finding in law.measure(method, device=device, **options):
                    findings.append(finding._replace(label=case.name_finding(finding.label)))
        except Exception as error:
            label = case.name_finding(f"raised {type(error).__name__}")
            findings.append(Failure(label, error))
    return findings
