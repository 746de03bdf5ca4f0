"""Local training only: every client trains its own network on its own data, and nothing is sent.

The lower bound that methods with personal models are compared with: "BASE" in FCCL+ (W. Huang, M. Ye, Z. Shi, B. Du,
"Generalizable Heterogeneous Federated Cross-Correlation and Instance Similarity Learning", IEEE TPAMI 2024,
https://arxiv.org/abs/2309.16286). It has no equation but the local objective, the mean cross-entropy over a client's
examples.

Notation
    code            shape
    clients         of each client that has taken part: its parameters and buffers

Readings
    1. A client that is not drawn does not train in that round, so that all methods of a comparison take equally many
       local steps.
    2. Clients with the same network start from the same initial weights.
    3. The optimizer is new in every round, as in every other method here.

Run it
    fedcli run local --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedcli import Method, both_ways
from fedcli.core import ClientState, own_models, train_own_models
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """Local training adds no option."""


class ServerState(NamedTuple):
    """The state of the simulation; the server itself keeps nothing."""

    clients: Mapping[int, ClientState]  # of those that have taken part


def init(fed: Federation, config: Config) -> ServerState:
    """Nobody has trained yet."""
    return ServerState({})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Every client of the cohort goes on training its own model."""
    models = [own_models(state.clients, group, fed) for group in fed.groups(cohort)]
    states, terms = train_own_models(models, state.clients, cohort, fed)
    return ServerState(states), terms


METHOD = Method(
    name="local",
    title="Local training only",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # the simplest of its family; methods with personal models are compared with it
    state_types=(ServerState, ClientState),
    costs=both_ways(lambda sizes: 0),
    default_protocol="fedfm:niid-1",
    personal=lambda state: state.clients,
    mixed_networks=True,
)  # fmt: skip
