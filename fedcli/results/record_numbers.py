"""Numbers of the record of a run, which the metrics read.

Accuracies are fractions, and None stands for a number that the record does not have.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from fedcli.declarations import SELECTIONS
from fedcli.runs.schema import Record, RoundEntry, tested_rounds

if TYPE_CHECKING:
    import pandas as pd


def read_curve(record: Record, num_last: int | None = None, *, key: str = "test_accuracy") -> "pd.Series":
    """Reads the accuracies of the tested rounds, as fractions.

    Args:
        record: The record of the run.
        num_last: The number of last planned rounds to which the curve is cut; None for all rounds.
        key: The name of the accuracy in the record.

    Returns:
        The accuracies by the number of their round, which counts from 1.
    """
    import pandas as pd  # late: it takes half a second, and the curve of a single run needs no value of a metric

    accuracies = {entry["round"] + 1: entry.get(key) for entry in record["rounds"]}
    curve = pd.Series(accuracies, dtype=float).dropna()
    if num_last is None:
        return curve
    first = record["config"]["rounds"] - num_last + 1
    return curve.loc[first:]


def mean_or_none(values: Collection[float]) -> float | None:
    """Computes the mean of values, exact in the last digit, unlike that of pandas; returns None if there are none."""
    return fmean(values) if len(values) else None


def mean_if_complete(values: Collection[float | None]) -> float | None:
    """Computes the mean of values; returns None if there are none or one of them is missing."""
    present = [value for value in values if value is not None]
    return mean_or_none(present) if len(present) == len(values) else None


def average_last_tenth(record: Record) -> float | None:
    """Averages the accuracy over the tested rounds among the last tenth of the planned rounds."""
    num_last = max(1, record["config"]["rounds"] // 10)
    return mean_or_none(read_curve(record, num_last))


def read_at_fraction(record: Record, fraction: Fraction) -> float | None:
    """Reads the accuracy of the round that is nearest to a fraction of the planned rounds."""
    nearest = int(fraction * record["config"]["rounds"] + Fraction(1, 2))
    return read_curve(record).get(max(1, nearest))


def _select_reaching(record: Record, percent: float) -> "pd.Series":
    """Selects the accuracies of at least `percent`; returns them by the number of their round."""
    curve = read_curve(record)
    # Rounded, since 60.02 / 100 is a little more than the fraction 6002 / 10000 of a record.
    return curve[curve.round(12) >= round(percent / 100, 12)]


def find_round_to(record: Record, percent: float) -> float | None:
    """Finds the first round with an accuracy of at least `percent`; rounds count from 1."""
    return next(iter(_select_reaching(record, percent).index), None)


def find_reached(record: Record, percent: float) -> float | None:
    """Finds the accuracy of the first round with one of at least `percent`."""
    return next(iter(_select_reaching(record, percent)), None)


def find_selected_rounds(record: Record) -> list[RoundEntry]:
    """Finds the rounds over which the headline is the mean."""
    rounds = tested_rounds(record["rounds"])
    summary = record["summary"]
    selection = SELECTIONS[summary["selection"]]
    if selection.num_averaged > 1:
        return rounds[-selection.num_averaged :]
    return [entry for entry in rounds if entry["round"] == summary["selected_round"]]


def find_last_round(record: Record) -> int:
    """Returns the index of a run's last round; rounds count from 0."""
    return len(record["rounds"]) - 1


def average_at_selected(record: Record, *, key: str) -> float | None:
    """Averages a number over the selected rounds; returns None if one of them lacks it."""
    return mean_if_complete([entry.get(key) for entry in find_selected_rounds(record)])


# Numbers by name, as those of domains, terms and classes


def list_names(record: Record, *, key: str) -> list[str]:
    """Lists the names for which the rounds of a run have a number, in order of appearance."""
    names: dict[str, None] = {}
    for entry in record["rounds"]:
        names |= dict.fromkeys(entry.get(key) or {})
    return list(names)


def average_named_at_selected(record: Record, name: str | None, *, key: str) -> float | None:
    """Averages one of several named numbers over the selected rounds, or their mean if `name` is None."""
    values = []
    for entry in find_selected_rounds(record):
        numbers = entry.get(key) or {}
        values.append(mean_or_none(numbers.values()) if name is None else numbers.get(name))
    return mean_if_complete(values)


def find_last_measured(record: Record, name: str, *, key: str) -> float | None:
    """Finds a number by its name in the last round that has such numbers."""
    for entry in reversed(record["rounds"]):
        if entry.get(key):
            return entry[key].get(name)
    return None


# Scores by the counts of the classes

ClassCounts = Mapping[str, Sequence[float]]  # a round's `per_class`, see `fedcli.core.evaluation.tally_classes`


def macro_f1(counts: ClassCounts) -> float:
    """Computes the mean of the F1 scores of all classes that have images or are predicted, as a fraction."""
    right = np.array(counts["right"], float)
    sizes = np.array(counts["predicted"], float) + np.array(counts["actual"], float)
    is_there = sizes > 0
    return float(np.mean(2 * right[is_there] / sizes[is_there]))


def balanced_accuracy(counts: ClassCounts) -> float:
    """Computes the mean of the accuracies (recalls) of all classes that have images, as a fraction."""
    right = np.array(counts["right"], float)
    actual = np.array(counts["actual"], float)
    has_images = actual > 0
    return float(np.mean(right[has_images] / actual[has_images]))


def class_accuracies(counts: ClassCounts) -> list[float | None]:
    """Computes the accuracy (recall) of each class as a fraction; None for a class without images."""
    return [right / actual if actual else None for right, actual in zip(counts["right"], counts["actual"], strict=True)]


def average_score(record: Record, *, score: Callable[[ClassCounts], float]) -> float | None:
    """Averages a score that follows from the counts of the classes over the selected rounds."""
    scores = []
    for entry in find_selected_rounds(record):
        counts = entry.get("per_class")
        scores.append(None if counts is None else score(counts))
    return mean_if_complete(scores)


def average_class_accuracy(record: Record, name: str) -> float | None:
    """Averages the accuracy of the class of a name over the selected rounds; returns None if there is no such class."""
    if name not in record["class_names"]:
        return None
    class_index = record["class_names"].index(name)
    accuracies = []
    for entry in find_selected_rounds(record):
        counts = entry.get("per_class")
        accuracies.append(None if counts is None else class_accuracies(counts)[class_index])
    return mean_if_complete(accuracies)


# What `fedcli quality` measures


def read_quality(record: Record, quantity: str) -> float | None:
    """Reads one of the numbers that are measured on the features of the models."""
    return record.get("quality", {}).get(quantity)


def find_round_of_quality(record: Record, quantity: str) -> int | None:
    """Finds the round whose global model has a quality; returns None if clients' models have it, after a round more."""
    if quantity.startswith("clients_"):
        return None
    return record["quality"].get("round", find_last_round(record))  # older records do not say: it was the last


# Floats


def average_floats(record: Record, *, key: str) -> float | None:
    """Averages the floats of a client in a round over the rounds; older records have those of the last round alone."""
    floats_of_last_round = (record["cost"] or {}).get(key)
    if floats_of_last_round is None:
        return None
    floats_by_round = [entry.get(key, floats_of_last_round) for entry in record["rounds"]]
    return fmean(floats_by_round or [floats_of_last_round])


def sum_floats(record: Record, *, key: str) -> float | None:
    """Sums the floats of all clients in all planned rounds."""
    floats = average_floats(record, key=key)
    config = record["config"]
    return None if floats is None else floats * config["cohort_size"] * config["rounds"]
