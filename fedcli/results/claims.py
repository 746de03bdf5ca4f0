"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with one or more others, by the pairs of runs that `pairs` finds. Its verdict is that
of the interval of their differences.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fedcli.data import datasets
from fedcli.declarations import Claim, Table
from fedcli.registry import find_table
from fedcli.results.claim_tables import as_shipped, read_shipped
from fedcli.results.frame import RunRow, read_runs
from fedcli.results.intervals import NO_INTERVAL, Interval, mean_interval
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.pairs import (
    Pair,
    PlannedContrast,
    RunsByMethod,
    closest_pairs,
    find_pairs,
    pairs_under_common_conditions,
    plan_contrasts,
)
from fedcli.results.printed_numbers import printed_lead, printed_value
from fedcli.results.verdicts import (
    BY_CONSTRUCTION,
    CONTRADICTED,
    FEWEST_SEEDS,
    NO_DATA,
    NOT_RUN,
    OUTCOMES,
    REPRODUCED,
    UNDECIDED,
    Answer,
    Evidence,
    Lead,
    Verdict,
)
from fedcli.runs.identity import recorded_code_changes
from fedcli.runs.record import ENDED
from fedcli.runs.settings_text import differences_text


def answer_claims(
    claims: Iterable[Claim], folders: Iterable[Path], has_data: Callable[[str], bool] = datasets.is_open_to_all,
    shipped: bool = False,
) -> list[Answer]:  # fmt: skip
    """What the records say of claims, by outcome in the order of `OUTCOMES`.

    Args:
        claims: Of papers, or the user's own.
        folders: Of runs, at any depth.
        has_data: Whether the images of a data set can be had.
        shipped: Take the project's verdict, in `fedcli.papers`, for a claim without runs; records are not installed.

    Raises:
        UserError: If a claim's table has not its cells.
    """
    counted_runs: dict[str, list[RunRow]] = {}  # by method
    for run in read_runs(folders):
        if run.outcome in ENDED and not recorded_code_changes(run.record):
            counted_runs.setdefault(run.method, []).append(run)
    shipped_rows = read_shipped() if shipped else {}
    answers = []
    for claim in claims:
        answer = _answer(claim, counted_runs, has_data)
        if not answer.evidence.folders and claim.name in shipped_rows:
            answer = as_shipped(answer, shipped_rows[claim.name])
        answers.append(answer)
    return sorted(answers, key=lambda answer: OUTCOMES.index(answer.verdict.outcome))


@dataclass(frozen=True)
class ClaimContext:
    """What is known of a claim before anything has been run."""

    claim: Claim
    metric: Metric  # what is compared
    paper_lead: float | None  # the smallest on another row; None where the paper does not print both numbers
    text_has: str  # see `Answer`
    has_data: bool  # whether the images of all its data sets can be had


@dataclass(frozen=True)
class Comparison:
    """What runs say of a claim's row beside another row, or beside all others."""

    verdict: Verdict
    lead: Lead
    tail_lead: Lead  # see `Answer`
    evidence: Evidence


def _answer(claim: Claim, runs: RunsByMethod, has_data: Callable[[str], bool]) -> Answer:
    """What runs say of a claim. Of several other rows the smallest lead counts; reproduced needs runs of all."""
    table = find_table(claim.table)
    contrasts = plan_contrasts(claim, table)
    context = _context_of(claim, table, contrasts, has_data)
    pairs_by_row = {other_row: find_pairs(claim, contrasts[other_row], runs) for other_row in claim.other_rows}
    comparisons = {}  # by the other row
    for other_row, pairs in pairs_under_common_conditions(pairs_by_row).items():
        comparisons[other_row] = _compare_with_row(context, other_row, closest_pairs(pairs))
    if not comparisons:
        comparison = Comparison(Verdict(NOT_RUN if context.has_data else NO_DATA), Lead(), Lead(), Evidence())
    elif len(claim.other_rows) == 1:
        (comparison,) = comparisons.values()
    else:
        comparison = _compare_with_all_rows(context, comparisons)
    verdict = comparison.verdict
    if verdict.outcome == REPRODUCED and claim.construction:
        verdict = Verdict(BY_CONSTRUCTION, claim.construction)
    return Answer(
        claim=claim,
        metric=context.metric,
        paper_lead=context.paper_lead,
        text_has=context.text_has,
        verdict=verdict,
        lead=comparison.lead,
        tail_lead=comparison.tail_lead,
        evidence=comparison.evidence,
    )


def _context_of(
    claim: Claim, table: Table, contrasts: Mapping[str, Sequence[PlannedContrast]], has_data: Callable[[str], bool]
) -> ClaimContext:
    """What is known of a claim before anything has been run.

    Args:
        claim: The claim.
        table: Its table.
        contrasts: Its contrasts, by the row that its row is compared with.
        has_data: See `answer_claims`.
    """
    example = contrasts[claim.other_rows[0]][0]  # which stands for all of them
    metric = find_metric(example.contrast.cell.metric)
    paper_leads = []
    data_sets: set[str] = set()
    for other_row, contrasts_with_row in contrasts.items():
        lead = _paper_lead(claim, table, other_row, contrasts_with_row, metric)
        if lead is not None:
            paper_leads.append(lead)
        for planned in contrasts_with_row:
            data_sets.update(planned.run.setup.data_sets, planned.other_run.setup.data_sets)
    return ClaimContext(
        claim,
        metric,
        paper_lead=min(paper_leads, key=lambda lead: _towards_paper(claim, lead), default=None),
        text_has=example.run.setup.protocol.text_has,
        has_data=all(map(has_data, data_sets)),
    )


def _towards_paper(claim: Claim, lead: float) -> float:
    """A lead as a number that is above zero on the paper's side."""
    return lead if claim.direction == "higher" else -lead


def _paper_lead(
    claim: Claim, table: Table, other_row: str, contrasts: Sequence[PlannedContrast], metric: Metric
) -> float | None:
    """The paper's lead of a claim's row on another; None where it prints no number for it."""
    if claim.row_aliases or claim.other_columns:
        return _lead_by_cells(table, contrasts, metric)
    lead = printed_lead(table, claim.row, other_row, claim.columns, metric)
    if not claim.subtracted_columns or lead is None:
        return lead
    subtracted = printed_lead(table, claim.row, other_row, claim.subtracted_columns, metric)
    return None if subtracted is None else lead - subtracted


def _lead_by_cells(table: Table, contrasts: Sequence[PlannedContrast], metric: Metric) -> float | None:
    """The lead by the paper's number in each cell; None where a cell has none."""
    lead = 0.0
    for planned in contrasts:
        contrast = planned.contrast
        value = printed_value(table, contrast.cell.row, contrast.cell.column, metric)
        other_value = printed_value(table, contrast.other_cell.row, contrast.other_cell.column, metric)
        if value is None or other_value is None:
            return None
        lead += contrast.weight * (value - other_value)
    return lead


def _compare_with_row(context: ClaimContext, other_row: str, pairs: Sequence[Pair]) -> Comparison:
    """What runs say of a claim beside one other row.

    Args:
        context: Of the claim.
        other_row: The row.
        pairs: Pairs of runs under the same conditions, by seed.
    """
    claim = context.claim
    metric = context.metric
    leads = _leads_by_seed(pairs)
    lead = mean_interval(leads["value"].dropna().tolist())
    tail_lead = mean_interval(leads["tail"].dropna().tolist()) if metric.name == "selected" else NO_INTERVAL
    without_value = SeedsWithoutValue(
        row=len({pair.seed for pair in pairs if pair.run.value is None}),
        other_row=len({pair.seed for pair in pairs if pair.other_run.value is None}),
    )
    verdict = judge(lead, claim.direction, metric.better, without_value, exact=metric.unit == "floats")
    reasons = [verdict.reason] if verdict.reason else []
    if without_value.row:
        reasons.append(f"{claim.row}: {without_value.row} of {len(leads)} without a value")
    if without_value.other_row:
        reasons.append(f"{other_row}: {without_value.other_row} of {len(leads)} without a value")
    folders: list[Path] = []
    for pair in pairs:
        folders += [pair.run.folder, pair.other_run.folder]
    return Comparison(
        Verdict(verdict.outcome, "; ".join(reasons)),
        Lead(lead),
        Lead(tail_lead),
        Evidence(
            folders=tuple(dict.fromkeys(folders)),
            seeds=tuple(leads.index),
            differences=differences_text(pairs[0].differences),  # as of all of them
            pairs=tuple(pairs),
        ),
    )


def _leads_by_seed(pairs: Iterable[Pair]) -> pd.DataFrame:
    """The lead of a claim's row of each seed, in `value` and in `tail`; NaN where a pair of the seed lacks a value."""
    rows = [(pair.seed, pair.lead, pair.tail_lead) for pair in pairs]
    leads = pd.DataFrame(rows, columns=["seed", "value", "tail"]).astype({"value": float, "tail": float})
    num_contrasts = leads["seed"].value_counts().max()
    return leads.groupby("seed").sum(min_count=num_contrasts)


def _compare_with_all_rows(context: ClaimContext, comparisons: Mapping[str, Comparison]) -> Comparison:
    """What runs say of a claim beside several other rows: the comparison with the one on which the lead is smallest.

    Args:
        context: Of the claim.
        comparisons: Those with the other rows that have runs.
    """
    claim = context.claim
    weakest_first = sorted(comparisons, key=lambda other_row: _strength(claim, comparisons[other_row]))
    weakest = weakest_first[0]
    rows_text = f"over {weakest}"
    if len(weakest_first) == 2:
        stronger = weakest_first[1]
        rows_text += f"; {comparisons[stronger].lead.text(context.metric)} over {stronger}"
    differences = [comparisons[other_row].evidence.differences for other_row in weakest_first]
    folders: list[Path] = []
    pairs: list[Pair] = []
    for comparison in comparisons.values():
        folders += comparison.evidence.folders
        pairs += comparison.evidence.pairs
    return Comparison(
        _judge_by_all_rows(claim, weakest, comparisons),
        Lead(comparisons[weakest].lead.interval, rows_text),
        _smallest_tail_lead(claim, weakest, comparisons),
        Evidence(
            folders=tuple(dict.fromkeys(folders)),
            seeds=comparisons[weakest].evidence.seeds,
            differences=next(filter(None, differences), ""),
            pairs=tuple(pairs),
        ),
    )


def _smallest_tail_lead(claim: Claim, weakest: str, comparisons: Mapping[str, Comparison]) -> Lead:
    """The smallest lead over the last tenth of the rounds; its row is named if it is not the weakest over all."""
    tail_leads = {other_row: comparison.tail_lead.interval for other_row, comparison in comparisons.items()}
    with_tail = [other_row for other_row, tail_lead in tail_leads.items() if tail_lead.num_values]
    if not with_tail:
        return Lead()
    smallest = min(with_tail, key=lambda other_row: _towards_paper(claim, tail_leads[other_row].mean))
    return Lead(tail_leads[smallest], "" if smallest == weakest else f"over {smallest}")


def _judge_by_all_rows(claim: Claim, weakest: str, comparisons: Mapping[str, Comparison]) -> Verdict:
    """Judges a claim by the comparisons with several other rows, of which the weakest has the smallest lead."""
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
    """How well runs bear out a claim against a row; the weakest is the smallest."""

    outcome: int  # contradicted, undecided, reproduced
    has_lead: bool
    lead: float  # towards the paper's side; NaN where there is none


def _strength(claim: Claim, comparison: Comparison) -> _Strength:
    weakest_first = (CONTRADICTED, UNDECIDED, REPRODUCED)
    lead = comparison.lead.interval
    return _Strength(
        outcome=weakest_first.index(comparison.verdict.outcome),
        has_lead=lead.num_values > 0,
        lead=_towards_paper(claim, lead.mean),
    )


class SeedsWithoutValue(NamedTuple):
    """How many seeds have no value, since a run diverged or never got there."""

    row: int  # of the claim's row
    other_row: int


def judge(lead: Interval, direction: str, better: str, without_value: SeedsWithoutValue, *, exact: bool) -> Verdict:
    """Judges a claim by the interval of its lead.

    A run that diverged has no lead. Leaving it out is fair only where its row has the worse values.

    Args:
        lead: The row less the other one.
        direction: The paper's side of zero, "higher" or "lower".
        better: Which values of the metric are better, "higher" or "lower"; where it does not say, those of the claim's
            direction.
        without_value: The seeds that have no value.
        exact: Whether one pair suffices, as for counts of floats, in which chance has no part.
    """
    if not lead.num_values:
        return Verdict(UNDECIDED, "no pair has a value")
    if lead.num_values < FEWEST_SEEDS and not exact:
        return Verdict(UNDECIDED, f"n = {lead.num_values}")
    low = lead.mean if exact else lead.low
    high = lead.mean if exact else lead.high
    if low <= 0 <= high:
        return Verdict(UNDECIDED, f"zero inside, n = {lead.num_values}")
    agrees = (low > 0) == (direction == "higher")
    row_is_better = (low > 0) == ((better or direction) == "higher")
    better_without_value = without_value.row if row_is_better else without_value.other_row
    if better_without_value:
        return Verdict(UNDECIDED, "runs of the better one are lost")
    return Verdict(REPRODUCED if agrees else CONTRADICTED)
