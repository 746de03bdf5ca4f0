"""Rounds of methods with a planted defect, which a law must catch."""

import torch

from fedcli.core import Aux, cross_entropy
from fedcli.papers.baselines import fedavg
from tests.toy_methods import STATEFUL, fedavg_round


def forget_states(state, cohort, fed, config):
    """Defect: the clients' states are thrown away after the round."""
    state, terms = STATEFUL.run_round(state, cohort, fed, config)
    return state._replace(clients={}), terms


def keep_first_states(state, cohort, fed, config):
    """Defect: what is stored for a client is what it had first, every time."""
    after, terms = STATEFUL.run_round(state, cohort, fed, config)
    return after._replace(clients={**after.clients, **state.clients}), terms


def ignore_states(state, cohort, fed, config):
    """Defect: the stored state is not used."""
    after, terms = STATEFUL.run_round(state._replace(clients={}), cohort, fed, config)
    return after._replace(clients={**state.clients, **after.clients}), terms


def change_absent_clients(state, cohort, fed, config):
    """Defect: clients that sit out are changed."""
    after, terms = STATEFUL.run_round(state, cohort, fed, config)
    changed = {client: kept._replace(means=kept.means + 1) for client, kept in after.clients.items()}
    return after._replace(clients=changed), terms


def step_in_place(state, cohort, fed, config):
    """Defect: the state that the round is given is changed as well."""
    after, terms = fedavg.run_round(state, cohort, fed, config)
    for name, value in state.params.items():
        value.data.lerp_(after.params[name], 0.5)
    return after, terms


def skip_buffers(state, cohort, fed, config):
    """Defect: the buffers are not averaged."""
    after, terms = fedavg.run_round(state, cohort, fed, config)
    return after._replace(buffers=state.buffers), terms


def drop_local_buffers(state, cohort, fed, config):
    """Defect: the local objective returns the buffers it was given."""
    task = fedavg.make_local_loss(fed.network)

    def local_loss(params, buffers, batch, context):
        loss, aux = task(params, buffers, batch, context)
        return loss, aux._replace(buffers=buffers)

    return fedavg_round(state, cohort, fed, local_loss)


def ignore_mask(state, cohort, fed, config):
    """Defect: padding counts in the loss."""
    task = fedavg.make_local_loss(fed.network)

    def local_loss(params, buffers, batch, context):
        return task(params, buffers, batch._replace(mask=None), context)

    return fedavg_round(state, cohort, fed, local_loss)


def weigh_first_clients_most(state, cohort, fed, config):
    """Defect: the weight of a client depends on its position in the cohort."""
    weights = torch.arange(len(cohort.client_ids), 0, -1, dtype=fed.dtype)
    return fedavg.run_round(state, cohort._replace(weights=weights), fed, config)


def divide_by_absent_classes(state, cohort, fed, config):
    """Defect: the class means of a client that lacks a class are 0 / 0, and they reach the model."""
    means, counts = fed.class_means(fed.broadcast(state.params, state.buffers, cohort), cohort)
    nothing = 0 * (means / (counts > 0)[..., None]).sum()
    after, terms = fedavg.run_round(state, cohort, fed, config)
    return after._replace(params={name: value + nothing for name, value in after.params.items()}), terms


def divide_by_degrees_of_freedom(state, cohort, fed, config):
    """Defect: a loss has the sample variance of a batch's features, which is 0 / 0 of one."""

    def loss(params, buffers, batch, context):
        output = fed.network(params, buffers, batch.x, batch.mask)
        variance = output.features.var(0).mean()
        return cross_entropy(output.logits, batch.y, batch.mask) + variance, Aux(output.buffers, {})

    return fedavg_round(state, cohort, fed, loss)


class CountsOutsideOfState:
    """Defect: the rounds are counted outside of the state, and the parameters depend on the count."""

    def __init__(self):
        self.rounds = {}

    def __call__(self, state, cohort, fed, config):
        self.rounds[fed] = self.rounds.get(fed, 0) + 1
        state, terms = fedavg.run_round(state, cohort, fed, config)
        params = {name: value * (1 + 0.1 * self.rounds[fed]) for name, value in state.params.items()}
        return state._replace(params=params), terms
