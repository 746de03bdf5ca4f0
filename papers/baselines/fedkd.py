"""FedKD: a private mentor and a shared mentee teach each other; of the mentee's updates singular factors are sent.

C. Wu, F. Wu, L. Lyu, Y. Huang, X. Xie, "Communication-efficient federated learning via knowledge distillation", Nature
Communications 13, 2022, https://doi.org/10.1038/s41467-022-29763-x; https://arxiv.org/abs/2108.13323.

Every client trains both networks on its data, each on

    L = CE + (KL(p_other || p) + MSE(H_mentor, W H_mentee)) / (CE_mentor + CE_mentee),

so that the two trust each other less while they are bad. Only the mentee is averaged, and neither it nor its update
travels as it is: an update is a matrix U diag(s) V, of which so many singular values are kept that their squares make
up a share T of the sum of all squares. T grows over the rounds, since later updates need more precision. The server
sends the mean update in the same form.

Notation
    code                    paper           shape
    "private." parameters   Theta^t         dict of tensors, the mentor, of the client's network
    "shared." parameters    Theta^s         dict of tensors, the mentee, of the first of the run's networks
    "projection"            W^h             [D of the mentor, D of the mentee]
    features                H^t, H^s        [B, D]
    change                  g               of one tensor [P, ...], taken as a matrix [P, Q]
    energy_share(...)       T               scalar

Readings and deviations
    1.  Algorithm and equations exchange gradients, the authors' code the mentee's change over a local phase: so here.
    2.  Everybody starts from the same mentee and applies the same truncated mean, so clients stay in step with the
        server. One that sat a round out is sent the whole mentee instead.
    3.  A convolution's weights are one matrix, output channels times the rest (in the authors' code one of every two
        last, or middle, dimensions). Where factors would have as many floats as the matrix or more, the matrix is sent
        as it is; so are vectors, and running statistics of batch normalisation.
    4.  As many values are kept as reach the share. The authors' code keeps none at all where all would be needed.
    5.  The mean is not weighted. T goes linearly from T_start to T_end; in the first round it is one step above
        T_start, in the last T_end, as in the authors' code.
    6.  The hidden features are the inputs of the last layers; there is no attention here, whose distance the paper
        adds. W is a client's own and trained along.
    7.  In a network's loss the other's logits and the divisor are constants; in both codes gradients go everywhere. The
        divisor is taken as 0.01 where it is smaller: a client with one class is soon certain.
    8.  The divergence is summed over classes, mean over samples; both codes also divide by the number of classes.

HtFLlib's form
    9.  HtFLlib, on which FedSA's code is built, has another method under this name, `--form code`; FedSA's protocols
        have it. Divergences are divided by the number of classes, gradients go through both networks, the divisor and
        W, the hidden distance counts once for either network, and the gradients of mentor, mentee and W are clipped at
        norm 10, each by itself.
    10. The mentee itself is truncated, on the way up and, as the mean, on the way down; clients go on from what is
        left of it. A convolution is a matrix of height times width for each pair of channels, and all of these keep
        equally many values. What is kept has to exceed the share, T begins at T_start, and of a tensor whose every
        value would be needed none is kept: the mentee's head for ten classes, which is 10 x 512, and its convolutions
        of 1 x 1 are 0 from then on until training moves them. Factors are sent even where they are larger.
    11. There every client is sent the mentee in every round; the floats of those that sit out are not counted here.
        The divisor is kept from 0, where there all becomes NaN. Running statistics stay behind with the clients, here
        they are averaged; no result depends on them.

Run it
    fedcli run fedkd --dataset digits
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli import Method, option
from fedcli.core import (
    Aux,
    Buffers,
    LocalLoss,
    Model,
    Network,
    Params,
    copies,
    cross_entropy,
    divergence,
    masked_mean,
    personal_models,
    select,
    to_device,
    tree_map,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.network_pairs import (
    clip_both_gradients,
    clip_gradient,
    join_models,
    join_tensors,
    run_both,
    separate_models,
)
from fedcli.core.own_models import CohortRound, GroupRound, train_by_network

CLIP_NORM = 10.0  # of HtFLlib's form
LEAST = 0.01  # the divisor's least value


@dataclass(frozen=True)
class Config:
    """What FedKD adds to local training."""

    distillation_weight: float = option(
        1.0, "Weight of what the networks learn from each other; the paper has no other", low=0, off=0
    )
    energy_start: float = option(
        0.95, "Share of the singular values' squares that is kept at first", symbol="T_start", low=0, high=1
    )
    energy_end: float = option(
        0.98, "Share that is kept at the end; 1 for both sends everything", symbol="T_end", low=0, high=1, open_low=True
    )
    form: str = option(
        "paper", "The paper's objective and exchange, or those of HtFLlib, where the mentee itself is truncated",
        choices=("paper", "code"), before="paper",
    )  # fmt: skip


class ClientState(NamedTuple):
    """What a client keeps between rounds, beside the mentee."""

    params: Params  # its mentor
    buffers: Buffers
    projection: Tensor  # [D of the mentor, D of the mentee]


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # of the mentee
    buffers: Buffers
    in_step: Tensor  # ids of the clients that have this mentee
    clients: Mapping[int, ClientState]  # of those that have taken part


class Factors(NamedTuple):
    """A truncated matrix, U diag(s) V; in HtFLlib's form one for each pair of channels, which come first."""

    u: Tensor  # [P, r]
    s: Tensor  # [r]
    v: Tensor  # [r, Q]


def energy_share(start: float, end: float, round: int, num_rounds: int) -> float:
    """T, linear over the rounds; `end` in the last."""
    return start + (end - start) * (round + 1) / num_rounds


def truncate(matrix: Tensor, share: float) -> Factors:
    """The largest singular values whose squares add up to at least `share` of the sum of all, and their vectors.

    Args:
        matrix: `[P, Q]`.
        share: T, in [0, 1].
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    energy = s.square().cumsum(0)
    total = energy[-1]
    num_below = int((energy < share * total).sum())
    rank = num_below + 1 if total > 0 else num_below  # the next value reaches the share
    return Factors(u[:, :rank], s[:rank], v[:rank])


def compress(change: Tensor, share: float) -> Factors | Tensor:
    """What is sent of one tensor's change: factors, or the tensor where these are not smaller or it is no matrix.

    Args:
        change: `[P, ...]`.
        share: T, in [0, 1].
    """
    if change.dim() < 2:
        return change
    factors = truncate(change.flatten(1), share)
    return factors if sum(part.numel() for part in factors) < change.numel() else change


def restore(sent: Factors | Tensor, like: Tensor) -> Tensor:
    """The change that was sent, in the shape of `like`."""
    if not isinstance(sent, Factors):
        return sent
    matrix = (sent.u * sent.s[..., None, :]) @ sent.v
    return matrix.reshape(like.shape)


def restore_all(sent: Mapping[str, Factors | Tensor], like: Params) -> Params:
    """The changes of all tensors that were sent, in the shapes of `like`."""
    return {name: restore(sent[name], value) for name, value in like.items()}


def hidden_distance(mentor: Tensor, mentee: Tensor, projection: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean square of the difference of the mentor's features and of the mentee's, which W projects; a scalar.

    Args:
        mentor: `[B, D of the mentor]`.
        mentee: `[B, D of the mentee]`.
        projection: W, `[D of the mentor, D of the mentee]`.
        mask: `[B]`, False for padding.
    """
    return masked_mean((mentor - mentee @ projection.T).square().mean(-1), mask)


def make_local_loss(mentor: Network, mentee: Network, config: Config) -> LocalLoss:
    """The sum of the two networks' objectives in the paper.

    Either depends on the parameters of its own network, and on W (Readings 7 and 8).
    """

    def local_loss(params, buffers, batch, context):
        mentor_output, mentee_output = run_both(mentor, mentee, params, buffers, batch)
        task = cross_entropy(mentor_output.logits, batch.y, batch.mask)
        mentee_task = cross_entropy(mentee_output.logits, batch.y, batch.mask)
        learned = divergence(mentor_output.logits, mentee_output.logits.detach(), batch.mask)  # KL(p^s || p^t)
        mentee_learned = divergence(mentee_output.logits, mentor_output.logits.detach(), batch.mask)
        hidden = hidden_distance(mentor_output.features, mentee_output.features, params["projection"], batch.mask)
        divisor = (task + mentee_task).detach().clamp(min=LEAST)
        loss = task + mentee_task + config.distillation_weight * (learned + mentee_learned + hidden) / divisor
        terms = {
            "cross_entropy": task,
            "divergence": learned,
            "shared_cross_entropy": mentee_task,
            "shared_divergence": mentee_learned,
            "hidden": hidden,
        }
        return loss, Aux(join_tensors(mentor_output.buffers, mentee_output.buffers), terms, mentor_output.features)

    return local_loss


def initial_projection(mentor: Network, mentee: Network, fed: Federation) -> Tensor:
    """W of a client that begins, from U(-1/sqrt(D), 1/sqrt(D)), D that of the mentee, as torch draws a layer."""
    bound = mentee.feature_dim**-0.5
    shape = mentor.feature_dim, mentee.feature_dim
    drawn = fed.generator("projection").uniform(-bound, bound, shape)
    return torch.from_numpy(drawn).to(fed.device, fed.dtype)


def exchange(trained: Params, before: Params, cohort: Cohort, fed: Federation, share: float) -> Params:
    """The mentee after the clients have sent its changes, and the server the mean of these.

    Both are truncated to a share T of their energy.

    Args:
        trained: The clients' mentees, `[K, ...]`.
        before: The mentee before the round.
        cohort: The clients.
        fed: The federation.
        share: T, in [0, 1].
    """
    size = len(cohort.client_ids)
    total = tree_map(torch.zeros_like, before)
    for k in range(size):
        change = tree_map(torch.sub, select(trained, k), before)
        sent = fed.upload({name: compress(value, share) for name, value in change.items()})
        total = tree_map(torch.add, total, restore_all(sent, before))
    mean = tree_map(lambda value: value / size, total)
    answer = fed.download({name: compress(value, share) for name, value in mean.items()}, cohort)
    return tree_map(torch.add, before, restore_all(answer, before))


def init(fed: Federation, config: Config) -> ServerState:
    """The first mentee, which everybody can make from the seed; nobody has trained yet."""
    mentee, *_ = fed.networks
    params, buffers = fed.initial_model(mentee)
    return ServerState(params, buffers, in_step=torch.arange(fed.num_clients), clients={})


def train_clients(
    state: ServerState, cohort: Cohort, fed: Federation, make_loss: Callable[[Network, Network], LocalLoss]
) -> CohortRound:
    """All clients' local training; a client keeps its mentor and W, and what it sends is its mentee."""
    mentee, *_ = fed.networks

    def train_group(group: Cohort) -> GroupRound:  # clients with the same mentor
        received = copies(Model(state.params, state.buffers), len(group.client_ids))
        params, buffers = fed.initial_model(group.network)
        newcomer = ClientState(params, buffers, initial_projection(group.network, mentee, fed))
        own = fed.recall(state.clients, group, newcomer)
        both = join_models(private=own, shared=received)
        both = both._replace(params={**both.params, "projection": own.projection})
        both, terms = fed.train(both, group, make_loss(group.network, mentee))
        private, shared = separate_models(both)
        kept = ClientState(private.params, private.buffers, both.params["projection"])
        return GroupRound(kept, sent=shared, terms=terms)

    return train_by_network(train_group, state.clients, cohort, fed)


# The form of HtFLlib, `--form code`


def make_htfllib_loss(mentor: Network, mentee: Network, config: Config) -> LocalLoss:
    """The same terms in HtFLlib's form, in which all depend on all parameters (Readings 9 and 11)."""

    def local_loss(params, buffers, batch, context):
        networks_params = clip_both_gradients(params, CLIP_NORM)
        (projection,) = clip_gradient({"projection": params["projection"]}, CLIP_NORM).values()
        mentor_output, mentee_output = run_both(mentor, mentee, networks_params, buffers, batch)
        num_classes = mentor_output.logits.shape[-1]
        task = cross_entropy(mentor_output.logits, batch.y, batch.mask)
        mentee_task = cross_entropy(mentee_output.logits, batch.y, batch.mask)
        learned = divergence(mentor_output.logits, mentee_output.logits, batch.mask) / num_classes
        mentee_learned = divergence(mentee_output.logits, mentor_output.logits, batch.mask) / num_classes
        hidden = hidden_distance(mentor_output.features, mentee_output.features, projection, batch.mask)
        divisor = (task + mentee_task).clamp(min=torch.finfo(task.dtype).eps)
        loss = task + mentee_task + config.distillation_weight * (learned + mentee_learned + 2 * hidden) / divisor
        terms = {
            "cross_entropy": task,
            "divergence": learned,
            "shared_cross_entropy": mentee_task,
            "shared_divergence": mentee_learned,
            "hidden": hidden,
        }
        return loss, Aux(join_tensors(mentor_output.buffers, mentee_output.buffers), terms, mentor_output.features)

    return local_loss


def truncate_as_htfllib(weights: Tensor, share: float) -> Factors | Tensor:
    """What HtFLlib sends of a tensor, by which a share of its singular values' squares is exceeded. Reading 10.

    Args:
        weights: `[P, Q]`, or `[O, I, P, Q]`, of which the O I matrices keep equally many values.
        share: T, in [0, 1].

    Returns:
        Factors, without any value where all of them would be needed; the tensor where it has one row or dimension.
    """
    if weights.dim() < 2 or len(weights) < 2:
        return weights
    u, s, v = torch.linalg.svd(weights, full_matrices=False)
    energy = s.square().reshape(-1, s.shape[-1]).sum(0).cumsum(0)  # of all matrices' first values
    if energy[-1] == 0:
        return weights
    enough = (energy[:-1] > share * energy[-1]).nonzero()
    rank = int(enough[0]) + 1 if len(enough) else 0
    return Factors(u[..., :rank], s[..., :rank], v[..., :rank, :])


def exchange_as_htfllib(trained: Params, cohort: Cohort, fed: Federation, share: float) -> Params:
    """The mean of the clients' truncated mentees `[K, ...]`, which is sent truncated as well. Reading 10."""
    size = len(cohort.client_ids)
    total = tree_map(torch.zeros_like, select(trained, 0))
    for k in range(size):
        mentee = select(trained, k)
        sent = fed.upload({name: truncate_as_htfllib(value, share) for name, value in mentee.items()})
        total = tree_map(torch.add, total, restore_all(sent, mentee))
    mean = tree_map(lambda value: value / size, total)
    answer = fed.download({name: truncate_as_htfllib(value, share) for name, value in mean.items()}, cohort)
    return restore_all(answer, mean)


# The round


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round, in the paper's form or in that of HtFLlib."""
    if config.form == "code":
        return htfllib_round(state, cohort, fed, config)
    return paper_round(state, cohort, fed, config)


def paper_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round of the paper: what the clients and the server send are truncated changes of the mentee."""
    behind = np.setdiff1d(cohort.client_ids, state.in_step.cpu())
    fed.count_broadcast({}, state.buffers, len(cohort.client_ids))  # the running statistics
    fed.count_broadcast(state.params, {}, len(behind))  # the mentee to those that lack it, Reading 2
    states, mentees, terms = train_clients(state, cohort, fed, partial(make_local_loss, config=config))
    share = energy_share(config.energy_start, config.energy_end, cohort.round, fed.num_rounds)  # Reading 5
    # On the host, since each decomposition would make Python wait for the device.
    trained, before = to_device((mentees.params, state.params), "cpu")
    params = to_device(exchange(trained, before, cohort, fed, share), fed.device)
    buffers = mean_statistics(mentees, cohort, fed)
    return ServerState(params, buffers, torch.as_tensor(np.sort(cohort.client_ids)), states), terms


def htfllib_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round of HtFLlib, where the clients and the server send the truncated mentee itself."""
    states, mentees, terms = train_clients(state, cohort, fed, partial(make_htfllib_loss, config=config))
    share = energy_share(config.energy_start, config.energy_end, cohort.round - 1, fed.num_rounds)  # Reading 10
    trained = to_device(mentees.params, "cpu")  # on the host, as in `paper_round`
    params = to_device(exchange_as_htfllib(trained, cohort, fed, share), fed.device)
    buffers = mean_statistics(mentees, cohort, fed)
    return ServerState(params, buffers, torch.as_tensor(np.sort(cohort.client_ids)), states), terms


def mean_statistics(mentees: Model, cohort: Cohort, fed: Federation) -> Buffers:
    """The mean of the running statistics that the clients send."""
    sent = fed.upload_model(Model({}, mentees.buffers))
    return weighted_mean(sent.buffers, torch.ones_like(cohort.weights))


METHOD = Method(
    name="fedkd",
    title="FedKD: private mentors and a shared mentee, whose updates are sent as singular factors",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"distillation_weight": 0.0}),
    state_types=(ServerState, ClientState),
    variants={"code": {"form": "code"}},
    default_protocol="fedsa:cifar10-silo",
    # Two networks, each counted as the largest of the run, and the projection.
    client_memory=lambda sizes: 2 * sizes.parameters + sizes.feature_dim**2,
    personal=personal_models,
    mixed_networks=True,
)  # fmt: skip
