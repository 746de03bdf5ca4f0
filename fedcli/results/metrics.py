"""Numbers that tables read from the record of a run; `docs/tables-and-claims.md` says what each of them is.

Some take a parameter, `NAME:PARAMETER`; a user's own is a function, `./file.py:NAME`. Accuracies are fractions in a
record and percent in tables.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from numbers import Integral, Real
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedcli.core.numbers_in_flags import read_number
from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError, unknown
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record, RoundEntry, tested_rounds
from fedcli.userfiles import find_user_function, names_user_file

DECIMALS = {"percent": 2, "": 3, "floats": 0}


class Parameter(NamedTuple):
    """The parameter of a metric, which stands behind the colon of its name.

    Attributes:
        read: Reads the parameter from its text; raises ValueError if the text is not one.
        required: Whether the parameter must be given.
        allowed: Which parameters are allowed, in words; empty if any name is.
        lower_is_better: The parameters with which lower values are better, whatever the metric says.
    """

    read: Callable[[str], Any]
    required: bool = True
    allowed: str = ""
    lower_is_better: Collection[str] = ()


@dataclass(frozen=True)
class Metric:
    """A number that is read from the record of a run.

    Attributes:
        name: The name of the metric, as it is typed.
        read: Reads the number from a record and, if the metric has a parameter, the argument. It returns accuracies as
            fractions, and None if the record does not have the number.
        unit: "percent", "floats", "rounds", or empty for a plain number.
        better: Which values are better, "higher" or "lower"; empty if neither are.
        paper_field: The field of papers/reported.json that has the paper's number.
        missing_text: What a table shows of a finished run without a value.
        needed_rounds: Which rounds must have been tested: "every", the "selected" one, or the "last" one.
        after_the_run: Whether `fedcli quality` measures it on the models that a run leaves.
        read_round: Reads from the arguments of `read` the round whose models the number is measured on, or None if
            these are not the models of a single round; None for a metric that is never measured on a single round's.
        run_option: The option with which a run has the number in its record; empty if every run has it.
        parameter: The parameter; None if the metric has none.
        argument: The value that the user gives for the parameter; None if it is left out.
        decimals: The number of decimals of percent and plain numbers that the user asks for; None for the usual one.
    """

    name: str
    read: Callable[..., float | None]
    unit: str = "percent"
    better: str = "higher"
    paper_field: str = "mean"
    missing_text: str = "not measured"
    needed_rounds: str = "every"
    after_the_run: bool = False
    read_round: Callable[..., int | None] | None = None
    run_option: str = ""
    parameter: Parameter | None = None
    argument: Any = None
    decimals: int | None = None

    @property
    def title(self) -> str:
        """The name with the unit, as above a column."""
        return f"{self.name}, %" if self.unit == "percent" else self.name

    def format_value(self, value: float, sign: str = "") -> str:
        """Formats a value with the decimals of its unit; `sign="+"` shows the sign of a positive difference."""
        if self.decimals is not None and self.unit in ("percent", ""):
            decimals = self.decimals
        elif self.unit in DECIMALS:
            decimals = DECIMALS[self.unit]
        else:  # rounds, of which a mean or a difference has a decimal
            decimals = 1 if sign or value % 1 else 0
        return f"{value:{sign},.{decimals}f}"

    def format_mean(self, values: Sequence[float]) -> str:
        """Formats the mean of values, and ± their sample standard deviation if there are several."""
        text = self.format_value(fmean(values))
        if len(values) > 1:
            text += f" ± {self.format_value(stdev(values))}"
        return text

    def read_value(self, record: Record) -> float | None:
        """Reads the value of a run.

        Returns:
            The value in the unit of the metric; None if the run has no finite one.

        Raises:
            UserError: If what a user's metric returns is no number.
        """
        value = self._apply(self.read, record)
        if value is None:
            return None
        if not isinstance(value, Real) or isinstance(value, bool):
            raise UserError(f"the metric '{self.name}' is no number (got {type(value).__name__}); return one or None.")
        number = int(value) if isinstance(value, Integral) else float(value)  # a user's metric may return NumPy's
        if not math.isfinite(number):
            return None
        return 100 * number if self.unit == "percent" else number

    def _apply(self, read: Callable[..., Any], record: Record) -> Any:
        """Calls a function on a record, and on the argument if the metric has a parameter."""
        if self.parameter is None:
            return read(record)
        return read(record, self.argument)

    def includes(self, record: Record) -> bool:
        """Returns whether a run enters means.

        A run does if it has finished, or if it diverged after the best round that validation had selected.
        """
        outcome = outcome_of(record)
        selection = SELECTIONS[record["summary"]["selection"]]
        if outcome == "diverged" and self.needed_rounds == "selected" and selection.needs_validation:
            return self.read_value(record) is not None
        return outcome == "finished"

    def read_values(self, records: Iterable[Record]) -> list[float]:
        """Reads the values of the runs that enter means and have one.

        Returns:
            The values in the unit of the metric; none if they are of different rounds.
        """
        values = []
        measured_rounds = []
        for record in records:
            value = self.read_value(record) if self.includes(record) else None
            if value is not None:
                values.append(value)
                measured_rounds.append(self.find_measured_rounds(record))
        return values if _share_a_round(measured_rounds) else []

    def read_included_value(self, record: Record) -> float | None:
        """Reads the value of a run; returns None if it has none or does not enter means."""
        values = self.read_values([record])
        return values[0] if values else None

    def are_of_different_rounds(self, records: Iterable[Record]) -> bool:
        """Returns whether some runs were measured on the last round's models and others on the headline's models.

        Such values have no mean and no difference. A headline may be that of the last round.
        """
        measured_rounds = [
            self.find_measured_rounds(record) for record in records if self.read_value(record) is not None
        ]
        return not _share_a_round(measured_rounds)

    def find_measured_rounds(self, record: Record) -> set[str]:
        """Finds in which rounds the number of a run was measured.

        Returns:
            A set of "last" and "selected": both if they are the same round, or if the number is not measured on the
            models of a single round; empty if it was measured in another round.
        """
        number = None if self.read_round is None else self._apply(self.read_round, record)
        if number is None:
            return {"last", "selected"}
        names = set()
        if number == _find_last_round(record):
            names.add("last")
        if number == record["summary"]["selected_round"]:
            names.add("selected")
        return names


def _share_a_round(measured_rounds: Sequence[set[str]]) -> bool:
    """Returns whether all values are of one round, by what `find_measured_rounds` returns for each."""
    return not measured_rounds or bool(set.intersection(*measured_rounds))


def find_metric(name: str) -> Metric:
    """Finds a metric by its name, with its parameter if it has one, as "at:0.5".

    Args:
        name: The name, or `./file.py:NAME` for a user's own metric.

    Raises:
        UserError: If there is no such metric, or its parameter is missing or not allowed.
    """
    if names_user_file(name):
        function = find_user_function(name, "metric")
        # It gets a copy, so that what it does to a record changes no other number of the table.
        return Metric(function.name, lambda record: function(copy.deepcopy(record)), unit="", better="")
    kind, colon, text = name.partition(":")
    if kind not in METRICS:
        raise unknown("metric", kind, METRICS, f"there are {', '.join(METRICS)}, and your own by ./file.py:NAME.")
    metric = METRICS[kind]
    parameter = metric.parameter
    if parameter is None:
        if colon:
            raise UserError(f"'{name}' is no metric; write {kind}.")
        return metric
    if not colon and not parameter.required:
        return metric
    allowed = f", which is {parameter.allowed}" if parameter.allowed else ""
    refusal = UserError(f"'{name}' is no metric; write {kind}:PARAMETER{allowed}.")
    if not text:
        raise refusal
    try:
        argument = parameter.read(text)
    except ValueError:
        raise refusal from None
    better = "lower" if text in parameter.lower_is_better else metric.better
    return replace(metric, name=name, argument=argument, better=better)


# What metrics read from a record


def _read_curve(record: Record, num_last: int | None = None, *, key: str = "test_accuracy") -> pd.Series:
    """Reads the accuracies of the tested rounds, as fractions.

    Args:
        record: The record of the run.
        num_last: The number of last planned rounds to which the curve is cut; None for all rounds.
        key: The name of the accuracy in the record.

    Returns:
        The accuracies by the number of their round, which counts from 1.
    """
    accuracies = {entry["round"] + 1: entry.get(key) for entry in record["rounds"]}
    curve = pd.Series(accuracies, dtype=float).dropna()
    if num_last is None:
        return curve
    first = record["config"]["rounds"] - num_last + 1
    return curve.loc[first:]


def _exact_mean(values: Collection[float]) -> float | None:
    return fmean(values) if len(values) else None  # exact in the last digit, unlike that of pandas


def _mean_if_complete(values: Collection[float | None]) -> float | None:
    """Computes the mean of values; returns None if there are none or one of them is missing."""
    present = [value for value in values if value is not None]
    return _exact_mean(present) if len(present) == len(values) else None


def _mean_of_last_tenth(record: Record) -> float | None:
    """Computes the mean accuracy of the tested rounds among the last tenth of the planned rounds."""
    return _exact_mean(_read_curve(record, max(1, record["config"]["rounds"] // 10)))


def _read_at(record: Record, fraction: Fraction) -> float | None:
    """Reads the accuracy of the round that is nearest to a fraction of the planned rounds."""
    nearest = int(fraction * record["config"]["rounds"] + Fraction(1, 2))
    return _read_curve(record).get(max(1, nearest))


def _parse_span(text: str) -> slice:
    """Parses `FIRST-LAST` as a slice of rounds with both ends; rounds count from 1."""
    first, last = map(read_number, text.split("-"))
    if first > last:
        raise ValueError
    return slice(first, last)


def _select_reaching(record: Record, percent: float) -> pd.Series:
    """Selects the accuracies of at least `percent`; returns them by the number of their round."""
    curve = _read_curve(record)
    # Rounded, since 60.02 / 100 is a little more than the fraction 6002 / 10000 of a record.
    return curve[curve.round(12) >= round(percent / 100, 12)]


def _find_round_to(record: Record, percent: float) -> float | None:
    return next(iter(_select_reaching(record, percent).index), None)


def _find_reached(record: Record, percent: float) -> float | None:
    return next(iter(_select_reaching(record, percent)), None)


def _find_selected_rounds(record: Record) -> list[RoundEntry]:
    """Finds the rounds over which the headline is the mean."""
    rounds = tested_rounds(record["rounds"])
    summary = record["summary"]
    selection = SELECTIONS[summary["selection"]]
    if selection.num_averaged > 1:
        return rounds[-selection.num_averaged :]
    return [entry for entry in rounds if entry["round"] == summary["selected_round"]]


def _average_at_selected(record: Record, *, key: str) -> float | None:
    """Averages a number over the selected rounds; returns None if one of them lacks it."""
    return _mean_if_complete([entry.get(key) for entry in _find_selected_rounds(record)])


def _average_named_at_selected(record: Record, name: str | None, *, key: str) -> float | None:
    """Averages one of several named numbers over the selected rounds, or their mean if `name` is None."""
    values = []
    for entry in _find_selected_rounds(record):
        numbers = entry.get(key) or {}
        values.append(_exact_mean(numbers.values()) if name is None else numbers.get(name))
    return _mean_if_complete(values)


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


def _average_score(record: Record, *, score: Callable[[ClassCounts], float]) -> float | None:
    """Averages a score that follows from the counts of the classes over the selected rounds."""
    scores = []
    for entry in _find_selected_rounds(record):
        counts = entry.get("per_class")
        scores.append(None if counts is None else score(counts))
    return _mean_if_complete(scores)


def _average_class_accuracy(record: Record, name: str) -> float | None:
    """Averages the accuracy of the class of a name over the selected rounds; returns None if there is no such class."""
    if name not in record["class_names"]:
        return None
    class_index = record["class_names"].index(name)
    accuracies = []
    for entry in _find_selected_rounds(record):
        counts = entry.get("per_class")
        accuracies.append(None if counts is None else class_accuracies(counts)[class_index])
    return _mean_if_complete(accuracies)


def _find_last_measured(record: Record, name: str, *, key: str) -> float | None:
    for entry in reversed(record["rounds"]):
        if entry.get(key):
            return entry[key].get(name)
    return None


def _average_floats(record: Record, *, key: str) -> float | None:
    """Averages the floats of a client in a round over the rounds; older records have those of the last round alone."""
    floats_of_last_round = (record["cost"] or {}).get(key)
    if floats_of_last_round is None:
        return None
    floats_by_round = [entry.get(key, floats_of_last_round) for entry in record["rounds"]]
    return fmean(floats_by_round or [floats_of_last_round])


def _sum_floats(record: Record, *, key: str) -> float | None:
    """Sums the floats of all clients in all planned rounds."""
    floats = _average_floats(record, key=key)
    config = record["config"]
    return None if floats is None else floats * config["cohort_size"] * config["rounds"]


def _find_last_round(record: Record) -> int:
    """Returns the index of a run's last round; rounds count from 0."""
    return len(record["rounds"]) - 1


def _parse_name(text: str, *, names: Collection[str]) -> str:
    """Returns a text that is one of some names; raises ValueError if it is not."""
    if text not in names:
        raise ValueError
    return text


def _make_name_parameter(names: Collection[str], *, lower_is_better: Collection[str] = ()) -> Parameter:
    """Makes the parameter of a metric that is one of some names."""
    read = partial(_parse_name, names=names)
    return Parameter(read, allowed=f"one of {', '.join(names)}", lower_is_better=lower_is_better)


def _read_quality(record: Record, quantity: str) -> float | None:
    return record.get("quality", {}).get(quantity)


def _find_round_of_quality(record: Record, quantity: str) -> int | None:
    """Finds the round whose global model has a quality; returns None if clients' models have it, after a round more."""
    if quantity.startswith("clients_"):
        return None
    return record["quality"].get("round", _find_last_round(record))  # older records do not say: it was the last


def _make_class_metric(name: str, read: Callable[..., float | None], parameter: Parameter | None = None) -> Metric:
    """Makes a metric that follows from the counts of the classes."""
    return Metric(name, read, needed_rounds="selected", run_option="per_class", parameter=parameter)


def _make_domain_metric(name: str, key: str) -> Metric:
    """Makes a metric of the accuracy on the images of a domain, or of the mean over all domains."""
    read = partial(_average_named_at_selected, key=key)
    return Metric(name, read, needed_rounds="selected", parameter=Parameter(str, required=False))


def _make_measured_metric(name: str, key: str) -> Metric:
    """Makes a metric of a plain number, found by its name in the last round that has such numbers."""
    read = partial(_find_last_measured, key=key)
    return Metric(name, read, unit="", better="", needed_rounds="last", parameter=Parameter(str))


def _make_floats_metric(name: str, read: Callable[[Record], float | None]) -> Metric:
    """Makes a metric of the number of floats that are sent, received or held."""
    return Metric(name, read, unit="floats", better="", needed_rounds="last")


NUM_ROUNDS = Parameter(read_number, allowed="a whole number from 1")  # so many last planned rounds, or one round
PERCENT = Parameter(partial(read_number, read=float, low=0, high=100), allowed="from 0 to 100")
# The record of a quality has other facts beside these, as the round.
QUALITIES = (
    "nmi", "silhouette", "clients_nmi", "clients_silhouette", "clients_cosine_same", "clients_cosine_other",
)  # fmt: skip
_ALL = (
    # Test accuracies.
    Metric("selected", lambda record: record["summary"]["selected"], needed_rounds="selected"),
    Metric("last", lambda record: record["summary"]["last"], needed_rounds="last"),
    Metric("best", lambda record: _read_curve(record).max()),
    Metric("last-tenth", _mean_of_last_tenth),
    Metric("mean-of-last", lambda record, num_last: _exact_mean(_read_curve(record, num_last)), parameter=NUM_ROUNDS),
    Metric("least-of-last", lambda record, num_last: _read_curve(record, num_last).min(), parameter=NUM_ROUNDS),
    Metric(
        "deviation-of-last",
        lambda record, num_last: _read_curve(record, num_last).std(),
        better="lower",
        parameter=NUM_ROUNDS,
    ),
    Metric("largest-step", lambda record: _read_curve(record).diff().abs().max(), better=""),
    Metric("round", lambda record, round: _read_curve(record).get(round), parameter=NUM_ROUNDS),
    Metric(
        "rounds",
        lambda record, span: _exact_mean(_read_curve(record).loc[span]),
        parameter=Parameter(_parse_span, allowed="FIRST-LAST of rounds from 1"),
    ),
    Metric(
        "at", _read_at, parameter=Parameter(partial(read_number, read=Fraction, low=0, high=1), allowed="from 0 to 1")
    ),
    Metric(
        "rounds-to",
        _find_round_to,
        unit="rounds",
        better="lower",
        paper_field="rounds_to_target",
        missing_text="never",
        parameter=PERCENT,
    ),
    Metric("reached", _find_reached, missing_text="never", parameter=PERCENT),
    Metric("post", lambda record: record.get("post", {}).get("test_accuracy"), needed_rounds="last"),
    # Other accuracies.
    Metric("validation", partial(_average_at_selected, key="validation_accuracy"), needed_rounds="selected"),
    Metric("classifier", partial(_average_at_selected, key="classifier_accuracy"), needed_rounds="selected"),
    Metric("global", partial(_average_at_selected, key="global_accuracy"), needed_rounds="selected"),
    Metric(
        "classifier-of-last",
        lambda record, num_last: _exact_mean(_read_curve(record, num_last, key="classifier_accuracy")),
        parameter=NUM_ROUNDS,
    ),
    _make_domain_metric("domain", key="domains"),
    _make_domain_metric("intra", key="intra"),
    _make_domain_metric("inter", key="inter"),
    Metric(
        "clients",
        partial(_average_named_at_selected, key="clients"),
        needed_rounds="selected",
        parameter=_make_name_parameter(("mean", "std", "worst"), lower_is_better=("std",)),
    ),
    # By the counts of the classes, which several models share as they share the headline's accuracy.
    _make_class_metric("macro-f1", partial(_average_score, score=macro_f1)),
    _make_class_metric("balanced-accuracy", partial(_average_score, score=balanced_accuracy)),
    _make_class_metric("class", _average_class_accuracy, parameter=Parameter(str)),
    # What else is measured.
    Metric(
        "quality",
        _read_quality,
        unit="",
        needed_rounds="last",
        after_the_run=True,
        read_round=_find_round_of_quality,
        parameter=_make_name_parameter(QUALITIES),
    ),
    _make_measured_metric("drift", key="drift"),
    _make_measured_metric("term", key="terms"),
    # Floats of a client in a round; totals are counted as the papers do, memory anew in each round.
    _make_floats_metric("floats-up", partial(_average_floats, key="floats_up")),
    _make_floats_metric("floats-down", partial(_average_floats, key="floats_down")),
    _make_floats_metric("memory-floats", partial(_average_floats, key="memory_floats")),
    _make_floats_metric("total-floats", partial(_sum_floats, key="floats_up")),
    _make_floats_metric("total-memory-floats", partial(_sum_floats, key="memory_floats")),
)
METRICS = {metric.name: metric for metric in _ALL}
