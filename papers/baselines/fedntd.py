"""FedNTD: distil from the received model what it says of the classes that are not the label's.

G. Lee, M. Jeong, Y. Shin, S. Bae, S.-Y. Yun, "Preservation of the Global Knowledge by Not-True Distillation in
Federated Learning", NeurIPS 2022, https://arxiv.org/abs/2106.03097. Its local objective; all else is FedAvg.

A client that trains forgets the classes that it lacks. For each sample, the softmaxes of its own and of the received
model over the C - 1 classes that are not the sample's are held together:

    L = CE(z, y) + beta tau^2 sum_{c != y} q~_g(c) log( q~_g(c) / q~(c) ),    q~ = softmax over c != y of z / tau,

with the mean over samples.

Notation
    code                 paper       shape
    logits               z           [B, C]
    global_logits        z_g         [B, C]
    distillation_weight  beta
    temperature          tau

Readings and deviations
    1. beta = tau = 1, the authors' configuration; their class has tau = 3 of its own.
    2. tau^2 stands before the divergence, as in the authors' code.
    3. The received model runs in evaluation mode, so with its running statistics, and is a constant of the loss. The
       authors' code leaves its copy in the mode in which it was copied.
    4. With two classes one class is left: the term is 0.

Run it
    fedcli run fedntd --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import Aux, Buffers, LocalLoss, Network, Params, cross_entropy, masked_mean
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedavg import ServerState, aggregate, init

LOGIT_OF_LABEL = -1e4  # in place of the label's logit: its share is exactly 0, without an infinity


@dataclass(frozen=True)
class Config:
    """What FedNTD adds to FedAvg."""

    distillation_weight: float = option(
        1.0, "Weight of the distillation", symbol="β", low=0, off=0, tune=(0.1, 0.3, 1.0, 3.0)
    )
    temperature: float = option(1.0, "Temperature of both softmaxes", symbol="τ", low=0, open_low=True)


class Context(NamedTuple):
    """What a client is given for a round; all clients share it."""

    global_params: Params  # the received model
    global_buffers: Buffers


def not_true_log_shares(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """log q~: the log-softmax over the classes that are not the label's, `[B, C]`; about -1e4 at the label.

    Args:
        logits: z, `[B, C]`.
        labels: `[B]`.
        temperature: tau, positive.
    """
    is_label = labels[:, None] == torch.arange(logits.shape[1], device=logits.device)  # [B, C]
    return torch.where(is_label, LOGIT_OF_LABEL, logits / temperature).log_softmax(1)


def not_true_distillation(
    logits: Tensor, global_logits: Tensor, labels: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """tau^2 KL(q~_g || q~), the mean over samples; a scalar, in nats.

    Args:
        logits: z of the client, `[B, C]`.
        global_logits: z_g of the received model, `[B, C]`.
        labels: `[B]`.
        temperature: tau, positive.
        mask: `[B]`, False for padding.
    """
    log_shares = not_true_log_shares(logits, labels, temperature)
    global_log_shares = not_true_log_shares(global_logits, labels, temperature)
    divergence = (global_log_shares.exp() * (global_log_shares - log_shares)).sum(1)  # [B]
    return temperature**2 * masked_mean(divergence, mask)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective, CE + beta L_NTD."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        received = network(context.global_params, context.global_buffers, batch.x, batch.mask, train=False)
        task = cross_entropy(logits, batch.y, batch.mask)
        distillation = not_true_distillation(logits, received.logits.detach(), batch.y, config.temperature, batch.mask)
        terms = {"cross_entropy": task, "distillation": distillation}
        return task + config.distillation_weight * distillation, Aux(buffers, terms, features)

    return local_loss


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """A round of FedAvg with the distillation."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    context = Context(state.params, state.buffers)  # the received model a second time; nothing more is sent
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network, config), context)
    return aggregate(state, clients, cohort, fed, config), terms


METHOD = Method(
    name="fedntd",
    title="FedNTD: not-true distillation",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"distillation_weight": 0.0}),
    state_types=(ServerState,),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 2 * sizes.parameters,  # the local model and the received one
)  # fmt: skip
