"""FedLC: while a client trains, lower the scores by a margin that grows for its rare classes.

J. Zhang, Z. Li, B. Li, J. Xu, S. Wu, S. Ding, C. Wu, "Federated Learning with Label Distribution Skew via Logits
Calibration", ICML 2022, https://arxiv.org/abs/2209.00189. Its calibrated loss; all else is FedAvg.

A client with n_c training examples of class c minimises the cross-entropy of the calibrated scores

    z_c - tau n_c^(-1/4).

A rare class must then be ahead by more, so that its few examples push harder; a class that the client lacks takes no
part. The global model is tested with its plain scores.

Notation
    code       paper              shape
    counts     n                  [K, C], a client's training examples of each class
    margins    tau n^(-1/4)       [K, C]
    margin     tau

Readings and deviations
    1. The paper's equation leaves the label's own class out of the denominator. That loss has no lower bound, and
       training by it collapses; every implementation that we know keeps the class in, as here. There is no code of the
       authors.
    2. The margin of a class without examples is infinite in the paper; here it is 1e4, so that the class leaves the
       softmax without an infinity. With tau = 0 it is 0.
    3. Examples are those of the training part; a validation part does not count.

Where popular code differs
    PFLlib counts the examples of all clients together, which gives all of them one calibration.

Run it
    fedcli run fedlc --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import Aux, LocalLoss, Network, axes_of, cross_entropy
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedavg import ServerState, aggregate, init

LOGIT_WITHOUT_EXAMPLES = -1e4  # a logit that leaves the softmax; minus the margin of a class without examples


@dataclass(frozen=True)
class Config:
    """What FedLC adds to FedAvg."""

    margin: float = option(
        1.0, "Margin of a class with a single example", symbol="τ", low=0, off=0, tune=(0.1, 0.5, 1.0)
    )


class Context(NamedTuple):
    """What a client knows of its own classes."""

    margins: Tensor  # [K, C]


CONTEXT_AXES = axes_of(Context, margins=0)


def class_margins(counts: Tensor, margin: float) -> Tensor:
    """tau n_c^(-1/4), 1e4 for a class without examples, and 0 for all where tau = 0; `[..., C]`.

    Args:
        counts: n_c, `[..., C]`.
        margin: tau.
    """
    if margin == 0:
        return torch.zeros_like(counts)
    return torch.where(counts > 0, margin * counts.clamp(min=1) ** -0.25, -LOGIT_WITHOUT_EXAMPLES)  # Reading 2


def calibrated_cross_entropy(logits: Tensor, labels: Tensor, margins: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy of z - tau n^(-1/4), mean over samples; a scalar, in nats.

    Args:
        logits: z, `[B, C]`.
        labels: `[B]`.
        margins: `[C]`.
        mask: `[B]`, False for padding.
    """
    return cross_entropy(logits - margins, labels, mask)  # Reading 1


def make_local_loss(network: Network) -> LocalLoss:
    """FedAvg's local objective with calibrated scores."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = calibrated_cross_entropy(logits, batch.y, context.margins, batch.mask)
        return loss, Aux(buffers, {"cross_entropy": loss}, features)

    return local_loss


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """A round of FedAvg with calibrated scores."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    counts = fed.class_counts(cohort).to(fed.dtype)  # Reading 3
    context = Context(class_margins(counts, config.margin))
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network), context, CONTEXT_AXES)
    return aggregate(state, clients, cohort, fed, config), terms


METHOD = Method(
    name="fedlc",
    title="FedLC: calibrated logits",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"margin": 0.0}),
    state_types=(ServerState,),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
)  # fmt: skip
