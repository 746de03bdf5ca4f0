"""The numbers that papers print, and a paper's table beside ours."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from statistics import fmean, stdev
from typing import Any

from fedcli import registry
from fedcli.declarations import Table
from fedcli.results.frame import frame_of
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.plans import IN_TEXT, TablePlan, plan_cell
from fedcli.results.render import Best, Sheet
from fedcli.results.statistics import BOLD, DIVERGED, best, interval, interval_text, mean_of_runs
from fedcli.runs.identity import departures, what_happened
from fedcli.runs.options import inactive_term
from fedcli.runs.record import STATES

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
    value = printed(table).get((row, column), {}).get(metric.field)
    return None if value is None else value * _printed_unit(column)


def _printed_unit(column: str) -> float:
    """The unit in which the paper prints a column of floats; 1 for other numbers."""
    return float(match[1]) if (match := SCALED.search(column)) else 1.0


def printed_lead(table: Table, row: str, than: str, columns: tuple[str, ...], metric: Metric) -> float | None:
    """The paper's lead of a row on another, the mean over columns, by its cells or as printed; None if it has none."""
    values = [[printed_value(table, name, column, metric) for name in (row, than)] for column in columns]
    if all(None not in pair for pair in values):
        return fmean(first - second for first, second in values)
    gains = [gain for gain in table.gains if (gain.more, gain.less, gain.columns) == ((row,), (than,), columns)]
    return printed_value(table, gains[0].row, gains[0].column, metric) if gains else None


def printed_accuracies(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """The paper's accuracy in percent for the setting of each run, else None.

    Where several tables have a setting, the one that has the most of the runs counts: the paper prints two accuracies
    for some.
    """
    printed = [_printed_by_table(record) for record in records]
    shared = Counter(table for of_run in printed for table in of_run)
    return [of_run[max(of_run, key=shared.__getitem__)] if of_run else None for of_run in printed]


def _printed_by_table(record: Mapping[str, Any]) -> dict[str, float]:
    """The paper's accuracy in percent for the setting of a run in each table that has it, by the table's name."""
    numbers: dict[str, float] = {}
    run = frame_of([record]).iloc[0]
    alike = record["method"], record["protocol"], record["dataset"]
    for table in registry.tables().values():
        for cell in table.cells:
            is_alike = (cell.method, cell.settings.get("protocol"), cell.settings.get("dataset")) == alike
            if is_alike and cell.metric in ("selected", "last", "best"):  # points of a learning curve
                metric = find_metric(cell.metric)
                number = printed_value(table, cell.row, cell.column, metric)
                if number is not None and not departures(
                    record, run["settings"], plan_cell(table, cell).settings, metric.needs
                ):
                    numbers.setdefault(table.name, number)
    return numbers


def compare(plan: TablePlan) -> Sheet:
    """The table beside the paper's; its values are cells, with floats in ones."""
    table, texts, numbers = plan.table, {}, {}  # of each cell, by row and column
    planned = {(each.cell.row, each.cell.column): each for each in plan.cells}
    metrics = {each.cell.column: each.metric for each in plan.cells}
    for key in [key for key in printed(table) | planned if key in planned]:  # in the order of the paper
        each, states = planned[key], Counter(run.state for run in planned[key].runs)
        text = mean_of_runs(each.metric, each.records, states)
        texts[key], numbers[key] = _beside(table, key, each.metric, text, each.metric.values(each.records))
        numbers[key] |= {
            "method": each.cell.method,
            "runs_planned": states.total(),
            "runs_counted": sum(map(each.metric.counts, each.records)),
            **{f"runs_{state.replace(' ', '_')}": states[state] for state in STATES},
        }
    for gain in table.gains:
        more, less = ([(row, column) for row in rows for column in gain.columns] for rows in (gain.more, gain.less))
        if planned.keys() >= {*more, *less}:
            more, less = ([numbers[key]["ours"] for key in keys] for keys in (more, less))
            values = [] if None in (*more, *less) else [fmean(more) - (max if gain.best else fmean)(less)]
            metric, key = metrics[gain.columns[0]], (gain.row, gain.column)
            text = metric.text(values[0], "+") if values else "not run"
            texts[key], numbers[key] = _beside(table, key, metric, text, values)
    for column, metric in metrics.items():
        ahead = best(metric, {key: each.records for key, each in planned.items() if key[1] == column})
        if ahead is not None:
            texts[ahead]["ours"] = Best(texts[ahead]["ours"])
    columns, lines = list(dict.fromkeys(column for _, column in texts)), []
    for row in dict.fromkeys(row for row, _ in texts):
        first = row
        for name in ("paper", "ours", "difference"):
            shown = [texts[row, column][name] if (row, column) in texts else "" for column in columns]
            if any(shown):
                lines.append([first, "ours, reduced" if name == "ours" and plan.reduction else name, *shown])
                first = ""
    return Sheet(
        ["Method", "", *[SCALED.sub(" floats", column).replace("_", " ") for column in columns]], lines, 2,
        [{**cell, "reduced": plan.reduction} for cell in numbers.values()],
        title=plan.title,
        setting=f"**Reduced: {plan.reduction}. Not the paper's setting.**" if plan.reduction else "",
        notes=_table_notes(plan, texts.values()),
    )  # fmt: skip


def _beside(
    table: Table, key: Place, metric: Metric, text: str, values: Sequence[float]
) -> tuple[dict[str, str], dict[str, Any]]:
    """A cell beside the paper's: the texts of its lines, and its numbers for the CSV.

    The `text` shows our `values`, one a run. Floats are rounded as the paper's before they are compared.
    """
    entry, target, unit = printed(table).get(key, {}), printed_value(table, *key, metric), _printed_unit(key[1])
    deviation, differences = None, []
    if target is not None:
        deviation = entry.get("std") if metric.field == "mean" else None
        differences = [(unit * round(value / unit) if metric.unit == "floats" else value) - target for value in values]
        paper = metric.text(target) + ("" if deviation is None else f" ± {metric.text(deviation)}")
    else:
        lacking = metric.none if entry.get("printed") == "0" else "no number"  # not printed, or not legible
        paper = lacking if entry else ""
    difference = interval(differences)
    told = interval_text(metric, difference, count=False) if differences else ""
    return {"paper": paper, "ours": text, "difference": told}, {
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
    changed = {f"{run.folder}: {change}." for run in plan.runs if run.record for change in what_happened(run.record)}
    idle = dict.fromkeys(inactive_term(run.setup.values(), run.setup.method) for run in plan.runs)
    of_page = [] if table.reported[1] == IN_TEXT else [content.get(key) for key in ("setting", "notes")]
    notes = {
        "Ours: mean ± sample standard deviation over seeds (runs).": True,
        "Difference: ours less the paper's, taken as exact, with a 95 % interval over seeds (Student's t); floats are "
        "rounded as the paper's.": any(texts["difference"] for texts in cells),
        DIVERGED: any(run.state == "diverged" for run in plan.runs),
        BOLD.format(among=" of ours in a column"): any(isinstance(texts["ours"], Best) for texts in cells),
        f"The round that counts in a run: {', '.join(sorted({run.setup.selection for run in plan.runs}))}.": True,
        f"Failed: {'; '.join(failed)}.": failed,
        **{f"Inactive: {text}.": text for text in idle},
        f"Made with another version of the code, which computed something else: {', '.join(old)}.": old,
        **dict.fromkeys(sorted(changed), True),
        **{f"Paper: {text.rstrip('.')}.": True for text in of_page if text},
        **dict.fromkeys(table.notes, True),
    }  # fmt: skip
    return [note for note, applies in notes.items() if applies]
