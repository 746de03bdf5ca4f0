"""Prepares a step, a public phase or a first round, for tests of what these do; limits the memory of steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from fedcli.core.batches import Batch
from fedcli.core.clients import Client
from fedcli.core.federation import Cohort, Federation
from fedcli.core.stacked import Stack
from fedcli.core.trees import leaves
from fedcli.papers.baselines import fedavg
from fedcli.runs.resolve import Setup
from fedcli.toy import federation
from tests.tensors import randn


def minibatch(fed, size):
    """Returns the first `size` training examples as a minibatch without padding."""
    x, y = fed.engine.gather(np.arange(size))
    return Batch(x, y, None, torch.tensor(True), torch.tensor(1), torch.tensor(0.1))


class PublicPhaseStart(NamedTuple):
    """A cohort before its public phase."""

    setup: Setup
    fed: Federation
    cohort: Cohort
    states: dict[int, Any]  # of each client: the first model of its architecture, moved by small random numbers


def prepare_public_phase(method, overrides=None, **run_options):
    """Sets up a method on toy data, whose clients have different models already; `run_options` are those of the run."""
    setup, fed = federation(method, overrides, **run_options)
    states = {}
    for client in range(fed.num_clients):
        params, buffers = fed.initial_model(fed.networks[fed.architecture[client]])
        moved = {name: value + 0.05 * randn(*value.shape, seed=client) for name, value in params.items()}
        states[client] = setup.method.module.ClientState(moved, buffers)
    return PublicPhaseStart(setup, fed, fed.cohort(0), states)


class FirstRound(NamedTuple):
    """A cohort before the local training of a first round of FedAvg."""

    fed: Federation
    cohort: Cohort
    start: Client  # the clients of the cohort, which have received the model
    loss: Callable  # their local objective


def prepare_first_round(**run_options):
    """Sets up FedAvg on toy data with these options of the run."""
    _, fed = federation("fedavg", **run_options)
    cohort = fed.cohort(0)
    start = fed.broadcast(*fed.initial_model(), cohort)
    return FirstRound(fed, cohort, start, fedavg.make_local_loss(fed.network))


def limit_memory(monkeypatch, num_clients):
    """Makes a second step of more than so many clients not fit into memory.

    Returns a list to which each step that is tried adds how many clients it has.
    """
    take_step = Stack.take_step
    tried = []

    def take_step_that_fits(self, padded, updates):
        first_leaf, *_ = leaves(self.clients)
        num_together = len(first_leaf)
        tried.append(num_together)
        is_second = tried[-2:] == [num_together, num_together]
        if num_together > num_clients and is_second:
            raise torch.OutOfMemoryError("no memory")
        take_step(self, padded, updates)

    monkeypatch.setattr(Stack, "take_step", take_step_that_fits)
    return tried
