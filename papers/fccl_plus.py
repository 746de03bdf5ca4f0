"""FCCL+: clients with different networks correlate their logits and align their similarities on public images.

W. Huang, M. Ye, Z. Shi, B. Du, "Generalizable Heterogeneous Federated Cross-Correlation and Instance Similarity
Learning", IEEE TPAMI 2024, https://arxiv.org/abs/2309.16286; and its conference version FCCL: W. Huang, M. Ye, B. Du,
"Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.

Each client has its own network and its own domain. In the collaborative phase of a communication epoch, for every batch
of unlabelled public images, the clients send logits and similarities of the images, the server sends back the means,
and each client makes its logits correlate with the mean ones, class by class (FCCM), and its similarities like the mean
ones (FISL). In the local phase it trains on its own labels and keeps, by distillation from its model after the previous
local phase, what that knew of the other classes (FNTD). Algorithm 1; Eqs. 1 to 14. FCCL has FCCM alone, and distils
whole predictions from that model and from one trained on the private data before (Eq. 19).

Notation
    code                    paper           shape
    logits                  Z_i             [B, C]; of all participants [K, B, C]
    correlation             M_i             [C, C]
    similarity              S_i             [B, B-1]
    Exchanged               Z-bar, S-bar    what the server sends back
    previous                theta_i^{e-1}   dicts of tensors: the model after the previous local phase
    pretrained              theta*          dicts of tensors (FCCL)
    off_diagonal_weight     lambda
    similarity_weight       omega
    similarity_temperature  mu
    temperature             tau

Readings and deviations
    1.  The off-diagonal target of FCCM is -1, as in Eq. 2, Fig. 2 and the code, though the text speaks of
        decorrelation, which is 0 as in Barlow Twins (`--off-diagonal-target 0`).
    2.  M is Z^T Z-bar / B with columns divided by their unbiased deviation, as in the code: a column's correlation with
        itself is (B-1)/B. To the deviation 1e-5 is added, because it can be 0.
    3.  Z-bar and S-bar are plain means over all participants, the client's own part among them, taken before any update
        by that batch. (FCCL's first code has the client's previous model in its own place.)
    4.  S is B x (B-1), one row an image; Eq. 4 has (B-1) x (B-1). mu is 0.02, as in Section 4.1, the code and the work
        it is taken from; Table 7 has 0.002.
    5.  Logits and features are those of one forward pass in training mode. The code has a second pass for the features,
        which updates the running statistics twice and drops other units. Here they are updated once a batch.
    6.  A public batch of one image has no correlation and no similarity: it is left out.
    7.  FNTD is the code's: softmax over all classes, without the target's entry, not renormalised, times tau^2, which
        Eq. 10 has and Eqs. 13 and 14 leave out (`--distillation-factor one`). So it can be negative, and its gradient
        at the target logit is tau p_S (1 - p_T), not 0 as Eq. 12 says and as the renormalised form has it
        (`--renormalize`). It pushes the target down: where teacher and student agree, of ten classes, the target's
        probability is held at 0.53; without tau^2 at 0.92.
    8.  The teacher is in evaluation mode and constant. FCCL+'s code never sets it so: it takes the statistics of the
        private batch and drops units of its own (`--teacher-mode train`, which the protocols of the paper have).
        FCCL's first code has it as here.
    9.  A client stores one model, since at the end of a round the current and the previous one are the same. In round 0
        the teacher is the initial network, as in the code. `--teacher collaborative` has the model after the
        collaborative phase instead, which Fig. 9 compares with.
    10. A new Adam for every public batch and client, as in the code: without momentum a step is nearly lr times the
        sign of the gradient. `--public-optimizer phase` keeps one for the phase. Weight decay is that of the local
        phase only, as in the code.
    11. The learning rate is constant (Section 4.1); the code's goes down to a tenth (`--lr-schedule linear`, which
        every method has).
    12. FCCL: participants begin at theta*, as in the code. theta* is trained on a client's data when it takes part for
        the first time, with batches of its own draws: with the run's optimizer, or, as in the code, with a rate that
        falls to 0 along a cosine and no weight decay (`--pretraining code`). With equal networks the code lets everyone
        begin at client 0's theta*; here each has its own, since client 0 would give the others its labels. Eq. 19 has
        no temperature: 1.
    13. With equal networks, parameters and running statistics are averaged, each client counting the same, between the
        two phases (Section 4.4; `--average-parameters`). FCCL's later code averages after the local phase instead.
    14. What the ablations have in the place of FNTD is not the same everywhere. Tables 10, 11, 13 and 14 have Eq. 19,
        pre-trained teacher included, so they are runs of FCCL. "Without FNTD" in Table 19 has Eq. 14 without L_FNTD.
    15. EWC (Table 16) is only named. What must not be forgotten is what the collaborative phase has taught, so
        theta*_A is the model after it, and F is estimated on a batch of the same public images, drawn and augmented
        anew (papers/baselines/ewc.py). So applied, the weights of Table 16, 0.01 to 1, hold little. In our three runs
        with 0.7 the penalty times its weight ends at 0.003, beside a cross-entropy of 0.01, and the accuracy on other
        domains, 35.1, is not told apart from that without one, 34.5. In small networks 10 is ahead, with both seeds.
    16. Table 17 has plain distillation, Eq. 10, in that share of the local epochs, the first ones, then FNTD. With
        `--plain-share 1` it is the distillation that Fig. 10 compares with.
    17. Costs are counted for a round: P C logits and the sum of B (B-1) similarities over its batches, each way. The
        paper's Table 2 has those of a batch.

Known from the authors' code only
    Batch sizes of each scenario, weight decay, omega and tau of Office-Home and Office Caltech, the normalisation of
    the public images, 50 epochs for theta*; they stand in PROTOCOLS.

Run it
    fedcli run fccl-plus --dataset digit-domains
    fedcli run fccl-plus --protocol fccl:office31 --dataset office31-private --regularizer ewc
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import (
    Cell,
    Claim,
    Control,
    Costs,
    DataSetting,
    Gain,
    Method,
    Protocol,
    PublicSetting,
    Row,
    Table,
    UserError,
    column,
    grid,
    option,
    row,
)
from fedcli.core import (
    Aux,
    Batch,
    Buffers,
    Client,
    LocalLoss,
    Network,
    Params,
    cosine_annealing,
    cross_entropy,
    masked_mean,
    own_models,
    personal_models,
    plain_loss,
    root,
)
from fedcli.core.class_vectors import EXCLUDED_LOGIT
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.own_models import average_models, group_newcomers, refuse_mixed_average, train_newcomers
from fedcli.core.public_images import learn_from_public
from fedcli.papers.baselines import ewc

SMALL = 1e-5  # added to deviations


@dataclass(frozen=True)
class CollaborativeConfig:
    """Options of the collaborative phase, which both versions have."""

    correlation_weight: float = option(1.0, "Weight of FCCM; 1 in the paper", source="Eq. 6, Table 10", low=0, off=0)
    off_diagonal_weight: float = option(
        0.0051, "Weight of different classes in FCCM", symbol="λ", source="Eq. 2", low=0, off=0
    )
    off_diagonal_target: float = option(
        -1.0, "Correlation that different classes are driven to; 0 is decorrelation", source="Eq. 2", low=-1, high=1
    )
    similarity_weight: float = option(3.0, "Weight of FISL", symbol="ω", source="Eq. 6", low=0, off=0)
    similarity_temperature: float = option(
        0.02, "Temperature of the similarities", symbol="μ", source="Eq. 3", low=0, open_low=True
    )
    public_epochs: int = option(1, "Passes over the public images in a round", source="authors' code", low=1)
    public_optimizer: str = option(
        "batch", "When the collaborative phase resets its optimizer", source="authors' code",
        choices=("batch", "phase"),
    )  # fmt: skip
    average_parameters: bool = option(
        False, "Average the models between the two phases, for equal networks", source="Section 4.4"
    )


@dataclass(frozen=True)
class Config(CollaborativeConfig):
    """What FCCL+ adds to local training."""

    regularizer: str = option(
        "fntd", "How the local phase avoids forgetting", source="Eq. 14, Tables 16 and 19",
        choices=("fntd", "ewc", "none"), off="none",
    )  # fmt: skip
    temperature: float = option(
        3.0, "Temperature of FNTD", symbol="τ", source="Eq. 8", low=0, open_low=True,
        only_with={"regularizer": ("fntd", "none")},
    )  # fmt: skip
    teacher: str = option(
        "previous", "What is distilled from: the model after the previous local phase, or after this collaborative one",
        symbol="T", source="Eq. 13, Fig. 9", choices=("previous", "collaborative"),
        only_with={"regularizer": ("fntd", "none")},
    )  # fmt: skip
    teacher_mode: str = option(
        "evaluate", "Mode of that model: evaluation, or training, with the statistics of the batch and dropout",
        source="code: train", choices=("evaluate", "train"),
    )  # fmt: skip
    distillation_factor: str = option(
        "square", "Factor of FNTD: the square of its temperature, or one", source="Eqs. 13 and 14: one; code: square",
        choices=("square", "one"), only_with={"regularizer": ("fntd",)},
    )  # fmt: skip
    renormalize: bool = option(
        False, "Make the other classes' probabilities in FNTD sum to 1", source="Eq. 12",
        only_with={"regularizer": ("fntd",)},
    )  # fmt: skip
    plain_share: float = option(
        0.0, "Share of the local epochs, the first ones, with plain distillation", source="Table 17", low=0, high=1,
        off=0, only_with={"regularizer": ("fntd", "none")},
    )  # fmt: skip
    ewc_weight: float = option(
        0.1, "Weight of the EWC penalty", symbol="λ", source="Table 16", low=0, off=0,
        only_with={"regularizer": ("ewc",)},
    )  # fmt: skip


@dataclass(frozen=True)
class ConferenceConfig(CollaborativeConfig):
    """What FCCL adds to local training."""

    similarity_weight: float = option(
        0.0, "Weight of FISL, which FCCL has not", symbol="ω", source="Eq. 6", low=0, off=0
    )
    distillation_weight: float = option(
        1.0, "Weight of the distillation from both teachers; 1 in the paper", source="Eq. 19", low=0, off=0
    )
    pretrain_epochs: int | None = option(
        None, "Epochs on its own data before a client's first round; those of a round where not given",
        source="Eq. 19", symbol="θ*", low=0,
    )  # fmt: skip
    pretraining: str = option(
        "run", "How θ* is trained: by the run's optimizer, or as in the code, by a cosine rate without weight decay",
        source="authors' code", choices=("run", "code"),
    )  # fmt: skip


class Exchanged(NamedTuple):
    """What the server sends back for a public batch; None where that term is off."""

    logits: Tensor | None  # Z-bar, [B, C]
    similarity: Tensor | None  # S-bar, [B, B-1]


class Teacher(NamedTuple):
    """A model that a client distils from, its own for each client; the context of the local phase, with axes 0."""

    params: Params
    buffers: Buffers


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    params: Params  # its model after the local phase: theta_i^e, and the teacher theta_i^{e-1} of the next round
    buffers: Buffers
    pretrained: Teacher | None = None  # theta*, in FCCL


class ServerState(NamedTuple):
    """The state of the simulation; the server itself keeps nothing."""

    clients: Mapping[int, ClientState]  # of those that have taken part


# Collaborative phase


def standardize(logits: Tensor) -> Tensor:
    """Phi of Eq. 1: every column minus its mean, over its unbiased deviation + 1e-5; `[B, C]`, zeros for B = 1."""
    centred = logits - logits.mean(0)
    variance = centred.square().sum(0) / max(len(logits) - 1, 1)
    return centred / (root(variance) + SMALL)


def cross_correlation(logits: Tensor, mean_logits: Tensor) -> Tensor:
    """Eq. 1: M_i = Phi(Z_i)^T Phi(Z-bar) / B; `[C, C]`, in [-1, 1], row u is a class of Z_i, column v one of Z-bar.

    Args:
        logits: Z_i, `[B, C]`.
        mean_logits: Z-bar, `[B, C]`.
    """
    return standardize(logits).T @ standardize(mean_logits) / len(logits)


def fccm_loss(correlation: Tensor, off_diagonal_weight: float, off_diagonal_target: float = -1.0) -> Tensor:
    """Eq. 2: sum_u (1 - M_uu)^2 + lambda sum_{u != v} (M_uv - target)^2; a scalar.

    Args:
        correlation: M, `[C, C]`.
        off_diagonal_weight: lambda.
        off_diagonal_target: -1 in Eq. 2.
    """
    same = torch.eye(len(correlation), dtype=torch.bool, device=correlation.device)
    on_diagonal = torch.where(same, 1 - correlation, 0.0).square().sum()
    off_diagonal = torch.where(same, 0.0, correlation - off_diagonal_target).square().sum()
    return on_diagonal + off_diagonal_weight * off_diagonal


def without_diagonal(matrix: Tensor) -> Tensor:
    """A square matrix `[B, B]` without its diagonal, `[B, B-1]`; each row in its order."""
    before = matrix.tril(-1)[:, :-1]  # row i has its entries 0 ... i - 1 in these columns
    after = matrix.triu(1)[:, 1:]  # and its entries i + 1 ... B - 1 one column to the left
    return before + after


def similarity(features: Tensor, temperature: float) -> Tensor:
    """Eqs. 3 and 4: S_i `[B, B-1]`, a batch's cosines over mu but each image's with itself; 0 for a zero feature.

    Args:
        features: H_i, `[B, D]`.
        temperature: mu, positive.
    """
    # Not `unit` of the core, for which a feature shorter than 1e-6 is zero: here every other one has a direction.
    squares = features.square().sum(1, keepdim=True)  # [B, 1]
    directions = features / torch.where(squares > 0, squares, 1.0).sqrt()
    cosines = directions @ directions.T  # [B, B]
    return without_diagonal(cosines) / temperature


def fisl_loss(own_similarity: Tensor, mean_similarity: Tensor) -> Tensor:
    """Eq. 5: the mean over rows of KL(softmax(S-bar) || softmax(S_i)); a scalar, in nats, not negative.

    Args:
        own_similarity: S_i, `[B, B-1]`.
        mean_similarity: S-bar, `[B, B-1]`.
    """
    target = F.log_softmax(mean_similarity, dim=1)
    own = F.log_softmax(own_similarity, dim=1)
    return (target.exp() * (target - own)).sum(1).mean()


def make_collaborative_loss(network: Network, config: CollaborativeConfig) -> LocalLoss:
    """The objective of Eq. 6, L_FCCM + omega L_FISL, on a public batch; its context is `Exchanged`."""

    def loss(params, buffers, batch, exchanged):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        value = 0.0
        terms = {}
        if config.correlation_weight:
            correlation = cross_correlation(logits, exchanged.logits)
            terms["fccm"] = fccm_loss(correlation, config.off_diagonal_weight, config.off_diagonal_target)
            value = value + config.correlation_weight * terms["fccm"]
        if config.similarity_weight:
            terms["fisl"] = fisl_loss(similarity(features, config.similarity_temperature), exchanged.similarity)
            value = value + config.similarity_weight * terms["fisl"]
        return value, Aux(buffers, terms, features)

    return loss


def mean_of_participants(outputs: list[Tensor], cohort: Cohort, fed: Federation) -> Tensor:
    """The mean that all get back of what the participants of each network send, `[K, ...]`."""
    sent = fed.upload(fed.in_order(cohort, fed.groups(cohort), outputs))  # [K, ...]
    return fed.download(sent.mean(0), cohort)


def exchange(
    models: list[Client], batch: Batch, cohort: Cohort, fed: Federation, config: CollaborativeConfig
) -> Exchanged | None:
    """Algorithm 1, lines 2 to 6: all participants' outputs of one public batch, before any update, and their means."""
    if len(batch.x) == 1:  # Reading 6
        return None
    outputs = []
    for model, group in zip(models, fed.groups(cohort), strict=True):
        outputs.append(fed.forward(model, group, batch.x))
    mean_logits = None
    if config.correlation_weight:
        logits = [output.logits for output in outputs]
        mean_logits = mean_of_participants(logits, cohort, fed)
    mean_similarity = None
    if config.similarity_weight:
        similarities = []
        for output in outputs:
            of_clients = [similarity(features, config.similarity_temperature) for features in output.features]
            similarities.append(torch.stack(of_clients))
        mean_similarity = mean_of_participants(similarities, cohort, fed)
    return Exchanged(mean_logits, mean_similarity)


def collaborate(
    states: list[ClientState], cohort: Cohort, fed: Federation, config: CollaborativeConfig
) -> tuple[list[Client], Terms]:
    """Algorithm 1, lines 2 to 11: the collaborative phase; with both weights 0 nobody sends anything or moves.

    `states` has the participants' models of each network, stacked. Returned are those after the phase, without
    optimizer state, and the mean over batches of each term, `[K]`.
    """
    models = [Client(state.params, state.buffers) for state in states]
    losses = [make_collaborative_loss(group.network, config) for group in fed.groups(cohort)]
    steps = [fed.optimizer_step(loss, weight_decay=0.0, key="public") for loss in losses]  # Reading 10
    terms: Terms = {}
    if config.correlation_weight or config.similarity_weight:

        def exchange_outputs(models: list[Client], batch: Batch) -> Exchanged | None:
            return exchange(models, batch, cohort, fed, config)

        models, terms = learn_from_public(  # lines 7 to 11
            models, steps, exchange_outputs, cohort, fed, range(config.public_epochs),
            keep_optimizer=config.public_optimizer == "phase",
        )  # fmt: skip
    if config.average_parameters:  # Reading 13
        models = average_models(models, cohort, fed)
    return [Client(model.params, model.buffers) for model in models], terms


# Local phase


def softened_divergence(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, factor: str = "square"
) -> Tensor:
    """The summands of Eqs. 8, 10 and 13: tau^2 p_T log(p_T / p_S), with softmax over all classes; `[B, C]`."""
    student = F.log_softmax(student_logits / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=1)
    scale = temperature**2 if factor == "square" else 1
    return scale * teacher.exp() * (teacher - student)


def kd_loss(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, *, mask: Tensor | None = None
) -> Tensor:
    """Eqs. 8 and 10: tau^2 KL(p_T || p_S), the mean over the batch; arguments as in `fntd_loss`."""
    return masked_mean(softened_divergence(student_logits, teacher_logits, temperature).sum(1), mask)


def fntd_loss(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, temperature: float, renormalize: bool = False,
    factor: str = "square", *, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Eq. 13 times tau^2: tau^2 sum_{u != y} p_T^u log(p_T^u / p_S^u), the mean over the batch (reading 7).

    Args:
        student_logits: `[B, C]`.
        teacher_logits: `[B, C]`.
        labels: y, `[B]`.
        temperature: tau, positive.
        renormalize: Whether the softmax is over the classes but y, so that the sum is a divergence.
        factor: "square" for tau^2, "one" for Eq. 13 as printed.
        mask: `[B]`, False for padding.

    Returns:
        Scalar, in nats; negative values are possible unless renormalized.
    """
    other = labels[:, None] != torch.arange(student_logits.shape[1], device=labels.device)  # [B, C]
    if renormalize:
        student_logits = torch.where(other, student_logits, EXCLUDED_LOGIT)
        teacher_logits = torch.where(other, teacher_logits, EXCLUDED_LOGIT)
    summands = softened_divergence(student_logits, teacher_logits, temperature, factor)
    return masked_mean(torch.where(other, summands, 0.0).sum(1), mask)


def predict(network: Network, teacher: Teacher, batch: Batch) -> Tensor:
    """A teacher's logits `[B, C]` in evaluation mode, constants of the loss (reading 8)."""
    return network(teacher.params, teacher.buffers, batch.x, batch.mask, train=False).logits.detach()


def predict_in_training(network: Network, teacher: Teacher, student_buffers: Buffers, batch: Batch) -> Tensor:
    """A teacher's logits `[B, C]` in training mode, by the statistics of the batch, constants of the loss.

    Running statistics change nothing in that mode, so they may be the student's; of its integers, which are the keys of
    dropout, others are made, so that other units are dropped than the student's.
    """
    buffers = {name: value if value.is_floating_point() else value + 1 for name, value in student_buffers.items()}
    return network(teacher.params, buffers, batch.x, batch.mask).logits.detach()


def make_local_loss(network: Network, config: Config, term: str) -> LocalLoss:
    """The objective of the local phase; its context is the `Teacher` theta^{e-1}.

    To the cross-entropy is added `term`: "fntd" (Eq. 14), "kd" (Eq. 10) or "none".
    """

    def logits_of_teacher(teacher, student_buffers, batch):  # [B, C]
        if config.teacher_mode == "train":  # Reading 8
            return predict_in_training(network, teacher, student_buffers, batch)
        return predict(network, teacher, batch)

    def local_loss(params, buffers, batch, teacher):
        features, logits, new_buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)  # Eq. 9
        if term == "none":
            return task, Aux(new_buffers, {"cross_entropy": task}, features)
        teacher_logits = logits_of_teacher(teacher, buffers, batch)
        if term == "kd":
            distilled = kd_loss(logits, teacher_logits, config.temperature, mask=batch.mask)
        else:
            distilled = fntd_loss(  # Eq. 13
                logits, teacher_logits, batch.y, config.temperature, config.renormalize, config.distillation_factor,
                mask=batch.mask,
            )  # fmt: skip
        return task + distilled, Aux(new_buffers, {"cross_entropy": task, term: distilled}, features)

    return local_loss


def update_locally(
    model: Client, teacher: Teacher, group: Cohort, fed: Federation, config: Config
) -> tuple[Client, Terms]:
    """Algorithm 1, line 12: all local epochs of the clients of one network; returns their models and terms."""
    if config.regularizer == "ewc":
        return update_with_ewc(model, group, fed, config)
    num_plain = round(config.plain_share * fed.local_epochs)
    plain_epochs = range(num_plain)  # Reading 16
    other_epochs = range(num_plain, fed.local_epochs)
    plain_loss = make_local_loss(group.network, config, "kd")
    model, plain_terms = fed.train(model, group, plain_loss, teacher, axes=0, epochs=plain_epochs)
    local_loss = make_local_loss(group.network, config, config.regularizer)
    model, other_terms = fed.train(model, group, local_loss, teacher, axes=0, epochs=other_epochs)
    return model, mean_over_phases(plain_terms, other_terms, len(plain_epochs), len(other_epochs))


def mean_over_phases(first: Terms, second: Terms, first_epochs: int, second_epochs: int) -> Terms:
    """The terms' means over the epochs of two phases; a term of one phase is 0 in the other."""
    epochs = first_epochs + second_epochs
    terms = {name: first_epochs / epochs * value for name, value in first.items()}
    for name, value in second.items():
        terms[name] = terms.get(name, 0.0) + second_epochs / epochs * value
    return terms


def update_with_ewc(model: Client, group: Cohort, fed: Federation, config: Config) -> tuple[Client, Terms]:
    """The local phase with EWC in the place of FNTD, as in Table 16 (Reading 15)."""
    pass_after_the_phase = fed.public_batches(group.round, epoch=config.public_epochs)
    fisher_batch = next(pass_after_the_phase)
    anchors = ewc.anchors(model, group, fed, fisher_batch.x)
    return fed.train(model, group, ewc.make_local_loss(group.network, config.ewc_weight), anchors, axes=0)


def init(fed: Federation, config: CollaborativeConfig) -> ServerState:
    """Nobody has trained yet; refuses public batches of one image, and different networks that are to be averaged."""
    first_size, *_ = fed.public_batch_sizes  # of all batches but the last, which may be smaller
    if first_size == 1:
        raise UserError(
            "public batches must have 2 images or more (got 1), since they are compared with each other; "
            "raise --public-batch-size or --public-examples."
        )
    if config.average_parameters:
        refuse_mixed_average(fed)
    return ServerState({})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, communication epoch e."""
    states = state.clients
    groups = fed.groups(cohort)
    recalled = []
    for group in groups:
        first = fed.initial_model(group.network)
        recalled.append(fed.recall(states, group, ClientState(first.params, first.buffers)))
    models, terms = collaborate(recalled, cohort, fed, config)  # lines 2 to 11
    all_terms = []
    for model, previous, group in zip(models, recalled, groups, strict=True):
        teacher = Teacher(previous.params, previous.buffers)  # theta^{e-1}, Reading 9
        if config.teacher == "collaborative":
            teacher = Teacher(model.params, model.buffers)  # theta^e, for Fig. 9
        model, group_terms = update_locally(model, teacher, group, fed, config)  # line 12
        states = fed.remember(states, group, ClientState(model.params, model.buffers))
        all_terms.append(group_terms)
    return ServerState(states), {**terms, **fed.in_order(cohort, groups, all_terms)}


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: CollaborativeConfig) -> Costs:
    """Logits and similarities of the public images both ways, batch by batch; and the model where it is averaged."""
    floats_of_epoch = 0
    for size in fed.public_batch_sizes:
        if size == 1:  # Reading 6
            continue
        if config.correlation_weight:
            floats_of_epoch += size * fed.num_classes
        if config.similarity_weight:
            floats_of_epoch += size * (size - 1)
    floats_of_client = config.public_epochs * floats_of_epoch
    if config.average_parameters:
        floats_of_client += fed.sizes.parameters
    total = len(cohort.client_ids) * floats_of_client
    return Costs(down=total, up=total)


METHOD = Method(
    name="fccl-plus",
    title="FCCL+: cross-correlation, instance similarity and non-target distillation",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {
        "correlation_weight": 0.0, "similarity_weight": 0.0, "regularizer": "none", "plain_share": 0.0,
        "average_parameters": False,
    }),
    state_types=(ServerState, ClientState),
    variants={
        "similarity": {"correlation_weight": 0.0, "public_epochs": 2, "plain_share": 0.5},
        "correlation": {"similarity_weight": 0.0, "public_optimizer": "phase", "renormalize": True},
        "averaged": {"average_parameters": True, "off_diagonal_target": 0.0, "regularizer": "ewc"},
    },
    costs=costs,
    client_memory=lambda sizes: 2 * sizes.parameters,  # Table 3: the model and its teacher
    personal=personal_models,
    mixed_networks=True, uses_public_data=True,
)  # fmt: skip


# The conference version, FCCL


class Teachers(NamedTuple):
    """The context of FCCL's local phase, with axes 0."""

    previous: Teacher  # theta^{e-1}
    pretrained: Teacher  # theta*


def make_conference_loss(network: Network, config: ConferenceConfig) -> LocalLoss:
    """The objective of Eq. 19, L_CE + L_KD(theta^{e-1}) + L_KD(theta*); its context is `Teachers`."""

    def local_loss(params, buffers, batch, teachers):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        previous = kd_loss(logits, predict(network, teachers.previous, batch), 1.0, mask=batch.mask)
        pretrained = kd_loss(logits, predict(network, teachers.pretrained, batch), 1.0, mask=batch.mask)
        terms = {"cross_entropy": task, "previous": previous, "pretrained": pretrained}
        return task + config.distillation_weight * (previous + pretrained), Aux(buffers, terms, features)

    return local_loss


def anneal_newcomers(
    states: Mapping[int, ClientState], cohort: Cohort, fed: Federation, epochs: int
) -> Iterator[tuple[Cohort, Client]]:
    """As `train_newcomers`, by a learning rate that falls to 0 along a cosine, and without weight decay."""
    for group in group_newcomers(states, cohort, fed):
        model = own_models({}, group, fed)
        loss = plain_loss(group.network)
        for number in range(epochs):
            lr = cosine_annealing(fed.lr(cohort.round), number, epochs)
            step = fed.optimizer_step(loss, lr=lr, weight_decay=0.0)
            epoch = fed.local_epochs + number  # the epochs before have the draws of the round itself
            model, _ = fed.train(model, group, step, epochs=range(epoch, epoch + 1))
        yield group, model


def run_conference_round(
    state: ServerState, cohort: Cohort, fed: Federation, config: ConferenceConfig
) -> tuple[ServerState, Terms]:
    """One communication epoch of FCCL: as in FCCL+, but for theta* and the local objective."""
    states = state.clients
    groups = fed.groups(cohort)
    epochs = fed.local_epochs if config.pretrain_epochs is None else config.pretrain_epochs
    pretrain = anneal_newcomers if config.pretraining == "code" else train_newcomers
    for group, model in pretrain(states, cohort, fed, epochs):
        pretrained = Teacher(model.params, model.buffers)  # theta*, Reading 12
        states = fed.remember(states, group, ClientState(model.params, model.buffers, pretrained))
    recalled = [fed.recall(states, group) for group in groups]  # all of them have a state by now
    models, terms = collaborate(recalled, cohort, fed, config)
    all_terms = []
    for model, previous, group in zip(models, recalled, groups, strict=True):
        pretrained = cast(Teacher, previous.pretrained)
        teachers = Teachers(Teacher(previous.params, previous.buffers), pretrained)
        local_loss = make_conference_loss(group.network, config)
        model, group_terms = fed.train(model, group, local_loss, teachers, axes=0)
        states = fed.remember(states, group, ClientState(model.params, model.buffers, pretrained))
        all_terms.append(group_terms)
    return ServerState(states), {**terms, **fed.in_order(cohort, groups, all_terms)}


CONFERENCE = Method(
    name="fccl",
    title="FCCL: cross-correlation, and distillation from the previous and a pre-trained model",
    config=ConferenceConfig, init=init, run_round=run_conference_round,
    reduces_to=(
        "local",
        {"correlation_weight": 0.0, "similarity_weight": 0.0, "distillation_weight": 0.0, "pretrain_epochs": 0},
    ),
    state_types=(ServerState, ClientState, Teacher),
    variants={"code": {"pretraining": "code", "similarity_weight": 3.0}},
    costs=costs,
    client_memory=lambda sizes: 3 * sizes.parameters,  # Table 3: the model and its two teachers
    personal=personal_models,
    mixed_networks=True, uses_public_data=True,
)  # fmt: skip

METHODS = (CONFERENCE,)


# The paper's experiments: protocols

_IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_PUBLIC_CONSTANTS = {  # the code has the constants of the first two sets exchanged
    "cifar100": {"mean": (0.4802, 0.4480, 0.3975), "std": (0.2770, 0.2691, 0.2821)},
    "tiny-imagenet": {"mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762)},
    "fmnist": _IMAGENET,
}
_TRAINING = {
    "num_clients": 4, "partition": "domains", "rounds": 40, "local_epochs": 20, "batch_size": 128, "optimizer": "adam",
    "lr": 0.001, "weight_decay": 1e-5, "public_dataset": "cifar100", "public_examples": 5000, "public_batch_size": 256,
}  # fmt: skip
# Table 7, and what only the authors' code says: how FedMD exchanges, how it and FCCL begin.
_OPTIONS_OF_METHODS: dict[str, dict[str, Any]] = {
    "fccl": {"pretrain_epochs": 50, "pretraining": "code"},
    "fedmd": {"exchange": "batch", "pretrain_epochs": 40},
    "fedprox": {"proximal_weight": 0.01},
    "moon": {"contrastive_weight": 1.0, "temperature": 0.5},
    "fedproc": {"cross_entropy_weight": 0.5},
    "fedrs": {"scaling": 0.5},
}
_NOTES_OF_ALL = (
    "Batch sizes are those of the authors' code; Section 4.1 has 512 public and 256 private images, as the conference "
    "version. Weight decay is the code's, and that theta* of FCCL is trained for 50 epochs.",
    "The learning rate is constant, as in Section 4.1, and so equal for all methods; the code lets it decrease.",
    "Public images have the paper's weak augmentation, a resized crop and a flip, in protocols named strong its strong "
    "one. The code's weak one, a crop of the image padded by 4 pixels and a flip, is in protocols named crop.",
    "FCCL+'s teacher is in training mode, as in the authors' code (--teacher-mode train).",
    "FedProc's alpha of 0.5 (Table 7) is read as a constant weight of the cross-entropy.",
    "FedMD exchanges scores at every public batch and has a new Adam each time, as in the authors' code.",
    "theta* of FCCL is trained as in the code, with a cosine rate and no weight decay.",
    "FCCL and FedMD begin at networks trained on the private data alone, for 50 and 40 epochs, as in the authors' "
    "code. All others begin at the initial networks, as there, so that many epochs behind.",
)
_PRIVATE_NOTE = "The -private sets train on as many images of each domain as Table 5 says."
_LEAKY_NOTES = (
    "The -leaky sets are divided as by the authors' loader: tested on all images, those of the training part among "
    "them, and never trained on the last classes.",
)


class _Augmentation(NamedTuple):
    """How public images are augmented, and its words in a protocol's summary."""

    name: str
    words: str


_AUGMENTATIONS = {  # by what a protocol's name ends with
    "": _Augmentation("resized-crop", ""),
    "-strong": _Augmentation("resized-crop-colour", ", public images strongly augmented"),
    "-crop": _Augmentation("crop-flip", ", public images cropped and flipped as in the authors' code"),
}


def _public(augmentation: str) -> dict[str, PublicSetting]:
    """The paper's sets of public images."""
    settings = {}
    for name, constants in _PUBLIC_CONSTANTS.items():
        settings[name] = PublicSetting(**constants, source="authors' code", augmentation=augmentation)
    return settings


def _protocol(  # noqa: PLR0913  # a declaration: one keyword for each trait of a scenario
    name: str, summary: str, datasets: tuple[str, ...], backbone: str, top_k: int = 1, form: str = "",
    plus_options: dict[str, Any] | None = None, notes: tuple[str, ...] = (), **settings,
) -> Protocol:  # fmt: skip
    """A scenario of Section 4.1; `plus_options` are FCCL+'s in it, `form` is one of `_AUGMENTATIONS`."""
    augmentation = _AUGMENTATIONS[form]
    setting = DataSetting(backbone=backbone, **_IMAGENET, source="authors' code: ImageNet's constants", top_k=top_k)
    return Protocol(
        name=f"fccl:{name}{form}",
        summary=summary + augmentation.words,
        source="Section 4.1, Tables 5 to 7",
        settings={**_TRAINING, **settings},
        datasets=dict.fromkeys(datasets, setting),
        selection="mean-last-3",
        evaluation="domains",
        public=_public(augmentation.name),
        method_options={**_OPTIONS_OF_METHODS, "fccl-plus": {"teacher_mode": "train", **(plus_options or {})}},
        notes=(*_NOTES_OF_ALL, *notes),
    )


def _offices(name: str) -> tuple[str, ...]:
    return f"{name}-private", name, f"{name}-leaky"


def _digits(form: str) -> Protocol:
    return _protocol(
        "digits-4", "Digits of four domains, a client each", ("digits-4",),
        "resnet10-3x3,resnet12-3x3,efficientnet-b0-32,mobilenet-v2-32", form=form,
    )  # fmt: skip


def _office_caltech(form: str) -> Protocol:
    return _protocol(
        "office-caltech", "Office things of four domains, a client each", _offices("office-caltech"),
        "googlenet-32,resnet12-3x3,resnet10-3x3,resnet12-3x3", plus_options={"temperature": 1.0}, public_batch_size=128,
        notes=(_PRIVATE_NOTE, *_LEAKY_NOTES, "tau is the code's; the paper has 3 by default."), form=form,
    )  # fmt: skip


def _office31(form: str) -> Protocol:
    return _protocol(
        "office31", "Office things of three domains, a client each; top-5", _offices("office31"),
        "resnet10-3x3,resnet12-3x3,resnet10-3x3", top_k=5, notes=(_PRIVATE_NOTE, *_LEAKY_NOTES), num_clients=3,
        form=form,
    )  # fmt: skip


def _office_home(form: str) -> Protocol:
    return _protocol(
        "office-home", "Things of home and office in four domains, a client each; top-5", _offices("office-home"),
        "resnet18-3x3,resnet34-3x3,googlenet-32,resnet12-3x3", top_k=5, local_epochs=15, public_batch_size=176,
        plus_options={"temperature": 1.0, "similarity_weight": 1.0, "public_epochs": 2},
        notes=(
            _PRIVATE_NOTE, *_LEAKY_NOTES,
            "FCCL+'s tau, omega, two passes over the public images and 15 local epochs are the code's, which has 10 "
            "local epochs for the other methods; the paper has 3, 3 and one pass by default.",
        ),
        form=form,
    )  # fmt: skip


PROTOCOLS = (
    *(_digits(form) for form in _AUGMENTATIONS),
    *(_office_caltech(form) for form in ("", "-crop")),
    *(_office31(form) for form in _AUGMENTATIONS),
    *(_office_home(form) for form in ("", "-crop")),
    Protocol(
        name="fccl:digit-domains",
        summary="Built-in digits under four renderings, a client each, no network needed: seconds a run",
        source="not from the paper",
        settings={
            **_TRAINING,
            "rounds": 10,
            "local_epochs": 2,
            "batch_size": 64,
            "public_dataset": "photos",
            "public_examples": 500,
            "public_batch_size": 100,
        },
        datasets={
            "digit-domains": DataSetting(
                backbone="cnn-small,cnn-mcmahan,cnn-2x32,cnn-small",
                mean=(0.5,) * 3,
                std=(0.5,) * 3,
                source="chosen here: pixels in [-1, 1]",
            )
        },
        selection="mean-last-3",
        evaluation="domains",
        public={
            **_public("resized-crop"),
            "photos": PublicSetting(
                mean=(0.5,) * 3,
                std=(0.5,) * 3,
                source="chosen here: as the private images",
                augmentation="resized-crop",
            ),
        },
        method_options={**_OPTIONS_OF_METHODS, "fccl": {"pretrain_epochs": 5}, "fedmd": {}},
    ),
)


# The paper's experiments: tables


class _Scenario(NamedTuple):
    """Domains, of which each client has one."""

    name: str  # of its protocols
    dataset: str
    domains: dict[str, str]  # by the paper's letters


_SCENARIOS = {  # by their names in the paper's tables
    "Digits": _Scenario(
        name="digits-4",
        dataset="digits-4",
        domains={"M": "mnist", "U": "usps", "SV": "svhn", "SY": "synth-digits"},
    ),
    "Office Caltech": _Scenario(
        name="office-caltech",
        dataset="office-caltech-private",
        domains={"AM": "amazon", "CA": "caltech", "D": "dslr", "W": "webcam"},
    ),
    "Office31": _Scenario(
        name="office31",
        dataset="office31-private",
        domains={"AM": "amazon", "D": "dslr", "W": "webcam"},
    ),
    "Office-Home": _Scenario(
        name="office-home",
        dataset="office-home-private",
        domains={"A": "Art", "C": "Clipart", "P": "Product", "R": "Real World"},
    ),
}
_ALL_SCENARIOS = tuple(_SCENARIOS)
_TWO_SCENARIOS = ("Digits", "Office31")
_BOTH_KINDS = ("inter", "intra")
_INTER_ONLY = ("inter",)
_INTRA_ONLY = ("intra",)
_BASE = row("local", rounds=50, local_epochs=1)
_FCCL_PLUS = row("fccl-plus")
_FCCL = row("fccl")
_FISL = row("fccl", correlation_weight=0.0, similarity_weight=3.0)  # in the place of FCCM; Eq. 19 in the local phase
_COMPARISON = {
    "BASE": _BASE, "FedMD": row("fedmd"), "FedDF": row("feddf-client"), "FedMatch": row("fedmatch"),
    "RHFL": row("rhfl"), "FCCL": _FCCL, "FCCL+": _FCCL_PLUS,
}  # fmt: skip
_PUBLIC_TITLES = {"Cifar-100": "cifar100", "Tiny-ImageNet": "tiny-imagenet", "Fashion-MNIST": "fmnist"}
_BASE_NOTE = "BASE: 50 rounds of one local epoch, each with a new Adam; its last three epochs are averaged."
_EQ19_NOTE = "Without FNTD the local objective is that of FCCL, Eq. 19, so these rows are runs of FCCL."
_Rows = dict[str, Row]  # by their names in the paper's tables


def _column(scenario: str, form: str = "", **settings: object) -> dict[str, Any]:
    """The column of a scenario; `form` is one of `_AUGMENTATIONS`."""
    of_scenario = _SCENARIOS[scenario]
    return column(f"fccl:{of_scenario.name}{form}", of_scenario.dataset, **settings)


def _cells(
    rows: _Rows, scenarios: tuple[str, ...], kinds: tuple[str, ...], form: str = "", **settings: object
) -> tuple[Cell, ...]:
    """Cells of each domain and their mean, inside ("intra") or outside ("inter") of a client's own domain."""
    cells: tuple[Cell, ...] = ()
    for kind in kinds:
        for scenario in scenarios:
            of_scenario = _column(scenario, form, **settings)
            for letter, domain in _SCENARIOS[scenario].domains.items():
                cells += grid(rows, {f"{scenario} {kind} {letter}": of_scenario}, f"{kind}:{domain}")
            cells += grid(rows, {f"{scenario} {kind} AVG": of_scenario}, kind)
    return cells


def _gains(rows: Iterable[str], scenarios: tuple[str, ...], kinds: tuple[str, ...], base: str) -> tuple[Gain, ...]:
    """What the paper prints beside the means over domains: how far each row is ahead of the row `base`."""
    gains = []
    for name in rows:
        for scenario in scenarios:
            for kind in kinds:
                gain = Gain(
                    row=name,
                    column=f"{scenario} {kind} delta_vs_BASE",
                    leading_rows=(name,),
                    other_rows=(base,),
                    columns=(f"{scenario} {kind} AVG",),
                )
                gains.append(gain)
    return tuple(gains)


def _row_and_column(gain: Gain) -> tuple[str, str]:
    """The order of a table's gains."""
    return gain.row, gain.column


def _table(
    name: str, title: str, cells: tuple[Cell, ...], *, printed: str, notes: tuple[str, ...] = (),
    gains: tuple[Gain, ...] = (),
) -> Table:  # fmt: skip
    """A table or figure of the paper; `printed` says where its numbers are."""
    return Table(
        name=f"fccl:{name}",
        title=title,
        reported=("FCCL+", printed),
        cells=cells,
        notes=notes,
        gains=tuple(sorted(gains, key=_row_and_column)),
    )


def _without(rows: _Rows, *names: str) -> _Rows:
    """The rows but those of these names."""
    return {name: rows[name] for name in rows if name not in names}


# Table 2, 9 runs: communication signals and cost against inter-domain accuracy.
_SENDERS = {"FedMD": row("fedmd"), "FCCL": _FCCL, "FCCL+": _FCCL_PLUS}
_TABLE_2 = _table(
    "2",
    "What is sent, and accuracy on other domains",
    grid(_SENDERS, {"Digits inter AVG": _column("Digits")}, "inter"),
    printed="Table 2",
    notes=("The floats sent in a round are in each run's record, `cost`; the paper's are those of a batch.",),
)

# Table 4, 9 runs: extra communication and memory per module with Digits mean accuracy.
_MODULES = {"FCCM": _FCCL, "FISL": _FISL, "FNTD": _FCCL_PLUS}
_TABLE_4 = _table(
    "4",
    "What each module costs and gives",
    grid(_MODULES, {"Digits inter AVG": _column("Digits")}, "inter")
    + grid(_MODULES, {"Digits intra AVG": _column("Digits")}, "intra"),
    printed="Table 4",
    notes=(_EQ19_NOTE, "The row FNTD is the full method."),
)

# Table 8, 87 runs: inter-domain accuracy, four scenarios.
_EQUALLY_LONG = "local training of equal length"  # not in the paper: as many rounds and local epochs as the methods
_EQUALLY_LONG_NOTE = f"The row '{_EQUALLY_LONG}' is not the paper's, whose BASE has a sixteenth of the methods' epochs."
_TABLE_8 = _table(
    "8",
    "Accuracy on other domains",
    _cells(_COMPARISON, _ALL_SCENARIOS, _INTER_ONLY) + _cells({_EQUALLY_LONG: row("local")}, ("Digits",), _INTER_ONLY),
    printed="Table 8",
    notes=(_BASE_NOTE, _EQUALLY_LONG_NOTE, _PRIVATE_NOTE),
    gains=_gains(_without(_COMPARISON, "BASE"), _ALL_SCENARIOS, _INTER_ONLY, "BASE")
    + _gains([_EQUALLY_LONG], ("Digits",), _INTER_ONLY, "BASE"),
)

# Table 9, 84 runs: intra-domain accuracy, four scenarios.
_TABLE_9 = _table(
    "9",
    "Accuracy on the own domain",
    _cells(_COMPARISON, _ALL_SCENARIOS, _INTRA_ONLY),
    printed="Table 9",
    notes=(_BASE_NOTE, _PRIVATE_NOTE),
    gains=_gains(_without(_COMPARISON, "BASE"), _ALL_SCENARIOS, _INTRA_ONLY, "BASE"),
)

# Table 10, 30 runs: ablation of FCCM / FISL / FNTD.
_PRIVATE_ONLY = "none (private only)"
_ABLATION = {
    _PRIVATE_ONLY: _BASE,
    "FCCM": _FCCL,
    "FISL": _FISL,
    "FCCM+FISL": row("fccl", similarity_weight=3.0),
    "FCCM+FISL+FNTD": _FCCL_PLUS,
}
_TABLE_10 = _table(
    "10",
    "Ablation: FCCM, FISL and FNTD",
    _cells(_ABLATION, _TWO_SCENARIOS, _BOTH_KINDS),
    printed="Table 10",
    notes=(_BASE_NOTE, _EQ19_NOTE, _PRIVATE_NOTE),
    gains=_gains(_without(_ABLATION, _PRIVATE_ONLY), _TWO_SCENARIOS, _BOTH_KINDS, _PRIVATE_ONLY),
)

# Table 11, 15 runs: FCCM off-diagonal weight lambda.


def _off_diagonal_weights(kind: str) -> dict[str, dict[str, Any]]:
    """Columns of one kind of accuracy."""
    weights = (0.002, 0.0051, 0.01, 0.05, 0.1)
    return {f"{kind} lambda={weight}": _column("Office31", off_diagonal_weight=weight) for weight in weights}


_TABLE_11 = _table(
    "11",
    "Weight of different classes in FCCM",
    grid({"FCCM": _FCCL}, _off_diagonal_weights("inter"), "inter")
    + grid({"FCCM": _FCCL}, _off_diagonal_weights("intra"), "intra"),
    printed="Table 11",
    notes=(_EQ19_NOTE, _PRIVATE_NOTE),
)

# Fig 7 inset, 9 runs: FCCM overall inter accuracy by public data set.
_PUBLIC_SETS = {f"public {title}": _column("Digits", public_dataset=name) for title, name in _PUBLIC_TITLES.items()}
_FIG_7 = _table(
    "Fig7",
    "Public images for FCCM",
    grid({"FCCM": _FCCL}, _PUBLIC_SETS, "inter"),
    printed="Fig 7 inset",
    notes=(_EQ19_NOTE,),
)

# Table 12, 18 runs: Digits with Tiny-ImageNet as public data.
_TABLE_12 = _table(
    "12",
    "Tiny-ImageNet as public images",
    _cells({"BASE": _BASE}, ("Digits",), _BOTH_KINDS)
    + _cells(_without(_COMPARISON, "BASE", "FedDF"), ("Digits",), _BOTH_KINDS, public_dataset="tiny-imagenet"),
    printed="Table 12",
    notes=(_BASE_NOTE,),
)

# Table 13, 36 runs: public data set and augmentation strength for FISL.


def _augmented(kind: str) -> _Rows:
    """Rows with one kind of augmentation of the public images."""
    rows = {}
    for title, name in _PUBLIC_TITLES.items():
        rows[f"FISL, {title}, {kind} augmentation"] = row("fccl", **_FISL.settings, public_dataset=name)
    return rows


_TABLE_13 = _table(
    "13",
    "Public images and their augmentation for FISL",
    _cells(_augmented("weak"), _TWO_SCENARIOS, _INTER_ONLY)
    + _cells(_augmented("strong"), _TWO_SCENARIOS, _INTER_ONLY, form="-strong"),
    printed="Table 13",
    notes=(_EQ19_NOTE, _PRIVATE_NOTE),
)

# Table 14, 24 runs: weight omega of FISL.
_SIMILARITY_WEIGHTS = {f"omega={weight}": row("fccl", similarity_weight=float(weight)) for weight in (1, 2, 3, 4)}
_TABLE_14 = _table(
    "14",
    "Weight of FISL",
    _cells(_SIMILARITY_WEIGHTS, _TWO_SCENARIOS, _INTER_ONLY),
    printed="Table 14",
    notes=(_EQ19_NOTE, _PRIVATE_NOTE),
)

# Table 15, 66 runs: homogeneous models (ResNet12 everywhere).
_RESNET12 = {"backbone": "resnet12-3x3"}
_AVERAGED = {**_RESNET12, "average_parameters": True}  # the methods that send logits, between the two phases
_SMALLER_BATCH = 64  # of FedAvg, FedProx and MOON in the authors' code, on Digits and Office31
_EQUAL_NETWORKS = {
    "BASE": row("local", **_BASE.settings, **_RESNET12),
    "FedMD": row("fedmd", **_AVERAGED),
    "FedDF": row("feddf-client", **_AVERAGED),
    "FCCL": row("fccl", **_AVERAGED),
    "FCCL+": row("fccl-plus", **_AVERAGED),
    "FedAvg": row("fedavg", batch_size=_SMALLER_BATCH, **_RESNET12),
    "FedProx": row("fedprox", batch_size=_SMALLER_BATCH, **_RESNET12),
    "MOON (mu=5, printed tau)": row("moon", batch_size=_SMALLER_BATCH, contrastive_weight=5.0, **_RESNET12),
    "MOON (mu=1, printed tau)": row("moon", batch_size=_SMALLER_BATCH, contrastive_weight=1.0, **_RESNET12),
    "FedProc": row("fedproc", **_RESNET12),
    "FedRS": row("fedrs", **_RESNET12),
}
_TABLE_15 = _table(
    "15",
    "Equal networks",
    _cells(_EQUAL_NETWORKS, _TWO_SCENARIOS, _BOTH_KINDS),
    printed="Table 15",
    notes=(
        _BASE_NOTE,
        "FedAvg, FedProx and MOON have batches of 64, as in the authors' code; FedProc and FedRS, not there, "
        "128 as the others.",
        "MOON's two rows are labelled tau = 5 and 1; they are read as the weight mu, tau being 0.5 in Table 7.",
        "FCCL's clients each begin at their own theta*; the authors' code gives all of them client 0's.",
        _PRIVATE_NOTE,
    ),
    gains=_gains(_without(_EQUAL_NETWORKS, "BASE"), _TWO_SCENARIOS, _BOTH_KINDS, "BASE"),
)

# Table 16, 30 runs: FNTD against EWC.


def _regularizers() -> _Rows:
    """FNTD, and EWC with four weights."""
    rows = {"FNTD (full FCCL+)": _FCCL_PLUS}
    for weight in (0.01, 0.1, 0.7, 1.0):
        rows[f"EWC lambda={weight}"] = row("fccl-plus", regularizer="ewc", ewc_weight=weight)
    return rows


_TABLE_16 = _table(
    "16",
    "EWC in the place of FNTD",
    grid(_regularizers(), {f"{scenario} inter AVG": _column(scenario) for scenario in _TWO_SCENARIOS}, "inter"),
    printed="Table 16",
    notes=(
        "How EWC is applied is not said; see reading 15 in papers/fccl_plus.py. As we apply it, these weights are "
        "near no regularizer at all.",
        _PRIVATE_NOTE,
    ),
)

# Table 17, 9 runs: mixing ordinary KD with FNTD.
_SOME_PLAIN = "plain KD in the first 30% of local epochs"
_LITTLE_PLAIN = "plain KD in the first 10% of local epochs"
_NO_PLAIN = "plain KD in the first 0 of local epochs"
_PLAIN_SHARES = {
    _SOME_PLAIN: row("fccl-plus", plain_share=0.3),
    _LITTLE_PLAIN: row("fccl-plus", plain_share=0.1),
    _NO_PLAIN: row("fccl-plus", plain_share=0.0),
}
_TABLE_17 = _table(
    "17",
    "Plain distillation in the first local epochs",
    _cells(_PLAIN_SHARES, ("Digits",), _BOTH_KINDS),
    printed="Table 17",
)

# Table 18, 18 runs: other architecture assignments.
_FIRST_NETWORKS = "M:ResNet10 U:ResNet12 SV:EfficientNet SY:SimpleCNN"
_SECOND_NETWORKS = "M:ResNet18 U:ResNet12 SV:EfficientNet SY:MobileNet"


def _architectures() -> _Rows:
    """Three methods, each with two assignments of networks."""
    backbones = {
        _FIRST_NETWORKS: "resnet10-3x3,resnet12-3x3,efficientnet-b0-32,cnn-2x64",
        _SECOND_NETWORKS: "resnet18-3x3,resnet12-3x3,efficientnet-b0-32,mobilenet-v2-32",
    }
    methods = {"FedMD": "fedmd", "FCCL": "fccl", "FCCL+": "fccl-plus"}
    rows = {}
    for names, backbone in backbones.items():
        for title, method in methods.items():
            rows[f"{title} | {names}"] = row(method, backbone=backbone)
    return rows


_TABLE_18 = _table(
    "18",
    "Other networks",
    _cells(_architectures(), ("Digits",), _BOTH_KINDS),
    printed="Table 18",
    notes=("SimpleCNN is in no code of the authors; cnn-2x64, two convolutions and two linear layers, stands in.",),
)

# Table 19, 18 runs: local epochs with and without FNTD.


def _local_epochs() -> _Rows:
    """Three numbers of local epochs, each without FNTD and with it."""
    rows = {}
    for epochs in (10, 20, 30):
        rows[f"local epochs {epochs}, without FNTD"] = row("fccl-plus", local_epochs=epochs, regularizer="none")
        rows[f"local epochs {epochs}, with FNTD"] = row("fccl-plus", local_epochs=epochs)
    return rows


_TABLE_19 = _table(
    "19",
    "Local epochs with and without FNTD",
    _cells(_local_epochs(), ("Digits",), _INTER_ONLY),
    printed="Table 19",
    notes=("Without FNTD is Eq. 14 without L_FNTD, and not the local objective of Table 10, Eq. 19.",),
)

TABLES = (
    _TABLE_2, _TABLE_4, _TABLE_8, _TABLE_9, _TABLE_10, _TABLE_11, _FIG_7, _TABLE_12, _TABLE_13, _TABLE_14, _TABLE_15,
    _TABLE_16, _TABLE_17, _TABLE_18, _TABLE_19,
)  # fmt: skip
NOT_PLANNED = {
    "Table 1": "The symbols, no results.",
    "Table 3": "Copies of the model that a client holds: no run is needed, `cost.memory_floats` of a record has them.",
    "Table 5": "Numbers of private images: part of the set-up, they are the sizes of the sets named -private.",
    "Table 6": "The clients' networks: part of the set-up, `fedcli show fccl:digits-4` has them in the clients' order, "
    "and so for the other scenarios.",
    "Table 7": "Options of the methods: part of the set-up, see PROTOCOLS.",
    "Figs 1 to 4": "Sketches of the problem and of the method, without numbers.",
    "Fig 5": "Images of each domain: part of the set-up.",
    "Fig 6": "Curves without printed numbers: `fedcli plot RUNS --kind domains` of Table 9's runs draws them.",
    "Fig 7 but for its inset": "Its numbers are damaged in the text that is available: `fedcli table RUNS --metric "
    "inter:mnist,inter:usps,inter:svhn,inter:synth-digits` of the inset's runs gives ours.",
    "Fig 8": "Pictures without printed numbers: `fedcli plot RUNS --kind correlation` of Table 8's runs draws them.",
    "Fig 9": "Pictures without printed numbers: `fedcli quality RUN --client N`, then `fedcli plot RUN --kind tsne`, "
    "of two runs, one with `--teacher collaborative`, draw them.",
    "Fig 10": "Bars and lines without printed numbers: `fedcli table RUNS --metric inter,intra` gives ours, of runs "
    "with several values of `--temperature`, with `--plain-share 0` and with `--plain-share 1`.",
}


# The paper's experiments: claims

# The paper's digits have to be asked for; those with four domains that are free stand in, with networks of their size
# and what their protocol has for theta* of FCCL.
_FREE_DIGITS = {
    "protocol": "fccl:digit-domains", "dataset": "digits-real-4", "backbone": None, "batch_size": None,
    "public_batch_size": None, "pretrain_epochs": None, "pretraining": None, "teacher_mode": None,
}  # fmt: skip
_INTER_DIGITS = ("Digits inter AVG",)
_INTRA_DIGITS = ("Digits intra AVG",)
_OTHER_METHODS = tuple(name for name in _COMPARISON if name not in ("BASE", "FCCL+"))
_LENGTH_CONTROL = Control(_EQUALLY_LONG, "longer training")  # BASE's is a sixteenth of the methods'
CLAIMS = (
    Claim(
        name="fccl:base",
        text="On other domains of digits FCCL+ is ahead of local training, BASE's and of equal length",
        table="fccl:8",
        row="FCCL+",
        other_rows=("BASE", _EQUALLY_LONG),
        columns=_INTER_DIGITS,
        allowed_options=_FREE_DIGITS,
        control=_LENGTH_CONTROL,
    ),
    Claim(
        name="fccl:fccl-base",
        text="On other domains of digits FCCL is ahead of local training, BASE's and of equal length",
        table="fccl:8",
        row="FCCL",
        other_rows=("BASE", _EQUALLY_LONG),
        columns=_INTER_DIGITS,
        allowed_options=_FREE_DIGITS,
        control=_LENGTH_CONTROL,
    ),
    Claim(
        name="fccl:best-other",
        text="On other domains of digits FCCL+ is ahead of all five other methods",
        table="fccl:8",
        row="FCCL+",
        other_rows=_OTHER_METHODS,
        columns=_INTER_DIGITS,
        allowed_options=_FREE_DIGITS,
    ),
    Claim(
        name="fccl:own-domain",
        text="On a client's own domain FCCL+ is ahead of all five other methods",
        table="fccl:9",
        row="FCCL+",
        other_rows=_OTHER_METHODS,
        columns=_INTRA_DIGITS,
        allowed_options=_FREE_DIGITS,
    ),
    Claim(
        name="fccl:parts",
        text="Cross-correlation and instance similarity together are ahead of either on other domains",
        table="fccl:10",
        row="FCCM+FISL",
        other_rows=("FCCM", "FISL"),
        columns=_INTER_DIGITS,
        allowed_options=_FREE_DIGITS,
    ),
    Claim(
        name="fccl:non-target",
        text="At 20 local epochs FCCL+ is better elsewhere with its non-target distillation (at 10 the "
        "paper has +2.26)",
        table="fccl:19",
        row="local epochs 20, with FNTD",
        other_rows=("local epochs 20, without FNTD",),
        columns=_INTER_DIGITS,
        allowed_options=_FREE_DIGITS,
    ),
    Claim(
        name="fccl:plain",
        text="Non-target distillation is ahead of plain distillation in the first local epochs",
        table="fccl:17",
        row=_NO_PLAIN,
        other_rows=(_SOME_PLAIN, _LITTLE_PLAIN),
        columns=_INTER_DIGITS,
        allowed_options=_FREE_DIGITS,
    ),
    Claim(
        name="fccl:public-images",
        text="With Tiny-ImageNet as public images, too, FCCL+ is ahead of the other methods",
        table="fccl:12",
        row="FCCL+",
        other_rows=tuple(name for name in _OTHER_METHODS if name != "FedDF"),
        columns=_INTER_DIGITS,
    ),
    Claim(
        name="fccl:equal-networks",
        text="With equal networks FCCL+ is ahead of the other methods that exchange scores (behind "
        "FedProx in the paper)",
        table="fccl:15",
        row="FCCL+",
        other_rows=("FedMD", "FedDF", "FCCL"),
        columns=_INTER_DIGITS,
    ),
    Claim(
        name="fccl:office",
        text="On other domains of Office Caltech and Office31 FCCL+ is on average ahead of all five other methods",
        table="fccl:8",
        row="FCCL+",
        other_rows=_OTHER_METHODS,
        columns=("Office Caltech inter AVG", "Office31 inter AVG"),
    ),
    Claim(
        name="fccl:networks",
        text="With other networks, too, FCCL+ is ahead of FCCL and FedMD on other domains",
        table="fccl:18",
        row=f"FCCL+ | {_FIRST_NETWORKS}",
        other_rows=(f"FCCL | {_FIRST_NETWORKS}", f"FedMD | {_FIRST_NETWORKS}"),
        columns=_INTER_DIGITS,
    ),
)
