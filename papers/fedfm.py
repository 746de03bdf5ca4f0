"""FedFM: match every client's features to anchors that all clients share.

R. Ye, Z. Ni, C. Xu, J. Wang, S. Chen, Y. C. Eldar, "FedFM: Anchor-Based Feature Matching for Data Heterogeneity in
Federated Learning", IEEE Transactions on Signal Processing 71, 2023, https://doi.org/10.1109/TSP.2023.3314277.

The mean feature of each class over all clients is that class's anchor. While a client trains, each of its features is
drawn to the anchor of its class and, with contrastive guiding, kept away from the others. Algorithm 1; Eqs. 2, 3,
8 to 11 and the contrastive-guiding loss of Section IV-C.

Notation
    code                    paper           shape
    params                  w               dict of tensors
    features                f_mid(w, x)     [B, D], the input of the last fully connected layer
    anchors                 a_c             [C, D]
    prototypes              a_{k,c}         [K, C, D]
    class_counts            |B_{k,c}|       [K, C]
    cohort.weights          p_k             [K]
    match_weight            lambda
    temperature             alpha
    start_round             T_s

Readings and deviations
    1. "The feature is normalised" (Section VII-A): both features and anchors are, inside the loss, so the logits are
       cosines over the temperature. The anchors themselves are kept and averaged as plain class means (Eqs. 8, 9).
    2. l2 guiding: on the normalised vectors, mean over samples *and* the D coordinates, (2 - 2 cos) / D. Eq. 3 has
       the sum over the coordinates. With lambda = 50 and D = 512 this is 0.098 times the squared distance. It is the
       convention of the authors' code; the paper's figures for l2 are in Fig. 8(b) and Section VII-D.6.
    3. Anchors are taken over every example of a client's training part, without augmentation, by the received model in
       evaluation mode. (The authors' loader shuffles, augments and drops the last batch; the rows left over count as
       zero features of class 0.) The held-out part is not used.
    4. Rounds are counted from 0, so T_s = 20 makes rounds 0 to 19 FedAvg. Anchors are refreshed in them all the same.
    5. Uniform anchors (Sections IV-D.2 and VII-D.1): plain mean over clients; for a class that a client lacks, it
       contributes the previous anchor, as in the authors' code.
    6. A class that no client of the cohort has keeps its anchor; one that has never had an anchor is left out of the
       softmax, and samples of it out of the mean. With all clients taking part neither occurs.
    7. A zero feature vector has no direction: its cosines are 0 and it gets no gradient.
    8. The weights p_k count a client's validation examples too.

Known from the authors' code only
    Fresh optimizer in every round, no decay of the learning rate, incomplete last batches dropped in training (a client
    with fewer than 64 training examples returns the model as it came), running statistics of batch normalisation
    averaged with p_k, augmentation for CIFAR-100 alone (there of the validation part too; here of the training part
    only), the constants of the normalisation, and the best round chosen by validation accuracy pooled over clients. One
    of the released run scripts sets T_s = 200 for 100 rounds, which is FedAvg; the paper's T_s = 20 is taken here.

Run it
    fedcli run fedfm --dataset cifar10
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import DataSetting, Method, Protocol, option
from fedcli.aggregate import cross_entropy, masked_mean, weighted_mean
from fedcli.clients import Aux, LocalLoss, Network, Params

SMALL = 1e-6  # a feature shorter than this has no direction worth following
FAR = -1e9  # logit of a class without an anchor: finite, so that no gradient is NaN


@dataclass(frozen=True)
class Config:
    """What FedFM adds to FedAvg."""

    match_weight: float = option(50.0, "Weight of feature matching", symbol="λ", source="Eq. 2", low=0, off=0)
    temperature: float = option(
        0.1, "Temperature of contrastive guiding", symbol="α", source="Section IV-C", low=0, open_low=True
    )
    start_round: int = option(
        20, "Rounds of plain FedAvg before matching starts", symbol="T_s", source="Section VII-A", unit="rounds", low=0
    )
    guiding: str = option(
        "contrastive", "Form of the matching loss", source="Eq. 3, Section IV-C", choices=("contrastive", "l2")
    )
    anchor_weighting: str = option(
        "weighted",
        "Mean over clients that makes the anchors",
        source="Eq. 9, Table VIII",
        choices=("weighted", "uniform"),
    )


class Context(NamedTuple):
    """What a client is given for a round."""

    anchors: Tensor  # [C, D]
    has_anchor: Tensor  # [C], bool
    weight: Tensor  # scalar, lambda, 0 before round T_s


CONTEXT_AXES = Context(anchors=None, has_anchor=None, weight=None)


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model w^(t)
    buffers: Params
    anchors: Tensor  # [C, D]
    has_anchor: Tensor  # [C], bool: whether any client has ever had the class


def unit(vectors: Tensor) -> Tensor:
    """The vectors at length one; those of length (almost) zero become zero and pass no gradient.

    Args:
        vectors: `[..., D]`.
    """
    squares = vectors.square().sum(-1, keepdim=True)
    long = squares > SMALL**2
    return torch.where(long, vectors * torch.where(long, squares, 1.0).rsqrt(), 0.0)


def _usable(labels: Tensor, has_class: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The samples `[B]` that are real and whose class has an anchor; None if all are."""
    if has_class is None:
        return mask
    return has_class[labels] if mask is None else has_class[labels] & mask.bool()


def contrastive_guiding(
    features: Tensor,
    labels: Tensor,
    anchors: Tensor,
    temperature: float,
    has_class: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Section IV-C: cross-entropy of softmax_n(<a_n, f> / alpha) against the label, mean over samples.

    Args:
        features: `[B, D]`; normalised here.
        labels: `[B]`.
        anchors: `[C, D]`; normalised here.
        temperature: alpha, positive.
        has_class: `[C]`, whether a class has an anchor; None if all have.
        mask: `[B]`, False for padding.

    Returns:
        Scalar, in nats.
    """
    logits = unit(features) @ unit(anchors).T / temperature  # [B, C]
    if has_class is not None:
        logits = torch.where(has_class, logits, FAR)
    return cross_entropy(logits, labels, _usable(labels, has_class, mask))


def l2_guiding(
    features: Tensor,
    labels: Tensor,
    anchors: Tensor,
    has_class: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Eq. 3 on normalised vectors: mean over samples and coordinates of (f - a_y)^2, which is (2 - 2 cos) / D.

    Args:
        features: `[B, D]`; normalised here.
        labels: `[B]`.
        anchors: `[C, D]`; normalised here.
        has_class: `[C]`, whether a class has an anchor; None if all have.
        mask: `[B]`, False for padding.

    Returns:
        Scalar.
    """
    squares = (unit(features) - unit(anchors)[labels]).square().mean(-1)  # [B]
    return masked_mean(squares, _usable(labels, has_class, mask))


def aggregate_anchors(
    prototypes: Tensor, class_counts: Tensor, previous: Tensor, weighting: str = "weighted"
) -> Tensor:
    """Eq. 9: a_c = sum_k |B_kc| a_kc / sum_k |B_kc|; or the plain mean over clients.

    Args:
        prototypes: `[K, C, D]`, ignored where the count is 0.
        class_counts: `[K, C]`.
        previous: `[C, D]`, the anchors so far. Weighted: kept for a class that no client has. Uniform: also what a
            client contributes for a class it lacks.
        weighting: "weighted" or "uniform".

    Returns:
        `[C, D]`.
    """
    present = (class_counts > 0)[..., None]  # [K, C, 1]
    if weighting == "uniform":
        return torch.where(present, prototypes, previous).mean(0)
    counts = class_counts.to(prototypes.dtype)[..., None]
    total = counts.sum(0)  # [C, 1]
    mean = (torch.where(present, prototypes, 0.0) * counts).sum(0) / torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, mean, previous)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective of Eq. 2, F_k + lambda Q_k."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        anchors, has_anchor = context.anchors, context.has_anchor
        if config.guiding == "l2":
            matching = l2_guiding(features, batch.y, anchors, has_anchor, batch.mask)
        else:
            matching = contrastive_guiding(features, batch.y, anchors, config.temperature, has_anchor, batch.mask)
        terms = {"cross_entropy": task, "matching": matching}
        return task + context.weight * matching, Aux(buffers, terms, features)

    return local_loss


def init(fed, config: Config) -> ServerState:
    """The initial model w^(0); no class has an anchor."""
    params, buffers = fed.initial_model()
    anchors = torch.zeros(fed.num_classes, fed.feature_dim, dtype=fed.dtype, device=fed.device)
    return ServerState(params, buffers, anchors, torch.zeros(fed.num_classes, dtype=torch.bool, device=fed.device))


def run_round(state: ServerState, cohort, fed, config: Config) -> tuple[ServerState, dict[str, Tensor]]:
    """Algorithm 1, round t; the lines are those of its for loop."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # line 1: w^(t) to every client
    prototypes, class_counts = fed.upload(fed.class_means(clients, cohort))  # line 2, Eq. 8
    anchors = aggregate_anchors(prototypes, class_counts, state.anchors, config.anchor_weighting)  # line 3, Eq. 9
    has_anchor = state.has_anchor | (class_counts.sum(0) > 0)
    weight = anchors.new_tensor(config.match_weight if cohort.round >= config.start_round else 0.0)
    context = Context(fed.download(anchors, cohort), has_anchor, weight)
    local_loss = make_local_loss(fed.network, config)
    clients, terms = fed.train(clients, cohort, local_loss, context, CONTEXT_AXES)  # line 4, Eq. 10
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)  # line 5, Eq. 11
    return ServerState(params, buffers, anchors, has_anchor), terms


METHOD = Method(
    name="fedfm",
    title="FedFM: anchor-based feature matching",
    config=Config,
    init=init,
    run_round=run_round,
    reduces_to=("fedavg", {"match_weight": 0.0}),
    state_types=(ServerState,),
    client_memory=lambda sizes: sizes.parameters + sizes.num_classes * sizes.feature_dim,  # Table II: N + D
)

_CIFAR10 = DataSetting(
    backbone="resnet18",  # Section VII-A; 11,182 thousand parameters in Table III are torchvision's 7 x 7 stem
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    source="authors' code; no augmentation",
)
_CIFAR100 = DataSetting(
    backbone="resnet50-3x3",  # Section VII-A; 23,705 thousand parameters in Table III are the 3 x 3 stem
    mean=(0.50707, 0.48655, 0.44092),
    std=(0.26733, 0.25644, 0.27615),
    source="authors' code",
    augmentation="crop-flip-rotate",
)
_TRAINING = {
    "num_clients": 10, "rounds": 100, "local_epochs": 10, "batch_size": 64, "drop_last": True, "optimizer": "sgd",
    "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "validation": 0.2,
}  # fmt: skip
_SOURCE = "Section VII-A; validation by pooled accuracy and dropped last batches from the authors' code"


def _protocol(name: str, summary: str, cifar10: str, cifar100: str, notes: tuple[str, ...] = ()) -> Protocol:
    """A protocol of Section VII-A, which differ in how the classes are divided among the ten clients."""
    datasets = {"cifar10": _CIFAR10, "cifar100": replace(_CIFAR100, settings={"partition": cifar100})}
    settings = {**_TRAINING, "partition": cifar10}
    return Protocol(name, summary, _SOURCE, settings, datasets, selection="best-validation", notes=notes)


_DIGITS = {
    name: DataSetting(
        "cnn-small", mean=(0.5,) * channels, std=(0.5,) * channels, source="chosen here: pixels in [-1, 1]"
    )
    for name, channels in (("digits", 1), ("digit-domains", 3))
}

PROTOCOLS = (
    _protocol("fedfm:niid-1", "Class shares of a client from Dir(0.5)", "dirichlet:0.5", "dirichlet:0.5"),
    _protocol("fedfm:niid-2", "Each client has dominant classes", "dominant:1", "dominant:10"),
    _protocol(
        "fedfm:niid-3",
        "Each client lacks classes",
        "missing:3",
        "missing:30",
        ("Table IV has missing:1, :2, :3, :5 and :7 on CIFAR-10; missing:30 on CIFAR-100 is our analogue.",),
    ),
    Protocol(
        name="fedfm:digits",
        summary="Built-in digits, no network needed: seconds a run",
        source="not from the paper",
        settings={
            "num_clients": 10, "rounds": 20, "local_epochs": 2, "batch_size": 16, "optimizer": "sgd", "lr": 0.05,
            "momentum": 0.9, "weight_decay": 1e-5, "validation": 0.2, "partition": "dirichlet:0.5",
        },
        datasets=_DIGITS,
        selection="best-validation",
        method_options={"fedfm": {"match_weight": 5.0, "start_round": 5}},
        notes=("Learning rate and match weight: by validation accuracy with seed 0, so that both methods learn.",),
    ),
)  # fmt: skip
