"""How much of what the papers print has been run: from records alone."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcli import registry
from fedcli.data import datasets
from fedcli.declarations import Cell, Table
from fedcli.results import claims, reproduce
from fedcli.results.claims import Answer, Runs, Wanted, departures, says_something, wanted
from fedcli.results.comparison import printed_value
from fedcli.results.metrics import find_metric

GPU = ("cuda", "NVIDIA H100 80GB HBM3")  # the machine whose hours are told first, kind and name as records have them

RunKey = tuple  # method, selection rule, options and seed, which tell a run from others


@dataclass(frozen=True)
class PrintedCell:
    """A cell of which the paper prints a number.

    Attributes:
        run: What it is read from.
        needed: Its runs, one a seed of its table.
        done: Those of them that have been made in full.
        open: Whether anybody can have the images.
    """

    run: Wanted
    needed: frozenset[RunKey]
    done: frozenset[RunKey]
    open: bool


def is_printed(table: Table, cell: Cell) -> bool:
    """Whether the paper prints a number in a cell."""
    return printed_value(table, cell.row, cell.column, find_metric(cell.metric)) is not None


def printed_cells(tables: Iterable[Table], records: Runs) -> list[PrintedCell]:
    """The cells of tables of which the paper prints a number.

    Args:
        tables: The tables.
        records: See `fedcli.results.claims.by_method`.
    """
    cells = []
    for table in tables:
        for cell in table.cells:
            if is_printed(table, cell):
                run = wanted(cell)
                key = run.method.name, run.setup.selection, json.dumps(run.values(0), sort_keys=True)
                there = _seeds_in_full(run, records)
                needed = frozenset((*key, seed) for seed in table.seeds)
                done = frozenset((*key, seed) for seed in table.seeds if seed in there)
                cells.append(PrintedCell(run, needed, done, all(map(datasets.open_to_all, run.data))))
    return cells


def _seeds_in_full(run: Wanted, records: Runs) -> set[int]:
    """The seeds with a run in full that a cell can be read from."""
    setting = run.setup.protocol.name, run.setup.run.dataset
    return {
        record["seed"]
        for _, record in records.get(run.method.name, ())
        if (record["protocol"], record["dataset"]) == setting
        and departures(record, run, {}) == {}
        and says_something(record, run.metric)
    }


def run_in_full(tables: Iterable[Table], records: Runs) -> list[Table]:
    """The tables of which every cell with a printed number has been run in full, with all seeds."""
    whole = []
    for table in tables:
        cells = printed_cells([table], records)
        if cells and all(cell.done == cell.needed for cell in cells):
            whole.append(table)
    return whole


def time_left(
    cells: Sequence[PrintedCell], paces: Sequence[reproduce.Pace], machine: tuple[str, str]
) -> reproduce.Cost:
    """What is known of the time of the runs that cells lack.

    Args:
        cells: The cells.
        paces: Of timed runs, see `fedcli.results.reproduce.paces`.
        machine: Kind and name of what they would run on.
    """
    lacking = {key: cell.run for cell in cells for key in sorted(cell.needed - cell.done)}
    left = reproduce.Cost()
    for run in lacking.values():
        left.add(run.setup, 0, paces, machine)
    return left


def paces_of(folder: Path, disturbed: bool = False) -> list[reproduce.Pace]:
    """The paces of the runs in a folder, for the data sets of all tables; `disturbed` as in `reproduce.paces`."""
    cells = [cell for table in registry.tables().values() for cell in table.cells]
    return reproduce.paces([folder], {cell.settings.get("dataset", "") for cell in cells}, disturbed)


def decided_by(answer: Answer, records: Runs, timed: Mapping[tuple[str, str], Sequence[reproduce.Pace]]) -> str:
    """What would decide a claim and how long that takes, in words; empty where it is decided.

    Args:
        answer: The claim and what the records say of it.
        records: See `fedcli.results.claims.by_method`.
        timed: The paces of runs by kind and name of a machine; the first that has run such a network counts.
    """
    if answer.verdict in (claims.REPRODUCED, claims.CONTRADICTED):
        return ""
    seeds = answer.seeds
    if len(seeds) > claims.MOST_SEEDS:
        return f"more than {claims.MOST_SEEDS} seeds, if their spread stays"
    lacking = {}
    for cell in (cell for column in claims.cells_of(answer.claim) for cell in column):
        run = wanted(cell)
        for seed in {*seeds} - _seeds_in_full(run, records):
            lacking[run.method.name, json.dumps(run.values(seed), sort_keys=True), seed] = run
    words = f"{len(lacking)} runs in full" + f", to have {len(seeds)} seeds" * (len(seeds) > claims.FEWEST)
    if sets := sorted({name for run in lacking.values() for name in run.data if not datasets.open_to_all(name)}):
        words += f" on {' and '.join(sets)}, whose images are not open"
    for machine, paces in timed.items():
        cost = reproduce.Cost()
        for run in lacking.values():
            cost.add(run.setup, 0, paces, machine)
        if cost.known:
            hours = cost.seconds / 3600
            words += f": {hours:,.{0 if hours >= 10 else 1}f} h"
            words += f" for {cost.known} of them" * (cost.known < cost.runs)
            return f"{words} on an H100, at most" if machine == GPU else f"{words} on {machine[1]} (no GPU timed)"
    return f"{words}; none like them has been timed"


def usual_machine(records: Runs) -> tuple[str, str]:
    """Kind and name of the device that most runs were made on."""
    kinds = Counter(
        (record["hardware"]["device"], record["hardware"]["name"]) for runs in records.values() for _, record in runs
    )
    return max(kinds, key=lambda kind: (kinds[kind], kind), default=("cpu", ""))
