"""Means with their intervals by Student's t, differences of runs paired by seed, and which group of runs is best."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

from fedcli.results.metrics import Metric
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record

Name = TypeVar("Name")  # of a group of runs


class Interval(NamedTuple):
    """A mean with its 95 % interval.

    Attributes:
        mean: The mean; NaN if there are no values.
        low: The lower end; NaN if there are fewer than two values.
        high: The upper end; NaN likewise.
        num_values: The number of values.
    """

    mean: float
    low: float
    high: float
    num_values: int


NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)


def mean_interval(values: Sequence[float]) -> Interval:
    """Computes the mean of values with its 95 % interval by Student's t."""
    if not values:
        return NO_INTERVAL
    mean = fmean(values)
    num_values = len(values)
    half_width = _compute_half_width(stdev(values), num_values) if num_values > 1 else math.nan
    return Interval(mean, low=mean - half_width, high=mean + half_width, num_values=num_values)


def _compute_half_width(deviation: float, num_values: int) -> float:
    """Computes half the width of the 95 % interval of `num_values` values with a sample standard deviation."""
    from scipy.special import stdtrit  # late: it takes a second

    return float(stdtrit(num_values - 1, 0.975)) * deviation / num_values**0.5


def count_needed_seeds(interval: Interval, max_seeds: int) -> int | None:
    """Computes with how many seeds an interval would leave out zero if the mean and the spread stayed.

    Args:
        interval: The interval of at least two seeds.
        max_seeds: The largest number of seeds to consider.

    Returns:
        The smallest such number; None if the interval would hold zero even with `max_seeds`.
    """
    deviation = (interval.high - interval.mean) / _compute_half_width(1, interval.num_values)
    for num_seeds in range(2, max_seeds + 1):
        if _compute_half_width(deviation, num_seeds) < abs(interval.mean):
            return num_seeds
    return None


class MeasuredRuns(NamedTuple):
    """Runs of a group, with the metric that is read from them.

    Attributes:
        metric: The metric.
        records: The runs.
    """

    metric: Metric
    records: Sequence[Record]


def paired_difference(runs: MeasuredRuns, other_runs: MeasuredRuns) -> Interval:
    """Computes the mean difference between the values of runs and of other runs, paired by seed, with its interval.

    Args:
        runs: The runs, one a seed.
        other_runs: The other runs; seeds that only one side has do not count.

    Returns:
        The interval of the runs less the other runs; `NO_INTERVAL` if their one metric was measured in different rounds
        of the two, see `Metric.are_of_different_rounds`.
    """
    metric = runs.metric
    if metric == other_runs.metric and metric.are_of_different_rounds([*runs.records, *other_runs.records]):
        return NO_INTERVAL
    values = _read_values_by_seed(runs)
    subtracted = _read_values_by_seed(other_runs)
    return mean_interval([value - subtracted[seed] for seed, value in values.items() if seed in subtracted])


def _read_values_by_seed(runs: MeasuredRuns) -> dict[int, float]:
    """Reads the values of the runs that have one; returns them by seed."""
    values = {}
    for record in runs.records:
        value = runs.metric.read_included_value(record)
        if value is not None:
            values[record["seed"]] = value
    return values


def find_clear_best(groups: Mapping[Name, MeasuredRuns]) -> Name | None:
    """Finds the group that is clearly the best: the interval of its lead over the second best leaves out zero.

    Groups without a value are not compared.

    Args:
        groups: The groups, whose metrics have the same unit and the same better side.

    Returns:
        The name of the group; None if no group is clearly the best, or the mean of the best leaves out a run that
        diverged.
    """
    goodness = _compute_goodness(groups)
    if len(goodness) < 2:
        return None
    best, second, *_ = sorted(goodness, key=goodness.__getitem__, reverse=True)
    best_runs = groups[best]
    metric = best_runs.metric
    if any(outcome_of(record) == "diverged" and not metric.includes(record) for record in best_runs.records):
        return None
    interval = paired_difference(best_runs, groups[second])
    is_ahead = interval.high < 0 if metric.better == "lower" else interval.low > 0
    return best if is_ahead else None


def compare_with_best_others(groups: Mapping[Name, MeasuredRuns]) -> dict[Name, Interval]:
    """Compares each group with the best of the other groups by the mean.

    Args:
        groups: The groups, whose metrics have the same unit and the same better side.

    Returns:
        The interval of each group's lead, paired by seed, by the group's name. A group without a value, or without
        another group that has one, is left out.
    """
    goodness = _compute_goodness(groups)
    if len(goodness) < 2:
        return {}
    intervals = {}
    for name in goodness:
        others = [other for other in goodness if other != name]
        best_other = max(others, key=goodness.__getitem__)
        intervals[name] = paired_difference(groups[name], groups[best_other])
    return intervals


def _compute_goodness(groups: Mapping[Name, MeasuredRuns]) -> dict[Name, float]:
    """Computes the means of groups as numbers that are larger for better values.

    A group without a value, or of a metric of which neither side is better, has none.
    """
    goodness = {}
    for name, (metric, records) in groups.items():
        values = metric.read_values(records) if metric.better else []
        if values:
            goodness[name] = metric.measure_goodness(fmean(values))
    return goodness
