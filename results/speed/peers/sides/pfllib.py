"""PFLlib: its server and client classes, from a checkout."""

import importlib
import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from sides.clients import load_initial, own_network
from sides.job import Job, Outcome


class ServerClass(NamedTuple):
    """Where PFLlib's server class of a method is."""

    module: str
    name: str


SERVERS = {
    "fedavg": ServerClass("flcore.servers.serveravg", "FedAvg"),
    "fedproto": ServerClass("flcore.servers.serverproto", "FedProto"),
}


class Arguments(SimpleNamespace):
    """The arguments of PFLlib's main program; what is not given is 0, which switches it off."""

    def __getattr__(self, name: str) -> int:
        """Returns what is not given."""
        return 0


def run(job: Job) -> Outcome:
    """Runs rounds by PFLlib's server and client classes, and one more: it tests before it trains."""
    system = job.path / "system"
    system.mkdir()
    os.chdir(system)  # it reads ../dataset
    sys.path.insert(0, f"{job.pfllib}/system")
    server = make_server(job)
    set_seeds(job.options["seed"])
    server.train()
    _, *seconds = server.Budget  # in the first round it tests the initial model, too
    return Outcome(seconds, None, f"PFLlib {commit_of(job.pfllib)}")


def make_server(job: Job) -> Any:
    """Makes PFLlib's server of a method, which makes its clients."""
    options = job.options
    server = SERVERS[options["method"]]
    server_class = getattr(importlib.import_module(server.module), server.name)
    arguments = Arguments(
        algorithm=server.name,
        dataset=".",
        model=make_model(job),
        device="cpu",
        num_classes=10,
        num_clients=options["num_clients"],
        join_ratio=job.share_of_clients,
        global_rounds=job.rounds,
        eval_gap=job.rounds,
        local_epochs=options["local_epochs"],
        batch_size=options["batch_size"],
        local_learning_rate=options["lr"],
        lamda=options.get("prototype_weight"),
        goal="",
        save_folder_name="items",
        time_threthold=10_000,
    )
    return server_class(arguments, 0)


def make_model(job: Job) -> nn.Module:
    """Makes the initial model, divided into body and head as PFLlib's main program divides it."""
    models = importlib.import_module("flcore.trainmodel.models")
    backbone = job.options["backbone"]
    network = models.FedAvgCNN() if backbone == "cnn-mcmahan" else own_network(backbone)
    load_initial(network, job.folder)
    *_, (name_of_head, head) = network.named_children()
    setattr(network, name_of_head, nn.Identity())
    return models.BaseHeadSplit(network, head)


def set_seeds(seed: int) -> None:
    """Sets the seed of every generator that PFLlib draws from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def commit_of(checkout: str) -> str:
    """Returns the short name of a checkout's commit."""
    name = subprocess.check_output(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], text=True)
    return name.strip()
