"""FedAvg: average the clients' models, weighted by their numbers of examples.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629. Algorithm 1.

Notation
    code            paper       shape
    params          w           dict of tensors
    cohort.weights  n_k / n     [K]

Deviations
    1. The weights are n_k over the sum of n_k of the *cohort*, so that they sum to one when only some clients take
       part (the paper's Algorithm 1 writes n_k / n; its later versions divide by the cohort's examples).
    2. Networks with batch normalisation: the running statistics are averaged like the parameters. The paper has none.

Run it
    fedcli run fedavg --dataset digits
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fedcli import Method, Protocol, both_ways
from fedcli.core import Buffers, Client, LocalLoss, Network, Params, plain_loss, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """FedAvg adds no option."""


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model
    buffers: Buffers


def make_local_loss(network: Network, config: Any = None) -> LocalLoss:
    """The local objective F_k: mean cross-entropy over a client's examples; no option changes it."""
    return plain_loss(network)


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers)


def local_context(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[None, None]:
    """Nothing: a client is given the model alone."""
    return None, None


def aggregate(state: ServerState, clients: Client, cohort: Cohort, fed: Federation, config: Config) -> ServerState:
    """w_{t+1} = sum_k n_k / n w_{t+1}^k."""
    return ServerState(*weighted_mean(fed.upload_model(clients), cohort.weights))


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # S_t receives w_t
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network))  # ClientUpdate(k, w_t), in parallel
    return aggregate(state, clients, cohort, fed, config), terms


METHOD = Method(
    name="fedavg",
    title="FedAvg: federated averaging",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # the simplest of its family; the others are compared with it
    state_types=(ServerState,),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
)  # fmt: skip

PROTOCOLS = (
    Protocol(
        name="own:data",
        summary="A data set that no paper has: all its training images are trained on, and all others tested on",
        source="not from a paper; what a run takes where no protocol knows its data", datasets={}, selection="last",
        settings={"rounds": 20, "local_epochs": 2, "batch_size": 32, "lr": 0.1, "backbone": "cnn-small"},
    ),
    Protocol(
        name="own:personal",
        summary="Any data set, whose training and test images are divided together; each client is tested on a quarter "
        "of its own",
        source="not from a paper; how PFLlib and most papers on personal models test", datasets={}, selection="last",
        settings={
            "rounds": 50, "local_epochs": 2, "batch_size": 32, "lr": 0.1, "backbone": "cnn-small",
            "partition": "dirichlet:0.1", "local_test": 0.25,
        },
        evaluation="clients",
        notes=(
            "A quarter, and Dirichlet shares with concentration 0.1, are PFLlib's defaults. Its headline, the best "
            "round on the test images, is not taken.",
            "Accuracies are means over all test images together, so that a client counts by the size of its part. A "
            "global model is tested on the same parts.",
        ),
    ),
)  # fmt: skip
