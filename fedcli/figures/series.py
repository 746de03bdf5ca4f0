"""The numbers that curves show: of the runs that differ only in the seed, values over rounds, floats or seconds."""

from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import numpy as np

from fedcli.results.comparison import printed_accuracies
from fedcli.results.tables import SeedGroup
from fedcli.runs.records import quiet


class Curve(NamedTuple):
    """What is drawn of the runs of a setting.

    Attributes:
        setting: The runs.
        drawn: Those behind the line: the finished ones, else the unfinished ones, else those that diverged.
        rounds: The rounds, counted from 1, in which all of these have a value; `[R]`.
        places: Where these stand on the horizontal axis, the mean over the runs; `[R]`.
        values: `[n, R]`.
        diverged: Places and values of each run that diverged and has any.
        printed: The paper's number in percent, see `printed_accuracies`; None where the runs are of no cell with one.
    """

    setting: SeedGroup
    drawn: list[dict]
    rounds: np.ndarray
    places: np.ndarray
    values: np.ndarray
    diverged: list[tuple[np.ndarray, np.ndarray]]
    printed: float | None

    @property
    def all_diverged(self) -> bool:
        """Whether there is no other run."""
        return self.drawn == self.setting.diverged

    @property
    def mean(self) -> np.ndarray:
        """Mean over the runs `[R]`; empty where all diverged, as each is drawn alone then."""
        return np.array([]) if self.all_diverged else self.values.mean(0)

    @property
    def deviation(self) -> np.ndarray | None:
        """Sample standard deviation over the runs `[R]`; None of a single run."""
        return self.values.std(0, ddof=1) if len(self.values) > 1 and not self.all_diverged else None

    @property
    def last(self) -> float:
        """The value of the last round, by which legends are ordered."""
        lines = [values for _, values in self.diverged] if self.all_diverged else [self.mean]
        return max((values[-1] for values in lines if len(values)), default=-np.inf)

    @property
    def headline(self) -> tuple[float, float] | None:
        """Place and accuracy of the number in tables, means over the runs; None where no rule looks for a round."""
        summaries = [record.get("summary") or {} for record in self.drawn]
        searched = [one for one in summaries if (one.get("selection") or "").startswith("best")]
        chosen = [one for one in searched if one.get("selected") is not None]
        if not len(self.rounds) or not chosen or len(chosen) < len(self.drawn):
            return None
        mean_round = fmean(one["selected_round"] + 1 for one in chosen)
        place = float(np.interp(mean_round, self.rounds, self.places))
        return place, 100 * fmean(one["selected"] for one in chosen)


def round_numbers(record: dict) -> list[float]:
    """The rounds, counted from 1."""
    return [row["round"] + 1 for row in record["rounds"]]


def floats_sent(record: dict) -> list[float]:
    """Floats that all clients together have sent up to the end of each round; none where that is not recorded."""
    last = (record.get("cost") or {}).get("floats_up")  # older records have that of the last round alone
    sent = [row.get("floats_up", last) for row in record["rounds"]]
    clients = record["config"].get("cohort_size")
    return [] if None in (*sent, clients) else (clients * np.cumsum(sent, dtype=float)).tolist()


def seconds_taken(record: dict) -> list[float]:
    """Seconds up to the end of each round; none of a run that other work disturbed."""
    return np.cumsum([sum(row["seconds"].values()) for row in record["rounds"]]).tolist() if quiet(record) else []


# What the curves can stand over: the label, and of a record a value for each round that it has.
AXES: dict[str, tuple[str, Callable[[dict], list[float]]]] = {
    "round": ("Round", round_numbers),
    "floats": ("Floats sent by all clients", floats_sent),
    "seconds": ("Seconds", seconds_taken),
}


def accuracy_percent(row: dict) -> float | None:
    """Test accuracy of a round in percent; None where it was not evaluated."""
    accuracy = row.get("test_accuracy")
    return None if accuracy is None else 100 * accuracy


def find_curves(
    groups: list[SeedGroup],
    read: Callable[[dict], float | None] = accuracy_percent,
    along: Callable[[dict], list[float]] = round_numbers,
) -> list[Curve]:
    """The curve of each group with a value.

    Args:
        groups: The groups.
        read: From what a record says of a round to the value; None where there is none.
        along: From a record to the places of its rounds on the horizontal axis.
    """
    numbers = printed_accuracies([member.records[0] for member in groups])
    curves = []
    for member, printed in zip(groups, numbers, strict=True):
        running = [record for record in member.records if record not in member.diverged]
        drawn = member.finished or running or member.diverged
        points = [_points(record, read, along) for record in drawn]
        rounds = sorted(set.intersection(*(set(of_run) for of_run in points)))
        table = np.array([[of_run[number] for number in rounds] for of_run in points])
        table = table.reshape(len(points), len(rounds), 2)  # also without a round
        ended = [_points(record, read, along) for record in member.diverged]
        diverged = [tuple(np.array(list(of_run.values())).T) for of_run in ended if of_run]
        if rounds or diverged:
            places, values = table[..., 0].mean(0), table[..., 1]
            curves.append(Curve(member, drawn, np.array(rounds), places, values, diverged, printed))
    return curves


def _points(
    record: dict, read: Callable[[dict], float | None], along: Callable[[dict], list[float]]
) -> dict[int, tuple[float, float]]:
    """Place and value of each round of a run that has one, by the round counted from 1."""
    points = {}
    for place, row in zip(along(record), record["rounds"], strict=True):
        value = read(row)
        if value is not None:
            points[row["round"] + 1] = (place, value)
    return points
