"""Methods that stand between fedcli's and a peer's: what closes a difference, and is no method of a paper."""

from dataclasses import replace

import numpy as np
import torch

from fedcli.core import Step, tree_map, weighted_mean
from fedcli.papers.baselines import fedavgm, moon, scaffold
from fedcli.papers.baselines.fedavg import make_local_loss


def run_nesterov_round(state, cohort, fed, config):
    """FedAvgM whose server looks ahead, w <- w - (Delta + beta v)."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network))
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    delta = tree_map(torch.sub, state.params, params)
    velocity = fedavgm.momentum_update(state.velocity, delta, config.server_momentum)
    params = tree_map(lambda w, d, v: w - (d + config.server_momentum * v), state.params, delta, velocity)
    return fedavgm.ServerState(params, buffers, velocity), terms


def run_uniform_control_round(state, cohort, fed, config):
    """SCAFFOLD whose models are weighted by examples, and whose c is the plain mean over all clients."""
    by_examples = fed.client_weights
    fed.client_weights = np.ones_like(by_examples)
    try:
        return scaffold.run_round(state, cohort, fed, config)
    finally:
        fed.client_weights = by_examples


def run_round_after_momentum(state, cohort, fed, config):
    """SCAFFOLD that adds c - c_i after the step of the optimizer, and divides by K eta_l whatever the momentum."""
    task = fed.optimizer_step(make_local_loss(fed.network))

    def update(client, batch, context):
        client, aux = task.update(client, batch, context)
        moved = {name: w - batch.lr * (context.c[name] - context.c_i[name]) for name, w in client.params.items()}
        return client._replace(params=moved), aux

    clients = fed.broadcast(state.params, state.buffers, cohort)
    zero = scaffold.ClientState(tree_map(torch.zeros_like, state.c))
    c_i = fed.recall(state.clients, cohort, zero).c_i
    context = scaffold.Context(state.c, c_i)
    clients, terms = fed.train(clients, cohort, Step(update, task.init_optimizer), context, scaffold.CONTEXT_AXES)
    local_steps = torch.as_tensor(fed.plan(cohort).steps, dtype=fed.dtype)
    new = scaffold.update_control(c_i, state.c, state.params, clients.params, local_steps, fed.lr(cohort.round))
    kept = fed.remember(state.clients, cohort, scaffold.ClientState(new))
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    shares = cohort.weights * len(cohort.client_ids) / fed.num_clients
    c = scaffold.update_mean_control(state.c, tree_map(torch.sub, new, c_i), shares)
    return scaffold.ServerState(params, buffers, c, kept), terms


def init_with_initial_past(fed, config):
    """MOON whose clients have the initial model for their last one before they take part."""
    state = moon.init(fed, config)
    first = moon.ClientState(state.params, state.buffers)
    return state._replace(clients=dict.fromkeys(range(fed.num_clients), first))


BRIDGES = {
    "moon_with_initial_past": replace(moon.METHOD, name="moon-initial-past", init=init_with_initial_past),
    "scaffold_after_momentum": replace(
        scaffold.METHOD, name="scaffold-after-momentum", run_round=run_round_after_momentum
    ),
    "nesterov": replace(fedavgm.METHOD, name="fedavgm-nesterov", run_round=run_nesterov_round),
    "scaffold_with_uniform_control": replace(
        scaffold.METHOD, name="scaffold-uniform-control", run_round=run_uniform_control_round
    ),
}
