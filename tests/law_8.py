"""Law 8: every method, run by a number of workers, and what its run came to.

`python -c "from tests.law_8 import main; main()" FOLDER`, as the command of several workers, runs all of them and
writes what came of it into a file that is named after the number of workers.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from fedcli import registry
from fedcli.runs.prepare import machine_settings
from fedcli.runs.records import params_hash
from fedcli.runs.rounds import one_round
from fedcli.runs.run import all_params
from fedcli.runs.workers import joined
from tests import laws
from tests.toys import MIXED, QUICK, STATEFUL

COUNTS = 2, 3
ROUNDS = 2


def wide(channels, image_size, num_classes):
    """A network above 100,000 parameters, so that its operations use all threads."""
    hidden = nn.Linear(channels * image_size**2, 1200), nn.ReLU(), nn.Linear(1200, 32)
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, num_classes))


def cases():
    """Method, its options and those of the run, by the name of each run."""
    methods = {method.name: method for method in (*registry.methods().values(), STATEFUL)}
    large = {"backbone": f"{__file__}:wide", "precision": "float32", "lr": 0.01, "local_epochs": 1}
    mixed = {"backbone": MIXED}
    found = {name: (method, QUICK.get(name), {}) for name, method in methods.items()}
    for name, method in methods.items():
        if method.mixed_networks:
            found[f"{name}, mixed"] = method, QUICK.get(name), mixed
        if name in ("fedavg", *QUICK):
            found[f"{name}, wide"] = method, QUICK.get(name), large
    together = {"clients_per_chunk": "3", "validation": 0.3}
    found["clients together"] = methods["fedavg"], None, together
    found["a single client"] = methods["fedavg"], None, {**large, "cohort_size": 1}
    return found


def ending(method, overrides, options):
    """What a run comes to: its parameters, and what its record says of its rounds."""
    setup, fed = laws.federation(method, overrides, **options)
    with machine_settings(fed):
        state, entries = setup.method.init(fed, setup.options), []
        for number in range(ROUNDS):
            state, entry = one_round(setup, fed, state, fed.cohort(number))
            entries.append({key: value for key, value in entry.items() if key != "seconds"})
    return [params_hash(all_params(setup.method, state, setup.run.num_clients)), json.loads(json.dumps(entries))]


def endings():
    """What all runs come to, by name."""
    return {name: ending(*case) for name, case in cases().items()}


def main():
    torch.set_num_threads(2)
    with joined() as group:
        found = endings()
    if group.number == 0:
        Path(sys.argv[1], str(group.count)).write_text(json.dumps(found))
