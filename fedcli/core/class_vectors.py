"""Vectors of classes, which clients and server exchange: prototypes, anchors, mean outputs."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli.core.aggregate import class_sums, mean_by_class, root
from fedcli.core.clients import Step, Terms, composed
from fedcli.core.federation import Federation
from fedcli.core.network import Network
from fedcli.core.own_models import ClientState, GroupRound, own_models, train_by_network
from fedcli.core.population import Cohort
from fedcli.core.trees import Tree

SMALL = 1e-6  # a vector shorter than this has no direction worth following
EXCLUDED_LOGIT = -1e9  # of a class that is left out of a softmax: finite, so that no gradient is NaN


class ClassVectors(NamedTuple):
    """A vector for each class, and which classes have one."""

    vectors: Tensor  # [C, D], or of several clients [K, C, D]
    has_vector: Tensor  # [C] or [K, C], bool


class GatheredOutputs(NamedTuple):
    """The outputs of its network that a client has gathered while it trains, by class."""

    sums: Tensor  # [C, D]
    counts: Tensor  # [C], int64
    epoch_over: Tensor  # scalar bool: the last batch has ended an epoch


def unit(vectors: Tensor) -> Tensor:
    """Returns the vectors `[..., D]` at length one; those of length (almost) zero become zero and pass no gradient."""
    squares = vectors.square().sum(-1, keepdim=True)
    long = squares > SMALL**2
    return torch.where(long, vectors * torch.where(long, squares, 1.0).rsqrt(), 0.0)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Returns the Euclidean distance of vectors `[..., D]`, which broadcast; no gradient where two are equal."""
    return root((a - b).square().sum(-1))


def margin_logits(vectors: Tensor, labels: Tensor, targets: Tensor, margin: Tensor | float) -> Tensor:
    """Returns minus the distances `[n, C]` of vectors to the targets of all classes, the own one's with a margin.

    Args:
        vectors: `[n, D]`.
        labels: `[n]`, of the vectors.
        targets: `[C, D]`.
        margin: What is added to the distance of a vector to its own class's target; a scalar.
    """
    is_label = labels[:, None] == torch.arange(len(targets), device=labels.device)  # [n, C]
    return -(distance(vectors[:, None], targets) + margin * is_label)


class ClassDistances(NamedTuple):
    """The Euclidean distances of classes' vectors."""

    distances: Tensor  # [C, C]
    is_of_two_classes: Tensor  # [C, C], False on the diagonal and where a class is missing


def distances_between(vectors: Tensor, has_class: Tensor) -> ClassDistances:
    """Returns the distances of each class's vector to all others.

    Args:
        vectors: `[C, D]`.
        has_class: `[C]`, bool; the others do not count.
    """
    distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    is_same = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    are_present = has_class[:, None] & has_class
    return ClassDistances(distances, are_present & ~is_same)


def no_vectors(fed: Federation, dim: int | None = None) -> ClassVectors:
    """Returns a vector of zeros for each class, `[C, D]` or `[C, dim]`, and that no class has one yet, `[C]`."""
    vectors = torch.zeros(fed.num_classes, dim or fed.feature_dim, dtype=fed.dtype, device=fed.device)
    has_vector = torch.zeros(fed.num_classes, dtype=torch.bool, device=fed.device)
    return ClassVectors(vectors, has_vector)


def mean_over_owners(class_means: Tensor, class_counts: Tensor, previous: Tensor) -> Tensor:
    """Returns the plain mean of each class's vectors over the clients that have the class; `[C, D]`.

    Args:
        class_means: `[K, C, D]`, ignored where the count is 0.
        class_counts: `[K, C]`.
        previous: `[C, D]`, kept for a class that no client has.
    """
    present = (class_counts > 0)[..., None]  # [K, C, 1]
    owners = present.sum(0)  # [C, 1]
    mean = torch.where(present, class_means, 0.0).sum(0) / owners.clamp(min=1)
    return torch.where(owners > 0, mean, previous)


def gather_outputs(
    step: Step, num_classes: int, last_epoch: bool = False, transform: Callable[[Tensor], Tensor] | None = None
) -> Step:
    """Makes a step also gather by class what the network gave for its batch, before the step.

    Args:
        step: One local step, whose objective returns outputs `[B, D]`.
        num_classes: C.
        last_epoch: Gather anew in every local epoch, so that what is left is of the last one.
        transform: Makes of outputs `[B, D]` what is gathered of them; they themselves are where None.
    """

    def update(client, batch, context):
        client, aux = step.update(client, batch, context)
        outputs = aux.outputs if transform is None else transform(aux.outputs)
        gathered: GatheredOutputs = client.memory
        sums = gathered.sums
        counts = gathered.counts
        if last_epoch:
            sums = torch.where(gathered.epoch_over, 0.0, sums)
            counts = torch.where(gathered.epoch_over, 0, counts)
        batch_sums, batch_counts = class_sums(outputs, batch.y, num_classes, batch.mask)
        return client._replace(memory=GatheredOutputs(sums + batch_sums, counts + batch_counts, batch.epoch_end)), aux

    return composed(update, step)


def start_gathering(size: int, vectors: Tensor) -> GatheredOutputs:
    """Returns what `size` clients have gathered before they train; zeros like the vectors `[C, D]`."""
    sums = vectors.new_zeros(size, *vectors.shape)
    counts = torch.zeros(size, len(vectors), dtype=torch.int64, device=vectors.device)
    epoch_over = torch.zeros(size, dtype=torch.bool, device=vectors.device)
    return GatheredOutputs(sums, counts, epoch_over)


class TrainedAndGathered(NamedTuple):
    """What a round of local training that gathers outputs by class gives."""

    states: Mapping[int, ClientState]  # of clients, by id
    means: Tensor  # [K, C, D], each client's mean of each class's outputs; 0 where it has none
    counts: Tensor  # [K, C], of how many outputs
    terms: Terms


def train_and_gather(
    states: Mapping[int, ClientState], vectors: Tensor, context: Tree, make_step: Callable[[Network], Step],
    cohort: Cohort, fed: Federation,
) -> TrainedAndGathered:  # fmt: skip
    """Trains every client's own model, which gathers the means of its outputs by class and sends them.

    Args:
        states: Of clients, by id.
        vectors: `[C, D]`, of whose shape the means of a client are.
        context: Of the local steps; all clients share it.
        make_step: Makes the local step of a network, see `gather_outputs`.
        cohort: The clients of the round.
        fed: The federation.
    """

    def train_group(group: Cohort) -> GroupRound:
        memory = start_gathering(len(group.client_ids), vectors)
        model = own_models(states, group, fed)._replace(memory=memory)
        trained, terms = fed.train(model, group, make_step(group.network), context)
        return GroupRound(ClientState(trained.params, trained.buffers), sent=trained.memory, terms=terms)

    trained_cohort = train_by_network(train_group, states, cohort, fed)
    gathered: GatheredOutputs = trained_cohort.sent
    means = fed.upload(mean_by_class(gathered.sums, gathered.counts), gathered.counts > 0)
    return TrainedAndGathered(trained_cohort.states, means, gathered.counts, trained_cohort.terms)
