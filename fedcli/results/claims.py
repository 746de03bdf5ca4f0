"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with one or more others, by the pairs of runs that `pairs` finds. Its verdict is that
of the interval of their differences.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedcli.data import datasets
from fedcli.declarations import Claim, Table
from fedcli.registry import find_table
from fedcli.results.claim_sheets import as_shipped, read_shipped
from fedcli.results.frame import RunRow, read_runs, rows_of
from fedcli.results.intervals import NO_INTERVAL, Interval, mean_interval
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.pairs import (
    Pair,
    PlannedContrast,
    RunsByMethod,
    find_pairs,
    nearest_pairs,
    pairs_under_common_conditions,
    plan_contrasts,
)
from fedcli.results.paper_tables import printed_lead, printed_value
from fedcli.results.verdicts import (
    BY_CONSTRUCTION,
    CONTRADICTED,
    FEWEST_SEEDS,
    NO_DATA,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    VERDICTS,
    Answer,
    Evidence,
    Judgement,
    Lead,
)
from fedcli.runs.identity import code_changes, differences_text
from fedcli.runs.record import ENDED


def answer_claims(
    claims: Iterable[Claim], folders: Iterable[Path], has_data: Callable[[str], bool] = datasets.is_open_to_all,
    shipped: bool = False,
) -> list[Answer]:  # fmt: skip
    """What the records say of claims, by verdict in the order of `VERDICTS`.

    Args:
        claims: Of papers, or the user's own.
        folders: Of runs, at any depth.
        has_data: Whether the images of a data set can be had.
        shipped: Take the project's verdict, in `fedcli.papers`, for a claim without runs; records are not installed.

    Raises:
        UserError: If a claim's table has not its cells.
    """
    runs = read_runs(folders)
    has_ended = runs["state"].isin(ENDED)
    changed_code = runs["record"].map(code_changes).astype(bool)
    counted_runs: dict[str, list[RunRow]] = {}  # by method
    for run in rows_of(runs[has_ended & ~changed_code]):
        counted_runs.setdefault(run.method, []).append(run)
    shipped_rows = read_shipped() if shipped else {}
    answers = []
    for claim in claims:
        answer = _answer(claim, counted_runs, has_data)
        if not answer.evidence.folders and claim.name in shipped_rows:
            answer = as_shipped(answer, shipped_rows[claim.name])
        answers.append(answer)
    return sorted(answers, key=lambda answer: VERDICTS.index(answer.verdict))


def _answer(claim: Claim, runs: RunsByMethod, has_data: Callable[[str], bool]) -> Answer:
    """What runs say of a claim. Of several rows the smallest lead counts; reproduced needs runs of all."""
    table = find_table(claim.table)
    contrasts = plan_contrasts(claim, table)
    unanswered = _answer_without_runs(claim, table, contrasts, has_data)
    pairs_by_row = {other_row: find_pairs(claim, contrasts[other_row], runs) for other_row in claim.other_rows}
    answers_by_row = {}
    for other_row, pairs in pairs_under_common_conditions(pairs_by_row).items():
        answers_by_row[other_row] = _answer_by_row(unanswered, other_row, nearest_pairs(pairs))
    if not answers_by_row:
        return unanswered
    if len(claim.other_rows) > 1:
        answer = _weakest(answers_by_row, unanswered)
    else:
        (answer,) = answers_by_row.values()
    if answer.verdict == REPRODUCED and claim.construction:
        return replace(answer, judgement=Judgement(BY_CONSTRUCTION, claim.construction))
    return answer


def _answer_without_runs(
    claim: Claim, table: Table, contrasts: Mapping[str, Sequence[PlannedContrast]], has_data: Callable[[str], bool]
) -> Answer:
    """What can be said of a claim before anything has been run: the paper's smallest lead, and whether data are there.

    Args:
        claim: The claim.
        table: Its table.
        contrasts: Its contrasts, by the row that its row is compared with.
        has_data: See `answer_claims`.
    """
    (first, *_) = contrasts[claim.other_rows[0]]
    metric = find_metric(first.contrast.cell.metric)
    paper_leads = []
    data_sets: set[str] = set()
    for other_row, contrasts_with_row in contrasts.items():
        lead = _paper_lead(claim, table, other_row, contrasts_with_row, metric)
        if lead is not None:
            paper_leads.append(lead)
        for planned in contrasts_with_row:
            data_sets.update(planned.run.setup.data_sets, planned.other_run.setup.data_sets)
    return Answer(
        claim,
        metric,
        judgement=Judgement(NOT_RUN if all(map(has_data, data_sets)) else NO_DATA),
        paper_lead=min(paper_leads, key=lambda lead: _towards_paper(claim, lead), default=None),
        text_has=first.run.setup.protocol.text_has,
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


def _answer_by_row(unanswered: Answer, other_row: str, pairs: Sequence[Pair]) -> Answer:
    """Judges a claim against one row.

    Args:
        unanswered: The answer without runs.
        other_row: The row.
        pairs: Pairs of runs under the same conditions, by seed.
    """
    claim = unanswered.claim
    metric = unanswered.metric
    leads = _leads(pairs)
    lead = mean_interval(leads["value"].dropna().tolist())
    tail_lead = mean_interval(leads["tail"].dropna().tolist()) if metric.name == "selected" else NO_INTERVAL
    without_value = SeedsWithoutValue(
        row=len({pair.seed for pair in pairs if pair.run.value is None}),
        other=len({pair.seed for pair in pairs if pair.other_run.value is None}),
    )
    judgement = judge(lead, claim.direction, without_value, exact=metric.unit == "floats")
    reasons = [judgement.why] if judgement.why else []
    if without_value.row:
        reasons.append(f"{claim.row}: {without_value.row} of {len(leads)} without a value")
    if without_value.other:
        reasons.append(f"{other_row}: {without_value.other} of {len(leads)} without a value")
    folders: list[Path] = []
    for pair in pairs:
        folders += [pair.run.folder, pair.other_run.folder]
    (first, *_) = pairs  # all are under the same conditions
    return replace(
        unanswered,
        judgement=Judgement(judgement.verdict, "; ".join(reasons)),
        lead=Lead(lead),
        tail_lead=Lead(tail_lead),
        evidence=Evidence(
            folders=tuple(dict.fromkeys(folders)),
            seeds=tuple(leads.index),
            reduction=differences_text(first.differences),
            pairs=tuple(_row_of_pair(pair, other_row) for pair in pairs),
        ),
    )


def _row_of_pair(pair: Pair, other_row: str) -> dict[str, Any]:
    """What the CSV's column `pairs` has of a pair of runs, by the names there."""
    return {
        "seed": pair.seed,
        "share": pair.contrast.weight,
        "metric": pair.contrast.cell.metric,
        "folder": pair.run.folder,
        "metric_than": pair.contrast.other_cell.metric,
        "folder_than": pair.other_run.folder,
        "than": other_row,
    }


def _leads(pairs: Iterable[Pair]) -> pd.DataFrame:
    """The lead of a claim's row of each seed, in `value` and in `tail`; NaN where a pair of the seed lacks a value."""
    rows = [(pair.seed, pair.lead, pair.tail_lead) for pair in pairs]
    leads = pd.DataFrame(rows, columns=["seed", "value", "tail"]).astype({"value": float, "tail": float})
    pairs_of_seed = leads["seed"].value_counts().max()
    return leads.groupby("seed").sum(min_count=pairs_of_seed)


def _weakest(answers_by_row: Mapping[str, Answer], unanswered: Answer) -> Answer:
    """The answer by the row over which the lead is smallest.

    Args:
        answers_by_row: Answers by the rows that have runs.
        unanswered: The answer without runs.
    """
    claim = unanswered.claim
    weakest, *stronger = sorted(answers_by_row, key=lambda row: _strength(answers_by_row[row]))
    rows_text = f"over {weakest}"
    if len(stronger) == 1:
        (other_row,) = stronger
        rows_text += f"; {answers_by_row[other_row].lead.text(unanswered.metric)} over {other_row}"
    reductions = [answers_by_row[row].evidence.reduction for row in (weakest, *stronger)]
    folders: list[Path] = []
    pairs: list[dict[str, Any]] = []
    for answer in answers_by_row.values():
        folders += answer.evidence.folders
        pairs += answer.evidence.pairs
    weakest_answer = answers_by_row[weakest]
    return replace(
        weakest_answer,
        judgement=_judge_all(claim, weakest, answers_by_row),
        lead=Lead(weakest_answer.lead.interval, rows_text),
        tail_lead=_smallest_tail_lead(claim, weakest, answers_by_row),
        evidence=Evidence(
            folders=tuple(dict.fromkeys(folders)),
            seeds=weakest_answer.evidence.seeds,
            reduction=next(filter(None, reductions), ""),
            pairs=tuple(pairs),
        ),
    )


def _smallest_tail_lead(claim: Claim, weakest: str, answers_by_row: Mapping[str, Answer]) -> Lead:
    """The smallest lead over the last tenth of the rounds; its row is named if it is not the weakest over all."""
    tail_leads = {row: answer.tail_lead.interval for row, answer in answers_by_row.items()}
    with_tail = [row for row, tail_lead in tail_leads.items() if tail_lead.num_values]
    if not with_tail:
        return Lead()
    row = min(with_tail, key=lambda row: _towards_paper(claim, tail_leads[row].mean))
    return Lead(tail_leads[row], "" if row == weakest else f"over {row}")


def _judge_all(claim: Claim, weakest: str, answers_by_row: Mapping[str, Answer]) -> Judgement:
    """Judges a claim against several rows by its answers by each, of which one has the smallest lead."""
    verdict = answers_by_row[weakest].judgement.verdict
    why = answers_by_row[weakest].judgement.why
    if verdict == UNDECIDED and claim.control is not None:
        verdicts_elsewhere = {answer.verdict for row, answer in answers_by_row.items() if row != weakest}
        if weakest == claim.control.row and verdicts_elsewhere == {REPRODUCED}:
            why = f"{claim.control.explanation} explains the lead as far as told; {why}"
    if len(answers_by_row) < len(claim.other_rows) and verdict != CONTRADICTED:
        verdict = UNDECIDED
        why = f"{why}; {len(answers_by_row)} of {len(claim.other_rows)} others run".removeprefix("; ")
    return Judgement(verdict, why)


class _Strength(NamedTuple):
    """How well runs bear out a claim against a row; the weakest is the smallest."""

    verdict: int  # contradicted, undecided, reproduced
    has_lead: bool
    lead: float  # towards the paper's side; NaN where there is none


def _strength(answer: Answer) -> _Strength:
    weakest_first = (CONTRADICTED, UNDECIDED, REPRODUCED)
    lead = answer.lead.interval
    return _Strength(weakest_first.index(answer.verdict), lead.num_values > 0, _towards_paper(answer.claim, lead.mean))


class SeedsWithoutValue(NamedTuple):
    """How many seeds have no value, since a run diverged or never got there."""

    row: int  # of the claim's row
    other: int  # of the other one


def judge(lead: Interval, direction: str, without_value: SeedsWithoutValue, *, exact: bool) -> Judgement:
    """Judges a claim by the interval of its lead.

    A run that diverged has no difference. Leaving it out is fair only where its row is behind.

    Args:
        lead: The row less the other one.
        direction: The paper's side of zero, "higher" or "lower".
        without_value: The seeds that have no value.
        exact: Whether one pair suffices, as for counts of floats, in which chance has no part.
    """
    if not lead.num_values:
        return Judgement(UNDECIDED, "no pair has a value")
    if lead.num_values < FEWEST_SEEDS and not exact:
        return Judgement(UNDECIDED, f"n = {lead.num_values}")
    low = lead.mean if exact else lead.low
    high = lead.mean if exact else lead.high
    if low <= 0 <= high:
        return Judgement(UNDECIDED, f"zero inside, n = {lead.num_values}")
    agrees = (low > 0) == (direction == "higher")
    better_without_value = without_value.row if agrees else without_value.other
    if better_without_value:
        return Judgement(UNDECIDED, "runs of the better one are lost")
    return Judgement(REPRODUCED if agrees else CONTRADICTED)
