"""The numbers that papers print, by the cells of their tables."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any, NamedTuple

from fedcli import registry
from fedcli.declarations import Cell, Table
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.plans import Place, plan_cell
from fedcli.runs.identity import differences_from_plan, settings_of
from fedcli.runs.schema import Record

SCALED = re.compile(r"_(1e\d+)_floats$")  # in the name of a printed column, its unit


@dataclass(frozen=True)
class PrintedCell:
    """What a paper prints in a cell of a table.

    Attributes:
        mean: The mean, in the paper's unit; None if the cell has none.
        deviation: The standard deviation beside the mean; None if the cell has none.
        rounds_to_target: The number of rounds until an accuracy is reached; None if the cell has none.
        text: What stands in a cell that has none of these numbers; None in other cells.
    """

    mean: float | None
    deviation: float | None
    rounds_to_target: float | None
    text: str | None

    @property
    def is_never(self) -> bool:
        """Whether the paper prints 0 for the rounds to an accuracy that is never reached."""
        return self.text == "0"

    def select_number(self, metric: Metric) -> float | None:
        """Returns the number that belongs to a metric, in the paper's unit; None if the cell has none."""
        return self.rounds_to_target if metric.kind.unit == "rounds" else self.mean


@cache
def read_reported_numbers() -> dict[str, dict[str, Any]]:
    """Reads the papers' own numbers from `papers/reported.json`; returns them by paper and table."""
    return json.loads(files("fedcli.papers").joinpath("reported.json").read_text(encoding="utf-8"))


def find_reported_table(table: Table) -> dict[str, Any]:
    """Finds what the paper says of a table; returns an empty dict for a table that is of no paper here."""
    return _find_reported_table(*table.reported)


def _find_reported_table(paper: str, name: str) -> dict[str, Any]:
    return read_reported_numbers().get(paper, {}).get(name, {})


def find_printed_cells(table: Table) -> Mapping[Place, PrintedCell]:
    """Finds what the paper prints in the cells of a table; returns the cells in the paper's order."""
    return _find_printed_cells(*table.reported)


@cache
def _find_printed_cells(paper: str, name: str) -> Mapping[Place, PrintedCell]:
    cells = {}
    for entry in _find_reported_table(paper, name).get("rows", ()):
        cells[Place(entry["method"], entry["column"])] = PrintedCell(
            mean=entry.get("mean"),
            deviation=entry.get("std"),
            rounds_to_target=entry.get("rounds_to_target"),
            text=entry.get("printed"),
        )
    return cells


def find_printed_value(table: Table, row: str, column: str, metric: Metric) -> float | None:
    """Finds the paper's number in a cell, in the unit of the metric; returns None if the paper prints none."""
    cell = find_printed_cells(table).get(Place(row, column))
    number = None if cell is None else cell.select_number(metric)
    return None if number is None else number * find_printed_unit(column)


def find_printed_unit(column: str) -> float:
    """Finds the unit in which the paper prints a column, as 1e6 for millions of floats; returns 1 for other numbers."""
    match = SCALED.search(column)
    return float(match[1]) if match else 1.0


def find_printed_difference(
    table: Table, row: str, other_row: str, columns: tuple[str, ...], metric: Metric
) -> float | None:
    """Finds by how much a row is ahead of another row in the paper, as the mean over columns.

    Returns:
        The difference of the paper's cells, or the gain that the paper prints for them, in the unit of the metric; None
        if it prints neither.
    """
    differences = []
    for column in columns:
        value = find_printed_value(table, row, column, metric)
        other_value = find_printed_value(table, other_row, column, metric)
        if value is not None and other_value is not None:
            differences.append(value - other_value)
    if len(differences) == len(columns):
        return fmean(differences)
    for gain in table.gains:
        is_of_rows = gain.leading_rows == (row,) and gain.other_rows == (other_row,)
        if is_of_rows and gain.compared_columns == columns:
            return find_printed_value(table, gain.row, gain.column, metric)
    return None


class _PrintedAccuracy(NamedTuple):
    """A cell in which a paper prints the accuracy of a run, in percent."""

    table: Table
    cell: Cell
    metric: Metric
    percent: float


def find_printed_accuracies(records: Sequence[Record]) -> list[float | None]:
    """Finds the accuracy that a paper prints for the setting of each run.

    Papers print two accuracies for some settings. If several tables have a setting, the table that has the settings of
    most of the runs counts.

    Returns:
        An accuracy in percent for each record, None where no paper prints one.
    """
    printed = _list_printed_accuracies()
    accuracies_of_runs = [_find_accuracies_by_table(record, printed) for record in records]
    runs_of_table: Counter[str] = Counter()
    for accuracy_by_table in accuracies_of_runs:
        runs_of_table.update(accuracy_by_table.keys())
    accuracies = []
    for accuracy_by_table in accuracies_of_runs:
        table = max(accuracy_by_table, key=runs_of_table.__getitem__, default=None)
        accuracies.append(None if table is None else accuracy_by_table[table])
    return accuracies


def _list_printed_accuracies() -> list[_PrintedAccuracy]:
    """Lists the accuracies of whole runs that the papers print, without single points of learning curves."""
    printed = []
    for table in registry.tables().values():
        for cell in table.cells:
            if cell.metric not in ("selected", "last", "best"):
                continue
            metric = find_metric(cell.metric)
            percent = find_printed_value(table, cell.row, cell.column, metric)
            if percent is not None:
                printed.append(_PrintedAccuracy(table, cell, metric, percent))
    return printed


def _find_accuracies_by_table(record: Record, printed: Sequence[_PrintedAccuracy]) -> dict[str, float]:
    """Finds the accuracy in percent that each table prints for the setting of a run, by the table's name."""
    accuracies: dict[str, float] = {}
    settings = settings_of(record)
    for table, cell, metric, percent in printed:
        if cell.method != record["method"]:
            continue
        if any(cell.settings.get(name) != record[name] for name in ("protocol", "dataset")):
            continue
        planned_settings = plan_cell(table, cell).settings
        if not differences_from_plan(record, settings, planned_settings, metric.kind.needed_rounds):
            accuracies.setdefault(table.name, percent)
    return accuracies
