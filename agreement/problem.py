"""The problem that all sides solve.

Four clients with digits of scikit-learn; batches of 16, two local epochs, SGD at 0.1, three rounds, float64.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from agreement import small_networks
from agreement.bridges import BRIDGES
from agreement.cases import Case
from agreement.exchange import Problem
from fedcli import check
from fedcli.core.federation import Federation
from fedcli.data import datasets
from fedcli.papers.baselines import fedkd
from fedcli.runs.resolve import Setup

ROUNDS = 3
PARTITION_SEED = 7


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
    """Positions of each client's examples, of five classes or, of every second client, six; no example twice."""
    generator = np.random.RandomState(PARTITION_SEED)
    is_free = np.ones(len(labels), bool)
    parts = []
    for client, size in enumerate(sizes):
        first_class = 2 * client
        num_classes = 5 + client % 2
        classes = [(first_class + step) % small_networks.NUM_CLASSES for step in range(num_classes)]
        candidates = np.flatnonzero(np.isin(labels, classes) & is_free)
        chosen = generator.choice(candidates, size, replace=False)
        is_free[chosen] = False
        parts.append(chosen)
    return parts


def make_federation(case: Case) -> tuple[Setup, Federation]:
    """Makes the setup of a case, and its federation."""
    data = datasets.load("digits")
    partition = PARTITIONS[case.partition]
    method = BRIDGES.get(case.method, case.method)
    backbone = f"{small_networks.__file__}:{case.network_name}"
    run = {**RUN, "backbone": backbone, "cohort_size": partition.cohort_size, **case.run_options}
    parts = divide(data.y_train.numpy(), partition.sizes)
    return check.federation(method, dict(case.options), data=data, parts=parts, **run)


def make_problem(case: Case) -> Problem:
    """Makes what a peer needs to solve the problem of a case.

    It is the same for all methods with the case's options of a run; `fedkd_projection` is read by FedKD's row alone.
    """
    # A peer that leaves out a batch that is not full does so itself.
    run_options = {**case.run_options, "drop_last": False}
    case_of_fedavg = replace(case, method="fedavg", options={}, run_options=run_options)
    _, fed = make_federation(case_of_fedavg)
    x, y = fed.engine.gather(np.arange(len(fed.engine.labels)))
    params, _ = fed.initial_model()
    return Problem(
        x=x,
        y=y,
        x_test=fed.transform(fed.test_images),
        y_test=fed.test_labels,
        parts=[part.tolist() for part in fed.training],
        batches=list_batches(fed),
        cohorts=[fed.cohort(number).client_ids.tolist() for number in range(ROUNDS)],
        weights=list(params.values()),
        fedkd_projection=fedkd.initial_projection(fed.network, fed.network, fed),
        epochs=fed.local_epochs,
        batch_size=fed.batch_size,
        lr=fed.config.lr,
        momentum=fed.momentum,
        weight_decay=fed.config.weight_decay,
        network_name=case.network_name,
    )


def list_batches(fed: Federation) -> dict[tuple[int, int, int], list[list[int]]]:
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
