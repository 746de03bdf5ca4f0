"""A paper's table beside ours: the paper's number, ours and the difference of each cell."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

from fedcli.declarations import Table
from fedcli.registry import tables
from fedcli.results.frame import STATES, departures, frame_of
from fedcli.results.metrics import BOLD, DIVERGED, Metric, best, interval
from fedcli.results.plans import IN_TEXT, PlannedCell, TablePlan, wanted
from fedcli.results.render import Best, Sheet
from fedcli.results.tables import mean_of_runs
from fedcli.runs.config import inactive_term

NO_NUMBER = "no number"  # not printed, or not legible
ACCURACIES = ("selected", "last", "best")  # metrics that are points of a learning curve
SCALED = re.compile(r"_(1e\d+)_floats$")  # of a column: the paper prints floats in this unit
LINES = ("paper", "ours", "difference", "interval")
Place = tuple[str, str]  # row and column of a cell


class ComparedCell(NamedTuple):
    """A cell of the table beside the paper's."""

    texts: dict[str, str]  # what stands in which of `LINES`
    numbers: dict[str, Any]  # the same with full precision, for the CSV


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
    return None if value is None else value * printed_unit(column)


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


def printed_accuracy(record: Mapping[str, Any]) -> float | None:
    """The paper's accuracy in percent for the setting of a run, by the first table that has it; None where none has."""
    run = frame_of([record]).iloc[0]
    alike = record["method"], record["protocol"], record["dataset"]
    for table in tables().values():
        paper = printed(table)
        for cell in table.cells:
            number = paper.get((cell.row, cell.column), {}).get("mean")
            is_alike = (cell.method, cell.settings.get("protocol"), cell.settings.get("dataset")) == alike
            if is_alike and number is not None and cell.metric in ACCURACIES:
                planned = wanted(cell)
                if not departures(run, planned.settings, planned.metric):
                    return number
    return None


def compare(plan: TablePlan, errors: Mapping[Path, str] = MappingProxyType({})) -> Sheet:
    """The table as it stands beside the paper's; its values are cells, with floats in ones.

    Args:
        plan: The table, with the records that there are.
        errors: Errors by folder of runs that have just failed, also of those that left no record.
    """
    table, paper = plan.table, printed(plan.table)
    planned = {(each.cell.row, each.cell.column): each for each in plan.cells}
    metrics = {each.cell.column: each.metric for each in plan.cells}
    cells: dict[Place, ComparedCell] = {}
    for key in dict.fromkeys([*paper, *planned]):
        if key in planned:
            cells[key] = _cell(planned[key], paper.get(key, {}), errors)
    for gain in table.gains:
        more, less = ([(row, column) for row in rows for column in gain.columns] for rows in (gain.more, gain.less))
        if planned.keys() >= {*more, *less}:
            more, less = ([cells[key].numbers["ours"] for key in places] for places in (more, less))
            ours = None if None in (*more, *less) else fmean(more) - (max if gain.best else fmean)(less)
            metric, key = metrics[gain.columns[0]], (gain.row, gain.column)
            text = "not run" if ours is None else metric.signed(ours)
            cells[key] = _beside(key, metric, paper.get(key, {}), text, {"ours": ours})
    marked = set()
    for column, metric in metrics.items():
        marked.add(best(metric, {key: each.records for key, each in planned.items() if key[1] == column}))
    for key in marked - {None}:
        cells[key].texts["ours"] = Best(cells[key].texts["ours"])
    columns, lines = list(dict.fromkeys(column for _, column in cells)), []
    prints = not paper.keys().isdisjoint(cells)
    for row in dict.fromkeys(row for row, _ in cells):
        texts = [cells[row, column].texts if (row, column) in cells else {} for column in columns]
        first = row
        for name in LINES if prints else LINES[1:]:
            shown = [text.get(name, "") for text in texts]
            if any(shown):
                lines.append([first, "ours, reduced" if name == "ours" and plan.reduction else name, *shown])
                first = ""
    return Sheet(
        ["Method", "", *map(heading, columns)], lines, 2,
        [
            {**cell.numbers, "mark": "best" if key in marked else "", "reduced": plan.reduction}
            for key, cell in cells.items()
        ],
        title=plan.title,
        setting=f"**Reduced: {plan.reduction}. Not the paper's setting.**" if plan.reduction else "",
        notes=_table_notes(plan, errors, marked != {None}, prints),
        in_blocks=prints,
    )  # fmt: skip


def heading(column: str) -> str:
    """The name of a column as a heading."""
    return SCALED.sub(" floats", column).replace("_", " ")


def printed_unit(column: str) -> float:
    """In how many floats the paper prints a column; 1 for other numbers."""
    match = SCALED.search(column)
    return float(match[1]) if match else 1.0


def _cell(planned: PlannedCell, paper: Mapping[str, Any], errors: Mapping[Path, str]) -> ComparedCell:
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
    texts, numbers = cell = _beside(key, metric, paper, mean_of_runs(metric, records, states), numbers)
    if "difference" in texts and len(values) > 1 and metric.unit != "floats":
        _, low, high, _ = interval([value - numbers["paper"] for value in values])  # which is taken as exact
        texts["interval"] = f"[{metric.signed(low)}, {metric.signed(high)}]"
        numbers |= {"difference_low": low, "difference_high": high}
    return cell


def _beside(key: Place, metric: Metric, paper: Mapping[str, Any], text: str, numbers: dict[str, Any]) -> ComparedCell:
    """A number of ours beside the paper's; of floats the difference is rounded as the paper has rounded."""
    unit, value, ours = printed_unit(key[1]), paper.get(metric.field), numbers["ours"]
    target = None if value is None else value * unit
    texts = {"paper": metric.none if paper.get("printed") == "0" else NO_NUMBER, "ours": text}
    if target is not None:
        std = paper.get("std") if metric.field == "mean" else None
        texts["paper"] = metric.text(target) + ("" if std is None else f" ± {metric.text(std)}")
    if ours is not None and target is not None:
        rounded = unit * round(ours / unit) if metric.unit == "floats" else ours
        texts["difference"] = metric.signed(rounded - target)
    names = {"row": key[0], "column": key[1], "metric": metric.name, "unit": metric.unit}
    return ComparedCell(texts, {**names, "paper": target, **numbers})


def _table_notes(plan: TablePlan, errors: Mapping[Path, str], bold: bool, prints: bool) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    table, content = plan.table, _reported(plan.table)
    of_paper = table.reported[0] in reported()
    old = [str(run.folder) for run in plan.runs if run.outdated]
    failures = []
    for run in plan.runs:
        if error := errors.get(run.folder) or (run.record or {}).get("error"):
            state = "Diverged" if run.state == "diverged" else "Failed"
            failures.append(f"{state}: {run.label}, seed {run.setup.run.seed}: {error.rstrip('.')} ({run.folder}).")
    idle = dict.fromkeys(inactive_term(run.setup.values(), run.setup.method) for run in plan.runs)
    of_page = [] if table.reported[1] == IN_TEXT else [content.get(key) for key in ("setting", "notes")]
    notes = {
        "Ours: mean ± sample standard deviation over seeds (runs).": True,
        "Difference: ours less the paper's, taken as exact; over seeds with a 95 % interval (Student's t).": prints,
        DIVERGED: any(run.state == "diverged" for run in plan.runs),
        BOLD.format(among=" of ours in a column"): bold,
        f"The round that counts in a run: {', '.join(sorted({run.setup.selection for run in plan.runs}))}.": True,
        "Floats: the paper's are rounded, and the difference is after the same rounding.":
            any(each.metric.unit == "floats" for each in plan.cells),
        **dict.fromkeys(failures, True),
        **{f"Inactive: {text}.": text for text in idle},
        f"Made with another version of the code, which computed something else: {', '.join(old)}.": old,
        "The paper prints none of these numbers.": of_paper and not prints,
        **{f"Paper: {text.rstrip('.')}.": True for text in of_page if text},
        **dict.fromkeys(table.notes, True),
    }  # fmt: skip
    return [note for note, applies in notes.items() if applies]
