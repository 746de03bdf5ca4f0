"""FedRep: every client first fits its own head to the body it received, then moves the body under that head.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021, https://arxiv.org/abs/2102.07078. Algorithm 1.

As in FedPer the body (the representation) is averaged and the head stays with the client. There both move together;
here they alternate.

Notation
    code                    paper       shape
    state.params            phi         parameters of the body, dict of tensors
    ClientState.head        h_i         parameters of the client's head
    head_epochs             tau         in epochs, not steps
    cohort.weights          1 / (r n)   [K]

Readings and deviations
    1. tau counts passes over the client's examples, and its default is that of the paper's experiments. They come on
       top of the run's local epochs, which are those of the body: the first local epochs of a round then have the same
       minibatches as in every other method. The authors' code counts both phases in one number of local epochs, of
       which the last one or few are for the body.
    2. Algorithm 1 takes one step of the body; the paper's experiments take one or five epochs.
    3. The two phases have an optimizer each, new in every round. The authors' code uses one SGD for both: with the
       PyTorch of its time, which sets gradients to zero and not to None, the head's momentum goes on, fading, while the
       body moves, and so does its weight decay.
    4. Bodies are averaged with the weights n_i / n of the cohort; with 1 / (r n) in Algorithm 1, the same where clients
       are of one size.
    5. Running statistics of batch normalisation are those of the body's phase. In the head's phase batches are
       normalised by their own statistics, as in training, and what that makes of the running ones is thrown away.
    6. The authors' code lets all clients take part in a last round, and trains heads for ten more epochs. Not here.
    7. A client is tested with its own head on the averaged body, as in FedPer.

Run it
    fedcli run fedrep --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedcli import Method, option, params_both_ways
from fedcli.core import Buffers, Client, Model, Params, head_names, plain_loss, split, weighted_mean
from fedcli.core.federation import Cohort, Federation, Terms


@dataclass(frozen=True)
class Config:
    """What FedRep adds to FedPer."""

    training: str = option(
        "alternating", "Head first and then the body, or both together, which is FedPer",
        choices=("alternating", "together"),
    )  # fmt: skip
    head_epochs: int = option(
        10, "Passes over a client's data for its head, before those for the body", symbol="τ",
        source="Algorithm 1; the paper's experiments", low=0, only_with={"training": ("alternating",)},
    )  # fmt: skip


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    head: Params


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # of the body
    buffers: Buffers
    clients: Mapping[int, ClientState]  # of those that have taken part


def personal_models(state: ServerState) -> dict[int, tuple[Params, Buffers]]:
    """Each client's own head on the averaged body (Reading 7)."""
    return {client: ({**state.params, **own.head}, state.buffers) for client, own in state.clients.items()}


def init(fed: Federation, config: Config) -> ServerState:
    """The initial body; nobody has trained yet."""
    params, buffers = fed.initial_model()
    _, body = split(params, head_names(fed.network))
    return ServerState(body, buffers, {})


def train_head(clients: Client, cohort: Cohort, fed: Federation, config: Config) -> tuple[Client, Terms]:
    """h_i <- GRD(f_i(h_i, phi)), tau times: the head alone moves, on the body as received."""
    if config.head_epochs == 0:
        return clients, {}
    step = fed.optimizer_step(plain_loss(fed.network), names=sorted(head_names(fed.network)))
    after_body_epochs = range(fed.local_epochs, fed.local_epochs + config.head_epochs)  # Reading 1
    trained, terms = fed.train(clients, cohort, step, epochs=after_body_epochs)
    terms = {f"head_{name}": values for name, values in terms.items()}
    return Client(trained.params, clients.buffers), terms  # Reading 5


def train_body(clients: Client, cohort: Cohort, fed: Federation) -> tuple[Client, Terms]:
    """phi_i <- GRD(f_i(h_i, phi)): the body alone moves, under the new head."""
    _, body = split(fed.network.params, head_names(fed.network))
    step = fed.optimizer_step(plain_loss(fed.network), names=list(body))
    return fed.train(clients, cohort, step)


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round; or that of FedPer."""
    first_head, _ = split(fed.initial_model().params, head_names(fed.network))

    received = fed.broadcast(state.params, state.buffers, cohort)  # server sends phi^{t-1}
    own = fed.recall(state.clients, cohort, ClientState(first_head))
    clients = Client({**received.params, **own.head}, received.buffers)
    if config.training == "together":
        clients, terms = fed.train(clients, cohort, plain_loss(fed.network))
    else:
        clients, head_terms = train_head(clients, cohort, fed, config)  # for s = 1 to tau: update h_i
        clients, terms = train_body(clients, cohort, fed)  # update phi_i
        terms |= head_terms

    head, body = split(clients.params, head_names(fed.network))
    states = fed.remember(state.clients, cohort, ClientState(head))
    sent = fed.upload_model(Model(body, clients.buffers))  # client i sends phi_i^t
    params, buffers = weighted_mean(sent, cohort.weights)  # phi^t = 1 / (r n) sum_i phi_i^t; Reading 4
    return ServerState(params, buffers, states), terms


METHOD = Method(
    name="fedrep",
    title="FedRep: heads fitted to a body, then the body to the heads",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedper", {"training": "together"}),
    state_types=(ServerState, ClientState),
    costs=params_both_ways,  # the body
    default_protocol="fedfm:niid-1",
    personal=personal_models,
)  # fmt: skip
