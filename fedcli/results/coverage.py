"""How much of what the papers print has been run: from records alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedcli import registry
from fedcli.data import datasets
from fedcli.declarations import Cell, Table
from fedcli.results import claims
from fedcli.results.claims import Answer, says_something
from fedcli.results.comparison import printed_value
from fedcli.results.costs import Cost, Pace, paces
from fedcli.results.frame import departures, rows_by
from fedcli.results.metrics import find_metric
from fedcli.results.plans import Wanted, wanted
from fedcli.runs.settings import key

GPU = ("cuda", "NVIDIA H100 80GB HBM3")  # the machine whose hours are told first, kind and name as records have them

RunKey = tuple[str, int]  # the key of its settings, and its seed


@dataclass(frozen=True)
class PrintedCell:
    """A cell of which the paper prints a number.

    Attributes:
        table: Name of the table.
        run: What it is read from.
        needed: Its runs, one a seed of its table.
        done: Those of them that have been made in full.
        open: Whether anybody can have the images.
    """

    table: str
    run: Wanted
    needed: frozenset[RunKey]
    done: frozenset[RunKey]
    open: bool


def is_printed(table: Table, cell: Cell) -> bool:
    """Whether the paper prints a number in a cell."""
    return printed_value(table, cell.row, cell.column, find_metric(cell.metric)) is not None


def printed_cells(tables: Iterable[Table], runs: pd.DataFrame) -> list[PrintedCell]:
    """The cells of tables of which the paper prints a number.

    Args:
        tables: The tables.
        runs: See `fedcli.results.claims.ended_runs`.
    """
    groups = rows_by(runs, "method", "protocol", "dataset")
    cells = []
    for table in tables:
        for cell in table.cells:
            if is_printed(table, cell):
                run = wanted(cell)
                seeds = _seeds_in_full(run, groups)
                needed = frozenset((key(run.settings), seed) for seed in table.seeds)
                done = frozenset(pair for pair in needed if pair[1] in seeds)
                cells.append(PrintedCell(table.name, run, needed, done, all(map(datasets.open_to_all, run.data))))
    return cells


def _seeds_in_full(run: Wanted, groups: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]]) -> set[int]:
    """The seeds with a run in full that a cell can be read from; `groups` are rows by method, protocol and data set."""
    names = run.setup.method.name, run.setup.protocol.name, run.setup.run.dataset
    return {
        row["seed"]
        for row in groups.get(names, ())
        if not departures(row, run.settings, run.metric) and says_something(row["record"], run.metric)
    }


def paces_of(runs: pd.DataFrame, disturbed: bool = False) -> list[Pace]:
    """The paces of runs, for the data sets of all tables; `disturbed` as in `fedcli.results.costs.paces`."""
    tables = registry.tables().values()
    return paces(runs, {cell.settings.get("dataset", "") for table in tables for cell in table.cells}, disturbed)


def time_left(cells: Sequence[PrintedCell], timed: Sequence[Pace], machine: tuple[str, str]) -> Cost:
    """What is known of the time of the runs that cells lack.

    Args:
        cells: The cells.
        timed: See `paces_of`.
        machine: Kind and name of what they would run on.
    """
    lacking = {pair: cell.run for cell in cells for pair in sorted(cell.needed - cell.done)}
    left = Cost()
    for run in lacking.values():
        left.add(run.setup, 0, timed, machine)
    return left


def decided_by(answer: Answer, runs: pd.DataFrame, timed: Mapping[tuple[str, str], Sequence[Pace]]) -> str:
    """What would decide a claim and how long that takes, in words; empty where it is decided.

    Args:
        answer: The claim and what the records say of it.
        runs: See `fedcli.results.claims.ended_runs`.
        timed: The paces of runs by kind and name of a machine; the first that has run such a network counts.
    """
    if answer.verdict in (claims.REPRODUCED, claims.CONTRADICTED):
        return ""
    seeds = answer.seeds
    if len(seeds) > claims.MOST_SEEDS:
        return f"more than {claims.MOST_SEEDS} seeds, if their spread stays"
    groups = rows_by(runs, "method", "protocol", "dataset")
    lacking = {}
    for cell in (cell for column in claims.cells_of(answer.claim) for cell in column):
        run = wanted(cell)
        for seed in {*seeds} - _seeds_in_full(run, groups):
            lacking[key(run.settings), seed] = run
    words = f"{len(lacking)} runs in full" + f", to have {len(seeds)} seeds" * (len(seeds) > claims.FEWEST)
    if sets := sorted({name for run in lacking.values() for name in run.data if not datasets.open_to_all(name)}):
        words += f" on {' and '.join(sets)}, whose images are not open"
    for machine, known in timed.items():
        cost = Cost()
        for run in lacking.values():
            cost.add(run.setup, 0, known, machine)
        if cost.known:
            hours = cost.seconds / 3600
            words += f": {hours:,.{0 if hours >= 10 else 1}f} h"
            words += f" for {cost.known} of them" * (cost.known < cost.runs)
            return f"{words} on an H100, at most" if machine == GPU else f"{words} on {machine[1]} (no GPU timed)"
    return f"{words}; none like them has been timed"


def usual_machine(runs: pd.DataFrame) -> tuple[str, str]:
    """Kind and name of the device that most runs were made on."""
    kinds = Counter((record["hardware"]["device"], record["hardware"]["name"]) for record in runs["record"])
    return max(kinds, key=lambda kind: (kinds[kind], kind), default=("cpu", ""))
