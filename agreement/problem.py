"""The problem that all sides solve, and fedcli's side of it.

Four clients with digits of scikit-learn; batches of 16, two local epochs, SGD at 0.1, three rounds, float64.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agreement import network as networks
from agreement.bridges import BRIDGES
from agreement.network import flat
from agreement.rows import Case
from fedcli import check
from fedcli.core import Federation, head_names
from fedcli.core.trees import leaves
from fedcli.data import datasets
from fedcli.papers.baselines import fedkd

ROUNDS = 3


class Partition(NamedTuple):
    """Who has how many examples, and how many clients take part in a round."""

    sizes: tuple[int, ...]  # examples of each client
    cohort_size: int


PARTITIONS = {
    "skew": Partition(sizes=(23, 41, 64, 90), cohort_size=4),
    "equal": Partition(sizes=(48, 48, 48, 48), cohort_size=4),
    "half": Partition(sizes=(48, 48, 48, 48), cohort_size=2),
}
RUN = {
    "dataset": "digits", "precision": "float64", "device": "cpu", "seed": 3,
    "rounds": ROUNDS, "local_epochs": 2, "batch_size": 16, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0,
}  # fmt: skip


def divide(labels: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Positions of each client's examples, of five or six classes in turn; no example twice."""
    generator = np.random.RandomState(7)
    is_free = np.ones(len(labels), bool)
    parts = []
    for client, size in enumerate(sizes):
        classes = [(2 * client + step) % 10 for step in range(5 + client % 2)]
        candidates = np.flatnonzero(np.isin(labels, classes) & is_free)
        chosen = generator.choice(candidates, size, replace=False)
        is_free[chosen] = False
        parts.append(chosen)
    return parts


def federation(case: Case) -> tuple[Any, Federation]:
    """The setup of a case, and its federation."""
    data = datasets.load("digits")
    partition = PARTITIONS[case.partition]
    method = BRIDGES.get(case.method, case.method)
    backbone = f"{networks.__file__}:{case.network}"
    run = {**RUN, "backbone": backbone, "cohort_size": partition.cohort_size, **case.run}
    parts = divide(data.y_train.numpy(), partition.sizes)
    return check.federation(method, dict(case.options), data=data, parts=parts, **run)


def describe(partition: str, network: str) -> dict[str, Any]:
    """What a peer needs to solve the problem: images and labels, clients, cohorts, batches and first weights.

    The batches are lists of positions by round, client and epoch.
    """
    _, fed = federation(Case("fedavg", partition=partition, network=network))
    x, y = fed.engine.gather(np.arange(len(fed.engine.labels)))
    params, _ = fed.initial_model()
    return {
        "x": x,
        "y": y,
        "x_test": fed.transform(fed.test_images),
        "y_test": fed.test_labels,
        "parts": [part.tolist() for part in fed.training],
        "batches": positions_of_batches(fed),
        "cohorts": [fed.cohort(number).client_ids.tolist() for number in range(ROUNDS)],
        "weights": list(params.values()),
        "projection": fedkd.initial_projection(fed.network, fed.network, fed),
        "epochs": fed.local_epochs,
        "batch_size": fed.batch_size,
        "lr": RUN["lr"],
        "network": network,
    }


def positions_of_batches(fed: Federation) -> dict[tuple[int, int, int], list[list[int]]]:
    """The positions of the examples in each batch, by round, client and epoch."""
    everyone = range(fed.num_clients)
    batches = {}
    for number in range(ROUNDS):
        cohort = fed.cohort_of(number, everyone)
        for epoch in range(2 * fed.local_epochs):  # the second half is of methods that train more than one model
            plan = fed.plan(cohort, range(epoch, epoch + 1))
            for client in everyone:
                sizes = plan.size[:, client]
                filled = np.flatnonzero(sizes)
                batches[number, client, epoch] = [plan.index[step, client, : sizes[step]].tolist() for step in filled]
    return batches


def outcome(setup: Any, fed: Federation) -> dict[str, Tensor]:
    """What a run of fedcli ends with, as vectors, by the names that `Row.compared` has."""
    state = check.simulate(setup, fed, ROUNDS)
    of_the_server = SERVERS.get(setup.method.name, of_a_model)
    ends = {**of_the_server(state), **of_the_clients(state)}
    if setup.method.personal is not None:
        ends |= of_personal_models(setup.method.personal(state), fed)
    return ends


def of_a_model(state: Any) -> dict[str, Tensor]:
    """The model of a server, or the part of one that the clients share."""
    return {"shared": flat(state.params.values()), "statistics": flat([torch.zeros(0), *state.buffers.values()])}


def of_a_head(state: Any) -> dict[str, Tensor]:
    """The head of LG-FedAvg's server, all that its clients share."""
    return {"head": flat(state.head.values())}


def of_prototypes(state: Any) -> dict[str, Tensor]:
    """The prototypes of FedProto's server."""
    return {"class vectors": flat([state.prototypes])}


def of_mean_outputs(state: Any) -> dict[str, Tensor]:
    """The mean output of each class, which FedDistill's server has."""
    return {"class vectors": flat([state.teacher])}


SERVERS = {  # what the server ends with, for methods whose server has no model
    "feddistill": of_mean_outputs,
    "fedproto": of_prototypes,
    "lg-fedavg": of_a_head,
}


def of_the_clients(state: Any) -> dict[str, Tensor]:
    """What all clients keep between rounds, in the order of their ids."""
    states = getattr(state, "clients", {})
    if not states:
        return {}
    in_order = [states[client] for client in sorted(states)]
    return {"kept": flat(leaves(in_order))}


def of_personal_models(models: dict[int, Any], fed: Federation) -> dict[str, Tensor]:
    """The clients' own models, in the order of their ids; whole, and without their heads."""
    head = head_names(fed.network)
    whole = []
    bodies = []
    for client in sorted(models):
        params, _ = models[client]
        whole += params.values()
        bodies += [value for name, value in params.items() if name not in head]
    return {"personal": flat(whole), "bodies": flat(bodies)}


def projections(vector: Tensor) -> list[float]:
    """Eight projections of a vector on normal ones, which NumPy's legacy generator draws alike in every version."""
    directions = np.random.RandomState(73).standard_normal((8, len(vector)))
    return (directions @ vector.numpy() / np.sqrt(len(vector))).tolist()
