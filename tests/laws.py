"""The laws of `fedcli.check` as tests hold them: one that does not hold raises; law 4 has a plain loop beside it."""

from functools import wraps

import fedcli.check
from fedcli.check import *  # noqa: F403
from fedcli.check import RELATIVE, distance
from tests.reference import ReferenceFederation, exchange_plainly, models_of, modules_of, stacked_by_network

NORMED = f"{fedcli.check.__file__}:normed"  # a small network with BatchNorm


class Broken(Exception):
    """A law does not hold."""


def raising(law, **options):
    """The law with these options, which raises `Broken` where it does not hold."""

    @wraps(law)
    def law_that_raises(*arguments, **more):
        findings = list(law(*arguments, **options, **more))
        broken = [str(finding) for finding in findings if not finding.holds]
        if broken:
            raise Broken("; ".join(broken))
        return findings

    return law_that_raises


for name in [name for name in vars(fedcli.check) if name.startswith("law_")]:
    globals()[name] = raising(vars(fedcli.check)[name])
law_4_chunking_is_invisible = raising(fedcli.check.law_4_chunking_is_invisible, against=ReferenceFederation)


check_federation = fedcli.check.federation


def federation(method, overrides=None, *, reference=False, **run):
    """A setup and its federation on toy data, whose clients train by the plain loop where `reference`."""
    return fedcli.check.federation(method, overrides, kind=ReferenceFederation if reference else None, **run)


def assert_agree(tree, other, what: str) -> None:
    assert distance(tree, other) <= RELATIVE, f"{what}: relative distance {distance(tree, other):.2e}"


def assert_rounds_agree(setup, fed, slow_round, shared, shared_of, rounds=3):
    """Holds rounds of a method to a plain loop, in what all share and what each client keeps; returns the last state.

    `slow_round` takes the federation, the setup, the round, what clients keep and what all share, and returns the last
    two after the round; `shared` is what all share at first, and `shared_of` takes it out of a state.
    """
    state = setup.method.init(fed, setup.options)
    kept = {}
    for number in range(rounds):
        kept, shared = slow_round(fed, setup, number, kept, shared)
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        assert_agree(shared_of(state), shared, f"what all share after round {number}")
        for client, parts in kept.items():
            assert_agree(tuple(state.clients[client]), parts, f"client {client} in round {number}")
    return state


def assert_public_phase_agrees(setup, fed, cohort, states, phase, objective, optimizer, batches=None, fresh=True):
    """Holds what clients with these states learn on public images, those of the round or `batches`, to a plain loop.

    `phase` takes stacked clients, their cohort, the federation and the options, and returns clients and terms. For the
    rest see `exchange_plainly`. Returns the terms, and means over the batches of what the objective keeps.
    """
    batches = list(fed.public_batches(cohort.round)) if batches is None else batches
    expected, means = exchange_plainly(modules_of(fed, states), batches, objective, optimizer, fresh)
    trained, terms = phase(stacked_by_network(fed, cohort, states), cohort, fed, setup.options)
    assert_agree(models_of(fed.groups(cohort), trained), expected, "the models")
    return terms, means
