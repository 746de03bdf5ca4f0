"""Metrics: numbers of runs, as tables, figures and claims ask for them by name.

Accuracies are fractions in a record and percent in tables.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from statistics import fmean, stdev
from typing import Any

from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError, unknown
from fedcli.results.metric_kinds import METRIC_KINDS, Better, MetricKind
from fedcli.results.record_numbers import find_last_round
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record
from fedcli.userfiles import find_user_function, names_user_file

DECIMALS = {"percent": 2, "": 3, "floats": 0}


@dataclass(frozen=True)
class Metric:
    """A kind of metric with the value of its parameter.

    Attributes:
        kind: The kind of metric.
        name: The name as it is typed, with the parameter.
        argument: The value of the parameter; None if the kind has no parameter or it is left out.
        decimals: The number of decimals of percent and plain numbers that the user asks for; None for the usual one.
    """

    kind: MetricKind
    name: str
    argument: Any = None
    decimals: int | None = None

    @property
    def title(self) -> str:
        """The name with the unit, as above a column."""
        return f"{self.name}, %" if self.kind.unit == "percent" else self.name

    @property
    def better(self) -> Better:
        """Which values are better, "higher" or "lower"; empty if neither are."""
        parameter = self.kind.parameter
        if parameter is not None and self.argument in parameter.lower_is_better:
            return "lower"
        return self.kind.better

    @property
    def is_exact(self) -> bool:
        """Whether chance has no part in the number, so that one run tells it: counts of floats."""
        return self.kind.unit == "floats"

    @property
    def is_measured_after_run(self) -> bool:
        """Whether `fedcli quality` measures the number, on the models that a run leaves."""
        return self.kind.read_round is not None

    @property
    def missing_text(self) -> str:
        """What a table shows of a finished run without a value."""
        return "never" if self.kind.may_be_unreached else "not measured"

    def measure_goodness(self, value: float) -> float:
        """Returns a number that is larger for a better value."""
        return -value if self.better == "lower" else value

    def refuse_unknown_name(self, records: Sequence[Record]) -> None:
        """Refuses a parameter that is a name, as of a class or a term, if runs have such names but not this one.

        Raises:
            UserError: If no run has the name.
        """
        parameter = self.kind.parameter
        if parameter is None or parameter.list_names is None or self.argument is None:
            return
        names: dict[str, None] = {}
        for record in records:
            names |= dict.fromkeys(parameter.list_names(record))
        if names and self.argument not in names:
            kind = f"{self.kind.name} among the runs"
            raise unknown(kind, self.argument, names, f"there are {', '.join(names)}.")

    def format_value(self, value: float, sign: str = "") -> str:
        """Formats a value with the decimals of its unit; `sign="+"` shows the sign of a positive difference."""
        unit = self.kind.unit
        if self.decimals is not None and unit in ("percent", ""):
            decimals = self.decimals
        elif unit in DECIMALS:
            decimals = DECIMALS[unit]
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
        value = self._apply(self.kind.read, record)
        if value is None:
            return None
        if not isinstance(value, Real) or isinstance(value, bool):
            raise UserError(f"the metric '{self.name}' is no number (got {type(value).__name__}); return one or None.")
        number = int(value) if isinstance(value, Integral) else float(value)  # a user's metric may return NumPy's
        if not math.isfinite(number):
            return None
        return 100 * number if self.kind.unit == "percent" else number

    def _apply(self, read: Callable[..., Any], record: Record) -> Any:
        """Calls a function on a record, and on the argument if the kind has a parameter."""
        if self.kind.parameter is None:
            return read(record)
        return read(record, self.argument)

    def includes(self, record: Record) -> bool:
        """Returns whether a run enters means.

        A run does if it has finished, or if it diverged after the best round that validation had selected.
        """
        outcome = outcome_of(record)
        selection = SELECTIONS[record["summary"]["selection"]]
        if outcome == "diverged" and self.kind.needed_rounds == "selected" and selection.needs_validation:
            return self.read_value(record) is not None
        return outcome == "finished"

    def is_unmeasured(self, record: Record) -> bool:
        """Returns whether a run that enters means has no value because nobody has measured it.

        A run that diverged, or never reached its target, has none either, and says something by that.
        """
        if self.kind.may_be_unreached or not self.includes(record):
            return False
        return self.read_included_value(record) is None

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
        read_round = self.kind.read_round
        number = None if read_round is None else self._apply(read_round, record)
        if number is None:
            return {"last", "selected"}
        names = set()
        if number == find_last_round(record):
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
        return _find_user_metric(name)
    kind_name, colon, text = name.partition(":")
    if kind_name not in METRIC_KINDS:
        names = ", ".join(METRIC_KINDS)
        raise unknown("metric", kind_name, METRIC_KINDS, f"there are {names}, and your own by ./file.py:NAME.")
    kind = METRIC_KINDS[kind_name]
    parameter = kind.parameter
    if parameter is None:
        if colon:
            raise UserError(f"'{name}' is no metric; write {kind_name}.")
        return Metric(kind, name)
    if not colon and not parameter.required:
        return Metric(kind, name)
    allowed = f", which is {parameter.allowed}" if parameter.allowed else ""
    refusal = UserError(f"'{name}' is no metric; write {kind_name}:PARAMETER{allowed}.")
    if not text:
        raise refusal
    try:
        argument = parameter.read(text)
    except ValueError:
        raise refusal from None
    return Metric(kind, name, argument)


def _find_user_metric(path: str) -> Metric:
    """Finds the metric that is a function in a user's file, given as `./file.py:NAME`."""
    function = find_user_function(path, "metric")
    # It gets a copy, so that what it does to a record changes no other number of the table.
    kind = MetricKind(function.name, lambda record: function(copy.deepcopy(record)), unit="", better="")
    return Metric(kind, kind.name)
