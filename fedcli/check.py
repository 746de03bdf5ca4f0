"""The laws that every method must pass, and the engine with them: on small random images, in float64, in seconds.

Each law is a function that yields what it has measured, each figure with its bound.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedcli import registry
from fedcli.core.federation import Federation, NonFiniteLoss
from fedcli.core.tree_files import load_tree, save_tree
from fedcli.core.trees import Tree, leaves, tree_map
from fedcli.data.datasets import Dataset
from fedcli.declarations import START, Method, flag_of
from fedcli.errors import UserError
from fedcli.runs import prepare
from fedcli.runs.machine import deterministic
from fedcli.runs.options import fields_of
from fedcli.runs.resolve import DEFAULT_DATASET, Setup, resolve
from fedcli.runs.rounds import one_round

RELATIVE, DIFFERENT = 1e-8, 1e-6  # difference of two states over the norm of one, in float64
# What training may make of rounding: Adam divides by what is small, and CUDA sums in other orders.
AMPLIFIED = {"sgd": 1e-8, "adam": 1e-7, "adamw": 1e-7, "cuda": 1e-5}
RAGGED = (13, 7, 10, 4)  # examples of each client; with batches of 4 the last batches have 1, 3, 2 and 4
COHORTS = ([0, 1], [2, 3], [1, 2], [0, 3])  # clients 0 and 3 sit rounds out between two that they take part in


class Finding(NamedTuple):
    """What a law has measured: in words, as a number, and the bound that the number must keep."""

    label: str
    figure: float
    bound: float
    above: bool = False  # whether the figure must be larger than the bound; else it must not be
    error: Exception | None = None  # what the method has raised, then the figure is NaN

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; NaN keeps none."""
        return self.figure > self.bound if self.above else self.figure <= self.bound

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Label, figure, tolerance and verdict as texts."""
        tolerance = f"{'>' if self.above else '<='} {self.bound:g}"
        return self.label, f"{self.figure:.1e}", tolerance, "pass" if self.holds else "FAIL"

    def __str__(self) -> str:
        """Says what is wrong where the bound is not kept."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {str(self.error).strip()}".splitlines()[0]
        return f"{self.label}: {self.figure:.2e}, must be {self.cells[2]}"


# Small runs


def toy_dataset(num_train=60, channels=1, size=8, num_classes=3, seed=0, absent=()) -> Dataset:
    """Draw random images whose brightness tells the class; the classes `absent` have no example."""
    draw = np.random.default_rng(seed)
    classes = [label for label in range(num_classes) if label not in absent]

    def draw_images(count: int) -> tuple[Tensor, Tensor]:
        labels = np.resize(classes, count)
        pixels = draw.integers(0, 150, (count, channels, size, size)) + 50 * labels[:, None, None, None] % 100
        return torch.tensor(pixels, dtype=torch.uint8), torch.tensor(labels)

    x_train, y_train = draw_images(num_train)
    x_test, y_test = draw_images(20)
    return Dataset("toy", x_train, y_train, x_test, y_test, class_names=tuple(map(str, range(num_classes))))


def toy_parts(sizes: Sequence[int] = RAGGED) -> list[np.ndarray]:
    """Make disjoint clients of these sizes."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


TOY = {
    "dataset": DEFAULT_DATASET, "backbone": "cnn-small", "precision": "float64", "device": "cpu",
    "num_clients": len(RAGGED), "cohort_size": None, "partition": "iid", "rounds": 20, "local_epochs": 2,
    "batch_size": 4, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "validation": 0.0,
}  # fmt: skip


def normed(channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Make a network with BatchNorm over 64 values an image, named by this file as a user's own is.

    Over few values, a difference of 1e-15 grows a hundredfold in each round (resnet10-3x3 on these images).
    """
    hidden = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(hidden, nn.Linear(4 * image_size**2, 8), nn.ReLU(), nn.Linear(8, num_classes))


def federation(
    method: Method | str, overrides: dict[str, Any] | None = None, *, data: Dataset | None = None,
    parts: list[np.ndarray] | None = None, kind: type[Federation] | None = None, **run: Any,
) -> tuple[Setup, Federation]:  # fmt: skip
    """Set up a method, or that of a name, on toy data, under a protocol of which every value is overridden.

    `overrides` are options of the method, `run` those of the run in place of `TOY`, `parts` positions of each client's
    examples, and `kind` the class of the federation.
    """
    method = registry.find_method(method) if isinstance(method, str) else method
    protocol = registry.default_protocol(registry.find_method("fedavg"), DEFAULT_DATASET)
    data = data or toy_dataset()
    public = None
    if method.uses_public_data:
        run = {"public_dataset": DEFAULT_DATASET, "public_batch_size": 5, **run}
        public = toy_dataset(12, data.channels, data.image_size, seed=7)  # batches of 5, 5 and 2
    defaults = {name: option.default for name, option in fields_of(method.config).items()}
    setup = resolve(method, {"protocol": protocol.name, **TOY, **defaults, **(overrides or {}), **run})
    parts = toy_parts() if parts is None else parts
    return setup, prepare.make_federation(setup, data, parts, public, kind=kind or Federation)


def simulate(setup: Setup, fed: Federation, rounds: int, cohorts: Any = None, state: Any = None, first: int = 0) -> Any:
    """Return the state after `rounds` rounds, from `state`, which is that after `first`; cohorts are drawn if None."""
    state = setup.method.init(fed, setup.options) if state is None else state
    for number in range(first, rounds):
        cohort = fed.cohort(number) if cohorts is None else fed.cohort_of(number, cohorts[number])
        state, _ = setup.method.run_round(state, cohort, fed, setup.options)
    return state


def distance(tree: Tree, other: Tree) -> float:
    """Return the norm of the difference of two trees over the norm of the second; 0 where they are the same."""

    def vector(tree: Tree) -> Tensor:  # on the host, where what clients keep waits
        return torch.cat([torch.zeros(1).double(), *(leaf.cpu().double().flatten() for leaf in leaves(tree))])

    difference = (vector(tree) - vector(other)).norm()
    return float(difference / vector(other).norm()) if difference else 0.0


def model_of(setup: Setup, state: Any) -> Tree:
    """Return parameters and buffers: of the global model, or by client of all clients' own models."""
    if setup.method.personal is None:
        return setup.method.model(state)
    return dict(sorted(setup.method.personal(state).items()))


def trained(method: Method | str, overrides: dict[str, Any] | None, rounds: int, **run: Any) -> Tree:
    """Return the model after so many rounds."""
    setup, fed = federation(method, overrides, **run)
    return model_of(setup, simulate(setup, fed, rounds))


# The laws


def refuse_other_kind(method: Method, simpler: Method) -> None:
    """Refuses to compare the tested models of two methods that differ in kind.

    Raises:
        UserError: If one has a global model and the other personal ones.
    """
    if method.tested != simpler.tested:
        raise UserError(
            f"the tested models of '{method.name}' are {method.tested} and those of '{simpler.name}' {simpler.tested}, "
            "which cannot be compared; let reduces_to name a method with models of the same kind, or leave it out."
        )


def law_1_off_is_the_simpler_method(method: Method, rounds: int = 3, **run: Any) -> Iterator[Finding]:
    """Hold a method to its `reduces_to`: with these options its model is the simpler method's."""
    assert method.reduces_to is not None  # `Law.needs` says so; so below
    simpler, overrides = method.reduces_to
    refuse_other_kind(method, registry.find_method(simpler))
    flags = " ".join(f"{flag_of(name)} {value}" for name, value in overrides.items())
    models = trained(method, overrides, rounds, **run), trained(simpler, None, rounds, **run)
    yield Finding(f"{flags} against {simpler}", distance(*models), RELATIVE)


def law_2_on_is_not(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to be another than the simpler one, after 22 rounds, when its options have their defaults."""
    assert method.reduces_to is not None
    simpler, overrides = method.reduces_to
    refuse_other_kind(method, registry.find_method(simpler))
    run = {"local_epochs": 1, "parts": toy_parts((13, 7, 10, 2)), **run}  # the last client lacks a class
    for rounds in (2, 22):  # most show it early
        difference = distance(*(trained(method, options, rounds, **run) for options in (None, overrides)))
        if difference > DIFFERENT:
            break
    label = f"difference from {simpler} under the defaults, 0 where your terms have no effect on the tested model"
    yield Finding(label, difference, DIFFERENT, above=True)


def law_3_state_survives(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to store what its clients keep, to leave alone who sits out, and to read what was stored."""
    setup, fed = federation(method, rounds=len(COHORTS), cohort_size=2, **run)
    state = setup.method.init(fed, setup.options)
    taken_part: set[int] = set()
    lost = 0
    idle = [0.0]  # changes of the states of clients that sat out
    moved: list[float] = []  # and of those that took part
    for number, cohort in enumerate(COHORTS):
        before = tree_map(torch.clone, dict(state.clients))
        early = state
        state = simulate(setup, fed, number + 1, COHORTS, early, number)
        taken_part |= set(cohort)
        lost += len(taken_part ^ set(state.clients))
        for client in set(before) & set(state.clients):
            changes = moved if client in cohort else idle
            changes.append(distance(state.clients[client], before[client]))
    yield Finding("clients that took part whose state is not kept, or kept of others", lost, 0)
    yield Finding("change of the state of a client that sat out", max(idle), 0)
    yield Finding("change of the state of a client that took part", min(moved, default=0.0), 0, above=True)
    if 0 in before:  # a state of the first client, which takes part in the last round, is another one
        other = early._replace(clients={**before, 0: tree_map(lambda leaf: leaf + 1, before[0])})
        then = simulate(setup, fed, len(COHORTS), COHORTS, other, len(COHORTS) - 1)
        read = distance(model_of(setup, state), model_of(setup, then))
        yield Finding("effect of what a client stored on its next round", read, 1e-9, above=True)


def law_4_chunking_is_invisible(
    method: Method, rounds: int = 2, chunks: Sequence[int | str] = (1, 2, 4), against: type[Federation] | None = None,
    **run: Any,
) -> Iterator[Finding]:  # fmt: skip
    """Hold the engine, under a method, to train clients together as it trains them one after the other.

    Each of `chunks`, values of `--clients-per-chunk`, is compared without graphs, and with them where the device has
    any, to a federation of the class `against` or to clients one by one. A `start_round` is 0, so that all terms act.
    """
    overrides = {START: 0} if hasattr(method.config, START) else {}
    bound = AMPLIFIED[run.get("optimizer", "sgd")]
    if run.get("device", "cpu").startswith("cuda"):
        run = {"local_epochs": 4, **run}  # enough steps for a graph of each
        bound = AMPLIFIED["cuda"]

    def ending(chunk: int | str, captured: bool = False, **more: Any) -> tuple[str, tuple[Tree, Tree]]:
        setup, fed = federation(method, overrides, clients_per_chunk=str(chunk), **run, **more)
        if not captured:
            fed.engine.graphs = None
        graphs = fed.engine.graphs
        state = simulate(setup, fed, rounds)
        how = ": ".join([fed.engine.mode, *fed.engine.notes])
        if graphs and not graphs.captured:
            how = how.replace(", captured", ", but no step captured")
        return how, (model_of(setup, state), state)

    _, fed = federation(method, overrides, **run)
    forms = (False,) if fed.engine.graphs is None else (False, True)
    name, expected = ending(1, kind=against)
    name = against.__name__ if against else name
    for captured in forms:
        for chunk in chunks:
            how, trees = ending(chunk, captured)
            yield Finding(f"{how} against {name}", max(map(distance, trees, expected)), bound)


def law_5_order_is_invisible(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to give the same whatever the order of a round's clients."""
    setup, fed = federation(method, clients_per_chunk="2", **run)
    first = simulate(setup, fed, 1)
    order = np.array([2, 0, 1, 3])  # which no reversal and no rotation leaves as it is
    state, terms = setup.method.run_round(first, fed.cohort_of(1, np.arange(4)), fed, setup.options)
    permuted, permuted_terms = setup.method.run_round(first, fed.cohort_of(1, order), fed, setup.options)
    expected = tree_map(lambda values: values[order], terms)
    yield Finding("state after a permuted cohort", distance(permuted, state), RELATIVE)
    yield Finding("terms of a permuted cohort's clients", distance(permuted_terms, expected), RELATIVE)


def law_6_edge_data(method: Method, chunk: int, **run: Any) -> Iterator[Finding]:
    """Hold a method to finite numbers on data at the edge, `chunk` clients together."""
    cases: dict[str, dict[str, Any]] = {
        "a client with one example": {"parts": toy_parts((1, 7, 10, 4))},
        "a class nobody has": {"data": toy_dataset(absent=(1,))},
        "a cohort of one": {"cohort_size": 1},
        "a client without examples": {"parts": toy_parts((0, 7, 10, 4))},
    }
    for name, case in cases.items():
        setup, fed = federation(method, clients_per_chunk=str(chunk), **run, **case)
        state = setup.method.init(fed, setup.options)
        wrong = 0
        try:
            for number in range(2):
                state, _ = one_round(setup, fed, state, fed.cohort(number))
        except NonFiniteLoss:  # of a loss or of the state after the round
            wrong = 1
        yield Finding(f"rounds with numbers that are not finite, {name}", wrong, 0)


def law_7_resume_is_invisible(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to go on from a checkpoint as if nothing had happened: all it knows is in its state."""
    setup, fed = federation(method, **run)
    expected = simulate(setup, fed, 3)
    # On CUDA an operation may have no deterministic form.
    bound = 0.0 if fed.device.type == "cpu" else AMPLIFIED["cuda"]
    types = {kind.__name__: kind for kind in method.state_types}
    for rounds in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "state"
            save_tree(file, simulate(*federation(method, **run), rounds), {})
            setup, fed = federation(method, **run)
            state = load_tree(file, types, fed.device).tree
        state = simulate(setup, fed, 3, state=state, first=rounds)
        yield Finding(f"resumed after round {rounds} of 3", distance(state, expected), bound)


def law_9_costs_are_what_is_sent(method: Method, **run: Any) -> Iterator[Finding]:
    """Hold a method to send as many floats, buffers apart, as it declares."""
    run = {"parts": toy_parts((13, 7, 2, 0)), "rounds": 4, **run}  # one client lacks a class, one has no example
    setup, fed = federation(method, **run)
    state = setup.method.init(fed, setup.options)
    wrong = np.zeros(2)
    for number, clients in enumerate(([0, 1, 2], [0, 1, 2, 3], [2, 3], [1])):
        cohort = fed.cohort_of(number, clients)
        assert method.costs is not None
        declared = method.costs(state, cohort, fed, setup.options)
        fed.start_round()
        state, _ = setup.method.run_round(state, cohort, fed, setup.options)
        counted = [sent["params"] + sent["other"] for sent in (fed.sent_down, fed.sent_up)]
        wrong = np.maximum(wrong, np.abs(np.subtract(counted, declared)))
    yield Finding("floats that clients are sent, counted less declared", wrong[0], 0)
    yield Finding("floats that clients send, counted less declared", wrong[1], 0)


# Holding methods to the laws


def with_defaults(method: Method, name: str, defaults: Mapping[str, Any]) -> Method:
    """Return a method of this name whose options have other defaults."""
    options = fields_of(method.config)
    changed = [(key, options[key].type, field(default=value, metadata=options[key].metadata))
               for key, value in defaults.items()]  # fmt: skip
    config = make_dataclass("Config", changed, bases=(method.config,), frozen=True)
    return replace(method, name=name, config=config, variants={})


def variants_of(method: Method) -> list[Method]:
    """Return the variants that a method declares, each as a method."""
    return [with_defaults(method, f"{method.name} ({name})", defaults) for name, defaults in method.variants.items()]


class Law(NamedTuple):
    """A law as it is held against a method."""

    measure: Callable[..., Iterator[Finding]]
    runs: Mapping[str, dict[str, Any]] = {"": {}}  # its options, by words before each finding
    needs: str = ""  # what a method must declare for the law to have a meaning


NORMED = f"{__file__}:normed"
LAWS = {
    1: Law(
        law_1_off_is_the_simpler_method,
        {"": {}, "BatchNorm, ": {"backbone": NORMED}}, "reduces_to",  # whose buffers must come out
    ),
    2: Law(law_2_on_is_not, needs="reduces_to"),
    # With BatchNorm, which may be all that a client keeps.
    3: Law(law_3_state_survives, {"": {"backbone": NORMED}}, needs="ClientState"),
    4: Law(
        law_4_chunking_is_invisible,
        {
            "": {"chunks": (2, 4, "branches:4")}, "Adam, ": {"chunks": (2, 4), "optimizer": "adam", "lr": 0.003},
            "BatchNorm, ": {"chunks": (2, "branches:4"), "backbone": NORMED},
        },
    ),
    5: Law(law_5_order_is_invisible),
    6: Law(law_6_edge_data, {"": {"chunk": 1}, "together, ": {"chunk": 4}}),
    7: Law(law_7_resume_is_invisible),
    9: Law(law_9_costs_are_what_is_sent, needs="costs"),
}  # fmt: skip


def keeps_state(method: Method) -> bool:
    """Whether its clients keep something between rounds, so that law 3 has a say."""
    return any(kind.__name__ == "ClientState" for kind in method.state_types)


def allows(method: Method, optimizer: str) -> bool:
    """Whether a method runs with this value of `--optimizer`."""
    return not method.optimizers or optimizer in method.optimizers


def one_of_each_kind() -> list[Method]:
    """One registered method of each kind: by models of the clients' own, public images and kept states."""
    by_kind = {}
    for method in registry.methods().values():
        kind = bool(method.personal), method.uses_public_data, keeps_state(method)
        by_kind[kind] = method
    return list(by_kind.values())


def check(method: Method, number: int, device: str) -> list[Finding]:
    """Hold a method to the law of that number on a device; an error ends only its measurement.

    Returns nothing where the method does not declare what the law needs.
    """
    law = LAWS[number]
    declared = {"": True, "reduces_to": method.reduces_to, "ClientState": keeps_state(method), "costs": method.costs}
    if not declared[law.needs]:
        return []
    findings = []
    for words, options in law.runs.items():
        if not allows(method, options.get("optimizer", "sgd")):
            continue
        try:
            with deterministic(torch.device(device).type == "cuda"):  # as in a run
                for finding in law.measure(method, device=device, **options):
                    findings.append(finding._replace(label=words + finding.label))
        except Exception as error:
            findings.append(Finding(f"{words}raised {type(error).__name__}", math.nan, 0, error=error))
    return findings
