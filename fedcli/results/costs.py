"""What runs cost that are still to do: hours by the nearest run that was timed, and bytes of models."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

import pandas as pd

from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.results.frame import read_runs, shipped
from fedcli.results.plans import TablePlan, round_examples
from fedcli.runs import models
from fedcli.runs.config import Setup
from fedcli.runs.records import environment, quiet
from fedcli.userfiles import is_from_file

ALIKE = 4  # traits that a timed run must share with one whose time it tells, see `_traits`


class Pace(NamedTuple):
    """How fast a timed run was, and what tells how near it is to another, see `_traits`."""

    train: float  # seconds of a round but for its test, for each example that is trained on
    test: float  # seconds of the test after a round
    traits: tuple


def _traits(config: Mapping[str, Any], method: str, shape: Iterable[int], machine: tuple[str, str]) -> tuple:
    """What the time of a run depends on: `ALIKE` traits that two runs must share, then the others by their weight."""
    device, name = machine
    return (
        device, config["backbone"], tuple(shape), config["precision"],
        name, config["dataset"], config["batch_size"], method,
    )  # fmt: skip


def paces(runs: pd.DataFrame, planned: Iterable[str], disturbed: bool = False) -> list[Pace]:
    """Measures the quiet runs among those there are.

    Args:
        runs: See `fedcli.results.frame`.
        planned: The data sets of runs to do; a file that only a record names is not run for its size.
        disturbed: Measure the others, too: what they took is the most that such a run takes.
    """
    planned, timed = set(planned), []
    for record in runs["record"]:
        config, shape, hardware = record["config"], record["model"].get("input"), record["hardware"]
        if not record["rounds"] or shape is None or "moved" in record or not (disturbed or quiet(record)):
            continue
        if is_from_file(config["dataset"]) and config["dataset"] not in planned:
            continue
        if examples := round_examples(config):
            test = fmean(entry["seconds"]["evaluate"] for entry in record["rounds"])
            train = fmean(sum(entry["seconds"].values()) for entry in record["rounds"]) - test
            traits = _traits(config, record["method"], shape, (hardware["device"], hardware["name"]))
            timed.append(Pace(train / examples, test, traits))
    return timed


def seconds_a_round(setup: Setup, timed: Sequence[Pace], machine: tuple[str, str]) -> tuple[float, set[str]] | None:
    """Estimates the seconds of a round by the nearest of the runs that were timed, scaled by its local steps.

    Args:
        setup: The run.
        timed: See `paces`.
        machine: Kind and name of what the run would use.

    Returns:
        The seconds, and the names of the machines that they were measured on; None where no run is like this one.
    """
    config = setup.values()
    examples = round_examples(config)
    if not timed or examples is None:
        return None
    traits = _traits(config, setup.method.name, datasets.describe(setup.run.dataset)["shape"], machine)
    likeness = [[mine == other for mine, other in zip(traits, pace.traits, strict=True)] for pace in timed]
    nearest = [pace for pace, shared in zip(timed, likeness, strict=True) if shared == max(likeness)]
    if not all(max(likeness)[:ALIKE]):
        return None
    return median(pace.train * examples + pace.test for pace in nearest), {pace.traits[ALIKE] for pace in nearest}


@dataclass
class Cost:
    """What is known of the time of runs to do.

    Attributes:
        runs: How many they are.
        known: Of how many the seconds are known.
        seconds: Of these, one after the other.
        by: Where the timed runs ran, of those that are not of this machine: "timed on <machine>".
    """

    runs: int = 0
    known: int = 0
    seconds: float = 0.0
    by: set[str] = field(default_factory=set)

    def add(self, setup: Setup, rounds_done: int, timed: Sequence[Pace], machine: tuple[str, str]) -> None:
        """Counts a run to do.

        Args:
            setup: The run.
            rounds_done: Rounds that there are of it.
            timed: See `paces`.
            machine: Kind and name of what it would run on.
        """
        self.runs += 1
        estimated = seconds_a_round(setup, timed, machine)
        if estimated is not None:
            seconds, names = estimated
            self.known += 1
            self.seconds += seconds * (setup.run.rounds - rounds_done)
            self.by |= {f"timed on {name}" for name in names if name != machine[1]}


def estimate(plan: TablePlan) -> dict[str, Cost]:
    """Estimates seconds that the runs to do take, by the runs where the table looks for runs, and the shipped ones.

    Returns:
        By column, also for runs whose data set is missing; a run of several columns counts in the first.
    """
    columns = {run.folder: cell.cell.column for cell in reversed(plan.cells) for run in cell.runs if run.to_do}
    if not columns:
        return {}
    hardware = environment(plan.runs[0].setup.device)["hardware"]
    runs = read_runs([plan.folder, *plan.search, *shipped()])
    timed = paces(runs, {run.setup.run.dataset for run in plan.runs})
    costs: dict[str, Cost] = {}
    for run in plan.runs:
        if run.to_do:
            cost = costs.setdefault(columns[run.folder], Cost())
            cost.add(run.setup, run.rounds_done, timed, (hardware["device"], hardware["name"]))
    return costs


def bytes_kept(plan: TablePlan) -> int:
    """Bytes of the models that the runs to do leave, at least; those of a data set of unknown classes are left out."""
    total = 0
    for run in (run for run in plan.runs if run.to_do):
        with suppress(UserError):  # of a damaged file, which the run will refuse
            about = datasets.describe(run.setup.run.dataset)
            if about["classes"] is not None:
                total += models.bytes_kept(run.setup, *about["shape"][:2], about["classes"])
    return total
