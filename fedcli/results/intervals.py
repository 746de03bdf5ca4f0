"""Means with their intervals by Student's t, differences of runs paired by seed, and which group of runs is best."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

from fedcli.results.metrics import Metric
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record

Name = TypeVar("Name")  # of a group of runs


class Interval(NamedTuple):
    """A mean with its 95 % interval; NaN where there is none."""

    mean: float
    low: float
    high: float
    num_values: int  # one alone has no interval


NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % interval by Student's t."""
    if not values:
        return NO_INTERVAL
    mean = fmean(values)
    num_values = len(values)
    half_width = _compute_half_width(stdev(values), num_values) if num_values > 1 else math.nan
    return Interval(mean, low=mean - half_width, high=mean + half_width, num_values=num_values)


def _compute_half_width(deviation: float, num_values: int) -> float:
    """Half of the interval of so many values with a sample standard deviation."""
    from scipy.special import stdtrit  # late: it takes a second

    return float(stdtrit(num_values - 1, 0.975)) * deviation / num_values**0.5


def count_needed_seeds(lead: Interval, max_seeds: int) -> int | None:
    """The number of seeds with which the interval would leave out zero if mean and spread stayed.

    None where it would still hold zero with `max_seeds`.
    """
    deviation = (lead.high - lead.mean) / _compute_half_width(1, lead.num_values)
    for num_seeds in range(2, max_seeds + 1):
        if _compute_half_width(deviation, num_seeds) < abs(lead.mean):
            return num_seeds
    return None


def paired_difference(
    metric: Metric, runs: Iterable[Record], other_metric: Metric, other_runs: Iterable[Record]
) -> Interval:
    """The values of runs less the other metric's of other runs, paired over the seeds that both have.

    There is none between values of `Metric.are_of_different_rounds`.
    """
    runs = list(runs)
    other_runs = list(other_runs)
    if metric == other_metric and metric.are_of_different_rounds([*runs, *other_runs]):
        return NO_INTERVAL
    values = _read_values_by_seed(metric, runs)
    subtracted = _read_values_by_seed(other_metric, other_runs)
    return mean_interval([value - subtracted[seed] for seed, value in values.items() if seed in subtracted])


def _read_values_by_seed(metric: Metric, runs: Iterable[Record]) -> dict[int, float]:
    """The values of the runs that have one, by seed."""
    values = {}
    for record in runs:
        value = metric.read_included_value(record)
        if value is not None:
            values[record["seed"]] = value
    return values


def find_clear_best(metric: Metric, groups: Mapping[Name, Sequence[Record]]) -> Name | None:
    """The name of the group with the best mean; None where the interval of its lead over the second holds zero.

    None also where its mean leaves out a run that diverged. A group without a value is not compared.
    """
    means = _compute_means(metric, groups)
    if len(means) < 2 or not metric.better:
        return None
    best, second = sorted(means, key=means.__getitem__, reverse=metric.better == "higher")[:2]
    if any(outcome_of(record) == "diverged" and not metric.includes(record) for record in groups[best]):
        return None
    lead = paired_difference(metric, groups[best], metric, groups[second])
    is_ahead = lead.low > 0 if metric.better == "higher" else lead.high < 0
    return best if is_ahead else None


def compare_with_best_others(metric: Metric, groups: Mapping[Name, Sequence[Record]]) -> dict[Name, Interval]:
    """The lead of each group over the best of the others by the mean, paired by seed.

    A group without a value, or without another that has one, is left out.
    """
    means = _compute_means(metric, groups)
    if not metric.better or len(means) < 2:
        return {}
    better = max if metric.better == "higher" else min
    leads = {}
    for name in means:
        others = [other for other in means if other != name]
        best_other = better(others, key=means.__getitem__)
        leads[name] = paired_difference(metric, groups[name], metric, groups[best_other])
    return leads


def _compute_means(metric: Metric, groups: Mapping[Name, Sequence[Record]]) -> dict[Name, float]:
    """The means of the groups that have a value."""
    means = {}
    for name, runs in groups.items():
        values = metric.read_values(runs)
        if values:
            means[name] = fmean(values)
    return means
