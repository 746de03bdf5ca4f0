"""What runs cost that are still to do, hours and bytes, and how much of what the papers print has been run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import pandas as pd

from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results import claims, plans
from fedcli.results.comparison import printed_value
from fedcli.results.frame import read_runs, shipped
from fedcli.results.plans import PlannedRun, TablePlan, round_examples
from fedcli.runs import models
from fedcli.runs.records import environment, quiet
from fedcli.userfiles import is_from_file

ALIKE = 4  # traits that a timed run must share with one whose time it tells, see `_traits`
Machine = tuple[str, str]  # kind and name of a device, as records have them
GPU: Machine = ("cuda", "NVIDIA H100 80GB HBM3")  # the one whose hours are told first


class Pace(NamedTuple):
    """How fast a timed run was, and what tells how near it is to another, see `_traits`."""

    train: float  # seconds of a round but for its test, for each example that is trained on
    test: float  # seconds of the test after a round
    traits: tuple


def _traits(config: Mapping[str, Any], method: str, shape: Iterable[int], machine: Machine) -> tuple:
    """What the time of a run depends on: `ALIKE` traits that two runs must share, then the others by their weight."""
    device, name = machine
    return (
        device, config["backbone"], tuple(shape), config["precision"],
        name, config["dataset"], config["batch_size"], method,
    )  # fmt: skip


def paces(runs: pd.DataFrame, planned: Iterable[str] = (), disturbed: bool = False) -> list[Pace]:
    """Measures the quiet runs among those there are.

    Args:
        runs: See `fedcli.results.frame`.
        planned: The data sets of runs to do; a file that only a record names is not run for its size.
        disturbed: Measure the others, too: what they took is the most that such a run takes.
    """
    timed = []
    for record in runs["record"]:
        config, shape = record["config"], record["model"].get("input")
        is_measured = record["rounds"] and shape is not None and "moved" not in record and (disturbed or quiet(record))
        is_known = not is_from_file(config["dataset"]) or config["dataset"] in planned
        if is_measured and is_known and (examples := round_examples(config)):
            test = fmean(entry["seconds"]["evaluate"] for entry in record["rounds"])
            train = fmean(sum(entry["seconds"].values()) for entry in record["rounds"]) - test
            timed.append(Pace(train / examples, test, _traits(config, record["method"], shape, _machine(record))))
    return timed


def _machine(record: Mapping[str, Any]) -> Machine:
    return record["hardware"]["device"], record["hardware"]["name"]


@dataclass
class Cost:
    """What is known of the time of runs to do."""

    runs: int = 0  # how many they are
    known: int = 0  # of how many the seconds are known
    seconds: float = 0.0  # of these, one after the other
    by: set[str] = field(default_factory=set)  # "timed on <machine>", where the timed runs ran on another machine


def cost_of(runs: Iterable[PlannedRun], timed: Sequence[Pace], machine: Machine) -> Cost:
    """Estimates the time of runs, each by the nearest of the runs that were timed, scaled by its local steps.

    Args:
        runs: The runs to do.
        timed: See `paces`.
        machine: What they would run on.
    """
    cost = Cost()
    for run in runs:
        cost.runs += 1
        config = run.setup.values()
        examples = round_examples(config)
        if examples is None:
            continue
        traits = _traits(config, run.setup.method.name, datasets.describe(config["dataset"])["shape"], machine)
        alike = [pace for pace in timed if pace.traits[:ALIKE] == traits[:ALIKE]]
        if alike:
            likeness = [[mine == other for mine, other in zip(traits, pace.traits, strict=True)] for pace in alike]
            nearest = [pace for pace, shared in zip(alike, likeness, strict=True) if shared == max(likeness)]
            cost.known += 1
            seconds = median(pace.train * examples + pace.test for pace in nearest)
            cost.seconds += seconds * (run.setup.run.rounds - run.rounds_done)
            cost.by |= {f"timed on {pace.traits[ALIKE]}" for pace in nearest if pace.traits[ALIKE] != machine[1]}
    return cost


def estimate(plan: TablePlan) -> dict[str, Cost]:
    """Estimates seconds that the runs to do take, by the runs where the table looks for runs, and the shipped ones.

    Returns:
        By column, also for runs whose data set is missing; a run of several columns counts in the first.
    """
    todo = [run for run in plan.runs if run.to_do]
    if not todo:
        return {}
    runs = read_runs([plan.folder, *plan.search, *shipped()])
    timed = paces(runs, {run.setup.run.dataset for run in plan.runs})
    machine = _machine(environment(todo[0].setup.device))
    first = {run.folder: cell.cell.column for cell in reversed(plan.cells) for run in cell.runs}
    columns = dict.fromkeys(first[run.folder] for run in todo)
    return {column: cost_of((run for run in todo if first[run.folder] == column), timed, machine) for column in columns}


def bytes_kept(plan: TablePlan) -> int:
    """Bytes of the models that the runs to do leave, at least; those of a data set of unknown classes are left out."""
    total = 0
    for run in (run for run in plan.runs if run.to_do):
        with suppress(UserError):  # of a damaged file, which the run will refuse
            images = datasets.describe(run.setup.run.dataset)
            if images["classes"] is not None:
                total += models.bytes_kept(run.setup, *images["shape"][:2], images["classes"])
    return total


def usual_machine(runs: pd.DataFrame) -> Machine:
    """What most runs were made on."""
    machines = Counter(map(_machine, runs["record"]))
    return max(machines, key=machines.__getitem__, default=("cpu", ""))


def printed_cells(planned: Iterable[TablePlan]) -> pd.DataFrame:
    """The cells of tables of which the paper prints a number, with their runs: a row a cell and seed.

    Returns:
        Columns `table`, `cell` (its place among all cells), `run`, `folder` (of the run, which cells may share), `open`
        (whether anybody can have the images), `done`, and of the whole cell `full` (whether all its runs are done).
    """
    rows = []
    for number, (table, cell) in enumerate((plan.table, cell) for plan in planned for cell in plan.cells):
        if printed_value(table, cell.cell.row, cell.cell.column, cell.metric) is not None:
            for run in cell.runs:
                rows.append({
                    "table": table.name, "cell": number, "run": run, "folder": run.folder,
                    "open": all(map(datasets.open_to_all, run.setup.data_sets)),
                    "done": not run.to_do and claims.says_something(run.record, cell.metric),
                })  # fmt: skip
    cells = pd.DataFrame(rows, columns=["table", "cell", "run", "folder", "open", "done"])
    return cells.assign(full=cells.groupby("cell")["done"].transform("all"))


def decided_by(answer: claims.Answer, folder: Path, timed: Mapping[Machine, Sequence[Pace]]) -> str:
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
    for (kind, name), measured in timed.items():
        cost = cost_of(lacking, measured, (kind, name))
        if cost.known:
            hours = cost.seconds / 3600
            words += f": {hours:,.{0 if hours >= 10 else 1}f} h on {name}"
            return words + f" for {cost.known} of them" * (cost.known < cost.runs)
    return f"{words}; none like them has been timed"
