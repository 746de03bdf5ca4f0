"""FedCM: every local step mixes its gradient with the global direction of the last round.

J. Xu, S. Wang, L. Wang, A. C.-C. Yao, "FedCM: Federated Learning with Client-level Momentum", 2021,
https://arxiv.org/abs/2106.10874. Algorithm 1.

The server estimates the global gradient from what the clients of a round have moved, per step and learning rate, and
sends it with the model. A client of the next round takes

    w <- w - eta (alpha grad f_i(w) + (1 - alpha) Delta^t).

Notation
    code                paper       shape
    params              x           dict of tensors
    local_params        x_i         [K, ...]
    direction           Delta^t     dict of tensors
    local_steps         K_i         [K]
    gradient_share      alpha
    lr, server_lr       eta_l, eta_g

Readings and deviations
    1. The step is one of the run's optimizer on alpha f_i + (1 - alpha) <w, Delta>, so the mixture enters before weight
       decay and momentum, and the weight decay is not scaled by alpha. Delta estimates the gradient with the weight
       decay and the clients' own Delta in it, as in the paper.
    2. With momentum rho a step is in the long run eta_l / (1 - rho) times a gradient, so Delta is divided by that in
       place of eta_l, as SCAFFOLD's control variates are here. The paper's local step has no momentum of its own.
    3. Delta of a round is divided by that round's learning rate, and each client's change by its own number of steps. A
       client without a step adds zero. The paper has one number of steps for all; FL-Simulator takes that of its first
       client, not rounded up.
    4. Delta and the model are means weighted by examples, as in FedAvg; the paper's are plain, as here with
       `--weighting uniform`. eta_g = 1 is FedAvg's server. Where all clients take K steps, x moves by
       -eta_g K eta_l Delta: the paper's eta_g is K eta_l times ours.
    5. Delta is zero before the first round, whose steps are then alpha times FedAvg's. It is of the last round's cohort
       alone, and of parameters only; running statistics are averaged.
    6. Only SGD: Adam's step is no multiple of a gradient, so a mean of such steps is no direction to mix with one.

Where popular code differs
    FL-Simulator clips the mixed gradient at norm 10.

Run it
    fedcli run fedcm --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Costs, Method, option
from fedcli.core import Buffers, Client, LocalLoss, Network, Params, inner_product, step_length, tree_map, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines import fedavg


@dataclass(frozen=True)
class Config:
    """What FedCM adds to FedAvg."""

    gradient_share: float = option(
        0.1, "Share of a client's own gradient in its step", symbol="α", low=0, open_low=True, high=1, off=1,
        tune=(0.05, 0.1, 0.3, 0.5),
    )  # fmt: skip
    server_lr: float = option(1.0, "Server's step along the mean change", symbol="η_g", low=0, open_low=True)


class Context(NamedTuple):
    """What a client is given for a round; all clients share it."""

    direction: Params  # Delta^t


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model x
    buffers: Buffers
    direction: Params  # Delta, of the shape of the parameters


def linear_term(params: Params, direction: Params) -> Tensor:
    """<w, Delta>, whose gradient is Delta; a scalar.

    Args:
        params: w, of one client.
        direction: Delta^t.
    """
    return inner_product(params, direction)


def mean_direction(
    global_params: Params, local_params: Params, local_steps: Tensor, lr: float, weights: Tensor
) -> Params:
    """Delta^{t+1} = sum_i p_i (x - x_i) / (K_i eta_l), 0 for a client without a step.

    Args:
        global_params: x, `[...]`.
        local_params: x_i after the last step, `[K, ...]`.
        local_steps: K_i, `[K]`.
        lr: eta_l of this round; with momentum rho eta_l / (1 - rho).
        weights: p_i, `[K]`, with sum 1.
    """
    shares = torch.where(local_steps > 0, weights / (local_steps.clamp(min=1) * lr), 0.0)  # [K]
    return tree_map(lambda x, x_i: torch.tensordot(shares, x - x_i, dims=1), global_params, local_params)


def update_model(params: Params, mean: Params, server_lr: float) -> Params:
    """x^{t+1} = x + eta_g (mean of x_i - x).

    Args:
        params: x.
        mean: Weighted mean of x_i over the cohort.
        server_lr: eta_g.
    """
    return tree_map(lambda old, new: old + server_lr * (new - old), params, mean)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective alpha f_i + (1 - alpha) <w, Delta>."""
    task = fedavg.make_local_loss(network)

    def local_loss(params, buffers, batch, context):
        loss, aux = task(params, buffers, batch, None)
        linear = linear_term(params, context.direction)
        mixed = config.gradient_share * loss + (1 - config.gradient_share) * linear
        return mixed, aux.with_term("momentum", linear)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model, and no direction yet."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, tree_map(torch.zeros_like, params))


def aggregate(state: ServerState, clients: Client, cohort: Cohort, fed: Federation, config: Config) -> ServerState:
    """The next direction, and the model."""
    local_params, local_buffers = fed.upload_model(clients)
    local_steps = fed.local_steps(cohort)
    lr = step_length(fed.lr(cohort.round), fed.momentum)  # Reading 2
    direction = mean_direction(state.params, local_params, local_steps, lr, cohort.weights)  # Delta^{t+1}
    mean, buffers = weighted_mean((local_params, local_buffers), cohort.weights)
    return ServerState(update_model(state.params, mean, config.server_lr), buffers, direction)  # x^{t+1}


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # x^t to the chosen clients
    context = Context(fed.download(state.direction, cohort))  # and Delta^t
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network, config), context)
    return aggregate(state, clients, cohort, fed, config), terms


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """The model and the direction down, the model up."""
    models = len(cohort.client_ids) * fed.sizes.parameters
    return Costs(down=2 * models, up=models)


METHOD = Method(
    name="fedcm",
    title="FedCM: client-level momentum",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"gradient_share": 1.0}),
    state_types=(ServerState,),
    costs=costs,
    optimizers=("sgd",),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 2 * sizes.parameters,  # the local model and Delta
)  # fmt: skip
