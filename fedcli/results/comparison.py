"""A paper's table beside ours: the paper's number, ours and the difference of each cell."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

from fedcli.declarations import Table
from fedcli.registry import tables
from fedcli.results.frame import STATES, departures, frame_of
from fedcli.results.metrics import BOLD, DIVERGED, Metric, best, interval
from fedcli.results.plans import IN_TEXT, PlannedCell, TablePlan, wanted
from fedcli.results.render import Best, Sheet
from fedcli.results.tables import mean_of_runs
from fedcli.runs.config import inactive_term

NOT_REPORTED = "not reported"
ACCURACIES = ("selected", "last", "best")  # metrics that are points of a learning curve
SCALED = re.compile(r"_(1e\d+)_floats$")  # of a column: the paper prints floats in this unit
LINES = ("paper", "ours", "difference", "interval")
Place = tuple[str, str]  # row and column of a cell
Cell = tuple[dict[str, str], dict[str, Any]]  # what stands in which of `LINES`, and the same as numbers, for the CSV


@cache
def reported() -> dict[str, dict[str, Any]]:
    """The papers' own numbers, `papers/reported.json`, by paper and table."""
    return json.loads(files("fedcli.papers").joinpath("reported.json").read_text(encoding="utf-8"))


def printed(table: Table) -> dict[Place, dict[str, Any]]:
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
    """The paper's accuracies in percent for the settings of runs that stand together; None where it prints none.

    Where several tables print one, that of the table which has most of these settings counts, of those with as many
    the first in the registry's order, so that most of the numbers are of one table.
    """
    by_table = [printed_by_table(record) for record in records]
    cover = Counter(name for numbers in by_table for name in numbers)
    return [numbers[max(numbers, key=cover.__getitem__)] if numbers else None for numbers in by_table]


def printed_by_table(record: Mapping[str, Any]) -> dict[str, float]:
    """The paper's accuracies in percent for the setting of a run, by the name of the table."""
    run, numbers = frame_of([record]).iloc[0], {}
    alike = record["method"], record["protocol"], record["dataset"]
    for name, table in tables().items():
        paper = printed(table)
        for cell in table.cells:
            number = paper.get((cell.row, cell.column), {}).get("mean")
            is_alike = (cell.method, cell.settings.get("protocol"), cell.settings.get("dataset")) == alike
            if is_alike and number is not None and cell.metric in ACCURACIES:
                planned = wanted(cell)
                if not departures(run, planned.settings, planned.metric):
                    numbers[name] = number
    return numbers


def compare(plan: TablePlan, errors: Mapping[Path, str] = MappingProxyType({})) -> Sheet:
    """The table as it stands beside the paper's; its values are cells, floats in ones also where the paper rounds them.

    Args:
        plan: The table, with the records that there are.
        errors: Errors by folder of runs that have just failed, also of those that left no record.
    """
    table, paper = plan.table, printed(plan.table)
    planned = {(each.cell.row, each.cell.column): each for each in plan.cells}
    metrics = {each.cell.column: each.metric for each in plan.cells}
    texts: dict[Place, dict[str, str]] = {}
    values: dict[Place, dict[str, Any]] = {}
    for key in dict.fromkeys([*paper, *planned]):
        if key in planned:
            texts[key], values[key] = _cell(planned[key], paper.get(key, {}), errors)
    for gain in table.gains:
        more, less = ([(row, column) for row in rows for column in gain.columns] for rows in (gain.more, gain.less))
        if planned.keys() >= {*more, *less}:
            more, less = ([values[key]["ours"] for key in places] for places in (more, less))
            ours = None if None in (*more, *less) else fmean(more) - (max if gain.best else fmean)(less)
            metric, key = metrics[gain.columns[0]], (gain.row, gain.column)
            text = "not run" if ours is None else metric.signed(ours)
            texts[key], values[key] = _beside(key, metric, paper.get(key, {}), text, {"ours": ours})
    marked = set()
    for column, metric in metrics.items():
        marked.add(best(metric, {key: each.records for key, each in planned.items() if key[1] == column}))
    for key in marked - {None}:
        texts[key]["ours"] = Best(texts[key]["ours"])
    columns, lines = list(dict.fromkeys(column for _, column in texts)), []
    prints = any(cell["paper"] != NOT_REPORTED for cell in texts.values())
    for row in dict.fromkeys(row for row, _ in texts):
        cells = [texts.get((row, column), {}) for column in columns]
        block = []
        for name in LINES if prints else LINES[1:]:
            shown = [cell.get(name, "") for cell in cells]
            title = "ours, reduced" if name == "ours" and plan.reduction else name
            block += [["" if block else row, title, *shown]] if any(shown) else []
        lines += block
    return Sheet(
        ["Method", "", *map(heading, columns)], lines, 2,
        [
            {**numbers, "mark": "best" if key in marked else "", "reduced": plan.reduction}
            for key, numbers in values.items()
        ],
        title=plan.title,
        setting=f"**Reduced: {plan.reduction}. Not the paper's setting.**" if plan.reduction else "",
        notes=_table_notes(plan, errors, marked != {None}, prints, any("interval" in cell for cell in texts.values())),
        in_blocks=prints,
    )  # fmt: skip


def heading(column: str) -> str:
    """The name of a column as a heading."""
    return SCALED.sub(" floats", column).replace("_", " ")


def printed_unit(column: str) -> tuple[float, str]:
    """In how many floats the paper prints a column, and the letter for it."""
    match = SCALED.search(column)
    unit = match[1] if match else ""
    return float(unit or 1), "K" if unit == "1e3" else unit.removeprefix("1")


def _paper_text(entry: Mapping[str, Any], metric: Metric) -> str:
    value = entry.get(metric.field)
    if value is None:
        never = metric.none if entry.get("printed") == "0" else NOT_REPORTED
        return "not legible" if entry.get("missing_in_source") else never
    if metric.unit == "floats":
        return f"{value:,.0f}{printed_unit(entry['column'])[1]}"
    spread = f" ± {metric.text(entry['std'])}" if metric.field == "mean" and entry.get("std") is not None else ""
    return metric.text(value) + spread


def _cell(planned: PlannedCell, paper: Mapping[str, Any], errors: Mapping[Path, str]) -> Cell:
    """A cell of ours beside the paper's."""
    metric, records = planned.metric, planned.records
    states = Counter("failed" if run.folder in errors and run.to_do else run.state for run in planned.runs)
    values = metric.values(records)
    numbers = {
        "method": planned.cell.method,
        "paper_std": paper.get("std") if metric.field == "mean" else None,
        "ours": fmean(values) if values else None,
        "ours_std": stdev(values) if len(values) > 1 else None,
        "runs_planned": len(planned.runs),
        "runs_counted": sum(map(metric.counts, records)),
        **{f"runs_{state.replace(' ', '_')}": states[state] for state in STATES},
        "difference_low": None,
        "difference_high": None,
    }
    key = planned.cell.row, planned.cell.column
    texts, numbers = _beside(key, metric, paper, mean_of_runs(metric, records, states), numbers)
    if "difference" in texts and len(values) > 1 and metric.unit != "floats":
        _, low, high, _ = interval([value - numbers["paper"] for value in values])  # which is taken as exact
        texts["interval"] = f"[{metric.signed(low)}, {metric.signed(high)}]"
        numbers |= {"difference_low": low, "difference_high": high}
    return texts, numbers


def _beside(key: Place, metric: Metric, paper: Mapping[str, Any], text: str, numbers: dict[str, Any]) -> Cell:
    """A number of ours beside the paper's; floats in the unit that the paper prints, to which it has rounded."""
    scale, letter = printed_unit(key[1])
    target, ours = paper.get(metric.field), numbers["ours"]
    exact = None if target is None else target * scale
    texts = {"paper": _paper_text(paper, metric), "ours": text}
    if ours is not None and target is not None:
        steps = round(ours / scale) - round(target)
        floats = f"{steps:+,}{letter}" if steps else "none"
        texts["difference"] = floats if metric.unit == "floats" else metric.signed(ours - target)
    names = {"row": key[0], "column": key[1], "metric": metric.name, "unit": metric.unit}
    return texts, {**names, "paper": exact, **numbers}


def _table_notes(plan: TablePlan, errors: Mapping[Path, str], bold: bool, prints: bool, intervals: bool) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    table, content = plan.table, _reported(plan.table)
    of_paper = table.reported[0] in reported()
    less = " Difference: ours less the paper's." if of_paper else ""
    old = [str(run.folder) for run in plan.runs if run.outdated]
    failures = []
    for run in plan.runs:
        if error := errors.get(run.folder) or (run.record or {}).get("error"):
            state = "Diverged" if run.state == "diverged" else "Failed"
            failures.append(f"{state}: {run.label}, seed {run.setup.run.seed}: {error.rstrip('.')} ({run.folder}).")
    idle = dict.fromkeys(inactive_term(run.setup.values(), run.setup.method) for run in plan.runs)
    of_page = [] if table.reported[1] == IN_TEXT else [content.get(key) for key in ("setting", "notes")]
    notes = {
        f"Ours: mean ± sample standard deviation over seeds (runs).{less}": True,
        "Interval: of the difference, 95 % by Student's t over our seeds; the paper's number is taken as exact.":
            intervals,
        DIVERGED: any(run.state == "diverged" for run in plan.runs),
        BOLD.format(among=" of ours in a column"): bold,
        f"The round that counts in a run: {', '.join(sorted({run.setup.selection for run in plan.runs}))}.": True,
        "Floats: the paper rounds them (K: thousands, e8: hundred millions), ours are exact; the difference is after "
        "the same rounding.": any(each.metric.unit == "floats" for each in plan.cells),
        **dict.fromkeys(failures, True),
        **{f"Inactive: {text}.": text for text in idle},
        f"Made with another version of the code, which computed something else: {', '.join(old)}.": old,
        "The paper prints none of these numbers.": of_paper and not prints,
        **{f"Paper: {text.rstrip('.')}.": True for text in of_page if text},
        **dict.fromkeys(table.notes, True),
    }  # fmt: skip
    return [note for note, applies in notes.items() if applies]
