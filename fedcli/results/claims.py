"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with one or more others, by the pairs of runs that `pairs` finds. Its verdict is that
of the interval of their differences.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import NamedTuple

from fedcli.data import datasets
from fedcli.declarations import Claim, Table
from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results.claim_tables import apply_shipped_row, read_shipped
from fedcli.results.intervals import NO_INTERVAL, Interval, mean_interval
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.pairs import (
    Pair,
    PlannedContrast,
    RunsByMethod,
    find_pairs,
    plan_contrasts,
    select_closest_pairs,
    select_pairs_under_common_conditions,
)
from fedcli.results.printed_numbers import find_printed_difference, find_printed_value
from fedcli.results.run_records import ReadRun, read_runs
from fedcli.results.verdicts import (
    BETTER_RUNS_LOST,
    BY_CONSTRUCTION,
    CONTRADICTED,
    FEWEST_SEEDS,
    NO_DATA,
    NOT_RUN,
    OUTCOMES,
    REPRODUCED,
    UNDECIDED,
    Answer,
    ClaimContext,
    Comparison,
    Evidence,
    Lead,
    Verdict,
)
from fedcli.runs.identity import recorded_code_changes
from fedcli.runs.record import ENDED
from fedcli.runs.settings_text import differences_text


def answer_claims(
    claims: Iterable[Claim], folders: Iterable[Path], has_data: Callable[[str], bool] = datasets.is_open_to_all, *,
    shipped: bool = False,
) -> list[Answer]:  # fmt: skip
    """Judges claims by the records of runs.

    Args:
        claims: The claims, of papers or the user's own.
        folders: Folders that hold runs at any depth.
        has_data: Returns whether the images of the data set of a name can be had.
        shipped: Whether to take the project's verdict, in `fedcli.papers`, for a claim without runs, since records are
            not installed with the package.

    Returns:
        An answer for each claim, sorted by outcome in the order of `OUTCOMES`.

    Raises:
        UserError: If a claim names a cell that its table does not have, or compares numbers of two kinds.
    """
    counted_runs: dict[str, list[ReadRun]] = {}  # by method
    for run in read_runs(folders):
        if run.outcome in ENDED and not recorded_code_changes(run.record):
            counted_runs.setdefault(run.method, []).append(run)
    shipped_rows = read_shipped() if shipped else {}
    answers = []
    for claim in claims:
        answer = _answer_claim(claim, counted_runs, has_data)
        if not answer.comparison.evidence.folders and claim.name in shipped_rows:
            answer = apply_shipped_row(answer, shipped_rows[claim.name])
        answers.append(answer)
    return sorted(answers, key=lambda answer: OUTCOMES.index(answer.comparison.verdict.outcome))


def _answer_claim(claim: Claim, runs: RunsByMethod, has_data: Callable[[str], bool]) -> Answer:
    """Judges a claim by runs.

    If the claim names several other rows, the smallest lead counts, and it is reproduced only if all rows have runs.
    """
    table = find_table(claim.table)
    contrasts = plan_contrasts(claim, table)
    context = _find_context(claim, table, contrasts, has_data)
    pairs_by_row = {other_row: find_pairs(claim, contrasts[other_row], runs) for other_row in claim.other_rows}
    comparisons = {}  # by the other row
    for other_row, pairs in select_pairs_under_common_conditions(pairs_by_row).items():
        comparisons[other_row] = _compare_with_row(context, other_row, select_closest_pairs(pairs))
    if not comparisons:
        comparison = Comparison(Verdict(NOT_RUN if context.has_data else NO_DATA))
    elif len(claim.other_rows) == 1:
        (comparison,) = comparisons.values()
    else:
        comparison = _compare_with_all_rows(context, comparisons)
    if comparison.verdict.outcome == REPRODUCED and claim.construction:
        comparison = replace(comparison, verdict=Verdict(BY_CONSTRUCTION, claim.construction))
    return Answer(context, comparison)


def _find_context(
    claim: Claim, table: Table, contrasts: Mapping[str, Sequence[PlannedContrast]], has_data: Callable[[str], bool]
) -> ClaimContext:
    """Finds what is known of a claim before anything has been run.

    Args:
        claim: The claim.
        table: The table of the claim.
        contrasts: The contrasts of the claim, by the row that its row is compared with.
        has_data: See `answer_claims`.
    """
    metric = _find_metric_of_differences(claim, contrasts)
    paper_differences = []
    data_sets: set[str] = set()
    texts: list[str] = []
    for other_row, contrasts_with_row in contrasts.items():
        difference = _find_paper_difference(claim, table, other_row, contrasts_with_row, metric)
        if difference is not None:
            paper_differences.append(difference)
        for planned in contrasts_with_row:
            data_sets.update(planned.run.setup.data_sets, planned.other_run.setup.data_sets)
            texts.append(planned.run.setup.protocol.text_has)
    return ClaimContext(
        claim,
        metric,
        paper_difference=min(paper_differences, key=lambda value: _turn_to_paper_side(claim, value), default=None),
        text_has=next(filter(None, texts), ""),
        has_data=all(map(has_data, data_sets)),
    )


def _find_metric_of_differences(claim: Claim, contrasts: Mapping[str, Sequence[PlannedContrast]]) -> Metric:
    """Finds the metric by which a claim's differences are judged and written: that of its first cell.

    Its cells may have several metrics, as accuracies of several rounds, of the same unit and better side.

    Raises:
        UserError: If they differ in these.
    """
    metrics = []
    for contrasts_with_row in contrasts.values():
        for planned in contrasts_with_row:
            metrics += [find_metric(planned.contrast.cell.metric), find_metric(planned.contrast.other_cell.metric)]
    first, *others = metrics
    for other in others:
        if (other.kind.unit, other.better) != (first.kind.unit, first.better):
            raise UserError(
                f"the claim {claim.name} takes the difference of numbers of two kinds (got {first.name} and "
                f"{other.name}); compare cells of one."
            )
    return first


def _turn_to_paper_side(claim: Claim, difference: float) -> float:
    """Returns a difference as a number that is above zero if it lies on the paper's side."""
    return difference if claim.direction == "higher" else -difference


def _find_paper_difference(
    claim: Claim, table: Table, other_row: str, contrasts: Sequence[PlannedContrast], metric: Metric
) -> float | None:
    """Finds by how much a claim's row is ahead of another row in the paper.

    Returns:
        The difference in the unit of the metric; None if the paper does not print it.
    """
    if claim.row_aliases or claim.other_columns:
        return _sum_printed_differences(table, contrasts, metric)
    difference = find_printed_difference(table, claim.row, other_row, claim.columns, metric)
    if not claim.subtracted_columns or difference is None:
        return difference
    subtracted = find_printed_difference(table, claim.row, other_row, claim.subtracted_columns, metric)
    return None if subtracted is None else difference - subtracted


def _sum_printed_differences(table: Table, contrasts: Sequence[PlannedContrast], metric: Metric) -> float | None:
    """Sums the weighted differences of the numbers in the paper's cells; returns None if a cell has no number."""
    total = 0.0
    for planned in contrasts:
        contrast = planned.contrast
        value = find_printed_value(table, contrast.cell.row, contrast.cell.column, metric)
        other_value = find_printed_value(table, contrast.other_cell.row, contrast.other_cell.column, metric)
        if value is None or other_value is None:
            return None
        total += contrast.weight * (value - other_value)
    return total


def _compare_with_row(context: ClaimContext, other_row: str, pairs: Sequence[Pair]) -> Comparison:
    """Compares a claim's row with one other row.

    Args:
        context: What is known of the claim.
        other_row: The name of the other row.
        pairs: The pairs of runs, all under the same conditions, in the order of their seeds.
    """
    claim = context.claim
    metric = context.metric
    differences = _add_up_differences(pairs)
    interval = _average(difference.value for difference in differences.values())
    last_tenth_interval = NO_INTERVAL
    if metric.name == "selected":
        last_tenth_interval = _average(difference.last_tenth for difference in differences.values())
    without_value = SeedsWithoutValue(
        row=len({pair.seed for pair in pairs if pair.run.value is None}),
        other_row=len({pair.seed for pair in pairs if pair.other_run.value is None}),
    )
    verdict = judge(interval, claim.direction, metric.better, without_value, exact=metric.is_exact)
    reasons = [verdict.reason] if verdict.reason else []
    if without_value.row:
        reasons.append(f"{claim.row}: {without_value.row} of {len(differences)} without a value")
    if without_value.other_row:
        reasons.append(f"{other_row}: {without_value.other_row} of {len(differences)} without a value")
    folders: list[Path] = []
    for pair in pairs:
        folders += [pair.run.folder, pair.other_run.folder]
    return Comparison(
        Verdict(verdict.outcome, "; ".join(reasons)),
        Lead(interval),
        Lead(last_tenth_interval),
        Evidence(
            folders=tuple(dict.fromkeys(folders)),
            seeds=tuple(differences),
            reduction=differences_text(pairs[0].differences_from_cells),  # which all pairs have in common
            pairs=tuple(pairs),
        ),
    )


class _SeedDifference(NamedTuple):
    """The difference of a seed, added up over its contrasts; None where a run has no value, see `Pair`."""

    value: float | None
    last_tenth: float | None


def _add_up_differences(pairs: Iterable[Pair]) -> dict[int, _SeedDifference]:
    """Adds up the weighted differences of the pairs of each seed; returns them by seed."""
    pairs_by_seed: dict[int, list[Pair]] = {}
    for pair in pairs:
        pairs_by_seed.setdefault(pair.seed, []).append(pair)
    differences = {}
    for seed, pairs_of_seed in pairs_by_seed.items():
        differences[seed] = _SeedDifference(
            value=_sum_if_complete([pair.value_difference for pair in pairs_of_seed]),
            last_tenth=_sum_if_complete([pair.last_tenth_difference for pair in pairs_of_seed]),
        )
    return differences


def _average(values: Iterable[float | None]) -> Interval:
    """Averages the values that there are."""
    return mean_interval([value for value in values if value is not None])


def _sum_if_complete(values: Sequence[float | None]) -> float | None:
    """Sums values; returns None if one of them is missing."""
    present = [value for value in values if value is not None]
    return fsum(present) if len(present) == len(values) else None


def _compare_with_all_rows(context: ClaimContext, comparisons: Mapping[str, Comparison]) -> Comparison:
    """Compares a claim's row with several other rows: by the row over which its lead is smallest.

    Args:
        context: What is known of the claim.
        comparisons: The comparisons with the other rows that have runs, by the other row.
    """
    claim = context.claim
    weakest_first = sorted(comparisons, key=lambda other_row: _measure_strength(claim, comparisons[other_row]))
    weakest = weakest_first[0]
    rows_text = f"over {weakest}"
    if len(weakest_first) == 2:
        stronger = weakest_first[1]
        rows_text += f"; {comparisons[stronger].lead.format(context.metric)} over {stronger}"
    reductions = [comparisons[other_row].evidence.reduction for other_row in weakest_first]
    folders: list[Path] = []
    pairs: list[Pair] = []
    for comparison in comparisons.values():
        folders += comparison.evidence.folders
        pairs += comparison.evidence.pairs
    return Comparison(
        _judge_by_all_rows(claim, weakest, comparisons),
        Lead(comparisons[weakest].lead.interval, rows_text),
        _find_smallest_last_tenth_lead(claim, weakest, comparisons),
        Evidence(
            folders=tuple(dict.fromkeys(folders)),
            seeds=comparisons[weakest].evidence.seeds,
            reduction=next(filter(None, reductions), ""),
            pairs=tuple(pairs),
        ),
    )


def _find_smallest_last_tenth_lead(claim: Claim, weakest: str, comparisons: Mapping[str, Comparison]) -> Lead:
    """Finds the smallest lead over the last tenth of the rounds; names its row unless that is the weakest row."""
    intervals = {other_row: comparison.last_tenth_lead.interval for other_row, comparison in comparisons.items()}
    with_values = [other_row for other_row, interval in intervals.items() if interval.num_values]
    if not with_values:
        return Lead()
    smallest = min(with_values, key=lambda other_row: _turn_to_paper_side(claim, intervals[other_row].mean))
    return Lead(intervals[smallest], "" if smallest == weakest else f"over {smallest}")


def _judge_by_all_rows(claim: Claim, weakest: str, comparisons: Mapping[str, Comparison]) -> Verdict:
    """Judges a claim by the comparisons with several other rows, of which `weakest` has the smallest lead."""
    outcome = comparisons[weakest].verdict.outcome
    reason = comparisons[weakest].verdict.reason
    if outcome == UNDECIDED and claim.control is not None:
        outcomes_elsewhere = {comparison.verdict.outcome for row, comparison in comparisons.items() if row != weakest}
        if weakest == claim.control.row and outcomes_elsewhere == {REPRODUCED}:
            reason = f"{claim.control.explanation} explains the lead as far as told; {reason}"
    if len(comparisons) < len(claim.other_rows) and outcome != CONTRADICTED:
        outcome = UNDECIDED
        reason = f"{reason}; {len(comparisons)} of {len(claim.other_rows)} others run".removeprefix("; ")
    return Verdict(outcome, reason)


class _Strength(NamedTuple):
    """How well runs bear out a claim against another row; the weakest strength is the smallest tuple.

    Attributes:
        rank: 0 if the claim is contradicted, 1 if it is undecided, and 2 if it is reproduced.
        has_difference: Whether a pair of runs has a value.
        difference: The mean difference, above zero on the paper's side; NaN if there is none.
    """

    rank: int
    has_difference: bool
    difference: float


def _measure_strength(claim: Claim, comparison: Comparison) -> _Strength:
    weakest_first = (CONTRADICTED, UNDECIDED, REPRODUCED)
    interval = comparison.lead.interval
    return _Strength(
        rank=weakest_first.index(comparison.verdict.outcome),
        has_difference=interval.num_values > 0,
        difference=_turn_to_paper_side(claim, interval.mean),
    )


class SeedsWithoutValue(NamedTuple):
    """How many seeds have no value, since a run diverged or never reached its target.

    Attributes:
        row: The number of such seeds of the claim's row.
        other_row: The number of such seeds of the other row.
    """

    row: int
    other_row: int


def judge(interval: Interval, direction: str, better: str, without_value: SeedsWithoutValue, *, exact: bool) -> Verdict:
    """Judges a claim by the interval of the difference between its row and another row.

    A run that diverged has no value. Leaving it out is fair only if its row has the worse values.

    Args:
        interval: The interval of the claim's row less the other row.
        direction: The side of zero on which the paper's difference lies, "higher" or "lower".
        better: Which values of the metric are better, "higher" or "lower"; empty if neither are, and then those of
            `direction` count as better.
        without_value: The numbers of seeds that have no value.
        exact: Whether one pair suffices, as for counts of floats, in which chance has no part.
    """
    if not interval.num_values:
        return Verdict(UNDECIDED, "no pair has a value")
    if interval.num_values < FEWEST_SEEDS and not exact:
        return Verdict(UNDECIDED, f"n = {interval.num_values}")
    low = interval.mean if exact else interval.low
    high = interval.mean if exact else interval.high
    if low <= 0 <= high:
        return Verdict(UNDECIDED, f"zero inside, n = {interval.num_values}")
    agrees = (low > 0) == (direction == "higher")
    row_is_better = (low > 0) == ((better or direction) == "higher")
    better_without_value = without_value.row if row_is_better else without_value.other_row
    if better_without_value:
        return Verdict(UNDECIDED, BETTER_RUNS_LOST)
    return Verdict(REPRODUCED if agrees else CONTRADICTED)
