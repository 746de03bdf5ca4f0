"""FedProc: a prototypical contrastive term that hands over to the cross-entropy as the rounds go by.

X. Mu, Y. Shen, K. Cheng, X. Geng, J. Fu, T. Zhang, Z. Zhang, "FedProc: Prototypical Contrastive Federated Learning on
Non-IID Data", Future Generation Computer Systems 143, 2023, https://arxiv.org/abs/2109.12273.

In round t the clients minimise

    alpha CE + (1 - alpha) l_pc,    l_pc = -log( exp(<z, p_y>) / sum_c exp(<z, p_c>) ),    alpha = min(t / 100, 1),

with features z and class prototypes p_c at length one. After training, each client sends the sums of its features by
class, under its own model; the server averages models as in FedAvg, and the sums over all examples of the cohort make
the next prototypes. FedFA compares with two variants of it: its text's, whose prototypes move slowly, and its code's,
whose prototypes never move.

Notation
    code                    FedProc         shape
    features                z               [B, D], the input of the last fully connected layer
    prototypes              p_c             [C, D]
    sums, class_counts                      [K, C, D], [K, C]
    cross_entropy_weight    alpha           (a fixed one; the schedule where not given)
    ramp_rounds             100; T, FedFA
    prototype_momentum      lambda, FedFA   (0 in FedProc)
    temperature             tau, FedFA      (1, which is none, in FedProc)

Readings and deviations
    1. No projection head: the toolkit's networks have none. FedProc's z is a 256-wide projection at length one, and its
       classifier sees that; here z is normalised in the contrastive term alone.
    2. Rounds are counted from 0. Round 0 has no class means yet and is cross-entropy alone, whatever alpha.
    3. Features are normalised before they are averaged, so a prototype is shorter than one; the loss normalises it.
    4. Prototypes are taken over every example of a client's training part, without augmentation, in evaluation mode, so
       that the running statistics stay as training left them.
    5. A class that no client of the cohort has keeps its prototype. One that has never had one is left out of the
       softmax, and samples of it out of the mean.
    6. A zero feature has no direction: its cosines are 0 and it gets no gradient.

From the authors' code, with which the paper's text was not compared
    alpha, its 100 rounds and the cross-entropy of round 0; inner products without a temperature; prototypes from the
    trained local models (there from augmented batches in training mode, incomplete ones left out); that a class which
    is absent keeps its prototype.

FedFA's variants (its Eq. 21 and the text after it)
    In both the weight is t / T with T the run's number of rounds and t counted from 1, as FedFA's Algorithm 1 and code
    have it: `--ramp-rounds 0`. Eq. 21 prints no minus before its logarithm, which would drive features away.

    The text's: `--temperature 0.5 --prototype-momentum 0.5`. FedFA says that FedProc diverges if its prototypes are
    replaced in every round, and updates them "with momentum update (8)". Read here as p <- lambda p + (1 - lambda) mean
    at the server, with its lambda = 0.5; a class's first mean is taken as it is.

    The code's: `--prototypes identity`. p_c is a row of the identity that no round moves, and the inner products are
    those of plain features, without a temperature, from round 0 on. Nothing but the model is sent. The code draws the
    rows by its seed; here they are the first C.

Run it
    fedcli run fedproc --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedcli import Costs, Method, UserError, option
from fedcli.core import (
    Aux,
    Buffers,
    Client,
    LocalLoss,
    Network,
    Params,
    class_sums,
    cross_entropy,
    model_of,
    stack,
    weighted_mean,
)
from fedcli.core.class_vectors import EXCLUDED_LOGIT, no_vectors, unit
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What FedProc adds to FedAvg."""

    prototypes: str = option(
        "means",
        "The classes' mean features; or rows of the identity that stay, beside plain features, as in FedFA's code",
        symbol="p", choices=("means", "identity"),
    )  # fmt: skip
    ramp_rounds: int = option(
        100, "Rounds until the cross-entropy has all of the weight; 0 for those of the run, counted from 1",
        source="authors' code; FedFA, Eq. 21", unit="rounds", low=0,
    )  # fmt: skip
    cross_entropy_weight: float | None = option(
        None,
        "A fixed weight of the cross-entropy in place of the schedule; 1 leaves the contrastive term out",
        symbol="α", low=0, high=1,
    )  # fmt: skip
    temperature: float = option(
        1.0, "Temperature of the cosines; 1 is none", symbol="τ", source="FedFA, Eq. 21", low=0, open_low=True,
        only_with={"prototypes": ("means",)},
    )  # fmt: skip
    prototype_momentum: float = option(
        0.0, "Share of the old prototypes in the new", symbol="λ", source="FedFA, F.3", low=0, high=1, open_high=True,
        only_with={"prototypes": ("means",)},
    )  # fmt: skip


class Context(NamedTuple):
    """What a client is given for a round; all clients share it."""

    prototypes: Tensor  # [C, D]
    has_prototype: Tensor  # [C], bool
    cross_entropy_weight: Tensor  # scalar, alpha


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model
    buffers: Buffers
    prototypes: Tensor  # [C, D]
    has_prototype: Tensor  # [C], bool: whether any client has ever had the class; the identity's rows do not ask


def schedule(round: int, ramp_rounds: int, rounds: int, fixed: float | None = None) -> float:
    """alpha, the weight of the cross-entropy: min(round / ramp_rounds, 1), or FedFA's t / T.

    Args:
        round: From 0.
        ramp_rounds: 0 for t / T with t = round + 1 and T = rounds.
        rounds: Of the run.
        fixed: The weight of every round; None for the schedule.
    """
    if fixed is not None:
        return fixed
    if ramp_rounds == 0:
        return (round + 1) / rounds
    return min(round / ramp_rounds, 1.0)


def prototype_contrastive(
    features: Tensor, labels: Tensor, prototypes: Tensor, has_prototype: Tensor, temperature: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of softmax_c(<z, p_c> / tau) against the label, mean over samples; a scalar, in nats.

    Args:
        features: `[B, D]`; normalised here.
        labels: `[B]`.
        prototypes: `[C, D]`; normalised here.
        has_prototype: `[C]`, bool; a class without one is left out, and so are its samples.
        temperature: tau, positive.
        mask: `[B]`, False for padding.
    """
    cosines = unit(features) @ unit(prototypes).T  # [B, C]; Reading 6
    logits = torch.where(has_prototype, cosines / temperature, EXCLUDED_LOGIT)  # Reading 5
    usable = has_prototype[labels] if mask is None else has_prototype[labels] & mask.bool()
    return cross_entropy(logits, labels, usable)


def identity_contrastive(features: Tensor, labels: Tensor, prototypes: Tensor, mask: Tensor | None = None) -> Tensor:
    """The term of FedFA's code: cross-entropy of softmax_c(<z, p_c>), features and prototypes as they are.

    Arguments as of `prototype_contrastive`; a scalar, in nats, the mean over samples.
    """
    return cross_entropy(features @ prototypes.T, labels, mask)


def local_class_sums(clients: Client, cohort: Cohort, fed: Federation) -> tuple[Tensor, Tensor]:
    """Sums `[K, C, D]` and counts `[K, C]` of normalised features by class, of the training parts, by own models."""
    per_client = []
    for k, client in enumerate(cohort.client_ids):
        model = model_of(clients, k)
        predicted = fed.predict(model.params, model.buffers, fed.training[client])  # Reading 4
        features = unit(cast(Tensor, predicted.features))  # Reading 3
        per_client.append(class_sums(features, predicted.labels, fed.num_classes))
    sums, class_counts = stack(per_client)
    return sums.to(fed.device), class_counts.to(fed.device)


def aggregate_prototypes(
    sums: Tensor, class_counts: Tensor, previous: Tensor, has_previous: Tensor, momentum: float = 0.0
) -> Tensor:
    """lambda p + (1 - lambda) mean, `[C, D]`: the mean over the cohort's examples, mixed with the previous prototypes.

    Args:
        sums: `[K, C, D]`.
        class_counts: `[K, C]`.
        previous: `[C, D]`, kept for a class that no client has.
        has_previous: `[C]`; where False the mean is taken as it is.
        momentum: lambda, in [0, 1).
    """
    total = class_counts.sum(0)[:, None]  # [C, 1]
    mean = sums.sum(0) / total.clamp(min=1)
    mixed = torch.where(has_previous[:, None], momentum * previous + (1 - momentum) * mean, mean)
    return torch.where(total > 0, mixed, previous)  # Reading 5


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective, alpha CE + (1 - alpha) l_pc."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        prototypes = context.prototypes
        if config.prototypes == "identity":
            contrast = identity_contrastive(features, batch.y, prototypes, batch.mask)
        else:
            contrast = prototype_contrastive(
                features, batch.y, prototypes, context.has_prototype, config.temperature, batch.mask
            )
        alpha = context.cross_entropy_weight
        terms = {"cross_entropy": task, "contrastive": contrast}
        return alpha * task + (1 - alpha) * contrast, Aux(buffers, terms, features)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; prototypes of no class, or a row of the identity for each, which must have as many."""
    identity = config.prototypes == "identity"
    if identity and fed.num_classes > fed.feature_dim:
        raise UserError(
            f"--prototypes identity needs a feature for each class (got {fed.feature_dim} features for "
            f"{fed.num_classes} classes); choose another --backbone, or --prototypes means."
        )
    prototypes, has_prototype = no_vectors(fed)
    if identity:
        prototypes = torch.eye(fed.num_classes, fed.feature_dim, dtype=fed.dtype, device=fed.device)
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, prototypes, has_prototype)


def train_locally(
    state: ServerState, prototypes: Tensor, weight: float, cohort: Cohort, fed: Federation, config: Config
) -> tuple[Client, Terms]:
    """The clients' local training with these prototypes and a weight of the cross-entropy, and its terms."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    context = Context(prototypes, state.has_prototype, prototypes.new_tensor(weight))
    return fed.train(clients, cohort, make_local_loss(fed.network, config), context)


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round."""
    if config.prototypes == "identity":
        return run_identity_round(state, cohort, fed, config)
    weight = 1.0  # Reading 2
    if cohort.round > 0:
        weight = schedule(cohort.round, config.ramp_rounds, fed.num_rounds, config.cross_entropy_weight)
    old = fed.download(state.prototypes, cohort)
    clients, terms = train_locally(state, old, weight, cohort, fed, config)
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    sums, class_counts = fed.upload(local_class_sums(clients, cohort, fed))
    new = aggregate_prototypes(sums, class_counts, old, state.has_prototype, config.prototype_momentum)
    return ServerState(params, buffers, new, state.has_prototype | (class_counts > 0).any(0)), terms


def run_identity_round(
    state: ServerState, cohort: Cohort, fed: Federation, config: Config
) -> tuple[ServerState, Terms]:
    """One round with rows of the identity for prototypes, which nobody has to send."""
    weight = schedule(cohort.round, config.ramp_rounds, fed.num_rounds, config.cross_entropy_weight)
    clients, terms = train_locally(state, state.prototypes, weight, cohort, fed, config)
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    return state._replace(params=params, buffers=buffers), terms


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """The model and, where they move, the prototypes, both ways."""
    prototypes = 0 if config.prototypes == "identity" else fed.num_classes * fed.feature_dim
    total = len(cohort.client_ids) * (fed.sizes.parameters + prototypes)
    return Costs(down=total, up=total)


METHOD = Method(
    name="fedproc",
    title="FedProc: prototypical contrastive federated learning",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"cross_entropy_weight": 1.0}),
    state_types=(ServerState,),
    variants={"identity": {"prototypes": "identity"}},
    costs=costs,
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: sizes.parameters + sizes.num_classes * sizes.feature_dim,
)  # fmt: skip
