"""The laws that every registered method must pass, as functions that fail with an AssertionError.

`test_laws.py` holds them against the registry, `test_guards.py` against methods with a planted defect.
"""

import dataclasses

import numpy as np
import torch

from fedcli.core.federation import Federation, NonFiniteLoss
from fedcli.core.trees import leaves, tree_map
from fedcli.data.datasets import Dataset
from fedcli.registry import Method, find_method
from fedcli.runs import run as runs
from fedcli.runs.config import resolve
from fedcli.runs.run import one_round
from tests.reference import ReferenceFederation

RELATIVE = 1e-8  # of the norm, in float64
RAGGED = (13, 7, 10, 4)  # examples of each client; with batches of 4 the last batches have 1, 3, 2 and 4


def toy_dataset(num_train=60, channels=1, size=8, num_classes=3, seed=0, absent=()) -> Dataset:
    """Random images whose brightness tells the class; the classes `absent` have no example."""
    draw = np.random.default_rng(seed)
    present = [label for label in range(num_classes) if label not in absent]

    def part(count):
        labels = np.array([present[i % len(present)] for i in range(count)])
        pixels = draw.integers(0, 150, (count, channels, size, size)) + 50 * labels[:, None, None, None] % 100
        return torch.tensor(pixels, dtype=torch.uint8), torch.tensor(labels)

    names = tuple(str(label) for label in range(num_classes))
    return Dataset("toy", *part(num_train), *part(20), class_names=names)


def toy_parts(sizes=RAGGED) -> list[np.ndarray]:
    """Disjoint clients of these sizes."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


TOY = {
    "protocol": "fedfm:digits", "dataset": "digits", "backbone": "cnn-small", "precision": "float64",
    "num_clients": len(RAGGED), "device": "cpu",
    "local_epochs": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "validation": 0.0,
    "drop_last": False,
}  # fmt: skip


def federation(method, overrides=None, *, data=None, parts=None, reference=False, **run):
    """A setup and its federation on toy data; returns (setup, fed)."""
    method = find_method(method) if isinstance(method, str) else method
    overrides = overrides or {}
    defaults = {field.name: field.default for field in dataclasses.fields(method.config)}
    data, public = data or toy_dataset(), None
    if method.uses_public_data:
        run = {"public_dataset": "digits", "public_batch_size": 5, **run}
        public = toy_dataset(12, data.channels, data.image_size, seed=7)  # batches of 5, 5 and 2
    setup = resolve(method, {**TOY, **defaults, **overrides, **run})  # defaults named, so that no protocol tunes them
    kind = ReferenceFederation if reference else Federation
    return setup, runs.federation(setup, data, toy_parts() if parts is None else parts, public, kind=kind)


def simulate(setup, fed, rounds, cohorts=None):
    """State after some rounds; `cohorts` maps a round to its client ids."""
    state = setup.method.init(fed, setup.options)
    for number in range(rounds):
        cohort = fed.cohort(number) if cohorts is None else fed.cohort_of(number, cohorts[number])
        state, _ = setup.method.run_round(state, cohort, fed, setup.options)
    return state


def distance(tree, other) -> float:
    """Norm of the difference of two trees over the norm of the second."""
    pairs = list(zip(leaves(tree), leaves(other), strict=True))
    difference = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return float((difference / sum(b.double().square().sum() for _, b in pairs)).sqrt())


def assert_agree(tree, other, what: str) -> None:
    assert distance(tree, other) <= RELATIVE, f"{what}: relative distance {distance(tree, other):.2e}"


def model_of(setup, state):
    """Parameters and buffers: of the global model, or of all clients' own models under their ids."""
    if setup.method.personal is None:
        return setup.method.model(state)
    own = sorted(setup.method.personal(state).items())
    return tuple({f"{client}.{name}": v for client, one in own for name, v in one[i].items()} for i in (0, 1))


def law_1_off_is_the_simpler_method(method: Method, rounds=3, **run) -> None:
    simpler, overrides = method.reduces_to
    setup, fed = federation(method, overrides, **run)
    base_setup, base_fed = federation(simpler, **run)
    assert_agree(
        model_of(setup, simulate(setup, fed, rounds)),
        model_of(base_setup, simulate(base_setup, base_fed, rounds)),
        f"{method.name} under {overrides} against {simpler}",
    )


def law_2_on_is_not(method: Method, rounds=22) -> None:
    simpler, overrides = method.reduces_to
    run = {"local_epochs": 1, "parts": toy_parts((13, 7, 10, 2))}  # the last client lacks a class
    setup, fed = federation(method, **run)
    off_setup, off_fed = federation(method, overrides, **run)
    on = model_of(setup, simulate(setup, fed, rounds))[0]
    off = model_of(off_setup, simulate(off_setup, off_fed, rounds))[0]
    assert distance(on, off) > 1e-6, f"{method.name} with its defaults is {simpler}"


COHORTS = ([0, 1], [2, 3], [1, 2], [0, 3])  # clients 0 and 3 sit rounds out between two that they take part in


def law_3_state_survives(method: Method) -> None:
    setup, fed = federation(method, rounds=len(COHORTS), cohort_size=2)
    state, taken_part = setup.method.init(fed, setup.options), set()
    for number, clients in enumerate(COHORTS):
        before = tree_map(torch.clone, dict(state.clients))
        state, _ = setup.method.run_round(state, fed.cohort_of(number, clients), fed, setup.options)
        taken_part |= set(clients)
        assert set(state.clients) == taken_part, (
            f"{method.name} keeps the state of {set(state.clients)} of {taken_part}"
        )
        for client in set(before) - set(clients):
            assert distance(state.clients[client], before[client]) == 0, f"{method.name} changed a client that sat out"
        for client in set(before) & set(clients):
            assert distance(state.clients[client], before[client]) > 0, f"{method.name} stores nothing new for a client"
    last = len(COHORTS) - 1
    early = simulate(setup, fed, last, COHORTS)
    moved = early._replace(clients={**early.clients, 0: tree_map(lambda leaf: leaf + 1, early.clients[0])})
    results = []
    for start in (early, moved):
        after, _ = setup.method.run_round(start, fed.cohort_of(last, COHORTS[last]), fed, setup.options)
        results.append(model_of(setup, after)[0])
    assert distance(*results) > 1e-9, f"{method.name} does not read what it stored for client 0 in round 0"


def law_4_chunking_is_invisible(method: Method, rounds=2, overrides=None, chunks=(1, 2, 4), **run) -> None:
    setup, fed = federation(method, overrides, reference=True, **run)
    expected = simulate(setup, fed, rounds)
    for chunk in chunks:
        setup, fed = federation(method, overrides, clients_per_chunk=str(chunk), **run)
        state = simulate(setup, fed, rounds)
        assert_agree(model_of(setup, state), model_of(setup, expected), f"{method.name}, {chunk} clients per chunk")
        assert_agree(state, expected, f"state of {method.name}, {chunk} clients per chunk")


def law_5_order_is_invisible(method: Method, overrides=None) -> None:
    setup, fed = federation(method, overrides, clients_per_chunk="2")
    first = simulate(setup, fed, 1)
    order = np.array([2, 0, 3, 1])
    state, terms = setup.method.run_round(first, fed.cohort_of(1, np.arange(4)), fed, setup.options)
    permuted, permuted_terms = setup.method.run_round(first, fed.cohort_of(1, order), fed, setup.options)
    assert_agree(permuted, state, f"{method.name} under a permuted cohort")
    expected = tree_map(lambda values: values[order], terms)
    assert_agree(permuted_terms, expected, f"the clients' terms of {method.name} under a permuted cohort")


def law_6_edge_data(method: Method, chunk: int) -> None:
    cases = {
        "a client with one example": {"parts": toy_parts((1, 7, 10, 4))},
        "a class nobody has": {"data": toy_dataset(absent=(1,))},
        "a cohort of one": {"cohort_size": 1},
        "a client without examples": {"parts": toy_parts((0, 7, 10, 4))},
    }
    for what, run in cases.items():
        setup, fed = federation(method, clients_per_chunk=str(chunk), **run)
        state = setup.method.init(fed, setup.options)
        for number in range(2):
            try:
                state, entry = one_round(setup, fed, state, fed.cohort(number))
            except NonFiniteLoss as error:
                raise AssertionError(f"{method.name} is not finite with {what}") from error
        finite = all(torch.isfinite(leaf).all() for leaf in leaves(state) if leaf.is_floating_point())
        assert finite, f"{method.name} is not finite with {what}"
        assert 0 <= entry["test_accuracy"] <= 1
