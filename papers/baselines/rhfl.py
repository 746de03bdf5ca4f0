"""RHFL: clients align with each other's predictions on public images, each weighted by the confidence in its client.

X. Fang, M. Ye, "Robust Federated Learning with Noisy and Heterogeneous Clients", CVPR 2022;
code: https://github.com/FangXiuwen/Robust_FL.

Made for clients whose labels are partly wrong. A client trains on its own data with the symmetric cross-entropy, which
a wrong label disturbs less, and on public images it brings its predictions near those of the others (HHF):

    L_SL = alpha CE + beta RCE,    RCE = -sum_c p_c log y_c
    L_HHF = sum over the others j of w_j KL(p_j || p)

A client is trusted the more, the faster its loss on its own data falls and the lower it is (CCR).

Notation
    code                    paper           shape
    logits, predictions     f, R_k          [K, B, C], of a public batch
    losses                  L_SL            [K], mean over a client's own data
    weights                 W_k             [K]
    cross_entropy_weight    alpha
    reverse_weight          beta
    confidence_strength     eta

Readings and deviations ("the code" is that of the authors)
    1. Quality and efficiency of a client together are q = (previous - current) / current, its loss of the round before
       and of this one; w = softmax(1 / (K-1) + eta q / sum q). So in the code, with eta = 0.5. The sum can be small or
       negative, and then the order of the weights means little. Where it is 0, all weights are equal.
    2. In the first round, when no client has a previous loss, w = 1 / (K-1), as in the code. A newcomer has q = 0.
    3. The loss is that on a client's training part before the exchange, in evaluation mode; in training mode there.
    4. All predictions of a public batch are taken before any update by it, in training mode. Each batch has a new
       optimizer, of the run's kind and rate, without weight decay. Both as in the code.
    5. In RCE the logarithm of 0 in the one-hot label is taken as log 1e-4, and p is 1e-7 at least, as in the code.
    6. No pre-training: all methods of a comparison begin at the initial networks. The code trains max(5000 / n_k, 1)
       epochs of its own data in a round; here these are the run's local epochs.

Run it
    fedcli run rhfl --dataset digit-domains
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import Costs, Method, option
from fedcli.core import (
    Aux,
    Batch,
    Buffers,
    Client,
    LocalLoss,
    Network,
    Params,
    cross_entropy,
    masked_mean,
    model_of,
    personal_models,
    quotient,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.public_images import all_logits, learn_from_public, make_public_loss

LEAST_PROBABILITY = 1e-7
LOG_ZERO = math.log(1e-4)


@dataclass(frozen=True)
class Config:
    """What RHFL adds to local training."""

    cross_entropy_weight: float = option(0.1, "Weight of cross-entropy in the local loss", symbol="α", low=0)
    reverse_weight: float = option(1.0, "Weight of reverse cross-entropy in the local loss", symbol="β", low=0, off=0)
    confidence_strength: float = option(
        0.5, "How much confidence in a client counts in its weight", symbol="η", low=0, off=0
    )
    public_epochs: int = option(1, "Passes over the public images in a round", low=0, off=0)


class Others(NamedTuple):
    """What a client is given for a public batch, with axes 0."""

    predictions: Tensor  # [K-1, B, C], of all other clients
    weights: Tensor  # [K-1]


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # its own model
    buffers: Buffers
    loss: Tensor  # scalar, of its model on its own data at the beginning of its last round


class ServerState(NamedTuple):
    """The state of the simulation; the server itself keeps nothing."""

    clients: Mapping[int, ClientState]  # of those that have taken part


def symmetric_cross_entropy(logits: Tensor, labels: Tensor, config: Config, mask: Tensor | None = None) -> Tensor:
    """L_SL, mean over samples; a scalar, in nats.

    Args:
        logits: `[B, C]`.
        labels: `[B]`.
        config: The method's.
        mask: `[B]`, False for padding.
    """
    wrong = labels[:, None] != torch.arange(logits.shape[-1], device=labels.device)  # [B, C]
    probability = logits.softmax(-1).clamp(min=LEAST_PROBABILITY)
    reverse = masked_mean(-LOG_ZERO * torch.where(wrong, probability, 0.0).sum(-1), mask)
    return config.cross_entropy_weight * cross_entropy(logits, labels, mask) + config.reverse_weight * reverse


def confidence_weights(previous: Tensor, current: Tensor, has_previous: Tensor, strength: float) -> Tensor:
    """CCR: the weights of the clients; w, `[K]`.

    Args:
        previous: Their losses at the beginning of their last round, `[K]`.
        current: Their losses now, `[K]`, not negative.
        has_previous: `[K]`, bool; the others have q = 0.
        strength: eta.
    """
    base = torch.full_like(current, 1 / max(len(current) - 1, 1))
    if not has_previous.any():
        return base
    quality = torch.where(has_previous, quotient(previous - current, current), 0.0)
    total = quality.sum()
    share = torch.where(total != 0, quality / torch.where(total != 0, total, 1.0), 0.0)
    return torch.softmax(base + strength * share, 0)


def alignment(logits: Tensor, others: Others) -> Tensor:
    """L_HHF: sum over the others of w_j KL(p_j || p), mean over images; a scalar, in nats.

    Args:
        logits: `[B, C]`.
        others: Of one client.
    """
    divergences = F.kl_div(F.log_softmax(logits, -1), others.predictions, reduction="none").sum(-1).mean(-1)  # [K-1]
    return (others.weights * divergences).sum()


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The objective on a client's own data, L_SL."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = symmetric_cross_entropy(logits, batch.y, config, batch.mask)
        return loss, Aux(buffers, {"symmetric_cross_entropy": loss}, features)

    return local_loss


def own_losses(models: list[Client], cohort: Cohort, fed: Federation, config: Config) -> Tensor:
    """L_SL of every client's model on its training part, `[K]`; 0 for a client without examples."""
    groups = fed.groups(cohort)
    losses = []
    for models_of_group, group in zip(models, groups, strict=True):
        of_group = torch.zeros(len(group.client_ids), dtype=fed.dtype, device=fed.device)
        for k, client in enumerate(group.client_ids):
            examples = fed.training[client]
            if len(examples) == 0:
                continue
            model = model_of(models_of_group, k)
            predicted = fed.predict(model.params, model.buffers, examples, group.network)
            of_group[k] = symmetric_cross_entropy(predicted.logits, predicted.labels, config)
        losses.append(of_group)
    return fed.in_order(cohort, groups, losses)


def align(
    models: list[Client], weights: Tensor, cohort: Cohort, fed: Federation, config: Config
) -> tuple[list[Client], Terms]:
    """The public phase; returns the models and each client's mean loss, `[K]`."""
    places = torch.arange(len(cohort.client_ids), device=fed.device)
    others = torch.stack([places[places != k] for k in places])  # [K, K-1]
    weights_of_others = fed.download_each(weights[others])
    steps = []
    for group in fed.groups(cohort):
        loss = make_public_loss(group.network, "alignment", alignment)
        steps.append(fed.optimizer_step(loss, weight_decay=0.0, key="public"))

    def exchange(models: list[Client], batch: Batch) -> Others:
        logits = fed.upload(all_logits(models, cohort, fed, batch.x))
        predictions = fed.download_each(logits.softmax(-1)[others])
        return Others(predictions, weights_of_others)

    epochs = range(config.public_epochs)
    return learn_from_public(models, steps, exchange, cohort, fed, epochs, axes=0, keep_optimizer=False)  # Reading 4


def init(fed: Federation, config: Config) -> ServerState:
    """Nobody has trained yet."""
    return ServerState({})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One communication epoch: CCR, alignment on the public images, local training."""
    states = state.clients
    groups = fed.groups(cohort)
    no_loss = torch.zeros((), dtype=fed.dtype, device=fed.device)
    last = []  # what the clients with each network have kept
    for group in groups:
        params, buffers = fed.initial_model(group.network)
        newcomer = ClientState(params, buffers, no_loss)
        last.append(fed.recall(states, group, newcomer))
    models = [Client(own.params, own.buffers) for own in last]
    terms: Terms = {}
    losses = torch.zeros_like(cohort.weights)
    if config.public_epochs and len(cohort.client_ids) > 1:
        losses = fed.upload(own_losses(models, cohort, fed, config))
        previous = fed.in_order(cohort, groups, [own.loss for own in last])
        has_previous = torch.tensor([int(client) in states for client in cohort.client_ids], device=fed.device)
        weights = confidence_weights(previous, losses, has_previous, config.confidence_strength)  # CCR
        models, terms = align(models, weights, cohort, fed, config)
    all_terms = []
    for model, group in zip(models, groups, strict=True):
        model, group_terms = fed.train(model._replace(optimizer={}), group, make_local_loss(group.network, config))
        loss = fed.of_group(losses, cohort, group)
        states = fed.remember(states, group, ClientState(model.params, model.buffers, loss))
        all_terms.append(group_terms)
    return ServerState(states), {**terms, **fed.in_order(cohort, groups, all_terms)}


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """A client's predictions for the public images and its loss up, those of all others and their weights down."""
    size = len(cohort.client_ids)
    if size == 1 or not config.public_epochs:
        return Costs(down=0, up=0)
    sent = config.public_epochs * sum(fed.public_batch_sizes) * fed.num_classes + 1
    return Costs(down=size * (size - 1) * sent, up=size * sent)


METHOD = Method(
    name="rhfl",
    title="RHFL: alignment on public images by confidence, and a loss that minds wrong labels less",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"cross_entropy_weight": 1.0, "reverse_weight": 0.0, "public_epochs": 0}),
    state_types=(ServerState, ClientState),
    costs=costs,
    default_protocol="fccl:digits-4",
    personal=personal_models,
    mixed_networks=True, uses_public_data=True,
)  # fmt: skip
