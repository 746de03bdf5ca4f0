"""The same rounds in PFLlib, in Flower and here: what they take, and that they come to the same.

    python peers.py seconds w1 --pfllib CHECKOUT --python PYTHON     rounds of each side in turn; also w2, proto
    python peers.py tested w1 ...                                    the same with each side's own testing after each
    python peers.py memory w1 ...                                    the most that each side's processes hold together
    python peers.py accuracy fedavg --turns 0,1,2 ...                after 30 rounds, a seed a turn; fedprox, fedproto
    python peers.py difference fedavg ...                            of parameters after three rounds of full batches
    python peers.py page                                             README.md and the figure from peers.csv

Every call but the last appends to `peers.csv`. `--pfllib` is a checkout of TsingZ0/PFLlib; `--python` is the Python of
an environment with the same torch, flwr==1.41.0 and ray for Flower, scikit-learn, matplotlib and h5py for PFLlib.

Each side runs in a process of its own, which imports nothing of the others. All train the same images of the same
clients from the same initial model with plain SGD; a batch that is not full is left out, as in PFLlib. fedcli divides
the images, and they are written normalised into files in PFLlib's form, which Flower's app reads as well.

    fedcli    `fedcli.run`; a round is timed from the end of the one before
    pfllib    its servers' own `train`, which times each round itself; only their evaluation is taken out, where none is
              measured
    flower    its simulation on Ray: a client app with a plain PyTorch loop, the strategy FedAvg; timed as in fedcli.
              `flower` has an actor for each core, with one thread; `flower-default` is the back end's own
"""

import argparse
import csv
import importlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median, stdev
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent
CSV, PAGE = HERE / "peers.csv", HERE / "README.md"
COLUMNS = ("what", "workload", "side", "turn", "value", "versions", "torch", "threads", "processor")
SIDES = {"fedcli": "fedcli", "pfllib": "PFLlib", "flower": "Flower", "flower-default": "Flower, defaults"}

TRAINING = {
    "protocol": "fedsa:cifar10-silo", "dataset": "fmnist", "backbone": "cnn-mcmahan", "optimizer": "sgd", "lr": 0.01,
    "momentum": 0.0, "drop_last": True,
}  # fmt: skip
# 700 of all 70,000 images each, of which 100 are for testing
HUNDRED = {**TRAINING, "partition": "iid", "num_clients": 100, "local_test": 1 / 7}
SPEED = {
    "w1": {**HUNDRED, "method": "fedavg", "cohort_size": 10, "local_epochs": 5, "batch_size": 64},
    "w2": {**HUNDRED, "method": "fedavg", "cohort_size": 20, "local_epochs": 1, "batch_size": 10},
}
TIMED = ("seconds", "tested")
ON_SPEED = (*TIMED, "memory")  # what is measured on these workloads
METHODS = {
    "fedavg": {"method": "fedavg"},
    "fedprox": {"method": "fedprox", "proximal_weight": 0.1},
    "fedproto": {"method": "fedproto", "prototype_weight": 1.0, "gathered_epochs": "all"},
}
SPEED["proto"] = {**SPEED["w2"], **METHODS["fedproto"]}
TWENTY = {
    **TRAINING, "partition": "dirichlet:0.1:min=20", "num_clients": 20, "cohort_size": 20, "local_test": 0.25,
    "train_examples": 2000, "lr": 0.02, "local_epochs": 1, "batch_size": 10,
}  # fmt: skip
FULL_BATCHES = {"local_epochs": 2, "batch_size": 400, "drop_last": False, "lr": 0.1}
ROUNDS = 30


# What is measured: each in a process of its own, given a folder with the clients' files


def write_clients(folder: Path, options: dict) -> None:
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


def run_fedcli(folder: Path, options: dict, rounds: int, what: str, pfllib: str) -> dict:
    """Rounds by fedcli; the last one's end is not timed, since a run is evaluated there."""
    import fedcli
    from fedcli.runs.run import Listener

    class Clock(Listener):
        ends: list[float] = []  # noqa: RUF012

        def round(self, entry: dict) -> None:
            self.ends.append(time.perf_counter())

    clock, more = Clock(), what in ON_SPEED
    with tempfile.TemporaryDirectory() as out:
        run = fedcli.run(
            **options, rounds=rounds + more, eval_every=1 if what == "tested" else rounds + more,
            out=Path(out) / "run", progress=clock,
        )  # fmt: skip
    own = run.state.clients if hasattr(run.state, "clients") else {0: run.state}
    return {
        "seconds": np.diff(clock.ends[:rounds]).tolist(),
        "accuracy": run.record["summary"]["last"],
        "parameters": [value for client in sorted(own) for value in own[client].params.values()],
        "versions": f"fedcli {run.record['versions']['fedcli']}, {run.record['commit'][:7]}",
    }


def run_pfllib(folder: Path, options: dict, rounds: int, what: str, pfllib: str) -> dict:
    """Rounds by PFLlib's server and client classes."""
    (folder / "system").mkdir(exist_ok=True)
    os.chdir(folder / "system")  # it reads ../dataset
    sys.path.insert(0, f"{pfllib}/system")
    models = importlib.import_module("flcore.trainmodel.models")
    name = {"fedavg": "FedAvg", "fedprox": "FedProx", "fedproto": "FedProto"}[options["method"]]
    server_class = getattr(importlib.import_module("flcore.servers.server" + name.removeprefix("Fed").lower()), name)
    network = models.FedAvgCNN()
    with torch.no_grad():
        for value, given in zip(network.parameters(), torch.load(folder / "initial.pt"), strict=True):
            value.copy_(given)
    head, network.fc = network.fc, nn.Identity()  # as its main program divides it
    shape = {key: options[key] for key in ("num_clients", "local_epochs", "batch_size")}
    share = options["cohort_size"] / options["num_clients"]
    args = SimpleNamespace(
        **shape, algorithm=name, dataset=".", model=models.BaseHeadSplit(network, head), device="cpu", num_classes=10,
        global_rounds=rounds, local_learning_rate=options["lr"], join_ratio=share,
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
    trained = [client.model for client in server.clients] if name == "FedProto" else [server.global_model]
    return {
        "seconds": server.Budget[1:],
        "accuracy": server.rs_test_acc[-1],
        "parameters": [value.detach() for model in trained for value in model.parameters()],
        "versions": f"PFLlib {_output('git', '-C', pfllib, 'rev-parse', '--short', 'HEAD')}",
    }


def user_network() -> nn.Module:
    """The network as a user of PyTorch writes it."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


@cache
def user_data(folder: str, part: str) -> list[torch.utils.data.TensorDataset]:
    """Every client's images of a part, train or test, kept by the process."""
    files = Path(folder, "dataset", part).glob("*.npz")
    clients = [np.load(f, allow_pickle=True)["data"].item() for f in sorted(files, key=lambda file: int(file.stem))]
    return [torch.utils.data.TensorDataset(*map(torch.from_numpy, (own["x"], own["y"]))) for own in clients]


def user_training(state: dict, client: int, folder: str, options: dict) -> tuple[dict, int]:
    """Local training as a user of PyTorch writes it: the new `state_dict` and the number of images."""
    images, network = user_data(folder, "train")[client], user_network()
    network.load_state_dict(state)
    loader = torch.utils.data.DataLoader(
        images, min(options["batch_size"], len(images)), shuffle=True, drop_last=options["drop_last"]
    )
    optimizer, criterion = torch.optim.SGD(network.parameters(), lr=options["lr"]), nn.CrossEntropyLoss()
    network.train()
    for _ in range(options["local_epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(network(x), y).backward()
            optimizer.step()
    return network.state_dict(), len(images)


def user_testing(state: dict, client: int, folder: str, options: dict) -> tuple[int, int]:
    """Testing as a user of PyTorch writes it: how many images are classified correctly, and their number."""
    images, network = user_data(folder, "test")[client], user_network()
    network.load_state_dict(state)
    network.eval()
    with torch.no_grad():
        loader = torch.utils.data.DataLoader(images, options["batch_size"])
        correct = sum(int((network(x).argmax(1) == y).sum()) for x, y in loader)
    return correct, len(images)


def run_flower(folder: Path, options: dict, rounds: int, what: str, pfllib: str, resources: dict | None = None) -> dict:
    """Rounds by Flower's simulation."""
    import flwr
    import ray
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, ends, trained = ClientApp(), ServerApp(), [], {}

    @client_app.train()
    def train(message, context):
        received = message.content["arrays"].to_torch_state_dict()
        state, count = user_training(received, context.node_config["partition-id"], str(folder), options)
        content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": count})}
        return Message(content=RecordDict(content), reply_to=message)

    @client_app.evaluate()
    def evaluate(message, context):
        received = message.content["arrays"].to_torch_state_dict()
        correct, count = user_testing(received, context.node_config["partition-id"], str(folder), options)
        metrics = MetricRecord({"accuracy": correct / count, "num-examples": count})
        return Message(content=RecordDict({"metrics": metrics}), reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, *given):
            aggregated = super().aggregate_train(*given)
            if what != "tested":
                ends.append(time.perf_counter())
            return aggregated

        def aggregate_evaluate(self, *given):
            aggregated = super().aggregate_evaluate(*given)
            if what == "tested":
                ends.append(time.perf_counter())
            return aggregated

    @server_app.main()
    def serve(grid, context):
        network, cohort, count = user_network(), options["cohort_size"], options["num_clients"]
        state = dict(zip(network.state_dict(), torch.load(folder / "initial.pt"), strict=True))
        strategy = Timed(
            fraction_train=cohort / count, fraction_evaluate=float(what == "tested"), min_train_nodes=cohort,
            min_available_nodes=count,
        )  # fmt: skip
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
    given = Path(folder), json.loads(options), int(rounds), what, pfllib
    a_core_each = partial(run_flower, resources={"num_cpus": 1, "num_gpus": 0.0})
    run = {"fedcli": run_fedcli, "pfllib": run_pfllib, "flower": a_core_each, "flower-default": run_flower}[side]
    result = run(*given)
    torch.save(result.pop("parameters"), Path(folder) / f"{side}.pt")
    print(json.dumps({**result, "torch": torch.__version__, "threads": os.cpu_count()}))


# The runs, one after the other


def measure(call: argparse.Namespace) -> None:
    """Runs the sides in turn and appends what they say to the CSV."""
    what, workload = call.what, call.workload
    rounds = {"accuracy": ROUNDS, "difference": 3}.get(what, 1 + call.rounds)  # the first warms up
    for turn in map(int, call.turns.split(",")):
        if what in ON_SPEED:
            options = {**SPEED[workload], "seed": 0}
        else:
            options = {**TWENTY, **METHODS[workload], "seed": turn, "partition_seed": turn}
            options |= FULL_BATCHES if what == "difference" else {}
        divided = {key: options[key] for key in ("partition", "num_clients", "seed")}
        folder = call.work / "-".join(map(str, divided.values())).replace(":", "-")
        if not folder.exists():
            write_clients(folder, options)
        for side in call.sides.split(","):
            result = run_process(side, folder, options, rounds, call)
            if what in TIMED:
                values = result["seconds"]
            elif what == "difference":
                values = differences(folder, side)
            else:
                values = [result["mebibytes" if what == "memory" else what]]
            append(what, workload, side, turn, values, result)
            print(what, workload, side, turn, values, flush=True)


def run_process(side: str, folder: Path, options: dict, rounds: int, call: argparse.Namespace) -> dict:
    """One side in a new process; with `memory`, the peak of all processes of it in `mebibytes`."""
    python = sys.executable if side == "fedcli" else call.python
    given = (side, str(folder), json.dumps(options), str(rounds), call.what, str(call.pfllib))
    env = {**os.environ, "PYTHONPATH": str(HERE), "FLWR_TELEMETRY_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        command = [python, "-c", "import sys, peers; peers.run_side(*sys.argv[1:])", *given]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=errors)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, mebibytes(process.pid)) if call.what == "memory" else 0.0
            time.sleep(0.3)
        out.seek(0), errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{side} failed:\n{out.read()[-2000:]}\n{errors.read()[-6000:]}")
        return {**json.loads(out.read().splitlines()[-1]), "mebibytes": peak}


def mebibytes(pid: int) -> float:
    """Memory of a process and all below it; what several share is counted once (Linux)."""
    below, found = defaultdict(list), [pid]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            below[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
        except OSError:
            continue  # it has just ended
    for each in found:
        found += below[each]
    total = 0
    for each in found:
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        except OSError:
            continue
    return total / 1024


def differences(folder: Path, side: str) -> list[float]:
    """From fedcli's parameters: the largest of any model, the median model's, and the largest that fedcli's moved."""
    first, ours, other = (torch.load(folder / f"{name}.pt") for name in ("initial", "fedcli", side))
    found = [(a - b).abs().max().item() for a, b in zip(ours, other, strict=True)]
    of_models = [max(found[start : start + len(first)]) for start in range(0, len(found), len(first))]
    change = max((a - b).abs().max().item() for a, b in zip(ours, first * len(of_models), strict=True))
    return [max(of_models), median(of_models), change]


def append(what: str, workload: str, side: str, turn: int, values: list[float], result: dict) -> None:
    """Adds a row for each value."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.is_file() else []
    processor = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
    new = not CSV.exists()
    with CSV.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS] if new else [])
        for value in values:
            about = (result["versions"], result["torch"], result["threads"], processor)
            writer.writerow((what, workload, side, turn, f"{value:.6g}", *about))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# The page, from the CSV alone

Rows = dict[tuple[str, str, str], dict[int, list[float]]]  # values of each turn, by what, workload and side


def read_rows() -> tuple[Rows, dict[str, dict[str, str]]]:
    """What was measured, and by side a row that says of what, with the versions of all its rows."""
    found, about = defaultdict(lambda: defaultdict(list)), {}
    with CSV.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["what"], row["workload"], row["side"]][int(row["turn"])].append(float(row["value"]))
            before = about.setdefault(row["side"], row)["versions"]
            if row["versions"] not in before:
                about[row["side"]] = {**row, "versions": f"{before} and {row['versions']}"}
    return {key: dict(turns) for key, turns in found.items()}, about


def timed(rows: Rows, workload: str, what: str = "seconds") -> dict[str, list[float]]:
    """Seconds of all rounds of a workload, by side."""
    shown = [side for side in SIDES if (what, workload, side) in rows]
    return {side: [value for turn in rows[what, workload, side].values() for value in turn] for side in shown}


def ratios(rows: Rows, workload: str, side: str, what: str = "seconds") -> list[float]:
    """How many times as long as fedcli's a round takes: of each turn the ratio of the medians."""
    ours, theirs = (rows[what, workload, name] for name in ("fedcli", side))
    return [median(theirs[turn]) / median(ours[turn]) for turn in theirs if turn in ours]


def ratio(rows: Rows, workload: str, side: str, what: str = "seconds") -> float:
    """The same, the median over turns."""
    return median(ratios(rows, workload, side, what))


def images(options: dict) -> int:
    """Trained in a round, by all clients together; each holds 600."""
    return options["cohort_size"] * options["local_epochs"] * (600 // options["batch_size"]) * options["batch_size"]


def page(rows: Rows, about: dict[str, dict[str, str]]) -> str:
    """The page, in Markdown."""
    versions = "; ".join(dict.fromkeys(about[side]["versions"] for side in SIDES if side in about))
    same = about["fedcli"]
    speed = ["| workload | side | seconds a round (least-largest) | times fedcli's | images a second | peak MiB |"]
    speed.append("|---" * 6 + "|")
    for workload, options in SPEED.items():
        for side, seconds in timed(rows, workload).items():
            middle, peak = median(seconds), rows.get(("memory", workload, side), {0: [0]})[0][0]
            cells = f"{middle:.2f} ({min(seconds):.2f}-{max(seconds):.2f}) | {ratio(rows, workload, side):.2f}"
            cells += f" | {images(options) / middle:,.0f} | {f'{peak:,.0f}' if peak else ''}"
            speed.append(f"| {workload} | {SIDES[side]} | {cells} |")
    tested = ["| workload | side | seconds a round (least-largest) | times fedcli's |", "|---" * 4 + "|"]
    for workload in SPEED:
        for side, seconds in timed(rows, workload, "tested").items():
            cells = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
            turns = ratios(rows, workload, side, "tested")
            cells += f" | {median(turns):.2f} ({min(turns):.2f}-{max(turns):.2f})"
            tested.append(f"| {workload} | {SIDES[side]} | {cells} |")
    accuracy = ["| method | fedcli | PFLlib | difference of the means |", "|---" * 4 + "|"]
    for method in METHODS:
        sides = [rows["accuracy", method, side] for side in ("fedcli", "pfllib")]
        found = [[100 * turns[seed][0] for seed in sorted(turns)] for turns in sides]
        cells = [f"{', '.join(f'{v:.2f}' for v in each)}: {fmean(each):.2f} ± {stdev(each):.2f}" for each in found]
        accuracy.append(f"| {method} | {cells[0]} | {cells[1]} | {fmean(found[0]) - fmean(found[1]):+.2f} |")
    parameters = ["| method | side | largest difference | the median model's | largest change |", "|---" * 5 + "|"]
    for (what, method, side), turns in rows.items():
        if what == "difference" and side != "fedcli":
            cells = " | ".join(f"{value:.1e}" for value in turns[0])
            parameters.append(f"| {method} | {SIDES[side]} | {cells} |")
    return PROSE.format(
        versions=versions, torch=same["torch"], threads=same["threads"], processor=same["processor"], rounds=ROUNDS,
        speed="\n".join(speed), tested="\n".join(tested), accuracy="\n".join(accuracy),
        parameters="\n".join(parameters),
    )  # fmt: skip


PROSE = """\
# Beside PFLlib and Flower

Written by `python results/speed/peers/peers.py page` from [peers.csv](peers.csv); [the script](peers.py) says how it
is measured. {versions}; all on torch {torch} and {threads} cores of an {processor}.

## Seconds a round

{speed}

All workloads: 100 clients of 600 Fashion-MNIST images each, `cnn-mcmahan` (582,026 parameters), SGD with learning rate
0.01.

* w1: FedAvg, 10 clients a round, 5 epochs, batches of 64, of which an epoch has 9 full ones
* w2: FedAvg, 20 clients a round, 1 epoch, batches of 10
* proto: FedProto on w2's clients and batches, with a model of its own for each of the 100 clients; Flower has none

A turn starts every side anew, one after the other. Its first round warms up and is not counted; nothing is evaluated.
Seconds are the median of all rounds, and the ratio is the median over turns. Memory is that of all processes of a side
in a run that is not timed; what they share is counted once.

PFLlib trains one client after the other, each operation on all cores, and reads a client's file whenever it trains.
Flower's client app is a plain PyTorch loop, whose actors keep the images in memory: `Flower` has an actor for each
core, with one thread, and `Flower, defaults` what its back end has by itself, an actor for two cores.

## With testing after each round

Each side tests in its own way, on the 100 images that each of the 100 clients keeps for it. PFLlib also computes the
area under the ROC curve of these, and the loss on the full batches of all training images. Flower's strategy sends the
model to all clients, whose app tests it by a plain PyTorch loop. Measured in other hours than the table above: compare
within a table. Beside the ratio stand the least and the largest of a turn.

{tested}

## The same accuracies

After {rounds} rounds, in per cent, a number a seed, then mean ± standard deviation. 2,000 of the 70,000 images, 20
clients by Dirichlet 0.1, drawn anew for each seed, all in each round, one epoch, batches of 10, learning rate 0.02;
tested on each client's own quarter. FedProx has μ = 0.1, FedProto λ = 1. Clients, initial model and options are the
same; the order of the batches is each side's own.

{accuracy}

## The same parameters

Where nothing is drawn, nothing but rounding may differ: three rounds of two epochs on the clients of the first seed,
each step on all images of a client, learning rate 0.1. The largest difference of any parameter from fedcli's, of the
global model or of all 20 personal ones, beside the median over the personal models and the largest change that training
has made to a parameter:

{parameters}

A single model may differ by more, where rounding has moved a value across the bend of a ReLU or to another place of its
pooling.
"""


def write_page() -> None:
    """Writes the page."""
    rows, about = read_rows()
    PAGE.write_text(page(rows, about), encoding="utf-8")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*ON_SPEED, "accuracy", "difference", "page"))
    parser.add_argument("workload", nargs="?", choices=(*SPEED, *METHODS))
    parser.add_argument("--pfllib", type=Path, help="checkout of PFLlib")
    parser.add_argument("--python", default=sys.executable, help="Python of PFLlib and Flower")
    parser.add_argument("--sides", default="fedcli,pfllib", help="some of " + ",".join(SIDES))
    parser.add_argument("--turns", default="0", help="numbers of the turns, or seeds of the accuracies, as 0,1,2")
    parser.add_argument("--rounds", type=int, default=3, help="to time, after one to warm up")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "peers-data", help="for the images")
    call = parser.parse_args()
    if call.what == "page":
        return write_page()
    known = SPEED if call.what in ON_SPEED else METHODS
    if call.workload not in known:
        parser.error(f"'{call.what}' must be followed by one of {', '.join(known)} (got {call.workload}); name one.")
    if wrong := [side for side in call.sides.split(",") if side not in SIDES]:
        parser.error(f"--sides must be some of {', '.join(SIDES)} (got {wrong[0]}); write fedcli,pfllib.")
    if "pfllib" in call.sides and not call.pfllib:
        parser.error("--pfllib must name a checkout of PFLlib (got none); clone TsingZ0/PFLlib, or leave the side out.")
    measure(call)


if __name__ == "__main__":
    main()
