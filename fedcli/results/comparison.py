"""A paper's table beside ours: the paper's number, ours and the difference of each cell."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcli.declarations import Gain, Table
from fedcli.registry import tables
from fedcli.results.frame import STATES, departures, frame_of
from fedcli.results.metrics import BOLD, DIVERGED, Metric, best, interval
from fedcli.results.plans import IN_TEXT, PlannedCell, PlannedRun, TablePlan, wanted
from fedcli.results.render import Sheet
from fedcli.results.tables import tuned

NOT_REPORTED = "not reported"
LINES = ("paper", "ours", "difference", "interval")
ACCURACIES = ("selected", "last", "best")  # metrics that are points of a learning curve
SCALED = re.compile(r"_(1e\d+)_floats$")  # of a column: the paper prints floats in this unit


@dataclass(frozen=True)
class Entry:
    """A cell as text; a line is empty where there is nothing to say.

    Attributes:
        paper: "66.69 ± 0.69", or why there is no number.
        ours: "66.10 ± 0.52 (3)", or why there is no number.
        difference: Ours less the paper's, with its sign.
        interval: Its 95 % interval, where there are two seeds or more.
        mark: "best" where it stands out among ours in the column.
        values: The same as numbers, a row of the CSV.
    """

    paper: str = ""
    ours: str = ""
    difference: str = ""
    interval: str = ""
    mark: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def line(self, name: str) -> tuple[str, str]:
        """Text and mark of one of `LINES`."""
        return getattr(self, name), self.mark if name == "ours" else ""


@dataclass(frozen=True)
class Comparison:
    """A table of a paper and ours.

    Attributes:
        title: One line.
        reduced: What makes our runs smaller than the paper's; empty where nothing does.
        rows: Names of the rows.
        columns: Names of the columns.
        entries: By row and column; none where neither the paper nor we have one.
        notes: What a reader must know of the numbers.
    """

    title: str
    reduced: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    entries: dict[tuple[str, str], Entry]
    notes: tuple[str, ...]

    @property
    def has_paper(self) -> bool:
        """Whether the paper prints any of the numbers."""
        return any(entry.paper not in ("", NOT_REPORTED) for entry in self.entries.values())

    def lines(self, row: str, columns: Iterable[str]) -> list[list[tuple[str, str]]]:
        """The lines of a row, each a list of texts and marks; the first two are the row's name and the line's."""
        entries = [self.entries.get((row, column), Entry()) for column in columns]
        if not any(entry.paper or entry.ours for entry in entries):
            return []
        cells = {name: [entry.line(name) for entry in entries] for name in LINES}
        if not self.has_paper:
            del cells["paper"]
        for name in ("difference", "interval"):
            if not any(text for text, _ in cells[name]):
                del cells[name]
        titles = {name: f"{name}, reduced" if self.reduced and name == "ours" else name for name in cells}
        first = next(iter(cells))
        return [[(row if name == first else "", ""), (titles[name], ""), *cells[name]] for name in cells]


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


def compare(plan: TablePlan, errors: dict[Path, str] | None = None) -> Comparison:
    """The table as it stands, beside the paper's.

    Args:
        plan: The table, with the records that there are.
        errors: Errors by folder of runs that have just failed, also of those that left no record.
    """
    errors, paper = errors or {}, printed(plan.table)
    cells = {(planned.cell.row, planned.cell.column): planned for planned in plan.cells}
    in_table = {(cell.row, cell.column) for cell in (*plan.table.cells, *plan.table.gains)}
    shown_rows, shown_columns = {row for row, _ in cells}, {column for _, column in cells}
    entries = {}
    for row, column in dict.fromkeys([*paper, *cells]):
        if (row, column) in cells:
            entries[row, column] = _entry(cells[row, column], paper.get((row, column), {}), errors)
        elif row in shown_rows and column in shown_columns and (row, column) not in in_table:
            entries[row, column] = Entry(_paper_text(paper[row, column], _metric_of(cells, column)), "not planned")
    marked = _marked(entries, cells)
    for gain in plan.table.gains:
        entry = _gain(gain, entries, cells, paper)
        if entry is not None:
            entries[gain.row, gain.column] = entry
    rows = tuple(dict.fromkeys(row for row, _ in entries))
    columns = tuple(dict.fromkeys(column for _, column in entries))
    intervals = any(entry.interval for entry in entries.values())
    notes = tuple(_notes(plan, errors, bool(marked), intervals))
    return Comparison(plan.title, plan.reduction, rows, columns, {**entries, **marked}, notes)


def sheet(comparison: Comparison) -> Sheet:
    """The table to be written; of its values each is a cell, floats in ones also where the paper rounds them."""
    entries = [entry for entry in comparison.entries.values() if entry.values]
    return Sheet(
        ["Method", "", *map(heading, comparison.columns)],
        [lines for row in comparison.rows if (lines := comparison.lines(row, comparison.columns))],
        numbers=2,
        values=[{**entry.values, "mark": entry.mark, "reduced": comparison.reduced} for entry in entries],
        title=comparison.title,
        setting=f"**Reduced: {comparison.reduced}. Not the paper's setting.**" if comparison.reduced else "",
        notes=comparison.notes,
    )


def heading(column: str) -> str:
    """The name of a column as a heading."""
    return SCALED.sub(" floats", column).replace("_", " ")


def _metric_of(cells: dict[tuple[str, str], PlannedCell], column: str) -> Metric:
    """What a column measures."""
    return next(planned.metric for (_, own), planned in cells.items() if own == column)


def printed_unit(column: str) -> tuple[float, str]:
    """In how many floats the paper prints a column, and the letter for it."""
    found = SCALED.search(column)
    unit = found[1] if found else ""
    return float(unit or 1), "K" if unit == "1e3" else unit.removeprefix("1")


def _paper_text(entry: dict[str, Any], metric: Metric) -> str:
    value = entry.get(metric.field)
    if value is None:
        never = metric.none if entry.get("printed") == "0" else NOT_REPORTED
        return "not legible" if entry.get("missing_in_source") else never
    if metric.unit == "floats":
        return f"{value:,.0f}{printed_unit(entry['column'])[1]}"
    spread = f" ± {metric.text(entry['std'])}" if metric.field == "mean" and entry.get("std") is not None else ""
    return metric.text(value) + spread


def _entry(planned: PlannedCell, paper: dict[str, Any], errors: dict[Path, str]) -> Entry:
    """A cell of ours beside the paper's."""
    metric, cell = planned.metric, planned.cell
    states = Counter("failed" if run.folder in errors and run.to_do else run.state for run in planned.runs)
    records = [run.record for run in planned.runs if run.record is not None]
    values, done = metric.values(records), sum(map(metric.counts, records))
    (scale, _), target = printed_unit(cell.column), paper.get(metric.field)
    row = {
        "row": cell.row,
        "column": cell.column,
        "method": cell.method,
        "metric": metric.name,
        "unit": metric.unit,
        "paper": None if target is None else target * scale,
        "paper_std": paper.get("std") if metric.field == "mean" else None,
        "ours": fmean(values) if values else None,
        "ours_std": stdev(values) if len(values) > 1 else None,
        "runs_planned": len(planned.runs),
        "runs_counted": done,
        **{f"runs_{state.replace(' ', '_')}": states[state] for state in STATES},
    }
    ours = _our_text(metric, row, states, done)
    mean, spread = interval(values), ""
    row |= {"difference_low": None, "difference_high": None}
    if row["paper"] is not None and mean is not None and mean.low is not None and metric.unit != "floats":
        low, high = mean.low - row["paper"], mean.high - row["paper"]  # the paper's number is taken as exact
        row |= {"difference_low": low, "difference_high": high}
        spread = f"[{metric.signed(low)}, {metric.signed(high)}]"
    return Entry(_paper_text(paper, metric), ours, _difference(metric, row, scale), spread, "", row)


def _gain(gain: Gain, entries: dict, cells: dict[tuple[str, str], PlannedCell], paper: dict) -> Entry | None:
    """A number that follows from cells, beside the paper's; None where not all of these were asked for."""
    places = [[(row, column) for row in rows for column in gain.columns] for rows in (gain.more, gain.less)]
    if not all(place in cells for rows in places for place in rows):
        return None
    metric, target = _metric_of(cells, gain.columns[0]), paper.get((gain.row, gain.column), {})
    more, less = ([entries[place].values["ours"] for place in rows] for rows in places)
    ours = None if None in (*more, *less) else fmean(more) - (max if gain.best else fmean)(less)
    row = {
        "row": gain.row, "column": gain.column, "metric": metric.name, "unit": metric.unit,
        "paper": target.get(metric.field), "ours": ours,
    }  # fmt: skip
    text = "not run" if ours is None else metric.signed(ours)
    return Entry(_paper_text(target, metric), text, _difference(metric, row, 1), values=row)


def _our_text(metric: Metric, row: dict[str, Any], states: Counter, done: int) -> str:
    """Mean, deviation and number of the runs that count (`done`); where none does, the furthest that a run came."""
    planned, lost = row["runs_planned"], states["finished"] + states["diverged"] - done
    if not done:
        return next(state for state in STATES if states[state])
    count = str(done) if done + lost == planned else f"{done} of {planned}"
    count += f", {states['diverged'] - lost} diverged" if states["diverged"] > lost else ""
    count += f", {lost} of {planned} diverged" if lost else ""
    count += f", {states['failed']} failed" if states["failed"] else ""
    if row["ours"] is None:
        return f"{metric.none} ({count})"
    spread = row["ours_std"]
    if metric.unit == "floats" and not spread and done == planned:
        return metric.text(row["ours"])  # a count, the same with every seed
    return metric.text(row["ours"]) + ("" if spread is None else f" ± {metric.text(spread)}") + f" ({count})"


def _difference(metric: Metric, row: dict[str, Any], scale: float) -> str:
    """Ours less the paper's; floats in the unit that the paper prints, to which it has rounded."""
    if row["ours"] is None or row["paper"] is None:
        return ""
    if metric.unit == "floats":
        steps = round(row["ours"] / scale) - round(row["paper"] / scale)
        return f"{steps:+,}{printed_unit(row['column'])[1]}" if steps else "none"
    return metric.signed(row["ours"] - row["paper"])


def _marked(entries: dict, cells: dict[tuple[str, str], PlannedCell]) -> dict[tuple[str, str], Entry]:
    """The entries that stand out as the best of ours in their column, so marked."""
    marked = {}
    for column in dict.fromkeys(column for _, column in cells):
        places = [place for place in cells if place[1] == column]
        runs = [[run.record for run in cells[place].runs if run.record is not None] for place in places]
        if (winner := best(_metric_of(cells, column), runs)) is not None:
            marked[places[winner]] = replace(entries[places[winner]], mark="best")
    return marked


def _notes(plan: TablePlan, errors: dict[Path, str], marks: bool, intervals: bool) -> Iterator[str]:
    """What a reader must know of the numbers, each only where it applies."""
    table, units = plan.table, {planned.metric.unit for planned in plan.cells}
    of_paper = table.reported[0] in reported()
    less = " Difference: ours less the paper's." if of_paper else ""
    yield f"Ours: mean ± sample standard deviation over seeds (runs).{less}"
    if intervals and of_paper:
        yield "Interval: of the difference, 95 % by Student's t over our seeds; the paper's number is taken as exact."
    if of_paper and not intervals and len(plan.seeds) == 1 and any(run.record is not None for run in plan.runs):
        yield "No interval: one run of ours stands beside one that the paper prints."
    if any(run.state == "diverged" for run in plan.runs):
        yield DIVERGED
    if marks:
        yield BOLD.format(among=" of ours in a column")
    if rules := sorted({run.setup.selection for run in plan.runs}):
        yield f"The round that counts in a run: {', '.join(rules)}."
    if "floats" in units:
        units = "K: thousands, e8: hundred millions"
        yield f"Floats: the paper rounds them ({units}), ours are exact; the difference is after the same rounding."
    yield from _failures(plan, errors)
    if old := [run.folder for run in plan.runs if run.outdated]:
        yield f"Made with another version of the code, which computed something else: {', '.join(map(str, old))}."
    if of_paper and not any((cell.row, cell.column) in printed(table) for cell in (*table.cells, *table.gains)):
        yield "The paper prints none of these numbers."
    yield from tuned(run.record for run in plan.runs if run.record is not None)
    if table.reported[1] != IN_TEXT:  # else these are about other numbers too
        yield from _absences(table)
        about = _reported(table)
        yield from (f"Paper: {about[key].rstrip('.')}." for key in ("setting", "notes") if about.get(key))
    yield from table.notes


def _absences(table: Table) -> Iterator[str]:
    """The paper's rows and columns that the table leaves out."""
    for what, names, own in (
        ("rows", [row for row, _ in printed(table)], {cell.row for cell in (*table.cells, *table.gains)}),
        ("columns", [column for _, column in printed(table)], {cell.column for cell in (*table.cells, *table.gains)}),
    ):
        if absent := [heading(name) for name in dict.fromkeys(names) if name not in own]:
            yield f"Not planned, {what} of the paper: {'; '.join(absent)}."


def _failures(plan: TablePlan, errors: dict[Path, str]) -> Iterator[str]:
    """The runs that have failed, those that differ only in the seed together, with the first one's error."""
    failed: dict[tuple[str, str], list[tuple[PlannedRun, str]]] = {}
    for run in plan.runs:
        if error := errors.get(run.folder) or (run.record or {}).get("error"):
            state = "Diverged" if run.state == "diverged" else "Failed"
            failed.setdefault((state, run.label), []).append((run, error))
    for (state, label), members in failed.items():
        seeds = ", ".join(str(run.setup.run.seed) for run, _ in members)
        first, error = members[0]
        yield f"{state}: {label}, seed {seeds}: {_first_clause(error)} ({first.folder})."


def _first_clause(error: str) -> str:
    """What was wrong, with a round counted from 1, also where an older record says that it counts from 0."""
    clause = error.split(";")[0].rstrip(".")
    if "counted from 0" not in error:
        return clause
    return re.sub(r"in round (\d+)", lambda found: f"in round {int(found[1]) + 1}", clause)
