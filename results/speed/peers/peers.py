"""The same rounds in PFLlib, in Flower and here: what they take, and that they come to the same.

    python peers.py seconds w1 --pfllib CHECKOUT --python PYTHON     rounds of each side in turn; also w2, proto
    python peers.py tested w1 ...                                    the same with each side's own testing after each
    python peers.py memory w1 ...                                    the most that each side's processes hold together
    python peers.py accuracy fedavg --turns 0,1,2 ...                after 30 rounds, a seed a turn; fedprox, fedproto
    python peers.py difference fedavg ...                            of parameters after three rounds of full batches
    python peers.py page                                             the tables of README.md from peers.csv

Every call but the last appends to `peers.csv`. `--pfllib` is a checkout of TsingZ0/PFLlib; `--python` is the Python of
an environment with the same torch, flwr==1.41.0 and ray for Flower, scikit-learn, matplotlib and h5py for PFLlib.

Each side runs in a process of its own (`sides.py`), which imports nothing of the others. All train the same images of
the same clients from the same initial model with plain SGD; a batch that is not full is left out, as in PFLlib. fedcli
divides the images, and they are written normalised into files in PFLlib's form, which Flower's app reads as well.

    fedcli    `fedcli.run`; a round is timed from the end of the one before
    pfllib    its servers' own `train`, which times each round itself; only their evaluation is taken out, where none is
              measured
    flower    its simulation on Ray: a client app with a plain PyTorch loop, the strategy FedAvg; timed as in fedcli.
              `flower` has an actor for each core, with one thread; `flower-default` is the back end's own
"""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile, gettempdir
from typing import Any

import pandas as pd
import torch
import typer

from fedcli.results.render import between_marks, github
from fedcli.runs.records import environment

HERE = Path(__file__).parent
CSV, PAGE = HERE / "peers.csv", HERE / "README.md"
SIDES = {"fedcli": "fedcli", "pfllib": "PFLlib", "flower": "Flower", "flower-default": "Flower, defaults"}

TRAINING = {
    "protocol": "fedsa:cifar10-silo", "dataset": "fmnist", "backbone": "cnn-mcmahan", "optimizer": "sgd", "lr": 0.01,
    "momentum": 0.0, "drop_last": True,
}  # fmt: skip
METHODS = {
    "fedavg": {"method": "fedavg"},
    "fedprox": {"method": "fedprox", "proximal_weight": 0.1},
    "fedproto": {"method": "fedproto", "prototype_weight": 1.0, "gathered_epochs": "all"},
}
# 700 of all 70,000 images each, of which 100 are for testing
HUNDRED = {**TRAINING, "partition": "iid", "num_clients": 100, "local_test": 1 / 7, "seed": 0}
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
FULL_BATCHES = {"local_epochs": 2, "batch_size": 400, "drop_last": False, "lr": 0.1}
ROUNDS = {"seconds": 3, "tested": 3, "memory": 3, "accuracy": 30, "difference": 3}  # a first one warms up where timed


def measure(what: str, workload: str, side: str, turn: int, pfllib: str, python: str) -> None:
    """Runs one side of a turn and appends what it says to the CSV, a row a value."""
    from sides import write_clients  # beside this file, which is the program then

    if workload in SPEED:
        options = SPEED[workload]
    else:
        options = {**TWENTY, **METHODS[workload], "seed": turn, "partition_seed": turn}
        options |= FULL_BATCHES if what == "difference" else {}
    divided = (str(options[key]) for key in ("partition", "num_clients", "seed"))
    folder = Path(gettempdir(), "peers-data", "-".join(divided).replace(":", "-"))
    if not folder.exists():
        write_clients(folder, options)
    rounds = ROUNDS[what] + (workload in SPEED)
    result = run_process(side, [str(folder), json.dumps(options), str(rounds), what, pfllib], python)
    values = differences(folder, side) if what == "difference" else result[what]
    rows = pd.DataFrame({"what": what, "workload": workload, "side": side, "turn": turn, "value": values})
    rows["value"] = rows["value"].map("{:.6g}".format)
    processor = environment(torch.device("cpu"))["machine"]["processor"]
    rows = rows.assign(**{name: result[name] for name in ("versions", "torch", "threads")}, processor=processor)
    rows.to_csv(CSV, mode="a", header=not CSV.exists(), index=False)
    print(what, workload, side, turn, values, flush=True)


def run_process(side: str, given: list[str], python: str) -> dict[str, Any]:
    """What comes of one side in a new process, by the names of the measures; "memory" is that of all its processes."""
    program = "import sys, sides; sides.run_side(*sys.argv[1:])"  # by name, as Flower's actors import it
    command = [sys.executable if side == "fedcli" else python, "-c", program, side, *given]
    env = {**os.environ, "PYTHONPATH": str(HERE), "FLWR_TELEMETRY_ENABLED": "0"}
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        process, peak = subprocess.Popen(command, env=env, stdout=out, stderr=errors), 0.0
        while process.poll() is None:
            peak = max(peak, mebibytes(process.pid)) if "memory" in given else 0.0
            time.sleep(0.3)
        out.seek(0), errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{side} failed:\n{out.read()[-2000:]}\n{errors.read()[-6000:]}")
        result = json.loads(out.read().splitlines()[-1])
    return {**result, "tested": result["seconds"], "memory": [peak]}


def mebibytes(pid: int) -> float:
    """Memory of a process and all below it; what several share is counted once (Linux)."""
    total = 0
    with suppress(OSError):  # it has just ended
        total += int(re.search(r"^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1]) / 1024
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(map(mebibytes, map(int, children.read_text().split())))
    return total


def differences(folder: Path, side: str) -> list[float]:
    """From fedcli's parameters: the largest of any model, the median model's, and the largest that fedcli's moved."""
    first, ours, other = (torch.load(folder / f"{name}.pt") for name in ("initial", "fedcli", side))
    apart = [(a - b).abs().max().item() for a, b in zip(ours, other, strict=True)]
    of_models = [max(apart[start : start + len(first)]) for start in range(0, len(apart), len(first))]
    change = max((a - b).abs().max().item() for a, b in zip(ours, first * len(of_models), strict=True))
    return [max(of_models), median(of_models), change]


def ratios(rows: pd.DataFrame, what: str, workload: str, side: str) -> pd.Series:
    """How many times as long as fedcli's a round takes: of each turn the ratio of the medians."""
    medians = rows.groupby(["what", "workload", "side", "turn"]).value.median()
    return (medians[what, workload, side] / medians[what, workload, "fedcli"]).dropna()


def speed_table(rows: pd.DataFrame, what: str) -> str:
    """Seconds a round of each workload and side, and how many times fedcli's they are."""
    values, lines = rows.groupby(["what", "workload", "side"]).value, []
    for workload, options in SPEED.items():
        batch = options["batch_size"]
        images = options["cohort_size"] * options["local_epochs"] * (600 // batch) * batch  # each client holds 600
        for side, title in SIDES.items():
            if (what, workload, side) in values.groups:
                seconds, turns = values.get_group((what, workload, side)), ratios(rows, what, workload, side)
                peak = values.first().get(("memory", workload, side))  # of runs without testing
                lines.append({
                    "Workload": workload, "Side": title, "Seconds a round (least-largest)": spread(seconds),
                    "Times fedcli's (of the turns)": spread(turns),
                    "Images a second": f"{images / seconds.median():,.0f}",
                    "Peak MiB": "" if peak is None or what == "tested" else f"{peak:,.0f}",
                })  # fmt: skip
    table = pd.DataFrame(lines)
    table = table.loc[:, table.ne("").any()]
    return "\n".join(github([*table], table.to_numpy().tolist(), 2))


def spread(values: pd.Series) -> str:
    """The median, and the least and the largest value."""
    return f"{values.median():.2f} ({values.min():.2f}-{values.max():.2f})"


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The generated parts of the page, by the names of their marks."""
    in_order = rows.sort_values("turn", kind="stable").set_index(["what", "workload", "side"])
    values, accuracy, parameters = in_order.sort_index(kind="stable").value, [], []
    for method in METHODS:
        both = [100 * values.loc["accuracy", method, side] for side in ("fedcli", "pfllib")]
        texts = [f"{', '.join(map('{:.2f}'.format, side))}: {side.mean():.2f} ± {side.std():.2f}" for side in both]
        accuracy.append([method, *texts, f"{both[0].mean() - both[1].mean():+.2f}"])
        parameters.append([method, *map("{:.1e}".format, values.loc["difference", method, "pfllib"])])
    first, versions = rows.iloc[0], "; ".join(rows.versions.unique())
    parts = {
        "accuracy": (["Method", "fedcli", "PFLlib", "Difference of the means"], accuracy),
        "parameters": (["Method", "Largest difference", "The median model's", "Largest change"], parameters),
    }
    return {
        "versions": f"{versions}; all on torch {first.torch} and {first.threads} cores of an {first.processor}.",
        **{what: speed_table(rows, what) for what in ("seconds", "tested")},
        **{name: "\n".join(github(*part)) for name, part in parts.items()},
    }


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
    named = workload in (METHODS if what in ("accuracy", "difference") else SPEED) and SIDES.keys() >= {*chosen}
    if what not in ROUNDS or not named or ("pfllib" in chosen and not pfllib):
        raise SystemExit(__doc__)
    for turn in turns.split(","):
        for side in chosen:
            measure(what, workload, side, int(turn), pfllib, python)


if __name__ == "__main__":
    typer.run(main)
