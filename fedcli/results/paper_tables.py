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
from typing import Any

from fedcli import registry
from fedcli.declarations import Gain, Table
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.plans import IN_TEXT, PlannedCell, TablePlan, plan_cell
from fedcli.results.render import Best, Sheet
from fedcli.results.statistics import NOTE_ON_BOLD, NOTE_ON_DIVERGED, best, interval, interval_text, mean_of_runs
from fedcli.runs.identity import changes_between_rounds, differences_from_plan, settings_of
from fedcli.runs.options import inactive_term
from fedcli.runs.record import RUN_STATES
from fedcli.runs.schema import Record

SCALED = re.compile(r"_(1e\d+)_floats$")  # in the name of a printed column, its unit
Place = tuple[str, str]  # row and column of a cell


@cache
def reported() -> dict[str, dict[str, Any]]:
    """The papers' own numbers, `papers/reported.json`, by paper and table."""
    return json.loads(files("fedcli.papers").joinpath("reported.json").read_text(encoding="utf-8"))


def _reported(table: Table) -> dict[str, Any]:
    """What the paper says of a table; empty for one of no paper here."""
    paper, name = table.reported
    return reported().get(paper, {}).get(name, {})


def printed(table: Table) -> dict[Place, dict[str, Any]]:
    """The paper's entries of a table by row and column."""
    return {(entry["method"], entry["column"]): entry for entry in _reported(table).get("rows", ())}


def printed_value(table: Table, row: str, column: str, metric: Metric) -> float | None:
    """The paper's number in a cell, floats in ones; None if it prints none."""
    value = printed(table).get((row, column), {}).get(metric.paper_field)
    return None if value is None else value * _printed_unit(column)


def _printed_unit(column: str) -> float:
    """The unit in which the paper prints a column of floats; 1 for other numbers."""
    match = SCALED.search(column)
    return float(match[1]) if match else 1.0


def printed_lead(table: Table, row: str, than: str, columns: tuple[str, ...], metric: Metric) -> float | None:
    """The paper's lead of a row on another, the mean over columns, by its cells or as printed; None if it has none."""
    leads = []
    for column in columns:
        first = printed_value(table, row, column, metric)
        second = printed_value(table, than, column, metric)
        if first is not None and second is not None:
            leads.append(first - second)
    if len(leads) == len(columns):
        return fmean(leads)
    for gain in table.gains:
        is_of_rows = gain.leading_rows == (row,) and gain.other_rows == (than,)
        if is_of_rows and gain.compared_columns == columns:
            return printed_value(table, gain.row, gain.column, metric)
    return None


def printed_accuracies(records: Sequence[Record]) -> list[float | None]:
    """The paper's accuracy in percent for the setting of each run, else None.

    Where several tables have a setting, the one that has the most of the runs counts: the paper prints two accuracies
    for some.
    """
    by_table = [_printed_by_table(record) for record in records]
    runs_of_table = Counter(table for of_run in by_table for table in of_run)
    accuracies = []
    for of_run in by_table:
        table = max(of_run, key=runs_of_table.__getitem__, default=None)
        accuracies.append(None if table is None else of_run[table])
    return accuracies


def _printed_by_table(record: Record) -> dict[str, float]:
    """The paper's accuracy in percent for the setting of a run in each table that has it, by the table's name."""
    numbers: dict[str, float] = {}
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
            number = printed_value(table, cell.row, cell.column, metric)
            if number is None:
                continue
            planned_settings = plan_cell(table, cell).settings
            if not differences_from_plan(record, settings, planned_settings, metric.needed_rounds):
                numbers.setdefault(table.name, number)
    return numbers


@dataclass
class ComparedCell:
    """A cell of a table beside the paper's."""

    paper: str  # the texts of its three lines
    ours: str
    difference: str
    numbers: dict[str, Any]  # for the CSV


def compare(plan: TablePlan) -> Sheet:
    """The table beside the paper's; its values are cells, with floats in ones."""
    planned: dict[Place, PlannedCell] = {}
    for planned_cell in plan.cells:
        planned[planned_cell.cell.row, planned_cell.cell.column] = planned_cell
    cells: dict[Place, ComparedCell] = {}
    for place in printed(plan.table) | planned:  # in the order of the paper
        if place in planned:
            cells[place] = _compare_planned(plan.table, planned[place])
    for gain in plan.table.gains:
        needed = itertools.product((*gain.leading_rows, *gain.other_rows), gain.compared_columns)
        if planned.keys() >= set(needed):
            cells[gain.row, gain.column] = _compare_gain(plan.table, gain, planned, cells)
    _mark_best(planned, cells)
    columns = list(dict.fromkeys(column for _, column in cells))
    titles = [SCALED.sub(" floats", column).replace("_", " ") for column in columns]
    return Sheet(
        columns=["Method", "", *titles],
        lines=_lines(cells, columns, "ours, reduced" if plan.reduction else "ours"),
        first_number_column=2,
        values=[{**cell.numbers, "reduced": plan.reduction} for cell in cells.values()],
        title=plan.title,
        subject=f"**Reduced: {plan.reduction}. Not the paper's setting.**" if plan.reduction else "",
        notes=_table_notes(plan, cells.values()),
    )


def _compare_planned(table: Table, planned: PlannedCell) -> ComparedCell:
    """A cell that runs give."""
    metric = planned.metric
    records = planned.records
    states = Counter(run.state for run in planned.runs)
    place = (planned.cell.row, planned.cell.column)
    text = mean_of_runs(metric, records, states)
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
    more = [cells[place].numbers["ours"] for place in itertools.product(gain.leading_rows, gain.compared_columns)]
    less = [cells[place].numbers["ours"] for place in itertools.product(gain.other_rows, gain.compared_columns)]
    metric = planned[gain.leading_rows[0], gain.compared_columns[0]].metric
    place = (gain.row, gain.column)
    if None in (*more, *less):
        return _compare_cell(table, place, metric, "not run", [])
    subtracted = max(less) if gain.over_best else fmean(less)
    value = fmean(more) - subtracted
    return _compare_cell(table, place, metric, metric.text(value, "+"), [value])


def _mark_best(planned: Mapping[Place, PlannedCell], cells: Mapping[Place, ComparedCell]) -> None:
    """Marks the best of ours in each column, if its lead is sure."""
    in_columns: dict[str, dict[Place, PlannedCell]] = {}
    for (row, column), planned_cell in planned.items():
        in_columns.setdefault(column, {})[row, column] = planned_cell
    for in_column in in_columns.values():
        (*_, last) = in_column.values()
        ahead = best(last.metric, {place: planned_cell.records for place, planned_cell in in_column.items()})
        if ahead is not None:
            cells[ahead].ours = Best(cells[ahead].ours)


def _lines(cells: Mapping[Place, ComparedCell], columns: Sequence[str], ours: str) -> list[list[str]]:
    """Up to three lines for each row, of which the first has its name."""
    lines = []
    empty = ComparedCell("", "", "", {})
    for row in dict.fromkeys(row for row, _ in cells):
        in_row = [cells.get((row, column), empty) for column in columns]
        texts = {
            "paper": [cell.paper for cell in in_row],
            ours: [cell.ours for cell in in_row],
            "difference": [cell.difference for cell in in_row],
        }
        name = row
        for title, of_columns in texts.items():
            if any(of_columns):
                lines.append([name, title, *of_columns])
                name = ""
    return lines


def _compare_cell(table: Table, place: Place, metric: Metric, text: str, values: Sequence[float]) -> ComparedCell:
    """A cell beside the paper's.

    The `text` shows our `values`, one a run. Floats are rounded as the paper's before they are compared.
    """
    row, column = place
    entry = printed(table).get(place, {})
    paper_value = printed_value(table, row, column, metric)
    paper = ""
    deviation = None
    differences = []
    if paper_value is not None:
        paper = metric.text(paper_value)
        if metric.paper_field == "mean" and entry.get("std") is not None:
            deviation = entry["std"]
            paper += f" ± {metric.text(deviation)}"
        compared = values
        if metric.unit == "floats":
            unit = _printed_unit(column)
            compared = [unit * round(value / unit) for value in values]
        differences = [value - paper_value for value in compared]
    elif entry:
        paper = metric.missing_text if entry.get("printed") == "0" else "no number"  # not printed, or not legible
    difference = interval(differences)
    numbers = {
        "row": row,
        "column": column,
        "metric": metric.name,
        "unit": metric.unit,
        "paper": paper_value,
        "paper_std": deviation,
        "ours": fmean(values) if values else None,
        "ours_std": stdev(values) if len(values) > 1 else None,
        "difference_low": difference.low,
        "difference_high": difference.high,
    }
    difference_text = interval_text(metric, difference, count=False) if differences else ""
    return ComparedCell(paper, text, difference_text, numbers)


def _table_notes(plan: TablePlan, cells: Collection[ComparedCell]) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    notes = ["Ours: mean ± sample standard deviation over seeds (runs)."]
    if any(cell.difference for cell in cells):
        notes.append(
            "Difference: ours less the paper's, taken as exact, with a 95 % interval over seeds (Student's t); floats "
            "are rounded as the paper's."
        )
    if any(run.state == "diverged" for run in plan.runs):
        notes.append(NOTE_ON_DIVERGED)
    if any(isinstance(cell.ours, Best) for cell in cells):
        notes.append(NOTE_ON_BOLD.format(among=" of ours in a column"))
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
    begun = {run.folder: run.record for run in plan.runs if run.record}
    elsewhere = [folder for folder in begun if not folder.is_relative_to(plan.folder)]
    if elsewhere:
        homes = ", ".join(sorted({str(folder.parent) for folder in elsewhere}))
        notes.append(f"Runs that were there before, elsewhere than in {plan.folder}: {len(elsewhere)}, in {homes}.")
    changes: list[str] = []
    for folder, record in begun.items():
        changes += [f"{folder}: {change}." for change in changes_between_rounds(record)]
    notes += sorted(changes)
    _, where = plan.table.reported
    if where != IN_TEXT:
        entry = _reported(plan.table)
        notes += [f"Paper: {entry[key].rstrip('.')}." for key in ("setting", "notes") if entry.get(key)]
    notes += plan.table.notes
    return list(dict.fromkeys(notes))
