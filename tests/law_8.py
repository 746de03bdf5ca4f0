"""Law 8: methods of each kind, run by a number of workers, and what their runs came to.

`python -c "from tests.law_8 import main; main()" FOLDER`, as the command of as many workers as the law has at most,
runs all of them by each number of workers, and writes what came of it into a file that is named after the number.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from fedcli import check, registry
from fedcli.runs.machine import machine_settings
from fedcli.runs.models import all_params
from fedcli.runs.record import params_hash
from fedcli.runs.rounds import one_round
from fedcli.runs.workers import joined
from tests import laws
from tests.networks import MIXED
from tests.toy_methods import QUICK, STATEFUL, MethodCase

WORKERS_OF_ALL_RUNS = 3
WORKERS_OF_SOME_RUNS = 2  # which leave out the plain ones
NUMBERS_OF_WORKERS = (WORKERS_OF_ALL_RUNS, WORKERS_OF_SOME_RUNS)
ROUNDS = 2
FEW_STEPS = {"batch_size": 8, "local_epochs": 1}


def wide(channels, image_size, num_classes):
    """A network above 100,000 parameters, so that its operations use all threads."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * image_size**2, 1200), nn.ReLU(), nn.Linear(1200, 32),
        nn.Linear(32, num_classes),
    )  # fmt: skip


def cases(num_workers):
    """The runs that so many workers share, by name; of two workers only what is no plain run.

    The methods are one of each kind, and those whose server trains: what workers divide is what forks do, for which
    `tests/test_forks.py` holds the law for every method.
    """
    wide_network = {"backbone": f"{__file__}:wide", "precision": "float32", "lr": 0.01}
    fedavg = registry.find_method("fedavg")
    runs = {
        "clients together": MethodCase(fedavg, None, {"clients_per_chunk": "3", "validation": 0.3}),
        "a single client": MethodCase(fedavg, None, {**wide_network, "cohort_size": 1}),
    }
    for method in (*check.one_of_each_kind(), STATEFUL):
        overrides = QUICK.get(method.name)
        if num_workers != WORKERS_OF_SOME_RUNS:
            runs[method.name] = MethodCase(method, overrides, {})
        if method.mixed_networks:
            runs[f"{method.name}, mixed"] = MethodCase(method, overrides, {"backbone": MIXED})
    for name in ("fedavg", *QUICK):
        runs[f"{name}, wide"] = MethodCase(registry.find_method(name), QUICK.get(name), wide_network)
    return runs


def run_to_its_end(method, overrides, options):
    """What a run comes to: the hash of its parameters, and what its record says of its rounds."""
    setup, fed = laws.federation(method, overrides, **{**FEW_STEPS, **options})
    entries = []
    with machine_settings(fed):
        state = laws.start(setup, fed)
        for round in range(ROUNDS):
            state, entry = one_round(setup, fed, state, fed.cohort(round))
            entries.append({key: value for key, value in entry.items() if key != "seconds"})
    params = all_params(setup.method, state, setup.config.num_clients)
    return [params_hash(params), json.loads(json.dumps(entries))]


def run_all(num_workers=1):
    """What all runs of so many workers come to, by name."""
    return {name: run_to_its_end(*case) for name, case in cases(num_workers).items()}


def main():
    torch.set_num_threads(2)
    for num_workers in NUMBERS_OF_WORKERS:
        if int(os.environ["RANK"]) < num_workers:
            size = str(num_workers)
            os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RESTART_COUNT": size}
            with joined() as group:
                results = run_all(num_workers)
            if group.rank == 0:
                Path(sys.argv[1], str(group.world_size)).write_text(json.dumps(results))
