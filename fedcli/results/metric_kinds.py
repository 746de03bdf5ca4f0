"""The metrics that there are; `docs/tables-and-claims.md` says what each of them is.

A metric reads a number from the record of a run. Some take a parameter, `NAME:PARAMETER`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple

from fedcli.core.numbers_in_flags import read_number
from fedcli.results.record_numbers import (
    ClassCounts,
    average_at_selected,
    average_class_accuracy,
    average_floats,
    average_last_tenth,
    average_named_at_selected,
    average_score,
    balanced_accuracy,
    find_last_measured,
    find_reached,
    find_round_of_quality,
    find_round_to,
    list_names,
    macro_f1,
    mean_or_none,
    read_at_fraction,
    read_curve,
    read_quality,
    sum_floats,
)
from fedcli.runs.schema import Record

Unit = Literal["percent", "floats", "rounds", ""]  # empty for a plain number
Better = Literal["higher", "lower", ""]  # which values are better; empty if neither are
NeededRounds = Literal["every", "selected", "last"]


class Parameter(NamedTuple):
    """The parameter of a kind of metric, which stands behind the colon of its name.

    Attributes:
        read: Reads the parameter from its text; raises ValueError if the text is not one.
        required: Whether the parameter must be given.
        allowed: Which parameters are allowed, in words; empty if any name is.
        lower_is_better: The parameters with which lower values are better, whatever the kind of metric says.
        list_names: Lists the names that the record of a run has, of which the parameter is one; None if it is not a
            name in a record.
    """

    read: Callable[[str], Any]
    required: bool = True
    allowed: str = ""
    lower_is_better: Collection[str] = ()
    list_names: Callable[[Record], Collection[str]] | None = None


@dataclass(frozen=True)
class MetricKind:
    """What can be read from the record of a run.

    Attributes:
        name: The name, as it is typed before the colon of a parameter.
        read: Reads the number from a record and, if there is a parameter, its value. It returns accuracies as
            fractions, and None if the record does not have the number.
        unit: The unit.
        better: Which values are better.
        may_be_unreached: Whether a finished run lacks the number because it never reached its target, and not because
            it was not measured.
        needed_rounds: Which rounds must have been tested: "every", the "selected" one, or the "last" one.
        read_round: Reads, from the arguments of `read`, the round of the models on which `fedcli quality` has measured
            the number; it returns None if these are not the models of a single round. None if the number is measured
            during the run.
        run_option: The option with which a run has the number in its record; empty if every run has it.
        parameter: The parameter; None if there is none.
    """

    name: str
    read: Callable[..., float | None]
    unit: Unit = "percent"
    better: Better = "higher"
    may_be_unreached: bool = False
    needed_rounds: NeededRounds = "every"
    read_round: Callable[..., int | None] | None = None
    run_option: str = ""
    parameter: Parameter | None = None


def _parse_span(text: str) -> slice:
    """Parses `FIRST-LAST` as a slice of rounds with both ends; rounds count from 1."""
    first, last = map(read_number, text.split("-"))
    if first > last:
        raise ValueError
    return slice(first, last)


def _parse_choice(text: str, *, choices: Collection[str]) -> str:
    """Returns a text that is one of some choices; raises ValueError if it is not."""
    if text not in choices:
        raise ValueError
    return text


def _make_choice_parameter(choices: Collection[str], *, lower_is_better: Collection[str] = ()) -> Parameter:
    """Makes a parameter that is one of some choices."""
    read = partial(_parse_choice, choices=choices)
    return Parameter(read, allowed=f"one of {', '.join(choices)}", lower_is_better=lower_is_better)


def _make_class_score(name: str, score: Callable[[ClassCounts], float]) -> MetricKind:
    """Makes a metric that follows from the counts of all classes, which runs with `--per-class` have."""
    return MetricKind(name, partial(average_score, score=score), needed_rounds="selected", run_option="per_class")


def _make_domain_metric(name: str, key: str) -> MetricKind:
    """Makes a metric of the accuracy on the images of a domain, or of the mean over all domains."""
    read = partial(average_named_at_selected, key=key)
    parameter = Parameter(str, required=False, list_names=partial(list_names, key=key))
    return MetricKind(name, read, needed_rounds="selected", parameter=parameter)


def _make_measured_metric(name: str, key: str) -> MetricKind:
    """Makes a metric of a plain number, found by its name in the last round that has such numbers."""
    read = partial(find_last_measured, key=key)
    parameter = Parameter(str, list_names=partial(list_names, key=key))
    return MetricKind(name, read, unit="", better="", needed_rounds="last", parameter=parameter)


def _make_floats_metric(name: str, read: Callable[[Record], float | None]) -> MetricKind:
    """Makes a metric of the number of floats that are sent, received or held."""
    return MetricKind(name, read, unit="floats", better="", needed_rounds="last")


NUM_ROUNDS = Parameter(read_number, allowed="a whole number from 1")  # so many last planned rounds, or one round
SPAN = Parameter(_parse_span, allowed="FIRST-LAST of rounds from 1")
SHARE_OF_ROUNDS = Parameter(partial(read_number, read=Fraction, low=0, high=1), allowed="from 0 to 1")
PERCENT = Parameter(partial(read_number, read=float, low=0, high=100), allowed="from 0 to 100")
CLASS_NAME = Parameter(str, list_names=lambda record: record["class_names"])
OVER_CLIENTS = _make_choice_parameter(("mean", "std", "worst"), lower_is_better=("std",))
# The record of a quality has other facts beside these, as the round.
QUALITY = _make_choice_parameter(
    ("nmi", "silhouette", "clients_nmi", "clients_silhouette", "clients_cosine_same", "clients_cosine_other")
)
_ALL = (
    # Test accuracies.
    MetricKind("selected", lambda record: record["summary"]["selected"], needed_rounds="selected"),
    MetricKind("last", lambda record: record["summary"]["last"], needed_rounds="last"),
    MetricKind("best", lambda record: read_curve(record).max()),
    MetricKind("last-tenth", average_last_tenth),
    MetricKind(
        "mean-of-last", lambda record, num_last: mean_or_none(read_curve(record, num_last)), parameter=NUM_ROUNDS
    ),
    MetricKind("least-of-last", lambda record, num_last: read_curve(record, num_last).min(), parameter=NUM_ROUNDS),
    MetricKind(
        "deviation-of-last",
        lambda record, num_last: read_curve(record, num_last).std(),
        better="lower",
        parameter=NUM_ROUNDS,
    ),
    MetricKind("largest-step", lambda record: read_curve(record).diff().abs().max(), better=""),
    MetricKind("round", lambda record, number: read_curve(record).get(number), parameter=NUM_ROUNDS),
    MetricKind("rounds", lambda record, span: mean_or_none(read_curve(record).loc[span]), parameter=SPAN),
    MetricKind("at", read_at_fraction, parameter=SHARE_OF_ROUNDS),
    MetricKind("rounds-to", find_round_to, unit="rounds", better="lower", may_be_unreached=True, parameter=PERCENT),
    MetricKind("reached", find_reached, may_be_unreached=True, parameter=PERCENT),
    MetricKind("post", lambda record: record.get("post", {}).get("test_accuracy"), needed_rounds="last"),
    # Other accuracies.
    MetricKind("validation", partial(average_at_selected, key="validation_accuracy"), needed_rounds="selected"),
    MetricKind("classifier", partial(average_at_selected, key="classifier_accuracy"), needed_rounds="selected"),
    MetricKind("global", partial(average_at_selected, key="global_accuracy"), needed_rounds="selected"),
    MetricKind(
        "classifier-of-last",
        lambda record, num_last: mean_or_none(read_curve(record, num_last, key="classifier_accuracy")),
        parameter=NUM_ROUNDS,
    ),
    _make_domain_metric("domain", key="domains"),
    _make_domain_metric("intra", key="intra"),
    _make_domain_metric("inter", key="inter"),
    MetricKind(
        "clients",
        partial(average_named_at_selected, key="clients"),
        needed_rounds="selected",
        parameter=OVER_CLIENTS,
    ),
    # By the counts of the classes, which several models share as they share the headline's accuracy.
    _make_class_score("macro-f1", macro_f1),
    _make_class_score("balanced-accuracy", balanced_accuracy),
    MetricKind("class", average_class_accuracy, needed_rounds="selected", run_option="per_class", parameter=CLASS_NAME),
    # What else is measured.
    MetricKind(
        "quality", read_quality, unit="", needed_rounds="last", read_round=find_round_of_quality, parameter=QUALITY
    ),
    _make_measured_metric("drift", key="drift"),
    _make_measured_metric("term", key="terms"),
    # Floats of a client in a round; totals are counted as the papers do, memory anew in each round.
    _make_floats_metric("floats-up", partial(average_floats, key="floats_up")),
    _make_floats_metric("floats-down", partial(average_floats, key="floats_down")),
    _make_floats_metric("memory-floats", partial(average_floats, key="memory_floats")),
    _make_floats_metric("total-floats", partial(sum_floats, key="floats_up")),
    _make_floats_metric("total-memory-floats", partial(sum_floats, key="memory_floats")),
)
METRIC_KINDS = {kind.name: kind for kind in _ALL}
