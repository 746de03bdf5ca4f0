"""FedBABU: the federation trains the body under a head that never moves; before it is tested, a client tunes its copy.

J. Oh, S. Kim, S.-Y. Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022,
https://arxiv.org/abs/2106.06042. Algorithm 1, and the evaluation after it.

Notation
    code                    paper           shape
    state.params            theta_G,ext     parameters of the body, dict of tensors
    head                    theta_G,cls     parameters of the head, as initialised
    tuned                                   each client's own model after tuning
    tuning_epochs           tau_f
    cohort.weights          n_k / n         [K]

Readings and deviations
    1. Every client is tuned for its test, whether or not it has taken part: from the averaged body under the initial
       head, all parameters, at the round's learning rate with the run's momentum and weight decay, on the minibatches
       that would follow the round's. The paper tunes once, after the last round, at the learning rate reached there.
       The result is tested and then thrown away.
    2. The paper also tunes the body or the head alone; tuning all is what it recommends.
    3. Bodies are averaged with the weights n_k / n of the cohort; the authors' code takes the plain mean.
    4. The head comes from the seed, so that it is never sent.
    5. The tuned models are what is tested; the global one under the initial head, the paper's "initial accuracy", is
       tested beside them.
    6. A round that is tested costs `tuning_epochs` passes of all N clients more: with many clients use `--eval-every`.

Run it
    fedcli run fedbabu --dataset digits
"""

from dataclasses import dataclass
from typing import NamedTuple

from fedcli import Method, option, params_both_ways
from fedcli.core import (
    Buffers,
    Client,
    Model,
    Params,
    copies,
    head_names,
    plain_loss,
    select,
    split,
    split_model,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What FedBABU adds to FedAvg."""

    tuning_epochs: int = option(
        5, "Passes over a client's data for its own model before each test", symbol="τ_f", source="authors' code",
        low=0, off=0,
    )  # fmt: skip


class ServerState(NamedTuple):
    """What the server keeps, and the models that are tested."""

    params: Params  # of the body
    buffers: Buffers
    head: Params  # as initialised
    tuned: dict[int, Model]  # of all clients; empty after a round that is not tested


def global_model(state: ServerState) -> Model:
    """The averaged body under the initial head."""
    return Model({**state.params, **state.head}, state.buffers)


def tune(model: Model, round: int, fed: Federation, config: Config) -> dict[int, Model]:
    """Each client's own model: the global one after `tuning_epochs` passes over the client's data (Reading 1)."""
    everybody = fed.cohort_of(round, range(fed.num_clients))
    stacked = copies(model, fed.num_clients)
    clients = Client(stacked.params, stacked.buffers)
    if config.tuning_epochs > 0:
        after_the_rounds = range(fed.local_epochs, fed.local_epochs + config.tuning_epochs)
        clients, _ = fed.train(clients, everybody, plain_loss(fed.network), epochs=after_the_rounds)
    tuned = Model(clients.params, clients.buffers)
    return {client: select(tuned, client) for client in range(fed.num_clients)}


def init(fed: Federation, config: Config) -> ServerState:
    """The initial body and head."""
    params, buffers = fed.initial_model()
    head, body = split(params, head_names(fed.network))
    return ServerState(body, buffers, head, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round, and the tuning before a test."""
    received = fed.broadcast(state.params, state.buffers, cohort)  # server sends theta_G,ext
    heads = copies(state.head, len(cohort.client_ids))  # Reading 4
    clients = Client({**received.params, **heads}, received.buffers)
    step = fed.optimizer_step(plain_loss(fed.network), names=list(state.params))  # the head does not move
    clients, terms = fed.train(clients, cohort, step)  # ClientBodyUpdate

    _, body = split_model(clients, state.head)
    sent = fed.upload_model(body)
    params, buffers = weighted_mean(sent, cohort.weights)  # theta_G,ext = sum_k n_k / n theta_k,ext
    state = ServerState(params, buffers, state.head, {})
    if fed.is_tested(cohort.round):
        state = state._replace(tuned=tune(global_model(state), cohort.round, fed, config))
    return state, terms


METHOD = Method(
    name="fedbabu",
    title="FedBABU: a body trained under a fixed head, then tuned by each client",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # a head that never moves is in no other method
    state_types=(ServerState, Model),
    costs=params_both_ways,  # the body
    default_protocol="fedfm:niid-1",
    personal=lambda state: state.tuned,
    shared=global_model,
)  # fmt: skip
