"""What clients learn on public images, by a method and by a plain loop."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedcli.core.batches import Batch
from fedcli.core.clients import Client
from fedcli.core.federation import Cohort, Federation
from fedcli.core.trees import select
from tests.plain_loops import Model, Scores, buffers_of, params_of


def stacked_by_network(fed: Federation, cohort: Cohort, states: dict) -> list[Client]:
    """The cohort's clients as a public phase is given them: stacked by their networks, without optimizer states."""
    clients = []
    for group in fed.groups(cohort):
        params, buffers, *_ = fed.recall(states, group, None)
        clients.append(Client(params, buffers, optimizer={}))
    return clients


def models_of(groups: list[Cohort], clients: list[Client]) -> dict[int, Model]:
    """The model of each client, in its order, out of clients that are stacked by their networks."""
    models = {}
    for group, stacked_clients in zip(groups, clients, strict=True):
        for k, client in enumerate(group.client_ids):
            models[int(client)] = select(Model(stacked_clients.params, stacked_clients.buffers), k)
    return dict(sorted(models.items()))


class PublicPhase(NamedTuple):
    """What clients learn in a round on public images: as a method has it, and what a plain loop needs for it."""

    learn: (
        Callable  # of the method: from stacked clients, their cohort, the federation and options to clients and terms
    )
    # From a client's number, what its model makes of a batch, and what all clients' models do, detached, to the loss
    # and numbers that are kept of it.
    objective: Callable[[int, Scores, list[Scores]], tuple[Tensor, ...]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]  # of parameters
    has_fresh_optimizers: bool = True  # for each batch
    batches: list[Batch] | None = None  # those of the round if None


def exchange_plainly(
    phase: PublicPhase, modules: list[nn.Module], batches: list[Batch]
) -> tuple[dict[int, Model], list[list[float]]]:
    """A public phase by torch.optim: what every client's model makes of a batch, and then a step of each.

    Returns each client's model, and means over the batches of what the objective keeps, each a list over the clients.
    """
    optimizers = [phase.optimizer(module.parameters()) for module in modules]
    kept: list[list] = [[] for _ in modules]
    for batch in batches:
        if phase.has_fresh_optimizers:
            optimizers = [phase.optimizer(module.parameters()) for module in modules]
        scores = [Scores(*module(batch.x)) for module in modules]
        scores_of_all = [Scores(features.detach(), logits.detach()) for features, logits in scores]
        for k, own in enumerate(scores):
            loss, *numbers = phase.objective(k, own, scores_of_all)
            optimizers[k].zero_grad()
            loss.backward()
            optimizers[k].step()
            kept[k].append([number.item() for number in numbers])
    models = {}
    for k, module in enumerate(modules):
        models[k] = Model(params_of(module), buffers_of(module))
    means = torch.tensor(kept).mean(dim=1)  # [K, numbers]
    return models, means.T.tolist()
