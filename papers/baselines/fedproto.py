"""FedProto: clients keep their own models and share class means of features, the prototypes.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022, https://arxiv.org/abs/2105.00243. Algorithm 1, Eqs. 3 to 7.

A round: the server sends the global prototypes; a client trains its own model on CE + lambda * distance of each feature
to its class's global prototype, gathers the class means of its features while it trains, and sends those of its own
classes; the server averages each class's over the clients that have it. A test image is given the class of the nearest
global prototype.

Notation
    code                    paper           shape
    features                f_i(phi_i; x)   [B, D], the input of the last fully connected layer
    class_means             C_i^(j)         [K, C, D]
    prototypes              mean of C_i^(j) [C, D]
    prototype_weight        lambda

Readings and deviations
    1. The distance is the squared error of each sample's feature, mean over samples and coordinates, as in the authors'
       code. Eq. 8 sums over classes the distance between the local and the global prototype.
    2. lambda = 1, the default of the authors' code. FedSA's scripts have 10, and so have its protocols here.
    3. The mean over clients is not weighted, as in the authors' code. Eq. 6 weighs by examples and divides by their
       number of clients once more, which would shrink the prototypes.
    4. The class means are of the features of the last local epoch's batches, as training computes them: by a model that
       moves, in training mode, augmented, without the last batch where it is dropped. So does the authors' code.
       FedSA's gathers the features of all local epochs (`--gathered-epochs all`); so do its protocols here.
    5. Global prototypes are those of the last round's cohort. A class that nobody in it has has none: its samples count
       with distance 0, and no test image is given that class. In the paper all clients take part in every round.
    6. In the first round there are no prototypes: cross-entropy alone.
    7. Headline is the nearest prototype (Eq. 4); the classifier's accuracy is recorded beside it. The authors' code
       reports both.

Run it
    fedcli run fedproto --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Method, option, rows_by_class
from fedcli.core import Aux, ClientState, LocalLoss, Network, Step, cross_entropy, masked_mean
from fedcli.core.class_vectors import gather_outputs, mean_over_owners, no_vectors, train_and_gather
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What FedProto adds to local training."""

    prototype_weight: float = option(
        1.0, "Weight of the distance to the prototypes", symbol="λ", source="Eq. 7", low=0, off=0
    )
    gathered_epochs: str = option(
        "last", "Local epochs whose features the class means are of", source="Eq. 3", choices=("last", "all"),
        before="last",
    )  # fmt: skip


class Context(NamedTuple):
    """What a client is given for a round; all clients share it."""

    prototypes: Tensor  # [C, D]
    has_prototype: Tensor  # [C], bool


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    prototypes: Tensor  # [C, D]
    has_prototype: Tensor  # [C], bool: whether anybody in the last cohort has the class
    clients: Mapping[int, ClientState]  # of those that have taken part


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


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective, cross-entropy + lambda * distance to the prototypes."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        distance = prototype_distance(features, batch.y, context.prototypes, context.has_prototype, batch.mask)
        terms = {"cross_entropy": task, "prototype": distance}
        return task + config.prototype_weight * distance, Aux(buffers, terms, features)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """Nobody has trained yet, no class has a prototype; refuses networks whose features differ in width."""
    vectors, has_vector = no_vectors(fed)
    return ServerState(vectors, has_vector, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round."""

    def make_step(network: Network) -> Step:
        step = fed.optimizer_step(make_local_loss(network, config))  # Eq. 7
        return gather_outputs(step, fed.num_classes, last_epoch=config.gathered_epochs == "last")  # Reading 4

    context = Context(fed.download(state.prototypes, cohort), state.has_prototype)
    trained = train_and_gather(state.clients, state.prototypes, context, make_step, cohort, fed)  # Eq. 3
    prototypes = mean_over_owners(trained.means, trained.counts, state.prototypes)  # Eq. 6
    has_prototype = (trained.counts > 0).any(0)
    return ServerState(prototypes, has_prototype, trained.states), trained.terms


METHOD = Method(
    name="fedproto",
    title="FedProto: own models that share class prototypes",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"prototype_weight": 0.0}),
    state_types=(ServerState, ClientState),
    variants={"all epochs": {"gathered_epochs": "all"}},
    costs=rows_by_class(lambda sizes: sizes.feature_dim),
    default_protocol="fedsa:cifar10-silo",
    client_memory=lambda sizes: sizes.parameters + 2 * sizes.num_classes * sizes.feature_dim,  # received and gathered
    personal=lambda state: state.clients,
    prototypes=lambda state: (state.prototypes, state.has_prototype),
    mixed_networks=True,
)  # fmt: skip
