"""A paper's table beside ours: the paper's number, ours and the difference of each cell."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from statistics import fmean, stdev
from typing import Any

from fedcli.declarations import Table
from fedcli.registry import tables
from fedcli.results.frame import STATES, departures, frame_of
from fedcli.results.metrics import BOLD, DIVERGED, NO_INTERVAL, Metric, best, find_metric, interval
from fedcli.results.plans import IN_TEXT, TablePlan, plan_cell
from fedcli.results.render import Best, Sheet
from fedcli.results.tables import mean_of_runs
from fedcli.runs.config import inactive_term

NO_NUMBER = "no number"  # not printed, or not legible
ACCURACIES = ("selected", "last", "best")  # metrics that are points of a learning curve
SCALED = re.compile(r"_(1e\d+)_floats$")  # of a column: the paper prints floats in this unit
LINES = ("paper", "ours", "difference")
Place = tuple[str, str]  # row and column of a cell


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
            is_printed = number is not None and cell.metric in ACCURACIES
            if (
                is_alike
                and is_printed
                and not departures(run, plan_cell(table, cell).settings, find_metric(cell.metric))
            ):
                return number
    return None


def compare(plan: TablePlan) -> Sheet:
    """The table as it stands beside the paper's; its values are cells, with floats in ones."""
    table, paper = plan.table, printed(plan.table)
    planned = {(each.cell.row, each.cell.column): each for each in plan.cells}
    metrics = {each.cell.column: each.metric for each in plan.cells}
    texts, numbers = {}, {}  # of each cell, by row and column
    for key in [key for key in paper | planned if key in planned]:
        metric, records = planned[key].metric, planned[key].records
        states = Counter(run.state for run in planned[key].runs)
        text = mean_of_runs(metric, records, states)
        texts[key], numbers[key] = _beside(key, metric, paper.get(key, {}), text, metric.values(records))
        numbers[key] |= {
            "method": planned[key].cell.method,
            "runs_planned": states.total(),
            "runs_counted": sum(map(metric.counts, records)),
            **{f"runs_{state.replace(' ', '_')}": states[state] for state in STATES},
        }
    for gain in table.gains:
        more, less = ([(row, column) for row in rows for column in gain.columns] for rows in (gain.more, gain.less))
        if planned.keys() >= {*more, *less}:
            more, less = ([numbers[key]["ours"] for key in places] for places in (more, less))
            values = [] if None in (*more, *less) else [fmean(more) - (max if gain.best else fmean)(less)]
            metric, key = metrics[gain.columns[0]], (gain.row, gain.column)
            text = metric.signed(values[0]) if values else "not run"
            texts[key], numbers[key] = _beside(key, metric, paper.get(key, {}), text, values)
    for column, metric in metrics.items():
        ahead = best(metric, {key: each.records for key, each in planned.items() if key[1] == column})
        if ahead is not None:
            texts[ahead]["ours"] = Best(texts[ahead]["ours"])
    columns, lines = list(dict.fromkeys(column for _, column in texts)), []
    for row in dict.fromkeys(row for row, _ in texts):
        first = row
        for name in LINES:
            shown = [texts.get((row, column), {}).get(name, "") for column in columns]
            if any(shown):
                lines.append([first, "ours, reduced" if name == "ours" and plan.reduction else name, *shown])
                first = ""
    headings = [SCALED.sub(" floats", column).replace("_", " ") for column in columns]
    return Sheet(
        ["Method", "", *headings], lines, 2,
        [{**cell, "reduced": plan.reduction} for cell in numbers.values()],
        title=plan.title,
        setting=f"**Reduced: {plan.reduction}. Not the paper's setting.**" if plan.reduction else "",
        notes=_table_notes(plan, texts.values()),
    )  # fmt: skip


def printed_unit(column: str) -> float:
    """In how many floats the paper prints a column; 1 for other numbers."""
    return float(match[1]) if (match := SCALED.search(column)) else 1.0


def _beside(
    key: Place, metric: Metric, paper: Mapping[str, Any], text: str, values: Sequence[float]
) -> tuple[dict[str, str], dict[str, Any]]:
    """A cell beside the paper's entry, if there is one: what stands in which of `LINES`, and its numbers for the CSV.

    The text is what is shown of our values, one a run. Floats are rounded as the paper's before they are compared.
    """
    unit, value, deviation = printed_unit(key[1]), paper.get(metric.field), None
    texts, difference, target = {"ours": text}, NO_INTERVAL, None if value is None else value * unit
    if target is not None:
        deviation = paper.get("std") if metric.field == "mean" else None
        texts["paper"] = metric.text(target) + ("" if deviation is None else f" ± {metric.text(deviation)}")
        rounded = [unit * round(value / unit) for value in values] if metric.unit == "floats" else values
        difference = interval([value - target for value in rounded])
    elif paper:
        texts["paper"] = metric.none if paper.get("printed") == "0" else NO_NUMBER
    if difference.n:
        texts["difference"] = metric.interval_text(difference, count=False)
    return texts, {
        "row": key[0], "column": key[1], "metric": metric.name, "unit": metric.unit, "paper": target,
        "paper_std": deviation, "ours": fmean(values) if values else None,
        "ours_std": stdev(values) if len(values) > 1 else None,
        "difference_low": difference.low, "difference_high": difference.high,
    }  # fmt: skip


def _table_notes(plan: TablePlan, cells: Collection[Mapping[str, str]]) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    table, content = plan.table, _reported(plan.table)
    old = [str(run.folder) for run in plan.runs if run.outdated]
    failed = [f"{run.folder} ({run.record['error']})" for run in plan.runs if run.record and "error" in run.record]
    idle = dict.fromkeys(inactive_term(run.setup.values(), run.setup.method) for run in plan.runs)
    of_page = [] if table.reported[1] == IN_TEXT else [content.get(key) for key in ("setting", "notes")]
    notes = {
        "Ours: mean ± sample standard deviation over seeds (runs).": True,
        "Difference: ours less the paper's, taken as exact, floats after the same rounding; over seeds with a 95 % "
        "interval (Student's t).": any("difference" in texts for texts in cells),
        DIVERGED: any(run.state == "diverged" for run in plan.runs),
        BOLD.format(among=" of ours in a column"): any(isinstance(texts["ours"], Best) for texts in cells),
        f"The round that counts in a run: {', '.join(sorted({run.setup.selection for run in plan.runs}))}.": True,
        f"Failed: {'; '.join(failed)}.": failed,
        **{f"Inactive: {text}.": text for text in idle},
        f"Made with another version of the code, which computed something else: {', '.join(old)}.": old,
        **{f"Paper: {text.rstrip('.')}.": True for text in of_page if text},
        **dict.fromkeys(table.notes, True),
    }  # fmt: skip
    return [note for note, applies in notes.items() if applies]
