"""pFedMe: personal models solve a proximal problem around local ones, which follow them and are averaged.

C. T. Dinh, N. H. Tran, T. D. Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
https://arxiv.org/abs/2006.08848. Algorithm 1.

A client's objective is the Moreau envelope  F_i(w) = min_theta f_i(theta) + (lambda / 2) ||theta - w||^2,  whose
gradient is lambda (w - theta_i(w)).

Notation
    code                    paper               shape
    state.params            w_t                 dict of tensors, the global model
    client.memory           w_{i,r}^t           dict of tensors, the client's local model
    client.params           theta_i(w_{i,r})    dict of tensors, the client's personal model
    proximal_weight         lambda
    personal_steps          K                   steps of theta on each minibatch
    outer_lr                eta
    server_mixing           beta
    cohort.weights          1 / S               [K]

Readings and deviations
    1. The run's `--lr` is the rate of theta's steps, which go along a gradient of the loss as in every other method.
       The authors' code has 0.09 or 0.1 there, and 0.005 for eta.
    2. R is the number of minibatches in a round's local epochs; the authors' code takes as many minibatches as it has
       "local epochs". theta goes on from one to the next, as there; it begins a round at the received model. The K
       steps on a minibatch share the round's momentum.
    3. The authors' code adds 0.001 theta to the gradient; `--weight-decay` does that.
    4. Only the round's cohort trains. The authors' code trains all clients and averages those that were drawn.
    5. Local models are averaged with the weights n_i / n of the cohort, as in the authors' code; Algorithm 1 has the
       plain mean, the same where clients are of one size.
    6. What is tested is theta_i after the last minibatch, the paper's personalized model, with its running
       statistics. In the authors' code it is w_i: the list of personal parameters is overwritten. The global model is
       tested beside. A client that has never taken part is tested with the initial model.

Run it
    fedcli run pfedme --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedcli import Method, both_ways, option
from fedcli.core import Buffers, LocalLoss, Model, Network, Params, Step, composed, plain_loss, tree_map, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines.fedprox import proximal_term


@dataclass(frozen=True)
class Config:
    """What pFedMe adds to FedAvg."""

    proximal_weight: float = option(
        15.0, "Weight of the distance between personal and local model; --lr times it should stay below 2", symbol="λ",
        source="authors' code", low=0, open_low=True, tune=(5.0, 15.0, 30.0),
    )  # fmt: skip
    personal_steps: int = option(
        5, "Steps of the personal model on each minibatch", symbol="K", source="authors' code", low=1
    )
    outer_lr: float = option(
        0.005, "Step of the local model towards the personal one, over λ; times λ it should stay below 1", symbol="η",
        source="Algorithm 1; authors' code", low=0, open_low=True, tune=(0.005, 0.02, 0.05),
    )  # fmt: skip
    server_mixing: float = option(
        1.0, "Share of the mean in the new global model; more than 1 goes beyond it", symbol="β", source="Algorithm 1",
        low=0, open_low=True,
    )  # fmt: skip


class Personal(NamedTuple):
    """A client's personal model after the last round it took part in; nothing trains from it."""

    params: Params  # theta_i
    buffers: Buffers


class ServerState(NamedTuple):
    """What the server keeps, and by client id the models that are tested."""

    params: Params  # global model w
    buffers: Buffers
    tested: Mapping[int, Personal]  # of those that have taken part


def make_personal_loss(network: Network, config: Config) -> LocalLoss:
    """h_i(theta; w) = f_i(theta) + (lambda / 2) ||theta - w||^2, where the context is w."""
    task = plain_loss(network)

    def personal_loss(params, buffers, batch, local):
        loss, aux = task(params, buffers, batch, None)
        proximal = proximal_term(params, local)
        return loss + config.proximal_weight * proximal, aux.with_term("proximal", proximal)

    return personal_loss


def update_local(local: Params, personal: Params, rate: float) -> Params:
    """w <- w - eta lambda (w - theta), a step along the gradient of the Moreau envelope.

    Args:
        local: w_i of one client.
        personal: theta_i.
        rate: eta lambda.
    """
    return tree_map(lambda w, theta: w - rate * (w - theta), local, personal)


def mix(params: Params, mean: Params, server_mixing: float) -> Params:
    """w_{t+1} = (1 - beta) w_t + beta (mean of w_i)."""
    return tree_map(lambda old, new: (1 - server_mixing) * old + server_mixing * new, params, mean)


def make_local_step(fed: Federation, config: Config) -> Step:
    """K steps of theta on a minibatch, then one of w_i, which is the client's memory."""
    personal_step = fed.optimizer_step(make_personal_loss(fed.network, config))

    def update(client, batch, context):
        local = client.memory
        for _ in range(config.personal_steps):  # theta_i(w_{i,r}), up to the accuracy that K steps give
            client, aux = personal_step.update(client, batch, local)
        local = update_local(local, client.params, config.outer_lr * config.proximal_weight)
        return client._replace(memory=local), aux

    return composed(update, personal_step)


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; nobody has trained yet."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # w_{i,0} = theta_i = w_t
    clients = clients._replace(memory=clients.params)
    clients, terms = fed.train(clients, cohort, make_local_step(fed, config))  # for r = 0 to R - 1

    tested = fed.remember(state.tested, cohort, Personal(clients.params, clients.buffers))
    sent = fed.upload_model(Model(clients.memory, clients.buffers))  # w_{i,R}
    mean, buffers = weighted_mean(sent, cohort.weights)
    return ServerState(mix(state.params, mean, config.server_mixing), buffers, tested), terms


METHOD = Method(
    name="pfedme",
    title="pFedMe: personal models around a global one, by Moreau envelopes",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # no setting makes local or global models those of another method
    state_types=(ServerState, Personal),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: 2 * sizes.parameters,  # w_i and theta_i
    personal=lambda state: state.tested,
    shared=lambda state: (state.params, state.buffers),
)  # fmt: skip
