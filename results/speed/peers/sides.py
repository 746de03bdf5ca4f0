"""The sides that `peers.py` compares: each runs in a process of its own, which imports nothing of the others."""

import importlib
import json
import os
import random
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def run_fedcli(folder: Path, options: dict[str, Any], rounds: int, what: str) -> dict[str, Any]:
    """Runs rounds by fedcli; unless each is tested, the last one alone is."""
    import fedcli

    ends = []
    clock = SimpleNamespace(round=lambda entry: ends.append(time.perf_counter()))
    eval_every = 1 if what == "tested" else rounds
    record = fedcli.run(**options, rounds=rounds, eval_every=eval_every, out=folder / "run", log=[clock]).record
    versions = f"fedcli {record['versions']['fedcli']}, {record['commit'][:7]}"
    return {"seconds": np.diff(ends).tolist(), "accuracy": record["summary"]["last"], "versions": versions}


class Arguments(SimpleNamespace):
    """The arguments of PFLlib's main program; what is not given is 0, which switches it off."""

    def __getattr__(self, name: str) -> int:
        """Returns what is not given."""
        return 0


def run_pfllib(folder: Path, options: dict[str, Any], rounds: int, what: str, pfllib: str) -> dict[str, Any]:
    """Runs rounds by PFLlib's server and client classes, and one more: it tests before it trains."""
    (folder / "system").mkdir()
    os.chdir(folder / "system")  # it reads ../dataset
    sys.path.insert(0, f"{pfllib}/system")
    models = importlib.import_module("flcore.trainmodel.models")
    name = {"fedavg": "FedAvg", "fedprox": "FedProx", "fedproto": "FedProto"}[options["method"]]
    server_class = getattr(importlib.import_module(f"flcore.servers.server{options['method'][3:]}"), name)
    network = models.FedAvgCNN()
    with torch.no_grad():
        for value, initial in zip(network.parameters(), torch.load(folder / "initial.pt"), strict=True):
            value.copy_(initial)
    head, network.fc = network.fc, nn.Identity()  # as its main program divides it
    sizes = {key: options[key] for key in ("num_clients", "local_epochs", "batch_size")}
    arguments = Arguments(
        **sizes, algorithm=name, dataset=".", model=models.BaseHeadSplit(network, head), device="cpu", num_classes=10,
        global_rounds=rounds, eval_gap=1 if what == "tested" else rounds, local_learning_rate=options["lr"],
        join_ratio=options["cohort_size"] / options["num_clients"], mu=options.get("proximal_weight"),
        lamda=options.get("prototype_weight"), goal="", save_folder_name="items", time_threthold=10_000,
    )  # fmt: skip
    server = server_class(arguments, 0)
    random.seed(options["seed"]), np.random.seed(options["seed"]), torch.manual_seed(options["seed"])
    server.train()
    commit = subprocess.check_output(["git", "-C", pfllib, "rev-parse", "--short", "HEAD"], text=True).strip()
    return {"seconds": server.Budget[1:], "accuracy": server.rs_test_acc[-1], "versions": f"PFLlib {commit}"}


def user_network() -> nn.Module:
    """Returns the network as a user of PyTorch writes it."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


@cache
def user_data(folder: str, part: str) -> list[TensorDataset]:
    """Returns every client's images of a part, train or test, which the process keeps."""
    files = sorted(Path(folder, "dataset", part).glob("*.npz"), key=lambda file: int(file.stem))
    clients = [np.load(file, allow_pickle=True)["data"].item() for file in files]
    return [TensorDataset(torch.from_numpy(client["x"]), torch.from_numpy(client["y"])) for client in clients]


def run_flower(folder: Path, options: dict[str, Any], rounds: int, what: str) -> dict[str, Any]:
    """Runs rounds by Flower's simulation, with an actor for each core."""
    import flwr
    import ray
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, ends = ClientApp(), ServerApp(), []

    class TimedFedAvg(FedAvg):
        def aggregate_train(self, *replies):
            ends.append(time.perf_counter())
            return super().aggregate_train(*replies)

    def received(message, context, part):
        """Returns the model that was sent, and the client's images."""
        network = user_network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return network, user_data(str(folder), part)[context.node_config["partition-id"]]

    @client_app.train()
    def train(message, context):
        """Trains as a user of PyTorch writes it."""
        network, images = received(message, context, "train")
        loader = DataLoader(images, options["batch_size"], shuffle=True, drop_last=options["drop_last"])
        optimizer, criterion = torch.optim.SGD(network.parameters(), lr=options["lr"]), nn.CrossEntropyLoss()
        network.train()
        for _ in range(options["local_epochs"]):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(network(x), y).backward()
                optimizer.step()
        content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(images)})}
        return Message(content=RecordDict(content), reply_to=message)

    @client_app.evaluate()
    def evaluate(message, context):
        """Tests as a user of PyTorch writes it."""
        network, images = received(message, context, "test")
        network.eval()
        with torch.no_grad():
            loader = DataLoader(images, options["batch_size"])
            correct = sum(int((network(x).argmax(1) == y).sum()) for x, y in loader)
        metrics = MetricRecord({"accuracy": correct / len(images), "num-examples": len(images)})
        return Message(content=RecordDict({"metrics": metrics}), reply_to=message)

    @server_app.main()
    def serve(grid, context):
        cohort, count = options["cohort_size"], options["num_clients"]
        strategy = TimedFedAvg(
            fraction_train=cohort / count, fraction_evaluate=float(what == "tested"), min_train_nodes=cohort,
            min_available_nodes=count,
        )  # fmt: skip
        state = dict(zip(user_network().state_dict(), torch.load(folder / "initial.pt"), strict=True))
        strategy.start(grid, ArrayRecord(state), rounds)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, options["num_clients"], backend_config=resources)
    return {"seconds": np.diff(ends).tolist(), "versions": f"flwr {flwr.__version__}, ray {ray.__version__}"}


def run_side(side: str, folder: str, options: str, rounds: str, what: str, *pfllib: str) -> None:
    """Runs one side in this process, and prints what came of it."""
    result = globals()[f"run_{side}"](Path(folder), json.loads(options), int(rounds), what, *pfllib)
    print(json.dumps({**result, "torch": torch.__version__, "threads": os.cpu_count()}))
