"""The numbers that papers print, and a paper's table beside ours."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedcli import registry
from fedcli.declarations import Gain, Table
from fedcli.results.intervals import clear_best, mean_interval
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.notes import BOLD_IN_COLUMN, DIVERGED
from fedcli.results.number_texts import interval_text, mean_text_of_runs
from fedcli.results.plans import IN_TEXT, PlannedCell, TablePlan, plan_cell
from fedcli.results.render import CellIndex, Sheet
from fedcli.runs.identity import changes_between_rounds, differences_from_plan, settings_of
from fedcli.runs.options import inactive_term
from fedcli.runs.record import RUN_STATES
from fedcli.runs.schema import Record

FIRST_NUMBER_COLUMN = 2  # behind the row and whose numbers they are
SCALED = re.compile(r"_(1e\d+)_floats$")  # in the name of a printed column, its unit


class Place(NamedTuple):
    """Where a cell of a table is."""

    row: str
    column: str


@cache
def reported_numbers() -> dict[str, dict[str, Any]]:
    """The papers' own numbers, `papers/reported.json`, by paper and table."""
    return json.loads(files("fedcli.papers").joinpath("reported.json").read_text(encoding="utf-8"))


def _reported(table: Table) -> dict[str, Any]:
    """What the paper says of a table; empty for one of no paper here."""
    paper, name = table.reported
    return reported_numbers().get(paper, {}).get(name, {})


def printed_entries(table: Table) -> dict[Place, dict[str, Any]]:
    """The paper's entries of a table by row and column."""
    entries = _reported(table).get("rows", ())
    return {Place(entry["method"], entry["column"]): entry for entry in entries}


def printed_value(table: Table, row: str, column: str, metric: Metric) -> float | None:
    """The paper's number in a cell, floats in ones; None if it prints none."""
    value = printed_entries(table).get(Place(row, column), {}).get(metric.paper_field)
    return None if value is None else value * _printed_unit(column)


def _printed_unit(column: str) -> float:
    """The unit in which the paper prints a column of floats; 1 for other numbers."""
    match = SCALED.search(column)
    return float(match[1]) if match else 1.0


def printed_lead(table: Table, row: str, other_row: str, columns: tuple[str, ...], metric: Metric) -> float | None:
    """The paper's lead of a row on another, the mean over columns, by its cells or as printed; None if it has none."""
    leads = []
    for column in columns:
        value = printed_value(table, row, column, metric)
        other_value = printed_value(table, other_row, column, metric)
        if value is not None and other_value is not None:
            leads.append(value - other_value)
    if len(leads) == len(columns):
        return fmean(leads)
    for gain in table.gains:
        is_of_rows = gain.leading_rows == (row,) and gain.other_rows == (other_row,)
        if is_of_rows and gain.compared_columns == columns:
            return printed_value(table, gain.row, gain.column, metric)
    return None


def printed_accuracies(records: Sequence[Record]) -> list[float | None]:
    """The paper's accuracy in percent for the setting of each run, else None.

    Where several tables have a setting, the one that has the most of the runs counts: the paper prints two accuracies
    for some.
    """
    accuracies_of_runs = [_accuracies_by_table(record) for record in records]
    runs_of_table: Counter[str] = Counter()
    for accuracy_by_table in accuracies_of_runs:
        runs_of_table.update(accuracy_by_table.keys())
    accuracies = []
    for accuracy_by_table in accuracies_of_runs:
        table = max(accuracy_by_table, key=runs_of_table.__getitem__, default=None)
        accuracies.append(None if table is None else accuracy_by_table[table])
    return accuracies


def _accuracies_by_table(record: Record) -> dict[str, float]:
    """The paper's accuracy in percent for the setting of a run in each table that has it, by the table's name."""
    accuracies: dict[str, float] = {}
    settings = settings_of(record)
    for table in registry.tables().values():
        for cell in table.cells:
            if cell.method != record["method"]:
                continue
            if any(cell.settings.get(name) != record[name] for name in ("protocol", "dataset")):
                continue
            if cell.metric not in ("selected", "last", "best"):  # a point of a learning curve
                continue
            metric = find_metric(cell.metric)
            accuracy = printed_value(table, cell.row, cell.column, metric)
            if accuracy is None:
                continue
            planned_settings = plan_cell(table, cell).settings
            if not differences_from_plan(record, settings, planned_settings, metric.needed_rounds):
                accuracies.setdefault(table.name, accuracy)
    return accuracies


@dataclass
class ComparedCell:
    """A cell of a table beside the paper's."""

    paper: str  # the texts of its three lines
    ours: str
    difference: str
    numbers: dict[str, Any]  # for the CSV
    is_best: bool = False  # of ours in its column, by a sure lead


def compare_with_paper(plan: TablePlan) -> Sheet:
    """The table beside the paper's; its values are cells, with floats in ones."""
    planned: dict[Place, PlannedCell] = {}
    for planned_cell in plan.cells:
        planned[Place(planned_cell.cell.row, planned_cell.cell.column)] = planned_cell
    cells: dict[Place, ComparedCell] = {}
    for place in printed_entries(plan.table) | planned:  # in the order of the paper
        if place in planned:
            cells[place] = _compare_planned(plan.table, planned[place])
    for gain in plan.table.gains:
        needed_places = {*_places(gain.leading_rows, gain), *_places(gain.other_rows, gain)}
        if planned.keys() >= needed_places:
            cells[Place(gain.row, gain.column)] = _compare_gain(plan.table, gain, planned, cells)
    _mark_best(planned, cells)
    columns = list(dict.fromkeys(place.column for place in cells))
    titles = [SCALED.sub(" floats", column).replace("_", " ") for column in columns]
    lines = _lines(cells, columns, "ours, reduced" if plan.reduction else "ours")
    best: set[CellIndex] = set()
    for number, line in enumerate(lines):
        best.update(CellIndex(number, column) for column in line.best_columns)
    return Sheet(
        columns=["Method", "", *titles],
        lines=[[line.row, line.title, *line.texts] for line in lines],
        first_number_column=FIRST_NUMBER_COLUMN,
        best=best,
        values=[{**cell.numbers, "reduced": plan.reduction} for cell in cells.values()],
        title=plan.title,
        subject=f"**Reduced: {plan.reduction}. Not the paper's setting.**" if plan.reduction else "",
        notes=_table_notes(plan, cells.values()),
    )


def _places(rows: Sequence[str], gain: Gain) -> list[Place]:
    """The cells of some rows of which a gain is the difference."""
    return [Place(row, column) for row, column in itertools.product(rows, gain.compared_columns)]


def _compare_planned(table: Table, planned: PlannedCell) -> ComparedCell:
    """A cell that runs give."""
    metric = planned.metric
    records = planned.records
    states = Counter(run.state for run in planned.runs)
    place = Place(planned.cell.row, planned.cell.column)
    text = mean_text_of_runs(metric, records, states)
    compared = _compare_cell(table, place, metric, text, metric.values(records))
    compared.numbers |= {
        "method": planned.cell.method,
        "runs_planned": states.total(),
        "runs_counted": sum(map(metric.counts, records)),
    }
    for state in RUN_STATES:
        compared.numbers[f"runs_{state.replace(' ', '_')}"] = states[state]
    return compared


def _compare_gain(
    table: Table, gain: Gain, planned: Mapping[Place, PlannedCell], cells: Mapping[Place, ComparedCell]
) -> ComparedCell:
    """A cell that is the difference of others: the mean of some less the mean, or the best, of the rest."""
    leading_values = [cells[place].numbers["ours"] for place in _places(gain.leading_rows, gain)]
    other_values = [cells[place].numbers["ours"] for place in _places(gain.other_rows, gain)]
    metric = planned[Place(gain.leading_rows[0], gain.compared_columns[0])].metric
    place = Place(gain.row, gain.column)
    if None in (*leading_values, *other_values):
        return _compare_cell(table, place, metric, "not run", [])
    subtracted = max(other_values) if gain.over_best else fmean(other_values)
    value = fmean(leading_values) - subtracted
    return _compare_cell(table, place, metric, metric.text(value, "+"), [value])


def _mark_best(planned: Mapping[Place, PlannedCell], cells: Mapping[Place, ComparedCell]) -> None:
    """Marks the best of ours in each column, if its lead is sure."""
    cells_by_column: dict[str, dict[Place, PlannedCell]] = {}
    for place, planned_cell in planned.items():
        cells_by_column.setdefault(place.column, {})[place] = planned_cell
    for cells_of_column in cells_by_column.values():
        (*_, last) = cells_of_column.values()
        records = {place: planned_cell.records for place, planned_cell in cells_of_column.items()}
        best_place = clear_best(last.metric, records)
        if best_place is not None:
            cells[best_place].is_best = True


class _Line(NamedTuple):
    """A line of a table beside the paper's."""

    row: str  # empty in all but the first line of a row
    title: str  # whose numbers they are
    texts: list[str]
    best_columns: list[int]  # of the whole table


def _lines(cells: Mapping[Place, ComparedCell], columns: Sequence[str], our_title: str) -> list[_Line]:
    """Up to three lines for each row, of which the first has its name; `our_title` stands before our numbers."""
    lines = []
    empty = ComparedCell("", "", "", {})
    for row in dict.fromkeys(place.row for place in cells):
        cells_of_row = [cells.get(Place(row, column), empty) for column in columns]
        texts_by_title = {
            "paper": [cell.paper for cell in cells_of_row],
            our_title: [cell.ours for cell in cells_of_row],
            "difference": [cell.difference for cell in cells_of_row],
        }
        best_columns = [column for column, cell in enumerate(cells_of_row, FIRST_NUMBER_COLUMN) if cell.is_best]
        name = row
        for title, texts in texts_by_title.items():
            if any(texts):
                lines.append(_Line(name, title, texts, best_columns if title == our_title else []))
                name = ""
    return lines


def _compare_cell(table: Table, place: Place, metric: Metric, text: str, values: Sequence[float]) -> ComparedCell:
    """A cell beside the paper's.

    The `text` shows our `values`, one a run. Floats are rounded as the paper's before they are compared.
    """
    entry = printed_entries(table).get(place, {})
    paper_value = printed_value(table, place.row, place.column, metric)
    paper_text = ""
    deviation = None
    differences = []
    if paper_value is not None:
        paper_text = metric.text(paper_value)
        if metric.paper_field == "mean" and entry.get("std") is not None:
            deviation = entry["std"]
            paper_text += f" ± {metric.text(deviation)}"
        comparable_values = values
        if metric.unit == "floats":
            unit = _printed_unit(place.column)
            comparable_values = [unit * round(value / unit) for value in values]
        differences = [value - paper_value for value in comparable_values]
    elif entry:
        paper_text = metric.missing_text if entry.get("printed") == "0" else "no number"  # not printed, or not legible
    difference = mean_interval(differences)
    numbers = {
        "row": place.row,
        "column": place.column,
        "metric": metric.name,
        "unit": metric.unit,
        "paper": paper_value,
        "paper_std": deviation,
        "ours": fmean(values) if values else None,
        "ours_std": stdev(values) if len(values) > 1 else None,
        "difference_low": difference.low,
        "difference_high": difference.high,
    }
    difference_text = interval_text(metric, difference, with_count=False) if differences else ""
    return ComparedCell(paper_text, text, difference_text, numbers)


def _table_notes(plan: TablePlan, cells: Collection[ComparedCell]) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    notes = ["Ours: mean ± sample standard deviation over seeds (runs)."]
    if any(cell.difference for cell in cells):
        notes.append(
            "Difference: ours less the paper's, taken as exact, with a 95 % interval over seeds (Student's t); floats "
            "are rounded as the paper's."
        )
    if any(run.state == "diverged" for run in plan.runs):
        notes.append(DIVERGED)
    if any(cell.is_best for cell in cells):
        notes.append(BOLD_IN_COLUMN)
    selections = sorted({run.setup.selection for run in plan.runs})
    notes.append(f"The round that counts in a run: {', '.join(selections)}.")
    failed = [f"{run.folder} ({run.record['error']})" for run in plan.runs if run.record and "error" in run.record]
    if failed:
        notes.append(f"Failed: {'; '.join(failed)}.")
    inactive = dict.fromkeys(inactive_term(run.setup.all_options(), run.setup.method) for run in plan.runs)
    notes += [f"Inactive: {text}." for text in inactive if text]
    outdated = [str(run.folder) for run in plan.runs if run.outdated]
    if outdated:
        notes.append(f"Made with another version of the code, which computed something else: {', '.join(outdated)}.")
    records = {run.folder: run.record for run in plan.runs if run.record}  # by folder
    other_folders = [folder for folder in records if not folder.is_relative_to(plan.folder)]
    if other_folders:
        parents = ", ".join(sorted({str(folder.parent) for folder in other_folders}))
        notes.append(
            f"Runs that were there before, elsewhere than in {plan.folder}: {len(other_folders)}, in {parents}."
        )
    changes: list[str] = []
    for folder, record in records.items():
        changes += [f"{folder}: {change}." for change in changes_between_rounds(record)]
    notes += sorted(changes)
    _, name_in_paper = plan.table.reported
    if name_in_paper != IN_TEXT:
        entry = _reported(plan.table)
        notes += [f"Paper: {entry[key].rstrip('.')}." for key in ("setting", "notes") if entry.get(key)]
    notes += plan.table.notes
    return list(dict.fromkeys(notes))
