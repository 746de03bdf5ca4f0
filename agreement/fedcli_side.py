"""fedcli's side: runs a case, and reads what it ends with."""

from typing import Any

from agreement.exchange import VectorByQuantity
from agreement.problem import ROUNDS
from agreement.rows import Quantity
from agreement.small_networks import flatten
from fedcli import check
from fedcli.core import head_names
from fedcli.core.federation import Federation
from fedcli.core.trees import leaves
from fedcli.runs.resolve import Setup


def run_case(setup: Setup, fed: Federation) -> VectorByQuantity:
    """Runs fedcli in a case, see `agreement.problem.make_federation`; returns what the run ends with."""
    state = check.simulate(setup, fed, ROUNDS)
    read_server = SERVER_READERS.get(setup.method.name, read_shared_model)
    final_vectors = {**read_server(state), **read_client_states(state, fed.num_clients)}
    if setup.method.personal is not None:
        final_vectors |= read_personal_models(setup.method.personal(state), fed)
    return final_vectors


def read_shared_model(state: Any) -> VectorByQuantity:
    """The model of a server, or the part of one that the clients share."""
    return {Quantity.SHARED: flatten(state.params.values()), Quantity.STATISTICS: flatten(state.buffers.values())}


def read_shared_head(state: Any) -> VectorByQuantity:
    """The head of LG-FedAvg's server, all that its clients share."""
    return {Quantity.HEAD: flatten(state.head.values())}


def read_prototypes(state: Any) -> VectorByQuantity:
    """The prototypes of FedProto's server."""
    return {Quantity.CLASS_VECTORS: flatten([state.prototypes])}


def read_mean_outputs(state: Any) -> VectorByQuantity:
    """The mean output of each class, which FedDistill's server has."""
    return {Quantity.CLASS_VECTORS: flatten([state.teacher])}


SERVER_READERS = {  # for methods whose server has no whole model
    "feddistill": read_mean_outputs,
    "fedproto": read_prototypes,
    "lg-fedavg": read_shared_head,
}


def read_client_states(state: Any, num_clients: int) -> VectorByQuantity:
    """What all clients keep between rounds, in the order of their ids.

    Nothing where some have not taken part: fedcli has nothing of those, and peers have what they began with.
    """
    states = getattr(state, "clients", {})
    if len(states) < num_clients:
        return {}
    in_order = [states[client] for client in sorted(states)]
    return {Quantity.KEPT: flatten(leaves(in_order))}


def read_personal_models(models: dict[int, Any], fed: Federation) -> VectorByQuantity:
    """The clients' own models, in the order of their ids; whole, and without their heads."""
    head = head_names(fed.network)
    whole = []
    bodies = []
    for client in sorted(models):
        params, _ = models[client]
        whole += params.values()
        bodies += [value for name, value in params.items() if name not in head]
    return {Quantity.PERSONAL: flatten(whole), Quantity.BODIES: flatten(bodies)}
