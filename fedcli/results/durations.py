"""How long planned runs will take, by the runs that were timed."""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from fedcli.data import datasets
from fedcli.data.datasets import num_images
from fedcli.registry import find_table
from fedcli.results import plans, verdicts
from fedcli.results.frame import read_runs, shipped_folders
from fedcli.runs.machine import environment, is_undisturbed

H100 = "NVIDIA H100 80GB HBM3"


class Training(NamedTuple):
    """What a run and those whose time tells its own have in common."""

    device: str  # "cpu" or "cuda"
    backbone: str
    shape: str  # of an image, as "[3, 32, 32]"
    precision: str


TRAINING_COLUMNS = list(Training._fields)
TIMED_COLUMNS = ["seconds", "examples", "threads", "undisturbed", "machine", "method", *TRAINING_COLUMNS]
# Those that are like a paper's training.
BENCHED_WORKLOADS = {"w3": {"backbone": "resnet18", "shape": "[3, 32, 32]"}}
REFERENCE_METHOD = "fedavg"  # the method that all others are timed against
MINUTES_PER_HOUR = 60


def round_examples(config: Mapping[str, Any], images: int) -> float:
    """Examples in the local steps of a round, of clients that share so many images."""
    return images * config["cohort_size"] / config["num_clients"] * config["local_epochs"]


def times_of_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """The times of runs, see `fedcli.results.frame`, that did not move to another machine.

    Returns:
        A row a run: `seconds` of a round, its test included, for an example of its training; the `examples` of a round;
        CPU `threads`; whether it was `undisturbed` by other work; the name of its `machine`; the `method`; and
        `TRAINING_COLUMNS`.
    """
    rows = []
    for record in runs["record"]:
        shape = record["model"].get("input")
        if not record["rounds"] or shape is None or record["moved"]:
            continue
        config = record["config"]
        hardware = record["hardware"]
        examples = round_examples(config, sum(record["partition"]["sizes"]))
        round_seconds = fmean(sum(entry["seconds"].values()) for entry in record["rounds"])
        rows.append({
            "seconds": round_seconds / examples,
            "examples": examples,
            "threads": hardware.get("threads", 1),
            "undisturbed": is_undisturbed(record),
            "machine": hardware["name"],
            "method": record["method"],
            "device": hardware["device"],
            "backbone": config["backbone"],
            "shape": str(list(shape)),
            "precision": config["precision"],
        })  # fmt: skip
    return pd.DataFrame(rows, columns=TIMED_COLUMNS).astype({"undisturbed": bool})


def times_of_benchmarks(folder: Path) -> pd.DataFrame:
    """The times of FedAvg in the workloads that `fedcli bench` has timed on CUDA; see `times_of_runs`.

    Args:
        folder: Of the CSV files of `fedcli bench --csv`, one a machine.
    """
    rows = []
    for file in sorted(folder.glob("*-torch*.csv")):
        measured = pd.read_csv(file)
        on_cuda = measured[(measured["device"] == "cuda") & measured["workload"].isin(BENCHED_WORKLOADS)]
        for bench in on_cuda.to_dict("records"):
            examples = bench["samples_per_second"] * bench["seconds_per_round"]
            rows.append({
                "seconds": (bench["seconds_per_round"] + bench["evaluation_seconds"]) / examples,
                "examples": examples,
                "threads": 1,
                "undisturbed": True,
                "machine": bench["hardware"],
                "method": REFERENCE_METHOD,
                "device": bench["device"],
                **BENCHED_WORKLOADS[bench["workload"]],
                "precision": bench["precision"],
            })  # fmt: skip
    return pd.DataFrame(rows, columns=TIMED_COLUMNS).astype({"undisturbed": bool})


def time_ratios(timed_runs: pd.DataFrame) -> pd.Series:
    """How many times as long a method takes as FedAvg, by its name: a median over networks and machines with both.

    Their rounds have as many examples, since a round has a part that is none of its training.
    """
    conditions = ["machine", "undisturbed", "threads", "examples", *TRAINING_COLUMNS]
    medians = timed_runs.groupby(["method", *conditions])["seconds"].median().reset_index()
    reference = medians[medians["method"] == REFERENCE_METHOD].drop(columns="method")
    both = medians.merge(reference, on=conditions, suffixes=("", "_reference"))
    ratios = both["seconds"] / both["seconds_reference"]
    return ratios.groupby(both["method"]).median()


class TimePerExample(NamedTuple):
    """How long a run is expected to take for an example, by those that were timed; NaN where no run like it was."""

    seconds: float
    core_seconds: float  # the same times the CPU threads
    machines: frozenset[str]  # other machines, on which the runs were timed


def time_per_example(
    method: str, training: Training, machine: str, timed_runs: pd.DataFrame, ratios: pd.Series
) -> TimePerExample:
    """The time of a run for an example: the median of the timed runs that are nearest to it.

    Args:
        method: Its method.
        training: What the timed runs have in common with it.
        machine: The machine it is to run on.
        timed_runs: See `times_of_runs`.
        ratios: See `time_ratios`.
    """
    nearest = timed_runs
    for name, value in training._asdict().items():
        nearest = nearest[nearest[name] == value]
    nearest = _preferred(nearest, nearest["machine"] == machine)
    nearest = _preferred(nearest, nearest["method"] == method)
    nearest = _preferred(nearest, nearest["undisturbed"])
    ratios_of_nearest = nearest["method"].map(ratios).astype(float).fillna(1.0)  # of no runs it would be text
    seconds = nearest["seconds"] * ratios.get(method, 1.0) / ratios_of_nearest
    core_seconds = seconds * nearest["threads"]
    return TimePerExample(seconds.median(), core_seconds.median(), frozenset(nearest["machine"]) - {machine})


def _preferred(runs: pd.DataFrame, is_preferred: pd.Series) -> pd.DataFrame:
    """The preferred ones of some runs; all of them where none is preferred."""
    return runs[is_preferred] if is_preferred.any() else runs


def estimate_times(
    runs: Iterable[plans.PlannedRun], timed_runs: pd.DataFrame, device: str, machine: str
) -> pd.DataFrame:
    """Estimates the time of runs by the median of timed ones with the same network, images and kind of device.

    Of these, see `times_of_runs`, the runs of `machine` go first, then those of the same method, and then those that no
    other work disturbed. What another method takes is multiplied by what `time_ratios` says of the two.

    Returns:
        A row a run: `seconds`, NaN where no run like it was timed, `core_seconds`, these times the CPU threads, and the
        names of other `machines` that were timed.
    """
    ratios = time_ratios(timed_runs)
    expected_time = cache(partial(time_per_example, machine=machine, timed_runs=timed_runs, ratios=ratios))
    rows: list[dict[str, Any]] = []
    for run in runs:
        config = run.setup.all_options()
        images = config["train_examples"] or num_images(config["dataset"])
        if not images:
            rows.append({"seconds": None, "core_seconds": None, "machines": frozenset()})
            continue
        shape = datasets.describe(config["dataset"])["shape"]
        training = Training(
            device=device, backbone=config["backbone"], shape=str(list(shape)), precision=config["precision"]
        )
        expected = expected_time(run.setup.method.name, training)
        examples = round_examples(config, images) * (config["rounds"] - run.rounds_done)
        rows.append({
            "seconds": expected.seconds * examples,
            "core_seconds": expected.core_seconds * examples,
            "machines": expected.machines,
        })  # fmt: skip
    table = pd.DataFrame(rows, columns=["seconds", "core_seconds", "machines"])
    return table.astype({"seconds": float, "core_seconds": float})


def estimate_plan(plan: plans.Plan) -> pd.DataFrame:
    """Estimates the time of the runs to do of a plan, see `estimate_times`, by those in its folder and shipped ones."""
    timed_runs = times_of_runs(read_runs([plan.folder, plans.TABLES_FOLDER, *shipped_folders()]))
    (first, *_) = plan.runs
    hardware = environment(first.setup.device)["hardware"]
    to_do = [run for run in plan.runs if run.to_do]
    return estimate_times(to_do, timed_runs, hardware["device"], hardware["name"])


def time_text(estimated: pd.DataFrame, machine: str = "", cores: bool = False) -> str:
    """The time of runs, see `estimate_times`, in words; `machine` is named if no other was timed.

    Of `cores`, it is the time that CPU cores are at work.
    """
    seconds = estimated["core_seconds"] if cores else estimated["seconds"]
    num_estimated = seconds.count()
    if not num_estimated:
        return "not known, none like them was timed"
    minutes = max(1, seconds.sum() / 60)
    if minutes >= 10 * MINUTES_PER_HOUR:
        text = f"about {minutes / MINUTES_PER_HOUR:,.0f}"
    elif minutes >= MINUTES_PER_HOUR:
        text = f"about {minutes / MINUTES_PER_HOUR:,.1f}"
    else:
        text = f"about {minutes:.0f}"
    if cores:
        text += " core-hours" if minutes >= MINUTES_PER_HOUR else " core-minutes"
    else:
        text += " h" if minutes >= MINUTES_PER_HOUR else " min"
    if num_estimated < len(estimated):
        text += f" for {num_estimated} of {len(estimated)} runs"
    machines = set().union(*estimated["machines"])
    timed_on = " and ".join(sorted(machines)) or machine
    return f"{text}, timed on {timed_on}" if timed_on else text


def deciding_runs_text(answer: verdicts.Answer, folder: Path, timed_runs: pd.DataFrame) -> str:
    """What would decide a claim and how long that takes, in words; empty where it is decided.

    Of the `timed_runs`, those on an H100 count, else on another GPU; and those on a CPU.
    """
    if answer.verdict.outcome not in verdicts.OPEN_OUTCOMES:
        return ""
    seeds = answer.needed_seeds
    if len(seeds) > verdicts.MOST_SEEDS:
        return f"more than {verdicts.MOST_SEEDS} seeds, if their spread stays"
    table = find_table(answer.claim.table)
    plan = plans.plan_table(table, folder, seeds=seeds, only=verdicts.rows_and_columns(answer.claim))
    lacking = [run for run in plan.runs if run.to_do]
    words = f"{len(lacking)} runs in full"
    if len(seeds) > verdicts.FEWEST_SEEDS:
        words += f", to have {len(seeds)} seeds"
    needed = {name for run in lacking for name in run.setup.data_sets}
    closed = sorted(name for name in needed if not datasets.is_open_to_all(name))
    if closed:
        words += f" on {' and '.join(closed)}, whose images are not open"
    on_gpu = estimate_times(lacking, timed_runs, "cuda", H100)
    on_cpu = estimate_times(lacking, timed_runs, "cpu", "")
    times = []
    if on_gpu["seconds"].count():
        times.append(time_text(on_gpu, H100))
    if on_cpu["seconds"].count():
        times.append(time_text(on_cpu, cores=True))
    if not times:
        times.append(time_text(on_cpu))  # which says that it is not known
    return f"{words}; time: {'; '.join(times)}"
