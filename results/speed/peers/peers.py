"""The same rounds in PFLlib, in Flower and here: what they take, and that they come to the same accuracy.

    python peers.py seconds w1 --pfllib CHECKOUT --python PYTHON     rounds of each side in turn; also w2, proto
    python peers.py tested w1 ...                                    the same with each side's own testing after each
    python peers.py accuracy fedavg --turns 0,1,2 ...                after 30 rounds, a seed a turn; fedprox, fedproto
    python peers.py page                                             the tables of README.md from peers.csv

Every call but the last appends to `peers.csv`. `--pfllib` is a checkout of TsingZ0/PFLlib; `--python` is the Python of
an environment with the same torch, flwr==1.41.0 and ray for Flower, scikit-learn, matplotlib and h5py for PFLlib.

Each side runs in a process of its own (`sides.py`), which imports nothing of the others. All train the same images of
the same clients from the same initial model with plain SGD; a batch that is not full is left out, as in PFLlib. fedcli
divides the images, and they are written normalised into files in PFLlib's form, which Flower's app reads as well.

    fedcli    `fedcli.run`; a round is timed from the end of the one before
    pfllib    its servers' own `train`, which times each round itself
    flower    its simulation on Ray with the strategy FedAvg; the client app is a plain PyTorch loop; an actor for each
              core, with one thread; timed as in fedcli

"memory", "difference" and "flower-default" in the CSV were measured by an earlier version of this script.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer

from fedcli.results.render import between_marks, github
from fedcli.runs import run as runs
from fedcli.runs.records import environment

HERE = Path(__file__).parent
CSV, PAGE = HERE / "peers.csv", HERE / "README.md"
SIDES = {"fedcli": "fedcli", "pfllib": "PFLlib", "flower": "Flower", "flower-default": "Flower, defaults"}

METHODS = {
    "fedavg": {"method": "fedavg"},
    "fedprox": {"method": "fedprox", "proximal_weight": 0.1},
    "fedproto": {"method": "fedproto", "prototype_weight": 1.0, "gathered_epochs": "all"},
}
TRAINING = {
    "protocol": "fedsa:cifar10-silo", "dataset": "fmnist", "backbone": "cnn-mcmahan", "optimizer": "sgd",
    "momentum": 0.0, "drop_last": True,
}  # fmt: skip
# 700 of all 70,000 images each, of which 100 are for testing
HUNDRED = {**TRAINING, "partition": "iid", "num_clients": 100, "local_test": 1 / 7, "seed": 0, "lr": 0.01}
SMALL_BATCHES = {**HUNDRED, "cohort_size": 20, "local_epochs": 1, "batch_size": 10}
SPEED = {
    "w1": {**HUNDRED, **METHODS["fedavg"], "cohort_size": 10, "local_epochs": 5, "batch_size": 64},
    "w2": {**SMALL_BATCHES, **METHODS["fedavg"]},
    "proto": {**SMALL_BATCHES, **METHODS["fedproto"]},
}
TWENTY = {
    **TRAINING, "partition": "dirichlet:0.1:min=20", "num_clients": 20, "cohort_size": 20, "local_test": 0.25,
    "train_examples": 2000, "lr": 0.02, "local_epochs": 1, "batch_size": 10,
}  # fmt: skip
WORKLOADS = {"seconds": SPEED, "tested": SPEED, "accuracy": METHODS}
ROUNDS = {"seconds": 5, "tested": 5, "accuracy": 30}  # where timed, the first warms up and the last is not counted


def write_clients(folder: Path, options: dict[str, Any]) -> None:
    """Writes the clients' images as PFLlib's generators do, `dataset/train/K.npz` and so on, and the initial model."""
    ((setup, _),) = runs.plan(**options, out=folder)
    dataset, _, fed = runs.prepare(setup)
    for part, clients in (("train", fed.training), ("test", fed.testing)):
        (folder / "dataset" / part).mkdir(parents=True)
        for client, index in enumerate(clients):
            x, y = fed.transform(dataset.x_train[index]).numpy(), dataset.y_train[index].numpy()
            np.savez(folder / "dataset" / part / f"{client}.npz", data={"x": x, "y": y})
    torch.save(list(fed.initial_model()[0].values()), folder / "initial.pt")


def measure(what: str, workload: str, sides: list[str], turn: int, pfllib: str, python: str) -> None:
    """Runs the sides of a turn one after the other and appends what they say to the CSV, a row a value."""
    options = SPEED.get(workload) or {**TWENTY, **METHODS[workload], "seed": turn, "partition_seed": turn}
    with TemporaryDirectory() as folder:
        write_clients(Path(folder), options)
        for side in sides:
            result = run_process(side, [folder, json.dumps(options), str(ROUNDS[what]), what], pfllib, python)
            values = [result["accuracy"]] if what == "accuracy" else result["seconds"][: ROUNDS[what] - 2]
            rows = pd.DataFrame({"what": what, "workload": workload, "side": side, "turn": turn, "value": values})
            rows["value"] = rows["value"].map("{:.6g}".format)
            processor = environment(torch.device("cpu"))["machine"]["processor"]
            rows = rows.assign(**{key: result[key] for key in ("versions", "torch", "threads")}, processor=processor)
            rows.to_csv(CSV, mode="a", header=not CSV.exists(), index=False)
            print(what, workload, side, turn, values, flush=True)


def run_process(side: str, arguments: list[str], pfllib: str, python: str) -> dict[str, Any]:
    """Returns what comes of one side in a new process."""
    program = "import sys, sides; sides.run_side(*sys.argv[1:])"  # by name, as Flower's actors import it
    command = [sys.executable if side == "fedcli" else python, "-c", program, side, *arguments]
    command += [pfllib] if side == "pfllib" else []
    env = {**os.environ, "PYTHONPATH": str(HERE), "FLWR_TELEMETRY_ENABLED": "0"}
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{side} failed:\n{process.stdout[-2000:]}\n{process.stderr[-6000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def ratios(rows: pd.DataFrame, what: str, workload: str, side: str) -> pd.Series:
    """Returns how many times as long as fedcli's a round takes: of each turn the ratio of the medians."""
    medians = rows.groupby(["what", "workload", "side", "turn"]).value.median()
    return (medians[what, workload, side] / medians[what, workload, "fedcli"]).dropna()


def spread(values: pd.Series) -> str:
    """Returns the median, and the least and the largest value."""
    return f"{values.median():.2f} ({values.min():.2f}-{values.max():.2f})"


def speed_table(rows: pd.DataFrame, what: str) -> list[str]:
    """Returns seconds a round of each workload and side, and how many times fedcli's they are."""
    groups, lines = rows.groupby(["what", "workload", "side"]).value, []
    for workload, options in SPEED.items():
        batch = options["batch_size"]
        images = options["cohort_size"] * options["local_epochs"] * (600 // batch) * batch  # each client holds 600
        for side, title in SIDES.items():
            if (what, workload, side) in groups.groups:
                seconds = groups.get_group((what, workload, side))
                times = spread(ratios(rows, what, workload, side))
                lines.append([workload, title, spread(seconds), times, f"{images / seconds.median():,.0f}"])
    columns = ["Workload", "Side", "Seconds a round (least-largest)", "Times fedcli's (of the turns)"]
    return github([*columns, "Images a second"], lines, 2)


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """Returns the generated parts of the page, by the names of their marks."""
    values = rows.sort_values("turn", kind="stable").set_index(["what", "workload", "side"]).sort_index().value
    accuracy, parameters = [], []
    for method in METHODS:
        both = [100 * values["accuracy", method, side] for side in ("fedcli", "pfllib")]
        texts = [f"{', '.join(map('{:.2f}'.format, side))}: {side.mean():.2f} ± {side.std():.2f}" for side in both]
        accuracy.append([method, *texts, f"{both[0].mean() - both[1].mean():+.2f}"])
        parameters.append([method, *map("{:.1e}".format, values["difference", method, "pfllib"])])
    peaks = [[workload, SIDES[side], f"{peak:,.0f}"] for (workload, side), peak in values["memory"].items()]
    parts = {
        "seconds": speed_table(rows, "seconds"),
        "tested": speed_table(rows, "tested"),
        "memory": github(["Workload", "Side", "Peak MiB"], peaks, 2),
        "accuracy": github(["Method", "fedcli", "PFLlib", "Difference of the means"], accuracy),
        "parameters": github(["Method", "Largest difference", "The median model's", "Largest change"], parameters),
    }
    first = rows.iloc[0]
    versions = f"{'; '.join(rows.versions.unique())}; all on torch {first.torch} and {first.threads} cores of an "
    return {"versions": f"{versions}{first.processor}.", **{name: "\n".join(lines) for name, lines in parts.items()}}


def main(
    what: str, workload: str = typer.Argument(""), pfllib: str = "", python: str = sys.executable,
    sides: str = "fedcli,pfllib", turns: str = "0",
) -> None:  # fmt: skip
    """Measures, or writes the page; the head of this file says what the arguments are."""
    if what == "page":
        text = PAGE.read_text(encoding="utf-8")
        for name, content in tables(pd.read_csv(CSV)).items():
            text = between_marks(text, name, content)
        PAGE.write_text(text, encoding="utf-8")
        return
    chosen = sides.split(",")
    if workload not in WORKLOADS.get(what, ()) or ("pfllib" in chosen and not pfllib):
        raise SystemExit(__doc__)
    for turn in turns.split(","):
        measure(what, workload, chosen, int(turn), pfllib, python)


if __name__ == "__main__":
    typer.run(main)
