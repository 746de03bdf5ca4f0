"""The numbers that curves show: of the runs that differ only in the seed, values over rounds, floats or seconds."""

from collections.abc import Callable
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
    def has_band(self) -> bool:
        """Whether there are several seeds to draw a deviation of."""
        return len(self.values) > 1 and not self.all_diverged


def _rounds(record: dict) -> list[float]:
    """The rounds, counted from 1."""
    return [row["round"] + 1 for row in record["rounds"]]


def floats_sent(record: dict) -> list[float]:
    """Floats that all clients together have sent up to the end of each round; none where that is not recorded."""
    last = (record.get("cost") or {}).get("floats_up")  # older records have that of the last round alone
    sent = [row.get("floats_up", last) for row in record["rounds"]]
    clients = record["config"].get("cohort_size")
    return [] if None in (*sent, clients) else (clients * np.cumsum(sent, dtype=float)).tolist()


def _seconds_taken(record: dict) -> list[float]:
    """Seconds up to the end of each round; none of a run that other work disturbed."""
    return np.cumsum([sum(row["seconds"].values()) for row in record["rounds"]]).tolist() if quiet(record) else []


# What the curves can stand over: the label, and of a record a value for each round that it has.
AXES: dict[str, tuple[str, Callable[[dict], list[float]]]] = {
    "round": ("Round", _rounds),
    "floats": ("Floats sent by all clients", floats_sent),
    "seconds": ("Seconds", _seconds_taken),
}


def _accuracy(row: dict) -> float | None:
    """Test accuracy of a round in percent; None where it was not evaluated."""
    accuracy = row.get("test_accuracy")
    return None if accuracy is None else 100 * accuracy


def find_curves(
    groups: list[SeedGroup],
    read: Callable[[dict], float | None] = _accuracy,
    along: Callable[[dict], list[float]] = _rounds,
) -> list[Curve]:
    """The curve of each group with a value.

    Args:
        groups: The groups.
        read: From what a record says of a round to the value; None where there is none.
        along: From a record to the places of its rounds on the horizontal axis.
    """

    def points(record: dict) -> dict[int, tuple[float, float]]:
        rows = zip(along(record), record["rounds"], strict=True)
        return {row["round"] + 1: (place, value) for place, row in rows if (value := read(row)) is not None}

    found = []
    for member in groups:
        ended = [points(record) for record in member.diverged]
        diverged = [tuple(np.array([*one.values()]).T) for one in ended if one]
        drawn = member.finished or [one for one in member.records if one not in member.diverged] or member.diverged
        curves = [points(record) for record in drawn]
        rounds = sorted(set.intersection(*map(set, curves)))
        if rounds or diverged:
            shape = len(curves), len(rounds), 2
            both = np.array([[curve[number] for number in rounds] for curve in curves]).reshape(shape)
            places, values = both[..., 0].mean(0), both[..., 1]
            found.append(Curve(member, drawn, np.array(rounds), places, values, diverged, None))
    numbers = printed_accuracies([curve.drawn[0] for curve in found])
    return [curve._replace(printed=number) for curve, number in zip(found, numbers, strict=True)]
