"""Methods for tests: one whose clients keep state, registered ones with less work, and rounds of FedAvg."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fedcli.check import with_defaults
from fedcli.core.aggregate import weighted_mean
from fedcli.core.clients import Params
from fedcli.declarations import Method
from fedcli.papers.baselines import fedavg
from fedcli.registry import find_method


class ToyState(NamedTuple):
    """The state of a client."""

    params: Params


class MethodCase(NamedTuple):
    """A method with its options and those of its run."""

    method: Method
    overrides: dict | None
    run_options: dict


STATEFUL = find_method(str(Path(__file__).parent.parent / "docs/examples/my_method.py"))  # whose clients keep state
QUICK_OPTIONS = {  # by method, options that leave its server less work
    "fedgen": {"generator_steps": 2},
    "fedtgp": {"server_epochs": 2},
    "feddf": {"distillation_epochs": 1},
}


def make_quick(method):
    """Returns a method with less work for its server, and with terms that act from the first round."""
    options = dict(QUICK_OPTIONS.get(method.name, {}))
    if "start_round" in method.config.__dataclass_fields__:
        options["start_round"] = 0
    return replace(with_defaults(method, method.name, options), variants=method.variants)


def fedavg_round(state, cohort, fed, local_loss):
    """Runs a round of FedAvg with another local objective; returns the state after it and the terms."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, local_loss)
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    return fedavg.ServerState(params, buffers), terms
