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
from typing import Any, NamedTuple

from fedcli import Method, both_ways
from fedcli.core import Client, Params
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedavg import make_local_loss


@dataclass(frozen=True)
class Config:
    """Local training adds no option."""


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # its own model
    buffers: Params


class ServerState(NamedTuple):
    """The state of the simulation; the server itself keeps nothing."""

    clients: dict[int, ClientState]  # of those that have taken part


def init(fed: Federation, config: Config) -> ServerState:
    """Nobody has trained yet."""
    return ServerState({})


def own_models(states: Mapping[int, Any], group: Cohort, fed: Federation) -> Client:
    """The models of clients with one network, stacked; a newcomer's is the initial one of the network."""
    models = fed.recall(states, group, ClientState(*fed.initial_model(group.network)))
    return Client(models.params, models.buffers, optimizer={})


def train_own_models(
    models: list[Client], states: Mapping[int, ClientState], cohort: Cohort, fed: Federation
) -> tuple[Mapping[int, ClientState], Terms]:
    """Every client of the cohort trains its model, one of `models` by network, on its own data, and keeps it."""
    groups, terms = fed.groups(cohort), []
    for model, group in zip(models, groups, strict=True):
        trained, group_terms = fed.train(model._replace(optimizer={}), group, make_local_loss(group.network))
        states = fed.remember(states, group, ClientState(trained.params, trained.buffers))
        terms.append(group_terms)
    return states, fed.in_order(cohort, groups, terms)


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
