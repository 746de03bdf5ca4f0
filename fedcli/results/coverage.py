"""How much of what the papers print has been run: from records alone."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from fedcli import registry
from fedcli.data import datasets
from fedcli.declarations import Cell, Table
from fedcli.results.claims import says_something
from fedcli.results.comparison import printed_value
from fedcli.results.costs import Cost, paces
from fedcli.results.frame import departures
from fedcli.results.metrics import find_metric
from fedcli.results.plans import Wanted, wanted
from fedcli.runs.settings import key

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
    groups = {names: members.to_dict("records") for names, members in runs.groupby(["method", "protocol", "dataset"])}
    cells = []
    for table in tables:
        for cell in table.cells:
            if not is_printed(table, cell):
                continue
            run = wanted(cell)
            names = run.setup.method.name, run.setup.protocol.name, run.setup.run.dataset
            seeds = {
                row["seed"]
                for row in groups.get(names, ())
                if not departures(row, run.settings, run.metric) and says_something(row["record"], run.metric)
            }
            needed = frozenset((key(run.settings), seed) for seed in table.seeds)
            done = frozenset(pair for pair in needed if pair[1] in seeds)
            cells.append(PrintedCell(table.name, run, needed, done, all(map(datasets.open_to_all, run.data))))
    return cells


def time_left(cells: Sequence[PrintedCell], runs: pd.DataFrame, machine: tuple[str, str]) -> Cost:
    """What is known of the time of the runs that cells lack.

    Args:
        cells: The cells.
        runs: Those that there are, of which some were timed.
        machine: Kind and name of what they would run on.
    """
    named = {cell.settings.get("dataset", "") for table in registry.tables().values() for cell in table.cells}
    timed = paces(runs, named)
    lacking = {pair: cell.run for cell in cells for pair in sorted(cell.needed - cell.done)}
    left = Cost()
    for run in lacking.values():
        left.add(run.setup, 0, timed, machine)
    return left


def usual_machine(runs: pd.DataFrame) -> tuple[str, str]:
    """Kind and name of the device that most runs were made on."""
    kinds = Counter((record["hardware"]["device"], record["hardware"]["name"]) for record in runs["record"])
    return max(kinds, key=lambda kind: (kinds[kind], kind), default=("cpu", ""))
