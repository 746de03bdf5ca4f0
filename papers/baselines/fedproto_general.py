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

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import Buffers, Params, weighted_mean
from fedcli.core.class_vectors import (
    GatheredOutputs,
    gather_outputs,
    mean_by_class,
    mean_over_owners,
    no_vectors,
    start_gathering,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedproto import Context, make_local_loss


@dataclass(frozen=True)
class Config:
    """What generalized FedProto adds to FedAvg."""

    prototype_weight: float = option(1.0, "Weight of the distance to the prototypes", symbol="λ", low=0, off=0)


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model
    buffers: Buffers
    prototypes: Tensor  # [C, D]
    has_prototype: Tensor  # [C], bool: whether any client has ever had the class


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; no class has a prototype."""
    params, buffers = fed.initial_model()
    vectors, has_vector = no_vectors(fed)
    return ServerState(params, buffers, vectors, has_vector)


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    context = Context(fed.download(state.prototypes, cohort), state.has_prototype)
    clients = clients._replace(memory=start_gathering(len(cohort.client_ids), state.prototypes))
    step = fed.optimizer_step(make_local_loss(fed.network, config))
    clients, terms = fed.train(clients, cohort, gather_outputs(step, fed.num_classes, last_epoch=True), context)
    gathered: GatheredOutputs = clients.memory
    counts = gathered.counts
    class_means = fed.upload(mean_by_class(gathered.sums, counts))  # the counts go too, which are no floats
    prototypes = mean_over_owners(class_means, counts, state.prototypes)
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    has_prototype = state.has_prototype | (counts > 0).any(0)
    return ServerState(params, buffers, prototypes, has_prototype), terms


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
