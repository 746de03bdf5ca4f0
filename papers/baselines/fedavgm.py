"""FedAvgM: FedAvg with momentum at the server.

T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019, https://arxiv.org/abs/1909.06335. The update of its section on server momentum.

What a round of FedAvg would change is taken as a gradient, and the server follows a running sum of these:

    Delta = w_g - sum_k p_k w_k,    v <- beta v + Delta,    w_g <- w_g - eta v,    with v = 0 before the first round.

Notation
    code             paper          shape
    params           w              dict of tensors
    velocity         v              dict of tensors
    delta            Delta w        dict of tensors
    server_momentum  beta
    server_lr        eta, 1 in the paper
    cohort.weights   n_k / n        [K]

Readings and deviations
    1. The sum is undamped, v <- beta v + Delta, as the paper has it: a steady Delta moves the model by
       eta Delta / (1 - beta) in a round. With eta = 1 - beta, as in FedFM's protocols, it is the damped form,
       v <- beta v + (1 - beta) Delta.
    2. The velocity acts on parameters only. Running statistics of batch normalisation are averaged as in FedAvg: a
       variance with momentum could turn negative.

Where popular code differs
    MOON's option for it damps, and keeps a velocity of the buffers too. Flower's baseline looks ahead as Nesterov
    does, w_g <- w_g - (Delta + beta v).

Run it
    fedcli run fedavgm --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fedcli import Method, both_ways, option
from fedcli.core import Buffers, Client, Params, plain_loss, tree_map, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What FedAvgM adds to FedAvg."""

    server_momentum: float = option(
        0.9, "Momentum of the server's update", symbol="β", low=0, high=1, open_high=True, off=0, tune=(0.5, 0.7, 0.9)
    )
    server_lr: float = option(
        1.0, "Server's step along the velocity; 1 - β makes the damped form", symbol="η", low=0, open_low=True
    )


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model w_g
    buffers: Buffers
    velocity: Params  # v, of the shape of the parameters


def momentum_update(velocity: Params, delta: Params, beta: float) -> Params:
    """The new velocity, beta v + Delta.

    Args:
        velocity: v of the round before, zero in the first.
        delta: The global model minus the mean of the local ones.
        beta: In [0, 1).
    """
    return tree_map(lambda v, d: beta * v + d, velocity, delta)


def aggregate(state: ServerState, clients: Client, cohort: Cohort, fed: Federation, config: Config) -> ServerState:
    """w_g <- w_g - eta v."""
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    delta = tree_map(torch.sub, state.params, params)  # Delta = w_g - sum_k p_k w_k
    velocity = momentum_update(state.velocity, delta, config.server_momentum)
    params = tree_map(lambda w, v: w - config.server_lr * v, state.params, velocity)
    return ServerState(params, buffers, velocity)


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model, at rest."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, tree_map(torch.zeros_like, params))


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """A round of FedAvg, its change of the model passed through the server's momentum."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, plain_loss(fed.network))
    return aggregate(state, clients, cohort, fed, config), terms


METHOD = Method(
    name="fedavgm",
    title="FedAvgM: federated averaging with server momentum",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"server_momentum": 0.0}),
    state_types=(ServerState,),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
)  # fmt: skip
