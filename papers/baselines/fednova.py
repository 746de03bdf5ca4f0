"""FedNova: average what clients did per effective step, so that those with more steps do not count more.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020, https://arxiv.org/abs/2007.07481. Its normalised averaging.

Client k takes tau_k local steps. Its update is a weighted sum of its gradients; a_k, the sum of these weights (the
paper's ||a_k||_1), is its number of effective steps. The server averages the updates per effective step and goes
along that mean as many steps as the clients took on average:

    a_k = (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho),    d_k = (w_g - w_k) / a_k,
    w_g <- w_g - (sum_k p_k a_k) sum_k p_k d_k.

Where all clients take equally many steps this is FedAvg.

Notation
    code             paper           shape
    global_params    x^(t,0)         dict of tensors
    local_params     x_k^(t,tau_k)   dict of tensors [K, ...]
    local_steps      tau_k           [K]
    effective        ||a_k||_1       [K]
    momentum         rho
    weights          p_k             [K]

Readings and deviations
    1. d_k here holds the learning rate: it is the paper's eta d_k. All clients have the same eta.
    2. tau_eff, free in the paper, is sum_k p_k a_k, also under momentum; so FedAvg is the case of equal steps.
    3. rho is the run's own momentum, and the gradient that a_k counts has the weight decay in it. Only SGD: Adam's
       update is no weighted sum of gradients with weights that are known beforehand, so it has no a_k.
    4. A client without a step has a_k = 0, and d_k = 0 is taken for it: it adds nothing to either sum, and keeps its
       weight p_k, as in FedAvg.
    5. The weights are those of the cohort, as in FedAvg.
    6. Running statistics of batch normalisation are averaged as in FedAvg: they are no sums of gradients.
    7. A client uploads its model and a_k, from which the server has d_k.

Known from the authors' code only
    tau_eff as in 2 (without a proximal term), weight decay as in 3, and momentum buffers that start at zero in every
    round. The code's momentum at the server and its proximal term are left out.

Where popular code differs
    NIID-Bench normalises the running statistics like the parameters.

Run it
    fedcli run fednova --dataset digits
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcli import Costs, Method
from fedcli.core import Client, Params, quotient, tree_map, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedavg import ServerState, init, make_local_loss


@dataclass(frozen=True)
class Config:
    """FedNova adds no option."""


def effective_steps(local_steps: Tensor, momentum: float) -> Tensor:
    """a_k = (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho), which is tau_k where rho = 0.

    It is the sum over s = 1 ... tau_k of (1 - rho^s) / (1 - rho), the weight that momentum SGD has given in the end to
    the gradient of the s-th step from the last.

    Args:
        local_steps: tau_k `[K]`, from 0.
        momentum: rho, in [0, 1).

    Returns:
        `[K]`, float64: in float32 the difference loses digits for rho near 1.
    """
    tau = local_steps.double()
    return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)


def normalised_average(global_params: Params, local_params: Params, effective: Tensor, weights: Tensor) -> Params:
    """w_g - (sum_k p_k a_k) sum_k p_k d_k with d_k = (w_g - w_k) / a_k, and d_k = 0 where a_k = 0.

    Args:
        global_params: w_g.
        local_params: w_k, leaves `[K, ...]`.
        effective: a_k `[K]`.
        weights: p_k `[K]`, with sum 1.
    """
    per_step = quotient(weights, effective)  # p_k / a_k
    factors = (weights * effective).sum() * per_step  # [K]

    def move(start: Tensor, local: Tensor) -> Tensor:
        return start - torch.tensordot(factors.to(local), start - local, dims=1)

    return tree_map(move, global_params, local_params)


def aggregate(state: ServerState, clients: Client, cohort: Cohort, fed: Federation, config: Config) -> ServerState:
    """Parameters by normalised averaging, buffers as in FedAvg."""
    effective = effective_steps(fed.local_steps(cohort), fed.momentum)  # Reading 3
    local_params, local_buffers = fed.upload_model(clients)
    params = normalised_average(state.params, local_params, fed.upload(effective), cohort.weights)
    return ServerState(params, weighted_mean(local_buffers, cohort.weights))


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Local training as in FedAvg, then normalised averaging."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network))
    return aggregate(state, clients, cohort, fed, config), terms


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """The model down; the model and the effective steps, one float, up."""
    size = len(cohort.client_ids)
    return Costs(down=size * fed.sizes.parameters, up=size * (fed.sizes.parameters + 1))


METHOD = Method(
    name="fednova",
    title="FedNova: normalised averaging of local updates",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # it is FedAvg where clients take equally many steps, which no option of its own can arrange
    state_types=(ServerState,),
    costs=costs,
    optimizers=("sgd",),
    default_protocol="fedfm:niid-1",
)  # fmt: skip
