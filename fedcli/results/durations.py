"""Estimates how long planned runs will take, by the runs that were timed."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from math import isnan, nan
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from fedcli.data import datasets
from fedcli.data.datasets import num_images
from fedcli.results import plans
from fedcli.results.run_records import ReadRun, find_shipped_folders, read_runs
from fedcli.runs.machine import environment, is_undisturbed


class Training(NamedTuple):
    """What a run must have in common with those by whose time its own is estimated.

    Attributes:
        device: The kind of device, "cpu" or "cuda".
        backbone: The name of the backbone.
        shape: The shape of an image, as "[3, 32, 32]".
        precision: The precision of the arithmetic.
    """

    device: str
    backbone: str
    shape: str
    precision: str


class TimedRun(NamedTuple):
    """A run that was timed; the last four fields are those of `Training`.

    Attributes:
        seconds_per_example: The time of a round with its test, divided by the examples of the round.
        examples: The number of examples of a round.
        threads: The number of CPU threads.
        undisturbed: Whether no other work disturbed the run.
        machine: The name of the machine.
        method: The name of the method.
    """

    seconds_per_example: float
    examples: float
    threads: int
    undisturbed: bool
    machine: str
    method: str
    device: str
    backbone: str
    shape: str
    precision: str


TRAINING_COLUMNS = list(Training._fields)
REFERENCE_METHOD = "fedavg"  # the method that all others are timed against
MINUTES_PER_HOUR = 60


def count_round_examples(config: Mapping[str, Any], images: int) -> float:
    """Counts the examples in the local epochs of a round.

    Args:
        config: The options of the run.
        images: The number of images that all clients share, with those that they hold out.
    """
    return images * config["cohort_size"] / config["num_clients"] * config["local_epochs"]


def tabulate_times(runs: Iterable[ReadRun]) -> pd.DataFrame:
    """Makes a table of the times of runs, without those that moved to another machine or have no round.

    Returns:
        A row a run, whose columns are the fields of `TimedRun`.
    """
    timed_runs = []
    for run in runs:
        record = run.record
        shape = record["model"].get("input")
        if not record["rounds"] or shape is None or record["moved"]:
            continue
        config = record["config"]
        hardware = record["hardware"]
        examples = count_round_examples(config, sum(record["partition"]["sizes"]))
        round_seconds = fmean(sum(entry["seconds"].values()) for entry in record["rounds"])
        timed_run = TimedRun(
            seconds_per_example=round_seconds / examples,
            examples=examples,
            threads=hardware.get("threads", 1),
            undisturbed=is_undisturbed(record),
            machine=hardware["name"],
            method=record["method"],
            device=hardware["device"],
            backbone=config["backbone"],
            shape=str(list(shape)),
            precision=config["precision"],
        )
        timed_runs.append(timed_run)
    return make_table_of_times(timed_runs)


def make_table_of_times(timed_runs: Iterable[TimedRun]) -> pd.DataFrame:
    """Makes a table of timed runs, a row a run, whose columns are the fields of `TimedRun`."""
    return pd.DataFrame(timed_runs, columns=TimedRun._fields).astype({"undisturbed": bool})


def compute_time_ratios(timed_runs: pd.DataFrame) -> pd.Series:
    """Computes how many times as long each method takes as FedAvg.

    Only rounds with as many examples are compared, since a part of a round's time is not training.

    Args:
        timed_runs: The timed runs, see `tabulate_times`.

    Returns:
        The median ratio over the networks and machines that have runs of both methods, by the name of the method.
    """
    conditions = ["machine", "undisturbed", "threads", "examples", *TRAINING_COLUMNS]
    medians = timed_runs.groupby(["method", *conditions])["seconds_per_example"].median().reset_index()
    reference = medians[medians["method"] == REFERENCE_METHOD].drop(columns="method")
    both = medians.merge(reference, on=conditions, suffixes=("", "_reference"))
    ratios = both["seconds_per_example"] / both["seconds_per_example_reference"]
    return ratios.groupby(both["method"]).median()


class ExpectedTime(NamedTuple):
    """How long a run is expected to take.

    Attributes:
        seconds: The time in seconds; NaN if no run like it was timed.
        core_seconds: The time multiplied by the number of CPU threads; NaN likewise.
        machines: The names of the other machines on which the runs were timed.
    """

    seconds: float
    core_seconds: float
    machines: frozenset[str]


class TimePerExample(NamedTuple):
    """How long a run is expected to take for an example; the fields are those of `ExpectedTime`."""

    seconds: float
    core_seconds: float
    machines: frozenset[str]

    def for_examples(self, num_examples: float) -> ExpectedTime:
        """Returns the time for so many examples."""
        return ExpectedTime(self.seconds * num_examples, self.core_seconds * num_examples, self.machines)


UNKNOWN_TIME = ExpectedTime(nan, nan, frozenset())


def estimate_time_per_example(
    method: str, training: Training, machine: str, timed_runs: pd.DataFrame, ratios: pd.Series
) -> TimePerExample:
    """Estimates the time of a run for an example by the median of the timed runs that are nearest to it.

    Args:
        method: The method of the run.
        training: What the timed runs must have in common with the run.
        machine: The machine that the run is to use.
        timed_runs: The timed runs, see `tabulate_times`.
        ratios: The relative times of methods, see `compute_time_ratios`.
    """
    nearest = timed_runs
    for name, value in training._asdict().items():
        nearest = nearest[nearest[name] == value]
    nearest = _prefer(nearest, nearest["machine"] == machine)
    nearest = _prefer(nearest, nearest["method"] == method)
    nearest = _prefer(nearest, nearest["undisturbed"])
    ratios_of_nearest = nearest["method"].map(ratios).astype(float).fillna(1.0)  # of no runs it would be text
    seconds = nearest["seconds_per_example"] * ratios.get(method, 1.0) / ratios_of_nearest
    core_seconds = seconds * nearest["threads"]
    return TimePerExample(seconds.median(), core_seconds.median(), frozenset(nearest["machine"]) - {machine})


def _prefer(runs: pd.DataFrame, is_preferred: pd.Series) -> pd.DataFrame:
    """Selects the preferred runs; returns all runs if none is preferred."""
    return runs[is_preferred] if is_preferred.any() else runs


def estimate_times(
    runs: Iterable[plans.PlannedRun], timed_runs: pd.DataFrame, device: str, machine: str
) -> list[ExpectedTime]:
    """Estimates the time of each run by the median of timed ones with the same network, images and kind of device.

    Of these, the runs of `machine` go first, then those of the same method, and then those that no other work
    disturbed. What another method takes is multiplied by what `compute_time_ratios` says of the two methods.
    """
    ratios = compute_time_ratios(timed_runs)
    estimate_per_example = cache(
        partial(estimate_time_per_example, machine=machine, timed_runs=timed_runs, ratios=ratios)
    )
    times = []
    for run in runs:
        config = run.setup.all_options()
        images = config["train_examples"] or num_images(config["dataset"], config["local_test"])
        if not images:
            times.append(UNKNOWN_TIME)
            continue
        shape = datasets.describe(config["dataset"])["shape"]
        training = Training(
            device=device, backbone=config["backbone"], shape=str(list(shape)), precision=config["precision"]
        )
        examples = count_round_examples(config, images) * (config["rounds"] - run.rounds_done)
        times.append(estimate_per_example(run.setup.method.name, training).for_examples(examples))
    return times


def estimate_plan(plan: plans.Plan) -> list[ExpectedTime]:
    """Estimates the times of the runs of a plan that need running, by the runs in its folder and the shipped ones."""
    timed_runs = tabulate_times(read_runs([plan.folder, plans.TABLES_FOLDER, *find_shipped_folders()]))
    hardware = environment(plan.runs[0].setup.device)["hardware"]
    to_do = [run for run in plan.runs if run.needs_running]
    return estimate_times(to_do, timed_runs, hardware["device"], hardware["name"])


def describe_time(times: Sequence[ExpectedTime]) -> str:
    """Describes in words the time that runs take one after the other, and the other machines that tell it."""
    text = describe_sum([time.seconds for time in times], hours="h", minutes="min")
    machines = list_other_machines(times)
    return f"{text}, timed on {' and '.join(machines)}" if machines else text


def describe_sum(seconds: Sequence[float], hours: str, minutes: str) -> str:
    """Describes the sum of times, as "about 3.5 h for 2 of 3 runs".

    Args:
        seconds: The times of runs in seconds; NaN where the time is not known.
        hours: The word for hours.
        minutes: The word for minutes.
    """
    timed = [value for value in seconds if not isnan(value)]
    if not timed:
        return "not known, none like them was timed"
    num_minutes = max(1, sum(timed) / 60)
    if num_minutes >= 10 * MINUTES_PER_HOUR:
        text = f"about {num_minutes / MINUTES_PER_HOUR:,.0f} {hours}"
    elif num_minutes >= MINUTES_PER_HOUR:
        text = f"about {num_minutes / MINUTES_PER_HOUR:,.1f} {hours}"
    else:
        text = f"about {num_minutes:.0f} {minutes}"
    if len(timed) < len(seconds):
        text += f" for {len(timed)} of {len(seconds)} runs"
    return text


def list_other_machines(times: Iterable[ExpectedTime]) -> list[str]:
    """Lists the names of the other machines on which runs like these were timed."""
    return sorted(frozenset().union(*(time.machines for time in times)))
