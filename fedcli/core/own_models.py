"""Clients that keep models of their own from round to round, and may have different networks."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fedcli.core.aggregate import weighted_mean
from fedcli.core.clients import Buffers, Client, Model, Params, Terms
from fedcli.core.federation import Federation
from fedcli.core.objectives import plain_loss
from fedcli.core.population import Cohort
from fedcli.errors import UserError


class ClientState(NamedTuple):
    """What a client keeps between rounds where that is a model of its own."""

    params: Params  # its own model
    buffers: Buffers


def own_models(states: Mapping[int, Any], group: Cohort, fed: Federation) -> Client:
    """Returns the models of clients with one network, stacked; a newcomer's is the initial one of the network."""
    models = fed.recall(states, group, ClientState(*fed.initial_model(group.network)))
    return Client(models.params, models.buffers)


def personal_models(state: Any) -> dict[int, Model]:
    """Returns each client's own model, `params` and `buffers` of what it keeps in `state.clients`."""
    return {client: Model(kept.params, kept.buffers) for client, kept in state.clients.items()}


class GroupRound(NamedTuple):
    """What local training gives of the clients with one network, stacked, `[K, ...]`."""

    states: Any  # what each client keeps until its next round
    sent: Any  # what the server takes from each
    terms: Terms


class CohortRound(NamedTuple):
    """What local training gives of all clients of a round."""

    states: Mapping[int, Any]  # of clients, by id, also of those that did not take part
    sent: Any  # what the server takes from each, stacked in the cohort's order, `[K, ...]`
    terms: Terms


def train_by_network(
    train_group: Callable[[Cohort], GroupRound], states: Mapping[int, Any], cohort: Cohort, fed: Federation
) -> CohortRound:
    """Trains the clients of each network in turn, stores their states, and joins the rest in the cohort's order.

    Args:
        train_group: Trains the clients with one network.
        states: Of clients, by id.
        cohort: The clients of the round.
        fed: The federation.
    """
    groups = fed.groups(cohort)
    sent = []
    terms = []
    for group in groups:
        trained = train_group(group)
        states = fed.remember(states, group, trained.states)
        sent.append(trained.sent)
        terms.append(trained.terms)
    return CohortRound(states, fed.in_order(cohort, groups, sent), fed.in_order(cohort, groups, terms))


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


def group_newcomers(states: Mapping[int, Any], cohort: Cohort, fed: Federation) -> list[Cohort]:
    """Returns the clients of a cohort that have no state yet, divided by their networks."""
    newcomers = [client for client in cohort.client_ids if int(client) not in states]
    if not newcomers:
        return []
    return fed.groups(fed.cohort_of(cohort.round, newcomers))


def train_newcomers(
    states: Mapping[int, Any], cohort: Cohort, fed: Federation, epochs: int
) -> Iterator[tuple[Cohort, Client]]:
    """Yields clients without a state, of one network at a time, and their models after `epochs` on their own data."""
    first_epoch = fed.local_epochs  # the epochs before have the draws of the round itself
    for group in group_newcomers(states, cohort, fed):
        initial = own_models({}, group, fed)
        epochs_ahead = range(first_epoch, first_epoch + epochs)
        model, _ = fed.train(initial, group, plain_loss(group.network), epochs=epochs_ahead)
        yield group, model


def average_models(models: list[Client], cohort: Cohort, fed: Federation) -> list[Client]:
    """Returns the clients' models, which all have one network, with their plain mean in the place of each."""
    (clients,) = models  # those of the only network
    uniform = torch.ones(len(cohort.client_ids), device=fed.device)
    params, buffers = weighted_mean(fed.upload_model(clients), uniform)
    return [fed.broadcast(params, buffers, cohort)]


def refuse_mixed_average(fed: Federation) -> None:
    """Refuses to average parameters where clients have different networks."""
    if len(fed.networks) > 1:
        raise UserError(
            f"--average-parameters needs one network for all clients (got --backbone {','.join(fed.backbones)}); "
            "name one of them, or leave the option out."
        )
