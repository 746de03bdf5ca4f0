"""Numbers, minibatches and clients for the tests, and methods with a planted defect."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import fedcli.check
from fedcli.check import federation, toy_dataset, with_defaults
from fedcli.core import backbones
from fedcli.core.aggregate import weighted_mean
from fedcli.core.batches import Batch
from fedcli.core.body_and_head import Backbone
from fedcli.core.clients import Params
from fedcli.core.layers import KeyedDropout, MaskedBatchNorm2d
from fedcli.papers.baselines import fedavg
from fedcli.registry import find_method

TWO_NETWORKS = {"backbone": "cnn-small,cnn-mcmahan", "data": toy_dataset(size=16)}


def randn(*shape, seed=0):
    """Normal numbers in float64, the same in every call."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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


class ClientState(NamedTuple):
    params: Params


STATEFUL = find_method(str(Path(__file__).parent.parent / "docs/examples/my_method.py"))  # whose clients keep state


def narrow(channels, image_size, num_classes):
    """An architecture whose features are as wide as those of `narrower`."""
    num_pixels = channels * image_size**2
    return nn.Sequential(
        nn.Flatten(), nn.Linear(num_pixels, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, num_classes)
    )


def narrower(channels, image_size, num_classes):
    num_pixels = channels * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, 16), nn.ReLU(), nn.Linear(16, num_classes))


QUICK = {"fedgen": {"generator_steps": 2}, "fedtgp": {"server_epochs": 2}, "feddf": {"distillation_epochs": 1}}


def quick(method):
    """The method with less work for its server, and terms that act from the first round."""
    options = dict(QUICK.get(method.name, {}))
    if "start_round" in method.config.__dataclass_fields__:
        options["start_round"] = 0
    return replace(with_defaults(method, method.name, options), variants=method.variants)


MIXED = f"{__file__}:narrow,{__file__}:narrower"
TOY_FILES = (__file__, fedcli.check.__file__)  # with networks that are named as a user's own are


class ToysCheckedOnce:
    """`backbones.find` that checks a network of the toy files once for each seed and shape, and then copies it.

    The check takes most of the time of a law; networks of other files are checked each time, as users' are.
    """

    def __init__(self, find):
        self.find = find
        self.checked = {}

    def __call__(self, name):
        recipe = self.find(name)
        path, _, _ = name.rpartition(":")
        if path not in TOY_FILES:
            return recipe

        def make(*shape):
            key = (name, shape, torch.initial_seed())
            if key not in self.checked:
                self.checked[key] = recipe.make(*shape)
            return copy.deepcopy(self.checked[key])

        return recipe._replace(make=make)


def forgets(state, cohort, fed, config):
    """Defect: the clients' states are thrown away after the round."""
    state, terms = STATEFUL.run_round(state, cohort, fed, config)
    return state._replace(clients={}), terms


def never_stores(state, cohort, fed, config):
    """Defect: what is stored for a client is what it had first, every time."""
    after, terms = STATEFUL.run_round(state, cohort, fed, config)
    return after._replace(clients={**after.clients, **state.clients}), terms


def never_reads(state, cohort, fed, config):
    """Defect: the stored state is not used."""
    after, terms = STATEFUL.run_round(state._replace(clients={}), cohort, fed, config)
    return after._replace(clients={**state.clients, **after.clients}), terms


def touches_others(state, cohort, fed, config):
    """Defect: clients that sit out are changed."""
    after, terms = STATEFUL.run_round(state, cohort, fed, config)
    changed = {client: kept._replace(means=kept.means + 1) for client, kept in after.clients.items()}
    return after._replace(clients=changed), terms


def fedavg_round(state, cohort, fed, local_loss):
    """A round of FedAvg with another local objective."""
    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, local_loss)
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    return fedavg.ServerState(params, buffers), terms


def skips_buffers(state, cohort, fed, config):
    """Defect: the buffers are not averaged."""
    after, terms = fedavg.run_round(state, cohort, fed, config)
    return after._replace(buffers=state.buffers), terms


def drops_local_buffers(state, cohort, fed, config):
    """Defect: the local objective returns the buffers it was given."""
    task = fedavg.make_local_loss(fed.network)

    def local_loss(params, buffers, batch, context):
        loss, aux = task(params, buffers, batch, context)
        return loss, aux._replace(buffers=buffers)

    return fedavg_round(state, cohort, fed, local_loss)


def ignores_mask(state, cohort, fed, config):
    """Defect: padding counts in the loss."""
    task = fedavg.make_local_loss(fed.network)

    def local_loss(params, buffers, batch, context):
        return task(params, buffers, batch._replace(mask=None), context)

    return fedavg_round(state, cohort, fed, local_loss)


def first_counts_most(state, cohort, fed, config):
    """Defect: the clients' weights go by their place in the cohort."""
    weights = torch.arange(len(cohort.client_ids), 0, -1, dtype=fed.dtype)
    return fedavg.run_round(state, cohort._replace(weights=weights), fed, config)


def divides_by_absent(state, cohort, fed, config):
    """Defect: the class means of a client that lacks a class are 0 / 0, and they reach the model."""
    means, counts = fed.class_means(fed.broadcast(state.params, state.buffers, cohort), cohort)
    nothing = 0 * (means / (counts > 0)[..., None]).sum()
    after, terms = fedavg.run_round(state, cohort, fed, config)
    return after._replace(params={name: value + nothing for name, value in after.params.items()}), terms


class CountsOutsideOfState:
    """Defect: the rounds are counted outside of the state, and the count matters."""

    def __init__(self):
        self.rounds = {}

    def __call__(self, state, cohort, fed, config):
        self.rounds[fed] = self.rounds.get(fed, 0) + 1
        state, terms = fedavg.run_round(state, cohort, fed, config)
        params = {name: value * (1 + 0.1 * self.rounds[fed]) for name, value in state.params.items()}
        return state._replace(params=params), terms


def first_round(**run):
    """A federation under FedAvg, its first cohort, the clients that have received the model, and their objective."""
    _, fed = federation("fedavg", **run)
    cohort = fed.cohort(0)
    return fed, cohort, fed.broadcast(*fed.initial_model(), cohort), fedavg.make_local_loss(fed.network)


def use_tiny_network(monkeypatch):
    """Every network that is built from now on has batch normalisation and two layers of dropout, and 8 x 8 images."""

    def build(name, channels, image_size, num_classes, seed):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            # of one layer after the other, whose weights are drawn in this order
            last_layers = (nn.Linear(4 * 36, 6), nn.ReLU(), KeyedDropout(0.3))
            first_layers = (nn.Conv2d(1, 4, 3), MaskedBatchNorm2d(4), KeyedDropout(0.3), nn.Flatten())
            body = nn.Sequential(*first_layers, *last_layers)
            return Backbone(body, 6, num_classes, colour=False)

    monkeypatch.setattr(backbones, "build", build)
