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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcli import Method, UserError, option
from fedcli.core import Aux, Client, LocalLoss, Network, Params, tree_map, weighted_mean
from fedcli.papers.baselines.fedavg import make_local_loss


@dataclass(frozen=True)
class Config:
    """What FedMD adds to local training."""

    digest_epochs: int = option(
        1, "Passes over the public images in a round, towards the mean scores", source="Algorithm 1", low=0, off=0
    )
    exchange: str = option(
        "round",
        "When scores are exchanged: once for all public images of a round, or at every batch",
        source="Algorithm 1: round; code of FCCL+: batch",
        choices=("round", "batch"),
    )
    pretrain_epochs: int = option(
        0, "Epochs on its own data before a client's first round", source="Algorithm 1; code of FCCL: 40", low=0, off=0
    )
    average_parameters: bool = option(
        False, "Average the models between digest and revisit, for equal networks", source="FCCL+, Section 4.4"
    )


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # its own model
    buffers: Params


class ServerState(NamedTuple):
    """The state of the simulation; the server itself keeps nothing."""

    clients: dict[int, ClientState]  # of those that have taken part


def digest_loss(logits: Tensor, consensus: Tensor) -> Tensor:
    """Mean absolute difference of the scores `[B, C]` from the mean scores `[B, C]`; scalar."""
    return (logits - consensus).abs().mean()


def make_digest_loss(network: Network) -> LocalLoss:
    """The objective of the digest; its context is the consensus on the batch."""

    def local_loss(params, buffers, batch, consensus):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = digest_loss(logits, consensus)
        return loss, Aux(buffers, {"digest": loss}, features)

    return local_loss


def find_consensus(models: list[Client], groups: list, cohort, fed) -> list[Tensor]:
    """The clients' mean scores on each public batch, `[B, C]` each: communicate, aggregate and distribute."""
    consensus = []
    for batch in fed.public_batches(cohort.round):
        scores = [fed.forward(m, g, batch.x, train=False).logits for m, g in zip(models, groups, strict=True)]
        logits = fed.upload(fed.in_order(cohort, groups, scores))  # [K, B, C]
        consensus.append(fed.download(logits.mean(0), cohort))
    return consensus


def digest(
    models: list[Client], consensus: list[Tensor], groups: list, cohort, fed, config: Config
) -> tuple[list[Client], dict[str, Tensor]]:
    """Every client trains towards the consensus; returns the models and the mean loss of each client, `[K]`."""
    steps = [fed.optimizer_step(make_digest_loss(g.network), weight_decay=0.0, key="public") for g in groups]
    found = []
    for _ in range(config.digest_epochs):
        for batch, target in zip(fed.public_batches(cohort.round), consensus, strict=True):
            stepped = [fed.step(m, g, s, batch, target) for m, g, s in zip(models, groups, steps, strict=True)]
            models = [client for client, _ in stepped]
            found.append(fed.in_order(cohort, groups, [aux.terms for _, aux in stepped]))
    return models, tree_map(lambda *values: torch.stack(values).mean(0), *found)


def digest_by_batch(
    models: list[Client], groups: list, cohort, fed, config: Config
) -> tuple[list[Client], dict[str, Tensor]]:
    """The form of FCCL+'s comparison: for every public batch, scores, their mean, and a step (reading 3).

    Returns:
        The models, and the mean loss of each client, `[K]`.
    """
    steps = [fed.optimizer_step(make_digest_loss(g.network), weight_decay=0.0, key="public") for g in groups]
    found = []
    for epoch in range(config.digest_epochs):
        for batch in fed.public_batches(cohort.round, epoch):
            outputs = [fed.forward(m, g, batch.x) for m, g in zip(models, groups, strict=True)]
            scores = fed.upload(fed.in_order(cohort, groups, [output.logits for output in outputs]))  # [K, B, C]
            consensus = fed.download(scores.mean(0), cohort)
            fresh = [model._replace(optimizer={}) for model in models]
            stepped = [fed.step(m, g, s, batch, consensus) for m, g, s in zip(fresh, groups, steps, strict=True)]
            models = [client for client, _ in stepped]
            found.append(fed.in_order(cohort, groups, [aux.terms for _, aux in stepped]))
    return models, tree_map(lambda *values: torch.stack(values).mean(0), *found)


def train_newcomers(
    states: dict[int, Any], cohort, fed, epochs: int, cosine: bool = False
) -> Iterator[tuple[Any, Client]]:
    """Clients that take part for the first time train on their own data, from the initial networks.

    Args:
        states: By client id, of those that have taken part.
        cohort: The clients of the round.
        fed: The federation.
        epochs: How many; the optimizer's state is carried on through them.
        cosine: Let the rate fall to 0 along a cosine, without weight decay; else by the run's optimizer.

    Yields:
        Clients with one network, and their models.
    """
    newcomers = [client for client in cohort.client_ids if int(client) not in states]
    first = fed.config.local_epochs  # the epochs before have the draws of the round itself
    for group in fed.groups(fed.cohort_of(cohort.round, newcomers)) if newcomers else []:
        model = Client(*fed.recall({}, group, fed.initial_model(group.network)), optimizer={})
        step = make_local_loss(group.network)
        if not cosine:
            model, _ = fed.train(model, group, step, epochs=range(first, first + epochs))
        for epoch in range(epochs if cosine else 0):
            rate = fed.lr(cohort.round) * (1 + math.cos(math.pi * epoch / epochs)) / 2
            slower = fed.optimizer_step(step, lr=rate, weight_decay=0.0)
            model, _ = fed.train(model, group, slower, epochs=range(first + epoch, first + epoch + 1))
        yield group, model


def averaged(clients: Client, cohort, fed) -> Client:
    """The clients with the plain mean of their parameters and buffers in the place of their own."""
    uniform = torch.ones(len(cohort.client_ids), device=fed.device)
    return fed.broadcast(*weighted_mean(fed.upload_model(clients), uniform), cohort)


def refuse_mixed_average(fed) -> None:
    """Refuses to average parameters of different networks.

    Raises:
        UserError: If the clients have different ones.
    """
    if len(fed.networks) > 1:
        raise UserError(
            f"--average-parameters needs one network for all clients (got --backbone {fed.config.backbone}); "
            "name one of them, or leave the option out."
        )


def init(fed, config: Config) -> ServerState:
    """Nobody has trained yet."""
    if config.average_parameters:
        refuse_mixed_average(fed)
    return ServerState({})


def run_round(state: ServerState, cohort, fed, config: Config) -> tuple[ServerState, dict[str, Tensor]]:
    """Algorithm 1, one round of its loop."""
    states, groups, terms, found = state.clients, fed.groups(cohort), {}, []
    if config.pretrain_epochs:  # Reading 1
        for group, model in train_newcomers(states, cohort, fed, config.pretrain_epochs):
            states = fed.remember(states, group, ClientState(model.params, model.buffers))
    own = [fed.recall(states, group, ClientState(*fed.initial_model(group.network))) for group in groups]
    models = [Client(model.params, model.buffers, optimizer={}) for model in own]
    if config.digest_epochs and config.exchange == "batch":
        models, terms = digest_by_batch(models, groups, cohort, fed, config)
    elif config.digest_epochs:
        consensus = find_consensus(models, groups, cohort, fed)  # Communicate, Aggregate, Distribute
        models, terms = digest(models, consensus, groups, cohort, fed, config)  # Digest
    if config.average_parameters:
        models = [averaged(models[0], cohort, fed)]
    for model, group in zip(models, groups, strict=True):  # Revisit
        local_loss = make_local_loss(group.network)
        trained, group_terms = fed.train(model._replace(optimizer={}), group, local_loss)
        states = fed.remember(states, group, ClientState(trained.params, trained.buffers))
        found.append(group_terms)
    return ServerState(states), {**terms, **fed.in_order(cohort, groups, found)}


def costs(state: ServerState, cohort, fed, config: Config) -> tuple[int, int]:
    """Scores of the public images both ways, once or in every pass; and the model where it is averaged."""
    passes = config.digest_epochs if config.exchange == "batch" else min(config.digest_epochs, 1)
    scores = passes * len(fed.public_images) * fed.num_classes
    total = len(cohort.client_ids) * (scores + config.average_parameters * fed.sizes.parameters)
    return total, total


METHOD = Method(
    name="fedmd",
    title="FedMD: mean class scores on public images",
    config=Config,
    init=init,
    run_round=run_round,
    reduces_to=("local", {"digest_epochs": 0, "average_parameters": False, "pretrain_epochs": 0}),
    state_types=(ServerState, ClientState),
    variants={
        "by batch": {"exchange": "batch"},
        "averaged": {"average_parameters": True},
        "networks trained before": {"pretrain_epochs": 1},
    },
    costs=costs,
    default_protocol="fccl:digits-4",
    personal=lambda state: state.clients,
    mixed_networks=True,
    uses_public_data=True,
)
