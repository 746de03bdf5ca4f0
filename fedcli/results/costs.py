"""How long runs take that are still to do, by the runs that were timed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from fedcli.data import datasets
from fedcli.registry import find_table
from fedcli.results import claims, plans
from fedcli.results.frame import read_runs, shipped
from fedcli.results.plans import PlannedRun, TablePlan, round_examples
from fedcli.runs.records import environment, quiet
from fedcli.userfiles import is_from_file

Machine = tuple[str, str]  # kind and name of a device, as records have them
GPU: Machine = ("cuda", "NVIDIA H100 80GB HBM3")  # the one whose hours are told first
# What the time of a run depends on, the weightiest first; the first ALIKE of them two runs must share.
TRAITS = ["device", "backbone", "shape", "precision", "machine", "dataset", "batch_size", "method"]
ALIKE = 4
WEIGHTS = [2**place for place in reversed(range(len(TRAITS)))]  # a trait outweighs all that come after it


def _traits(config: Mapping[str, Any], method: str, shape: Iterable[int], machine: Machine) -> dict[str, Any]:
    """What the time of a run depends on, see `TRAITS`."""
    options = {name: config[name] for name in ("backbone", "precision", "dataset", "batch_size")}
    return {**options, "method": method, "shape": str([*shape]), "device": machine[0], "machine": machine[1]}


def paces(runs: pd.DataFrame, planned: Iterable[str] = (), disturbed: bool = False) -> pd.DataFrame:
    """Measures the quiet runs among those there are.

    Args:
        runs: See `fedcli.results.frame`.
        planned: The data sets of runs to do; a file that only a record names is not run for its size.
        disturbed: Measure the others, too: what they took is the most that such a run takes.

    Returns:
        A row a run: the seconds of a round but for its test, for each example that is trained on, as `train`, those of
        the test after a round as `test`, and `TRAITS`.
    """
    timed = []
    for record in runs["record"]:
        config, shape = record["config"], record["model"].get("input")
        is_measured = record["rounds"] and shape is not None and "moved" not in record and (disturbed or quiet(record))
        is_known = not is_from_file(config["dataset"]) or config["dataset"] in planned
        if is_measured and is_known and (examples := round_examples(config)):
            test = fmean(entry["seconds"]["evaluate"] for entry in record["rounds"])
            train = (fmean(sum(entry["seconds"].values()) for entry in record["rounds"]) - test) / examples
            timed.append({"train": train, "test": test, **_traits(config, record["method"], shape, machine_of(record))})
    return pd.DataFrame(timed, columns=["train", "test", *TRAITS])


def machine_of(record: Mapping[str, Any]) -> Machine:
    """The device on which a run was made."""
    return record["hardware"]["device"], record["hardware"]["name"]


def usual_machine(runs: pd.DataFrame) -> Machine:
    """What most runs were made on."""
    machines = runs["record"].map(machine_of).value_counts()
    return machines.index[0] if len(machines) else ("cpu", "")


def cost_of(runs: Iterable[PlannedRun], timed: pd.DataFrame, machine: Machine) -> pd.DataFrame:
    """Estimates the time of runs, each by the nearest of the runs that were timed, scaled by its local steps.

    Args:
        runs: The runs to do.
        timed: See `paces`.
        machine: What they would run on.

    Returns:
        A row a run: `seconds`, NaN where no run like it was timed, and `machines`, the names of those on which the
        nearest were timed where they are others.
    """
    rows, measured = [], timed[TRAITS].to_numpy()
    for run in runs:
        config, seconds, machines = run.setup.values(), None, set()
        if examples := round_examples(config):
            shape = datasets.describe(config["dataset"])["shape"]
            traits = _traits(config, run.setup.method.name, shape, machine)
            nearness = (measured == np.array([traits[name] for name in TRAITS], object)) @ WEIGHTS
            nearest = timed[(nearness == nearness.max(initial=0)) & (nearness >= sum(WEIGHTS[:ALIKE]))]
            if len(nearest):
                seconds = (nearest["train"] * examples + nearest["test"]).median()
                seconds *= run.setup.run.rounds - run.rounds_done
                machines = {*nearest["machine"]} - {machine[1]}
        rows.append((seconds, machines))
    return pd.DataFrame(rows, columns=["seconds", "machines"]).astype({"seconds": float})


def estimate(plan: TablePlan) -> pd.DataFrame:
    """Estimates the time of a table's runs to do, by the runs where it looks for runs, and the shipped ones.

    Returns:
        See `cost_of`, and for each run whether it is `left_out` as its data set is missing.
    """
    todo, starting = [run for run in plan.runs if run.to_do], {run.folder for run in plan.to_run}
    timed = paces(read_runs([plan.folder, *plan.search, *shipped()]), {run.setup.run.dataset for run in plan.runs})
    machine = machine_of(environment(plan.runs[0].setup.device))
    return cost_of(todo, timed, machine).assign(left_out=[run.folder not in starting for run in todo])


def time_text(estimated: pd.DataFrame) -> str:
    """What is known of the time of runs, see `cost_of`, in words."""
    seconds = estimated["seconds"]
    if not seconds.count():
        return f"not known for {len(seconds)} runs, none like them was timed"
    minutes = max(1, seconds.sum() / 60)
    text = f"{minutes / 60:,.1f} hours" if minutes >= 90 else f"{minutes:.0f} min"
    machines = ", ".join(f"timed on {name}" for name in sorted(set().union(*estimated["machines"])))
    return f"about {text} for {seconds.count()} of {len(seconds)} runs" + (f" ({machines})" if machines else "")


def decided_by(answer: claims.Answer, folder: Path, timed: Mapping[Machine, pd.DataFrame]) -> str:
    """What would decide a claim and how long that takes, in words; empty where it is decided.

    Args:
        answer: The claim and what the records say of it.
        folder: Of the records.
        timed: The paces of runs by machine; the first that has run such a network counts.
    """
    seeds = answer.needed_seeds
    if answer.verdict in (claims.REPRODUCED, claims.CONTRADICTED):
        return ""
    if len(seeds) > claims.MOST_SEEDS:
        return f"more than {claims.MOST_SEEDS} seeds, if their spread stays"
    plan = plans.plan(find_table(answer.claim.table), folder, seeds=seeds, only=claims.names_of(answer.claim))
    lacking = [run for run in plan.runs if run.to_do]
    words = f"{len(lacking)} runs in full" + f", to have {len(seeds)} seeds" * (len(seeds) > claims.FEWEST)
    closed = {name for run in lacking for name in run.setup.data_sets if not datasets.open_to_all(name)}
    if closed:
        words += f" on {' and '.join(sorted(closed))}, whose images are not open"
    for machine, measured in timed.items():
        seconds = cost_of(lacking, measured, machine)["seconds"]
        if timed_runs := seconds.count():
            hours = seconds.sum() / 3600
            words += f": {hours:,.{0 if hours >= 10 else 1}f} h on {machine[1]}"
            return words + (f" for {timed_runs} of them" if timed_runs < len(lacking) else "")
    return f"{words}; none like them has been timed"
