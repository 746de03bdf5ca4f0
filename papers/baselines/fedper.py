"""FedPer: every client has its own head, on a body that is averaged.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, "Federated Learning with Personalization Layers", 2019,
https://arxiv.org/abs/1912.00818. Algorithms FedPer-Client and FedPer-Server.

A round: the server sends the body (the paper's base layers); a client puts its own head (its personalization layers) on
it and trains both together; the server averages the bodies, weighted by examples, and the head stays.

Notation
    code                    paper       shape
    state.params            W_B         parameters of the body, dict of tensors
    ClientState.params      W_{P_j}     parameters of the client's head
    cohort.weights          gamma_j     [K]

Readings and deviations
    1. What stays with a client is the last linear layer. The paper also keeps residual blocks in front of it; how many
       layers are personal is an option there.
    2. gamma_j is the client's share of the examples of the round's cohort, as in FedAvg. In the paper all clients take
       part in every round.
    3. Body and head move together in every step, by one learning rate, and the optimizer is new in every round.
    4. Running statistics of batch normalisation belong to the body and are averaged.
    5. A client is tested with its own head on the averaged body. One that has never taken part is tested with the
       initial model, whose head is also the first one of every client.

Run it
    fedcli run fedper --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedcli import Method, option, params_both_ways
from fedcli.core import Buffers, Client, Network, Params, head_names, plain_loss, split_model, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What FedPer adds to local training."""

    averaged: str = option("body", "What the clients average; nothing is local training", choices=("body", "nothing"))


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # of its head
    buffers: Buffers  # empty, unless nothing is averaged


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # of the body; empty where nothing is averaged
    buffers: Buffers
    clients: Mapping[int, ClientState]  # of those that have taken part


def personal_names(network: Network, config: Config) -> frozenset[str]:
    """The names of what stays with a client: its head, or everything."""
    if config.averaged == "nothing":
        return frozenset(network.params) | frozenset(network.buffers)
    return head_names(network)


def personal_models(state: ServerState) -> dict[int, tuple[Params, Buffers]]:
    """Each client's own head on the averaged body (Reading 5)."""
    models = {}
    for client, own in state.clients.items():
        models[client] = {**state.params, **own.params}, {**state.buffers, **own.buffers}
    return models


def init(fed: Federation, config: Config) -> ServerState:
    """The initial body; nobody has trained yet."""
    _, shared = split_model(fed.initial_model(), personal_names(fed.network, config))
    return ServerState(shared.params, shared.buffers, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """FedPer-Client and FedPer-Server, one round."""
    names = personal_names(fed.network, config)
    first, _ = split_model(fed.initial_model(), names)

    received = fed.broadcast(state.params, state.buffers, cohort)  # server: send W_B to each client
    own = fed.recall(state.clients, cohort, ClientState(first.params, first.buffers))
    clients = Client({**received.params, **own.params}, {**received.buffers, **own.buffers})
    clients, terms = fed.train(clients, cohort, plain_loss(fed.network))  # client: SGD on (W_B, W_{P_j})

    head, body = split_model(clients, names)
    states = fed.remember(state.clients, cohort, ClientState(head.params, head.buffers))
    sent = fed.upload_model(body)  # client: send back W_{B,j}
    params, buffers = weighted_mean(sent, cohort.weights)  # server: W_B = sum_j gamma_j W_{B,j}
    return ServerState(params, buffers, states), terms


METHOD = Method(
    name="fedper",
    title="FedPer: own heads on one averaged body",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"averaged": "nothing"}),
    state_types=(ServerState, ClientState),
    costs=params_both_ways,  # the body
    default_protocol="fedfm:niid-1",
    personal=personal_models,
)  # fmt: skip
