"""Federated distillation: clients keep their own models and share their mean output for each class.

E. Jeong, S. Oh, H. Kim, J. Park, M. Bennis, S.-L. Kim, "Communication-Efficient On-Device Machine Learning: Federated
Distillation and Augmentation under Non-IID Private Data", NeurIPS 2018 workshop on machine learning on the phone and
other consumer devices, https://arxiv.org/abs/1811.11479. Algorithm 1. FedSA compares with it as FedDistill; the
augmentation of the same paper is another method.

A round: the server sends the mean output of each class, the teacher; a client trains its own model on CE + gamma *
distance between its output for a sample and the teacher of the sample's class, gathers its own mean outputs by class
while it trains, and sends those of its own classes; the server averages each class's over the clients that have it.

Notation
    code                    paper           shape
    outputs                 F(w, b)         [B, C], probabilities or logits
    class_means             mean F_k,l      [K, C, C], of class l in row l
    teacher                 F-hat_k,l       [C, C]
    distillation_weight     gamma

Readings and deviations
    1. The original output is the softmax, there called logit vector, and the original distance the cross-entropy with
       the teacher's output as target; these are the defaults. FedSA's code averages the logits before the softmax and
       takes the cross-entropy with the softmax of their mean (`--averaged logits`), with weight 0.1; so do FedSA's
       protocols here.
    2. `--distance squared` is the squared error between the outputs, mean over samples and classes, as other codes
       have it. The original does not.
    3. The teacher is the mean over all clients that have the class, as the text has it and FedSA's code. In Algorithm 1
       each client's own share is taken out of its teacher.
    4. gamma is not given: 1.
    5. The teacher is of the last round's cohort. A sample of a class that has none counts with distance 0; so do all in
       the first round.
    6. Outputs are gathered over all local epochs as training computes them, before each step, in training mode. So do
       Algorithm 1 and FedSA's code.
    7. Not copied from HtFLlib, the base of FedSA's code: raw logits, no distribution, as the cross-entropy's target.

Run it
    fedcli run feddistill --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import Method, option, rows_by_class
from fedcli.core import Aux, ClientState, LocalLoss, Network, Step, cross_entropy, masked_mean
from fedcli.core.class_vectors import gather_outputs, mean_over_owners, no_vectors, train_and_gather
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What federated distillation adds to local training."""

    distillation_weight: float = option(
        1.0, "Weight of the distance to the teacher", symbol="γ", source="Algorithm 1", low=0, off=0
    )
    averaged: str = option(
        "probabilities", "Output of a model that is averaged", source="Algorithm 1", choices=("probabilities", "logits")
    )
    distance: str = option(
        "cross-entropy", "Distance between a client's output and the teacher's", source="Algorithm 1",
        choices=("cross-entropy", "squared"),
    )  # fmt: skip


class Context(NamedTuple):
    """What a client is given for a round; all clients share it."""

    teacher: Tensor  # [C, C]
    has_teacher: Tensor  # [C], bool


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    teacher: Tensor  # [C, C], the mean output of each class
    has_teacher: Tensor  # [C], bool: whether anybody in the last cohort has the class
    clients: Mapping[int, ClientState]  # of those that have taken part


def distillation(
    logits: Tensor, labels: Tensor, teacher: Tensor, has_teacher: Tensor, averaged: str = "probabilities",
    distance: str = "cross-entropy", mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mean distance between the outputs and the teacher of their classes; a scalar.

    Args:
        logits: `[B, C]`.
        labels: `[B]`.
        teacher: `[C, C]`, of the kind `averaged`.
        has_teacher: `[C]`; a sample of a class without one counts with distance 0.
        averaged: "probabilities" or "logits".
        distance: "cross-entropy", in nats, or "squared".
        mask: `[B]`, False for padding.
    """
    target = teacher[labels]  # [B, C]
    if distance == "squared":
        outputs = logits if averaged == "logits" else logits.softmax(-1)
        distances = (outputs - target).square().mean(-1)
    else:
        target = target.softmax(-1) if averaged == "logits" else target
        distances = -(target * F.log_softmax(logits, -1)).sum(-1)
    return masked_mean(torch.where(has_teacher[labels], distances, 0.0), mask)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective of Algorithm 1; its outputs are the logits, which are gathered."""

    def local_loss(params, buffers, batch, context):
        _, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        teaching = distillation(
            logits, batch.y, context.teacher, context.has_teacher, config.averaged, config.distance, batch.mask
        )
        terms = {"cross_entropy": task, "distillation": teaching}
        return task + config.distillation_weight * teaching, Aux(buffers, terms, logits)

    return local_loss


def probabilities(logits: Tensor) -> Tensor:
    """Softmax `[B, C]` of logits `[B, C]`."""
    return logits.softmax(-1)


def init(fed: Federation, config: Config) -> ServerState:
    """Nobody has trained yet, and no class has a teacher."""
    vectors, has_vector = no_vectors(fed, fed.num_classes)
    return ServerState(vectors, has_vector, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round."""
    transform = probabilities if config.averaged == "probabilities" else None

    def make_step(network: Network) -> Step:
        step = fed.optimizer_step(make_local_loss(network, config))
        return gather_outputs(step, fed.num_classes, transform=transform)

    context = Context(fed.download(state.teacher, cohort), state.has_teacher)
    trained = train_and_gather(state.clients, state.teacher, context, make_step, cohort, fed)
    # Each client that has the class counts once.
    teacher = mean_over_owners(trained.means, trained.counts, state.teacher)
    has_teacher = (trained.counts > 0).any(0)
    return ServerState(teacher, has_teacher, trained.states), trained.terms


METHOD = Method(
    name="feddistill",
    title="FedDistill: own models that share their mean output for each class",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"distillation_weight": 0.0}),
    state_types=(ServerState, ClientState),
    variants={"logits": {"averaged": "logits"}, "squared": {"distance": "squared"}},
    costs=rows_by_class(lambda sizes: sizes.num_classes),
    default_protocol="fedsa:cifar10-silo",
    client_memory=lambda sizes: sizes.parameters + 2 * sizes.num_classes**2,  # the teacher and the gathered outputs
    personal=lambda state: state.clients,
    mixed_networks=True,
)  # fmt: skip
