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

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcli import Method, UserError, option
from fedcli.core import Aux, Batch, Client, LocalLoss, Network, Step, select, tree_map, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedavg import make_local_loss
from fedcli.papers.baselines.local import ClientState, ServerState, own_models, train_own_models


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


def digest_loss(logits: Tensor, consensus: Tensor) -> Tensor:
    """Mean absolute difference of the scores `[B, C]` from the mean scores `[B, C]`; scalar."""
    return (logits - consensus).abs().mean()


def make_public_loss(network: Network, term: str, distance: Callable[[Tensor, Any], Tensor]) -> LocalLoss:
    """The objective on a public batch: a distance of its logits from the context, which enters the record as `term`."""

    def local_loss(params, buffers, batch, target):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = distance(logits, target)
        return loss, Aux(buffers, {term: loss}, features)

    return local_loss


def all_logits(models: list[Client], cohort: Cohort, fed: Federation, x: Tensor, train: bool = True) -> Tensor:
    """Logits `[K, B, C]` of every client for a public batch, in the cohort's order."""
    groups = fed.groups(cohort)
    outputs = [fed.forward(model, group, x, train).logits for model, group in zip(models, groups, strict=True)]
    return fed.in_order(cohort, groups, outputs)


def exchange_logits(models: list[Client], cohort: Cohort, fed: Federation, x: Tensor, train: bool = True) -> Tensor:
    """The mean logits `[B, C]` of all clients for a public batch: communicate, aggregate and distribute."""
    logits = fed.upload(all_logits(models, cohort, fed, x, train))
    return fed.download(logits.mean(0), cohort)


def learn_from_public(
    models: list[Client], steps: list[Step], exchange: Callable[[list[Client], Batch], Any], cohort: Cohort,
    fed: Federation, epochs: Iterable[int], axes: int | None = None, keep_optimizer: bool = True,
) -> tuple[list[Client], Terms]:  # fmt: skip
    """Every client steps on each public batch, by what all have exchanged about it before.

    Args:
        models: The clients' models by network, stacked.
        steps: A local step for each network.
        exchange: From the models and a batch to the context of the steps; None leaves the batch out.
        cohort: All clients.
        fed: The federation.
        epochs: Passes over the public images, each a number that keys its draws.
        axes: None where all clients are given the same context, 0 where it is stacked in the cohort's order.
        keep_optimizer: Whether an optimizer's state is carried on to the next batch.

    Returns:
        The models, and each term's mean over the batches, `[K]`.
    """
    groups, terms = fed.groups(cohort), []
    rows = [np.isin(cohort.client_ids, group.client_ids) for group in groups]
    for epoch in epochs:
        for batch in fed.public_batches(cohort.round, epoch):
            context = exchange(models, batch)
            if context is None:
                continue
            models = models if keep_optimizer else [model._replace(optimizer={}) for model in models]
            contexts = [context if axes is None else select(context, row) for row in rows]
            parts = zip(models, groups, steps, contexts, strict=True)
            stepped = [fed.step(model, group, step, batch, context, axes) for model, group, step, context in parts]
            models = [model for model, _ in stepped]
            terms.append(fed.in_order(cohort, groups, [aux.terms for _, aux in stepped]))
    return models, tree_map(lambda *values: torch.stack(values).mean(0), *terms) if terms else {}


def digest(models: list[Client], cohort: Cohort, fed: Federation, config: Config) -> tuple[list[Client], Terms]:
    """Every client trains towards the mean scores; returns the models and the mean loss of each client, `[K]`."""
    losses = [make_public_loss(group.network, "digest", digest_loss) for group in fed.groups(cohort)]
    steps = [fed.optimizer_step(loss, weight_decay=0.0, key="public") for loss in losses]  # Reading 4
    if config.exchange == "batch":

        def exchange(models: list[Client], batch: Batch) -> Tensor:
            return exchange_logits(models, cohort, fed, batch.x)

        return learn_from_public(
            models, steps, exchange, cohort, fed, range(config.digest_epochs), keep_optimizer=False
        )
    batches = fed.public_batches(cohort.round)
    consensus = cycle([exchange_logits(models, cohort, fed, batch.x, train=False) for batch in batches])
    passes = [0] * config.digest_epochs  # of one order and one augmentation, Reading 3
    return learn_from_public(models, steps, lambda models, batch: next(consensus), cohort, fed, passes)


def cosine_annealing(lr: float, step: int, steps: int) -> float:
    """The learning rate of a step, from `lr` down towards 0."""
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


def train_newcomers(
    states: Mapping[int, Any], cohort: Cohort, fed: Federation, epochs: int, cosine: bool = False
) -> Iterator[tuple[Cohort, Client]]:
    """Clients without a state, of one network at a time, and their models after `epochs` on their own data.

    With `cosine` the learning rate falls to 0 along a cosine, without weight decay; else it is the run's optimizer.
    """
    newcomers = [client for client in cohort.client_ids if int(client) not in states]
    first = fed.local_epochs  # the epochs before have the draws of the round itself
    for group in fed.groups(fed.cohort_of(cohort.round, newcomers)) if newcomers else []:
        model, loss = own_models({}, group, fed), make_local_loss(group.network)
        if not cosine:
            model, _ = fed.train(model, group, loss, epochs=range(first, first + epochs))
        for epoch in range(epochs if cosine else 0):
            rate = cosine_annealing(fed.lr(cohort.round), epoch, epochs)
            step = fed.optimizer_step(loss, lr=rate, weight_decay=0.0)
            model, _ = fed.train(model, group, step, epochs=range(first + epoch, first + epoch + 1))
        yield group, model


def averaged(clients: Client, cohort: Cohort, fed: Federation) -> Client:
    """The clients with the plain mean of their parameters and buffers in the place of their own."""
    uniform = torch.ones(len(cohort.client_ids), device=fed.device)
    return fed.broadcast(*weighted_mean(fed.upload_model(clients), uniform), cohort)


def refuse_mixed_average(fed: Federation) -> None:
    """Refuses to average parameters where clients have different networks."""
    if len(fed.networks) > 1:
        raise UserError(
            f"--average-parameters needs one network for all clients (got --backbone {','.join(fed.backbones)}); "
            "name one of them, or leave the option out."
        )


def init(fed: Federation, config: Config) -> ServerState:
    """Nobody has trained yet."""
    if config.average_parameters:
        refuse_mixed_average(fed)
    return ServerState({})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round of its loop."""
    states, terms = state.clients, {}
    if config.pretrain_epochs:  # Reading 1
        for group, model in train_newcomers(states, cohort, fed, config.pretrain_epochs):
            states = fed.remember(states, group, ClientState(model.params, model.buffers))
    models = [own_models(states, group, fed) for group in fed.groups(cohort)]
    if config.digest_epochs:
        models, terms = digest(models, cohort, fed, config)
    if config.average_parameters:  # Reading 6
        models = [averaged(models[0], cohort, fed)]
    states, revisited = train_own_models(models, states, cohort, fed)  # Revisit
    return ServerState(states), {**terms, **revisited}


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[int, int]:
    """Scores of the public images both ways, once or in every pass; and the model where it is averaged."""
    passes = config.digest_epochs if config.exchange == "batch" else min(config.digest_epochs, 1)
    scores = passes * len(fed.public_images) * fed.num_classes
    total = len(cohort.client_ids) * (scores + config.average_parameters * fed.sizes.parameters)
    return total, total


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
