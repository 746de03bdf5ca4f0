"""FedProx: local objectives with a proximal term that holds each client near the global model.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, https://arxiv.org/abs/1812.06127. Algorithm 2.

A client minimises h_k(w; w_g) = F_k(w) + (mu / 2) ||w - w_g||^2, where w_g is the model it received.

Notation
    code               paper       shape
    params             w           dict of tensors
    global_params      w^t         dict of tensors
    proximal_weight    mu
    cohort.weights     n_k / n     [K]

Readings and deviations
    1. Clients are drawn uniformly and averaged with weights n_k, as in FedAvg and the authors' code. Algorithm 2
       draws client k with probability n_k / n and takes the plain mean; both aim at sum_k (n_k / n) w_k, and with all
       clients taking part the plain mean would not.
    2. Every client does all of its local epochs: the inexact solutions of clients that run out of time (the paper's
       gamma_k) are not simulated.
    3. The term covers parameters only, not the running statistics of batch normalisation.
    4. The gradient of the term goes through the run's optimizer with that of F_k, its momentum included. The paper's
       local solver is plain SGD, where nothing depends on it. mu is to be tuned: the option has the paper's grid.

Run it
    fedcli run fedprox --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import LocalLoss, Network, Params, squared_distance
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines import fedavg
from fedcli.papers.baselines.fedavg import ServerState, aggregate, init


@dataclass(frozen=True)
class Config:
    """What FedProx adds to FedAvg."""

    proximal_weight: float = option(
        0.01, "Weight of the proximal term", symbol="μ", source="Eq. 2", low=0, off=0, tune=(0.001, 0.01, 0.1, 1.0)
    )


class Context(NamedTuple):
    """What a client is given for a round; all clients share it."""

    global_params: Params  # w_g, the model as received


def proximal_term(params: Params, global_params: Params) -> Tensor:
    """(1/2) ||w - w_g||^2, over all parameters together; a scalar.

    Args:
        params: Of one client.
        global_params: The model it received.
    """
    return 0.5 * squared_distance(params, global_params)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective of Eq. 2, h_k = F_k + mu (1/2) ||w - w_g||^2."""
    task = fedavg.make_local_loss(network)

    def local_loss(params, buffers, batch, context):
        loss, aux = task(params, buffers, batch, None)
        proximal = proximal_term(params, context.global_params)
        return loss + config.proximal_weight * proximal, aux.with_term("proximal", proximal)

    return local_loss


def local_context(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[Context, None]:
    """The received model, which the term needs a second time; nothing more is sent."""
    return Context(state.params), None


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 2, one round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # server sends w^t to all chosen devices
    context, axes = local_context(state, cohort, fed, config)
    local_loss = make_local_loss(fed.network, config)
    clients, terms = fed.train(clients, cohort, local_loss, context, axes)  # w_k^{t+1} ~ argmin_w h_k(w; w^t)
    return aggregate(state, clients, cohort, fed, config), terms


METHOD = Method(
    name="fedprox",
    title="FedProx: federated averaging with a proximal term",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"proximal_weight": 0.0}),
    state_types=(ServerState,),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 2 * sizes.parameters,  # the local model and w_g
)  # fmt: skip
