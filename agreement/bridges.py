"""Bridges, methods that stand between fedcli's and a peer's: what closes a difference, and is no method of a paper.

A bridge is a registered method under another name, of which one function is replaced, its `init` or its `run_round`.
"""

from dataclasses import replace
from functools import partial

import torch

from fedcli.core import Aux, Client, Step, cross_entropy, step_length, tree_map, weighted_mean
from fedcli.core.network_pairs import PRIVATE, SHARED, joined, part
from fedcli.errors import UserError
from fedcli.papers.baselines import apfl, fedavgm, moon, scaffold
from fedcli.papers.baselines.fedavg import make_local_loss

ALPHA_DECAY = 0.02  # times alpha, which FedTorch adds to the gradient of alpha


def run_nesterov_round(state, cohort, fed, config):
    """FedAvgM whose server looks ahead, w <- w - eta (Delta + beta v)."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network))
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    delta = tree_map(torch.sub, state.params, params)
    velocity = fedavgm.momentum_update(state.velocity, delta, config.server_momentum)
    ahead = tree_map(lambda d, v: d + config.server_momentum * v, delta, velocity)
    params = tree_map(lambda w, step: w - config.server_lr * step, state.params, ahead)
    return fedavgm.ServerState(params, buffers, velocity), terms


def run_scaffold_round_with_uniform_control(state, cohort, fed, config):
    """SCAFFOLD whose models are weighted by examples, and whose c is the plain mean over all clients."""
    step = fed.optimizer_step(scaffold.make_local_loss(fed.network), clip_norm=config.clip_norm)
    lr = step_length(fed.lr(cohort.round), fed.momentum)
    plain_shares = torch.full((len(cohort.client_ids),), 1 / fed.num_clients, dtype=fed.dtype, device=fed.device)
    return run_scaffold_round(state, cohort, fed, config, step=step, lr=lr, shares=plain_shares)


def run_scaffold_round_after_momentum(state, cohort, fed, config):
    """SCAFFOLD that adds c - c_i after the step of the optimizer, and divides by K eta_l whatever the momentum."""
    task = fed.optimizer_step(make_local_loss(fed.network), clip_norm=config.clip_norm)

    def update(client, batch, context):
        client, aux = task.update(client, batch, context)
        moved = {name: w - batch.lr * (context.c[name] - context.c_i[name]) for name, w in client.params.items()}
        return client._replace(params=moved), aux

    step = Step(update, task.init_optimizer)
    num_examples = torch.as_tensor(fed.client_weights[cohort.client_ids], dtype=fed.dtype, device=fed.device)
    shares = num_examples / fed.client_weights.sum()
    return run_scaffold_round(state, cohort, fed, config, step=step, lr=fed.lr(cohort.round), shares=shares)


def run_scaffold_round(state, cohort, fed, config, *, step, lr, shares):
    """SCAFFOLD by this local step, whose option II divides by K lr, and whose c moves by these shares, `[K]`."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    zero = scaffold.ClientState(tree_map(torch.zeros_like, state.c))
    c_i = fed.recall(state.clients, cohort, zero).c_i
    clients, terms = fed.train(clients, cohort, step, scaffold.Context(state.c, c_i), scaffold.CONTEXT_AXES)
    new_c_i = scaffold.update_control(c_i, state.c, state.params, clients.params, fed.local_steps(cohort), lr)
    client_states = fed.remember(state.clients, cohort, scaffold.ClientState(new_c_i))
    mean, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    params = scaffold.update_model(state.params, mean, config.server_lr)
    c = scaffold.update_mean_control(state.c, tree_map(torch.sub, new_c_i, c_i), shares)
    return scaffold.ServerState(params, buffers, c, client_states), terms


def init_with_initial_past(fed, config):
    """MOON whose clients have the initial model for their last one before they take part."""
    state = moon.init(fed, config)
    first = moon.ClientState(state.params, state.buffers)
    return state._replace(clients=dict.fromkeys(range(fed.num_clients), first))


def run_moon_round_in_training_mode(state, cohort, fed, config):
    """MOON whose received model and client's last one normalise by the batch, as in training mode."""
    return run_moon_round(state, cohort, fed, config, features_of_last=features_in_training_mode)


def run_moon_round_with_received_in_training_mode(state, cohort, fed, config):
    """MOON whose received model normalises by the batch, as in training mode, and the client's last one does not."""
    return run_moon_round(state, cohort, fed, config, features_of_last=features_in_evaluation_mode)


def features_in_training_mode(network, params, buffers, batch):
    """Features `[B, D]` as a target, normalised by the batch."""
    return network(params, buffers, batch.x, batch.mask).features.detach()


def features_in_evaluation_mode(network, params, buffers, batch):
    """Features `[B, D]` as a target, normalised by the running mean and variance."""
    return network(params, buffers, batch.x, batch.mask, train=False).features.detach()


def run_moon_round(state, cohort, fed, config, *, features_of_last):
    """MOON whose received model is in training mode, and the client's last one gives its features by this function."""
    local_loss = make_moon_loss(fed.network, config, features_of_last)
    context, axes = moon.local_context(state, cohort, fed, config)
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, local_loss, context, axes)
    return moon.aggregate(state, clients, cohort, fed, config), terms


def make_moon_loss(network, config, features_of_last):
    """MOON's local objective with these features of the last model."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        received = features_in_training_mode(network, context.global_params, context.global_buffers, batch)
        last = features_of_last(network, context.previous_params, context.previous_buffers, batch)
        contrast = moon.model_contrastive(features, received, last, config.temperature, batch.mask)
        contrast = torch.where(context.has_previous, contrast, 0.0)
        task = cross_entropy(logits, batch.y, batch.mask)
        return task + config.contrastive_weight * contrast, Aux(buffers, {"cross_entropy": task}, features)

    return local_loss


def run_mixture_round(state, cohort, fed, config, make_local_step):
    """APFL whose clients keep the mixture alpha v + (1 - alpha) w_i in the place of v.

    Raises:
        UserError: If the method's own rule for alpha is asked for.
    """
    if config.adaptive:
        raise UserError("the bridge has its own rule for alpha; leave out --adaptive.")
    received = fed.broadcast(state.params, state.buffers, cohort)
    alpha = torch.tensor(config.mixing, dtype=fed.dtype, device=fed.device)
    own = fed.recall(state.clients, cohort, apfl.ClientState(*fed.initial_model(), alpha))
    params = {**joined(own.params, received.params), apfl.ALPHA: own.alpha}
    clients = Client(params, joined(own.buffers, received.buffers), optimizer={})
    clients, terms = fed.train(clients, cohort, make_local_step(fed))

    alpha = clients.params[apfl.ALPHA]
    shared = part(clients.params, SHARED)
    trained_states = apfl.ClientState(
        params=mixtures(part(clients.params, PRIVATE), shared, alpha),
        buffers=part(clients.buffers, PRIVATE),
        alpha=alpha,
    )
    client_states = fed.remember(state.clients, cohort, trained_states)
    trained = Client(shared, part(clients.buffers, SHARED), optimizer={})
    params, buffers = weighted_mean(fed.upload_model(trained), cohort.weights)
    return apfl.ServerState(params, buffers, client_states), terms


def mixtures(private, shared, alpha):
    """alpha v + (1 - alpha) w_i of K clients, `[K, ...]`; alpha is `[K]`."""
    mixed = {}
    for name, v in private.items():
        share = alpha.reshape(-1, *[1] * (v.ndim - 1))
        mixed[name] = share * v + (1 - share) * shared[name]
    return mixed


def make_step_of_both_models(fed):
    """A step of w_i and v, each by its own loss, and none by the mixture's."""

    def local_loss(params, buffers, batch, context):
        shared = fed.network(part(params, SHARED), part(buffers, SHARED), batch.x, batch.mask)
        private = fed.network(part(params, PRIVATE), part(buffers, PRIVATE), batch.x, batch.mask)
        loss = cross_entropy(shared.logits, batch.y, batch.mask) + cross_entropy(private.logits, batch.y, batch.mask)
        return loss, Aux(joined(private.buffers, shared.buffers), {"cross_entropy": loss}, private.features)

    return fed.optimizer_step(local_loss, names=[*joined(fed.network.params, fed.network.params)])


def make_adapting_step(fed):
    """A step of both models, and then of alpha by what FedTorch takes for its gradient.

    The gradients of the models are read from their steps, as (w - w') / lr, so the optimizer must be plain SGD.

    Raises:
        UserError: If the run has another optimizer, momentum or weight decay.
    """
    if fed.optimizer != "sgd" or fed.momentum or fed.config.weight_decay:
        raise UserError(
            "alpha is trained by the steps of plain SGD; leave out --optimizer, --momentum and --weight-decay."
        )
    models = make_step_of_both_models(fed)

    def update(client, batch, context):
        before = client.params
        client, aux = models.update(client, batch, context)
        params = dict(client.params)
        private, shared = part(params, PRIVATE), part(params, SHARED)
        old_private, old_shared = part(before, PRIVATE), part(before, SHARED)
        alpha = before[apfl.ALPHA]
        gradient_of_alpha = ALPHA_DECAY * alpha
        for name, v in private.items():
            gradient_of_v = (old_private[name] - v) / batch.lr
            gradient_of_w = (old_shared[name] - shared[name]) / batch.lr
            gradient = alpha * gradient_of_v + (1 - alpha) * gradient_of_w
            gradient_of_alpha = gradient_of_alpha + ((v - shared[name]) * gradient).sum()
        params[apfl.ALPHA] = (alpha - batch.lr * gradient_of_alpha).clamp(0, 1)
        return client._replace(params=params), aux

    return Step(update, models.init_optimizer)


def make_step_of_the_shared_model(fed):
    """A step of w_i alone: v and alpha stay."""
    models = make_step_of_both_models(fed)

    def update(client, batch, context):
        untrained = joined(part(client.params, PRIVATE), {})
        client, aux = models.update(client, batch, context)
        return client._replace(params={**client.params, **untrained}), aux

    return Step(update, models.init_optimizer)


METHODS = (
    replace(
        apfl.METHOD,
        name="apfl_keeping_the_mixture",
        run_round=partial(run_mixture_round, make_local_step=make_adapting_step),
    ),
    replace(
        apfl.METHOD,
        name="apfl_keeping_the_mixture_untrained",
        run_round=partial(run_mixture_round, make_local_step=make_step_of_the_shared_model),
    ),
    replace(moon.METHOD, name="moon_in_training_mode", run_round=run_moon_round_in_training_mode),
    replace(
        moon.METHOD,
        name="moon_with_received_in_training_mode",
        run_round=run_moon_round_with_received_in_training_mode,
    ),
    replace(moon.METHOD, name="moon_with_initial_past", init=init_with_initial_past),
    replace(scaffold.METHOD, name="scaffold_after_momentum", run_round=run_scaffold_round_after_momentum),
    replace(fedavgm.METHOD, name="nesterov", run_round=run_nesterov_round),
    replace(scaffold.METHOD, name="scaffold_with_uniform_control", run_round=run_scaffold_round_with_uniform_control),
)
BRIDGES = {method.name: method for method in METHODS}
