"""Bridges, methods that stand between fedcli's and a peer's: what closes a difference, and is no method of a paper.

A bridge is a registered method under another name, of which one function is replaced, its `init` or its `run_round`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedcli.core import (
    Aux,
    Batch,
    Buffers,
    Client,
    LocalLoss,
    Network,
    Params,
    Step,
    composed,
    cross_entropy,
    step_length,
    tree_map,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.network_pairs import join_models, join_tensors, parameter_names, run_both, separate_models
from fedcli.errors import UserError
from fedcli.papers.baselines import apfl, fedavgm, moon, scaffold
from fedcli.papers.baselines.fedavg import make_local_loss

ALPHA_DECAY = 0.02  # times alpha, which PFLlib adds to the gradient of alpha
FeatureExtractor = Callable[[Network, Params, Buffers, Batch], Tensor]  # of a batch by a model that is not trained


def run_nesterov_round(
    state: fedavgm.ServerState, cohort: Cohort, fed: Federation, config: fedavgm.Config
) -> tuple[fedavgm.ServerState, Terms]:
    """FedAvgM whose server looks ahead, w <- w - eta (Delta + beta v)."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network))
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    delta = tree_map(torch.sub, state.params, params)
    velocity = fedavgm.momentum_update(state.velocity, delta, config.server_momentum)
    ahead = tree_map(lambda d, v: d + config.server_momentum * v, delta, velocity)
    params = tree_map(lambda w, step: w - config.server_lr * step, state.params, ahead)
    return fedavgm.ServerState(params, buffers, velocity), terms


def run_scaffold_round_with_uniform_control(
    state: scaffold.ServerState, cohort: Cohort, fed: Federation, config: scaffold.Config
) -> tuple[scaffold.ServerState, Terms]:
    """SCAFFOLD whose models are weighted by examples, and whose c is the plain mean over all clients."""
    step = fed.optimizer_step(scaffold.make_local_loss(fed.network), clip_norm=config.clip_norm)
    lr = step_length(fed.lr(cohort.round), fed.momentum)
    plain_shares = torch.full((len(cohort.client_ids),), 1 / fed.num_clients, dtype=fed.dtype, device=fed.device)
    return run_scaffold_round(state, cohort, fed, config, step=step, lr=lr, shares=plain_shares)


def run_scaffold_round_after_momentum(
    state: scaffold.ServerState, cohort: Cohort, fed: Federation, config: scaffold.Config
) -> tuple[scaffold.ServerState, Terms]:
    """SCAFFOLD that adds c - c_i after the step of the optimizer, and divides by K eta_l whatever the momentum."""
    plain_step = fed.optimizer_step(make_local_loss(fed.network), clip_norm=config.clip_norm)

    def update(client, batch, context):
        client, aux = plain_step.update(client, batch, context)
        moved = {name: w - batch.lr * (context.c[name] - context.c_i[name]) for name, w in client.params.items()}
        return client._replace(params=moved), aux

    step = Step(update, plain_step.init_optimizer)
    num_examples = torch.as_tensor(fed.client_weights[cohort.client_ids], dtype=fed.dtype, device=fed.device)
    shares = num_examples / fed.client_weights.sum()
    return run_scaffold_round(state, cohort, fed, config, step=step, lr=fed.lr(cohort.round), shares=shares)


def run_scaffold_round(
    state: scaffold.ServerState,
    cohort: Cohort,
    fed: Federation,
    config: scaffold.Config,
    *,
    step: Step,
    lr: float,
    shares: Tensor,
) -> tuple[scaffold.ServerState, Terms]:
    """SCAFFOLD by this local step, whose option II divides by K lr; c moves by these shares, one of each client."""
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


def init_with_initial_past(fed: Federation, config: moon.Config) -> moon.ServerState:
    """MOON whose clients have the initial model for their last one before they take part."""
    state = moon.init(fed, config)
    first = moon.ClientState(state.params, state.buffers)
    return state._replace(clients=dict.fromkeys(range(fed.num_clients), first))


def features_in_training_mode(network: Network, params: Params, buffers: Buffers, batch: Batch) -> Tensor:
    """Features `[B, D]` as a target, normalised by the batch."""
    return network(params, buffers, batch.x, batch.mask).features.detach()


def features_in_evaluation_mode(network: Network, params: Params, buffers: Buffers, batch: Batch) -> Tensor:
    """Features `[B, D]` as a target, normalised by the running mean and variance."""
    return network(params, buffers, batch.x, batch.mask, train=False).features.detach()


def run_moon_round(
    state: moon.ServerState, cohort: Cohort, fed: Federation, config: moon.Config, *, features_of_last: FeatureExtractor
) -> tuple[moon.ServerState, Terms]:
    """MOON whose received model is in training mode, and the client's last one gives its features by this function."""
    local_loss = make_moon_loss(fed.network, config, features_of_last)
    context, axes = moon.local_context(state, cohort, fed, config)
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, local_loss, context, axes)
    return moon.aggregate(state, clients, cohort, fed, config), terms


def make_moon_loss(network: Network, config: moon.Config, features_of_last: FeatureExtractor) -> LocalLoss:
    """MOON's local objective with these features of the last model."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        received = features_in_training_mode(network, context.global_params, context.global_buffers, batch)
        last = features_of_last(network, context.previous_params, context.previous_buffers, batch)
        contrast = moon.model_contrastive(features, received, last, config.temperature, batch.mask)
        contrast = torch.where(context.has_previous, contrast, 0.0)
        classification_loss = cross_entropy(logits, batch.y, batch.mask)
        loss = classification_loss + config.contrastive_weight * contrast
        return loss, Aux(buffers, {"cross_entropy": classification_loss}, features)

    return local_loss


def run_mixture_round(
    state: apfl.ServerState,
    cohort: Cohort,
    fed: Federation,
    config: apfl.Config,
    make_local_step: Callable[[Federation], Step],
) -> tuple[apfl.ServerState, Terms]:
    """APFL whose clients keep the mixture alpha v + (1 - alpha) w_i in the place of v.

    Raises:
        UserError: If the method's own rule for alpha is asked for.
    """
    if config.adaptive:
        raise UserError("the bridge has its own rule for alpha; leave out --adaptive.")
    received = fed.broadcast(state.params, state.buffers, cohort)
    first = fed.initial_model()
    first_alpha = torch.tensor(config.mixing, dtype=fed.dtype, device=fed.device)
    own = fed.recall(state.clients, cohort, apfl.ClientState(first.params, first.buffers, first_alpha))
    both = join_models(private=own, shared=received)
    clients = Client({**both.params, apfl.ALPHA: own.alpha}, both.buffers)
    clients, terms = fed.train(clients, cohort, make_local_step(fed))

    private, shared = separate_models(clients)
    alpha = clients.params[apfl.ALPHA]
    mixtures = torch.vmap(apfl.mixture)(private.params, shared.params, alpha)
    client_states = fed.remember(state.clients, cohort, apfl.ClientState(mixtures, private.buffers, alpha))
    params, buffers = weighted_mean(fed.upload_model(shared), cohort.weights)
    return apfl.ServerState(params, buffers, client_states), terms


def make_loss_of_both_models(network: Network) -> LocalLoss:
    """The loss of w_i and that of v, each at the model itself, and none at the mixture."""

    def local_loss(params, buffers, batch, context):
        private, shared = run_both(network, network, params, buffers, batch)
        loss = cross_entropy(shared.logits, batch.y, batch.mask) + cross_entropy(private.logits, batch.y, batch.mask)
        return loss, Aux(join_tensors(private.buffers, shared.buffers), {"cross_entropy": loss}, private.features)

    return local_loss


def make_adapting_step(fed: Federation) -> Step:
    """A step of both models, and then of alpha by what PFLlib takes for its gradient.

    The gradients of the models are read from their steps, as (w - w') / lr, so the optimizer must be plain SGD.

    Raises:
        UserError: If the run has another optimizer, momentum or weight decay.
    """
    if fed.optimizer != "sgd" or fed.momentum or fed.config.weight_decay:
        raise UserError(
            "alpha is trained by the steps of plain SGD; leave out --optimizer, --momentum and --weight-decay."
        )
    loss = make_loss_of_both_models(fed.network)
    models = fed.optimizer_step(loss, names=parameter_names(fed.network, fed.network))  # all but alpha

    def update(client, batch, context):
        after, aux = models.update(client, batch, context)
        old = separate_models(client)
        new = separate_models(after)
        alpha = client.params[apfl.ALPHA]
        gradient_of_alpha = ALPHA_DECAY * alpha
        for name, v in new.private.params.items():
            w = new.shared.params[name]
            gradient_of_v = (old.private.params[name] - v) / batch.lr
            gradient_of_w = (old.shared.params[name] - w) / batch.lr
            gradient = alpha * gradient_of_v + (1 - alpha) * gradient_of_w
            gradient_of_alpha = gradient_of_alpha + ((v - w) * gradient).sum()
        stepped = (alpha - batch.lr * gradient_of_alpha).clamp(0, 1)
        return after._replace(params={**after.params, apfl.ALPHA: stepped}), aux

    return composed(update, models)


def make_step_of_the_shared_model(fed: Federation) -> Step:
    """A step of w_i alone: v and alpha stay."""
    names_of_shared = [*join_tensors(private={}, shared=fed.network.params)]
    return fed.optimizer_step(make_loss_of_both_models(fed.network), names=names_of_shared)


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
    replace(
        moon.METHOD,
        name="moon_in_training_mode",  # the received model, and the client's last one
        run_round=partial(run_moon_round, features_of_last=features_in_training_mode),
    ),
    replace(
        moon.METHOD,
        name="moon_with_received_in_training_mode",  # and the client's last one in evaluation mode
        run_round=partial(run_moon_round, features_of_last=features_in_evaluation_mode),
    ),
    replace(moon.METHOD, name="moon_with_initial_past", init=init_with_initial_past),
    replace(scaffold.METHOD, name="scaffold_after_momentum", run_round=run_scaffold_round_after_momentum),
    replace(fedavgm.METHOD, name="nesterov", run_round=run_nesterov_round),
    replace(scaffold.METHOD, name="scaffold_with_uniform_control", run_round=run_scaffold_round_with_uniform_control),
)
BRIDGES = {method.name: method for method in METHODS}
