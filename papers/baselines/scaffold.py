"""SCAFFOLD: correct every local gradient by the difference between the global and the client's own direction.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning", ICML 2020, https://arxiv.org/abs/1910.06378. Algorithm 1 with option II.

A client's control variate c_i estimates the gradient of its own objective, the server's c the mean over all clients. A
local step takes g + c - c_i in place of g, so that the clients do not drift apart.

Notation
    code                paper       shape
    params              x           dict of tensors
    local_params        y_i         [K, ...]
    c, c_i              c, c_i      dicts of tensors as params; c_i stacked [K, ...]
    local_steps         K           [K]
    lr, server_lr       eta_l, eta_g

Readings and deviations
    1. Control variates start at zero, so the first round is FedAvg. They belong to parameters only: buffers have no
       gradient and are averaged as in FedAvg.
    2. The paper's local step is plain SGD. Here the correction is a linear term of the local objective, so it enters
       the gradient before the weight decay and the momentum of the run's optimizer; c_i estimates the gradient with
       the weight decay in it.
    3. With momentum rho a step is in the long run eta_l / (1 - rho) times a gradient, so line 12 is given that in place
       of eta_l. With eta_l alone, c_i - c becomes (g_i - g) / (1 - rho) - rho / (1 - rho) (c_i - c) from round to round
       (-9 for rho = 0.9): it blows up wherever the curvature is small, and training diverges within a few rounds. With
       eta_l / (1 - rho) it comes to rest at g_i - g, by way of a moving average where local training is too short for
       the momentum to build up. Without momentum nothing changes. (NIID-Bench keeps eta_l, and adds c - c_i after the
       optimizer's step.)
    4. Only SGD: Adam's steps are no multiples of gradients, and option II would make a step of what must be a gradient.
    5. Models are averaged with FedAvg's weights n_i / n_S, where line 16 has 1 / |S|, and c is the mean over all N
       clients with weights n_i / n, where line 17 has 1 / N: FedFM's Eq. 1 weights clients so, and FedDyn's authors
       weight c too in their SCAFFOLD. The rest point is then that of FedAvg's objective: at rest every client moves
       along c = sum_i (n_i / n) g_i. For clients of one size, or with `--weighting uniform`, both are the paper's.
    6. A client that takes no step (no examples, or no full batch) keeps its c_i: option II would divide by zero.
    7. A client holds two copies of the model, as in FedFM's Table III; its c_i is not counted there.
    8. The gradient of f_i + <y_i, c - c_i> is clipped at norm 10, all parameters together, before the weight decay and
       the momentum; 0 switches it off. The paper has no such thing; FedDyn's authors do it in their SCAFFOLD, with the
       same linear term. Without it training diverges on the built-in digits at their rate of 0.05 with two seeds of
       three, and so it does in NIID-Bench's form and in Algorithm 1 without momentum.

Run it
    fedcli run scaffold --dataset digits
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
    LocalLoss,
    Network,
    Params,
    axes_of,
    cross_entropy,
    inner_product,
    step_length,
    tree_map,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What SCAFFOLD adds to FedAvg."""

    server_lr: float = option(
        1.0, "Server's step along the mean change of the models", symbol="η_g", source="line 17", low=0, open_low=True
    )
    clip_norm: float = option(
        10.0, "Norm to which longer gradients are shortened in a local step", source="FedDyn's authors", low=0, off=0,
        before=0.0,
    )  # fmt: skip


class Context(NamedTuple):
    """What a client is given for a round."""

    c: Params
    c_i: Params  # each client's own


CONTEXT_AXES = axes_of(Context, c=None, c_i=0)


class ClientState(NamedTuple):
    """What a client keeps between the rounds it takes part in."""

    c_i: Params


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model x
    buffers: Buffers
    c: Params  # mean of c_i over all N clients, weighted by n_i
    clients: Mapping[int, ClientState]


def correction(params: Params, c: Params, c_i: Params) -> Tensor:
    """Line 10: <y_i, c - c_i>, the term whose gradient is what SCAFFOLD adds to that of the objective; a scalar.

    Args:
        params: y_i, of one client.
        c: The server's control variate.
        c_i: The client's.
    """
    return inner_product(params, tree_map(torch.sub, c, c_i))


def update_control(
    c_i: Params, c: Params, global_params: Params, local_params: Params, local_steps: Tensor, lr: float
) -> Params:
    """Line 12, option II: c_i - c + (x - y_i) / (K eta_l); c_i itself for a client that took no step; c_i+, `[K, ...]`.

    Args:
        c_i: `[K, ...]`.
        c: `[...]`.
        global_params: x, `[...]`.
        local_params: y_i after the last step, `[K, ...]`.
        local_steps: K of each client, `[K]`.
        lr: eta_l; with momentum rho eta_l / (1 - rho).
    """

    def update(c_i: Tensor, c: Tensor, start: Tensor, end: Tensor) -> Tensor:
        steps = local_steps.reshape(-1, *[1] * c.dim())
        moved = (start - end).div_(steps.clamp(min=1) * lr)  # in place: [K, ...] is the largest there is
        return torch.where(steps > 0, moved.add_(c_i - c), c_i)

    return tree_map(update, c_i, c, global_params, local_params)


def update_model(params: Params, mean: Params, server_lr: float) -> Params:
    """Line 17: x + eta_g (mean of y_i - x).

    Args:
        params: x.
        mean: Weighted mean of y_i over the cohort.
        server_lr: eta_g.
    """
    return tree_map(lambda old, new: old + server_lr * (new - old), params, mean)


def update_mean_control(c: Params, change: Params, shares: Tensor) -> Params:
    """Lines 16 and 17: c + sum over the cohort of (n_i / n) (c_i+ - c_i), Reading 5.

    Args:
        c: `[...]`.
        change: c_i+ - c_i, `[K, ...]`.
        shares: n_i / n, of the examples of the whole population, or 1 / N, `[K]`.
    """
    return tree_map(lambda old, delta: old + torch.tensordot(shares, delta, dims=1), c, change)


def make_local_loss(network: Network) -> LocalLoss:
    """The local objective f_i, mean cross-entropy, and the correction."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        linear = correction(params, context.c, context.c_i)
        return task + linear, Aux(buffers, {"cross_entropy": task, "correction": linear}, features)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; all control variates are zero."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, tree_map(torch.zeros_like, params), {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round; the lines are the paper's."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # line 5: x and c to the sampled clients
    c = fed.download(state.c, cohort)
    newcomer = ClientState(tree_map(torch.zeros_like, c))
    c_i = fed.recall(state.clients, cohort, newcomer).c_i
    step = fed.optimizer_step(make_local_loss(fed.network), clip_norm=config.clip_norm)  # Readings 2 and 8
    clients, terms = fed.train(clients, cohort, step, Context(c, c_i), CONTEXT_AXES)  # lines 7 to 11
    local_steps = fed.local_steps(cohort)
    lr = step_length(fed.lr(cohort.round), fed.momentum)  # Reading 3
    new = update_control(c_i, c, state.params, clients.params, local_steps, lr)  # line 12
    change = fed.upload(tree_map(torch.sub, new, c_i))  # line 13
    states = fed.remember(state.clients, cohort, ClientState(new))  # line 14
    mean, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)  # line 16
    params = update_model(state.params, mean, config.server_lr)  # line 17
    weights = torch.as_tensor(fed.client_weights[cohort.client_ids], dtype=fed.dtype, device=fed.device)  # n_i
    shares = weights / max(1, fed.client_weights.sum())  # n_i / n
    return ServerState(params, buffers, update_mean_control(c, change, shares), states), terms  # line 17


METHOD = Method(
    name="scaffold",
    title="SCAFFOLD: stochastic controlled averaging",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # FedAvg in its first round only, whatever the options
    state_types=(ServerState, ClientState),
    costs=both_ways(lambda sizes: 2 * sizes.parameters),
    optimizers=("sgd",),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 2 * sizes.parameters,  # FedFM, Table III; Reading 7
    numerics=2,
)  # fmt: skip
