"""Curves of runs: the rounds of a run as points, and the runs of a setting as a line with a band."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from textwrap import fill
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedcli.declarations import SELECTIONS
from fedcli.figures import ACCURACY, Measure
from fedcli.figures.names import NO_LABELS, setting_name
from fedcli.results.frame import tabulate_clients, tabulate_rounds
from fedcli.results.groups import SeedGroup
from fedcli.results.printed_numbers import find_printed_accuracies
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


class Curve(NamedTuple):
    """A setting's runs as a line.

    Attributes:
        setting: All runs.
        runs: Those behind the line: the finished ones, else the unfinished; none where all diverged.
        line: Their means, a row for each round in which all have a value: `x`, `y`, and the band `low` to `high`, the
            mean less and plus the sample standard deviation.
        diverged: `x` and `y` of each run that diverged and has values.
        chosen: Of accuracies, the mean headline at the mean of the rounds that the rule has chosen; it may lie
            off the line. None where no rule looks for a round.
        printed: Of accuracies, the paper's number in percent or None, see `find_printed_accuracies`.
    """

    setting: SeedGroup
    runs: list[Record]
    line: pd.DataFrame
    diverged: list[pd.DataFrame]
    chosen: Point | None
    printed: float | None

    @property
    def end(self) -> Point:
        """The last point of the line, or, where all runs diverged, of the one that ends highest; it orders legends."""
        lines = [self.line] if len(self.line) else self.diverged
        ends = [Point(points.x.iloc[-1], points.y.iloc[-1]) for points in lines]
        return max(ends, key=lambda end: end.y)

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
        name = setting_name(self.setting, labels)
        if notes:
            name += f" ({', '.join(notes)})"
        return fill(name, 30, break_long_words=False, break_on_hyphens=False)


def find_curves(settings: Sequence[SeedGroup], measure: Measure = ACCURACY, x: str = "round") -> list[Curve]:
    """The curve of each setting with a value.

    Args:
        settings: The settings.
        measure: What the curves show.
        x: One of `AXES`.
    """
    printed_numbers: list[float | None] = [None] * len(settings)
    if measure == ACCURACY:
        printed_numbers = find_printed_accuracies([setting.first for setting in settings])
    curves = []
    for setting, printed in zip(settings, printed_numbers, strict=True):
        curve = _find_curve(setting, measure, x, printed)
        if len(curve.line) or curve.diverged:
            curves.append(curve)
    return curves


def _find_curve(setting: SeedGroup, measure: Measure, x: str, printed: float | None) -> Curve:
    """The curve of a setting, which may be without values."""
    diverged = [record for record in setting.records if outcome_of(record) == "diverged"]
    unfinished = [record for record in setting.records if record not in diverged]
    runs = setting.finished or unfinished
    line = _mean_line([points_of(record, measure, x) for record in runs], measure.is_percentage)
    points_of_diverged = [points_of(record, measure, x) for record in diverged]
    chosen = None
    if measure == ACCURACY and SELECTIONS[setting.selection].best_by is not None:
        chosen = _headline(runs, line)
    return Curve(
        setting=setting,
        runs=runs,
        line=line,
        diverged=[points for points in points_of_diverged if len(points)],
        chosen=chosen,
        printed=printed,
    )


def _mean_line(points_of_runs: list[pd.DataFrame], is_percentage: bool) -> pd.DataFrame:
    """The mean of runs and its band, see `Curve`, which no percentage leaves beyond 0 and 100; empty without runs."""
    if not points_of_runs:
        return pd.DataFrame(columns=["x", "y", "low", "high"], dtype=float)
    rounds = pd.concat(points_of_runs).groupby(level=0)
    line = rounds.mean()[rounds.size() == len(points_of_runs)]
    deviation = rounds.y.std()[line.index]
    low = line.y - deviation
    high = line.y + deviation
    if is_percentage:
        low = low.clip(0, 100)
        high = high.clip(0, 100)
    return line.assign(low=low, high=high)


def _headline(runs: list[Record], line: pd.DataFrame) -> Point | None:
    """The runs' mean headline at the mean of its rounds, for a rule that looks for a round; None without a value."""
    summaries = [record["summary"] for record in runs]
    chosen = [summary for summary in summaries if summary["selected"] is not None]
    if line.empty or not chosen:
        return None
    number = fmean(summary["selected_round"] for summary in chosen)
    headline = fmean(100 * summary["selected"] for summary in chosen)
    return Point(float(np.interp(number, line.index, line.x)), headline)


def points_of(record: Record, measure: Measure, x: str) -> pd.DataFrame:
    """The rounds or clients of a run, by number from 0, that have a value `y` of a measure and an `x`.

    Clients, whose number is `x`, are sorted by their values; for rounds, `x` is one of `AXES`.
    """
    if measure.of_clients:
        values = tabulate_clients(record)[measure.column].dropna().sort_values(ignore_index=True)
        return pd.DataFrame({"x": values.index + 1, "y": values})
    rounds = tabulate_rounds(record)
    positions = rounds["round"]
    if x == "floats":
        positions = _floats_sent(record)
    elif x == "seconds":
        positions = rounds.filter(like="seconds/").sum(axis=1).cumsum() if is_undisturbed(record) else np.nan
    columns = [name for name in rounds if name == measure.column or name.startswith(f"{measure.column}/")]
    values = rounds[columns].mean(axis=1)
    return pd.DataFrame({"x": positions, "y": values}, dtype=float).dropna()


def _floats_sent(record: Record) -> pd.Series:
    """What all clients of a run have sent up to the end of each round."""
    last = (record["cost"] or {}).get("floats_up")  # older records have that of the last round alone
    floats_of_a_client = pd.Series([entry.get("floats_up", last) for entry in record["rounds"]], dtype=float)
    return record["config"]["cohort_size"] * floats_of_a_client.cumsum()
