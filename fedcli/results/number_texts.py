"""Means, intervals and leads as they stand in the cells of tables."""

from collections import Counter
from collections.abc import Mapping, Sequence

from fedcli.results.intervals import Interval, MeasuredRuns, Name, compare_with_best_others
from fedcli.results.metrics import Metric
from fedcli.results.render import MISSING
from fedcli.runs.record import RUN_OUTCOMES
from fedcli.runs.schema import Record


def format_interval(metric: Metric, interval: Interval, *, sign: str = "+", with_count: bool = True) -> str:
    """Formats a mean with its interval and its number of values, as `+9.70 [+7.10, +12.30] (3)`.

    Args:
        metric: The metric, which says the number of decimals; of floats only the mean is shown.
        interval: The mean and its interval.
        sign: "+" to show the sign of positive numbers.
        with_count: Whether to show the number of values.
    """
    if not interval.num_values:
        return MISSING
    text = metric.format_value(interval.mean, sign)
    if metric.is_exact:
        return text
    if interval.num_values > 1:
        text += f" [{metric.format_value(interval.low, sign)}, {metric.format_value(interval.high, sign)}]"
    return f"{text} ({interval.num_values})" if with_count else text


def format_leads(groups: Mapping[Name, MeasuredRuns], implied_count: int | None = None) -> dict[Name, str]:
    """Formats the lead of each group over the best of the others, see `compare_with_best_others`.

    Args:
        groups: The runs of each group, with the metric that is compared.
        implied_count: A number of pairs that goes without saying, and is left out.

    Returns:
        The texts by group; empty for a group without a lead.
    """
    texts = dict.fromkeys(groups, "")
    for name, interval in compare_with_best_others(groups).items():
        metric = groups[name].metric
        texts[name] = format_interval(metric, interval, with_count=interval.num_values != implied_count)
    return texts


def format_mean_of_runs(
    metric: Metric, records: Sequence[Record], outcomes: Counter, implied_count: int | None = None
) -> str:
    """Formats the mean ± the sample standard deviation, with the number of runs that have the value.

    Args:
        metric: The metric that is read from each run.
        records: The runs that have begun.
        outcomes: The number of all planned runs by outcome.
        implied_count: A number of runs that goes without saying, where all runs have the value.

    Returns:
        A text as "66.10 ± 0.52 (3)" or "66.10 ± 0.52 (2 of 3 runs; 1 diverged)"; if no run counts, the outcome of the
        run that has come furthest.
    """
    num_counted = sum(map(metric.includes, records))
    if not num_counted:
        return next(outcome for outcome in RUN_OUTCOMES if outcomes[outcome])
    values = metric.read_values(records)
    if values:
        text = metric.format_mean(values)
    elif metric.are_of_different_rounds(records):
        text = "of different rounds"
    else:
        text = metric.missing_text

    num_runs = len(values) or num_counted
    num_planned = outcomes.total()
    without_result = [f"{outcomes[outcome]} {outcome}" for outcome in ("diverged", "failed") if outcomes[outcome]]
    if num_runs < num_planned:
        remarks = [f"{num_runs} of {num_planned} runs", *without_result]
    elif without_result or num_runs != implied_count:
        remarks = [str(num_runs), *without_result]
    else:
        return text
    return f"{text} ({'; '.join(remarks)})"
