"""Asserts the laws of `fedcli.check`, and that rounds of a method agree with a plain loop, on toy data."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor

from fedcli import check, toy
from fedcli.core.federation import Cohort, Federation
from fedcli.core.trees import Tree
from fedcli.runs.resolve import Setup
from tests.plain_federation import PlainFederation
from tests.plain_loops import modules_of
from tests.public_phases import PublicPhase, learn_plainly, models_of, stacked_by_network


class LawBroken(Exception):
    """The error that a law does not hold."""


def raise_if_broken(law: Callable, **options: Any) -> Callable:
    """Returns the law with these options; it raises `LawBroken` where it does not hold or has measured nothing."""

    @wraps(law)
    def law_that_raises(*arguments, **run_options):
        findings = list(law(*arguments, **options, **run_options))
        if not findings:
            raise LawBroken("nothing was measured")
        broken = [str(finding) for finding in findings if not finding.holds]
        if broken:
            raise LawBroken("; ".join(broken))
        return findings

    return law_that_raises


law_1_off_is_the_simpler_method = raise_if_broken(check.law_1_off_is_the_simpler_method)
law_2_on_is_not = raise_if_broken(check.law_2_on_is_not)
law_3_state_survives = raise_if_broken(check.law_3_state_survives)
law_4_chunking_is_invisible = raise_if_broken(check.law_4_chunking_is_invisible, reference_type=PlainFederation)
law_5_order_is_invisible = raise_if_broken(check.law_5_order_is_invisible)
law_6_edge_data = raise_if_broken(check.law_6_edge_data)
law_7_resume_is_invisible = raise_if_broken(check.law_7_resume_is_invisible)
law_9_costs_are_what_is_sent = raise_if_broken(check.law_9_costs_are_what_is_sent)


def initial_state(setup: Setup, fed: Federation) -> Any:
    """Returns the state of a method before its first round."""
    return setup.method.init(fed, setup.method_config)


def method_round(setup: Setup, fed: Federation, state: Any, cohort: Cohort) -> tuple[Any, dict[str, Tensor]]:
    """Runs a round of a method; returns the state after it, and the terms of each client, [K] by name."""
    return setup.method.run_round(state, cohort, fed, setup.method_config)


def state_after_rounds(num_rounds: int, method, overrides=None, *, cohorts=None, **run_options: Any) -> Any:
    """Returns the state of a method after its first rounds on toy data; cohorts are drawn if None."""
    setup, fed = toy.federation(method, overrides, **run_options)
    return toy.simulate(setup, fed, num_rounds, cohorts)


def assert_agree(tree: Tree, expected: Tree, what: str) -> None:
    """Asserts that two trees of tensors differ by no more than their rounding; `what` names them in the message."""
    distance = toy.distance(tree, expected)
    assert distance <= check.MAX_ROUNDING, f"{what}: relative distance {distance:.2e}"


def assert_rounds_agree(
    setup: Setup, fed: Federation, plain_round: Callable, shared: Any, shared_of: Callable[[Any], Any], rounds: int = 3
) -> Any:
    """Asserts that rounds of a method agree with a plain loop, in what all share and in what each client keeps.

    Args:
        setup: The method, and the options of its run.
        fed: Its federation.
        plain_round: A round of the plain loop. It takes the federation, the setup, the round, what clients keep and
            what all share, and returns the last two as they are after the round.
        shared: What all share before the first round.
        shared_of: Takes what all share out of a state.
        rounds: How many rounds are run.

    Returns:
        The last state.
    """
    state = initial_state(setup, fed)
    kept = {}
    for round in range(rounds):
        kept, shared = plain_round(fed, setup, round, kept, shared)
        state, _ = method_round(setup, fed, state, fed.cohort(round))
        assert_agree(shared_of(state), shared, f"what all share after round {round}")
        for client, parts in kept.items():
            assert_agree(tuple(state.clients[client]), parts, f"client {client} in round {round}")
    return state


class PublicPhaseNumbers(NamedTuple):
    """The numbers of a phase on public images, by the method and by the plain loop."""

    terms: dict[str, Tensor]  # of the method
    means: list[list[float]]  # of the plain loop, see `LearntPlainly`


def assert_public_phase_agrees(
    phase: PublicPhase, fed: Federation, cohort: Cohort, states: dict[int, Any], config: Any
) -> PublicPhaseNumbers:
    """Asserts that what clients with these states learn on public images agrees with a plain loop.

    `config` has the options of the method.
    """
    batches = list(fed.public_batches(cohort.round)) if phase.batches is None else phase.batches
    expected = learn_plainly(phase, modules_of(fed, states), batches)
    trained, terms = phase.learn(stacked_by_network(fed, cohort, states), cohort, fed, config)
    assert_agree(models_of(fed.groups(cohort), trained), expected.models, "the models")
    return PublicPhaseNumbers(terms, expected.means)
