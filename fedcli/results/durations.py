"""How long planned runs will take, by the runs that were timed."""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from fedcli.data import datasets
from fedcli.data.datasets import num_images
from fedcli.results import plans
from fedcli.results.frame import RunRow, find_shipped_folders, read_runs
from fedcli.runs.machine import environment, is_undisturbed


class Training(NamedTuple):
    """What a run and those whose time tells its own have in common."""

    device: str  # "cpu" or "cuda"
    backbone: str
    shape: str  # of an image, as "[3, 32, 32]"
    precision: str


TRAINING_COLUMNS = list(Training._fields)
TIMED_COLUMNS = ["seconds", "examples", "threads", "undisturbed", "machine", "method", *TRAINING_COLUMNS]
REFERENCE_METHOD = "fedavg"  # the method that all others are timed against
MINUTES_PER_HOUR = 60


def count_round_examples(config: Mapping[str, Any], images: int) -> float:
    """Examples in the local epochs of a round, of clients that share so many images, those held out among them."""
    return images * config["cohort_size"] / config["num_clients"] * config["local_epochs"]


def tabulate_times(runs: Iterable[RunRow]) -> pd.DataFrame:
    """The times of runs that did not move to another machine.

    Returns:
        A row a run: `seconds` of a round, its test included, for an example of its training; the `examples` of a round;
        CPU `threads`; whether it was `undisturbed` by other work; the name of its `machine`; the `method`; and
        `TRAINING_COLUMNS`.
    """
    rows = []
    for run in runs:
        record = run.record
        shape = record["model"].get("input")
        if not record["rounds"] or shape is None or record["moved"]:
            continue
        config = record["config"]
        hardware = record["hardware"]
        examples = count_round_examples(config, sum(record["partition"]["sizes"]))
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


def compute_time_ratios(timed_runs: pd.DataFrame) -> pd.Series:
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


def estimate_time_per_example(
    method: str, training: Training, machine: str, timed_runs: pd.DataFrame, ratios: pd.Series
) -> TimePerExample:
    """The time of a run for an example: the median of the timed runs that are nearest to it.

    Args:
        method: Its method.
        training: What the timed runs have in common with it.
        machine: The machine it is to run on.
        timed_runs: See `tabulate_times`.
        ratios: See `compute_time_ratios`.
    """
    nearest = timed_runs
    for name, value in training._asdict().items():
        nearest = nearest[nearest[name] == value]
    nearest = _prefer(nearest, nearest["machine"] == machine)
    nearest = _prefer(nearest, nearest["method"] == method)
    nearest = _prefer(nearest, nearest["undisturbed"])
    ratios_of_nearest = nearest["method"].map(ratios).astype(float).fillna(1.0)  # of no runs it would be text
    seconds = nearest["seconds"] * ratios.get(method, 1.0) / ratios_of_nearest
    core_seconds = seconds * nearest["threads"]
    return TimePerExample(seconds.median(), core_seconds.median(), frozenset(nearest["machine"]) - {machine})


def _prefer(runs: pd.DataFrame, is_preferred: pd.Series) -> pd.DataFrame:
    """The preferred ones of some runs; all of them where none is preferred."""
    return runs[is_preferred] if is_preferred.any() else runs


def estimate_times(
    runs: Iterable[plans.PlannedRun], timed_runs: pd.DataFrame, device: str, machine: str
) -> pd.DataFrame:
    """Estimates the time of runs by the median of timed ones with the same network, images and kind of device.

    Of these, the runs of `machine` go first, then those of the same method, and then those that no other work
    disturbed. What another method takes is multiplied by what `compute_time_ratios` says of the two methods.

    Returns:
        A row a run: `seconds`, NaN where no run like it was timed, `core_seconds`, these times the CPU threads, and the
        names of other `machines` that were timed.
    """
    ratios = compute_time_ratios(timed_runs)
    expected_time = cache(partial(estimate_time_per_example, machine=machine, timed_runs=timed_runs, ratios=ratios))
    rows: list[dict[str, Any]] = []
    for run in runs:
        config = run.setup.all_options()
        images = config["train_examples"] or num_images(config["dataset"], config["local_test"])
        if not images:
            rows.append({"seconds": None, "core_seconds": None, "machines": frozenset()})
            continue
        shape = datasets.describe(config["dataset"])["shape"]
        training = Training(
            device=device, backbone=config["backbone"], shape=str(list(shape)), precision=config["precision"]
        )
        expected = expected_time(run.setup.method.name, training)
        examples = count_round_examples(config, images) * (config["rounds"] - run.rounds_done)
        rows.append({
            "seconds": expected.seconds * examples,
            "core_seconds": expected.core_seconds * examples,
            "machines": expected.machines,
        })  # fmt: skip
    table = pd.DataFrame(rows, columns=["seconds", "core_seconds", "machines"])
    return table.astype({"seconds": float, "core_seconds": float})


def estimate_plan(plan: plans.Plan) -> pd.DataFrame:
    """Estimates the time of the runs to do of a plan, see `estimate_times`, by those in its folder and shipped ones."""
    timed_runs = tabulate_times(read_runs([plan.folder, plans.TABLES_FOLDER, *find_shipped_folders()]))
    hardware = environment(plan.runs[0].setup.device)["hardware"]
    to_do = [run for run in plan.runs if run.needs_running]
    return estimate_times(to_do, timed_runs, hardware["device"], hardware["name"])


def describe_time(estimated: pd.DataFrame) -> str:
    """The time of runs one after the other, see `estimate_times`, in words."""
    text = describe_sum(estimated["seconds"], hours="h", minutes="min")
    machines = list_other_machines(estimated)
    return f"{text}, timed on {' and '.join(machines)}" if machines else text


def describe_sum(seconds: pd.Series, hours: str, minutes: str) -> str:
    """The sum of times as "about 3.5 h for 2 of 3 runs", with these words for hours and minutes."""
    num_estimated = seconds.count()
    if not num_estimated:
        return "not known, none like them was timed"
    num_minutes = max(1, seconds.sum() / 60)
    if num_minutes >= 10 * MINUTES_PER_HOUR:
        text = f"about {num_minutes / MINUTES_PER_HOUR:,.0f} {hours}"
    elif num_minutes >= MINUTES_PER_HOUR:
        text = f"about {num_minutes / MINUTES_PER_HOUR:,.1f} {hours}"
    else:
        text = f"about {num_minutes:.0f} {minutes}"
    if num_estimated < len(seconds):
        text += f" for {num_estimated} of {len(seconds)} runs"
    return text


def list_other_machines(estimated: pd.DataFrame) -> list[str]:
    """The names of the other machines on which runs like these were timed."""
    return sorted(set().union(*estimated["machines"]))
