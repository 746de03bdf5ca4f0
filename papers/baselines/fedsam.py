"""FedSAM and MoFedSAM: clients step by the gradient at a point that lies a radius uphill.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML
2022, https://arxiv.org/abs/2206.02618. Algorithm 1, with and without its momentum. FedSAM is at the same time that of
D. Caldarola, B. Caputo, M. Ciccone, "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022,
https://arxiv.org/abs/2203.11834.

A local step takes two gradients of the same batch:

    g = grad f_i(w),    w~ = w + rho g / ||g||,
    FedSAM    w <- w - eta grad f_i(w~),
    MoFedSAM  w <- w - eta (beta grad f_i(w~) + (1 - beta) Delta^t),

with Delta^t the global direction of the last round, as in FedCM. All else is FedAvg or FedCM.

Notation
    code                paper       shape
    params              w           dict of tensors
    climbed             w~          dict of tensors
    perturbation        rho
    gradient_share      beta
    direction           Delta^t     dict of tensors

Readings and deviations
    1. ||g|| is the norm over all parameters together, without a small constant under the fraction: where it is 0, w~ is
       w. Weight decay and momentum of the run's optimizer are no part of g; they see the gradient at w~, and w.
    2. g / ||g|| is a constant of the second gradient, as in SAM. The two passes have the same dropout masks.
    3. Running statistics of batch normalisation are updated once a step, by the pass at w, which is the model that goes
       on. The authors' code and FL-Simulator update them in both passes.
    4. Delta is no part of the climb. The readings of FedCM hold for MoFedSAM.
    5. The learning rate of the server in MoFedSAM is that of FedCM here, 1 for the mean of the models.

Where popular code differs
    FL-Simulator clips the gradient of the step at norm 10, and adds 1e-7 to ||g||.

Run it
    fedcli run fedsam --dataset digits
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import LocalLoss, Network, Params, gradient, quotient, tree_map
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines import fedavg, fedcm
from fedcli.papers.baselines.fedavg import ServerState, aggregate, init
from fedcli.papers.baselines.fedcm import Context, linear_term

RADII = (0.01, 0.05, 0.1, 0.5)  # the grid of rho


@dataclass(frozen=True)
class Config:
    """What FedSAM adds to FedAvg."""

    perturbation: float = option(0.1, "Radius of the climb", symbol="ρ", low=0, off=0, tune=RADII)


@dataclass(frozen=True)
class MomentumConfig:
    """What MoFedSAM adds to FedAvg."""

    perturbation: float = option(0.1, "Radius of the climb", symbol="ρ", low=0, off=0, tune=RADII)
    gradient_share: float = option(
        0.1, "Share of a client's own gradient in its step", symbol="β", low=0, open_low=True, high=1, off=1,
        tune=(0.05, 0.1, 0.3, 0.5),
    )  # fmt: skip
    server_lr: float = option(1.0, "Server's step along the mean change", symbol="η_g", low=0, open_low=True)


def norm(grads: Params) -> Tensor:
    """||g||, over all parameters together; a scalar."""
    return torch.stack([value.square().sum() for value in grads.values()]).sum().sqrt()


def climb(params: Params, grads: Params, perturbation: float) -> Params:
    """w~ = w + rho g / ||g||, and w where g is 0.

    Args:
        params: w, of one client.
        grads: g, constants.
        perturbation: rho.
    """
    scale = quotient(perturbation, norm(grads))
    return tree_map(lambda w, g: w + scale * g, params, grads)


def make_local_loss(network: Network, config: Config | MomentumConfig) -> LocalLoss:
    """The local objective at w~, f_i(w + rho g / ||g||), whose gradient with respect to w is grad f_i(w~)."""
    task = fedavg.make_local_loss(network)

    def local_loss(params, buffers, batch, context):
        grads, aux = gradient(lambda w: task(w, buffers, batch, None), params)
        loss, _ = task(climb(params, grads, config.perturbation), buffers, batch, None)
        return loss, aux.with_term("climbed", loss)  # Reading 3: the buffers of the pass at w

    return local_loss


def make_momentum_loss(network: Network, config: MomentumConfig) -> LocalLoss:
    """The local objective of MoFedSAM, beta f_i(w~) + (1 - beta) <w, Delta>."""
    climbed_loss = make_local_loss(network, config)

    def local_loss(params, buffers, batch, context):
        loss, aux = climbed_loss(params, buffers, batch, None)
        linear = linear_term(params, context.direction)
        mixed = config.gradient_share * loss + (1 - config.gradient_share) * linear
        return mixed, aux.with_term("momentum", linear)

    return local_loss


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """FedSAM, one round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network, config))
    return aggregate(state, clients, cohort, fed, config), terms


def run_momentum_round(
    state: fedcm.ServerState, cohort: Cohort, fed: Federation, config: MomentumConfig
) -> tuple[fedcm.ServerState, Terms]:
    """MoFedSAM, one round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    context = Context(fed.download(state.direction, cohort))
    clients, terms = fed.train(clients, cohort, make_momentum_loss(fed.network, config), context)
    return fedcm.aggregate(state, clients, cohort, fed, config), terms


METHOD = Method(
    name="fedsam",
    title="FedSAM: sharpness-aware minimization in the clients",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"perturbation": 0.0}),
    state_types=(ServerState,),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 2 * sizes.parameters,  # w and w~
)  # fmt: skip

METHODS = (
    Method(
        name="mofedsam",
        title="MoFedSAM: FedSAM with the momentum of FedCM",
        config=MomentumConfig, init=fedcm.init, run_round=run_momentum_round,
        reduces_to=("fedcm", {"perturbation": 0.0}),
        state_types=(fedcm.ServerState,),
        costs=fedcm.costs,
        optimizers=("sgd",),
        default_protocol="fedfm:niid-1",
        client_memory=lambda sizes: 3 * sizes.parameters,  # w, w~ and Delta
    ),
)  # fmt: skip
