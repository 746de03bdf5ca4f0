"""FedMatch, adapted: its inter-client consistency alone, on public images. Do not compare it as FedMatch proper.

W. Jeong, J. Yoon, E. Yang, S. J. Hwang, "Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint
Learning", ICLR 2021, https://arxiv.org/abs/2006.12097.

FedMatch is for clients that have few labels and many unlabelled images of the same kind. FCCL+ compares with it in a
quite different setting, clients with different networks and images that are all labelled, and neither describes nor
publishes what it ran. Of FedMatch's parts one makes sense there: a client's predictions for unlabelled images are to
agree with those of the H clients that respond most like it, its helpers,

    lambda_i * 1/H sum_h KL(p_h || p) + lambda_a * CE(y-hat, p)     where p is confident,

with y-hat the class that most of the client and its helpers predict. So every round here is a pass over the public
images with this loss, then local training on the own labels with cross-entropy.

Notation
    code                    paper           shape
    predictions             p               [K, B, C], of a public batch
    helpers                 the H nearest   [K, H], places in the cohort
    agreed_labels(...)      y-hat           [B]
    consistency_weight      lambda_i        (so called in the code)
    agreement_weight        lambda_a        (so called in the code)
    confidence              tau

What is not here, and readings
    1. No disjoint learning: no split of the weights into sigma and psi, no averaging of either, no sparsity. Networks
       differ, and a client has no unlabelled images of its own.
    2. Helpers' predictions are sent instead of their weights. They are the clients whose predictions for the batch are
       nearest (Euclidean, over all its images and classes), ties to the lower id; the paper has the nearest responses
       to one image of noise, chosen anew every 10 rounds.
    3. All predictions of a batch are taken before any update by it, in training mode. A prediction is confident where
       its largest probability is tau or more; the mean is over those images. Tied votes go to the lower class.
    4. The cross-entropy is of the image as it is; the paper augments it strongly there.
    5. lambda_i = lambda_a = 0.01 are the authors' values, beside 10 for labelled images. Here the two losses have steps
       of their own, by the run's kind of optimizer and rate; with Adam their scale hardly matters.

Run it
    fedcli run fedmatch --dataset digit-domains
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import Costs, Method, option
from fedcli.core import Aux, Batch, Client, ClientState, LocalLoss, Network, masked_mean, own_models, train_own_models
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.public_images import all_logits, learn_from_public


@dataclass(frozen=True)
class Config:
    """What the adaptation of FedMatch adds to local training."""

    consistency_weight: float = option(0.01, "Weight of the divergence from the helpers", symbol="λ_i", low=0, off=0)
    agreement_weight: float = option(0.01, "Weight of the cross-entropy on agreed labels", symbol="λ_a", low=0, off=0)
    helpers: int = option(2, "Helpers of a client", symbol="H", low=1)
    confidence: float = option(0.75, "Least probability of a prediction that counts", symbol="τ", low=0, high=1)
    public_epochs: int = option(1, "Passes over the public images in a round", low=0, off=0)


class ServerState(NamedTuple):
    """The state of the simulation; the server itself keeps nothing."""

    clients: Mapping[int, ClientState]  # of those that have taken part


def find_helpers(predictions: Tensor, client_ids: np.ndarray, count: int) -> Tensor:
    """Places `[K, min(H, K - 1)]` of those whose predictions are nearest to each client's; ties to the lower id.

    Args:
        predictions: `[K, B, C]`.
        client_ids: `[K]`.
        count: H; fewer where there are fewer others.
    """
    by_id = torch.as_tensor(np.argsort(client_ids), device=predictions.device)  # places in order of id
    rows = predictions[by_id].flatten(1)
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    nearest = distances.argsort(dim=1, stable=True)[:, : min(count, len(rows) - 1)]
    helpers = torch.empty_like(nearest)
    helpers[by_id] = by_id[nearest]  # the i-th by id stands at place by_id[i]
    return helpers


def agreed_labels(logits: Tensor, helpers: Tensor) -> Tensor:
    """The class that most of a client and its helpers predict, `[B]`; the lowest where several have most votes.

    Args:
        logits: The client's, `[B, C]`.
        helpers: Predictions `[H, B, C]`.
    """
    classes = torch.arange(logits.shape[-1], device=logits.device)
    choices = torch.cat([logits[None], helpers]).argmax(-1)  # [H + 1, B]
    votes = (choices[..., None] == classes).sum(0)  # [B, C]
    return (votes * len(classes) - classes).argmax(-1)  # no two are equal


def consistency(logits: Tensor, helpers: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The two terms, each the mean over the images on which the client is confident; 0 where there is none.

    Args:
        logits: The client's, `[B, C]`.
        helpers: Predictions `[H, B, C]`.
        config: The method's.

    Returns:
        The divergence from the helpers and the cross-entropy on agreed labels, scalars in nats.
    """
    log_probs = F.log_softmax(logits, -1)
    confident = log_probs.detach().exp().amax(-1) >= config.confidence  # [B]
    divergences = F.kl_div(log_probs, helpers, reduction="none").sum(-1).mean(0)  # [B]
    surprise = F.nll_loss(log_probs, agreed_labels(logits.detach(), helpers), reduction="none")
    return masked_mean(divergences, confident), masked_mean(surprise, confident)


def make_consistency_loss(network: Network, config: Config) -> LocalLoss:
    """The objective on a public batch; its context is the helpers' predictions `[H, B, C]`."""

    def local_loss(params, buffers, batch, helpers):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        divergence, agreement = consistency(logits, helpers, config)
        loss = config.consistency_weight * divergence + config.agreement_weight * agreement
        return loss, Aux(buffers, {"consistency": divergence, "agreement": agreement}, features)

    return local_loss


def agree(models: list[Client], cohort: Cohort, fed: Federation, config: Config) -> tuple[list[Client], Terms]:
    """The public phase; returns the models and the mean of each client's terms, `[K]`."""
    losses = [make_consistency_loss(group.network, config) for group in fed.groups(cohort)]
    steps = [fed.optimizer_step(loss, weight_decay=0.0, key="public") for loss in losses]

    def exchange(models: list[Client], batch: Batch) -> Tensor:
        predictions = fed.upload(all_logits(models, cohort, fed, batch.x)).softmax(-1)
        helpers = find_helpers(predictions, cohort.client_ids, config.helpers)
        return fed.download_each(predictions[helpers])  # [K, H, B, C]

    return learn_from_public(models, steps, exchange, cohort, fed, range(config.public_epochs), axes=0)


def init(fed: Federation, config: Config) -> ServerState:
    """Nobody has trained yet."""
    return ServerState({})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round: agreement on the public images, then local training."""
    models = [own_models(state.clients, group, fed) for group in fed.groups(cohort)]
    terms: Terms = {}
    if config.public_epochs and len(cohort.client_ids) > 1:
        models, terms = agree(models, cohort, fed, config)
    states, trained = train_own_models(models, state.clients, cohort, fed)
    return ServerState(states), {**terms, **trained}


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """A client's predictions for the public images up, those of its helpers down."""
    size = len(cohort.client_ids)
    helpers = min(config.helpers, size - 1)
    predictions = config.public_epochs * sum(fed.public_batch_sizes) * fed.num_classes if helpers else 0
    return Costs(down=size * helpers * predictions, up=size * predictions)


METHOD = Method(
    name="fedmatch",
    title="FedMatch, adapted: its inter-client consistency alone, on public images",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"public_epochs": 0}),
    state_types=(ServerState, ClientState),
    costs=costs,
    default_protocol="fccl:digits-4",
    personal=lambda state: state.clients,
    mixed_networks=True, uses_public_data=True,
)  # fmt: skip
