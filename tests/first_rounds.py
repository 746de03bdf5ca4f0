"""What a step, a public phase and a round begin with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from fedcli.core.batches import Batch
from fedcli.core.clients import Client
from fedcli.core.federation import Cohort, Federation
from fedcli.papers.baselines import fedavg
from fedcli.runs.resolve import Setup
from fedcli.toy import federation
from tests.tensors import randn


def minibatch(fed, size):
    """The first examples as a minibatch without padding."""
    x, y = fed.engine.gather(np.arange(size))
    return Batch(x, y, None, torch.tensor(True), torch.tensor(1), torch.tensor(0.1))


class DifferentModels(NamedTuple):
    """What a public phase begins with."""

    setup: Setup
    fed: Federation
    cohort: Cohort
    states: dict[int, Any]  # of each client: its first model, moved its own way


def with_different_models(method, overrides=None, **run):
    setup, fed = federation(method, overrides, **run)
    states = {}
    for client in range(fed.num_clients):
        params, buffers = fed.initial_model(fed.networks[fed.architecture[client]])
        moved = {name: value + 0.05 * randn(*value.shape, seed=client) for name, value in params.items()}
        states[client] = setup.method.module.ClientState(moved, buffers)
    return DifferentModels(setup, fed, fed.cohort(0), states)


class FirstRound(NamedTuple):
    """What the local training of a first round of FedAvg begins with."""

    fed: Federation
    cohort: Cohort
    start: Client  # the cohort's clients, which have received the model
    loss: Callable  # their objective


def first_round(**run):
    _, fed = federation("fedavg", **run)
    cohort = fed.cohort(0)
    start = fed.broadcast(*fed.initial_model(), cohort)
    return FirstRound(fed, cohort, start, fedavg.make_local_loss(fed.network))
