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

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import pandas as pd
import torch

from fedcli.results.render import between_marks, github
from fedcli.runs.records import environment

HERE = Path(__file__).parent
CSV, PAGE = HERE / "peers.csv", HERE / "README.md"
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
ON_SPEED = ("seconds", "tested", "memory")  # what is measured on these workloads
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


# The runs, one after the other


def measure(call: argparse.Namespace) -> None:
    """Runs the sides in turn and appends what they say to the CSV."""
    from sides import write_clients  # beside this file, which is the program then

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
            values = differences(folder, side) if what == "difference" else result[what]
            append(what, workload, side, turn, values, result)
            print(what, workload, side, turn, values, flush=True)


def run_process(side: str, folder: Path, options: dict, rounds: int, call: argparse.Namespace) -> dict:
    """What comes of one side in a new process, by the names of the measures; "memory" is that of all its processes."""
    python = sys.executable if side == "fedcli" else call.python
    given = (side, str(folder), json.dumps(options), str(rounds), call.what, str(call.pfllib))
    env = {**os.environ, "PYTHONPATH": str(HERE), "FLWR_TELEMETRY_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        command = [python, "-c", "import sys, sides; sides.run_side(*sys.argv[1:])", *given]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=errors)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, mebibytes(process.pid)) if call.what == "memory" else 0.0
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
    found = [(a - b).abs().max().item() for a, b in zip(ours, other, strict=True)]
    of_models = [max(found[start : start + len(first)]) for start in range(0, len(found), len(first))]
    change = max((a - b).abs().max().item() for a, b in zip(ours, first * len(of_models), strict=True))
    return [max(of_models), median(of_models), change]


def append(what: str, workload: str, side: str, turn: int, values: list[float], result: dict) -> None:
    """Adds a row for each value."""
    rows = pd.DataFrame({"what": what, "workload": workload, "side": side, "turn": turn, "value": values})
    rows["value"] = rows["value"].map("{:.6g}".format)
    for name in ("versions", "torch", "threads"):
        rows[name] = result[name]
    rows["processor"] = environment(torch.device("cpu"))["machine"]["processor"]
    rows.to_csv(CSV, mode="a", header=not CSV.exists(), index=False)


# The tables of the page, from the CSV alone


def read_rows() -> pd.DataFrame:
    """What was measured, a value each."""
    return pd.read_csv(CSV)


def ratios(rows: pd.DataFrame, what: str, workload: str, side: str) -> pd.Series:
    """How many times as long as fedcli's a round takes: of each turn the ratio of the medians."""
    kept = rows[(rows.what == what) & (rows.workload == workload)]
    medians = kept.groupby(["side", "turn"]).value.median()
    return (medians[side] / medians["fedcli"]).dropna()


def speed_table(rows: pd.DataFrame, what: str) -> str:
    """Seconds a round of each workload and side, and how many times fedcli's they are."""
    values, lines = rows.groupby(["what", "workload", "side"]).value, []
    for workload, options in SPEED.items():
        for side, title in SIDES.items():
            if (what, workload, side) in values.groups:
                seconds, turns = values.get_group((what, workload, side)), ratios(rows, what, workload, side)
                line = [workload, title, spread(seconds), spread(turns), f"{images(options) / seconds.median():,.0f}"]
                if what == "seconds":  # memory is that of runs without testing
                    peak = values.first().get(("memory", workload, side))
                    line.append("" if peak is None else f"{peak:,.0f}")
                lines.append(line)
    columns = ["Workload", "Side", "Seconds a round (least-largest)", "Times fedcli's (of the turns)"]
    columns += ["Images a second", "Peak MiB"][: len(lines[0]) - len(columns)]
    return "\n".join(github(columns, lines, 2))


def spread(values: pd.Series) -> str:
    """The median, and the least and the largest value."""
    return f"{values.median():.2f} ({values.min():.2f}-{values.max():.2f})"


def images(options: dict) -> int:
    """Trained in a round, by all clients together; each holds 600."""
    return options["cohort_size"] * options["local_epochs"] * (600 // options["batch_size"]) * options["batch_size"]


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The generated parts of the page, by the names of their marks."""
    values = (
        rows.sort_values("turn", kind="stable").set_index(["what", "workload", "side"]).sort_index(kind="stable").value
    )
    accuracy, parameters = [], []
    for method in METHODS:
        ours, theirs = (100 * values.loc["accuracy", method, side] for side in ("fedcli", "pfllib"))
        texts = [
            f"{', '.join(f'{v:.2f}' for v in side)}: {side.mean():.2f} ± {side.std():.2f}" for side in (ours, theirs)
        ]
        accuracy.append([method, *texts, f"{ours.mean() - theirs.mean():+.2f}"])
        parameters.append([method, *(f"{value:.1e}" for value in values.loc["difference", method, "pfllib"])])
    first = rows.iloc[0]
    return {
        "versions": f"{'; '.join(rows.versions.unique())}; all on torch {first.torch} and {first.threads} cores of an "
        f"{first.processor}.",
        "seconds": speed_table(rows, "seconds"),
        "tested": speed_table(rows, "tested"),
        "accuracy": "\n".join(github(["Method", "fedcli", "PFLlib", "Difference of the means"], accuracy)),
        "parameters": "\n".join(
            github(["Method", "Largest difference", "The median model's", "Largest change"], parameters)
        ),
    }


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
        text = PAGE.read_text(encoding="utf-8")
        for name, content in tables(read_rows()).items():
            text = between_marks(text, name, content)
        PAGE.write_text(text, encoding="utf-8")
        return
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
