"""FedDyn: a regularizer that changes with every round, so that the clients' minima agree with the global one.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, "Federated Learning Based on
Dynamic Regularization", ICLR 2021, https://arxiv.org/abs/2111.04263. Algorithm 1.

A client minimises L_i(w) - <g_i, w> + alpha / 2 |w - w_g|^2, where g_i is the gradient of its own objective L_i at the
last local model; at that minimum the new gradient is g_i - alpha (w_i - w_g). The server takes the mean of the models
and goes on by the sum of what the clients have moved. At rest w_i = w_g for all i, so the g_i sum to zero and w_g is a
stationary point of the global objective.

Notation
    code                paper                           shape
    params              theta^t, w_g above              dict of tensors
    local_params        theta_k^t, w_i above            [K, ...]
    h_i                 -grad L_k(theta_k^t) / alpha    [K, ...]
    h                   -h^t / alpha, mean of all h_i   dict of tensors
    alpha               alpha                           [K], of each client

Readings and deviations
    1. Written in h_i = -g_i / alpha, the sum of w_i - w_g over the client's rounds, as in the authors' code.
    2. alpha_i = alpha / (n_i / mean n), as in the authors' code, the mean over all N clients: with h summing to zero it
       is n_i g_i that sum to zero, so the rest point is that of FedAvg's objective, the mean weighted by n_i. The paper
       has one alpha, for clients of equal size, as here with `--weighting uniform`. A client without examples gets 0.
    3. The cohort has a fixed size; in the paper each client takes part with a given probability.
    4. Parameters only; buffers are averaged as the models are (the authors' networks have none).
    5. The server's model is the one that is tested. (The authors' code tests the mean of the local models too.)
    6. alpha = 0 is not FedAvg: h is still added. The quadratic term stands in the objective, not in the weight decay.
    7. A client holds two copies of the model, as in FedFM's Table III; its h_i is not counted there.
    8. `--form simplified` is not the paper's, but what FedFA's code calls FedDyn: the client's last local model less
       w_g in the place of h_i (zero in its first round), no quadratic term, no h, and FedAvg's mean weighted by n_i.
       FedFA's text (its Eq. 19) prints the original's local objective.
    9. The gradient of the local objective is clipped at norm 10, all parameters together, before the run's weight decay
       and momentum, as in the authors' code and in FedFA's; 0 switches it off. The authors put the term alpha / 2 |w|^2
       into the weight decay, behind the clipping; here the quadratic term is clipped with the rest. Without it accuracy
       collapses in the last rounds on the built-in digits.

Run it
    fedcli run feddyn --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import (
    Aux,
    Buffers,
    Client,
    LocalLoss,
    Network,
    Params,
    axes_of,
    cross_entropy,
    inner_product,
    squared_distance,
    tree_map,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What FedDyn adds to FedAvg."""

    alpha: float = option(
        0.01, "Weight of the dynamic regularizer", symbol="α", source="Algorithm 1", low=0, tune=(0.001, 0.01, 0.1)
    )
    clip_norm: float = option(
        10.0, "Norm to which longer gradients are shortened in a local step", source="authors' code", low=0, off=0,
        before=0.0,
    )  # fmt: skip
    form: str = option(
        "original",
        "The paper's, or without server state and quadratic term as in FedFA's code",
        choices=("original", "simplified"),
    )


class Context(NamedTuple):
    """What a client is given for a round."""

    global_params: Params  # w_g
    h_i: Params  # each client's own
    alpha: Tensor  # [K], each client's own


CONTEXT_AXES = axes_of(Context, global_params=None, h_i=0, alpha=0)


class ClientState(NamedTuple):
    """What a client keeps between the rounds it takes part in."""

    dual: Params  # h_i, the dual variable; in the simplified form the last local model, see `last_model`

    @property
    def last_model(self) -> Params:
        """What the simplified form keeps, in the same field, so that checkpoints of both have one form."""
        return self.dual


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model w_g
    buffers: Buffers
    h: Params  # mean of h_i over all N clients; zero in the simplified form
    clients: Mapping[int, ClientState]


def linear_regularizer(params: Params, h_i: Params, alpha: Tensor) -> Tensor:
    """alpha <w, h_i>, which is -<g_i, w>; a scalar.

    Args:
        params: w, of one client.
        h_i: As params.
        alpha: Scalar, the client's.
    """
    return alpha * inner_product(params, h_i)


def dynamic_regularizer(params: Params, global_params: Params, h_i: Params, alpha: Tensor) -> Tensor:
    """What is added to the local objective: alpha <w, h_i> + alpha / 2 |w - w_g|^2.

    Arguments as of `linear_regularizer`, and `global_params` w_g; a scalar.
    """
    squares = squared_distance(params, global_params)
    return linear_regularizer(params, h_i, alpha) + alpha / 2 * squares


def client_alphas(alpha: float, weights: Tensor, mean_weight: float) -> Tensor:
    """alpha_i = alpha / (n_i / mean n); 0 for a client without examples, which takes no step.

    Args:
        alpha: Not negative.
        weights: n_i, `[K]`; 1 for each under `--weighting uniform`.
        mean_weight: Mean of it over all N clients.
    """
    return torch.where(weights > 0, alpha * mean_weight / weights.clamp(min=1), 0.0)


def update_h_i(h_i: Params, global_params: Params, local_params: Params) -> Params:
    """h_i + w_i - w_g, which is g_i - alpha (w_i - w_g).

    Args:
        h_i: `[K, ...]`.
        global_params: w_g, `[...]`.
        local_params: w_i, `[K, ...]`.
    """
    return tree_map(lambda old, start, end: old + (end - start), h_i, global_params, local_params)


def update_server(params: Params, h: Params, local_params: Params, num_clients: int) -> tuple[Params, Params]:
    """h + (1 / N) sum over the cohort of w_i - w_g, then mean of w_i over the cohort + h; the new w_g and h.

    Args:
        params: w_g.
        h: Mean of h_i over all clients.
        local_params: w_i, `[K, ...]`.
        num_clients: Size of the population, N.
    """
    h = tree_map(lambda old, start, end: old + (end - start).sum(0) / num_clients, h, params, local_params)
    params = tree_map(lambda end, shift: end.mean(0) + shift, local_params, h)
    return params, h


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective: mean cross-entropy and the regularizer."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        if config.form == "simplified":
            regularizer = linear_regularizer(params, context.h_i, context.alpha)
        else:
            regularizer = dynamic_regularizer(params, context.global_params, context.h_i, context.alpha)
        return task + regularizer, Aux(buffers, {"cross_entropy": task, "regularizer": regularizer}, features)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; h is zero, as every h_i."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, tree_map(torch.zeros_like, params), {})


def train_locally(
    state: ServerState, h_i: Params, cohort: Cohort, fed: Federation, config: Config
) -> tuple[Client, Terms]:
    """The cohort's clients, each at the minimum (in so many steps) of its regularized objective; and their terms."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    weights = torch.as_tensor(fed.client_weights[cohort.client_ids], dtype=fed.dtype, device=fed.device)
    mean_weight = fed.client_weights.sum() / fed.num_clients
    context = Context(state.params, h_i, client_alphas(config.alpha, weights, mean_weight))
    step = fed.optimizer_step(make_local_loss(fed.network, config), clip_norm=config.clip_norm)  # Reading 9
    return fed.train(clients, cohort, step, context, CONTEXT_AXES)


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round."""
    if config.form == "simplified":
        return run_simplified_round(state, cohort, fed, config)
    newcomer = ClientState(tree_map(torch.zeros_like, state.params))
    h_i = fed.recall(state.clients, cohort, newcomer).dual
    clients, terms = train_locally(state, h_i, cohort, fed, config)  # theta_k^t
    states = fed.remember(state.clients, cohort, ClientState(update_h_i(h_i, state.params, clients.params)))
    local_params, local_buffers = fed.upload_model(clients)
    params, h = update_server(state.params, state.h, local_params, fed.num_clients)  # h^t, then theta^t
    buffers = weighted_mean(local_buffers, torch.ones_like(cohort.weights))
    return ServerState(params, buffers, h, states), terms


def run_simplified_round(
    state: ServerState, cohort: Cohort, fed: Federation, config: Config
) -> tuple[ServerState, Terms]:
    """Reading 8: the last local model in place of the sum of gradients, and FedAvg's server."""
    own = fed.recall(state.clients, cohort, ClientState(state.params))
    h_i = tree_map(torch.sub, own.last_model, state.params)
    clients, terms = train_locally(state, h_i, cohort, fed, config)
    states = fed.remember(state.clients, cohort, ClientState(clients.params))
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    return ServerState(params, buffers, state.h, states), terms


METHOD = Method(
    name="feddyn",
    title="FedDyn: dynamic regularization",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # alpha = 0 still adds h
    state_types=(ServerState, ClientState),
    variants={"simplified": {"form": "simplified", "alpha": 0.1}},
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 2 * sizes.parameters,  # FedFM, Table III
)  # fmt: skip
