"""FedMD: clients with different networks teach each other by their mean class scores on public images.

D. Li, J. Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop,
https://arxiv.org/abs/1910.03581. Algorithm 1.

In every round all clients score the public images, the server sends back the mean of their scores, and each client
trains its own network to come near them (digest), then on its own data (revisit). No weights are sent.

Notation
    code                paper           shape
    logits              f_k(x_i^0)      [K, B, C], of a public batch
    consensus           f~(x_i^0)       [B, C] for each public batch
    clients             f_k             of each client that has taken part: its parameters and buffers

Readings and deviations
    1. The public images have no labels here, so the first training on them ("transfer learning") is left out. The one
       on private data that follows is `--pretrain-epochs`, when a client takes part for the first time, by the run's
       optimizer; without it, clients begin at the initial networks. FCCL's first code loads networks that were trained
       so for 40 epochs, by Adam with a constant rate, and FCCL+'s protocols have that.
    2. Scores are logits, and the distance in the digest is their mean absolute difference, over images and classes, as
       in the authors' code. The mean over the clients is plain and each client's own scores are in it.
    3. Scores are taken by the models in evaluation mode, all of them before the first update; all digest epochs have
       the same images in the same order. The code of FCCL+'s authors compares with another form (`--exchange batch`):
       scores are exchanged anew at every public batch, by the models in training mode, before any update by that
       batch, which has an optimizer of its own.
    4. The digest has its own optimizer, of the run's kind and learning rate, without weight decay: it has no labels to
       overfit to. "A few epochs" of revisiting are the run's local epochs.
    5. All public images are used in every round; --public-examples draws the subset once.
    6. `--average-parameters` is FCCL+'s study of equal networks (its Section 4.4): between digest and revisit all
       clients' models, running statistics too, are replaced by their plain mean.

Run it
    fedcli run fedmd --dataset digit-domains
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

from torch import Tensor

from fedcli import Costs, Method, option
from fedcli.core import Batch, Client, ClientState, Step, own_models, train_own_models
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.own_models import average_models, refuse_mixed_average, train_newcomers
from fedcli.core.public_images import exchange_logits, learn_from_public, make_public_loss


@dataclass(frozen=True)
class Config:
    """What FedMD adds to local training."""

    digest_epochs: int = option(
        1, "Passes over the public images in a round, towards the mean scores", source="Algorithm 1", low=0, off=0
    )
    exchange: str = option(
        "round", "When scores are exchanged: once for all public images of a round, or at every batch",
        source="Algorithm 1: round; code of FCCL+: batch", choices=("round", "batch"),
    )  # fmt: skip
    pretrain_epochs: int = option(
        0, "Epochs on its own data before a client's first round", source="Algorithm 1; code of FCCL: 40", low=0, off=0
    )
    average_parameters: bool = option(
        False, "Average the models between digest and revisit, for equal networks", source="FCCL+, Section 4.4"
    )


class ServerState(NamedTuple):
    """The state of the simulation; the server itself keeps nothing."""

    clients: Mapping[int, ClientState]  # of those that have taken part


def digest_loss(logits: Tensor, consensus: Tensor) -> Tensor:
    """Mean absolute difference of the scores `[B, C]` from the mean scores `[B, C]`; scalar."""
    return (logits - consensus).abs().mean()


def digest(models: list[Client], cohort: Cohort, fed: Federation, config: Config) -> tuple[list[Client], Terms]:
    """Every client trains towards the mean scores; returns the models and the mean loss of each client, `[K]`."""
    losses = [make_public_loss(group.network, "digest", digest_loss) for group in fed.groups(cohort)]
    steps = [fed.optimizer_step(loss, weight_decay=0.0, key="public") for loss in losses]  # Reading 4
    if config.exchange == "batch":
        return digest_by_batch(models, steps, cohort, fed, config)
    return digest_by_round(models, steps, cohort, fed, config)


def digest_by_batch(
    models: list[Client], steps: list[Step], cohort: Cohort, fed: Federation, config: Config
) -> tuple[list[Client], Terms]:
    """The digest of FCCL+'s code: scores are exchanged anew at every batch."""

    def exchange(models: list[Client], batch: Batch) -> Tensor:
        return exchange_logits(models, cohort, fed, batch.x)

    passes = range(config.digest_epochs)
    return learn_from_public(models, steps, exchange, cohort, fed, passes, keep_optimizer=False)


def digest_by_round(
    models: list[Client], steps: list[Step], cohort: Cohort, fed: Federation, config: Config
) -> tuple[list[Client], Terms]:
    """The digest of Algorithm 1: scores are exchanged once, for all public images of the round."""
    mean_scores = []  # of each batch
    for batch in fed.public_batches(cohort.round):
        mean_scores.append(exchange_logits(models, cohort, fed, batch.x, train=False))
    scores_of_next_batches = cycle(mean_scores)

    def consensus(models: list[Client], batch: Batch) -> Tensor:  # every pass has the same batches in the same order
        return next(scores_of_next_batches)

    passes = [0] * config.digest_epochs  # of one order and one augmentation, Reading 3
    return learn_from_public(models, steps, consensus, cohort, fed, passes)


def init(fed: Federation, config: Config) -> ServerState:
    """Nobody has trained yet."""
    if config.average_parameters:
        refuse_mixed_average(fed)
    return ServerState({})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round of its loop."""
    states = state.clients
    terms: Terms = {}
    if config.pretrain_epochs:  # Reading 1
        for group, model in train_newcomers(states, cohort, fed, config.pretrain_epochs):
            states = fed.remember(states, group, ClientState(model.params, model.buffers))
    models = [own_models(states, group, fed) for group in fed.groups(cohort)]
    if config.digest_epochs:
        models, terms = digest(models, cohort, fed, config)
    if config.average_parameters:  # Reading 6
        models = average_models(models, cohort, fed)
    states, revisited = train_own_models(models, states, cohort, fed)  # Revisit
    return ServerState(states), {**terms, **revisited}


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """Scores of the public images both ways, once or in every pass; and the model where it is averaged."""
    exchanges = config.digest_epochs if config.exchange == "batch" else min(config.digest_epochs, 1)
    of_client = exchanges * sum(fed.public_batch_sizes) * fed.num_classes
    if config.average_parameters:
        of_client += fed.sizes.parameters
    total = len(cohort.client_ids) * of_client
    return Costs(down=total, up=total)


METHOD = Method(
    name="fedmd",
    title="FedMD: mean class scores on public images",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"digest_epochs": 0, "average_parameters": False, "pretrain_epochs": 0}),
    state_types=(ServerState, ClientState),
    variants={
        "by batch": {"exchange": "batch"}, "averaged": {"average_parameters": True},
        "networks trained before": {"pretrain_epochs": 1},
    },
    costs=costs,
    default_protocol="fccl:digits-4",
    personal=lambda state: state.clients,
    mixed_networks=True, uses_public_data=True,
)  # fmt: skip
