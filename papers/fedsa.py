"""FedSA: semantic anchors, fixed points in feature space that all clients' features and classifiers are drawn to.

Y. Zhou, X. Qu, C. You, J. Zhou, J. Tang, X. Zheng, C. Cai, Y. Wu, "FedSA: A Unified Representation Learning via
Semantic Anchors for Prototype-based Federated Learning", AAAI 2025, https://arxiv.org/abs/2501.05496. Eqs. 2, 3 and 5
to 10. FedSA-LoRA and FedSA for semi-asynchronous training only share the name.

Clients keep their own models, which may be different networks with features of one width, and share class means of
features, the prototypes. Where other methods draw a client's features to the mean of these, FedSA draws them to anchors
that do not come from the clients: random points sent once through an untrained embedding, which spreads them. The
anchors also give each class a margin and train the classifier on classes that the client lacks. They follow the
prototypes slowly.

    L = L_S + lambda_1 L_R + lambda_2 L_MCL + lambda_3 L_CC                                             (9)

Notation
    code                        paper               shape
    features                    f_i(x; theta_i)     [B, D], the input of the last fully connected layer
    anchors                     A-bar^c             [C, D]
    local prototypes            P_i^c               [K, C, D]
    prototypes                  P-bar^c             [C, D]
    ClientState.margin          d_i                 scalar
    Context.margin              d_i^*               scalar
    head.weight                 phi_i               [C, D]
    regularization_weight       lambda_1
    contrastive_weight          lambda_2
    calibration_weight          lambda_3
    anchor_decay                alpha

Readings and deviations ("the code" is that of the authors)
    1.  The embedding is called trainable, but nothing sent to the server could train it. As in the code, the class
        anchors, drawn from N(0, I), go once through linear layer, batch normalisation by their own statistics, ReLU,
        and the same again, all D wide (527,360 parameters for D = 512), with torch's initial weights.
    2.  L_R is Eq. 5 by default: the Euclidean distance between a class's mean feature in the batch and its anchor,
        summed over the batch's classes, with lambda_1 = 0.1. The code has the squared error of each sample's feature,
        mean over samples and coordinates, and its scripts weigh it by 10 (`--regularization-form code
        --regularization-weight 10`). The printed numbers are taken to be the scripts', so the protocols of this file
        have the code's form and 10.
    3.  L_MCL is of each sample's feature, mean over samples, as in the code; Eq. 7 is of the prototype, but a prototype
        is only known after training. At distance 0 the gradient of a distance is taken as 0 (NaN in the code).
    4.  A margin is the mean over classes of the distance to the nearest other class, as in the code. Eq. 6 is the mean
        over pairs (`--margin-form pairs`), over N (N - 1) of them here; Eq. 6 divides by (N - 1)^2, which for two
        classes is twice the mean.
    5.  d_i is that of the client's prototypes of its last round. It is 0 before, and where there are fewer than two
        classes; the global margin is then the larger one.
    6.  P_i^c is the mean of the features of all batches of the local phase, as training computes them: by a model that
        moves, in training mode. So in the code; Eq. 2 does not say by which model. Examples that are left out with an
        incomplete last batch do not count.
    7.  P-bar^c is the plain mean over the clients that have the class, as in the code. By Eq. 3 it is weighted by
        examples (`--prototype-mean examples`) and divided by the number of clients once more, which would shrink it.
    8.  Eq. 10 moves the anchors of the classes that the round's clients have. With alpha = 0.9999 at most 9.5 % of an
        anchor are replaced in 1000 rounds.
    9.  A test image is given the class of the nearest global prototype, of the last round's clients, as in the code;
        the paper does not say it. The classifier's accuracy is recorded beside it. Calibration moves the head alone
        and reaches the features only through L_S, so what Table 4 ascribes to it is surprising.
    10. lambda_2 = 0.01 for equal networks and 1 for different ones, as the paper says. Of FedSA with equal networks the
        authors' scripts have two lines, both CIFAR-100 with 100 clients, and these have 0.
    11. L_CC is part of the same loss, one step for all. The classifier has a bias, which Eq. 8 leaves out.
    12. Table 4's row without embedding takes the class anchors themselves (`--no-embedding`).
    13. FedGen, FML, FedKD, FedTGP and FedProto are compared as they are in the code, whose numbers the tables have: the
        protocols set `--form code`, and `--gathered-epochs all` for FedProto.

Known from the authors' code only
    Plain SGD, no momentum, no weight decay, new in every round. Training and test images merged (Tiny-ImageNet's
    validation images are its test images), divided once for all seeds in PFLlib's order by RandomState(1), each
    client's then cut into 75 % and 25 %. All channels normalised by 0.5 and 0.5. MobileNetV2 has its dropout before the
    pooling to 512. The code does not shuffle a client's examples and drops the last incomplete batch, so that a client
    with fewer than ten never trains; here batches are shuffled, as everywhere. Accuracy is pooled over all clients'
    test parts, and the best round is reported; it is optimistic, and the last round's stands beside it. Equal networks
    start from equal weights, in the code those of torch's seed 0 in every trial.

Run it
    fedcli run fedsa --dataset cifar10
    fedcli run fedsa --protocol fedsa:cifar100-htfe8
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import Cell, Claim, DataSetting, Gain, Method, Protocol, Table, column, grid, option, row, rows_by_class
from fedcli.core import (
    Aux,
    Buffers,
    Client,
    LocalLoss,
    Network,
    Params,
    axes_of,
    class_means,
    cross_entropy,
    masked_mean,
    personal_models,
)
from fedcli.core.class_vectors import (
    GatheredOutputs,
    distance,
    distances_between,
    gather_outputs,
    margin_logits,
    mean_by_class,
    no_vectors,
    start_gathering,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.own_models import GroupRound, train_by_network


@dataclass(frozen=True)
class Config:
    """What FedSA adds to local training."""

    regularization_weight: float = option(
        0.1, "Weight of anchor-based regularization", symbol="λ_1", source="Eq. 9", low=0, off=0
    )
    regularization_form: str = option(
        "paper",
        "Distance in it: Euclidean of the batch's class means, or the authors' code's squared error of the samples",
        source="Eq. 5", choices=("paper", "code"),
    )  # fmt: skip
    contrastive_weight: float = option(
        0.01, "Weight of margin-enhanced contrastive learning", symbol="λ_2", source="Eq. 9", low=0, off=0
    )
    margin_form: str = option(
        "nearest", "Margin: mean distance of a class to the nearest other, or of all pairs", source="Eq. 6",
        choices=("nearest", "pairs"),
    )  # fmt: skip
    calibration_weight: float = option(
        1.0, "Weight of classifier calibration", symbol="λ_3", source="Eq. 9", low=0, off=0
    )
    anchor_decay: float = option(
        0.9999, "Share of an anchor that stays after a round; 1 never moves it", symbol="α", source="Eq. 10", low=0,
        high=1,
    )  # fmt: skip
    prototype_mean: str = option(
        "clients", "What counts once in a global prototype: a client or an example", source="Eq. 3",
        choices=("clients", "examples"),
    )  # fmt: skip
    embedding: bool = option(True, "Send the class anchors through the embedding layer", source="Table 4")


class Context(NamedTuple):
    """What a client is given for a round, and its margin."""

    anchors: Tensor  # [C, D]
    margin: Tensor  # scalar, d_i^*


CONTEXT_AXES = axes_of(Context, anchors=None, margin=0)


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # its own model w_i
    buffers: Buffers
    margin: Tensor  # scalar, d_i, of its last prototypes; 0 before the first


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    anchors: Tensor  # [C, D]
    prototypes: Tensor  # [C, D], of the last round's clients
    has_class: Tensor  # [C], bool: whether a class has a prototype, as any of these clients has it
    clients: Mapping[int, ClientState]  # of those that have taken part


class Prototypes(NamedTuple):
    """What clients send: the mean feature of each class."""

    means: Tensor  # [K, C, D], P_i^c; 0 for a class without a feature
    counts: Tensor  # [K, C], of how many features


def class_anchors(num_classes: int, dim: int, generator: np.random.Generator) -> Tensor:
    """A^c ~ N(0, I), `[C, D]` in float64."""
    return torch.from_numpy(generator.standard_normal((num_classes, dim)))


def semantic_anchors(num_classes: int, dim: int, generator: np.random.Generator) -> Tensor:
    """A-bar = h_psi(A): class anchors through linear layer, batch normalisation and ReLU, twice; `[C, D]` in float64.

    Args:
        num_classes: C.
        dim: D.
        generator: Draws the class anchors, then the layers' weights, as torch does: U(-1/sqrt(D), 1/sqrt(D)).
    """
    anchors = class_anchors(num_classes, dim, generator)
    bound = dim**-0.5
    for _ in range(2):  # Reading 1
        weight = torch.from_numpy(generator.uniform(-bound, bound, (dim, dim)))  # a bias would cancel in the norm
        anchors = F.batch_norm(anchors @ weight.T, None, None, training=True).relu()
    return anchors


def regularization(
    features: Tensor, labels: Tensor, anchors: Tensor, form: str = "paper", *, mask: Tensor | None = None
) -> Tensor:
    """L_R, how far the features are from the anchors of their classes; a scalar.

    Args:
        features: `[B, D]`.
        labels: `[B]`.
        anchors: `[C, D]`.
        form: "paper", Eq. 5: sum over the batch's classes of the distance between their mean feature and the anchor;
            "code": squared error, mean over samples and coordinates.
        mask: `[B]`, False for padding.
    """
    if form == "code":
        return masked_mean((features - anchors[labels]).square().mean(-1), mask)
    means, counts = class_means(features, labels, len(anchors), mask)  # [C, D], [C]
    return torch.where(counts > 0, distance(means, anchors), 0.0).sum()


def margin_contrastive(
    features: Tensor, labels: Tensor, anchors: Tensor, margin: Tensor | float, *, mask: Tensor | None = None
) -> Tensor:
    """L_MCL, Eq. 7: cross-entropy of minus the distances to all anchors, d_i^* added to the own class's; in nats.

    Args:
        features: `[B, D]`.
        labels: `[B]`.
        anchors: `[C, D]`.
        margin: d_i^*, scalar.
        mask: `[B]`, False for padding.
    """
    return cross_entropy(margin_logits(features, labels, anchors, margin), labels, mask)


def separation(prototypes: Tensor, has_prototype: Tensor, form: str = "nearest") -> Tensor:
    """Eq. 6: how far apart the prototypes of different classes are; a scalar, 0 where fewer than two classes are there.

    Args:
        prototypes: `[C, D]`.
        has_prototype: `[C]`, bool; the others do not count.
        form: "nearest", mean over classes of the distance to the nearest other; "pairs", mean over all pairs.
    """
    distances, others = distances_between(prototypes, has_prototype)
    if form == "pairs":  # Reading 4
        return torch.where(others, distances, 0.0).sum() / others.sum().clamp(min=1)
    nearest = torch.where(others, distances, torch.inf).amin(1)  # [C]
    has_other = others.any(1)
    return torch.where(has_other, nearest, 0.0).sum() / has_other.sum().clamp(min=1)


def classifier_calibration(head_weight: Tensor, head_bias: Tensor, anchors: Tensor) -> Tensor:
    """L_CC, Eq. 8: cross-entropy of the classifier on the C pairs (A-bar^c, c); a scalar, in nats.

    Args:
        head_weight: `[C, D]`.
        head_bias: `[C]`.
        anchors: `[C, D]`.
    """
    return cross_entropy(F.linear(anchors, head_weight, head_bias), torch.arange(len(anchors), device=anchors.device))


def local_prototypes(gathered: GatheredOutputs) -> Prototypes:
    """Eq. 2: P_i^c, the means of the features that clients have gathered while they trained (Reading 6)."""
    return Prototypes(mean_by_class(gathered.sums, gathered.counts), gathered.counts)


def aggregate_prototypes(local: Tensor, counts: Tensor, mean: str = "clients") -> Tensor:
    """Eq. 3 without its second division: P-bar^c, the mean over the clients that have the class; 0 without one.

    Args:
        local: P_i^c, `[K, C, D]`.
        counts: |D_i,c|, `[K, C]`.
        mean: "clients", each counts once, or "examples", each example does.
    """
    weights = counts
    if mean == "clients":
        weights = counts > 0  # Reading 7
    weights = weights.to(local)[..., None]  # [K, C, 1]
    return (weights * local).sum(0) / weights.sum(0).clamp(min=1)


def update_anchors(anchors: Tensor, prototypes: Tensor, has_prototype: Tensor, decay: float) -> Tensor:
    """Eq. 10: alpha A-bar + (1 - alpha) P-bar; a class without a prototype keeps its anchor; A-bar^{t+1}, `[C, D]`.

    Args:
        anchors: A-bar^t, `[C, D]`.
        prototypes: P-bar^t, `[C, D]`.
        has_prototype: `[C]`, bool.
        decay: alpha, in [0, 1].
    """
    return torch.where(has_prototype[:, None], decay * anchors + (1 - decay) * prototypes, anchors)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective, Eq. 9: L_S + lambda_1 L_R + lambda_2 L_MCL + lambda_3 L_CC."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        anchors = context.anchors
        task = cross_entropy(logits, batch.y, batch.mask)
        regular = regularization(  # Reading 2
            features, batch.y, anchors, config.regularization_form, mask=batch.mask
        )
        contrastive = margin_contrastive(features, batch.y, anchors, context.margin, mask=batch.mask)  # Reading 3
        calibration = classifier_calibration(params["head.weight"], params["head.bias"], anchors)  # Reading 11
        loss = (
            task
            + config.regularization_weight * regular
            + config.contrastive_weight * contrastive
            + config.calibration_weight * calibration
        )
        terms = {
            "cross_entropy": task, "regularization": regular, "contrastive": contrastive, "calibration": calibration,
        }  # fmt: skip
        return loss, Aux(buffers, terms, features)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """The anchors, from the run's seed; nobody has trained yet. Refuses networks whose features differ in width."""
    make_anchors = semantic_anchors if config.embedding else class_anchors  # Reading 12
    anchors = make_anchors(fed.num_classes, fed.feature_dim, fed.generator("anchors"))
    prototypes, has_prototype = no_vectors(fed)
    return ServerState(anchors.to(fed.device, fed.dtype), prototypes, has_prototype, clients={})


def train_group(state: ServerState, anchors: Tensor, group: Cohort, fed: Federation, config: Config) -> GroupRound:
    """Local training of the clients with one network; they send their prototypes (Eq. 2)."""
    model = fed.initial_model(group.network)
    newcomer = ClientState(model.params, model.buffers, margin=anchors.new_zeros(()))
    states = fed.recall(state.clients, group, newcomer)
    global_margin = separation(anchors, torch.ones_like(state.has_class), config.margin_form)  # d_global
    context = Context(anchors, torch.maximum(states.margin, global_margin))  # d_i^*; Reading 5
    clients = Client(states.params, states.buffers, memory=start_gathering(len(group.client_ids), anchors))
    step = gather_outputs(fed.optimizer_step(make_local_loss(group.network, config)), len(anchors))  # Reading 6
    clients, terms = fed.train(clients, group, step, context, CONTEXT_AXES)
    prototypes = local_prototypes(clients.memory)  # Eq. 2
    own_margins = []
    for means, counts in zip(prototypes.means, prototypes.counts, strict=True):
        own_margins.append(separation(means, counts > 0, config.margin_form))  # d_i
    kept = ClientState(clients.params, clients.buffers, torch.stack(own_margins))
    return GroupRound(kept, sent=prototypes, terms=terms)


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Round t; the paper has no algorithm box, the order is that of its sections."""
    received = fed.download(state.anchors, cohort)
    trained = train_by_network(
        lambda group: train_group(state, received, group, fed, config), state.clients, cohort, fed
    )  # Eq. 9
    sent: Prototypes = trained.sent
    has_example = sent.counts > 0  # [K, C]
    local = fed.upload(sent.means, has_example)
    prototypes = aggregate_prototypes(local, sent.counts, config.prototype_mean)  # Eq. 3
    has_prototype = has_example.any(0)
    anchors = update_anchors(state.anchors, prototypes, has_prototype, config.anchor_decay)  # Eq. 10, Reading 8
    return ServerState(anchors, prototypes, has_prototype, trained.states), trained.terms


METHOD = Method(
    name="fedsa",
    title="FedSA: semantic anchors",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"regularization_weight": 0.0, "contrastive_weight": 0.0, "calibration_weight": 0.0}),
    state_types=(ServerState, ClientState),
    variants={
        "code": {
            "regularization_form": "code", "regularization_weight": 10.0, "margin_form": "pairs",
            "prototype_mean": "examples", "embedding": False,
        }
    },
    costs=rows_by_class(lambda sizes: sizes.feature_dim),
    # The model, anchors, gathered features, and the margin.
    client_memory=lambda sizes: sizes.parameters + 2 * sizes.num_classes * sizes.feature_dim + 1,
    personal=personal_models,
    prototypes=lambda state: (state.prototypes, state.has_class),  # Reading 9
    mixed_networks=True,
)  # fmt: skip


# The paper's experiments: protocols

_TRAINING = {
    "rounds": 1000, "local_epochs": 1, "batch_size": 10, "drop_last": True, "optimizer": "sgd", "lr": 0.01,
    "partition": "dirichlet:0.1:min=1:draw=pfllib", "partition_seed": 1, "local_test": 0.25,
}  # fmt: skip


class _Population(NamedTuple):
    """A setting's clients."""

    title: str
    settings: dict[str, int]


_POPULATIONS = {
    "silo": _Population("cross-silo", {"num_clients": 20, "cohort_size": 20}),
    "device": _Population("cross-device", {"num_clients": 100, "cohort_size": 10}),
}
_DATA = {"cifar10": "Cifar10", "cifar100": "Cifar100", "tiny-imagenet": "Tiny-ImageNet"}
_CNN = "cnn-mcmahan"  # 3 channels; 878,538 parameters for 10 classes of 32 x 32
_NETWORKS = {  # client i has the (i mod X)-th; all with 512 features
    2: (_CNN, "resnet18-512"),
    3: ("resnet10-512", "resnet18-512", "resnet34-512"),
    5: (_CNN, "resnet10-512", "resnet18-512", "resnet34-512", "resnet50-512"),
    8: (
        _CNN, "googlenet-512", "mobilenet-v2-dropout-512", "resnet18-512", "resnet34-512", "resnet50-512",
        "resnet101-512", "resnet152-512",
    ),
}  # fmt: skip
_SOURCE = "Setup; drop_last, plain SGD, and the partition's draw, seed and least size from the authors' code"
_NOTES = (
    "Training and test images are divided together; accuracy is pooled over the clients' own test parts.",
    "The best round on these test parts is reported, which is optimistic; the last round's accuracy stands beside it.",
    "Batches are shuffled; the authors' code goes through a client's examples in one order.",
    "The weight of the squared error to anchors or prototypes is 10, as in the authors' scripts; the paper has 0.1. "
    "FedDistill's is 0.1, as in their later script; the earlier one, total.sh, has lines with 1 too.",
    "FedGen, FML and FedKD have the forms of the authors' code, which differ from their papers' (--form code): an "
    "untrained generator, divergences over the number of classes with gradients through both networks, and the mentee "
    "itself truncated. FedTGP's clients send prototypes of their models before the round's training (--form code). "
    "FedProto gathers the features of all local epochs, as there.",
    "Images are divided in the draw order of the authors' code, by its seed: each client has as many of each class as "
    "there, but other images of the class, and its own cut into training and test part.",
    "In the authors' code all trials begin with the same weights, and what else torch draws for a client, in all of "
    "them; here the seed decides everything but the division. Standard deviations are not comparable.",
)


def _options(contrastive_weight: float) -> dict[str, dict]:
    """Options of the methods that are compared, Readings 2 and 10; lambda_2 is the paper's."""
    regularization = {"regularization_weight": 10.0, "regularization_form": "code"}
    return {
        "fedsa": {**regularization, "contrastive_weight": contrastive_weight},
        "feddistill": {"distillation_weight": 0.1, "averaged": "logits"},
        "fedproto": {"prototype_weight": 10.0},
        "fedtgp": {"prototype_weight": 10.0},
    }


def _code_options(contrastive_weight: float) -> dict[str, dict]:
    """The same with the forms behind the printed numbers, Reading 13."""
    options = _options(contrastive_weight)
    forms = {name: {"form": "code"} for name in ("fedgen", "fml", "fedkd")}
    forms["fedtgp"] = {**options["fedtgp"], "form": "code"}
    forms["fedproto"] = {**options["fedproto"], "gathered_epochs": "all"}
    return {**options, **forms}


def _setting(backbone: str, channels: int = 3) -> DataSetting:
    source = "authors' code: pixels in [-1, 1], no augmentation"
    return DataSetting(backbone=backbone, mean=(0.5,) * channels, std=(0.5,) * channels, source=source)


_FORMS_OF_THE_TEXT = (
    "a weight of 0.1 on the squared error to anchors or prototypes, Eq. 5 in FedSA, and the other methods in the forms "
    "of their papers"
)


def _protocol_of_table_1(data: str, population: str) -> Protocol:
    """A column of Table 1."""
    clients = _POPULATIONS[population]
    return Protocol(
        name=f"fedsa:{data}-{population}",
        summary=f"Class shares of a client from Dir(0.1), {clients.title}, the same network for all",
        source=_SOURCE,
        settings={**_TRAINING, **clients.settings},
        datasets={data: _setting(_CNN)},
        selection="best-test",
        evaluation="clients",
        method_options=_code_options(contrastive_weight=0.01),
        notes=_NOTES,
        text_has=_FORMS_OF_THE_TEXT,
    )


def _protocol_of_table_2(count: int, population: str = "device") -> Protocol:
    """A column of Table 2, HtFE_X, or with `population` "silo" the setting of Fig. 3."""
    clients = _POPULATIONS[population]
    name = f"fedsa:cifar100-htfe{count}"
    settings = {**_TRAINING, **clients.settings}
    if population == "silo":
        name += "-silo"
        settings["rounds"] = 200
    networks_from = "networks from the paper" if count == 8 else "networks too"
    return Protocol(
        name=name,
        summary=f"Class shares of a client from Dir(0.1), {clients.title}, {count} different networks",
        source=f"{_SOURCE}; {networks_from}",
        settings=settings,
        datasets={"cifar100": _setting(",".join(_NETWORKS[count]))},
        selection="best-test",
        evaluation="clients",
        method_options=_code_options(contrastive_weight=1.0),
        notes=_NOTES,
        text_has=_FORMS_OF_THE_TEXT,
    )


def _built_in(name: str, backbone: str, settings: dict, contrastive_weight: float) -> Protocol:
    """A setting for images that need no network."""
    networks = "different networks" if "," in backbone else "one network"
    return Protocol(
        name=f"fedsa:{name}",
        summary=f"Built-in digits, nothing to download; {networks}",
        source="not from the paper",
        settings={
            **_TRAINING,
            "partition": "dirichlet:0.1:min=1",
            "num_clients": 10,
            "cohort_size": 10,
            "lr": 0.02,
            **settings,
        },
        datasets={"digits": _setting(backbone, channels=1)},
        selection="best-test",
        evaluation="clients",
        method_options=_options(contrastive_weight),
    )


PROTOCOLS = (
    *(_protocol_of_table_1(data, "silo") for data in _DATA),
    *(_protocol_of_table_1(data, "device") for data in _DATA),
    *(_protocol_of_table_2(count) for count in _NETWORKS),
    _protocol_of_table_2(8, "silo"),
    _built_in("digits", "cnn-small", {"rounds": 30}, contrastive_weight=0.01),
    _built_in(
        "digits-mixed",
        "cnn-3conv,resnet10-512",
        {"rounds": 10, "batch_size": 32, "drop_last": False},
        contrastive_weight=1.0,
    ),
)


# The paper's experiments: tables

_ROWS = {
    "LG-FedAvg": row("lg-fedavg"), "FedGen": row("fedgen"), "FML": row("fml"), "FedKD": row("fedkd"),
    "FedDistill": row("feddistill"), "FedProto": row("fedproto"), "FedTGP": row("fedtgp"), "FedSA": row("fedsa"),
}  # fmt: skip
_TRIALS = (0, 1, 2)  # "we run three trials for all experiments"
_HTFE_COLUMNS = {f"HtFE{count}": column(f"fedsa:cifar100-htfe{count}", "cifar100") for count in _NETWORKS}
_HTFE8 = _HTFE_COLUMNS["HtFE8"]


def _table(
    name: str, title: str, cells: tuple[Cell, ...], *, printed: str, notes: tuple[str, ...] = (),
    gains: tuple[Gain, ...] = (), seeds: tuple[int, ...] = _TRIALS,
) -> Table:  # fmt: skip
    """A table or figure of the paper; `printed` says where its numbers are."""
    return Table(
        name=f"fedsa:{name}", title=title, reported=("FedSA", printed), cells=cells, seeds=seeds,
        notes=(*_NOTES, *notes), gains=gains,
    )  # fmt: skip


# Table 1, "the test accuracy (%) under statistical heterogeneity", in both populations. 8 rows, 6 columns, 3 seeds:
# 144 runs.


def _same_network() -> dict[str, dict[str, Any]]:
    """The columns: each data set with each population."""
    columns = {}
    for population, clients in _POPULATIONS.items():
        for data, printed in _DATA.items():
            columns[f"{clients.title} {printed}"] = column(f"fedsa:{data}-{population}", data)
    return columns


_TABLE_1 = _table(
    "1",
    "Accuracy with the same network for all",
    grid(_ROWS, _same_network()),
    printed="Table 1",
    notes=(
        "All rows have the paper's 1,000 rounds. With 20 clients the authors' scripts differ by method: total.sh has "
        "200 for FedGen and 1,000 for FedTGP.",
    ),
)

# Table 2, "in the cross-device setting under both statistical and model heterogeneity". 96 runs.
_TABLE_2 = _table(
    "2",
    "Accuracy with different networks, Cifar100, cross-device",
    grid(_ROWS, _HTFE_COLUMNS),
    printed="Table 2",
)

# Fig. 3, "on Cifar100 in the cross-silo setting using the HtFE8 setting". Curves, no printed number. 8 runs.
_HTFE8_SILO = column("fedsa:cifar100-htfe8-silo", "cifar100")
_AFTER_A_FIFTH = "HtFE8, cross-silo, after a fifth of the rounds"
_FIG_3 = _table(
    "Fig3",
    "Accuracy over rounds with different networks, Cifar100, cross-silo",
    grid(_ROWS, {"HtFE8, cross-silo": _HTFE8_SILO}) + grid(_ROWS, {_AFTER_A_FIFTH: _HTFE8_SILO}, "at:1/5"),
    printed="in-text",
    notes=(
        "The paper draws curves and prints no numbers. The 200 rounds are those of the authors' scripts for 20 "
        "clients; the text names 1000 for all experiments. 'fedcli plot' draws the curves.",
    ),
    seeds=(0,),
)

# Table 3, "with different number of local epochs on Cifar100 in the HtFE8 setting". 72 runs, 24 of them Table 2's.
_EPOCHS = {
    "E=1": {**_HTFE8, "local_epochs": 1, "rounds": 1000},
    "E=5": {**_HTFE8, "local_epochs": 5, "rounds": 500},
    "E=10": {**_HTFE8, "local_epochs": 10, "rounds": 200},
}
_TABLE_3 = _table(
    "3",
    "Accuracy with more local epochs, Cifar100, HtFE8",
    grid(_ROWS, _EPOCHS),
    printed="Table 3",
    notes=(
        "FedDistill is printed as 35.24 for E = 1, and as 35.26 in Table 2.",
        "E = 10 has 200 rounds, as in the paper; the scripts have 300.",
    ),
)

# Table 4, "ablation studies on the key components [...] on Cifar100 in the HtFE8 setting". 18 runs, 6 of Table 2.
_ABLATIONS = {
    "FedProto": _ROWS["FedProto"],
    "EMA+R": row("fedsa", contrastive_weight=0.0, calibration_weight=0.0, embedding=False),
    "EMA+R+ER": row("fedsa", contrastive_weight=0.0, calibration_weight=0.0),
    "EMA+R+ER+CC": row("fedsa", contrastive_weight=0.0),
    "EMA+R+ER+MCL": row("fedsa", calibration_weight=0.0),
    "EMA+R+ER+MCL+CC": row("fedsa"),
}
_ABLATION_COLUMN = "Cifar100 HtFE8 accuracy"
_TABLE_4 = _table(
    "4",
    "Ablation, Cifar100, HtFE8",
    grid(_ABLATIONS, {_ABLATION_COLUMN: _HTFE8}),
    printed="Table 4",
    notes=(
        "Accuracy by the nearest global prototype, as the authors' code has it; CC moves the classifier alone.",
        "FedProto is Table 2's; the text has the lead of EMA+R on it.",
    ),
    gains=(
        Gain(row="EMA+R minus FedProto", column=_ABLATION_COLUMN, leading_rows=("EMA+R",), other_rows=("FedProto",)),
    ),
)

# Table 5, the accuracy "with varying hyperparameters" lambda_2 and lambda_3, the other at 1. 24 runs.
_VALUES = (0.1, 1.0, 5.0, 10.0)
_WEIGHTS = {
    **{f"lambda2={value:g}": {**_HTFE8, "contrastive_weight": value} for value in _VALUES},
    **{f"lambda3={value:g}": {**_HTFE8, "calibration_weight": value} for value in _VALUES},
}
_TABLE_5 = _table(
    "5", "Weights of MCL and CC, Cifar100, HtFE8", grid({"FedSA": row("fedsa")}, _WEIGHTS), printed="Table 5"
)

TABLES = (_TABLE_1, _TABLE_2, _FIG_3, _TABLE_3, _TABLE_4, _TABLE_5)
# What the paper shows and no table here plans.
NOT_PLANNED = {
    "Figure 1": "a sketch of the idea, without numbers",
    "Figure 2": "a sketch of the method, without numbers",
    "Appendix": "the paper refers to more results there; it is not part of the version that is available",
}


# The paper's experiments: claims

_OTHERS = tuple(name for name in _ROWS if name != "FedSA")
_ALL_PARTS = "EMA+R+ER+MCL+CC"
CLAIMS = (
    Claim(
        name="fedsa:cross-device",
        text="With 100 clients on CIFAR-10, ten a round, FedSA is ahead of FedProto, judged by the "
        "nearest prototype alone",
        table="fedsa:1",
        row="FedSA",
        other_rows=("FedProto",),
        columns=("cross-device Cifar10",),
    ),
    Claim(
        name="fedsa:all-others",
        text="With 100 clients on CIFAR-10, ten a round, FedSA is ahead of all seven others",
        table="fedsa:1",
        row="FedSA",
        other_rows=_OTHERS,
        columns=("cross-device Cifar10",),
    ),
    Claim(
        name="fedsa:cross-silo",
        text="With 20 clients on CIFAR-10, FedSA is ahead of all seven others",
        table="fedsa:1",
        row="FedSA",
        other_rows=_OTHERS,
        columns=("cross-silo Cifar10",),
    ),
    Claim(
        name="fedsa:cross-silo-cifar100",
        text="With 20 clients on CIFAR-100, FedSA is ahead of all seven others",
        table="fedsa:1",
        row="FedSA",
        other_rows=_OTHERS,
        columns=("cross-silo Cifar100",),
    ),
    Claim(
        name="fedsa:tiny-imagenet",
        text="With 20 and with 100 clients on Tiny-ImageNet, FedSA is on average ahead of all seven others",
        table="fedsa:1",
        row="FedSA",
        other_rows=_OTHERS,
        columns=("cross-silo Tiny-ImageNet", "cross-device Tiny-ImageNet"),
    ),
    Claim(
        name="fedsa:cifar100",
        text="With 100 clients on CIFAR-100, FedSA is ahead of all seven others",
        table="fedsa:1",
        row="FedSA",
        other_rows=_OTHERS,
        columns=("cross-device Cifar100",),
    ),
    Claim(
        name="fedsa:networks",
        text="With eight kinds of networks, FedSA is ahead of all seven others",
        table="fedsa:2",
        row="FedSA",
        other_rows=_OTHERS,
        columns=("HtFE8",),
    ),
    Claim(
        name="fedsa:fewer-networks",
        text="With two, three and five kinds of networks FedSA is on average ahead of all seven others",
        table="fedsa:2",
        row="FedSA",
        other_rows=_OTHERS,
        columns=("HtFE2", "HtFE3", "HtFE5"),
    ),
    Claim(
        name="fedsa:epochs",
        text="Over one, five and ten local epochs FedSA is on average ahead of all seven others",
        table="fedsa:3",
        row="FedSA",
        other_rows=_OTHERS,
        columns=tuple(_EPOCHS),
    ),
    Claim(
        name="fedsa:anchors",
        text="Plain random anchors in the place of prototypes are ahead of FedProto",
        table="fedsa:4",
        row="EMA+R",
        other_rows=("FedProto",),
        columns=(_ABLATION_COLUMN,),
    ),
    Claim(
        name="fedsa:embedding",
        text="The embedding makes random anchors better",
        table="fedsa:4",
        row="EMA+R+ER",
        other_rows=("EMA+R",),
        columns=(_ABLATION_COLUMN,),
    ),
    Claim(
        name="fedsa:margin",
        text="The contrastive margin makes FedSA better",
        table="fedsa:4",
        row=_ALL_PARTS,
        other_rows=("EMA+R+ER+CC",),
        columns=(_ABLATION_COLUMN,),
    ),
    Claim(
        name="fedsa:margin-alone",
        text="The contrastive margin makes FedSA better without the calibration, too",
        table="fedsa:4",
        row="EMA+R+ER+MCL",
        other_rows=("EMA+R+ER",),
        columns=(_ABLATION_COLUMN,),
    ),
    Claim(
        name="fedsa:calibration",
        text="The calibration of classifiers makes FedSA better, by the nearest prototype",
        table="fedsa:4",
        row=_ALL_PARTS,
        other_rows=("EMA+R+ER+MCL",),
        columns=(_ABLATION_COLUMN,),
    ),
    Claim(
        name="fedsa:parts",
        text="All parts together are ahead of plain anchors",
        table="fedsa:4",
        row=_ALL_PARTS,
        other_rows=("EMA+R",),
        columns=(_ABLATION_COLUMN,),
    ),
    Claim(
        name="fedsa:convergence",
        text="After a fifth of the rounds with eight kinds of networks and 20 clients, FedSA is "
        "ahead of FedProto and FedTGP",
        table="fedsa:Fig3",
        row="FedSA",
        other_rows=("FedProto", "FedTGP"),
        columns=(_AFTER_A_FIFTH,),
    ),
)
