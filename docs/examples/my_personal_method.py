"""Partly own heads: a client begins a round with a head between its own and the mean of all.

An example for docs/add-your-method.md, not from a paper. The body is averaged as in FedPer. There a client goes on with
its own head; here with

    h = rho h_i + (1 - rho) h_mean                                                                      (1)

Notation
    code                    symbol      shape
    ClientState.head        h_i         dict of tensors, parameters of the client's head
    ServerState.params      h_mean      dict of tensors, with those of the body
    own_share               rho

Run it
    fedcli run docs/examples/my_personal_method.py --dataset digits --protocol own:personal
"""

from dataclasses import dataclass
from typing import NamedTuple

from fedcli import Method, both_ways, option
from fedcli.core import Buffers, Client, Params, head_names, plain_loss, split, tree_map, weighted_mean


@dataclass(frozen=True)
class Config:
    """What it adds to FedPer."""

    own_share: float = option(0.5, "Share of a client's own head", symbol="ρ", source="Eq. 1", low=0, high=1, off=1)


class ClientState(NamedTuple):
    """What a client keeps between the rounds it takes part in."""

    head: Params  # h_i


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # of the body, and h_mean
    buffers: Buffers
    clients: dict[int, ClientState]  # of those that have taken part


def mix(own: Params, mean: Params, own_share: float) -> Params:
    """Eq. 1: rho h_i + (1 - rho) h_mean, of dicts with the same names."""
    return tree_map(lambda mine, ours: own_share * mine + (1 - own_share) * ours, own, mean)


def personal_models(state: ServerState) -> dict[int, tuple[Params, Buffers]]:
    """Each client's model: its own head on the averaged body."""
    return {client: ({**state.params, **kept.head}, state.buffers) for client, kept in state.clients.items()}


def init(fed, config: Config) -> ServerState:
    """The initial model; nobody has trained yet."""
    return ServerState(*fed.initial_model(), clients={})


def run_round(state: ServerState, cohort, fed, config: Config):
    """One round."""
    names = head_names(fed.network)
    first_head, _ = split(fed.initial_model()[0], names)
    kept = fed.recall(state.clients, cohort, ClientState(first_head))  # [K, ...]
    received = fed.broadcast(state.params, state.buffers, cohort)
    mean_head, body = split(received.params, names)
    head = mix(kept.head, mean_head, config.own_share)
    clients = Client({**body, **head}, received.buffers)
    clients, terms = fed.train(clients, cohort, plain_loss(fed.network))
    trained_head, _ = split(clients.params, names)
    stored = fed.remember(state.clients, cohort, ClientState(trained_head))
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    return ServerState(params, buffers, stored), terms


METHOD = Method(
    name="partly-own-heads",
    title="Partly own heads: between a client's head and the mean of all",
    config=Config,
    init=init,
    run_round=run_round,
    reduces_to=("fedper", {"own_share": 1.0}),
    state_types=(ServerState, ClientState),
    costs=both_ways(lambda sizes: sizes.parameters),
    personal=personal_models,
)
