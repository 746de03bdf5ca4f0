"""The sides that `peers.py` compares: each runs in a process of its own, which imports nothing of the other."""

import importlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn


def run_fedcli(folder: Path, options: dict[str, Any], rounds: int, pfllib: str) -> dict[str, Any]:
    """Runs rounds by fedcli."""
    import fedcli

    ends = []
    clock = SimpleNamespace(round=lambda entry: ends.append(time.perf_counter()))
    record = fedcli.run(**options, rounds=rounds, eval_every=rounds, out=folder / "run", log=[clock]).record
    versions = f"fedcli {record['versions']['fedcli']}, {record['commit'][:7]}"
    return {"seconds": np.diff(ends).tolist(), "versions": versions}


class Arguments(SimpleNamespace):
    """The arguments of PFLlib's main program; what is not given is 0, which switches it off."""

    def __getattr__(self, name: str) -> int:
        """Returns what is not given."""
        return 0


def run_pfllib(folder: Path, options: dict[str, Any], rounds: int, pfllib: str) -> dict[str, Any]:
    """Runs rounds by PFLlib's server and client classes, and one more: it tests before it trains."""
    (folder / "system").mkdir()
    os.chdir(folder / "system")  # it reads ../dataset
    sys.path.insert(0, f"{pfllib}/system")
    name = {"fedavg": "FedAvg", "fedproto": "FedProto"}[options["method"]]
    server_class = getattr(importlib.import_module(f"flcore.servers.server{options['method'][3:]}"), name)
    models = importlib.import_module("flcore.trainmodel.models")
    network = models.FedAvgCNN()
    with torch.no_grad():
        for value, initial in zip(network.parameters(), torch.load(folder / "initial.pt"), strict=True):
            value.copy_(initial)
    head, network.fc = network.fc, nn.Identity()  # as its main program divides it
    sizes = {key: options[key] for key in ("num_clients", "local_epochs", "batch_size")}
    arguments = Arguments(
        **sizes, algorithm=name, dataset=".", model=models.BaseHeadSplit(network, head), device="cpu", num_classes=10,
        global_rounds=rounds, eval_gap=rounds, local_learning_rate=options["lr"],
        join_ratio=options["cohort_size"] / options["num_clients"], lamda=options.get("prototype_weight"), goal="",
        save_folder_name="items", time_threthold=10_000,
    )  # fmt: skip
    server = server_class(arguments, 0)
    random.seed(options["seed"]), np.random.seed(options["seed"]), torch.manual_seed(options["seed"])
    server.train()
    commit = subprocess.check_output(["git", "-C", pfllib, "rev-parse", "--short", "HEAD"], text=True).strip()
    return {"seconds": server.Budget[1:], "versions": f"PFLlib {commit}"}


def run_side(side: str, folder: str, options: str, rounds: str, pfllib: str) -> None:
    """Runs one side in this process, and prints what came of it."""
    run = {"fedcli": run_fedcli, "pfllib": run_pfllib}[side]
    result = run(Path(folder), json.loads(options), int(rounds), pfllib)
    print(json.dumps({**result, "torch": torch.__version__, "threads": os.cpu_count()}))
