"""How long planned runs will take, by the runs that were timed."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from fedcli.data import datasets
from fedcli.data.datasets import num_images
from fedcli.registry import find_table
from fedcli.results import claims, plans
from fedcli.results.frame import read_runs, shipped
from fedcli.runs.machine import environment, quiet

H100 = "NVIDIA H100 80GB HBM3"
BENCHED = {"w3": ("resnet18", "[3, 32, 32]")}  # of `fedcli bench`: a network and images that a paper has
ALIKE = ["device", "backbone", "shape", "precision"]  # of a run and those whose time tells its own
TIMED = ["seconds", "examples", "threads", "quiet", "machine", "method", *ALIKE]
REFERENCE = "fedavg"  # the method that all others are timed against


def round_examples(config: Mapping[str, Any], images: int) -> float:
    """Examples in the local steps of a round, of clients that share so many images."""
    return images * config["cohort_size"] / config["num_clients"] * config["local_epochs"]


def paces(runs: pd.DataFrame) -> pd.DataFrame:
    """The speed of runs, see `fedcli.results.frame`, that did not move to another machine.

    Returns:
        A row a run: `seconds` of a round, its test included, for an example of its training; the `examples` of a round;
        CPU `threads`; whether the machine was `quiet`; its name as `machine`; the `method`; and `ALIKE`.
    """
    timed = []
    for record in runs["record"]:
        config = record["config"]
        hardware = record["hardware"]
        shape = record["model"].get("input")
        if record["rounds"] and shape is not None and not record["moved"]:
            examples = round_examples(config, sum(record["partition"]["sizes"]))
            seconds = fmean(sum(entry["seconds"].values()) for entry in record["rounds"]) / examples
            alike = hardware["device"], config["backbone"], str([*shape]), config["precision"]
            threads = hardware.get("threads", 1)
            timed.append((seconds, examples, threads, quiet(record), hardware["name"], record["method"], *alike))
    return pd.DataFrame(timed, columns=TIMED).astype({"quiet": bool})


def benched(folder: Path) -> pd.DataFrame:
    """The speed of FedAvg in the workloads that `fedcli bench` has timed on CUDA; see `paces`.

    Args:
        folder: Of the CSV files of `fedcli bench --csv`, one a machine.
    """
    timed = []
    for file in sorted(folder.glob("*-torch*.csv")):
        for row in pd.read_csv(file).query("device == 'cuda' and workload in @BENCHED").to_dict("records"):
            examples = row["samples_per_second"] * row["seconds_per_round"]
            seconds = (row["seconds_per_round"] + row["evaluation_seconds"]) / examples
            alike = row["device"], *BENCHED[row["workload"]], row["precision"]
            timed.append((seconds, examples, 1, True, row["hardware"], REFERENCE, *alike))
    return pd.DataFrame(timed, columns=TIMED).astype({"quiet": bool})


def relative_times(timed: pd.DataFrame) -> pd.Series:
    """How many times as long a method takes as FedAvg, by its name: a median over networks and machines with both.

    Their rounds have as many examples, since a round has a part that is none of its training.
    """
    places = ["machine", "quiet", "threads", "examples", *ALIKE]
    medians = timed.groupby(["method", *places])["seconds"].median().reset_index()
    reference = medians[medians["method"] == REFERENCE].drop(columns="method")
    both = medians.merge(reference, on=places, suffixes=("", "_reference"))
    return (both["seconds"] / both["seconds_reference"]).groupby(both["method"]).median()


def cost_of(runs: Iterable[plans.PlannedRun], timed: pd.DataFrame, device: str, machine: str) -> pd.DataFrame:
    """Estimates the time of runs by the median of timed ones with the same network, images and kind of device.

    Of these, see `paces`, the runs of `machine` go first, then those of the same method, and then those that no other
    work disturbed. What another method takes is multiplied by what `relative_times` says of the two.

    Returns:
        A row a run: `seconds`, NaN where no run like it was timed, `core_seconds`, these times the CPU threads, and the
        names of other `machines` that were timed.
    """
    rows: list[tuple] = []
    relative = relative_times(timed)

    @cache
    def pace(method: str, backbone: str, shape: str, precision: str) -> tuple[float, float, set[str]]:
        """The seconds of an example, these times the CPU threads, and the other machines that were timed."""
        alike = timed[(timed[ALIKE] == [device, backbone, shape, precision]).all(axis=1)]
        rank = 4 * (alike["machine"] == machine) + 2 * (alike["method"] == method) + alike["quiet"]
        nearest = alike[rank == rank.max()]
        of_others = nearest["method"].map(relative).astype(float).fillna(1.0)  # of no runs it would be text
        paces_here = nearest["seconds"] * relative.get(method, 1.0) / of_others
        core_paces = paces_here * nearest["threads"]
        return paces_here.median(), core_paces.median(), {*nearest["machine"]} - {machine}

    for run in runs:
        config = run.setup.values()
        images = config["train_examples"] or num_images(config["dataset"])
        if not images:
            rows.append((None, None, set()))
            continue
        shape = str([*datasets.describe(config["dataset"])["shape"]])
        seconds, core_seconds, machines = pace(run.setup.method.name, config["backbone"], shape, config["precision"])
        examples = round_examples(config, images) * (config["rounds"] - run.rounds_done)
        rows.append((seconds * examples, core_seconds * examples, machines))
    kinds = {"seconds": float, "core_seconds": float}
    return pd.DataFrame(rows, columns=["seconds", "core_seconds", "machines"]).astype(kinds)


def estimate(plan: plans.Plan) -> pd.DataFrame:
    """Estimates the time of the runs to do, see `cost_of`, by those in the plan's folder, of tables and shipped."""
    timed = paces(read_runs([plan.folder, plans.HOME, *shipped()]))
    hardware = environment(plan.runs[0].setup.device)["hardware"]
    return cost_of([run for run in plan.runs if run.to_do], timed, hardware["device"], hardware["name"])


def time_text(estimated: pd.DataFrame, machine: str = "", cores: bool = False) -> str:
    """The time of runs, see `cost_of`, in words; `machine` is named if no other was timed.

    Of `cores`, it is the time that CPU cores are at work.
    """
    seconds = estimated["core_seconds" if cores else "seconds"]
    if not seconds.count():
        return "not known, none like them was timed"
    minutes = max(1, seconds.sum() / 60)
    if minutes >= 60:
        text = f"{minutes / 60:,.{0 if minutes >= 600 else 1}f} {'core-hours' if cores else 'h'}"
    else:
        text = f"{minutes:.0f} {'core-minutes' if cores else 'min'}"
    machines = " and ".join(sorted(set().union(*estimated["machines"]))) or machine
    part = f" for {seconds.count()} of {len(seconds)} runs" if seconds.count() < len(seconds) else ""
    return f"about {text}{part}" + (f", timed on {machines}" if machines else "")


def decided_by(answer: claims.Answer, folder: Path, timed: pd.DataFrame) -> str:
    """What would decide a claim and how long that takes, in words; empty where it is decided.

    Of the `timed` runs, see `paces`, those on an H100 count, else on another GPU; and those on a CPU.
    """
    if answer.verdict not in claims.OPEN:
        return ""
    seeds = answer.needed_seeds
    if len(seeds) > claims.MOST_SEEDS:
        return f"more than {claims.MOST_SEEDS} seeds, if their spread stays"
    plan = plans.plan_table(find_table(answer.claim.table), folder, seeds=seeds, only=claims.names_of(answer.claim))
    lacking = [run for run in plan.runs if run.to_do]
    words = f"{len(lacking)} runs in full"
    if len(seeds) > claims.FEWEST:
        words += f", to have {len(seeds)} seeds"
    if closed := {name for run in lacking for name in run.setup.data_sets if not datasets.open_to_all(name)}:
        words += f" on {' and '.join(sorted(closed))}, whose images are not open"
    on_gpu = cost_of(lacking, timed, "cuda", H100)
    on_cpu = cost_of(lacking, timed, "cpu", "")
    times = [time_text(on_gpu, H100)] if on_gpu["seconds"].count() else []
    times += [time_text(on_cpu, cores=True)] if on_cpu["seconds"].count() else []
    return f"{words}; time: {'; '.join(times) or time_text(on_cpu)}"
