"""Remembered means: draw features to the class means that a client remembers and the server has gathered.

An example for docs/add-your-method.md, not from a paper. Here a card cites the paper, with a link.

A client knows its classes from few examples, the server from many clients. Each feature is drawn to a point half-way
between the two means of its class, so a client takes part in a common geometry and keeps some of its own.

    R = mean over the batch of ||h - (m_i,y + g_y) / 2||^2 / D                                          (1)
    L = cross-entropy + lambda R                                                                        (2)
    m_i,c <- beta m_i,c + (1 - beta) mu_i,c,  mu_i,c the mean of class c after training                 (3)
    g_c = sum_i n_i,c m_i,c / sum_i n_i,c                                                               (4)

Notation
    code                    symbol      shape
    features                h           [B, D]
    ClientState.means       m_i         [C, D]; of a cohort [K, C, D]
    ClientState.counts      n_i         [C]; of a cohort [K, C]
    ServerState.means       g           [C, D]
    pull_weight             lambda
    memory                  beta

Readings and deviations
    1. A class that the client or the server has no mean of yet has no target: its samples are left out of the term.
    2. A client remembers a class that it has no examples of in a round as it was.

Run it
    fedcli run docs/examples/my_method.py --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Method, option
from fedcli.core import Aux, Buffers, LocalLoss, Network, Params, cross_entropy, masked_mean, weighted_mean


@dataclass(frozen=True)
class Config:
    """What it adds to FedAvg."""

    pull_weight: float = option(1.0, "Weight of the pull to the class means", symbol="λ", source="Eq. 1", low=0, off=0)
    memory: float = option(0.5, "Share of a client's old means", symbol="β", source="Eq. 3", low=0, high=1)


class Context(NamedTuple):
    """What a client is given for a round."""

    own: Tensor  # m_i [C, D], each client's own
    shared: Tensor  # g [C, D]
    has_target: Tensor  # [C], each client's own


CONTEXT_AXES = Context(own=0, shared=None, has_target=0)  # 0: a client axis in front, None: the same for all


class ClientState(NamedTuple):
    """What a client keeps between the rounds it takes part in."""

    means: Tensor  # m_i [C, D]
    counts: Tensor  # n_i [C], examples behind each mean, 0 where there is none


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params
    buffers: Buffers
    means: Tensor  # g [C, D]
    has_class: Tensor  # [C], whether g has a mean
    clients: dict[int, ClientState]


def pull(features: Tensor, labels: Tensor, context: Context, mask: Tensor | None = None) -> Tensor:
    """Eq. 1: mean over the samples of ||h - (m_i,y + g_y) / 2||^2 / D.

    Args:
        features: `[B, D]`.
        labels: `[B]`.
        context: Of this client.
        mask: `[B]`, False for padding.

    Returns:
        Scalar, 0 where no sample has a target.
    """
    target = (context.own + context.shared)[labels] / 2  # [B, D]
    wanted = context.has_target[labels]
    mask = wanted if mask is None else mask & wanted
    return masked_mean((features - target).square().mean(1), mask)


def remember(state: ClientState, means: Tensor, counts: Tensor, memory: float) -> ClientState:
    """Eq. 3: m_i <- beta m_i + (1 - beta) mu_i for the classes in the data; the first time mu_i itself.

    Args:
        state: Of K clients, `[K, C, D]` and `[K, C]`.
        means: mu_i, the class means after training, `[K, C, D]`.
        counts: `[K, C]`.
        memory: beta.
    """
    mixed = torch.where(state.counts[..., None] > 0, memory * state.means + (1 - memory) * means, means)
    present = counts > 0
    return ClientState(torch.where(present[..., None], mixed, state.means), torch.where(present, counts, state.counts))


def gather(old: Tensor, has_class: Tensor, sent: ClientState) -> tuple[Tensor, Tensor]:
    """Eq. 4: g_c = sum_i n_ic m_ic / sum_i n_ic over the cohort; the old one for a class that nobody has.

    Args:
        old: g before, `[C, D]`.
        has_class: `[C]`, whether there is one.
        sent: Of the cohort, `[K, C, D]` and `[K, C]`.

    Returns:
        g `[C, D]` and whether there is one `[C]`.
    """
    total = sent.counts.sum(0)  # [C]
    mean = (sent.counts[..., None] * sent.means).sum(0) / total.clamp(min=1)[:, None]
    return torch.where(total[:, None] > 0, mean, old), has_class | (total > 0)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """Eq. 2: cross-entropy + lambda pull."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        pulled = pull(features, batch.y, context, batch.mask)
        return task + config.pull_weight * pulled, Aux(buffers, {"cross_entropy": task, "pull": pulled}, features)

    return local_loss


def init(fed, config: Config) -> ServerState:
    """The initial model; nobody has a mean yet."""
    params, buffers = fed.initial_model()
    means = torch.zeros(fed.num_classes, fed.feature_dim, dtype=fed.dtype, device=fed.device)
    return ServerState(params, buffers, means, torch.zeros_like(means[:, 0], dtype=torch.bool), {})


def run_round(state: ServerState, cohort, fed, config: Config) -> tuple[ServerState, dict[str, Tensor]]:
    """One round."""
    nothing = ClientState(torch.zeros_like(state.means), torch.zeros_like(state.has_class, dtype=torch.int64))
    kept = fed.recall(state.clients, cohort, nothing)  # [K, ...], of clients new to the run `nothing`
    clients = fed.broadcast(state.params, state.buffers, cohort)
    shared = fed.download(state.means, cohort)
    context = Context(kept.means, shared, (kept.counts > 0) & state.has_class)
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network, config), context, CONTEXT_AXES)
    kept = remember(kept, *fed.class_means(clients, cohort), config.memory)
    sent = ClientState(fed.upload(kept.means, present=kept.counts > 0), fed.upload(kept.counts))
    means, has_class = gather(state.means, state.has_class, sent)
    model = weighted_mean(fed.upload_model(clients), cohort.weights)
    return ServerState(*model, means, has_class, fed.remember(state.clients, cohort, kept)), terms


METHOD = Method(
    name="remembered-means",
    title="Remembered means: features drawn between the client's and the server's class means",
    config=Config,
    init=init,
    run_round=run_round,
    reduces_to=("fedavg", {"pull_weight": 0.0}),
    state_types=(ServerState, ClientState),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: sizes.parameters + 2 * sizes.num_classes * sizes.feature_dim,  # w, m_i and g
)
