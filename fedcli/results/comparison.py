"""A paper's table beside ours: the paper's number, ours and the difference of each cell."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedcli.declarations import Table
from fedcli.registry import tables
from fedcli.results.frame import STATES, departures, frame_of
from fedcli.results.metrics import BOLD, DIVERGED, Metric, best, interval
from fedcli.results.plans import IN_TEXT, PlannedCell, TablePlan, wanted
from fedcli.results.render import Line, Sheet
from fedcli.results.tables import mean_of_runs, tuned

NOT_REPORTED = "not reported"
ACCURACIES = ("selected", "last", "best")  # metrics that are points of a learning curve
Place = tuple[str, str]  # row and column of a cell
SCALED = re.compile(r"_(1e\d+)_floats$")  # of a column: the paper prints floats in this unit
LINES = ("paper", "ours", "difference", "interval")


class Entry(NamedTuple):
    """A cell beside the paper's.

    Attributes:
        texts: What stands in which of `LINES`: "66.69 ± 0.69", "66.10 ± 0.52 (3)", or why there is no number; ours less
            the paper's; its 95 % interval, where there are two seeds or more.
        values: The same as numbers, a row of the CSV; None where there is none of ours.
    """

    texts: dict[str, str]
    values: dict[str, Any] | None = None


@cache
def reported() -> dict[str, dict[str, Any]]:
    """The papers' own numbers, `papers/reported.json`, by paper and table."""
    return json.loads(files("fedcli.papers").joinpath("reported.json").read_text(encoding="utf-8"))


def printed(table: Table) -> dict[tuple[str, str], dict[str, Any]]:
    """The paper's entries of a table by row and column; none for curves without a number or a table of no paper."""
    return {(entry["method"], entry["column"]): entry for entry in _reported(table).get("rows", ())}


def printed_value(table: Table, row: str, column: str, metric: Metric) -> float | None:
    """What the paper prints in a cell, floats in ones; None where it prints no number."""
    value = printed(table).get((row, column), {}).get(metric.field)
    return None if value is None else value * printed_unit(column)[0]


def printed_lead(table: Table, row: str, than: str, columns: tuple[str, ...], metric: Metric) -> float | None:
    """What the paper prints of the lead of a row on another one, the mean over columns: by two cells of each, or as one
    number of its own; None where it prints neither."""
    values = [[printed_value(table, name, column, metric) for name in (row, than)] for column in columns]
    if all(None not in pair for pair in values):
        return fmean(first - second for first, second in values)
    gains = [gain for gain in table.gains if (gain.more, gain.less, gain.columns) == ((row,), (than,), columns)]
    return printed_value(table, gains[0].row, gains[0].column, metric) if gains else None


def _reported(table: Table) -> dict[str, Any]:
    """What the paper says of a table; nothing where it prints none, or the table is of no paper here."""
    paper, name = table.reported
    return reported().get(paper, {}).get(name, {})


def printed_accuracies(records: Sequence[dict[str, Any]]) -> list[float | None]:
    """The paper's accuracies in percent for the settings of runs that stand together.

    Where several tables print one for a setting, that of the table which has most of these settings counts, of those
    with as many the first in the registry's order, so that most of the numbers are of one table.

    Args:
        records: A run of each setting.

    Returns:
        One for each; None where the run is of no cell with a number.
    """
    known = [printed_by_table(record) for record in records]
    cover = Counter(name for numbers in known for name in numbers)
    return [numbers[max(numbers, key=cover.__getitem__)] if numbers else None for numbers in known]


def printed_by_table(record: dict[str, Any]) -> dict[str, float]:
    """The paper's accuracies in percent for the setting of a run, by the name of the table."""
    run, numbers = frame_of([record]).iloc[0], {}
    for name, table in tables().items():
        paper = printed(table)
        for cell in table.cells:
            number = paper.get((cell.row, cell.column), {}).get("mean")
            names = cell.method, cell.settings.get("dataset")
            if number is None or cell.metric not in ACCURACIES or names != (record["method"], record["dataset"]):
                continue
            planned = wanted(cell)
            if not departures(run, planned.settings, planned.metric):
                numbers[name] = number
    return numbers


def compare(plan: TablePlan, errors: dict[Path, str] | None = None) -> Sheet:
    """The table as it stands beside the paper's; its values are cells, floats in ones also where the paper rounds them.

    Args:
        plan: The table, with the records that there are.
        errors: Errors by folder of runs that have just failed, also of those that left no record.
    """
    errors, paper = errors or {}, printed(plan.table)
    cells = {(planned.cell.row, planned.cell.column): planned for planned in plan.cells}
    metrics = {planned.cell.column: planned.metric for planned in plan.cells}
    shown_rows = {row for row, _ in cells}
    in_table = {(cell.row, cell.column) for cell in (*plan.table.cells, *plan.table.gains)}
    entries = {}
    for row, column in dict.fromkeys([*paper, *cells]):
        told = paper.get((row, column), {})
        if (row, column) in cells:
            entries[row, column] = _entry(cells[row, column], told, errors)
        elif row in shown_rows and column in metrics and (row, column) not in in_table:
            entries[row, column] = Entry({"paper": _paper_text(told, metrics[column]), "ours": "not planned"})
    for gain in plan.table.gains:
        more, less = ([(row, column) for row in rows for column in gain.columns] for rows in (gain.more, gain.less))
        if cells.keys() >= {*more, *less}:
            metric = metrics[gain.columns[0]]
            more, less = ([entries[place].values["ours"] for place in places] for places in (more, less))
            ours = None if None in (*more, *less) else fmean(more) - (max if gain.best else fmean)(less)
            text, told = "not run" if ours is None else metric.signed(ours), paper.get((gain.row, gain.column), {})
            entries[gain.row, gain.column] = _beside(gain.row, gain.column, metric, told, text, {"ours": ours})
    marked = set()
    for column, metric in metrics.items():
        marked.add(best(metric, {place: planned.records for place, planned in cells.items() if place[1] == column}))
    columns = list(dict.fromkeys(column for _, column in entries))
    intervals = any("interval" in entry.texts for entry in entries.values())
    ours = "ours, reduced" if plan.reduction else "ours"
    return Sheet(
        ["Method", "", *map(heading, columns)],
        [_block(row, columns, entries, marked, ours) for row in dict.fromkeys(row for row, _ in entries)],
        numbers=2,
        values=[
            {**entry.values, "mark": "best" if place in marked else "", "reduced": plan.reduction}
            for place, entry in entries.items() if entry.values
        ],
        title=plan.title,
        setting=f"**Reduced: {plan.reduction}. Not the paper's setting.**" if plan.reduction else "",
        notes=list(_notes(plan, errors, marked != {None}, intervals)),
    )  # fmt: skip


def heading(column: str) -> str:
    """The name of a column as a heading."""
    return SCALED.sub(" floats", column).replace("_", " ")


def printed_unit(column: str) -> tuple[float, str]:
    """In how many floats the paper prints a column, and the letter for it."""
    match = SCALED.search(column)
    unit = match[1] if match else ""
    return float(unit or 1), "K" if unit == "1e3" else unit.removeprefix("1")


def _block(
    row: str, columns: Sequence[str], entries: Mapping[Place, Entry], marked: set[Place], ours: str
) -> list[Line]:
    """The lines of a row that say anything, the first with its name; the paper's only where it prints a number."""
    prints = any(entry.texts["paper"] != NOT_REPORTED for entry in entries.values())
    lines = []
    for name in LINES if prints else LINES[1:]:
        texts = [entries[row, column].texts.get(name, "") if (row, column) in entries else "" for column in columns]
        if any(texts):
            marks = ["best" if name == "ours" and (row, column) in marked else "" for column in columns]
            title = ours if name == "ours" else name
            lines.append([("" if lines else row, ""), (title, ""), *zip(texts, marks, strict=True)])
    return lines


def _paper_text(entry: Mapping[str, Any], metric: Metric) -> str:
    value = entry.get(metric.field)
    if value is None:
        never = metric.none if entry.get("printed") == "0" else NOT_REPORTED
        return "not legible" if entry.get("missing_in_source") else never
    if metric.unit == "floats":
        return f"{value:,.0f}{printed_unit(entry['column'])[1]}"
    spread = f" ± {metric.text(entry['std'])}" if metric.field == "mean" and entry.get("std") is not None else ""
    return metric.text(value) + spread


def _entry(planned: PlannedCell, paper: Mapping[str, Any], errors: Mapping[Path, str]) -> Entry:
    """A cell of ours beside the paper's."""
    metric, cell, records = planned.metric, planned.cell, planned.records
    states = Counter("failed" if run.folder in errors and run.to_do else run.state for run in planned.runs)
    values = metric.values(records)
    numbers = {
        "method": cell.method,
        "paper_std": paper.get("std") if metric.field == "mean" else None,
        "ours": fmean(values) if values else None,
        "ours_std": stdev(values) if len(values) > 1 else None,
        "runs_planned": len(planned.runs),
        "runs_counted": sum(map(metric.counts, records)),
        **{f"runs_{state.replace(' ', '_')}": states[state] for state in STATES},
        "difference_low": None,
        "difference_high": None,
    }
    entry = _beside(cell.row, cell.column, metric, paper, mean_of_runs(metric, records, states), numbers)
    if "difference" in entry.texts and len(values) > 1 and metric.unit != "floats":
        _, low, high, _ = interval([value - entry.values["paper"] for value in values])  # which is taken as exact
        entry.texts["interval"] = f"[{metric.signed(low)}, {metric.signed(high)}]"
        entry.values.update(difference_low=low, difference_high=high)
    return entry


def _beside(
    row: str, column: str, metric: Metric, paper: Mapping[str, Any], text: str, numbers: Mapping[str, Any]
) -> Entry:
    """A number of ours beside the paper's; floats in the unit that the paper prints, to which it has rounded."""
    scale, letter = printed_unit(column)
    target, ours = paper.get(metric.field), numbers["ours"]
    names = {"row": row, "column": column, "metric": metric.name, "unit": metric.unit}
    values = {**names, "paper": None if target is None else target * scale, **numbers}
    texts = {"paper": _paper_text(paper, metric), "ours": text}
    if ours is not None and target is not None:
        steps = round(ours / scale) - round(target)
        floats = f"{steps:+,}{letter}" if steps else "none"
        texts["difference"] = floats if metric.unit == "floats" else metric.signed(ours - target)
    return Entry(texts, values)


def _notes(plan: TablePlan, errors: dict[Path, str], marks: bool, intervals: bool) -> Iterator[str]:
    """What a reader must know of the numbers, each only where it applies."""
    table, records = plan.table, [run.record for run in plan.runs if run.record is not None]
    of_paper = table.reported[0] in reported()
    less = " Difference: ours less the paper's." if of_paper else ""
    yield f"Ours: mean ± sample standard deviation over seeds (runs).{less}"
    if intervals:
        yield "Interval: of the difference, 95 % by Student's t over our seeds; the paper's number is taken as exact."
    if any(run.state == "diverged" for run in plan.runs):
        yield DIVERGED
    if marks:
        yield BOLD.format(among=" of ours in a column")
    yield f"The round that counts in a run: {', '.join(sorted({run.setup.selection for run in plan.runs}))}."
    if any(planned.metric.unit == "floats" for planned in plan.cells):
        units = "K: thousands, e8: hundred millions"
        yield f"Floats: the paper rounds them ({units}), ours are exact; the difference is after the same rounding."
    for run in plan.runs:
        if error := errors.get(run.folder) or (run.record or {}).get("error"):
            state = "Diverged" if run.state == "diverged" else "Failed"
            yield f"{state}: {run.label}, seed {run.setup.run.seed}: {error.rstrip('.')} ({run.folder})."
    if old := [str(run.folder) for run in plan.runs if run.outdated]:
        yield f"Made with another version of the code, which computed something else: {', '.join(old)}."
    in_table = {(cell.row, cell.column) for cell in (*table.cells, *table.gains)}
    if of_paper and in_table.isdisjoint(printed(table)):
        yield "The paper prints none of these numbers."
    yield from tuned(records)
    if table.reported[1] != IN_TEXT:  # else these are about other numbers too
        for number, name in enumerate(("rows", "columns")):
            ours = {place[number] for place in in_table}
            theirs = dict.fromkeys(place[number] for place in printed(table))
            if absent := [heading(text) for text in theirs if text not in ours]:
                yield f"Not planned, {name} of the paper: {'; '.join(absent)}."
        remarks = (_reported(table).get(key) for key in ("setting", "notes"))
        yield from (f"Paper: {text.rstrip('.')}." for text in remarks if text)
    yield from table.notes
