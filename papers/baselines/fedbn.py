"""FedBN: everything is averaged but batch normalisation, which stays with the client.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, https://arxiv.org/abs/2102.07623. Algorithm 1.

Made for clients whose images look different (scanners, styles) and not for clients with different classes.

Notation
    code                    paper                   shape
    state.params            w, without BN layers    dict of tensors
    ClientState             w_{BN,k}                scale and shift, running mean and variance
    cohort.weights          1 / K                   [K]

Readings and deviations
    1. What stays is the scale and the shift *and* the running statistics, in every layer that is batch normalisation,
       whatever its name. Codes that look for "bn" in names miss those in shortcuts and in `nn.Sequential`.
    2. Weights are n_k / n of the cohort. Algorithm 1 has the plain mean; the authors' data sets are of one size.
    3. Group and layer normalisation are averaged: they normalise an image by itself and have no running statistics.
    4. A network without batch normalisation is allowed, and a run with it says so. The method is then FedAvg, and each
       client's model that of the server. Of the built-in networks those named resnet, mobilenet, googlenet and
       efficientnet have it.
    5. A client is tested with its own normalisation in the averaged rest. One that has never taken part is tested with
       the initial model.

Run it
    fedcli run fedbn --dataset digits --backbone resnet10-3x3
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedcli import Method, option, params_both_ways
from fedcli.core import Buffers, Client, Network, Params, batchnorm_names, plain_loss, split_model, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What FedBN adds to local training."""

    averaged: str = option(
        "non-norm", "What the clients average: all but batch normalisation, or nothing, which is local training",
        choices=("non-norm", "nothing"),
    )  # fmt: skip


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # scale and shift of its batch normalisation
    buffers: Buffers  # its running statistics


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # all others; empty where nothing is averaged
    buffers: Buffers
    clients: Mapping[int, ClientState]  # of those that have taken part


def personal_names(network: Network, config: Config) -> frozenset[str]:
    """The names of what stays with a client: its batch normalisation, or everything."""
    if config.averaged == "nothing":
        return frozenset(network.params) | frozenset(network.buffers)
    return batchnorm_names(network)


def personal_models(state: ServerState) -> dict[int, tuple[Params, Buffers]]:
    """Each client's own normalisation in the averaged rest (Reading 5)."""
    models = {}
    for client, own in state.clients.items():
        models[client] = {**state.params, **own.params}, {**state.buffers, **own.buffers}
    return models


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model without batch normalisation; nobody has trained yet."""
    _, shared = split_model(fed.initial_model(), personal_names(fed.network, config))
    return ServerState(shared.params, shared.buffers, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round."""
    names = personal_names(fed.network, config)
    first, _ = split_model(fed.initial_model(), names)

    received = fed.broadcast(state.params, state.buffers, cohort)
    own = fed.recall(state.clients, cohort, ClientState(first.params, first.buffers))
    clients = Client({**received.params, **own.params}, {**received.buffers, **own.buffers})
    clients, terms = fed.train(clients, cohort, plain_loss(fed.network))  # for each client and local step: SGD

    norms, others = split_model(clients, names)
    states = fed.remember(state.clients, cohort, ClientState(norms.params, norms.buffers))
    # For each layer that is not BatchNorm: mean of w_k.
    params, buffers = weighted_mean(fed.upload_model(others), cohort.weights)
    return ServerState(params, buffers, states), terms


METHOD = Method(
    name="fedbn",
    title="FedBN: batch normalisation stays with the client",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"averaged": "nothing"}),
    state_types=(ServerState, ClientState),
    costs=params_both_ways,  # all but scales and shifts
    default_protocol="fedfm:niid-1",
    personal=personal_models,
)  # fmt: skip
