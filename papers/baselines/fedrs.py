"""FedRS: while a client trains, hold back the scores of the classes it lacks.

X.-C. Li, D.-C. Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021,
https://dl.acm.org/doi/10.1145/3447548.3467254.

The softmax of an ordinary local objective pushes the weights of absent classes away from every feature the client
sees. Restricted softmax multiplies the scores of these classes by alpha < 1, and their updates with them; the global
model is tested with the ordinary softmax. All else is FedAvg.

Notation
    code            paper       shape
    class_shares    p_k         [K, C], shares of the classes in a client's training part
    scales          alpha_k     [K, C], what the scores are multiplied by
    scaling         alpha

Readings and deviations
    1. The hard form is the paper's: 1 for the classes a client has, alpha for those it lacks. The soft form,
       alpha + (1 - alpha) p_c / max p, is that of the author's code, which has it in place of the hard one.
    2. The author's code has a last layer without bias and clips gradients. Neither is copied, so that FedRS and the
       methods it is compared with differ in the softmax alone; the bias is part of the score that is multiplied.
    3. Shares are those of the training part, known before training; a validation part does not count.

Run it
    fedcli run fedrs --dataset fmnist
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import Aux, LocalLoss, Network, axes_of, cross_entropy, quotient
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedavg import ServerState, aggregate, init


@dataclass(frozen=True)
class Config:
    """What FedRS adds to FedAvg."""

    scaling: float = option(
        0.5, "Factor on the scores of classes that a client lacks", symbol="α", low=0, high=1, off=1
    )
    form: str = option("hard", "Whether only absent classes are held back, or rare ones too", choices=("hard", "soft"))


class Context(NamedTuple):
    """What a client knows of its own classes."""

    scales: Tensor  # [K, C]


CONTEXT_AXES = axes_of(Context, scales=0)


def class_shares(fed: Federation, cohort: Cohort) -> Tensor:
    """p_k: shares of the classes in each client's training part, `[K, C]`; zeros for a client without examples."""
    counts = fed.class_counts(cohort)  # Reading 3
    return counts.to(fed.dtype) / counts.sum(1, keepdim=True).clamp(min=1)


def class_scales(shares: Tensor, scaling: float, form: str = "hard") -> Tensor:
    """alpha_k: 1 for a present class and alpha for an absent one; or alpha + (1 - alpha) p_c / max p; `[..., C]`.

    Args:
        shares: `[..., C]`.
        scaling: alpha, in [0, 1].
        form: "hard" or "soft".
    """
    if form == "hard":  # Reading 1
        return torch.where(shares > 0, 1.0, torch.full_like(shares, scaling))
    largest = shares.amax(-1, keepdim=True)
    return scaling + quotient((1 - scaling) * shares, largest)


def restricted_cross_entropy(logits: Tensor, labels: Tensor, scales: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy of the restricted softmax, softmax_c(alpha_c s_c), mean over samples.

    Args:
        logits: s, `[B, C]`.
        labels: `[B]`.
        scales: `[C]`.
        mask: `[B]`, False for padding.
    """
    return cross_entropy(scales * logits, labels, mask)  # Reading 2


def make_local_loss(network: Network) -> LocalLoss:
    """FedAvg's local objective under the restricted softmax."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = restricted_cross_entropy(logits, batch.y, context.scales, batch.mask)
        return loss, Aux(buffers, {"cross_entropy": loss}, features)

    return local_loss


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """A round of FedAvg with restricted softmax."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    context = Context(class_scales(class_shares(fed, cohort), config.scaling, config.form))
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network), context, CONTEXT_AXES)
    return aggregate(state, clients, cohort, fed, config), terms


METHOD = Method(
    name="fedrs",
    title="FedRS: restricted softmax",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"scaling": 1.0}),
    state_types=(ServerState,),
    variants={"soft": {"form": "soft"}},
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedcme:fmnist-a0.1-k50-m10",
)  # fmt: skip
