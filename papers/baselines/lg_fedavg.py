"""LG-FedAvg: every client has its own feature extractor, and the head on top of it is averaged.

P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency, "Think Locally,
Act Globally: Federated Learning with Local and Global Representations", NeurIPS 2019 workshop on federated learning,
https://arxiv.org/abs/2001.01523.

A round: the server sends the head; a client puts it on its own extractor, trains both together on its data and sends
the head back; the server averages the heads, weighted by examples. Because the extractors stay where they are, they may
be different networks, as long as their features have one width.

Notation
    code                    paper           shape
    ClientState.params      theta^l_m       the client's own extractor
    head                    theta^g         `head.weight` [C, D] and `head.bias` [C]
    cohort.weights          N_m / N         [K]

Readings and deviations
    1. What is averaged is the last linear layer. The paper leaves open where a network is cut; its own code averages
       more layers on CIFAR-10. FedSA compares with the last layer alone, the only one that different networks share.
    2. Extractor and head move together in every step, by one learning rate.
    3. A client is tested with its own extractor under the averaged head. One that has never taken part has its initial
       network.
    4. The first head is that of the first network's initial model; each network's own is drawn differently.
    5. The paper tests new clients with an ensemble of all extractors. No comparison here has new clients.

Run it
    fedcli run lg-fedavg --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedcli import Method, both_ways, option
from fedcli.core import Buffers, Client, Params, plain_loss, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.own_models import GroupRound, train_by_network

HEAD = ("head.weight", "head.bias")


@dataclass(frozen=True)
class Config:
    """What LG-FedAvg adds to local training."""

    averaged: str = option("head", "What the clients average; nothing is local training", choices=("head", "nothing"))


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # of its own extractor
    buffers: Buffers


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    head: Params  # empty where nothing is averaged
    clients: Mapping[int, ClientState]  # of those that have taken part


def without_head(params: Params, head: Params) -> Params:
    """The parameters that are not in the averaged head."""
    return {name: value for name, value in params.items() if name not in head}


def with_mean_head(state: Any) -> dict[int, tuple[Params, Buffers]]:
    """Each client's extractor under the averaged head (Reading 3)."""
    models = {}
    for client, extractor in state.clients.items():
        models[client] = ({**extractor.params, **state.head}, extractor.buffers)
    return models


def init(fed: Federation, config: Config) -> ServerState:
    """The first head; nobody has trained yet. Refuses networks whose features differ in width."""
    if config.averaged == "nothing":
        return ServerState({}, {})
    _ = fed.feature_dim  # refuses networks whose heads have different shapes
    first_network, *_ = fed.networks
    params, _ = fed.initial_model(first_network)
    return ServerState({name: params[name] for name in HEAD}, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round: the head down, training of everything, the head up."""

    def train_group(group: Cohort) -> GroupRound:  # clients with the same network
        params, buffers = fed.initial_model(group.network)
        private = fed.recall(state.clients, group, ClientState(without_head(params, state.head), buffers))
        received = fed.broadcast(state.head, {}, group).params
        clients = Client({**private.params, **received}, private.buffers)
        clients, terms = fed.train(clients, group, plain_loss(group.network))
        extractor = ClientState(without_head(clients.params, state.head), clients.buffers)
        head = {name: clients.params[name] for name in state.head}
        return GroupRound(extractor, sent=head, terms=terms)

    states, heads, terms = train_by_network(train_group, state.clients, cohort, fed)
    head = weighted_mean(fed.upload(heads), cohort.weights)
    return ServerState(head, states), terms


METHOD = Method(
    name="lg-fedavg",
    title="LG-FedAvg: own extractors under one averaged head",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"averaged": "nothing"}),
    state_types=(ServerState, ClientState),
    costs=both_ways(lambda sizes: sizes.num_classes * (sizes.feature_dim + 1)),  # the head
    default_protocol="fedsa:cifar10-silo",
    personal=with_mean_head,
    mixed_networks=True,
)  # fmt: skip
