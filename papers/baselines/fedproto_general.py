"""FedProto, generalized: FedAvg, and every feature is drawn to its class's mean feature over the clients.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022, https://arxiv.org/abs/2105.00243, is a personalized method: only the class means of
features, the prototypes, travel. R. Ye et al., "FedFM: Anchor-Based Feature Matching for Data Heterogeneity in
Federated Learning", IEEE Transactions on Signal Processing 71, 2023, Section VII-C, compare with "a generalized version
of FedProto" and neither describe it nor give code. All of this file is therefore a reading: the least change of
FedProto that gives one global model.

A round: the server sends the model and the prototypes; the clients train on CE + lambda * MSE(feature, prototype of its
class) and gather the class means of their features during the last local epoch; the server averages the models as
FedAvg does and the class means over the clients that have the class.

Notation
    code                    FedProto            shape
    features                f_i(phi_i; x)       [B, D], the input of the last fully connected layer
    class_means             C_i^(j)             [K, C, D]
    prototypes              mean of C_i^(j)     [C, D]
    prototype_weight        lambda

Readings and deviations
    1. The whole model is averaged, weighted by examples, and the classifier predicts. FedProto's models stay with their
       clients and predict by the nearest prototype.
    2. The distance is the squared error, mean over samples *and* the D coordinates, as in FedProto's code. Neither
       features nor prototypes are normalised, and the term is on from the second round: FedProto has no start round.
    3. lambda = 1, the value of FedProto's code. FedFM gives none.
    4. The mean over clients is not weighted, as in FedProto's code: a client with one example of a class counts as much
       as one with many.
    5. Class means are of the features that training computes anyway, in the last local epoch: in training mode, under
       the model before each step, augmented, without the last batch where it is dropped. So does FedProto's code.
    6. In the first round there are no prototypes: cross-entropy alone. A sample of a class that has none counts with
       distance 0, as in FedProto's code. A class that no client of the cohort has keeps its prototype.
    7. Running statistics of batch normalisation are averaged like the parameters, as in FedAvg.

Run it
    fedcli run fedproto-general --dataset digits
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import Aux, LocalLoss, Network, Params, Step, class_sums, cross_entropy, masked_mean, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What generalized FedProto adds to FedAvg."""

    prototype_weight: float = option(1.0, "Weight of the distance to the prototypes", symbol="λ", low=0, off=0)


class Context(NamedTuple):
    """What a client is given for a round; all clients share it."""

    prototypes: Tensor  # [C, D]
    has_prototype: Tensor  # [C], bool


class Gathered(NamedTuple):
    """What a client gathers while it trains: outputs of its network, by class."""

    sums: Tensor  # [C, D]
    counts: Tensor  # [C], int64
    epoch_over: Tensor  # scalar bool: the last batch has ended an epoch


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model
    buffers: Params
    prototypes: Tensor  # [C, D]
    has_prototype: Tensor  # [C], bool: whether any client has ever had the class


def prototype_distance(
    features: Tensor, labels: Tensor, prototypes: Tensor, has_prototype: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Squared error of each feature to its class's prototype, mean over samples and coordinates; a scalar.

    Args:
        features: `[B, D]`.
        labels: `[B]`.
        prototypes: `[C, D]`.
        has_prototype: `[C]`; a sample of a class without one counts with distance 0.
        mask: `[B]`, False for padding.
    """
    is_pulled = has_prototype[labels]  # [B]
    targets = torch.where(is_pulled[:, None], prototypes[labels], features.detach())
    return masked_mean((features - targets).square().mean(-1), mask)


def aggregate_prototypes(class_means: Tensor, class_counts: Tensor, previous: Tensor) -> Tensor:
    """The plain mean of a class's means over the clients that have it; `[C, D]`.

    Args:
        class_means: `[K, C, D]`, ignored where the count is 0.
        class_counts: `[K, C]`.
        previous: `[C, D]`, kept for a class that no client has.
    """
    present = (class_counts > 0)[..., None]  # [K, C, 1]
    owners = present.sum(0)  # [C, 1]
    mean = torch.where(present, class_means, 0.0).sum(0) / owners.clamp(min=1)
    return torch.where(owners > 0, mean, previous)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective, cross-entropy + lambda * distance to the prototypes."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        distance = prototype_distance(features, batch.y, context.prototypes, context.has_prototype, batch.mask)
        terms = {"cross_entropy": task, "prototype": distance}
        return task + config.prototype_weight * distance, Aux(buffers, terms, features)

    return local_loss


def gathering(
    step: Step, num_classes: int, last_epoch: bool = False, output: Callable[[Tensor], Tensor] | None = None
) -> Step:
    """The step, which also gathers by class what the network gave for its batch, before the step.

    Args:
        step: One local step, whose objective returns outputs `[B, D]`.
        num_classes: C.
        last_epoch: Gather anew in every local epoch, so that what is left is of the last one.
        output: What is gathered of the outputs; these themselves where None.
    """

    def update(client, batch, context):
        client, aux = step.update(client, batch, context)
        outputs = aux.outputs if output is None else output(aux.outputs)
        sums, counts, over = client.memory
        if last_epoch:
            sums, counts = torch.where(over, 0.0, sums), torch.where(over, 0, counts)
        more, number = class_sums(outputs, batch.y, num_classes, batch.mask)
        return client._replace(memory=Gathered(sums + more, counts + number, batch.epoch_end)), aux

    return Step(update, step.init_optimizer)


def nothing_gathered(size: int, vectors: Tensor) -> Gathered:
    """What `size` clients have gathered before they train; zeros like the vectors `[C, D]`."""
    counts = torch.zeros(size, len(vectors), dtype=torch.int64, device=vectors.device)
    return Gathered(vectors.new_zeros(size, *vectors.shape), counts, torch.zeros_like(counts[:, 0], dtype=torch.bool))


def mean_by_class(sums: Tensor, counts: Tensor) -> Tensor:
    """The means `[K, C, D]` of sums `[K, C, D]` over counts `[K, C]`; 0 for a class without any."""
    return sums / counts.clamp(min=1)[..., None]


def no_vectors(fed: Federation, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """A vector of zeros for each class, `[C, D]` or `[C, dim]`, and that no class has one yet, `[C]`."""
    vectors = torch.zeros(fed.num_classes, dim or fed.feature_dim, dtype=fed.dtype, device=fed.device)
    return vectors, torch.zeros(fed.num_classes, dtype=torch.bool, device=fed.device)


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; no class has a prototype."""
    return ServerState(*fed.initial_model(), *no_vectors(fed))


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    context = Context(fed.download(state.prototypes, cohort), state.has_prototype)
    clients = clients._replace(memory=nothing_gathered(len(cohort.client_ids), state.prototypes))
    step = fed.optimizer_step(make_local_loss(fed.network, config))
    clients, terms = fed.train(clients, cohort, gathering(step, fed.num_classes, last_epoch=True), context)
    sums, counts, _ = clients.memory
    class_means, counts = fed.upload((mean_by_class(sums, counts), counts))
    prototypes = aggregate_prototypes(class_means, counts, state.prototypes)
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    return ServerState(params, buffers, prototypes, state.has_prototype | (counts > 0).any(0)), terms


METHOD = Method(
    name="fedproto-general",
    title="FedProto, generalized: one global model drawn to class prototypes",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"prototype_weight": 0.0}),
    state_types=(ServerState,),
    costs=both_ways(lambda sizes: sizes.parameters + sizes.num_classes * sizes.feature_dim),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: sizes.parameters + sizes.num_classes * sizes.feature_dim,
)  # fmt: skip
