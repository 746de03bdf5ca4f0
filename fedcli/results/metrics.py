"""Numbers that tables read from the record of a run; `docs/tables-and-claims.md` says what each of them is.

Some take a parameter, `NAME:PARAMETER`; a user's own is a function, `./file.py:NAME`. Accuracies are fractions in a
record and percent in tables.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd

from fedcli.core.numbers_in_flags import read_number
from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError, unknown
from fedcli.runs.record import state_of
from fedcli.runs.schema import Record, RoundEntry, tested_rounds
from fedcli.userfiles import from_file, is_from_file

DECIMALS = {"percent": 2, "": 3, "floats": 0}


def _no_round(record: Record, *arguments: Any) -> None:
    """The round whose models a number is measured on, of one that is not measured on the models of a single round."""


@dataclass(frozen=True)
class Metric:
    """A number of a run."""

    name: str  # as in a table's cells
    read: Callable[..., float | None]  # of a record and the parameter, if any; accuracies as fractions
    unit: str = "percent"  # "percent", "floats", "rounds", or "" for a plain number
    better: str = "higher"  # "higher", "lower", or "" where no value is the best
    paper_field: str = "mean"  # where papers/reported.json has the paper's number
    missing_text: str = "not measured"  # of a finished run without a value
    needed_rounds: str = "every"  # tested one; or the "selected", or the "last" and the model after it
    read_parameter: Callable[[str], Any] | None = None  # from what stands behind the colon, if anything may
    arguments: tuple[Any, ...] = ()  # the parameter as it is read, or its default
    after_the_run: bool = False  # whether `fedcli quality` measures it on the models that a run leaves
    read_round: Callable[..., int | None] = _no_round  # of the same as `read`: the round that the models are of
    run_option: str = ""  # with which a run has it in its record
    decimals: int | None = None  # that a user has asked for, of percent and plain numbers

    @property
    def title(self) -> str:
        """Name and unit, as over a column."""
        return f"{self.name}, %" if self.unit == "percent" else self.name

    def text(self, value: float, sign: str = "") -> str:
        """A value with the decimals of the unit; `sign="+"` for a difference."""
        if self.decimals is not None and self.unit in ("percent", ""):
            decimals = self.decimals
        elif self.unit in DECIMALS:
            decimals = DECIMALS[self.unit]
        else:  # rounds, of which a mean or a difference has a decimal
            decimals = 1 if sign or value % 1 else 0
        return f"{value:{sign},.{decimals}f}"

    def mean_text(self, values: Sequence[float]) -> str:
        """The mean of values ± their sample standard deviation, if there are several."""
        text = self.text(fmean(values))
        if len(values) > 1:
            text += f" ± {self.text(stdev(values))}"
        return text

    def value(self, record: Record) -> float | None:
        """The number of a run, in the unit; None where there is no finite one.

        Raises:
            UserError: If what is read is no number.
        """
        value = self.read(record, *self.arguments)
        if not isinstance(value, int | float | None):
            raise UserError(f"the metric '{self.name}' is no number (got {type(value).__name__}); return one or None.")
        if value is None or not math.isfinite(value):
            return None
        return 100 * value if self.unit == "percent" else value

    def counts(self, record: Record) -> bool:
        """Whether a run enters means: a finished one, and one that diverged after its best round on validation."""
        state = state_of(record)
        selection = SELECTIONS[record["summary"]["selection"]]
        if state == "diverged" and self.needed_rounds == "selected" and selection.needs_validation:
            return self.value(record) is not None
        return state == "finished"

    def values(self, records: Iterable[Record]) -> list[float]:
        """The values of the runs that count and have one; none where these are of `different_rounds`."""
        counted = [record for record in records if self.counts(record) and self.value(record) is not None]
        if self.different_rounds(counted):
            return []
        values = [self.value(record) for record in counted]
        return [value for value in values if value is not None]

    def counted_value(self, record: Record) -> float | None:
        """The value of a run that counts; None without one."""
        values = self.values([record])
        return values[0] if values else None

    def different_rounds(self, records: Iterable[Record]) -> bool:
        """Whether it was measured on the last round's models of some runs and on the headline's models of others.

        Such values have no mean and no difference. A headline may be that of the last round.
        """
        rounds_of_runs = [self.measured_rounds(record) for record in records if self.value(record) is not None]
        return bool(rounds_of_runs) and not set.intersection(*rounds_of_runs)

    def measured_rounds(self, record: Record) -> set[str]:
        """Which of the "last" and the "selected" round it was measured in; both, if not on the models of one round."""
        number = self.read_round(record, *self.arguments)
        if number is None:
            return {"last", "selected"}
        names = set()
        if number == _last_round(record):
            names.add("last")
        if number == record["summary"]["selected_round"]:
            names.add("selected")
        return names


def find_metric(name: str) -> Metric:
    """The metric of that name, or a user's own.

    Raises:
        UserError: If there is none, or it has another parameter.
    """
    if is_from_file(name):
        function = from_file(name, "metric")
        # It gets a copy, so that what it does to a record changes no other number of the table.
        return Metric(function.name, lambda record: function(copy.deepcopy(record)), unit="", better="")
    kind, colon, text = name.partition(":")
    if kind not in METRICS:
        raise unknown("metric", kind, METRICS, f"there are {', '.join(METRICS)}, and your own by ./file.py:NAME.")
    metric = METRICS[kind]
    takes_parameter = metric.read_parameter is not None
    needs_parameter = takes_parameter and not metric.arguments
    if not colon and not needs_parameter:
        return metric
    if metric.read_parameter is not None and text:
        with suppress(ValueError):  # no number behind the colon, which is refused as well
            return replace(metric, name=name, arguments=(metric.read_parameter(text),))
    raise UserError(f"'{name}' is no metric; write {kind}{':PARAMETER' if takes_parameter else ''}.")


# What metrics read from a record


def _curve(record: Record, num_last: int | None = None, *, key: str = "test_accuracy") -> pd.Series:
    """The accuracies of the tested rounds, or of those among so many last planned ones; rounds count from 1."""
    accuracies = {entry["round"] + 1: entry.get(key) for entry in record["rounds"]}
    curve = pd.Series(accuracies, dtype=float).dropna()
    if num_last is None:
        return curve
    first = record["config"]["rounds"] - num_last + 1
    return curve.loc[first:]


def _last_tenth(record: Record) -> pd.Series:
    return _curve(record, max(1, record["config"]["rounds"] // 10))


def _exact_mean(values: Collection[float]) -> float | None:
    return fmean(values) if len(values) else None  # exact in the last digit, unlike that of pandas


_fraction = partial(read_number, read=Fraction, low=0, high=1)


def _at(record: Record, fraction: Fraction) -> float | None:
    """The accuracy of the round that is nearest to a fraction of the planned ones."""
    nearest = int(fraction * record["config"]["rounds"] + Fraction(1, 2))
    return _curve(record).get(max(1, nearest))


def _span(text: str) -> slice:
    """The rounds of `FIRST-LAST`, both among them."""
    first, last = map(int, text.split("-"))
    return slice(first, last)


def _reaching(record: Record, percent: float) -> pd.Series:
    """The accuracies that reach one, by the numbers of their rounds."""
    curve = _curve(record)
    return curve[curve >= percent / 100]


def _rounds_to(record: Record, percent: float) -> float | None:
    return next(iter(_reaching(record, percent).index), None)


def _reached(record: Record, percent: float) -> float | None:
    return next(iter(_reaching(record, percent)), None)


def _selected_rounds(record: Record) -> list[RoundEntry]:
    """The rounds of which the headline is the mean."""
    rounds = tested_rounds(record["rounds"])
    summary = record["summary"]
    selection = SELECTIONS[summary["selection"]]
    if selection.num_averaged > 1:
        return rounds[-selection.num_averaged :]
    return [entry for entry in rounds if entry["round"] == summary["selected_round"]]


def _at_selected(record: Record, name: str = "", *, key: str) -> float | None:
    """Mean of `key` over the selected rounds; of a dict the entry `name`, or the mean of all if empty."""
    values = []
    for entry in _selected_rounds(record):
        value = entry.get(key)
        if isinstance(value, dict):
            is_mean = value and not name
            value = fmean(value.values()) if is_mean else value.get(name)
        if value is None:
            return None
        values.append(value)
    return _exact_mean(values)


Counts = Mapping[str, Sequence[float]]  # a round's `per_class`, see `fedcli.core.evaluation.tally_classes`


def macro_f1(counts: Counts) -> float:
    """The mean of the F1 scores of all classes that have images or are predicted."""
    right = np.array(counts["right"], float)
    sizes = np.array(counts["predicted"], float) + np.array(counts["actual"], float)
    is_there = sizes > 0
    return float(np.mean(2 * right[is_there] / sizes[is_there]))


def balanced_accuracy(counts: Counts) -> float:
    """The mean of the accuracies (recalls) of all classes that have images."""
    right = np.array(counts["right"], float)
    actual = np.array(counts["actual"], float)
    has_images = actual > 0
    return float(np.mean(right[has_images] / actual[has_images]))


def class_accuracies(counts: Counts) -> list[float | None]:
    """The accuracy (recall) of each class; None without images."""
    return [right / actual if actual else None for right, actual in zip(counts["right"], counts["actual"], strict=True)]


def _mean_score(record: Record, *, score: Callable[[Counts], float]) -> float | None:
    """The mean over the selected rounds of a score that follows from the counts of the classes."""
    rounds = _selected_rounds(record)
    scores = [score(entry["per_class"]) for entry in rounds if entry.get("per_class") is not None]
    return None if len(scores) < len(rounds) else _exact_mean(scores)


def _class_accuracy(record: Record, name: str) -> float | None:
    """The mean over the selected rounds of the accuracy of the class of that name."""
    if name not in record["class_names"]:
        return None
    label = record["class_names"].index(name)
    accuracies = []
    for entry in _selected_rounds(record):
        counts = entry.get("per_class")
        accuracy = None if counts is None else class_accuracies(counts)[label]
        if accuracy is None:
            return None
        accuracies.append(accuracy)
    return _exact_mean(accuracies)


def _last_measured(record: Record, name: str, *, key: str) -> float | None:
    for entry in reversed(record["rounds"]):
        if entry.get(key):
            return entry[key].get(name)
    return None


def _floats(record: Record, key: str, *, total: bool = False) -> float | None:
    """The mean over rounds, which older records have of the last one alone; if `total`, of all clients and rounds."""
    floats_of_last_round = (record["cost"] or {}).get(key)
    if floats_of_last_round is None:
        return None
    floats_by_round = [entry.get(key, floats_of_last_round) for entry in record["rounds"]]
    mean = fmean(floats_by_round or [floats_of_last_round])
    if not total:
        return mean
    config = record["config"]
    return mean * config["cohort_size"] * config["rounds"]


def _last_round(record: Record) -> int:
    """The number of a run's last round; rounds count from 0."""
    return len(record["rounds"]) - 1


def _quality(record: Record, quantity: str) -> float | None:
    return record.get("quality", {}).get(quantity)


def _round_of_quality(record: Record, quantity: str) -> int | None:
    """The round whose global model has a quality; None where clients' models have it, after a round more."""
    if quantity.startswith("clients_"):
        return None
    return record["quality"].get("round", _last_round(record))  # older records do not say: it was the last


# What several metrics have in common.
_BY_CLASS: dict[str, Any] = {"needed_rounds": "selected", "run_option": "per_class"}
_BY_DOMAIN: dict[str, Any] = {"needed_rounds": "selected", "read_parameter": str, "arguments": ("",)}
_MEASURED: dict[str, Any] = {"unit": "", "better": "", "needed_rounds": "last", "read_parameter": str}
_FLOATS: dict[str, Any] = {"unit": "floats", "better": "", "needed_rounds": "last"}
_ALL = (
    # Test accuracies.
    Metric("selected", lambda record: record["summary"]["selected"], needed_rounds="selected"),
    Metric("last", lambda record: record["summary"]["last"], needed_rounds="last"),
    Metric("best", lambda record: _curve(record).max()),
    Metric("last-tenth", lambda record: _exact_mean(_last_tenth(record))),
    Metric("mean-of-last", lambda record, num_last: _exact_mean(_curve(record, num_last)), read_parameter=int),
    Metric("least-of-last", lambda record, num_last: _curve(record, num_last).min(), read_parameter=int),
    Metric(
        "deviation-of-last", lambda record, num_last: _curve(record, num_last).std(), better="lower", read_parameter=int
    ),
    Metric("largest-step", lambda record: _curve(record).diff().abs().max(), better=""),
    Metric("round", lambda record, round: _curve(record).get(round), read_parameter=int),
    Metric("rounds", lambda record, span: _exact_mean(_curve(record).loc[span]), read_parameter=_span),
    Metric("at", _at, read_parameter=_fraction),
    Metric(
        "rounds-to",
        _rounds_to,
        unit="rounds",
        better="lower",
        paper_field="rounds_to_target",
        missing_text="never",
        read_parameter=float,
    ),
    Metric("reached", _reached, missing_text="never", read_parameter=float),
    Metric("post", lambda record: record.get("post", {}).get("test_accuracy"), needed_rounds="last"),
    # Other accuracies.
    Metric("validation", partial(_at_selected, key="validation_accuracy"), needed_rounds="selected"),
    Metric("classifier", partial(_at_selected, key="classifier_accuracy"), needed_rounds="selected"),
    Metric("global", partial(_at_selected, key="global_accuracy"), needed_rounds="selected"),
    Metric(
        "classifier-of-last",
        lambda record, num_last: _exact_mean(_curve(record, num_last, key="classifier_accuracy")),
        read_parameter=int,
    ),
    Metric("domain", partial(_at_selected, key="domains"), **_BY_DOMAIN),
    Metric("intra", partial(_at_selected, key="intra"), **_BY_DOMAIN),
    Metric("inter", partial(_at_selected, key="inter"), **_BY_DOMAIN),
    Metric("clients", partial(_at_selected, key="clients"), needed_rounds="selected", read_parameter=str),
    # By the counts of the classes, which several models share as they share the headline's accuracy.
    Metric("macro-f1", partial(_mean_score, score=macro_f1), **_BY_CLASS),
    Metric("balanced-accuracy", partial(_mean_score, score=balanced_accuracy), **_BY_CLASS),
    Metric("class", _class_accuracy, read_parameter=str, **_BY_CLASS),
    # What else is measured.
    Metric(
        "quality",
        _quality,
        unit="",
        needed_rounds="last",
        read_parameter=str,
        after_the_run=True,
        read_round=_round_of_quality,
    ),
    Metric("drift", partial(_last_measured, key="drift"), **_MEASURED),
    Metric("term", partial(_last_measured, key="terms"), **_MEASURED),
    # Floats of a client in a round; totals are counted as the papers do, memory anew in each round.
    Metric("floats-up", partial(_floats, key="floats_up"), **_FLOATS),
    Metric("floats-down", partial(_floats, key="floats_down"), **_FLOATS),
    Metric("memory-floats", partial(_floats, key="memory_floats"), **_FLOATS),
    Metric("total-floats", partial(_floats, key="floats_up", total=True), **_FLOATS),
    Metric("total-memory-floats", partial(_floats, key="memory_floats", total=True), **_FLOATS),
)
METRICS = {metric.name: metric for metric in _ALL}
