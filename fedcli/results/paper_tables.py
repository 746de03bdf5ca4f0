"""A paper's table beside ours."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedcli.declarations import Gain, Table
from fedcli.results.intervals import Interval, MeasuredRuns, find_clear_best, mean_interval
from fedcli.results.metrics import Metric
from fedcli.results.notes import write_notes_on_paper_table
from fedcli.results.number_texts import format_interval, format_mean_of_runs
from fedcli.results.plans import Place, PlannedCell, TablePlan
from fedcli.results.printed_numbers import (
    SCALED,
    PrintedCell,
    find_printed_cells,
    find_printed_unit,
    find_printed_value,
)
from fedcli.results.render import CellIndex, TextTable
from fedcli.runs.record import RUN_OUTCOMES

FIRST_NUMBER_COLUMN = 2  # behind the row and whose numbers they are


class CountedRuns(NamedTuple):
    """The runs from which a cell has its numbers.

    Attributes:
        method: The name of the method.
        by_outcome: The number of planned runs of each outcome.
        num_counted: The number of runs that enter the mean.
    """

    method: str
    by_outcome: Counter[str]
    num_counted: int

    @property
    def are_complete(self) -> bool:
        """Whether all planned runs count."""
        return self.num_counted == self.by_outcome.total()


@dataclass(frozen=True)
class ComparedCell:
    """A cell of a table beside the paper's cell; all numbers are in the unit of the metric.

    Attributes:
        place: The row and the column of the cell.
        metric: The metric of the cell.
        printed: What the paper prints in the cell; None if the paper has no such cell.
        paper_value: The paper's number; None if the paper prints none.
        our_values: Our numbers, one a run; of a gain, the gain alone.
        our_text: What the table shows of our numbers.
        difference: The interval of our numbers less the paper's.
        runs: The runs behind our numbers; None for a gain, which follows from other cells.
    """

    place: Place
    metric: Metric
    printed: PrintedCell | None
    paper_value: float | None
    our_values: Sequence[float]
    our_text: str
    difference: Interval
    runs: CountedRuns | None

    @property
    def our_mean(self) -> float | None:
        """The mean of our values; None if there are none."""
        return fmean(self.our_values) if self.our_values else None

    @property
    def paper_deviation(self) -> float | None:
        """The standard deviation that the paper prints beside its mean; None if it prints none."""
        if self.printed is None or self.paper_value is None or self.metric.kind.unit == "rounds":
            return None
        return self.printed.deviation

    @property
    def paper_text(self) -> str:
        """What the table shows of the paper's number; empty if the paper has no such cell."""
        if self.paper_value is not None:
            text = self.metric.format_value(self.paper_value)
            if self.paper_deviation is not None:
                text += f" ± {self.metric.format_value(self.paper_deviation)}"
            return text
        if self.printed is None:
            return ""
        return self.metric.missing_text if self.printed.is_never else "no number"  # not printed, or not legible

    @property
    def difference_text(self) -> str:
        """What the table shows of the difference and its interval; empty if there is none."""
        return format_interval(self.metric, self.difference, with_count=False) if self.difference.num_values else ""


def compare_with_paper(plan: TablePlan) -> TextTable:
    """Builds a paper's table with our numbers beside the paper's; its CSV has a line for each cell."""
    cells = compare_cells(plan)
    best_places = _find_best_places(plan.cells)
    columns = list(dict.fromkeys(place.column for place in cells))
    titles = _write_titles(plan.table, columns)
    rows = _build_rows(cells, columns, best_places, "ours, reduced" if plan.reduction else "ours")
    best: set[CellIndex] = set()
    first_of_blocks = []
    for number, row in enumerate(rows):
        best.update(CellIndex(number, column) for column in row.best_columns)
        if row.name:
            first_of_blocks.append(number)
    has_blocks = len(first_of_blocks) < len(rows)
    return TextTable(
        titles=["Method", "", *titles],
        rows=[[row.name, row.title, *row.texts] for row in rows],
        number_columns=range(FIRST_NUMBER_COLUMN, FIRST_NUMBER_COLUMN + len(titles)),
        best=best,
        csv_rows=[_build_csv_row(cell, plan.reduction) for cell in cells.values()],
        title=plan.title,
        subject=f"Reduced: {plan.reduction}. Not the paper's setting." if plan.reduction else "",
        is_warning=bool(plan.reduction),
        block_starts=first_of_blocks if has_blocks else (),
        notes=write_notes_on_paper_table(
            plan,
            has_differences=any(cell.difference.num_values for cell in cells.values()),
            has_bold=bool(best_places),
        ),
    )


def _write_titles(table: Table, columns: Sequence[str]) -> list[str]:
    """Writes the titles of columns: in words where the paper has them, which are "rounds_to_target" in its numbers."""
    printed_columns = {place.column for place in find_printed_cells(table)}
    titles = []
    for column in columns:
        title = SCALED.sub(" floats", column)
        titles.append(title.replace("_", " ") if column in printed_columns else title)
    return titles


def compare_cells(plan: TablePlan) -> dict[Place, ComparedCell]:
    """Compares the planned cells, and the gains that follow from them, with the paper's cells.

    Returns:
        The cells by their places, in the order of the paper, and then the gains.
    """
    planned = {planned_cell.place: planned_cell for planned_cell in plan.cells}
    cells = {}
    for place in _order_places(plan.table, planned):
        cells[place] = _compare_planned(plan.table, planned[place])
    for gain in plan.table.gains:
        needed_places = {*_list_places(gain.leading_rows, gain), *_list_places(gain.other_rows, gain)}
        if planned.keys() >= needed_places:
            cells[Place(gain.row, gain.column)] = _compare_gain(plan.table, gain, cells)
    return cells


def _order_places(table: Table, planned: Collection[Place]) -> list[Place]:
    """Orders planned places: first those that the paper prints, in its order, then the others."""
    printed = find_printed_cells(table)
    others = [place for place in planned if place not in printed]
    return [*(place for place in printed if place in planned), *others]


def _list_places(rows: Sequence[str], gain: Gain) -> list[Place]:
    """Lists the places of the cells in some rows from which a gain is computed."""
    return [Place(row, column) for row, column in itertools.product(rows, gain.compared_columns)]


def _compare_planned(table: Table, planned: PlannedCell) -> ComparedCell:
    """Compares a cell that has runs."""
    metric = planned.metric
    records = planned.records
    outcomes = Counter(run.outcome for run in planned.runs)
    runs = CountedRuns(planned.cell.method, outcomes, sum(map(metric.includes, records)))
    text = format_mean_of_runs(metric, records, outcomes)
    return _compare_cell(table, planned.place, metric, text, metric.read_values(records), runs)


def _compare_gain(table: Table, gain: Gain, cells: Mapping[Place, ComparedCell]) -> ComparedCell:
    """Compares a cell that is a gain: the mean of some cells less the mean, or the best, of other cells."""
    place_of_gain = Place(gain.row, gain.column)
    leading_cells = [cells[place] for place in _list_places(gain.leading_rows, gain)]
    other_cells = [cells[place] for place in _list_places(gain.other_rows, gain)]
    metric = leading_cells[0].metric
    leading_means = [cell.our_mean for cell in leading_cells if cell.our_mean is not None]
    other_means = [cell.our_mean for cell in other_cells if cell.our_mean is not None]
    if len(leading_means) < len(leading_cells) or len(other_means) < len(other_cells):
        return _compare_cell(table, place_of_gain, metric, "not run", [])
    other_mean = max(other_means, key=metric.measure_goodness) if gain.over_best else fmean(other_means)
    value = fmean(leading_means) - other_mean
    return _compare_cell(table, place_of_gain, metric, metric.format_value(value, "+"), [value])


def _compare_cell(
    table: Table, place: Place, metric: Metric, our_text: str, our_values: Sequence[float],
    runs: CountedRuns | None = None,
) -> ComparedCell:  # fmt: skip
    """Compares our values in a cell with the paper's number; floats are first rounded as the paper rounds them."""
    paper_value = find_printed_value(table, place.row, place.column, metric)
    differences = []
    if paper_value is not None:
        comparable_values = our_values
        if metric.is_exact:
            unit = find_printed_unit(place.column)
            comparable_values = [unit * round(value / unit) for value in our_values]
        differences = [value - paper_value for value in comparable_values]
    return ComparedCell(
        place,
        metric,
        printed=find_printed_cells(table).get(place),
        paper_value=paper_value,
        our_values=our_values,
        our_text=our_text,
        difference=mean_interval(differences),
        runs=runs,
    )


def _find_best_places(planned: Sequence[PlannedCell]) -> set[Place]:
    """Finds in each column the place of our best number, if it is clearly the best."""
    by_column: dict[str, dict[Place, MeasuredRuns]] = {}
    for planned_cell in planned:
        runs = MeasuredRuns(planned_cell.metric, planned_cell.records)
        by_column.setdefault(planned_cell.cell.column, {})[planned_cell.place] = runs
    best_places = set()
    for runs_of_column in by_column.values():
        best_place = find_clear_best(runs_of_column)
        if best_place is not None:
            best_places.add(best_place)
    return best_places


class _Row(NamedTuple):
    """A row of texts; each row of the paper has up to three of them.

    Attributes:
        name: The name of the paper's row; empty in all but the first of its rows of texts.
        title: Whose numbers the row has: the paper's, ours, or the difference.
        texts: The texts of the columns of numbers.
        best_columns: The indices, in the whole table, of the columns in which the row is clearly the best.
    """

    name: str
    title: str
    texts: list[str]
    best_columns: list[int]


def _build_rows(
    cells: Mapping[Place, ComparedCell], columns: Sequence[str], best_places: Collection[Place], our_title: str
) -> list[_Row]:
    """Builds the rows of texts, without empty ones; `our_title` stands before our numbers."""
    rows = []
    for name in dict.fromkeys(place.row for place in cells):
        places = [Place(name, column) for column in columns]
        texts_by_title = {
            "paper": [cells[place].paper_text if place in cells else "" for place in places],
            our_title: [cells[place].our_text if place in cells else "" for place in places],
            "difference": [cells[place].difference_text if place in cells else "" for place in places],
        }
        best_columns = [column for column, place in enumerate(places, FIRST_NUMBER_COLUMN) if place in best_places]
        rows_of_name: list[_Row] = []
        for title, texts in texts_by_title.items():
            if any(texts):
                is_first = not rows_of_name
                best_of_row = best_columns if title == our_title else []
                rows_of_name.append(_Row(name if is_first else "", title, texts, best_of_row))
        rows += rows_of_name
    return rows


def _build_csv_row(cell: ComparedCell, reduction: str) -> dict[str, Any]:
    """Builds what the CSV has of a cell, by column, in full precision."""
    row: dict[str, Any] = {
        "row": cell.place.row,
        "column": cell.place.column,
        "metric": cell.metric.name,
        "unit": cell.metric.kind.unit,
        "paper": cell.paper_value,
        "paper_std": cell.paper_deviation,
        "ours": cell.our_mean,
        "ours_std": stdev(cell.our_values) if len(cell.our_values) > 1 else None,
        "difference_low": cell.difference.low,
        "difference_high": cell.difference.high,
    }
    if cell.runs is not None:
        row["method"] = cell.runs.method
        row["runs_planned"] = cell.runs.by_outcome.total()
        row["runs_counted"] = cell.runs.num_counted
        for outcome in RUN_OUTCOMES:
            row[f"runs_{outcome.replace(' ', '_')}"] = cell.runs.by_outcome[outcome]
    row["reduced"] = reduction
    return row
