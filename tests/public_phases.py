"""Phases in which clients learn on public images, and a plain loop that does the same."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedcli.core.batches import Batch
from fedcli.core.clients import Client
from fedcli.core.federation import Cohort, Federation
from fedcli.core.trees import select
from tests.plain_loops import Model, Scores, model_of


def stacked_by_network(fed: Federation, cohort: Cohort, states: dict) -> list[Client]:
    """Returns the clients of a cohort as a public phase is given them: stacked by network, without optimizer states."""
    clients = []
    for group in fed.groups(cohort):
        params, buffers, *_ = fed.recall(states, group, None)
        clients.append(Client(params, buffers, optimizer={}))
    return clients


def models_of(groups: list[Cohort], clients: list[Client]) -> dict[int, Model]:
    """Returns the model of each client, in the order of the clients, out of those that are stacked by network."""
    models = {}
    for group, stacked_clients in zip(groups, clients, strict=True):
        for k, client in enumerate(group.client_ids):
            models[int(client)] = select(Model(stacked_clients.params, stacked_clients.buffers), k)
    return dict(sorted(models.items()))


class PublicPhase(NamedTuple):
    """What clients learn on public images in a round, by a method, and what a plain loop needs to do the same."""

    # Of the method: from clients that are stacked by network, their cohort, the federation and options of the method to
    # these clients and terms.
    learn: Callable
    # From the index of a client, the scores of its model and those of all clients' models, detached, to the loss and
    # further numbers.
    objective: Callable[[int, Scores, list[Scores]], tuple[Tensor, ...]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]  # of the parameters of a client
    has_fresh_optimizers: bool = True  # whether each batch begins with new optimizers
    batches: list[Batch] | None = None  # those of the round if None


class LearntPlainly(NamedTuple):
    """What clients have learnt in a plain loop."""

    models: dict[int, Model]  # by client
    means: list[list[float]]  # over the batches, of each further number of the objective, a list over the clients


def learn_plainly(phase: PublicPhase, modules: list[nn.Module], batches: list[Batch]) -> LearntPlainly:
    """Does a public phase by `torch.optim`: for each batch the scores of all clients' models, then a step of each."""
    optimizers = [phase.optimizer(module.parameters()) for module in modules]
    numbers_of_clients: list[list] = [[] for _ in modules]
    for batch in batches:
        if phase.has_fresh_optimizers:
            optimizers = [phase.optimizer(module.parameters()) for module in modules]
        scores = [Scores(*module(batch.x)) for module in modules]
        scores_of_all = [Scores(features.detach(), logits.detach()) for features, logits in scores]
        for k, scores_of_client in enumerate(scores):
            loss, *numbers = phase.objective(k, scores_of_client, scores_of_all)
            optimizers[k].zero_grad()
            loss.backward()
            optimizers[k].step()
            numbers_of_clients[k].append([number.item() for number in numbers])
    models = {}
    for k, module in enumerate(modules):
        models[k] = model_of(module)
    means = torch.tensor(numbers_of_clients).mean(dim=1)  # [K, numbers]
    return LearntPlainly(models, means.T.tolist())
