"""Law 8, workers are invisible: runs of methods of each kind, and a program of workers who share these runs.

The program is `python -c "from tests.workers_law import main; main()" FOLDER`, started by as many workers as
`NUMBERS_OF_WORKERS` has at most. For each of these numbers, so many of them do the runs, and the first writes the
results into a JSON file in the folder, which is named after the number.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from fedcli import check, registry, toy
from fedcli.runs.machine import machine_settings
from fedcli.runs.models import all_params
from fedcli.runs.record import params_hash
from fedcli.runs.rounds import one_round
from fedcli.runs.workers import joined
from tests import laws
from tests.networks import MIXED_NETWORKS
from tests.run_options import FEW_STEPS
from tests.run_parts import without_times
from tests.toy_methods import QUICK_OPTIONS, STATEFUL, MethodCase

WORKERS_OF_ALL_RUNS = 3
WORKERS_OF_SOME_RUNS = 2
NUMBERS_OF_WORKERS = (WORKERS_OF_ALL_RUNS, WORKERS_OF_SOME_RUNS)
ROUNDS = 2


def wide(channels, image_size, num_classes):
    """Makes a network with more than 100,000 parameters, whose operations use all threads."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * image_size**2, 1200), nn.ReLU(), nn.Linear(1200, 32),
        nn.Linear(32, num_classes),
    )  # fmt: skip


def cases(num_workers):
    """Returns the runs that so many workers share, by name; two workers skip those of methods as they are.

    The methods are one of each kind, and those whose server trains. More are not needed: workers divide the same
    work as forks, for which `tests/test_forks.py` holds the law for every method.
    """
    wide_network = {"backbone": f"{__file__}:wide", "precision": "float32", "lr": 0.01}
    fedavg = registry.find_method("fedavg")
    cases_by_name = {
        "clients together": MethodCase(fedavg, None, {"clients_per_chunk": "3", "validation": 0.3}),
        "a single client": MethodCase(fedavg, None, {**wide_network, "cohort_size": 1}),
    }
    for method in (*check.one_of_each_kind(), STATEFUL):
        overrides = QUICK_OPTIONS.get(method.name)
        if num_workers != WORKERS_OF_SOME_RUNS:
            cases_by_name[method.name] = MethodCase(method, overrides, {})
        if method.mixed_networks:
            mixed_networks = {"backbone": MIXED_NETWORKS}
            cases_by_name[f"{method.name}, mixed"] = MethodCase(method, overrides, mixed_networks)
    for name in ("fedavg", *QUICK_OPTIONS):
        method = registry.find_method(name)
        cases_by_name[f"{name}, wide"] = MethodCase(method, QUICK_OPTIONS.get(name), wide_network)
    return cases_by_name


def result_of(case):
    """Trains a case for two rounds; returns the hash of its parameters and the entries of its rounds, without times."""
    setup, fed = toy.federation(case.method, case.overrides, **{**FEW_STEPS, **case.run_options})
    entries = []
    with machine_settings(fed):
        state = laws.initial_state(setup, fed)
        for round in range(ROUNDS):
            state, entry = one_round(setup, fed, state, fed.cohort(round))
            entries.append(entry)
    params = all_params(setup.method, state, setup.config.num_clients)
    rounds = json.loads(json.dumps(without_times(entries)))  # as they are read from a file
    return {"params_sha256": params_hash(params), "rounds": rounds}


def results_by_name(num_workers=1):
    """Returns the results of all runs that so many workers share, by name."""
    return {name: result_of(case) for name, case in cases(num_workers).items()}


def main():
    """Does the runs as one of several workers, and writes the results if this is the first."""
    torch.set_num_threads(2)
    for num_workers in NUMBERS_OF_WORKERS:
        if int(os.environ["RANK"]) < num_workers:
            size = str(num_workers)
            os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            # The launcher has started all workers once. Under another count, `joined` does not find the addresses of
            # the group before this one, which the launcher's store still has.
            os.environ["TORCHELASTIC_RESTART_COUNT"] = size
            with joined() as group:
                results = results_by_name(num_workers)
            if group.is_first:
                Path(sys.argv[1], str(num_workers)).write_text(json.dumps(results))
