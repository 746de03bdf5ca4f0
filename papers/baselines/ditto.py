"""Ditto: beside the model of FedAvg, every client trains its own, held near the one that it received.

T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
https://arxiv.org/abs/2012.04221. Algorithm 1; with FedAvg as the solver of the global objective, Algorithm 2.

A client's own model solves  min_v h_k(v; w) = F_k(v) + (lambda / 2) ||v - w||^2,  the objective of FedProx around the
global model w.

Notation
    code                    paper       shape
    state.params            w^t         dict of tensors
    ClientState.params      v_k         dict of tensors
    proximal_weight         lambda
    cohort.weights          1 / |S_t|   [K]

Readings and deviations
    1. w^t in the term is the model as received, in all local steps, and not the one that the client is training.
    2. v_k takes as many steps as w_k, on the same minibatches, at one learning rate. The paper has s and r steps and
       two rates; the authors' code takes one step of each on every minibatch.
    3. Global models are averaged with FedAvg's weights n_k / n; Algorithm 2 has the plain mean, the same where clients
       are of one size.
    4. v_k begins at the initial model and is kept from round to round, with its own running statistics.
    5. The gradient of the term goes through the run's optimizer with that of F_k, momentum included.
    6. The personal models are what is tested, and the global model beside them. A client that has never taken part is
       tested with the initial model.

Run it
    fedcli run ditto --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedcli import Method, both_ways, option
from fedcli.core import Buffers, Client, ClientState, Params, plain_loss, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines import fedprox


@dataclass(frozen=True)
class Config:
    """What Ditto adds to FedAvg and local training."""

    proximal_weight: float = option(
        1.0, "Weight of the distance between a client's own model and the global one", symbol="λ",
        source="authors' experiments", low=0, off=0, tune=(0.1, 1.0, 2.0),
    )  # fmt: skip


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # global model w
    buffers: Buffers
    clients: Mapping[int, ClientState]  # v_k and its buffers, of those that have taken part


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; nobody has trained yet."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 2, one round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # server sends w^t
    first = fed.initial_model()
    own = fed.recall(state.clients, cohort, ClientState(first.params, first.buffers))

    objective = fedprox.make_local_loss(fed.network, config)  # h_k(v_k; w^t)
    personal = Client(own.params, own.buffers)
    personal, own_terms = fed.train(personal, cohort, objective, fedprox.Context(state.params))  # v_k
    clients, terms = fed.train(clients, cohort, plain_loss(fed.network))  # w_k, on the same minibatches

    states = fed.remember(state.clients, cohort, ClientState(personal.params, personal.buffers))
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)  # w^{t+1}
    terms |= {f"personal_{name}": values for name, values in own_terms.items()}
    return ServerState(params, buffers, states), terms


METHOD = Method(
    name="ditto",
    title="Ditto: own models held near the global one",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"proximal_weight": 0.0}),
    state_types=(ServerState, ClientState),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 3 * sizes.parameters,  # w_k, w^t and v_k
    personal=lambda state: state.clients,
    shared=lambda state: (state.params, state.buffers),
)  # fmt: skip
