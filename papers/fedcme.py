"""FedCME: pair clients of unlike data and let them exchange their classifiers half-way through local training.

J. Nie, D. Xiao, L. Yang, W. Wu, "FedCME: Client Matching and Classifier Exchanging to Handle Data Heterogeneity in
Federated Learning", 2023, https://arxiv.org/abs/2307.08574.

A client's accuracies on its own classes, its evaluation vector, tell the server what it has learnt. Clients whose
vectors are unlike become counterparts; after half of the local epochs each goes on with the other's classifier, which
so is trained on two complementary data sets. Meanwhile the mean feature of each class in a batch is drawn to the
class's global feature. Algorithms 1 and 2; Eqs. 3 to 10. No code of the authors is public.

Notation
    code                    paper           shape
    params                  w = (theta, phi)    dict of tensors; phi is `head.*`, theta the rest
    global_features         zeta^t          [C, D]
    GatheredOutputs         zeta_k^t        sums [M, C, D] and counts [M, C] while a client trains
    evaluation              epsilon^t       [N, C]; that of a cohort [M, C] is epsilon*
    counterpart             nu^t            [M], positions in the cohort
    cohort.weights          D_k / D         [M]
    alignment_weight        mu

Readings and deviations
    1.  What is exchanged is the classifier, as in Algorithm 2, the title and Fig. 5, where the extractor's exchange is
        the worse ablation. One sentence of Section IV-A says "feature extractor".
    2.  A client is never its own counterpart (Algorithm 1, line 19 takes k out before line 20 looks for j).
    3.  In a cohort of odd size the client left over keeps its own classifier; the paper's cohorts are even.
    4.  epsilon^0 is not given: zeros, and the cosine with a zero vector is 0, so that a client that has never taken
        part is unlike everybody. Ties, all of the first round among them, are broken by a draw per client and round.
    5.  |D_k| / |D| is taken over the cohort, so that the weights of Eq. 3 sum to one.
    6.  The blank of a class that a client lacks takes the old global feature (Algorithm 1, line 31, not Eq. 6's text).
    7.  zeta^0 is not given: a class without a global feature has no alignment term, and its first one is the mean over
        the clients that have the class. A class nobody in the cohort has keeps its global feature.
    8.  Eq. 9 sums over the classes that are in the batch (0/0 for the others) and over the D coordinates; it is not a
        mean over either. With a wide feature it is large: see the paper's mu = 0.01 against 0.1.
    9.  Recorded features come from a model that moves, under two classifiers, each batch's before its own step
        (Algorithm 2, lines 8 to 15), over all epochs. The sum is divided by the number of features in it, which is
        line 18's E |D_kc| unless --drop-last leaves some out.
    10. The exchange comes after floor(E/2) local epochs (Section IV-A; Algorithm 2, line 4); with E = 1 before any,
        when it changes nothing. Each client keeps its own state of momentum or Adam, which Eq. 10 has not.
    11. The evaluation examples are drawn after training from the client's training part, without replacement: round of
        20 % of them, at least one. So they were trained on. The model is in evaluation mode.
    12. The classifier is the last linear layer, D the width before it; "final linear layers" could be FMNIST's two.
    13. AlexNet for 32 x 32 images is not specified: `alexnet-32`, the usual variant for CIFAR, without dropout.
    14. Counterparts meet at the same epoch: all clients train the first half before any trains the second.
    15. The classifiers go through the server, once up and once down. The counterpart's id and the marks of empty
        classes are no floats and not counted in the costs.
    16. Many-to-one matching (Section V-B) is not defined further: every client receives the classifier of the client
        least like itself, so that one may go to several clients. Ties as in 4, apart for each client.
    17. Ablations switch a term off and leave the other messages as they are: with mu = 0 features are still sent, with
        `--exchange none` evaluation vectors are. `--matching random` is ours, a control for the evaluation vectors.
    18. Statistics of batch normalisation, which the paper's networks lack, are averaged and go with the extractor.
    19. Neither the number of trials nor what the printed deviations are of is stated; some are as small as 0.02. So
        the partition's seed is 0 whatever the run's, and tables have the mean over the last tenth of the rounds, too.

Run it
    fedcli run fedcme --dataset fmnist
    fedcli run fedcme --protocol fedcme:cifar10-a0.1-k50-m20 --dataset cifar10 --exchange body       (Fig. 5)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli import Cell, Claim, Costs, DataSetting, Gain, Method, Protocol, Table, column, grid, option, row
from fedcli.core import (
    Aux,
    Buffers,
    Client,
    LocalLoss,
    Model,
    Network,
    Params,
    class_means,
    cross_entropy,
    model_of,
    quotient,
    weighted_mean,
)
from fedcli.core.class_vectors import (
    ClassVectors,
    GatheredOutputs,
    gather_outputs,
    mean_by_class,
    no_vectors,
    start_gathering,
)
from fedcli.core.federation import Cohort, Federation, Terms

EVALUATION_SHARE = 0.2  # of a client's training examples, Appendix


@dataclass(frozen=True)
class Config:
    """What FedCME adds to FedAvg."""

    alignment_weight: float = option(0.01, "Weight of feature alignment", symbol="μ", source="Eq. 10", low=0, off=0)
    exchange: str = option(
        "head", "What counterparts exchange half-way through local training", source="Algorithm 2, Fig. 5",
        choices=("head", "body", "model", "none"), off="none",
    )  # fmt: skip
    matching: str = option(
        "pairs", "How counterparts are found", source="Algorithm 1, Fig. 4", choices=("pairs", "many-to-one", "random"),
        only_with={"exchange": ("head", "body", "model")},
    )  # fmt: skip


class Context(NamedTuple):
    """What a client is given for a round beside the model; all clients share it."""

    global_features: Tensor  # [C, D]
    has_global_feature: Tensor  # [C], bool


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model w^t
    buffers: Buffers
    global_features: Tensor  # [C, D]
    has_class: Tensor  # [C], bool: whether a class has a global feature, as any client has had it
    evaluation: Tensor  # [N, C], the last evaluation vector of every client; zeros before its first


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of vectors `[..., C]`, broadcast against each other; 0 where one of them is zero."""
    # Of evaluation vectors, which no gradient reaches; the core's `unit` is for features.
    lengths = a.norm(dim=-1) * b.norm(dim=-1)
    return quotient((a * b).sum(-1), lengths)  # Reading 4


def match_by_priority(
    make_matching: Callable[[Tensor], list[int]], evaluation: Tensor, priority: Tensor | None
) -> Tensor:
    """Match the clients in order of priority, so that ties do not depend on the cohort's order; counterparts, `[M]`.

    Args:
        make_matching: From evaluation vectors `[M, C]` in float64 to each client's counterpart.
        evaluation: epsilon*, `[M, C]`.
        priority: `[M]`, the lower first; the order of the clients where None.
    """
    order = torch.arange(len(evaluation)) if priority is None else priority.cpu().argsort(stable=True)
    vectors = evaluation.cpu().double()[order]
    counterpart_by_priority = torch.tensor(make_matching(vectors))
    counterpart = torch.empty_like(order)
    counterpart[order] = order[counterpart_by_priority]  # the i-th by priority is client order[i]
    return counterpart.to(evaluation.device)


def match_clients(evaluation: Tensor, priority: Tensor | None = None) -> Tensor:
    """Algorithm 1, lines 11 to 24: clients in pairs, those least like the mean first, each with the one least like it.

    Args:
        evaluation: epsilon*, `[M, C]`.
        priority: `[M]`, the lower first where cosines are equal; the order of the clients where None.

    Returns:
        nu, `[M]`: the position of each client's counterpart, whose counterpart it is. Its own for one left over.
    """
    return match_by_priority(make_pairs, evaluation, priority)


def make_pairs(vectors: Tensor) -> list[int]:
    """MakeMatching of Algorithm 1 for evaluation vectors `[M, C]`, of equal ones the first."""
    likeness = cosine(vectors[:, None], vectors).tolist()  # [M][M]
    waiting = cosine(vectors, vectors.mean(0)).argsort(stable=True).tolist()  # lines 13 to 17
    counterpart = list(range(len(vectors)))  # Reading 3
    while len(waiting) > 1:  # line 18
        k = waiting.pop(0)  # line 19, Reading 2
        to_k = likeness[k]
        j = min(sorted(waiting), key=lambda other: to_k[other])  # line 20; the first of equals
        counterpart[k] = j  # line 21
        counterpart[j] = k
        waiting.remove(j)  # line 22
    return counterpart


def swap_parts(params: Params, counterpart: Tensor, names: Iterable[str]) -> Params:
    """Algorithm 2, line 24: w(theta_k, phi_j) for every client k with counterpart j.

    Args:
        params: Stacked, `[M, ...]`.
        counterpart: `[M]`.
        names: Of the parameters that are exchanged, phi.
    """
    swapped = {name: params[name][counterpart] for name in names}
    return {**params, **swapped}


def alignment_loss(
    features: Tensor, labels: Tensor, global_features: Tensor, has_global_feature: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Eq. 9: sum over the batch's classes of |mean feature of the class in the batch - global feature|^2; a scalar.

    Args:
        features: `[B, D]`.
        labels: `[B]`.
        global_features: zeta^t, `[C, D]`.
        has_global_feature: `[C]`; a class without one has no term.
        mask: `[B]`, False for padding.
    """
    means, counts = class_means(features, labels, len(global_features), mask)  # [C, D], [C]
    aligned = (counts > 0) & has_global_feature  # Readings 7, 8
    return torch.where(aligned[:, None], means - global_features, 0.0).square().sum()


def mean_features(recorded: GatheredOutputs) -> ClassVectors:
    """Eq. 5 and Algorithm 2, line 18: zeta_k `[M, C, D]`, of the classes that a client has recorded.

    Args:
        recorded: Stacked.
    """
    return ClassVectors(mean_by_class(recorded.sums, recorded.counts), recorded.counts > 0)  # Reading 9


def aggregate_features(local: ClassVectors, previous: ClassVectors) -> ClassVectors:
    """Eq. 6 with its memory, Algorithm 1, lines 29 to 35: zeta^{t+1} `[C, D]`, the plain mean over the cohort.

    Args:
        local: zeta_k, `[M, C, D]`, ignored where a client lacks the class.
        previous: zeta^t, `[C, D]`, what a client contributes for a class it lacks; where zeta^t lacks it too, only
            clients that have the class contribute.
    """
    present = local.has_vector
    filled = torch.where(present[..., None], local.vectors, previous.vectors)  # line 31, Reading 6
    contributes = (present | previous.has_vector)[..., None]  # [M, C, 1], Reading 7
    number = contributes.sum(0)  # [C, 1]; the cohort's size once the class has a global feature
    mean = torch.where(contributes, filled, 0.0).sum(0) / number.clamp(min=1)
    return ClassVectors(torch.where(number > 0, mean, previous.vectors), previous.has_vector | present.any(0))


def evaluation_vector(correct: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Eq. 4: epsilon_k, the accuracy on each class, 0 for a class without examples; `[C]`, fractions in float64.

    Args:
        correct: `[n]`, bool.
        labels: `[n]`.
        num_classes: C.
    """
    shares, _ = class_means(correct.double()[:, None], labels, num_classes)  # [C, 1]
    return shares[:, 0]


def evaluation_sample(part: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """D_k^eval: 20 % of a client's training examples, at least one of any, without replacement."""
    size = max(round(EVALUATION_SHARE * len(part)), min(len(part), 1))
    return generator.choice(part, size, replace=False)  # Reading 11


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective of Eq. 10, CELoss + mu L2Loss."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        alignment = alignment_loss(
            features, batch.y, context.global_features, context.has_global_feature, mask=batch.mask
        )
        loss = task + config.alignment_weight * alignment
        return loss, Aux(buffers, {"cross_entropy": task, "alignment": alignment}, features)

    return local_loss


def find_counterparts(evaluation: Tensor, cohort: Cohort, fed: Federation, config: Config) -> Tensor:
    """Algorithm 1, line 4: MakeMatching; ties by a draw per client and round."""
    draws = [fed.generator(cohort.round, client, "matching").random() for client in cohort.client_ids]
    priority = torch.tensor(draws, dtype=torch.float64)
    if config.matching == "many-to-one":
        return match_many_to_one(evaluation, priority)
    if config.matching == "random":
        evaluation = torch.zeros_like(evaluation)  # all are tied, Reading 17
    return match_clients(evaluation, priority)


def names_of_part(tree: Params, part: str) -> list[str]:
    """Names of the parameters or buffers that belong to the part "head", "body", "model" or "none"."""
    names = []
    for name in tree:
        part_of_name = "head" if name.startswith("head.") else "body"  # Reading 12
        if part in ("model", part_of_name):
            names.append(name)
    return names


class Exchange(NamedTuple):
    """Who sends and who receives a classifier."""

    senders: Tensor  # positions; of pairs the same clients as receive, in many-to-one matching some are not asked
    receivers: Tensor  # positions; all but those who are their own counterparts


def exchange_of(counterpart: Tensor) -> Exchange:
    """The senders and receivers of a matching nu, `[M]` (Reading 15)."""
    has_counterpart = counterpart != torch.arange(len(counterpart), device=counterpart.device)
    return Exchange(senders=counterpart[has_counterpart].unique(), receivers=has_counterpart.nonzero().flatten())


def part_of(clients: Client, part: str, positions: Tensor) -> Model:
    """A part of the models of the clients at these positions."""
    params = {name: clients.params[name][positions] for name in names_of_part(clients.params, part)}
    buffers = {name: clients.buffers[name][positions] for name in names_of_part(clients.buffers, part)}
    return Model(params, buffers)


def exchange_parts(clients: Client, counterpart: Tensor, part: str, fed: Federation) -> Client:
    """Algorithm 2, lines 22 to 24: ExchangeClassifier, through the server; or another part than the classifier."""
    exchanged = clients._replace(  # phi of each, Reading 1
        params=swap_parts(clients.params, counterpart, names_of_part(clients.params, part)),
        buffers=swap_parts(clients.buffers, counterpart, names_of_part(clients.buffers, part)),
    )
    senders, receivers = exchange_of(counterpart)
    # The swap is made here for all at once; what goes through the server is only counted.
    fed.count_exchange(part_of(clients, part, senders), part_of(exchanged, part, receivers))
    return exchanged


def evaluate_clients(clients: Client, cohort: Cohort, fed: Federation) -> Tensor:
    """Algorithm 2, lines 19 and 20: every client's evaluation vector, by its own model; `[M, C]`."""
    rows = []
    for k, client in enumerate(cohort.client_ids):
        generator = fed.generator(cohort.round, client, "evaluation")
        sample = evaluation_sample(fed.training[client], generator)
        model = model_of(clients, k)
        predicted = fed.predict(model.params, model.buffers, sample)
        correct = predicted.logits.argmax(1) == predicted.labels
        rows.append(evaluation_vector(correct, predicted.labels, fed.num_classes))
    return torch.stack(rows).to(fed.device, fed.dtype)


def mean_over_halves(first: Terms, second: Terms, half: int, epochs: int) -> Terms:
    """The terms' means over all epochs, of which the first `half` have the terms `first`; of one epoch, `second`."""
    terms = {}
    for name, value in second.items():
        terms[name] = (half * first.get(name, 0.0) + (epochs - half) * value) / epochs
    return terms


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model w^0; no class has a global feature, and nobody has been evaluated."""
    evaluation = torch.zeros(fed.num_clients, fed.num_classes, dtype=fed.dtype, device=fed.device)
    params, buffers = fed.initial_model()
    global_features, has_class = no_vectors(fed)
    return ServerState(params, buffers, global_features, has_class, evaluation)


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Round t; the lines are those of Algorithm 1 (server) and Algorithm 2 (client)."""
    ids = torch.as_tensor(cohort.client_ids, device=fed.device)
    counterpart = fed.download_each(find_counterparts(state.evaluation[ids], cohort, fed, config))  # server, line 4
    clients = fed.broadcast(state.params, state.buffers, cohort)  # server, line 6
    context = Context(fed.download(state.global_features, cohort), state.has_class)
    clients = clients._replace(memory=start_gathering(len(ids), state.global_features))  # client, line 2
    step = gather_outputs(fed.optimizer_step(make_local_loss(fed.network, config)), fed.num_classes)  # lines 8 to 15

    epochs = fed.local_epochs
    half = epochs // 2  # Readings 10, 14
    clients, first = fed.train(clients, cohort, step, context, epochs=range(half))  # client, lines 3 to 17
    clients = exchange_parts(clients, counterpart, config.exchange, fed)  # client, line 5
    clients, second = fed.train(clients, cohort, step, context, epochs=range(half, epochs))
    terms = mean_over_halves(first, second, half, epochs)

    local_features = fed.upload(mean_features(clients.memory))  # client, line 18
    evaluated = fed.upload(evaluate_clients(clients, cohort, fed))  # client, lines 19, 20
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)  # server, line 26, Eq. 3, Reading 5
    evaluation = state.evaluation.index_copy(0, ids, evaluated)  # server, line 28
    previous = ClassVectors(state.global_features, state.has_class)
    features, has_class = aggregate_features(local_features, previous)  # server, lines 29 to 35, Eq. 6
    return ServerState(params, buffers, features, has_class, evaluation), terms


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """Model and class features both ways, the evaluation vector up, and what clients exchange through the server."""
    size = len(cohort.client_ids)
    model_floats = fed.sizes.parameters
    head_floats = fed.num_classes * (fed.feature_dim + 1)
    feature_floats = fed.num_classes * fed.feature_dim
    evaluation_floats = fed.num_classes
    exchanged_floats = {
        "head": head_floats, "body": model_floats - head_floats, "model": model_floats, "none": 0,
    }[config.exchange]  # fmt: skip
    ids = torch.as_tensor(cohort.client_ids)
    senders, receivers = exchange_of(find_counterparts(state.evaluation[ids], cohort, fed, config))
    return Costs(
        down=size * (model_floats + feature_floats) + len(receivers) * exchanged_floats,
        up=size * (model_floats + feature_floats + evaluation_floats) + len(senders) * exchanged_floats,
    )


METHOD = Method(
    name="fedcme",
    title="FedCME: client matching and classifier exchange",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"alignment_weight": 0.0, "exchange": "none"}),
    state_types=(ServerState,),
    variants={
        "body": {"exchange": "body", "matching": "random"},
        "model": {"exchange": "model", "matching": "many-to-one"},
    },
    costs=costs,
    # The model, the global features, the recorded ones and the evaluation vector.
    client_memory=lambda sizes: sizes.parameters + sizes.num_classes * (2 * sizes.feature_dim + 1),
)  # fmt: skip

# A variant: many-to-one matching (Section V-B, Fig. 4).


def match_many_to_one(evaluation: Tensor, priority: Tensor | None = None) -> Tensor:
    """Section V-B, Reading 16: each client with the one least like it, whoever else has that one.

    Arguments as of `match_clients`; among equals a client takes the next after itself by `priority`, so that not all
    take the same. Returns `[M]`, the position of the client whose classifier each receives; its own if it is alone.
    """
    return match_by_priority(make_many_to_one, evaluation, priority)


def make_many_to_one(vectors: Tensor) -> list[int]:
    """For each of the evaluation vectors `[M, C]` the one least like it, of equal ones the next after itself."""
    likeness = cosine(vectors[:, None], vectors).tolist()  # [M][M]
    size = len(vectors)
    counterpart = []
    for k in range(size):
        others = [(k + step) % size for step in range(1, size)]  # from the next one on
        to_k = likeness[k]
        counterpart.append(min(others, key=lambda other: to_k[other], default=k))
    return counterpart


# The paper's experiments: protocols

_DATA = {
    "fmnist": DataSetting(
        backbone="cnn-mcmahan",  # Appendix: two convolutional and two linear layers; their widths are not given
        mean=(0.2860,),
        std=(0.3530,),
        source="not stated; statistics of the training images, no augmentation",
    ),
    "cifar10": DataSetting(
        backbone="alexnet-32",  # Reading 13
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        source="not stated; statistics of the training images, no augmentation",
    ),
}
_ALPHAS = (0.1, 0.5)


class _Cohort(NamedTuple):
    """Clients of a round, and all of whom they are drawn."""

    population: int  # |K|
    size: int  # |M|


_COHORTS = (
    _Cohort(population=50, size=10),
    _Cohort(population=50, size=20),
    _Cohort(population=80, size=20),
    _Cohort(population=80, size=30),
)
_NOTES = (
    "The number of rounds T is not stated: 200 is chosen here. On FMNIST (alpha 0.5, K=50,M=10) half of them come to "
    "the printed accuracies already. Table III's fifths of 200 are whole rounds.",
    "Momentum and weight decay are not stated: 0, as in Eqs. 2, 8 and 10.",
    "Partition: the paper names the Dirichlet distribution and cites FedLab, whose version has the capacity cap. It is "
    "the same for all seeds (partition_seed 0), because printed deviations go down to 0.01; whether the paper's runs "
    "share it is not said.",
    "MOON's two constants are not stated: 1 and 0.5, as FedFA and FCCL+ take them.",
)
_TAIL_NOTE = (
    "The mean of the last tenth of the rounds, beside the paper's numbers, of which it is not said of what rounds."
)
_BASELINES = {
    "fedprox": {"proximal_weight": 0.01},  # the Appendix has 0.1 and 0.01
    "moon": {"contrastive_weight": 1.0, "temperature": 0.5},
    "fedrs": {"scaling": 0.5},  # the Appendix has 0.1 and 0.5
}


def _name(dataset: str, alpha: float, population: int, cohort: int) -> str:
    return f"fedcme:{dataset}-a{alpha}-k{population}-m{cohort}"


def _protocol(dataset: str, alpha: float, population: int, cohort: int) -> Protocol:
    """A column of Table II."""
    return Protocol(
        name=_name(dataset, alpha, population, cohort),
        summary=f"Class shares of a client from Dir({alpha}), {cohort} of {population} clients in a round",
        source="Appendix; Table II",
        settings={
            "num_clients": population, "cohort_size": cohort, "partition": f"dirichlet:{alpha}", "partition_seed": 0,
            "rounds": 200, "local_epochs": 6, "batch_size": {50: 32, 80: 64}[population], "optimizer": "sgd",
            "lr": 0.01,
        },
        datasets={dataset: _DATA[dataset]},
        selection="last",
        method_options=_BASELINES,
        notes=_NOTES,
    )  # fmt: skip


def _protocols() -> list[Protocol]:
    """The columns of Table II."""
    columns = []
    for dataset in _DATA:
        for alpha in _ALPHAS:
            for population, size in _COHORTS:
                columns.append(_protocol(dataset, alpha, population, size))
    return columns


PROTOCOLS = (
    *_protocols(),
    Protocol(
        name="fedcme:digits",
        summary="Built-in digits, no network needed: seconds a run",
        source="not from the paper",
        settings={
            "num_clients": 10,
            "cohort_size": 6,
            "partition": "dirichlet:0.1",
            "rounds": 20,
            "local_epochs": 4,
            "batch_size": 16,
            "optimizer": "sgd",
            "lr": 0.05,
        },
        datasets={
            "digits": DataSetting(
                backbone="cnn-small", mean=(0.5,), std=(0.5,), source="chosen here: pixels in [-1, 1]"
            )
        },
        selection="last",
        method_options=_BASELINES,
    ),
)


# The paper's experiments: tables


_IN_TEXT = "in-text"  # of figures no number is printed


def _column(dataset: str, alpha: float, population: int, cohort: int) -> dict[str, Any]:
    return column(_name(dataset, alpha, population, cohort), dataset)


def _table(
    name: str, title: str, cells: tuple[Cell, ...], *, printed: str, notes: tuple[str, ...] = (),
    gains: tuple[Gain, ...] = (),
) -> Table:  # fmt: skip
    """A table or figure of the paper; `printed` says where its numbers are."""
    return Table(
        name=f"fedcme:{name}",
        title=title,
        reported=("FedCME", printed),
        cells=cells,
        notes=(*_NOTES, *notes),
        gains=gains,
    )


_OTHERS = {
    "FedAvg": row("fedavg"),
    "FedProx(0.1)": row("fedprox", proximal_weight=0.1),
    "FedProx(0.01)": row("fedprox", proximal_weight=0.01),
    "MOON": row("moon"),
    "FedRS(0.1)": row("fedrs", scaling=0.1),
    "FedRS(0.5)": row("fedrs", scaling=0.5),
}
_FEDCME_ROW = "FedCME(0.01)"
_OURS = {_FEDCME_ROW: row("fedcme", alignment_weight=0.01)}
_ROWS = {**_OTHERS, "FedCME(0.1)": row("fedcme", alignment_weight=0.1), **_OURS}

# Table II, "the test accuracy of FedCME and other methods". 8 rows, 16 columns, 3 seeds: 384 runs.


def _columns(title: str, dataset: str, alpha: float) -> dict[str, dict[str, Any]]:
    """The columns of Table II with a data set under one skew, by their headings."""
    columns = {}
    for population, size in _COHORTS:
        heading = f"{title} alpha={alpha} K={population},M={size}"
        columns[heading] = _column(dataset, alpha, population, size)
    return columns


_FMNIST_MORE_SKEW = _columns("FMNIST", "fmnist", alpha=0.1)
_FMNIST_LESS_SKEW = _columns("FMNIST", "fmnist", alpha=0.5)
_CIFAR10_MORE_SKEW = _columns("CIFAR10", "cifar10", alpha=0.1)
_CIFAR10_LESS_SKEW = _columns("CIFAR10", "cifar10", alpha=0.5)
_COLUMNS_2 = {**_FMNIST_MORE_SKEW, **_FMNIST_LESS_SKEW, **_CIFAR10_MORE_SKEW, **_CIFAR10_LESS_SKEW}
_TABLE_2 = _table("II", "Test accuracy of the global model", grid(_ROWS, _COLUMNS_2), printed="Table II")
_TABLE_2_TAIL = _table(  # Reading 19
    "II-last-tenth",
    "Test accuracy over the last rounds",
    grid(_ROWS, _COLUMNS_2, "last-tenth"),
    printed="Table II",
    notes=(_TAIL_NOTE,),
)

# Table III, "the global model test accuracy at four global training time points". Table II's runs, 48 of them.
_CIFAR10_COLUMNS = {"K=50,M=20": _column("cifar10", 0.1, 50, 20), "K=80,M=30": _column("cifar10", 0.1, 80, 30)}


def _on_the_way() -> Table:
    """Accuracies after one to four fifths of the rounds, and the lead on the best other method there."""
    cells: list[Cell] = []
    gains = []
    for name, settings in _CIFAR10_COLUMNS.items():
        for part in range(1, 5):
            heading = f"{name} at {part}/5T"
            cells += grid(_ROWS, {heading: settings}, f"at:{part}/5")
            gains.append(
                Gain(
                    row=f"{_FEDCME_ROW} minus best other",
                    column=heading,
                    leading_rows=(_FEDCME_ROW,),
                    other_rows=tuple(_OTHERS),
                    over_best=True,
                )
            )
    return _table("III", "Test accuracy on the way", tuple(cells), printed="Table III", gains=tuple(gains))


_TABLE_3 = _on_the_way()

# Table IV, "FedCME with only classifier exchanging (OE) and FedCME with only L2Loss (OL)". 9 rows, 2 columns,
# 3 seeds: 54 runs, 42 of them Table II's. Fig. 3 has their curves.
_ABLATIONS = {
    **_OTHERS,
    "FedCME-OL(0.01)": row("fedcme", alignment_weight=0.01, exchange="none"),
    "FedCME-OE(0.01)": row("fedcme", alignment_weight=0.0),
    **_OURS,
}
_NO_BRACKET_NOTE = "FedCME-OE(0.01) has no alignment term; the paper's bracket is then without meaning."
_TABLE_4 = _table(
    "IV",
    "Ablation: alignment only, exchange only, both",
    grid(_ABLATIONS, _CIFAR10_COLUMNS),
    printed="Table IV",
    notes=(_NO_BRACKET_NOTE,),
)
_TABLE_4_TAIL = _table(
    "IV-last-tenth",
    "Ablation over the last rounds",
    grid(_ABLATIONS, _CIFAR10_COLUMNS, "last-tenth"),
    printed="Table IV",
    notes=(_NO_BRACKET_NOTE, _TAIL_NOTE),
)

# Fig. 3, curves of runs of Table IV, without printed numbers: 2 rows, 2 columns, 3 seeds.
_PARTS = {name: _ABLATIONS[name] for name in ("FedCME-OE(0.01)", _FEDCME_ROW)}
_AT_HALF = {f"{name} at T/2": settings for name, settings in _CIFAR10_COLUMNS.items()}
_AT_THE_END = {f"{name} at T": settings for name, settings in _CIFAR10_COLUMNS.items()}
_FIG_3 = _table(
    "Fig3",
    "What the alignment adds on the way",
    grid(_PARTS, _AT_HALF, "at:1/2") + grid(_PARTS, _AT_THE_END, "at:1"),
    printed=_IN_TEXT,
    notes=("The paper draws curves and prints no number: 'fedcli plot RUNS' draws them from the runs of Table IV.",),
)

# Fig. 4, "the training results in two matching modes". 2 rows, 2 columns, 3 seeds: 12 runs, 6 of them Table II's.
_MATCHINGS = {"FedCME": row("fedcme"), "FedCME-MTO": row("fedcme", matching="many-to-one")}
_CURVES_NOTE = "The paper draws curves and prints no number."
_FIG_4 = _table(
    "Fig4",
    "Clients matched in pairs, or many to one",
    grid(_MATCHINGS, _CIFAR10_COLUMNS),
    printed=_IN_TEXT,
    notes=(_CURVES_NOTE,),
)

# Fig. 5, "exchanging the whole model (WM) and only the feature extractor (FE)". 18 runs, 6 of them Table II's.
_EXCHANGES = {
    "FedCME": row("fedcme"),
    "FedCME-WM": row("fedcme", exchange="model"),
    "FedCME-FE": row("fedcme", exchange="body"),
}
_FIG_5 = _table(
    "Fig5",
    "What is exchanged: classifier, whole model, extractor",
    grid(_EXCHANGES, _CIFAR10_COLUMNS),
    printed=_IN_TEXT,
    notes=(_CURVES_NOTE,),
)

TABLES = (_TABLE_2, _TABLE_2_TAIL, _TABLE_3, _TABLE_4, _TABLE_4_TAIL, _FIG_3, _FIG_4, _FIG_5)
NOT_PLANNED = {
    "Table I": "the symbols, no results",
    "Figs. 1 and 2": "sketches of the idea and of a round, without numbers",
}


# The paper's experiments: claims

# In the first of the eight columns of Fashion-MNIST FedProx is ahead of FedCME in the paper.
_FEDPROX_AHEAD, *_MORE_SKEW_FEDCME_AHEAD = _FMNIST_MORE_SKEW
_SEVEN_COLUMNS = (*_MORE_SKEW_FEDCME_AHEAD, *_FMNIST_LESS_SKEW)
CLAIMS = (
    Claim(
        name="fedcme:fmnist",
        text="On Fashion-MNIST (alpha 0.5, 10 of 50 clients a round), FedCME is ahead of all six others",
        table="fedcme:II",
        row=_FEDCME_ROW,
        other_rows=tuple(_OTHERS),
        columns=("FMNIST alpha=0.5 K=50,M=10",),
    ),
    Claim(
        name="fedcme:fmnist-seven",
        text="In seven of eight settings of Fashion-MNIST FedCME is on average ahead of all six others",
        table="fedcme:II",
        row=_FEDCME_ROW,
        other_rows=tuple(_OTHERS),
        columns=_SEVEN_COLUMNS,
    ),
    Claim(
        name="fedcme:cifar10",
        text="On CIFAR-10 (alpha 0.1, four cohorts), FedCME is on average ahead of all six others",
        table="fedcme:II",
        row=_FEDCME_ROW,
        other_rows=tuple(_OTHERS),
        columns=tuple(_CIFAR10_MORE_SKEW),
    ),
    Claim(
        name="fedcme:more-skew",
        text="FedCME's lead on FedAvg is larger under more skew (CIFAR-10, 30 of 80 clients a round)",
        table="fedcme:II",
        row=_FEDCME_ROW,
        other_rows=("FedAvg",),
        columns=("CIFAR10 alpha=0.1 K=80,M=30",),
        subtracted_columns=("CIFAR10 alpha=0.5 K=80,M=30",),
    ),
    Claim(
        name="fedcme:sooner",
        text="Over eight points on the way on CIFAR-10 (alpha 0.1), FedCME is ahead of all six others",
        table="fedcme:III",
        row=_FEDCME_ROW,
        other_rows=tuple(_OTHERS),
        columns=tuple(gain.column for gain in _TABLE_3.gains),
    ),
    Claim(
        name="fedcme:exchange",
        text="Of FedCME's parts the exchange of classifiers does more than the alignment of features",
        table="fedcme:IV",
        row="FedCME-OE(0.01)",
        other_rows=("FedCME-OL(0.01)",),
        columns=tuple(_CIFAR10_COLUMNS),
    ),
    Claim(
        name="fedcme:alignment",
        text="FedCME's alignment of features adds to the exchange of classifiers",
        table="fedcme:IV",
        row=_FEDCME_ROW,
        other_rows=("FedCME-OE(0.01)",),
        columns=tuple(_CIFAR10_COLUMNS),
    ),
    Claim(
        name="fedcme:alignment-early",
        text="The alignment of features adds more at half of the rounds than at their end",
        table="fedcme:Fig3",
        row=_FEDCME_ROW,
        other_rows=("FedCME-OE(0.01)",),
        columns=tuple(_AT_HALF),
        subtracted_columns=tuple(_AT_THE_END),
    ),
    Claim(
        name="fedcme:pairs",
        text="Clients that are matched in pairs are ahead of clients that are matched many to one",
        table="fedcme:Fig4",
        row="FedCME",
        other_rows=("FedCME-MTO",),
        columns=tuple(_CIFAR10_COLUMNS),
    ),
    Claim(
        name="fedcme:classifier",
        text="Exchanging the classifier is ahead of exchanging the model or the extractor",
        table="fedcme:Fig5",
        row="FedCME",
        other_rows=("FedCME-WM", "FedCME-FE"),
        columns=tuple(_CIFAR10_COLUMNS),
    ),
)
