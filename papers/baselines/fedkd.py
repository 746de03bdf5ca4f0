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

The code's form
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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli import Method, option
from fedcli.core import (
    Aux,
    Client,
    LocalLoss,
    Network,
    Params,
    cross_entropy,
    divergence,
    masked_mean,
    to_device,
    tree_map,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.network_pairs import PRIVATE, SHARED, clipped, joined, part

CLIP_NORM = 10.0  # of the code's form
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
    buffers: Params
    projection: Tensor  # [D of the mentor, D of the mentee]


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # of the mentee
    buffers: Params
    in_step: Tensor  # ids of the clients that have this mentee
    clients: dict[int, ClientState]  # of those that have taken part


class Factors(NamedTuple):
    """A truncated matrix, U diag(s) V; in the code's form one for each pair of channels, which come first."""

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
    rank = int((energy < share * energy[-1]).sum()) + int(energy[-1] > 0)
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
    return ((sent.u * sent.s[..., None, :]) @ sent.v).reshape(like.shape) if isinstance(sent, Factors) else sent


def make_local_loss(mentor: Network, mentee: Network, config: Config) -> LocalLoss:
    """The sum of the two networks' objectives.

    In the paper's form either depends on the parameters of its own network, and on W (Readings 7 and 8); in the code's
    on all of them (Readings 9 and 11).
    """
    code = config.form == "code"

    def gate(params: Params) -> Params:
        return clipped(params, CLIP_NORM) if code else params

    def constant(value: Tensor) -> Tensor:
        return value if code else value.detach()

    def local_loss(params, buffers, batch, context):
        mentor_output = mentor(gate(part(params, PRIVATE)), part(buffers, PRIVATE), batch.x, batch.mask)
        shared = mentee(gate(part(params, SHARED)), part(buffers, SHARED), batch.x, batch.mask)
        (projection,) = gate({"": params["projection"]}).values()
        task = cross_entropy(mentor_output.logits, batch.y, batch.mask)
        shared_task = cross_entropy(shared.logits, batch.y, batch.mask)
        hidden = masked_mean((mentor_output.features - shared.features @ projection.T).square().mean(-1), batch.mask)
        classes = mentor_output.logits.shape[-1] if code else 1
        terms = {
            "cross_entropy": task,
            "divergence": divergence(mentor_output.logits, constant(shared.logits), batch.mask) / classes,
            "shared_cross_entropy": shared_task,
            "shared_divergence": divergence(shared.logits, constant(mentor_output.logits), batch.mask) / classes,
            "hidden": hidden,
        }
        learned = terms["divergence"] + terms["shared_divergence"] + (2 if code else 1) * hidden
        divisor = constant(task + shared_task).clamp(min=torch.finfo(task.dtype).eps if code else LEAST)
        loss = task + shared_task + config.distillation_weight * learned / divisor
        return loss, Aux(joined(mentor_output.buffers, shared.buffers), terms, mentor_output.features)

    return local_loss


def initial_projection(mentor: Network, mentee: Network, fed: Federation) -> Tensor:
    """W of a client that begins, from U(-1/sqrt(D), 1/sqrt(D)), D that of the mentee, as torch draws a layer."""
    bound = mentee.feature_dim**-0.5
    shape = mentor.feature_dim, mentee.feature_dim
    drawn = fed.generator("projection").uniform(-bound, bound, shape)
    return torch.from_numpy(drawn).to(fed.device, fed.dtype)


def exchange(trained: Params, state: ServerState, cohort: Cohort, fed: Federation, share: float) -> Params:
    """The mentee after the clients have sent its changes in `trained` `[K, ...]`, and the server the mean of these.

    Both are truncated to a share T of their energy.
    """
    total = tree_map(torch.zeros_like, state.params)
    for k in range(len(cohort.client_ids)):
        change = {name: value[k] - state.params[name] for name, value in trained.items()}
        sent = fed.upload({name: compress(value, share) for name, value in change.items()})
        total = {name: value + restore(sent[name], value) for name, value in total.items()}
    mean = {name: value / len(cohort.client_ids) for name, value in total.items()}
    sent = fed.download({name: compress(value, share) for name, value in mean.items()}, cohort)
    return {name: value + restore(sent[name], value) for name, value in state.params.items()}


def init(fed: Federation, config: Config) -> ServerState:
    """The first mentee, which everybody can make from the seed; nobody has trained yet."""
    return ServerState(*fed.initial_model(fed.networks[0]), torch.arange(fed.num_clients), {})


def train_clients(
    state: ServerState, cohort: Cohort, fed: Federation, config: Config
) -> tuple[Mapping[int, ClientState], tuple[Params, Params], Terms]:
    """All clients' local training; returns what they keep, their mentees `[K, ...]` and their terms."""
    states = state.clients
    mentee = fed.networks[0]
    groups = fed.groups(cohort)
    mentees = []
    terms = []
    for group in groups:  # clients with the same mentor
        size = len(group.client_ids)
        copies = tree_map(lambda leaf, size=size: leaf.expand(size, *leaf.shape), (state.params, state.buffers))
        first = ClientState(*fed.initial_model(group.network), initial_projection(group.network, mentee, fed))
        private = fed.recall(states, group, first)
        params = {**joined(private.params, copies[0]), "projection": private.projection}
        both = Client(params, joined(private.buffers, copies[1]), optimizer={})
        both, group_terms = fed.train(both, group, make_local_loss(group.network, mentee, config))
        private = ClientState(part(both.params, PRIVATE), part(both.buffers, PRIVATE), both.params["projection"])
        states = fed.remember(states, group, private)
        mentees.append((part(both.params, SHARED), part(both.buffers, SHARED)))
        terms.append(group_terms)
    return states, fed.in_order(cohort, groups, mentees), fed.in_order(cohort, groups, terms)


def code_factors(weights: Tensor, share: float) -> Factors | Tensor:
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


def exchange_mentees(trained: Params, cohort: Cohort, fed: Federation, share: float) -> Params:
    """The mean of the clients' truncated mentees `[K, ...]`, which is sent truncated as well. Reading 10."""
    total = {name: torch.zeros_like(value[0]) for name, value in trained.items()}
    for k in range(len(cohort.client_ids)):
        sent = fed.upload({name: code_factors(value[k], share) for name, value in trained.items()})
        total = {name: value + restore(sent[name], value) for name, value in total.items()}
    mean = {name: value / len(cohort.client_ids) for name, value in total.items()}
    sent = fed.download({name: code_factors(value, share) for name, value in mean.items()}, cohort)
    return {name: restore(sent[name], value) for name, value in mean.items()}


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round."""
    code = config.form == "code"
    if not code:  # the running statistics, and the mentee to those that lack it (Reading 2)
        behind = np.setdiff1d(cohort.client_ids, state.in_step.cpu())
        fed.broadcast({}, state.buffers, cohort)
        fed.broadcast(state.params, {}, cohort._replace(client_ids=behind))
    states, (trained, buffers), terms = train_clients(state, cohort, fed, config)
    number = cohort.round - 1 if code else cohort.round  # Readings 10 and 5
    share = energy_share(config.energy_start, config.energy_end, number, fed.num_rounds)
    # On the host, since each decomposition would make Python wait for the device.
    trained, before = to_device((trained, state.params), "cpu")
    if code:
        params = exchange_mentees(trained, cohort, fed, share)
    else:
        params = exchange(trained, state._replace(params=before), cohort, fed, share)
    params = to_device(params, fed.device)
    _, buffers = fed.upload_model(Client({}, buffers, optimizer={}))
    buffers = weighted_mean(buffers, torch.ones_like(cohort.weights))
    return ServerState(params, buffers, torch.as_tensor(np.sort(cohort.client_ids)), states), terms


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
    personal=lambda state: {client: (model.params, model.buffers) for client, model in state.clients.items()},
    mixed_networks=True,
)  # fmt: skip
