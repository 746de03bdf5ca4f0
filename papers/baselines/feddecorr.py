"""FedDecorr: penalise correlations between the features of a batch, so that they do not collapse to few dimensions.

Y. Shi, J. Liang, W. Zhang, V. Y. F. Tan, S. Bai, "Towards Understanding and Mitigating Dimensional Collapse in
Heterogeneous Federated Learning", ICLR 2023, https://arxiv.org/abs/2210.00226. Its regularizer; all else is FedAvg.

The features Z of a batch of N samples lose their mean and are divided by their standard deviation, each of the D
columns for itself. With G = Z^T Z, so that G / N is their correlation matrix, a client minimises CE + beta L with

    code:   L = (1 / N) mean over the D (D - 1) entries off the diagonal of G^2,
    paper:  L = (1 / D^2) ||G / N||_F^2.

Notation
    code                  paper       shape
    features              X           [B, D]
    standardised          Z above     [B, D]
    decorrelation_weight  beta

Readings and deviations
    1. The two forms differ by about the factor N, 64 in the paper; the diagonal of the second has next to no gradient.
       beta = 0.1 belongs to the form of the authors' code, and with it the paper's does next to nothing: so the code's
       is the default.
    2. The features are the input of the last linear layer. N is the number of real samples in the batch.
    3. The variance is the unbiased one, and 1e-8 is added to it, as in the authors' code. A feature that hardly varies
       in a batch gets a gradient up to 10,000 times as large as others, and so does its rounding.
    4. A batch of one sample has no correlations, and one feature has none with others: L = 0.

Run it
    fedcli run feddecorr --dataset digits
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import Aux, LocalLoss, Network, cross_entropy
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedavg import ServerState, aggregate, init

SMALL = 1e-8  # added to the variance


@dataclass(frozen=True)
class Config:
    """What FedDecorr adds to FedAvg."""

    decorrelation_weight: float = option(
        0.1, "Weight of the decorrelation", symbol="β", low=0, off=0, tune=(0.01, 0.05, 0.1, 0.2)
    )
    form: str = option("code", "The authors' code's, or the paper's, about N times smaller", choices=("code", "paper"))


def standardise(features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each column less its mean, over the root of its unbiased variance + 1e-8; `[B, D]`, 0 for padding, and N.

    Args:
        features: `[B, D]`.
        mask: `[B]`, False for padding.
    """
    real = features.new_ones(len(features), 1, dtype=torch.bool) if mask is None else mask.bool()[:, None]
    count = real.sum().to(features.dtype)  # N
    mean = torch.where(real, features, 0.0).sum(0) / count.clamp(min=1)
    centred = torch.where(real, features - mean, 0.0)
    variance = centred.square().sum(0) / (count - 1).clamp(min=1)
    return centred / (variance + SMALL).sqrt(), count


def decorrelation(features: Tensor, mask: Tensor | None = None, form: str = "code") -> Tensor:
    """The regularizer L; a scalar.

    Args:
        features: `[B, D]`.
        mask: `[B]`, False for padding.
        form: "code" or "paper".
    """
    standardised, count = standardise(features, mask)  # a single sample is its own mean: 0 (Reading 4)
    gram = standardised.T @ standardised  # G, [D, D]
    width = len(gram)
    count = count.clamp(min=1)
    if form == "paper":
        return (gram / count).square().sum() / width**2
    is_diagonal = torch.eye(width, dtype=torch.bool, device=gram.device)
    off_diagonal = torch.where(is_diagonal, 0.0, gram).square().sum()
    return off_diagonal / max(width * (width - 1), 1) / count


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective, CE + beta L."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        regularizer = decorrelation(features, batch.mask, config.form)
        terms = {"cross_entropy": task, "decorrelation": regularizer}
        return task + config.decorrelation_weight * regularizer, Aux(buffers, terms, features)

    return local_loss


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """A round of FedAvg with decorrelated features."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network, config))
    return aggregate(state, clients, cohort, fed, config), terms


METHOD = Method(
    name="feddecorr",
    title="FedDecorr: decorrelated features",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"decorrelation_weight": 0.0}),
    state_types=(ServerState,),
    variants={"paper": {"form": "paper"}},
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
)  # fmt: skip
