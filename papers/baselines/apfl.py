"""APFL: a client's model is a mixture of its own parameters and the global ones.

Y. Deng, M. M. Kamani, M. Mahdavi, "Adaptive Personalized Federated Learning", 2020, https://arxiv.org/abs/2003.13461.
Algorithm 1, and the adaptive alpha.

In each local step the client moves its copy of the global model along its own gradient, as in FedAvg, and its own
parameters along the gradient of the mixture.

Notation
    code                    paper       shape
    "shared." parameters    w_i         dict of tensors, the client's copy of the global model
    "private." parameters   v_i         dict of tensors
    mixing, alpha           alpha_i     [K]
    cohort.weights          1 / |U_c|   [K]

Readings and deviations
    1. Parameters are mixed, as the paper writes it. The authors' FedTorch mixes the outputs of two networks, and moves
       w first.
    2. v_i moves by the chain rule: alpha_i grad f_i(mixture).
    3. Adaptive alpha: in the first local step of a round alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(mixture)>, cut
       to [0, 1], used from the second step on. FedTorch takes another gradient and adds 0.02 alpha_i to it. The rule
       is plain gradient descent at the round's learning rate, whatever the run's optimizer. It costs one more gradient
       in every step.
    4. Global models are averaged with FedAvg's weights n_i / n; Algorithm 1 has the plain mean, the same where clients
       are of one size.
    5. v_i begins at the initial model and is kept, with the running statistics of the mixture's passes.
    6. A client is tested with alpha_i v_i + (1 - alpha_i) w of the new global w; FedTorch has the client's own copy
       there. The global model is tested beside. A client that has never taken part is tested with the initial model.

Run it
    fedcli run apfl --dataset digits
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
    Step,
    composed,
    cross_entropy,
    tree_map,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.network_pairs import join_models, join_tensors, parameter_names, separate_models, separate_tensors

ALPHA = "alpha"


@dataclass(frozen=True)
class Config:
    """What APFL adds to FedAvg and local training."""

    mixing: float = option(
        0.5, "Share of a client's own parameters in its model, at first if adaptive; 1 is local training", symbol="α",
        source="FedTorch", low=0, high=1, tune=(0.25, 0.5, 0.75),
    )  # fmt: skip
    adaptive: bool = option(False, "Whether each client learns its share")


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # v_i
    buffers: Buffers  # of the mixture's passes
    alpha: Tensor  # scalar


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # global model w
    buffers: Buffers
    clients: Mapping[int, ClientState]  # of those that have taken part


def mixture(own: Params, other: Params, alpha: Tensor) -> Params:
    """alpha v + (1 - alpha) w, of one client."""
    return tree_map(lambda v, w: alpha * v + (1 - alpha) * w, own, other)


def next_alpha(alpha: Tensor, stepped: Tensor, is_first: Tensor) -> Tensor:
    """Reading 3: alpha after a gradient step, cut to [0, 1], if this is the first step of a round; else as it was."""
    return torch.where(is_first, stepped.clamp(0, 1), alpha)


def make_local_loss(network: Network) -> LocalLoss:
    """f_i(w) + f_i(alpha v + (1 - alpha) w), where w in the mixture is a constant.

    The first term alone moves w, the second v and alpha.
    """

    def local_loss(params, buffers, batch, context):
        v, w = separate_tensors(params)
        buffers_of_mixture, buffers_of_global = separate_tensors(buffers)
        of_global = network(w, buffers_of_global, batch.x, batch.mask)
        mixed = mixture(v, tree_map(Tensor.detach, w), params[ALPHA])
        of_mixture = network(mixed, buffers_of_mixture, batch.x, batch.mask)
        global_task = cross_entropy(of_global.logits, batch.y, batch.mask)
        own_task = cross_entropy(of_mixture.logits, batch.y, batch.mask)
        terms = {"cross_entropy": global_task, "personal_cross_entropy": own_task}
        new_buffers = join_tensors(of_mixture.buffers, of_global.buffers)
        return global_task + own_task, Aux(new_buffers, terms, of_mixture.features)

    return local_loss


def make_local_step(fed: Federation, config: Config) -> Step:
    """One step of w and v, and of alpha in the first step of a round if it is adaptive; all at the state before."""
    loss = make_local_loss(fed.network)
    model_step = fed.optimizer_step(loss, names=parameter_names(fed.network, fed.network))  # all but alpha
    if not config.adaptive:
        return model_step
    alpha_step = fed.optimizer_step(loss, names=[ALPHA], key=ALPHA, optimizer="sgd", momentum=0.0, weight_decay=0.0)

    def update(client, batch, context):
        after, aux = model_step.update(client, batch, context)
        stepped, _ = alpha_step.update(client, batch, context)
        alpha = next_alpha(client.params[ALPHA], stepped.params[ALPHA], is_first=client.memory)
        params = {**after.params, ALPHA: alpha}
        return after._replace(params=params, memory=torch.zeros_like(client.memory)), aux

    return composed(update, model_step, alpha_step)


def personal_models(state: ServerState) -> dict[int, tuple[Params, Buffers]]:
    """Each client's mixture with the global model (Reading 6)."""
    models = {}
    for client, own in state.clients.items():
        params = tree_map(lambda v, w: v.to(w.device), own.params, state.params)  # some may lie on the host
        models[client] = mixture(params, state.params, own.alpha), own.buffers
    return models


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; nobody has trained yet."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round."""
    received = fed.broadcast(state.params, state.buffers, cohort)
    alpha = torch.tensor(config.mixing, dtype=fed.dtype, device=fed.device)
    first = fed.initial_model()
    own = fed.recall(state.clients, cohort, ClientState(first.params, first.buffers, alpha))
    both = join_models(private=own, shared=received)
    is_first = torch.ones_like(own.alpha, dtype=torch.bool)
    clients = Client({**both.params, ALPHA: own.alpha}, both.buffers, memory=is_first)
    clients, terms = fed.train(clients, cohort, make_local_step(fed, config))

    private, shared = separate_models(clients)  # v_i and w_i
    new = ClientState(private.params, private.buffers, clients.params[ALPHA])
    states = fed.remember(state.clients, cohort, new)
    params, buffers = weighted_mean(fed.upload_model(shared), cohort.weights)
    return ServerState(params, buffers, states), terms


METHOD = Method(
    name="apfl",
    title="APFL: own parameters mixed with the global ones",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"mixing": 1.0}),
    state_types=(ServerState, ClientState),
    variants={"adaptive": {"adaptive": True}},
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 3 * sizes.parameters,  # w_i, v_i and their mixture
    personal=personal_models,
    shared=lambda state: (state.params, state.buffers),
)  # fmt: skip
