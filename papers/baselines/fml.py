"""FML: every client trains a private and a shared network, which learn from each other; the shared one is averaged.

T. Shen, J. Zhang, X. Jia, F. Zhang, G. Huang, P. Zhou, K. Kuang, F. Wu, C. Wu, "Federated Mutual Learning", 2020,
https://arxiv.org/abs/2006.16765.

Only the shared network (the paper's "meme" model) travels, so that the private ones may be of any kind. On every
minibatch a client takes one step of both networks, on

    L_private = alpha * CE(private) + (1 - alpha) * KL(p_shared || p_private)
    L_shared  = beta  * CE(shared)  + (1 - beta)  * KL(p_private || p_shared)

in which the other network's output is a constant.

Notation
    code                    paper           shape
    "private." parameters   theta_local     dict of tensors, of the client's network
    "shared." parameters    theta_meme      dict of tensors, of the first of the run's networks
    logits                  p = softmax     [B, C]
    private_task_share      alpha
    shared_task_share       beta

Readings and deviations
    1. The paper's form: the divergence is summed over classes, mean over samples, and the other network's output is a
       constant in it. HtFLlib, on which FedSA's code is built, divides by the number of classes too (the default of
       torch's `KLDivLoss`), lets the gradients of both losses through both networks, and clips each network's at norm
       10: `--form code`. With 100 classes the divergence is 100 times weaker there. FedSA's protocols have this form.
    2. The shared networks are averaged without weights, as in HtFLlib. A client that took no step sends what it got.
       Running statistics are averaged too; there they stay behind. No result depends on it: training does not use them.
    3. The shared network is the first that `--backbone` names, so a small one goes first. A private network of that
       kind starts from the same weights: with equal shares the two are one until the first averaging.
    4. One optimizer, the run's, moves both networks; its state is new in every round.
    5. The private network is what is tested, and nothing of it leaves the client.

Run it
    fedcli run fml --dataset digits
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
    ClientState,
    LocalLoss,
    Network,
    Params,
    cross_entropy,
    divergence,
    own_models,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.network_pairs import clip_both_gradients, join_models, join_tensors, run_both, separate_models
from fedcli.core.own_models import GroupRound, train_by_network

CLIP_NORM = 10.0  # of HtFLlib's form


@dataclass(frozen=True)
class Config:
    """What FML adds to local training."""

    private_task_share: float = option(
        0.5, "Share of cross-entropy in the private network's loss; the rest is divergence", symbol="α", low=0, high=1,
        off=1,
    )  # fmt: skip
    shared_task_share: float = option(
        0.5, "Share of cross-entropy in the shared network's loss; the rest is divergence", symbol="β", low=0, high=1,
        off=1,
    )  # fmt: skip
    form: str = option(
        "paper",
        "The paper's objective, or that of HtFLlib: weaker divergence, gradients through both networks, clipped",
        choices=("paper", "code"), before="paper",
    )  # fmt: skip


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # of the shared network
    buffers: Buffers
    clients: Mapping[int, ClientState]  # of those that have taken part


def mutual_loss(terms: Terms, config: Config) -> Tensor:
    """L_private + L_shared = alpha CE + (1 - alpha) KL + beta CE_shared + (1 - beta) KL_shared, from the four terms."""
    alpha = config.private_task_share
    beta = config.shared_task_share
    private_loss = alpha * terms["cross_entropy"] + (1 - alpha) * terms["divergence"]
    shared_loss = beta * terms["shared_cross_entropy"] + (1 - beta) * terms["shared_divergence"]
    return private_loss + shared_loss


def make_local_loss(private: Network, shared: Network, config: Config) -> LocalLoss:
    """L_private + L_shared of the paper; either depends on the parameters of its own network alone."""

    def local_loss(params, buffers, batch, context):
        output, meme = run_both(private, shared, params, buffers, batch)
        task = cross_entropy(output.logits, batch.y, batch.mask)
        learned = divergence(output.logits, meme.logits.detach(), batch.mask)  # KL(p_shared || p_private)
        shared_task = cross_entropy(meme.logits, batch.y, batch.mask)
        shared_learned = divergence(meme.logits, output.logits.detach(), batch.mask)  # KL(p_private || p_shared)
        terms = {
            "cross_entropy": task,
            "divergence": learned,
            "shared_cross_entropy": shared_task,
            "shared_divergence": shared_learned,
        }
        return mutual_loss(terms, config), Aux(join_tensors(output.buffers, meme.buffers), terms, output.features)

    return local_loss


def make_htfllib_loss(private: Network, shared: Network, config: Config) -> LocalLoss:
    """The same losses in HtFLlib's form (Reading 1), which is not the paper's.

    The gradients of both go through both networks and are clipped; divergences are divided by the number of classes.
    """

    def local_loss(params, buffers, batch, context):
        output, meme = run_both(private, shared, clip_both_gradients(params, CLIP_NORM), buffers, batch)
        num_classes = output.logits.shape[-1]
        task = cross_entropy(output.logits, batch.y, batch.mask)
        learned = divergence(output.logits, meme.logits, batch.mask) / num_classes
        shared_task = cross_entropy(meme.logits, batch.y, batch.mask)
        shared_learned = divergence(meme.logits, output.logits, batch.mask) / num_classes
        terms = {
            "cross_entropy": task,
            "divergence": learned,
            "shared_cross_entropy": shared_task,
            "shared_divergence": shared_learned,
        }
        return mutual_loss(terms, config), Aux(join_tensors(output.buffers, meme.buffers), terms, output.features)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """The first shared network; nobody has trained yet."""
    meme, *_ = fed.networks  # Reading 3
    params, buffers = fed.initial_model(meme)
    return ServerState(params, buffers, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round: the shared network down, training of both, the shared network up."""
    make_loss = make_htfllib_loss if config.form == "code" else make_local_loss
    meme, *_ = fed.networks  # Reading 3

    def train_group(group: Cohort) -> GroupRound:  # clients with the same private network
        received = fed.broadcast(state.params, state.buffers, group)
        both = join_models(private=own_models(state.clients, group, fed), shared=received)
        both, terms = fed.train(both, group, make_loss(group.network, meme, config))
        private, shared = separate_models(both)
        return GroupRound(ClientState(private.params, private.buffers), fed.upload_model(shared), terms)

    states, sent, terms = train_by_network(train_group, state.clients, cohort, fed)
    without_weights = torch.ones_like(cohort.weights)  # Reading 2
    params, buffers = weighted_mean(sent, without_weights)
    return ServerState(params, buffers, states), terms


METHOD = Method(
    name="fml",
    title="FML: private networks that learn from a shared one and it from them",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"private_task_share": 1.0, "shared_task_share": 1.0}),
    state_types=(ServerState, ClientState),
    variants={"code": {"form": "code", "private_task_share": 0.3, "shared_task_share": 0.6}},
    costs=both_ways(lambda sizes: sizes.parameters),  # the shared network alone
    default_protocol="fedsa:cifar10-silo",
    client_memory=lambda sizes: 2 * sizes.parameters,  # two networks, each counted as the largest of the run
    personal=lambda state: state.clients,
    mixed_networks=True,
)  # fmt: skip
