"""The laws of `fedcli.check` as tests hold them: one that does not hold raises; law 4 has a plain loop beside it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from fedcli import check, toy
from fedcli.core.federation import Cohort, Federation
from fedcli.runs.resolve import Setup
from tests.plain_federation import PlainFederation
from tests.plain_loops import modules_of
from tests.public_phases import PublicPhase, exchange_plainly, models_of, stacked_by_network


class Broken(Exception):
    """A law does not hold."""


def raising(law: Callable, **options: Any) -> Callable:
    """The law with these options, which raises `Broken` where it does not hold."""

    @wraps(law)
    def law_that_raises(*arguments, **more):
        findings = list(law(*arguments, **options, **more))
        broken = [str(finding) for finding in findings if not finding.holds]
        if broken:
            raise Broken("; ".join(broken))
        return findings

    return law_that_raises


law_1_off_is_the_simpler_method = raising(check.law_1_off_is_the_simpler_method)
law_2_on_is_not = raising(check.law_2_on_is_not)
law_3_state_survives = raising(check.law_3_state_survives)
law_4_chunking_is_invisible = raising(check.law_4_chunking_is_invisible, reference_type=PlainFederation)
law_5_order_is_invisible = raising(check.law_5_order_is_invisible)
law_6_edge_data = raising(check.law_6_edge_data)
law_7_resume_is_invisible = raising(check.law_7_resume_is_invisible)
law_9_costs_are_what_is_sent = raising(check.law_9_costs_are_what_is_sent)


def federation(method, overrides=None, *, plain=False, **run):
    """A setup and its federation on toy data, whose clients train by the plain loop where `plain`."""
    return toy.federation(method, overrides, federation_type=PlainFederation if plain else None, **run)


def start(setup: Setup, fed: Federation) -> Any:
    """The state before the first round."""
    return setup.method.init(fed, setup.method_config)


def one_round(setup: Setup, fed: Federation, state: Any, cohort: Cohort) -> tuple[Any, dict[str, Tensor]]:
    """The state after a round, and its terms."""
    return setup.method.run_round(state, cohort, fed, setup.method_config)


def run_rounds(num_rounds: int, method, overrides=None, *, cohorts=None, **run: Any) -> Any:
    """The state of a method after rounds on toy data; cohorts are drawn if None."""
    setup, fed = federation(method, overrides, **run)
    return toy.simulate(setup, fed, num_rounds, cohorts)


def assert_agree(tree, other, what: str) -> None:
    distance = toy.distance(tree, other)
    assert distance <= check.MAX_ROUNDING, f"{what}: relative distance {distance:.2e}"


def assert_rounds_agree(
    setup: Setup, fed: Federation, plain_round: Callable, shared: Any, shared_of: Callable[[Any], Any], rounds: int = 3
) -> Any:
    """Holds rounds of a method to a plain loop, in what all share and what each client keeps; returns the last state.

    `plain_round` takes the federation, the setup, the round, what clients keep and what all share, and returns the last
    two after the round; `shared` is what all share at first, and `shared_of` takes it out of a state.
    """
    state = start(setup, fed)
    kept = {}
    for round in range(rounds):
        kept, shared = plain_round(fed, setup, round, kept, shared)
        state, _ = one_round(setup, fed, state, fed.cohort(round))
        assert_agree(shared_of(state), shared, f"what all share after round {round}")
        for client, parts in kept.items():
            assert_agree(tuple(state.clients[client]), parts, f"client {client} in round {round}")
    return state


def assert_public_phase_agrees(
    phase: PublicPhase, fed: Federation, cohort: Cohort, states: dict[int, Any], options: Any
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Holds what clients with these states learn in a phase on public images to a plain loop.

    `options` are those of the method. Returns the terms of the phase, and means over the batches of what its objective
    keeps, each a list over the clients.
    """
    batches = list(fed.public_batches(cohort.round)) if phase.batches is None else phase.batches
    expected, means = exchange_plainly(phase, modules_of(fed, states), batches)
    trained, terms = phase.learn(stacked_by_network(fed, cohort, states), cohort, fed, options)
    assert_agree(models_of(fed.groups(cohort), trained), expected, "the models")
    return terms, means
