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

from fedcli.core.partition import number
from fedcli.errors import UserError, unknown
from fedcli.runs.record import Record, state_of
from fedcli.userfiles import from_file, is_from_file

DECIMALS = {"percent": 2, "": 3, "floats": 0}


@dataclass(frozen=True)
class Metric:
    """A number of a run."""

    name: str  # as in a table's cells
    read: Callable[..., float | None]  # of a record and the parameter, if any; accuracies as fractions
    unit: str = "percent"  # "percent", "floats", "rounds", or "" for a plain number
    better: str = "higher"  # "higher", "lower", or "" where no value is the best
    field: str = "mean"  # where papers/reported.json has the paper's number
    none: str = "not measured"  # what a finished run without a value is shown as
    needs: str = "every"  # tested round; or the "selected" round, or the "last" one and the model after it
    parameter: Callable[[str], Any] | None = None  # reads what stands behind the colon, if anything may
    arguments: tuple[Any, ...] = ()  # the parameter as it is read, or its default
    after_the_run: bool = False  # whether `fedcli quality` measures it on the models that a run leaves
    option: str = ""  # with which a run has it in its record
    decimals: int | None = None  # that a user has asked for, of percent and plain numbers

    @property
    def title(self) -> str:
        """Name and unit, as over a column."""
        return f"{self.name}, %" if self.unit == "percent" else self.name

    def text(self, value: float, sign: str = "") -> str:
        """A value with the decimals of the unit; `sign="+"` for a difference."""
        decimals = DECIMALS.get(self.unit, 1 if sign or value % 1 else 0)
        if self.decimals is not None and self.unit in ("percent", ""):
            decimals = self.decimals
        return f"{value:{sign},.{decimals}f}"

    def mean_text(self, values: Sequence[float]) -> str:
        """The mean of values ± their sample standard deviation, if there are several."""
        return self.text(fmean(values)) + (f" ± {self.text(stdev(values))}" if len(values) > 1 else "")

    def value(self, record: Record) -> float | None:
        """The number of a run, in the unit; None where there is no finite one.

        Raises:
            UserError: If what is read is no number.
        """
        number = self.read(record, *self.arguments)
        if not isinstance(number, int | float | None):
            raise UserError(f"the metric '{self.name}' is no number (got {type(number).__name__}); return one or None.")
        if number is None or not math.isfinite(number):
            return None
        return 100 * number if self.unit == "percent" else number

    def counts(self, record: Record) -> bool:
        """Whether a run enters means: a finished one, and one that diverged after its best round on validation."""
        state = state_of(record)
        selection = record["summary"]["selection"]
        if state == "diverged" and self.needs == "selected" and selection == "best-validation":
            return self.value(record) is not None
        return state == "finished"

    def values(self, records: Iterable[Record]) -> list[float]:
        """The values of the runs that count and have one; none where these are of `different_rounds`."""
        counted = [record for record in records if self.counts(record) and self.value(record) is not None]
        if self.different_rounds(counted):
            return []
        values = [self.value(record) for record in counted]
        return [value for value in values if value is not None]

    def different_rounds(self, records: Iterable[Record]) -> bool:
        """Whether it was measured on the last round's models of some runs and on the headline's models of others.

        Such values have no mean and no difference. A headline may be that of the last round.
        """
        rules = [self.rules(record) for record in records if self.value(record) is not None]
        return bool(rules) and not set.intersection(*rules)

    def rules(self, record: Record) -> set[str]:
        """The rules that give the round whose model it was measured on, "last" or "selected"; both of others."""
        last = len(record["rounds"]) - 1
        rounds = {"last": last, "selected": record["summary"]["selected_round"]}
        if not self.after_the_run or str(self.arguments[0]).startswith("clients_"):  # these are of one more round
            return set(rounds)
        measured = record["quality"].get("round", last)  # older records do not say: it was the last
        return {rule for rule, number in rounds.items() if number == measured}


def find_metric(name: str) -> Metric:
    """The metric of that name, or a user's own.

    Raises:
        UserError: If there is none, or it has another parameter.
    """
    if is_from_file(name):
        function = from_file(name, "metric")
        # It gets a copy, so that what it does to a record changes no other number of the table.
        return Metric(function.name, lambda record: function(copy.deepcopy(record)), unit="", better="")
    key, colon, text = name.partition(":")
    if key not in METRICS:
        raise unknown("metric", key, METRICS, f"there are {', '.join(METRICS)}, and your own by ./file.py:NAME.")
    metric = METRICS[key]
    if not colon and (metric.arguments or not metric.parameter):
        return metric
    with suppress(ValueError):  # no number behind the colon
        if text and metric.parameter:
            return replace(metric, name=name, arguments=(metric.parameter(text),))
    raise UserError(f"'{name}' is no metric; write {key}{':PARAMETER' if metric.parameter else ''}.")


# What metrics read from a record


def _curve(record: Record, last: int | None = None, *, key: str = "test_accuracy") -> pd.Series:
    """The accuracies of the tested rounds, or of those among so many last planned ones; rounds count from 1."""
    curve = pd.Series({entry["round"] + 1: entry.get(key) for entry in record["rounds"]}, dtype=float).dropna()
    return curve if last is None else curve.loc[record["config"]["rounds"] - last + 1 :]


def _exact_mean(values: Collection[float]) -> float | None:
    return fmean(values) if len(values) else None  # exact in the last digit, unlike that of pandas


_share = partial(number, read=Fraction, low=0, high=1)


def _at(record: Record, fraction: Fraction) -> float | None:
    return _curve(record).get(max(1, int(fraction * record["config"]["rounds"] + Fraction(1, 2))))


def _span(text: str) -> tuple[int, int]:
    first, last = map(int, text.split("-"))
    return first, last


def _reached(record: Record, percent: float, *, part: int) -> float | None:
    """Of the first round that reaches an accuracy its number, if `part` is 0, or its accuracy."""
    for pair in _curve(record).items():
        if pair[1] >= percent / 100:
            return pair[part]
    return None


def _selected_rounds(record: Record) -> list[dict[str, Any]]:
    """The rounds of which the headline is the mean."""
    rounds = [entry for entry in record["rounds"] if entry["test_accuracy"] is not None]
    summary = record["summary"]
    if summary["selection"] != "mean-last-3":
        rounds = [entry for entry in rounds if entry["round"] == summary["selected_round"]]
    return rounds[-3:]


def _at_selected(record: Record, name: str = "", *, key: str) -> float | None:
    """Mean of `key` over the selected rounds; of a dict the entry `name`, or the mean of all if empty."""
    values = []
    for entry in _selected_rounds(record):
        value = entry.get(key)
        if isinstance(value, dict):
            value = value.get(name) if name or not value else fmean(value.values())
        if value is None:
            return None
        values.append(value)
    return _exact_mean(values)


Counts = Mapping[str, Sequence[float]]  # a round's `per_class`, see `fedcli.core.evaluation.tally_classes`


def macro_f1(counts: Counts) -> float:
    """The mean of the F1 scores of all classes that have images or are predicted."""
    right, predicted, actual = (np.array(counts[name], float) for name in ("right", "predicted", "actual"))
    is_there = predicted + actual > 0
    return float(np.mean(2 * right[is_there] / (predicted + actual)[is_there]))


def balanced_accuracy(counts: Counts) -> float:
    """The mean of the accuracies (recalls) of all classes that have images."""
    right, actual = (np.array(counts[name], float) for name in ("right", "actual"))
    return float(np.mean(right[actual > 0] / actual[actual > 0]))


def class_accuracies(counts: Counts) -> list[float | None]:
    """The accuracy (recall) of each class; None without images."""
    return [right / actual if actual else None for right, actual in zip(counts["right"], counts["actual"], strict=True)]


def _of_classes(record: Record, *, of: Callable[[Counts], float]) -> float | None:
    """The mean over the selected rounds of what follows from the counts of the classes."""
    counts = [entry.get("per_class") for entry in _selected_rounds(record)]
    measured = [of(of_round) for of_round in counts if of_round is not None]
    return None if len(measured) < len(counts) else _exact_mean(measured)


def _of_class(record: Record, name: str) -> float | None:
    """The mean over the selected rounds of the accuracy of the class of that name."""
    if name not in record["class_names"]:
        return None
    place = record["class_names"].index(name)
    counts = [entry.get("per_class") for entry in _selected_rounds(record)]
    accuracies = [class_accuracies(of_round)[place] for of_round in counts if of_round is not None]
    values = [value for value in accuracies if value is not None]
    return None if len(values) < len(counts) else _exact_mean(values)


def _last_measured(record: Record, name: str, *, key: str) -> float | None:
    return next((entry[key].get(name) for entry in reversed(record["rounds"]) if entry.get(key)), None)


def _floats(record: Record, key: str, *, total: bool = False) -> float | None:
    """The mean over rounds, which older records have of the last one alone; if `total`, of all clients and rounds."""
    last = (record["cost"] or {}).get(key)
    if last is None:
        return None
    by_round = [entry.get(key, last) for entry in record["rounds"]]
    mean = fmean(by_round or [last])
    config = record["config"]
    return mean * config["cohort_size"] * config["rounds"] if total else mean


_BY_CLASS: dict[str, Any] = {"needs": "selected", "option": "per_class"}
_BY_DOMAIN: dict[str, Any] = {"needs": "selected", "parameter": str, "arguments": ("",)}
_ALL = (
    # Test accuracies.
    Metric("selected", lambda run: run["summary"]["selected"], needs="selected"),
    Metric("last", lambda run: run["summary"]["last"], needs="last"),
    Metric("best", lambda run: _curve(run).max()),
    Metric("last-tenth", lambda run: _exact_mean(_curve(run, max(1, run["config"]["rounds"] // 10)))),
    Metric("mean-of-last", lambda run, last: _exact_mean(_curve(run, last)), parameter=int),
    Metric("least-of-last", lambda run, last: _curve(run, last).min(), parameter=int),
    Metric("deviation-of-last", lambda run, last: _curve(run, last).std(), better="lower", parameter=int),
    Metric("largest-step", lambda run: _curve(run).diff().abs().max(), better=""),
    Metric("round", lambda run, number: _curve(run).get(number), parameter=int),
    Metric("rounds", lambda run, span: _exact_mean(_curve(run).loc[slice(*span)]), parameter=_span),
    Metric("at", _at, parameter=_share),  # that share of the planned rounds, to the nearest round
    Metric("rounds-to", partial(_reached, part=0), "rounds", "lower", "rounds_to_target", "never", parameter=float),
    Metric("reached", partial(_reached, part=1), none="never", parameter=float),
    Metric("post", lambda run: run.get("post", {}).get("test_accuracy"), needs="last"),
    # Other accuracies.
    Metric("validation", partial(_at_selected, key="validation_accuracy"), needs="selected"),
    Metric("classifier", partial(_at_selected, key="classifier_accuracy"), needs="selected"),
    Metric("global", partial(_at_selected, key="global_accuracy"), needs="selected"),
    Metric(
        "classifier-of-last", lambda run, last: _exact_mean(_curve(run, last, key="classifier_accuracy")), parameter=int
    ),
    Metric("domain", partial(_at_selected, key="domains"), **_BY_DOMAIN),
    Metric("intra", partial(_at_selected, key="intra"), **_BY_DOMAIN),
    Metric("inter", partial(_at_selected, key="inter"), **_BY_DOMAIN),
    Metric("clients", partial(_at_selected, key="clients"), needs="selected", parameter=str),
    # By the counts of the classes, which several models share as they share the headline's accuracy.
    Metric("macro-f1", partial(_of_classes, of=macro_f1), **_BY_CLASS),
    Metric("balanced-accuracy", partial(_of_classes, of=balanced_accuracy), **_BY_CLASS),
    Metric("class", _of_class, parameter=str, **_BY_CLASS),
    # What else is measured.
    Metric(
        "quality",
        lambda run, name: run.get("quality", {}).get(name),
        "",
        needs="last",
        parameter=str,
        after_the_run=True,
    ),
    Metric("drift", partial(_last_measured, key="drift"), "", "", needs="last", parameter=str),
    Metric("term", partial(_last_measured, key="terms"), "", "", needs="last", parameter=str),
    # Floats of a client in a round; totals are counted as the papers do, memory anew in each round.
    Metric("floats-up", partial(_floats, key="floats_up"), "floats", "", needs="last"),
    Metric("floats-down", partial(_floats, key="floats_down"), "floats", "", needs="last"),
    Metric("memory-floats", partial(_floats, key="memory_floats"), "floats", "", needs="last"),
    Metric("total-floats", partial(_floats, key="floats_up", total=True), "floats", "", needs="last"),
    Metric("total-memory-floats", partial(_floats, key="memory_floats", total=True), "floats", "", needs="last"),
)
METRICS = {metric.name: metric for metric in _ALL}
