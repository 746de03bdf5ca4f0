"""Server momentum: the server takes the mean change of a round for a gradient.

An example for docs/add-your-method.md; `fedavgm` is the method of the paper. Clients train as in FedAvg. The server
keeps a velocity v of the shape of the parameters:

    Delta = sum_i p_i w_i - x,    v <- beta v + Delta,    x <- x + eta v                                (1)

Notation
    code                    symbol      shape
    ServerState.params      x           dict of tensors
    ServerState.velocity    v           dict of tensors
    cohort.weights          p_i         [K]
    server_lr               eta
    server_momentum         beta

Readings and deviations
    1. The velocity is of parameters only. Running statistics of batch normalisation are averaged as in FedAvg.

Run it
    fedcli run docs/examples/my_server_optimizer.py --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fedcli import Method, both_ways, option
from fedcli.core import Buffers, Params, plain_loss, tree_map, weighted_mean


@dataclass(frozen=True)
class Config:
    """What it adds to FedAvg."""

    server_lr: float = option(0.5, "Server's learning rate", symbol="η", source="Eq. 1", low=0, open_low=True)
    server_momentum: float = option(0.9, "Decay of the velocity", symbol="β", source="Eq. 1", low=0, high=1, off=0)


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # x
    buffers: Buffers
    velocity: Params  # v


def step(params: Params, velocity: Params, mean: Params, config: Config) -> tuple[Params, Params]:
    """Eq. 1: the next x and v.

    Args:
        params: x.
        velocity: v.
        mean: sum_i p_i w_i, the mean of the local models.
        config: With eta and beta.
    """
    change = tree_map(torch.sub, mean, params)  # Delta
    velocity = tree_map(lambda v, delta: config.server_momentum * v + delta, velocity, change)
    return tree_map(lambda x, v: x + config.server_lr * v, params, velocity), velocity


def init(fed, config: Config) -> ServerState:
    """The initial model, at rest."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, tree_map(torch.zeros_like, params))


def run_round(state: ServerState, cohort, fed, config: Config):
    """One round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, plain_loss(fed.network))
    mean, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    params, velocity = step(state.params, state.velocity, mean, config)
    return ServerState(params, buffers, velocity), terms


METHOD = Method(
    name="server-momentum",
    title="Server momentum: the mean change of a round is a gradient",
    config=Config,
    init=init,
    run_round=run_round,
    reduces_to=("fedavg", {"server_lr": 1.0, "server_momentum": 0.0}),
    state_types=(ServerState,),
    costs=both_ways(lambda sizes: sizes.parameters),
)
