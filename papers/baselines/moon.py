"""MOON: pull a client's features to the global model's and away from its own last local model's.

Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021, https://arxiv.org/abs/2103.16257.
Algorithm 1, Eqs. 3 and 4.

Averaging is done as in FedAvg. While a client trains, each of its samples goes through three models: the one in
training (z), the received global one (z_glob) and the client's own model as it left the client's last round (z_prev).
To the cross-entropy is added mu times

    l_con = -log( exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)) )

with sim the cosine (Eq. 3), the mean over samples (Eq. 4).

Notation
    code                    paper           shape
    global_params           w^t             dict of tensors
    previous_params         w_i^{t-1}       dict of tensors
    features                z               [B, D]
    global_features         z_glob          [B, D]
    previous_features       z_prev          [B, D]
    contrastive_weight      mu
    temperature             tau

Readings and deviations
    1. No projection head: z is the input of the last fully connected layer. The paper puts a two-layer head in front of
       the classifier (256 wide). FedFM and FedFA compare without it; FedFM's memory is exactly three plain models.
    2. mu = 1 by default. The paper tunes it: 5 on CIFAR-10, 1 on CIFAR-100 and Tiny-ImageNet; the protocols of FedFM
       and FedFA take the same.
    3. "Previous" is the last round that the client took part in. Taking part for the first time, it has no such model:
       its contrastive term is 0 for the round. The authors' code does the same in its first round, and takes a random
       model for a client that joins later.
    4. The global and the previous model run in evaluation mode, so with their running statistics, the latter with those
       it had when it was kept; both are constants of the loss. That is what the authors' code does.
    5. The logarithm is taken for each sample, then the mean. FedFA's code averages the cosines of a batch first.
    6. A zero feature has no direction: its cosines are 0 and it gets no gradient.

Run it
    fedcli run moon --dataset digits
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
    ClientState,
    LocalLoss,
    Network,
    Params,
    axes_of,
    cross_entropy,
    masked_mean,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms

SMALL = 1e-6  # a feature shorter than this has no direction worth following


@dataclass(frozen=True)
class Config:
    """What MOON adds to FedAvg."""

    contrastive_weight: float = option(
        1.0, "Weight of the model-contrastive term", symbol="μ", source="Eq. 4", low=0, off=0,
        tune=(0.1, 1.0, 5.0, 10.0),
    )  # fmt: skip
    temperature: float = option(0.5, "Temperature of the cosines", symbol="τ", source="Eq. 3", low=0, open_low=True)


class Context(NamedTuple):
    """What a client is given for a round."""

    global_params: Params  # the received model w^t
    global_buffers: Buffers
    previous_params: Params  # the client's last local model
    previous_buffers: Buffers
    has_previous: Tensor  # scalar bool: whether the client has one


CONTEXT_AXES = axes_of(
    Context, global_params=None, global_buffers=None, previous_params=0, previous_buffers=0, has_previous=0
)


class ServerState(NamedTuple):
    """What the server keeps between rounds, and by client id what the clients keep."""

    params: Params  # global model
    buffers: Buffers
    clients: Mapping[int, ClientState]


def cosine(vectors: Tensor, others: Tensor) -> Tensor:
    """The cosine of each pair, 0 without gradient where one of the two has (almost) no length; `[...]`.

    Args:
        vectors: `[..., D]`.
        others: `[..., D]`.
    """
    squares = vectors.square().sum(-1)
    other_squares = others.square().sum(-1)
    long = (squares > SMALL**2) & (other_squares > SMALL**2)
    lengths = torch.where(long, squares, 1.0).sqrt() * torch.where(long, other_squares, 1.0).sqrt()
    return torch.where(long, (vectors * others).sum(-1) / lengths, 0.0)


def model_contrastive(
    features: Tensor, global_features: Tensor, previous_features: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """Eq. 3: -log of the softmax share of the global model's cosine, mean over samples; a scalar, in nats.

    Args:
        features: z, `[B, D]`.
        global_features: z_glob, `[B, D]`.
        previous_features: z_prev, `[B, D]`.
        temperature: tau, positive.
        mask: `[B]`, False for padding.
    """
    positive = cosine(features, global_features) / temperature  # [B]
    negative = cosine(features, previous_features) / temperature
    return masked_mean(torch.logaddexp(positive, negative) - positive, mask)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective of Eq. 4, l_sup + mu l_con."""

    def fixed_features(params, buffers, batch):  # by a model that is not trained, Reading 4
        return network(params, buffers, batch.x, batch.mask, train=False).features.detach()

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)  # z
        global_features = fixed_features(context.global_params, context.global_buffers, batch)  # z_glob
        previous_features = fixed_features(context.previous_params, context.previous_buffers, batch)  # z_prev
        task = cross_entropy(logits, batch.y, batch.mask)
        contrast = model_contrastive(features, global_features, previous_features, config.temperature, batch.mask)
        contrast = torch.where(context.has_previous, contrast, 0.0)
        terms = {"cross_entropy": task, "contrastive": contrast}
        return task + config.contrastive_weight * contrast, Aux(buffers, terms, features)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; no client has taken part."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, clients={})


def local_context(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[Context, Context]:
    """What the cohort's clients train with, and its axes: the received model, and each client's own last one."""
    received = ClientState(state.params, state.buffers)  # stands in for a last model that there is not
    previous = fed.recall(state.clients, cohort, received)
    has_previous = [int(client) in state.clients for client in cohort.client_ids]
    context = Context(
        global_params=received.params,
        global_buffers=received.buffers,
        previous_params=previous.params,
        previous_buffers=previous.buffers,
        has_previous=torch.tensor(has_previous, device=fed.device),
    )
    return context, CONTEXT_AXES


def aggregate(state: ServerState, clients: Client, cohort: Cohort, fed: Federation, config: Config) -> ServerState:
    """The mean of the models, weighted by examples; each client keeps its own."""
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    states = fed.remember(state.clients, cohort, ClientState(clients.params, clients.buffers))
    return ServerState(params, buffers, states)


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, round t."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # w^t to every party
    context, axes = local_context(state, cohort, fed, config)
    local_loss = make_local_loss(fed.network, config)
    clients, terms = fed.train(clients, cohort, local_loss, context, axes)  # PartyLocalTraining
    return aggregate(state, clients, cohort, fed, config), terms  # w^{t+1} = sum_k n_k / n w_k^t


METHOD = Method(
    name="moon",
    title="MOON: model-contrastive federated learning",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"contrastive_weight": 0.0}),
    state_types=(ServerState, ClientState),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 3 * sizes.parameters,  # the model in training, the global and the previous one
)  # fmt: skip
