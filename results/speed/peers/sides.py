"""The sides that `peers.py` compares: each runs in a process of its own, which imports nothing of the others."""

import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def write_clients(folder: Path, options: dict[str, Any]) -> None:
    """Writes the clients' images as PFLlib's generators do, `dataset/train/K.npz` and so on, and the initial model."""
    from fedcli.runs import run as runs

    (setup,), _ = runs.plan(**options, out=folder)
    dataset, _, fed = runs.prepare(setup)
    for part, positions in (("train", fed.training), ("test", fed.testing)):
        (folder / "dataset" / part).mkdir(parents=True)
        for client, own in enumerate(positions):
            x, y = fed.transform(dataset.x_train[own]).numpy(), dataset.y_train[own].numpy()
            np.savez_compressed(folder / "dataset" / part / f"{client}.npz", data={"x": x, "y": y})
    torch.save(list(fed.initial_model()[0].values()), folder / "initial.pt")


def run_fedcli(folder: Path, options: dict[str, Any], rounds: int, what: str) -> dict[str, Any]:
    """Rounds by fedcli; the last one's end is not timed, since a run is evaluated there."""
    import fedcli

    ends, more = [], what not in ("accuracy", "difference")
    clock = SimpleNamespace(round=lambda entry: ends.append(time.perf_counter()))
    with tempfile.TemporaryDirectory() as out:
        run = fedcli.run(
            **options, rounds=rounds + more, eval_every=1 if what == "tested" else rounds + more, out=f"{out}/run",
            log=[clock],
        )  # fmt: skip
    clients = run.state.clients if hasattr(run.state, "clients") else {0: run.state}
    return {
        "seconds": np.diff(ends[:rounds]).tolist(),
        "accuracy": [run.record["summary"]["last"]],
        "parameters": [value for client in sorted(clients) for value in clients[client].params.values()],
        "versions": f"fedcli {run.record['versions']['fedcli']}, {run.record['commit'][:7]}",
    }


def run_pfllib(folder: Path, options: dict[str, Any], rounds: int, what: str, pfllib: str) -> dict[str, Any]:
    """Rounds by PFLlib's server and client classes."""
    (folder / "system").mkdir(exist_ok=True)
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
    args = SimpleNamespace(
        **{key: options[key] for key in ("num_clients", "local_epochs", "batch_size")}, algorithm=name, dataset=".",
        model=models.BaseHeadSplit(network, head), device="cpu", num_classes=10, global_rounds=rounds,
        local_learning_rate=options["lr"], join_ratio=options["cohort_size"] / options["num_clients"],
        mu=options.get("proximal_weight"), lamda=options.get("prototype_weight"),
        eval_gap=1 if what == "tested" else rounds, goal="", few_shot=0,
        learning_rate_decay=False, learning_rate_decay_gamma=1, random_join_ratio=False, client_drop_rate=0,
        train_slow_rate=0, send_slow_rate=0, time_select=False, time_threthold=10_000, top_cnt=0, auto_break=False,
        dlg_eval=False, dlg_gap=1, batch_num_per_client=0, num_new_clients=0, fine_tuning_epoch_new=0,
        save_folder_name="items",
    )  # fmt: skip
    server = server_class(args, 0)
    random.seed(options["seed"]), np.random.seed(options["seed"]), torch.manual_seed(options["seed"])
    if what == "difference":
        for client in server.clients:
            assert client.train_samples <= options["batch_size"], "not a full batch"
            client.batch_size = client.train_samples
    if what != "accuracy":
        server.global_rounds = rounds - 1  # it trains one more than it is told, after the last test
    if what not in ("accuracy", "tested"):
        server.evaluate = lambda: server.rs_test_acc.append(0)
    server.train()
    commit = subprocess.check_output(["git", "-C", pfllib, "rev-parse", "--short", "HEAD"], text=True).strip()
    trained = [client.model for client in server.clients] if name == "FedProto" else [server.global_model]
    return {
        "seconds": server.Budget[1:],
        "accuracy": server.rs_test_acc[-1:],
        "parameters": [value.detach() for model in trained for value in model.parameters()],
        "versions": f"PFLlib {commit}",
    }


def user_network() -> nn.Module:
    """The network as a user of PyTorch writes it."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


@cache
def user_data(folder: str, part: str) -> list[TensorDataset]:
    """Every client's images of a part, train or test, kept by the process."""
    files = sorted(Path(folder, "dataset", part).glob("*.npz"), key=lambda file: int(file.stem))
    clients = [np.load(file, allow_pickle=True)["data"].item() for file in files]
    return [TensorDataset(torch.from_numpy(client["x"]), torch.from_numpy(client["y"])) for client in clients]


def run_flower(
    folder: Path, options: dict[str, Any], rounds: int, what: str, resources: dict[str, float] | None
) -> dict[str, Any]:
    """Rounds by Flower's simulation; `resources` are those of an actor, None for the back end's own."""
    import flwr
    import ray
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, ends, trained = ClientApp(), ServerApp(), [], {}

    def received(message, context, part):
        """The model that was sent, and the client's images."""
        network = user_network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return network, user_data(str(folder), part)[context.node_config["partition-id"]]

    @client_app.train()
    def train(message, context):
        """Local training as a user of PyTorch writes it."""
        network, images = received(message, context, "train")
        size = min(options["batch_size"], len(images))
        loader = DataLoader(images, size, shuffle=True, drop_last=options["drop_last"])
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
        """Testing as a user of PyTorch writes it."""
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
        strategy = FedAvg(
            fraction_train=cohort / count, fraction_evaluate=float(what == "tested"), min_train_nodes=cohort,
            min_available_nodes=count,
        )  # fmt: skip
        last_step = "aggregate_evaluate" if what == "tested" else "aggregate_train"  # of a round
        aggregate = getattr(strategy, last_step)

        def timed(*replies):
            aggregated = aggregate(*replies)
            ends.append(time.perf_counter())
            return aggregated

        setattr(strategy, last_step, timed)
        state = dict(zip(user_network().state_dict(), torch.load(folder / "initial.pt"), strict=True))
        trained.update(strategy.start(grid, ArrayRecord(state), rounds).arrays.to_torch_state_dict())

    config = {"client_resources": resources} if resources else None
    run_simulation(server_app, client_app, options["num_clients"], backend_config=config)
    return {
        "seconds": np.diff(ends).tolist(),
        "parameters": list(trained.values()),
        "versions": f"flwr {flwr.__version__}, ray {ray.__version__}",
    }


def run_side(side: str, folder: str, options: str, rounds: str, what: str, pfllib: str) -> None:
    """Runs one side in this process, and prints what came of it."""
    given = Path(folder), json.loads(options), int(rounds), what
    if side == "fedcli":
        result = run_fedcli(*given)
    elif side == "pfllib":
        result = run_pfllib(*given, pfllib)
    else:
        result = run_flower(*given, {"num_cpus": 1, "num_gpus": 0.0} if side == "flower" else None)
    torch.save(result.pop("parameters"), Path(folder) / f"{side}.pt")
    print(json.dumps({**result, "torch": torch.__version__, "threads": os.cpu_count()}))
