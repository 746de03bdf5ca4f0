"""PFLlib: its server and client classes, from a checkout."""

import importlib
import os
import random
import subprocess
import sys
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from networks import make_network
from torch import nn

from sides.clients import load_initial_model
from sides.job import NUM_CLASSES, Job, Outcome

SERVERS = {"fedavg": "flcore.servers.serveravg:FedAvg", "fedproto": "flcore.servers.serverproto:FedProto"}

SWITCHED_OFF = dict.fromkeys(  # arguments of PFLlib's main program
    (
        "auto_break", "batch_num_per_client", "client_drop_rate", "dlg_eval", "dlg_gap", "few_shot",
        "fine_tuning_epoch_new", "learning_rate_decay", "learning_rate_decay_gamma", "num_new_clients",
        "random_join_ratio", "send_slow_rate", "time_select", "top_cnt", "train_slow_rate",
    ),
    0,
)  # fmt: skip


def run(job: Job) -> Outcome:
    """Runs rounds by PFLlib's server and client classes, and one more: it tests before it trains."""
    version = f"PFLlib {read_commit(job.pfllib_checkout)}"
    system = job.folder / "system"
    system.mkdir()
    os.chdir(system)  # it reads ../dataset
    sys.path.insert(0, f"{job.pfllib_checkout}/system")
    server = make_server(job)
    set_seeds(job.training.seed)
    server.train()
    return Outcome(server.Budget, None, version)


def make_server(job: Job) -> Any:
    """Makes PFLlib's server of a method, which makes its clients."""
    training = job.training
    server_class = resolve_name(SERVERS[training.method])
    arguments = SimpleNamespace(
        **SWITCHED_OFF,
        algorithm=server_class.__name__,
        dataset=".",
        model=make_model(job),
        device="cpu",
        num_classes=NUM_CLASSES,
        num_clients=training.num_clients,
        join_ratio=training.share_of_clients,
        global_rounds=job.rounds,
        eval_gap=job.rounds,
        local_epochs=training.local_epochs,
        batch_size=training.batch_size,
        local_learning_rate=training.lr,
        lamda=training.prototype_weight,
        goal="",
        save_folder_name="items",
        time_threthold=10_000,
    )
    return server_class(arguments, 0)


def make_model(job: Job) -> nn.Module:
    """Makes the initial model, divided into body and head as PFLlib's main program divides it."""
    models = importlib.import_module("flcore.trainmodel.models")
    backbone = job.training.backbone
    network = models.FedAvgCNN() if backbone == "cnn-mcmahan" else make_network(backbone)
    load_initial_model(network, job.folder)
    name_of_head, head = list(network.named_children())[-1]
    setattr(network, name_of_head, nn.Identity())
    return models.BaseHeadSplit(network, head)


def set_seeds(seed: int) -> None:
    """Sets the seed of every generator that PFLlib draws from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def read_commit(checkout: str) -> str:
    """Returns the short name of a checkout's commit."""
    name = subprocess.check_output(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], text=True)
    return name.strip()
