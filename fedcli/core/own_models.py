"""Clients that keep models of their own from round to round, and may have different networks."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fedcli.core.aggregate import weighted_mean
from fedcli.core.clients import Client, Params, Terms, cosine_annealing, plain_loss
from fedcli.core.federation import Federation
from fedcli.core.population import Cohort
from fedcli.errors import UserError


class ClientState(NamedTuple):
    """What a client keeps between rounds where that is a model of its own."""

    params: Params  # its own model
    buffers: Params


def own_models(states: Mapping[int, Any], group: Cohort, fed: Federation) -> Client:
    """Returns the models of clients with one network, stacked; a newcomer's is the initial one of the network."""
    models = fed.recall(states, group, ClientState(*fed.initial_model(group.network)))
    return Client(models.params, models.buffers, optimizer={})


def train_own_models(
    models: list[Client], states: Mapping[int, ClientState], cohort: Cohort, fed: Federation
) -> tuple[Mapping[int, ClientState], Terms]:
    """Trains the cohort's own models, `models` by network, on their own data; returns the new states and the terms."""
    groups = fed.groups(cohort)
    terms = []
    for model, group in zip(models, groups, strict=True):
        trained, group_terms = fed.train(model._replace(optimizer={}), group, plain_loss(group.network))
        states = fed.remember(states, group, ClientState(trained.params, trained.buffers))
        terms.append(group_terms)
    return states, fed.in_order(cohort, groups, terms)


def train_newcomers(
    states: Mapping[int, Any], cohort: Cohort, fed: Federation, epochs: int, cosine: bool = False
) -> Iterator[tuple[Cohort, Client]]:
    """Yields clients without a state, of one network at a time, and their models after `epochs` on their own data.

    With `cosine` the learning rate falls to 0 along a cosine, without weight decay; else it is the run's optimizer.
    """
    newcomers = [client for client in cohort.client_ids if int(client) not in states]
    if not newcomers:
        return
    first_epoch = fed.local_epochs  # the epochs before have the draws of the round itself
    for group in fed.groups(fed.cohort_of(cohort.round, newcomers)):
        model = own_models({}, group, fed)
        loss = plain_loss(group.network)
        if cosine:
            for number in range(epochs):
                rate = cosine_annealing(fed.lr(cohort.round), number, epochs)
                step = fed.optimizer_step(loss, lr=rate, weight_decay=0.0)
                epoch = first_epoch + number
                model, _ = fed.train(model, group, step, epochs=range(epoch, epoch + 1))
        else:
            model, _ = fed.train(model, group, loss, epochs=range(first_epoch, first_epoch + epochs))
        yield group, model


def averaged_models(clients: Client, cohort: Cohort, fed: Federation) -> Client:
    """Returns the clients with the plain mean of their parameters and buffers in the place of their own."""
    uniform = torch.ones(len(cohort.client_ids), device=fed.device)
    params, buffers = weighted_mean(fed.upload_model(clients), uniform)
    return fed.broadcast(params, buffers, cohort)


def refuse_mixed_average(fed: Federation) -> None:
    """Refuses `--average-parameters` where clients have different networks."""
    if len(fed.networks) > 1:
        raise UserError(
            f"--average-parameters needs one network for all clients (got --backbone {','.join(fed.backbones)}); "
            "name one of them, or leave the option out."
        )
