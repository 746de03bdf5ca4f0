"""Clients that learn from each other on public images, by exchanging what their models give for them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fedcli.core.batches import Batch
from fedcli.core.clients import Aux, Client, LocalLoss, Step, Terms
from fedcli.core.federation import Federation
from fedcli.core.network import Network
from fedcli.core.population import Cohort
from fedcli.core.trees import tree_map


def make_public_loss(network: Network, term: str, distance: Callable[[Tensor, Any], Tensor]) -> LocalLoss:
    """Makes the objective on a public batch: a distance of its logits from the context, `term` in the record."""

    def local_loss(params, buffers, batch, target):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = distance(logits, target)
        return loss, Aux(buffers, {term: loss}, features)

    return local_loss


def all_logits(models: list[Client], cohort: Cohort, fed: Federation, x: Tensor, train: bool = True) -> Tensor:
    """Returns the logits `[K, B, C]` of every client for a public batch, in the cohort's order."""
    groups = fed.groups(cohort)
    outputs = [fed.forward(model, group, x, train).logits for model, group in zip(models, groups, strict=True)]
    return fed.in_order(cohort, groups, outputs)


def exchange_logits(models: list[Client], cohort: Cohort, fed: Federation, x: Tensor, train: bool = True) -> Tensor:
    """Returns the mean logits `[B, C]` of all clients for a public batch: communicate, aggregate and distribute."""
    logits = fed.upload(all_logits(models, cohort, fed, x, train))
    return fed.download(logits.mean(0), cohort)


def learn_from_public(  # noqa: PLR0913  # what a method file writes, most of it by keyword
    models: list[Client], steps: list[Step], exchange: Callable[[list[Client], Batch], Any], cohort: Cohort,
    fed: Federation, epochs: Iterable[int], axes: int | None = None, keep_optimizer: bool = True,
) -> tuple[list[Client], Terms]:  # fmt: skip
    """Takes a step of every client on each public batch, by what all have exchanged about it before.

    Args:
        models: The clients' models by network, stacked.
        steps: A local step for each network.
        exchange: From the models and a batch to the context of the steps; None leaves the batch out.
        cohort: The clients of the round.
        fed: The federation.
        epochs: Passes over the public images, each a number that keys its draws.
        axes: None where all clients are given the same context, 0 where it is stacked in the cohort's order.
        keep_optimizer: Whether an optimizer's state is carried on to the next batch.

    Returns:
        The models, and each term's mean over the batches, `[K]`.
    """
    groups = fed.groups(cohort)
    models = list(models)
    terms = []  # of each batch
    for epoch in epochs:
        for batch in fed.public_batches(cohort.round, epoch):
            context = exchange(models, batch)
            if context is None:
                continue
            group_terms = []
            for g, (group, step) in enumerate(zip(groups, steps, strict=True)):
                model = models[g] if keep_optimizer else models[g]._replace(optimizer={})
                group_context = context if axes is None else fed.of_group(context, cohort, group)
                models[g], aux = fed.step(model, group, step, batch, group_context, axes)
                group_terms.append(aux.terms)
            terms.append(fed.in_order(cohort, groups, group_terms))
    means = tree_map(lambda *values: torch.stack(values).mean(0), *terms) if terms else {}
    return models, means
