"""What a step, a public phase and a round begin with."""

import numpy as np
import torch

from fedcli.core.batches import Batch
from fedcli.papers.baselines import fedavg
from fedcli.toy import federation
from tests.tensors import randn


def minibatch(fed, size):
    """The first examples as a minibatch without padding."""
    x, y = fed.engine.gather(np.arange(size))
    return Batch(x, y, None, torch.tensor(True), torch.tensor(1), torch.tensor(0.1))


def with_different_models(method, overrides=None, **run):
    """A setup, its federation, the first cohort, and a state of each client: its first model, moved its own way."""
    setup, fed = federation(method, overrides, **run)
    states = {}
    for client in range(fed.num_clients):
        params, buffers = fed.initial_model(fed.networks[fed.architecture[client]])
        moved = {name: value + 0.05 * randn(*value.shape, seed=client) for name, value in params.items()}
        states[client] = setup.method.module.ClientState(moved, buffers)
    return setup, fed, fed.cohort(0), states


def first_round(**run):
    """A federation under FedAvg, its first cohort, the clients that have received the model, and their objective."""
    _, fed = federation("fedavg", **run)
    cohort = fed.cohort(0)
    return fed, cohort, fed.broadcast(*fed.initial_model(), cohort), fedavg.make_local_loss(fed.network)
