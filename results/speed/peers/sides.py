"""The sides that `peers.py` compares: each runs in a process of its own, which imports nothing of the others."""

import importlib
import json
import os
import random
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def run_fedcli(folder: Path, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs rounds by fedcli."""
    import fedcli

    ends = []  # of the rounds
    clock = SimpleNamespace(round=lambda entry: ends.append(time.perf_counter()))
    run = fedcli.run(**options, rounds=rounds, eval_every=rounds, out=folder / "run", log=[clock])
    record = run.record
    *_, last_round = record["rounds"]
    commit = record["commit"][:7]
    return {
        "seconds": np.diff(ends).tolist(),
        "accuracy": last_round["test_accuracy"],
        "versions": f"fedcli {record['versions']['fedcli']}, {commit}",
    }


class Arguments(SimpleNamespace):
    """The arguments of PFLlib's main program; what is not given is 0, which switches it off."""

    def __getattr__(self, name: str) -> int:
        """Returns what is not given."""
        return 0


class PfllibServer(NamedTuple):
    """Where PFLlib's server class of a method is."""

    module: str
    name: str


PFLLIB_SERVERS = {
    "fedavg": PfllibServer("flcore.servers.serveravg", "FedAvg"),
    "fedproto": PfllibServer("flcore.servers.serverproto", "FedProto"),
}


def run_pfllib(folder: Path, options: dict[str, Any], rounds: int, checkout: str) -> dict[str, Any]:
    """Runs rounds by PFLlib's server and client classes, and one more: it tests before it trains."""
    (folder / "system").mkdir()
    os.chdir(folder / "system")  # it reads ../dataset
    sys.path.insert(0, f"{checkout}/system")
    server = PFLLIB_SERVERS[options["method"]]
    server_class = getattr(importlib.import_module(server.module), server.name)
    models = importlib.import_module("flcore.trainmodel.models")
    network = models.FedAvgCNN() if options["backbone"] == "cnn-mcmahan" else small_network(options["backbone"])
    load_initial(network, folder)
    *_, (name_of_head, head) = network.named_children()
    setattr(network, name_of_head, nn.Identity())  # as its main program divides it
    arguments = Arguments(
        algorithm=server.name,
        dataset=".",
        model=models.BaseHeadSplit(network, head),
        device="cpu",
        num_classes=10,
        num_clients=options["num_clients"],
        join_ratio=options["cohort_size"] / options["num_clients"],
        global_rounds=rounds,
        eval_gap=rounds,
        local_epochs=options["local_epochs"],
        batch_size=options["batch_size"],
        local_learning_rate=options["lr"],
        lamda=options.get("prototype_weight"),
        goal="",
        save_folder_name="items",
        time_threthold=10_000,
    )
    serving = server_class(arguments, 0)
    random.seed(options["seed"])
    np.random.seed(options["seed"])
    torch.manual_seed(options["seed"])
    serving.train()
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], text=True).strip()
    _, *seconds = serving.Budget  # in the first round it tests the initial model, too
    return {"seconds": seconds, "accuracy": None, "versions": f"PFLlib {commit}"}


def small_network(backbone: str) -> nn.Module:
    """Returns a network of `networks.py`, by its path and name."""
    import networks

    _, _, name = backbone.rpartition(":")
    return getattr(networks, name)()


def load_initial(network: nn.Module, folder: Path) -> None:
    """Gives a network the parameters of the initial model."""
    with torch.no_grad():
        for value, initial in zip(network.parameters(), torch.load(folder / "initial.pt"), strict=True):
            value.copy_(initial)


def user_network(backbone: str) -> nn.Module:
    """Returns the network as a user of PyTorch writes it."""
    if backbone != "cnn-mcmahan":
        return small_network(backbone)
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


@cache
def user_data(folder: str, split: str) -> list[TensorDataset]:
    """Returns every client's images for training or testing, which the process keeps."""
    files = sorted(Path(folder, "dataset", split).glob("*.npz"), key=lambda file: int(file.stem))
    clients = []
    for file in files:
        arrays = np.load(file, allow_pickle=True)["data"].item()
        x = torch.from_numpy(arrays["x"])
        y = torch.from_numpy(arrays["y"])
        clients.append(TensorDataset(x, y))
    return clients


def run_flower(folder: Path, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs rounds by Flower's simulation, with an actor for each core; it tests nothing."""
    import flwr
    import ray
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app = ClientApp()
    server_app = ServerApp()
    ends = []

    class TimedFedAvg(FedAvg):
        def aggregate_train(self, *replies):
            ends.append(time.perf_counter())
            return super().aggregate_train(*replies)

    @client_app.train()
    def train(message, context):
        """Trains the model that was sent, as a user of PyTorch writes it."""
        network = user_network(options["backbone"])
        images = user_data(str(folder), "train")[context.node_config["partition-id"]]
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loader = DataLoader(images, options["batch_size"], shuffle=True, drop_last=options["drop_last"])
        optimizer = torch.optim.SGD(network.parameters(), lr=options["lr"])
        criterion = nn.CrossEntropyLoss()
        network.train()
        for _ in range(options["local_epochs"]):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(network(x), y).backward()
                optimizer.step()
        content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(images)})}
        return Message(content=RecordDict(content), reply_to=message)

    @server_app.main()
    def serve(grid, context):
        cohort = options["cohort_size"]
        count = options["num_clients"]
        strategy = TimedFedAvg(
            fraction_train=cohort / count, fraction_evaluate=0.0, min_train_nodes=cohort, min_available_nodes=count
        )
        network = user_network(options["backbone"])
        load_initial(network, folder)
        strategy.start(grid, ArrayRecord(network.state_dict()), rounds)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, options["num_clients"], backend_config=resources)
    versions = f"flwr {flwr.__version__}, ray {ray.__version__}"
    return {"seconds": np.diff(ends).tolist(), "accuracy": None, "versions": versions}


def run_fluke(folder: Path, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs rounds by fluke's FedAVG; the last round's model is tested on the test images of all clients."""
    from importlib.metadata import version

    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.evaluation import ClassificationEval
    from fluke.server import Server

    environment = FlukeENV()
    environment.set_seed(options["seed"])
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_evaluator(ClassificationEval(eval_every=rounds, n_classes=10))
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=True)
    optimizer = OptimizerConfigurator(
        optimizer_cfg=DDict(name="SGD", lr=options["lr"]), scheduler_cfg=DDict(name="StepLR", step_size=1, gamma=1)
    )
    batch_size = options["batch_size"]
    clients = []
    for index, images in enumerate(user_data(str(folder), "train")):
        loader = FastDataLoader(*images.tensors, num_labels=10, batch_size=batch_size, shuffle=True)
        client = Client(index, loader, None, optimizer, nn.CrossEntropyLoss(), local_epochs=options["local_epochs"])
        clients.append(client)
    test_images = []
    test_labels = []
    for client_tests in user_data(str(folder), "test"):
        images, labels = client_tests.tensors
        test_images.append(images)
        test_labels.append(labels)
    test = FastDataLoader(torch.cat(test_images), torch.cat(test_labels), num_labels=10, batch_size=500)
    network = small_network(options["backbone"])
    load_initial(network, folder)
    server = Server(network, test, clients, weighted=True)
    names = DDict(client=DDict(), server=DDict(), model="network")
    algorithm = FedAVG(len(clients), None, names, clients=clients, server=server)
    ends = []
    accuracies = []

    class Clock:
        """Notes when a round ends, and the accuracy of a round that is tested."""

        def end_round(self, round):
            ends.append(time.perf_counter())

        def server_evaluation(self, round, eval_type, evals, **rest):
            accuracies.append(evals.get("accuracy"))

        def __getattr__(self, name):
            return lambda *arguments, **options: None

    algorithm.attach(Clock())
    algorithm.run(rounds, options["cohort_size"] / len(clients), finalize=False)
    seconds = np.diff(ends[:rounds]).tolist()
    accuracy = float(accuracies[rounds - 1])
    return {"seconds": seconds, "accuracy": accuracy, "versions": f"fluke-fl {version('fluke-fl')}"}


def run_side(side: str, folder: str, options: str, rounds: str, pfllib: str) -> None:
    """Runs one side in this process, and prints what came of it; Flower's actors import this module by its name."""
    run_from_checkout = partial(run_pfllib, checkout=pfllib)
    sides = {"fedcli": run_fedcli, "pfllib": run_from_checkout, "flower": run_flower, "fluke": run_fluke}
    run = sides[side]
    result = run(Path(folder), json.loads(options), int(rounds))
    print(json.dumps({**result, "torch": torch.__version__, "threads": os.cpu_count()}))
