"""Curves of runs: the rounds of a run as points, and the runs of a setting as a line with a band.

Without pandas, which is slow to import, as each run ends with its curve.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import fmean
from textwrap import fill
from typing import NamedTuple

import numpy as np

from fedcli.declarations import SELECTIONS
from fedcli.figures import ACCURACY, Quantity
from fedcli.figures.names import NO_LABELS, name_setting
from fedcli.results.groups import SeedGroup
from fedcli.results.printed_numbers import find_printed_accuracies
from fedcli.results.run_records import RoundNumbers, list_client_accuracies, list_round_numbers
from fedcli.runs.identity import recorded_code_changes
from fedcli.runs.machine import is_undisturbed
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record


class Axis(NamedTuple):
    """A horizontal axis.

    Attributes:
        label: Its name in the figure.
        counts_from_1: Whether its values are numbers of rounds or clients, the first of which is 1.
    """

    label: str
    counts_from_1: bool = False


# By name, `fedcli plot --x NAME`.
AXES = {
    "round": Axis("Round", counts_from_1=True),
    "floats": Axis("Floats sent by all clients"),
    "seconds": Axis("Seconds"),
}
CLIENTS = Axis("Clients, sorted", counts_from_1=True)  # where a curve has a point for each client


class Point(NamedTuple):
    """A point of a panel."""

    x: float
    y: float


@dataclass(frozen=True)
class Points:
    """The rounds or clients of a run that have a value.

    Attributes:
        numbers: The number of each round or client, which counts from 0, `[P]`.
        x: Their places on the horizontal axis, `[P]`.
        y: Their values, `[P]`.
    """

    numbers: np.ndarray
    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def end(self) -> Point:
        """The last point."""
        return Point(self.x[-1], self.y[-1])

    def at(self, numbers: np.ndarray) -> "Points":
        """Returns the points that have one of some numbers."""
        is_chosen = np.isin(self.numbers, numbers)
        return Points(self.numbers[is_chosen], self.x[is_chosen], self.y[is_chosen])


@dataclass(frozen=True)
class Line(Points):
    """The mean of runs, at the rounds or clients where all of them have a value.

    Attributes:
        low: The mean less the sample standard deviation, `[P]`; NaN of a single run.
        high: The mean plus the sample standard deviation, `[P]`; NaN of a single run.
    """

    low: np.ndarray
    high: np.ndarray


class Curve(NamedTuple):
    """A setting's runs as a line.

    Attributes:
        setting: All runs.
        runs: Those behind the line: the finished ones, else the unfinished; none where all diverged.
        line: Their mean; without points where there are no runs.
        diverged: The points of each run that diverged and has values.
        chosen: Of accuracies, the mean headline at the mean of the rounds that the rule has chosen; it may lie
            off the line. None where no rule looks for a round.
        printed: Of accuracies, the paper's number in percent or None, see `find_printed_accuracies`.
    """

    setting: SeedGroup
    runs: list[Record]
    line: Line
    diverged: list[Points]
    chosen: Point | None
    printed: float | None

    @property
    def end(self) -> Point:
        """The last point of the line, or, where all runs diverged, of the one that ends highest; it orders legends."""
        if len(self.line):
            return self.line.end
        return max((points.end for points in self.diverged), key=lambda end: end.y)

    @property
    def changes(self) -> list[str]:
        """What of the code has changed between the rounds of its runs, in words."""
        changes: dict[str, None] = {}
        for record in self.setting.records:
            changes |= dict.fromkeys(recorded_code_changes(record))
        return list(changes)

    def name(self, labels: Mapping[str, str] = NO_LABELS) -> str:
        """The name in a legend, with what it stands for beside finished runs of one code, and the paper's number."""
        outcomes = Counter(map(outcome_of, self.setting.records))
        notes = [f"{count}\N{NO-BREAK SPACE}{outcome}" for outcome, count in outcomes.items() if outcome != "finished"]
        notes += self.changes
        if self.printed is not None:
            notes.append(f"paper:\N{NO-BREAK SPACE}{self.printed:.2f}")
        name = name_setting(self.setting, labels)
        if notes:
            name += f" ({', '.join(notes)})"
        return fill(name, 30, break_long_words=False, break_on_hyphens=False)


def find_curves(settings: Sequence[SeedGroup], quantity: Quantity = ACCURACY, x: str = "round") -> list[Curve]:
    """Finds the curve of each setting with a value.

    Args:
        settings: The settings.
        quantity: What the curves show.
        x: One of `AXES`.
    """
    printed_numbers: list[float | None] = [None] * len(settings)
    if quantity == ACCURACY:
        printed_numbers = find_printed_accuracies([setting.first for setting in settings])
    curves = []
    for setting, printed in zip(settings, printed_numbers, strict=True):
        curve = _find_curve(setting, quantity, x, printed)
        if len(curve.line) or curve.diverged:
            curves.append(curve)
    return curves


def _find_curve(setting: SeedGroup, quantity: Quantity, x: str, printed: float | None) -> Curve:
    """Finds the curve of a setting, which may be without values."""
    diverged = [record for record in setting.records if outcome_of(record) == "diverged"]
    unfinished = [record for record in setting.records if record not in diverged]
    runs = setting.finished or unfinished
    line = _average_runs([find_points(record, quantity, x) for record in runs], quantity.is_percentage)
    points_of_diverged = [find_points(record, quantity, x) for record in diverged]
    chosen = None
    if quantity == ACCURACY and SELECTIONS[setting.selection].best_by is not None:
        chosen = _find_headline(runs, line)
    return Curve(
        setting=setting,
        runs=runs,
        line=line,
        diverged=[points for points in points_of_diverged if len(points)],
        chosen=chosen,
        printed=printed,
    )


def _average_runs(points_of_runs: Sequence[Points], is_percentage: bool) -> Line:
    """Averages runs; the band of a percentage stays within 0 and 100. Without runs, the line has no points."""
    if not points_of_runs:
        nothing = np.empty(0)
        return Line(numbers=nothing, x=nothing, y=nothing, low=nothing, high=nothing)
    numbers = reduce(np.intersect1d, [points.numbers for points in points_of_runs])
    common = [points.at(numbers) for points in points_of_runs]
    x = np.mean([points.x for points in common], axis=0)
    y = np.mean([points.y for points in common], axis=0)
    deviation = np.full(len(numbers), np.nan)
    if len(common) > 1:
        deviation = np.std([points.y for points in common], axis=0, ddof=1)
    low = y - deviation
    high = y + deviation
    if is_percentage:
        low = low.clip(0, 100)
        high = high.clip(0, 100)
    return Line(numbers=numbers, x=x, y=y, low=low, high=high)


def _find_headline(runs: list[Record], line: Line) -> Point | None:
    """Finds the mean headline of runs at the mean of its rounds, of a rule that looks for a round; None without one."""
    summaries = [record["summary"] for record in runs]
    chosen = [summary for summary in summaries if summary["selected"] is not None]
    if not len(line) or not chosen:
        return None
    number = fmean(summary["selected_round"] for summary in chosen)
    headline = fmean(100 * summary["selected"] for summary in chosen)
    return Point(float(np.interp(number, line.numbers, line.x)), headline)


def find_points(record: Record, quantity: Quantity, x: str) -> Points:
    """Finds the rounds or clients of a run that have a value of a quantity and a place on the horizontal axis.

    Clients are sorted by their values; rounds stand at `x`, one of `AXES`.
    """
    if quantity.of_clients:
        accuracies = sorted(accuracy for accuracy in list_client_accuracies(record) if accuracy is not None)
        numbers = np.arange(len(accuracies))
        return Points(numbers=numbers, x=numbers + 1.0, y=np.array(accuracies, dtype=float))
    rounds = list_round_numbers(record)
    all_rounds = Points(
        numbers=np.arange(len(rounds)),
        x=_find_positions(record, rounds, x),
        y=np.array([_read_value(numbers, quantity) for numbers in rounds], dtype=float),
    )
    has_both = ~np.isnan(all_rounds.x) & ~np.isnan(all_rounds.y)
    return all_rounds.at(all_rounds.numbers[has_both])


def _read_value(numbers: RoundNumbers, quantity: Quantity) -> float | None:
    """Reads the value of a quantity in a round, the mean of its columns; None without one."""
    values = []
    for name, number in numbers.items():
        is_measured = name == quantity.column or name.startswith(f"{quantity.column}/")
        if is_measured and number is not None:
            values.append(number)
    return fmean(values) if values else None


def _find_positions(record: Record, rounds: Sequence[RoundNumbers], x: str) -> np.ndarray:
    """Finds where the rounds of a run stand on an axis, `[R]`; NaN where that is unknown."""
    if x == "floats":
        return _add_up_floats(record)
    if x == "seconds":
        return _add_up_seconds(record, rounds)
    return np.array([numbers["round"] for numbers in rounds], dtype=float)


def _add_up_floats(record: Record) -> np.ndarray:
    """Adds up the floats that all clients have sent by the end of each round, `[R]`; NaN where one has no number."""
    last = (record["cost"] or {}).get("floats_up")  # older records have that of the last round alone
    floats_of_a_client = np.array([entry.get("floats_up", last) for entry in record["rounds"]], dtype=float)
    sent = record["config"]["cohort_size"] * np.nancumsum(floats_of_a_client)
    return np.where(np.isnan(floats_of_a_client), np.nan, sent)


def _add_up_seconds(record: Record, rounds: Sequence[RoundNumbers]) -> np.ndarray:
    """Adds up the seconds by the end of each round, `[R]`; NaN if the run did not have the machine to itself."""
    if not is_undisturbed(record):
        return np.full(len(rounds), np.nan)
    seconds = []
    for numbers in rounds:
        parts = [number for name, number in numbers.items() if name.startswith("seconds/") and number is not None]
        seconds.append(sum(parts))
    return np.cumsum(seconds, dtype=float)
