"""What several runs say together: means with their intervals by Student's t, differences, and which is the best."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedcli.results.metrics import Metric
from fedcli.results.render import MISSING
from fedcli.runs.record import RUN_STATES, state_of
from fedcli.runs.schema import Record


class Interval(NamedTuple):
    """A mean with its 95 % interval; NaN where there is none."""

    mean: float
    low: float
    high: float
    n: int  # number of values; one alone has no interval


NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)


def interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % interval by Student's t."""
    if not values:
        return NO_INTERVAL
    mean = fmean(values)
    count = len(values)
    half_width = _half_width(stdev(values), count) if count > 1 else math.nan
    return Interval(mean, low=mean - half_width, high=mean + half_width, n=count)


def _half_width(deviation: float, count: int) -> float:
    """Half of the interval of so many values with a sample standard deviation."""
    from scipy.special import stdtrit  # late: it takes a second

    return float(stdtrit(count - 1, 0.975)) * deviation / count**0.5


def seeds_needed(difference: Interval, max_seeds: int) -> int:
    """The seeds with which the interval would leave out zero if mean and spread stayed; at most `max_seeds` + 1."""
    deviation = (difference.high - difference.mean) / _half_width(1, difference.n)
    for count in range(2, max_seeds + 1):
        if _half_width(deviation, count) < abs(difference.mean):
            return count
    return max_seeds + 1


def interval_text(metric: Metric, estimate: Interval, *, sign: str = "+", with_count: bool = True) -> str:
    """A mean with its interval and number of values, as `+9.70 [+7.10, +12.30] (3)`; of floats the mean alone."""
    if not estimate.n:
        return MISSING
    text = metric.text(estimate.mean, sign)
    if metric.unit == "floats":
        return text
    if estimate.n > 1:
        text += f" [{metric.text(estimate.low, sign)}, {metric.text(estimate.high, sign)}]"
    return f"{text} ({estimate.n})" if with_count else text


def difference(metric: Metric, runs: Iterable[Record], other_metric: Metric, other_runs: Iterable[Record]) -> Interval:
    """The values of runs less the other metric's of other runs, paired over the seeds that both have.

    There is none between values of `Metric.different_rounds`.
    """
    runs = list(runs)
    other_runs = list(other_runs)
    if metric == other_metric and metric.different_rounds([*runs, *other_runs]):
        return NO_INTERVAL
    values = _by_seed(metric, runs)
    subtracted = _by_seed(other_metric, other_runs)
    return interval([value - subtracted[seed] for seed, value in values.items() if seed in subtracted])


def _by_seed(metric: Metric, runs: Iterable[Record]) -> dict[int, float]:
    """The values of the runs that have one, by seed."""
    values = {}
    for record in runs:
        value = metric.counted_value(record)
        if value is not None:
            values[record["seed"]] = value
    return values


NOTE_ON_DIVERGED = (
    "Diverged: a loss became infinite or NaN. Selection by validation takes the best round before; other means leave "
    "the run out, and say so."
)
NOTE_ON_BOLD = (
    "Bold: the best mean{among}, where the 95 % interval (Student's t) of its lead over the second, paired by seed, "
    "leaves out zero."
)


def _means(metric: Metric, groups: Mapping[Any, Sequence[Record]]) -> dict[Any, float]:
    """The means of the groups that have a value."""
    means = {}
    for name, runs in groups.items():
        values = metric.values(runs)
        if values:
            means[name] = fmean(values)
    return means


def clear_best(metric: Metric, groups: Mapping[Any, Sequence[Record]]) -> Any:
    """The name of the group with the best mean; None where the interval of its lead over the second holds zero.

    None also where its mean leaves out a run that diverged. A group without a value is not compared.
    """
    means = _means(metric, groups)
    if len(means) < 2 or not metric.better:
        return None
    first, second = sorted(means, key=means.__getitem__, reverse=metric.better == "higher")[:2]
    if any(state_of(record) == "diverged" and not metric.counts(record) for record in groups[first]):
        return None
    lead = difference(metric, groups[first], metric, groups[second])
    is_ahead = lead.low > 0 if metric.better == "higher" else lead.high < 0
    return first if is_ahead else None


def leads_over_best(
    metric: Metric, groups: Mapping[Any, Sequence[Record]], implied_count: int | None = None
) -> dict[Any, str]:
    """The lead of each group over the best of the others by the mean, with its interval, paired by seed, as text.

    A group without a value, or without another that has one, has an empty text. A number of pairs that equals
    `implied_count` is left out.
    """
    means = _means(metric, groups)
    texts = dict.fromkeys(groups, "")
    if not metric.better or len(means) < 2:
        return texts
    for name in means:
        others = [other for other in means if other != name]
        better = max if metric.better == "higher" else min
        best_other = better(others, key=means.__getitem__)
        lead = difference(metric, groups[name], metric, groups[best_other])
        texts[name] = interval_text(metric, lead, with_count=lead.n != implied_count)
    return texts


def mean_of_runs(metric: Metric, records: Sequence[Record], states: Counter, implied_count: int | None = None) -> str:
    """Mean ± sample standard deviation, with the number of runs that have the value.

    Args:
        metric: What is read of each run.
        records: The runs that have begun.
        states: The number of all planned runs by state.
        implied_count: A number of runs that goes without saying, where all runs have the value.

    Returns:
        "66.10 ± 0.52 (3)", or "66.10 ± 0.52 (2 of 3 runs; 1 diverged)"; the state of the furthest if no run counts.
    """
    num_counted = sum(map(metric.counts, records))
    if not num_counted:
        return next(state for state in RUN_STATES if states[state])
    values = metric.values(records)
    num_runs = len(values) or num_counted
    num_planned = states.total()
    remarks = [str(num_runs) if num_runs == num_planned else f"{num_runs} of {num_planned} runs"]
    for state in ("diverged", "failed"):
        if states[state]:
            remarks.append(f"{states[state]} {state}")
    if values:
        text = metric.mean_text(values)
    elif metric.different_rounds(records):
        text = "of different rounds"
    else:
        text = metric.missing_text
    return text if remarks == [str(implied_count)] else f"{text} ({'; '.join(remarks)})"
