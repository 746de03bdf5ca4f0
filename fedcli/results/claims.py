"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with one or more others, by the pairs of runs that `pairs` finds. Its verdict is that
of the interval of their differences.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedcli.data import datasets
from fedcli.declarations import Claim, Table
from fedcli.registry import find_table
from fedcli.results.frame import read_runs
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.pairs import (
    PlannedContrast,
    RunsByMethod,
    find_pairs,
    nearest_pairs,
    of_common_form,
    plan_contrasts,
)
from fedcli.results.paper_tables import printed_lead, printed_value
from fedcli.results.plans import home_of
from fedcli.results.render import MISSING, Sheet
from fedcli.results.statistics import NO_INTERVAL, Interval, interval, interval_text, seeds_needed
from fedcli.runs.identity import code_changes, differences_text
from fedcli.runs.record import ENDED

# The verdicts.
REPRODUCED = "reproduced"
CONTRADICTED = "contradicted"
UNDECIDED = "undecided"
BY_CONSTRUCTION = "by construction"
NOT_RUN = "not run"
NO_DATA = "data not at hand"
VERDICTS = (REPRODUCED, BY_CONSTRUCTION, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
OPEN = (UNDECIDED, NOT_RUN, NO_DATA)  # what more runs would change
FEWEST = 3  # seeds for a verdict
MOST_SEEDS = 30
SHIPPED = "verdicts.csv"
TEXTS = ("verdict", "why", "reduced", "over", "tail_over")  # of an answer that have columns of the CSV


@dataclass(frozen=True)
class IntervalColumns:
    """The columns of the CSV that have the parts of an interval."""

    mean: str
    low: str
    high: str
    n: str

    def read(self, row: Mapping[str, Any]) -> Interval:
        """The interval of a row of the CSV."""
        return Interval(mean=row[self.mean], low=row[self.low], high=row[self.high], n=row[self.n])

    def cells(self, interval: Interval) -> dict[str, float]:
        """An interval's cells of a row of the CSV."""
        return {self.mean: interval.mean, self.low: interval.low, self.high: interval.high, self.n: interval.n}


DIFFERENCE_COLUMNS = IntervalColumns(mean="ours", low="low", high="high", n="n")
TAIL_COLUMNS = IntervalColumns(mean="tail", low="tail_low", high="tail_high", n="tail_n")


@dataclass(frozen=True)
class Answer:
    """A claim and what the records say of it."""

    claim: Claim
    metric: Metric  # what is compared
    paper: float | None  # the paper's difference; None where it does not print both numbers
    verdict: str  # one of `VERDICTS`
    why: str = ""  # why it is undecided, and which runs have no value
    reduced: str = ""  # what differs from the paper's cells; empty in full
    seeds: tuple[int, ...] = ()  # of the pairs of runs
    difference: Interval = NO_INTERVAL  # the row less the other one
    tail: Interval = NO_INTERVAL  # the same of accuracies over the last tenth of the rounds
    over: str = ""  # of several rows, the one of `difference`, and the lead on the other of two
    tail_over: str = ""  # the row of `tail`, if another
    runs: tuple[Path, ...] = ()  # folders; none where nothing has been run
    # Each pair of runs: `than`, `seed`, `share`, and `metric` and `folder` of both, those of the other with `_than`.
    pairs: tuple[dict[str, Any], ...] = ()
    text_has: str = ""  # what the paper's text has where its cells follow the authors' code, see `Protocol`

    @property
    def size(self) -> str:
        """The size of the runs beside the paper's."""
        if self.reduced:
            return f"reduced to {self.reduced}"
        return "in full, by the authors' code" if self.text_has else "in full, by the text"

    @property
    def ours(self) -> str:
        """Our difference with its interval."""
        return f"{interval_text(self.metric, self.difference)} {self.over}".rstrip()

    @property
    def our_tail(self) -> str:
        """The same over the last tenth of the rounds."""
        return f"{interval_text(self.metric, self.tail)} {self.tail_over}".rstrip()

    @property
    def needed_seeds(self) -> tuple[int, ...]:
        """The seeds that would decide it in full: three, or more where these leave it open."""
        needed = FEWEST
        is_open = self.difference.n >= FEWEST and self.difference.low <= 0 <= self.difference.high
        if is_open and not self.reduced:
            needed = seeds_needed(self.difference, MOST_SEEDS)
        seeds = find_table(self.claim.table).seeds
        first_new = seeds[-1] + 1
        new_seeds = range(first_new, first_new + needed - len(seeds))
        return (*seeds, *new_seeds)

    @property
    def command(self) -> str:
        """What runs its rows in full and measures their features; empty where that is no use."""
        if self.verdict not in (UNDECIDED, NOT_RUN):
            return ""
        words = ["fedcli", "table", self.claim.table]
        for name in names_of(self.claim):
            words += ["--only", name]
        words += ["--seeds", ",".join(map(str, self.needed_seeds))]
        command = shlex.join(words)
        if self.metric.after_the_run:
            command += f" && fedcli quality {home_of(find_table(self.claim.table))}"
        return command


def answers(
    claims: Iterable[Claim], folders: Iterable[Path], at_hand: Callable[[str], bool] = datasets.open_to_all,
    shipped: bool = False,
) -> list[Answer]:  # fmt: skip
    """What the records say of claims, by verdict in the order of `VERDICTS`.

    Args:
        claims: Of papers, or the user's own.
        folders: Of runs, at any depth.
        at_hand: Whether the images of a data set can be had.
        shipped: Take the project's verdict, in `fedcli.papers`, for a claim without runs; records are not installed.

    Raises:
        UserError: If a claim's table has not its cells.
    """
    runs = read_runs(folders)
    has_ended = runs["state"].isin(ENDED)
    changed_code = runs["record"].map(code_changes).astype(bool)
    counted_runs: dict[str, list[dict[str, Any]]] = {}  # by method
    for run in runs[has_ended & ~changed_code].to_dict("records"):
        counted_runs.setdefault(run["method"], []).append(run)
    shipped_parts = _read_shipped() if shipped else {}
    answered = []
    for claim in claims:
        answer = _answer(claim, counted_runs, at_hand)
        if not answer.runs and claim.name in shipped_parts:
            answer = replace(answer, **shipped_parts[claim.name])
        answered.append(answer)
    return sorted(answered, key=lambda answer: VERDICTS.index(answer.verdict))


def _read_shipped() -> dict[str, dict[str, Any]]:
    """The parts of answers that come from the project's records, by the names of claims that have runs."""
    texts = [*TEXTS, "seeds", "runs"]
    with files("fedcli.papers").joinpath(SHIPPED).open(encoding="utf-8") as file:
        table = pd.read_csv(file, dtype=dict.fromkeys(texts, str)).fillna(dict.fromkeys(texts, ""))
    parts = {}
    for row in table[table["runs"] != ""].to_dict("records"):
        of_claim: dict[str, Any] = {name: row[name] for name in TEXTS}
        of_claim["difference"] = DIFFERENCE_COLUMNS.read(row)
        of_claim["tail"] = TAIL_COLUMNS.read(row)
        of_claim["seeds"] = tuple(map(int, row["seeds"].split()))
        of_claim["runs"] = tuple(map(Path, row["runs"].split("; ")))
        parts[row["claim"]] = of_claim
    return parts


def names_of(claim: Claim) -> tuple[str, ...]:
    """The rows and columns of a claim."""
    rows = [claim.row, *claim.others, *claim.elsewhere.values()]
    columns = [*claim.columns, *claim.less, *claim.than_columns]
    return (*rows, *columns)


def _answer(claim: Claim, runs: RunsByMethod, at_hand: Callable[[str], bool]) -> Answer:
    """What runs say of a claim. Of several rows the smallest lead counts; reproduced needs runs of all."""
    table = find_table(claim.table)
    compared = plan_contrasts(claim, table)
    unanswered = _answer_without_runs(claim, table, compared, at_hand)
    all_pairs = {other: find_pairs(claim, compared[other], runs) for other in claim.others}
    pairs = of_common_form(all_pairs)
    if not pairs:
        return unanswered
    by_row = {}
    for other, of_other in pairs.items():
        by_row[other] = _answer_by_row(unanswered, other, nearest_pairs(of_other))
    if len(claim.others) > 1:
        answer = _weakest(by_row, unanswered)
    else:
        (answer,) = by_row.values()
    if answer.verdict == REPRODUCED and claim.construction:
        return replace(answer, verdict=BY_CONSTRUCTION, why=claim.construction)
    return answer


def _answer_without_runs(
    claim: Claim, table: Table, compared: Mapping[str, Sequence[PlannedContrast]], at_hand: Callable[[str], bool]
) -> Answer:
    """What can be said of a claim before anything has been run: the paper's smallest lead, and whether data are there.

    Args:
        claim: The claim.
        table: Its table.
        compared: Its contrasts, by the row that its row is compared with.
        at_hand: See `answers`.
    """
    (first, *_) = compared[claim.others[0]]
    metric = find_metric(first.contrast.row.metric)
    paper_leads = []
    data_sets: set[str] = set()
    for other, of_other in compared.items():
        lead = _paper_lead(claim, table, other, of_other, metric)
        if lead is not None:
            paper_leads.append(lead)
        for planned in of_other:
            data_sets.update(planned.row.setup.data_sets, planned.than.setup.data_sets)
    return Answer(
        claim,
        metric,
        paper=min(paper_leads, key=lambda lead: _towards_paper(claim, lead), default=None),
        verdict=NOT_RUN if all(map(at_hand, data_sets)) else NO_DATA,
        text_has=first.row.setup.protocol.text_has,
    )


def _towards_paper(claim: Claim, lead: float) -> float:
    """A lead as a number that is above zero on the paper's side."""
    return lead if claim.direction == "higher" else -lead


def _paper_lead(
    claim: Claim, table: Table, other: str, compared: Sequence[PlannedContrast], metric: Metric
) -> float | None:
    """The paper's lead of a claim's row on another; None where it prints no number for it."""
    if claim.elsewhere or claim.than_columns:
        return _lead_by_cells(table, compared, metric)
    lead = printed_lead(table, claim.row, other, claim.columns, metric)
    if not claim.less or lead is None:
        return lead
    subtracted = printed_lead(table, claim.row, other, claim.less, metric)
    return None if subtracted is None else lead - subtracted


def _lead_by_cells(table: Table, compared: Sequence[PlannedContrast], metric: Metric) -> float | None:
    """The lead by the paper's number in each cell; None where a cell has none."""
    lead = 0.0
    for contrast, _, _ in compared:
        value = printed_value(table, contrast.row.row, contrast.row.column, metric)
        other = printed_value(table, contrast.than.row, contrast.than.column, metric)
        if value is None or other is None:
            return None
        lead += contrast.share * (value - other)
    return lead


def _answer_by_row(unanswered: Answer, other: str, pairs: pd.DataFrame) -> Answer:
    """Judges a claim against one row.

    Args:
        unanswered: The answer without runs.
        other: The row.
        pairs: Pairs of runs of one form, by seed; see `find_pairs`.
    """
    claim = unanswered.claim
    metric = unanswered.metric
    leads = _leads(pairs)
    difference = interval(leads["value"].dropna().tolist())
    is_lost = pairs[["value", "value_than"]].isna().groupby(pairs["seed"]).any()
    lost = Lost(row=int(is_lost["value"].sum()), other=int(is_lost["value_than"].sum()))
    judgement = judge(difference, claim.direction, lost, exact=metric.unit == "floats")
    reasons = [judgement.why] if judgement.why else []
    if lost.row:
        reasons.append(f"{claim.row}: {lost.row} of {len(leads)} without a value")
    if lost.other:
        reasons.append(f"{other}: {lost.other} of {len(leads)} without a value")
    first = pairs.iloc[0]  # all are of one form
    departed = first["departed_than"] | first["departed"]
    folders = pairs[["folder", "folder_than"]].to_numpy().ravel()
    shown = pairs[["seed", "share", "metric", "folder", "metric_than", "folder_than"]].assign(than=other)
    return replace(
        unanswered,
        verdict=judgement.verdict,
        why="; ".join(reasons),
        difference=difference,
        tail=interval(leads["tail"].dropna().tolist()) if metric.name == "selected" else NO_INTERVAL,
        reduced=differences_text(departed),
        seeds=tuple(leads.index),
        runs=tuple(dict.fromkeys(folders)),
        pairs=tuple(shown.to_dict("records")),
    )


def _leads(pairs: pd.DataFrame) -> pd.DataFrame:
    """The lead of a claim's row of each seed, in `value` and in `tail`; NaN where a pair of the seed lacks a value."""
    of_pairs = pairs[["value", "tail"]] - pairs[["value_than", "tail_than"]].to_numpy()
    weighted = of_pairs.mul(pairs["share"], axis=0)
    pairs_of_seed = pairs["seed"].value_counts().max()
    return weighted.groupby(pairs["seed"]).sum(min_count=pairs_of_seed)


def _weakest(by_row: Mapping[str, Answer], unanswered: Answer) -> Answer:
    """The answer by the row on which the lead is smallest.

    Args:
        by_row: Answers by the rows that have runs.
        unanswered: The answer without runs.
    """
    claim = unanswered.claim
    weakest, *stronger = sorted(by_row, key=lambda other: _strength(by_row[other]))
    judgement = _judge_all(claim, weakest, by_row)
    over = f"over {weakest}"
    if len(stronger) == 1:
        (other,) = stronger
        over += f"; {by_row[other].ours} over {other}"
    tail = NO_INTERVAL
    tail_over = ""
    with_tail = [other for other, of_row in by_row.items() if of_row.tail.n]
    if with_tail:
        weakest_tail = min(with_tail, key=lambda other: _towards_paper(claim, by_row[other].tail.mean))
        tail = by_row[weakest_tail].tail
        if weakest_tail != weakest:
            tail_over = f"over {weakest_tail}"
    reduced_texts = [by_row[other].reduced for other in (weakest, *stronger)]
    folders: list[Path] = []
    pairs: list[dict[str, Any]] = []
    for of_row in by_row.values():
        folders += of_row.runs
        pairs += of_row.pairs
    return replace(
        by_row[weakest],
        verdict=judgement.verdict,
        why=judgement.why,
        reduced=next(filter(None, reduced_texts), ""),
        over=over,
        tail=tail,
        tail_over=tail_over,
        runs=tuple(dict.fromkeys(folders)),
        pairs=tuple(pairs),
    )


def _judge_all(claim: Claim, weakest: str, by_row: Mapping[str, Answer]) -> "Judgement":
    """Judges a claim against several rows by its answers by each, of which one has the smallest lead."""
    verdict = by_row[weakest].verdict
    why = by_row[weakest].why
    if verdict == UNDECIDED and claim.control is not None:
        control, explanation = claim.control
        verdicts_elsewhere = {of_row.verdict for other, of_row in by_row.items() if other != weakest}
        if weakest == control and verdicts_elsewhere == {REPRODUCED}:
            why = f"{explanation} explains the lead as far as told; {why}"
    if len(by_row) < len(claim.others) and verdict != CONTRADICTED:
        verdict = UNDECIDED
        why = f"{why}; {len(by_row)} of {len(claim.others)} others run".removeprefix("; ")
    return Judgement(verdict, why)


class _Strength(NamedTuple):
    """How well runs bear out a claim against a row; the weakest is the smallest."""

    verdict: int  # contradicted, undecided, reproduced
    has_difference: bool
    lead: float  # towards the paper's side; NaN where there is no difference


def _strength(answer: Answer) -> _Strength:
    weakest_first = (CONTRADICTED, UNDECIDED, REPRODUCED)
    difference = answer.difference
    lead = _towards_paper(answer.claim, difference.mean)
    return _Strength(weakest_first.index(answer.verdict), difference.n > 0, lead)


class Lost(NamedTuple):
    """How many seeds have no value, since a run diverged or never got there."""

    row: int  # of the claim's row
    other: int


class Judgement(NamedTuple):
    """What an interval says of a claim."""

    verdict: str
    why: str  # it is undecided; else empty


def judge(difference: Interval, direction: str, lost: Lost, *, exact: bool) -> Judgement:
    """Judges a claim by the interval of its differences.

    A run that diverged has no difference. Leaving it out is fair only where its row is behind.

    Args:
        difference: The row less the other one.
        direction: The paper's side of zero, "higher" or "lower".
        lost: The seeds that have no value.
        exact: Whether one pair suffices, as for counts of floats, in which chance has no part.
    """
    if not difference.n:
        return Judgement(UNDECIDED, "no pair has a value")
    if difference.n < FEWEST and not exact:
        return Judgement(UNDECIDED, f"n = {difference.n}")
    low = difference.mean if exact else difference.low
    high = difference.mean if exact else difference.high
    if low <= 0 <= high:
        return Judgement(UNDECIDED, f"zero inside, n = {difference.n}")
    agrees = (low > 0) == (direction == "higher")
    lost_of_better = lost.row if agrees else lost.other
    if lost_of_better:
        return Judgement(UNDECIDED, "runs of the better one are lost")
    return Judgement(REPRODUCED if agrees else CONTRADICTED, "")


NOTES = (
    "Ours: mean over seeds of the difference of two runs that share seed, partition and all options in which the two "
    "cells agree, with its 95 % interval (Student's t) and, in brackets, the number of seeds; of several rows, the "
    "smallest lead.",
    "Reproduced: the interval lies on the paper's side of zero; contradicted: on the other. Undecided: zero is inside, "
    f"there are fewer than {FEWEST} seeds, not every row has been run, or runs without a value are of the row ahead.",
    "In full: every option is the paper's; by the authors' code where text and code differ, else by the text. Reduced "
    "to: what was smaller or other. Decided by: the runs that it lacks.",
    "By construction: the runs agree, and could not do otherwise; it is not counted as reproduced.",
    "Each claim is judged by its own interval, with no correction for their number: of twenty intervals of 95 % one is "
    "expected to miss what it is of.",
)


def claims_sheet(answers: Sequence[Answer]) -> Sheet:
    """The claims as a table; its last column has the commands that would decide a claim."""
    titles = ["Claim", "Verdict", "Paper", "Ours", "Over the last tenth of the rounds", "Runs"]
    lines = [_line(answer) for answer in answers]
    values = [_csv_row(answer) for answer in answers]
    return Sheet(titles, lines, first_number_column=len(titles), values=values, notes=NOTES, marked_up=True)


def _line(answer: Answer) -> list[str]:
    """The cells of a claim in the table that is read."""
    runs = []
    if answer.runs:
        runs.append(answer.size)
    if answer.command:
        runs.append(f"decided by `{answer.command}`")
    return [
        f"`{answer.claim.name}` {answer.claim.text}",
        f"{answer.verdict}, {answer.why}" if answer.why else answer.verdict,
        MISSING if answer.paper is None else answer.metric.text(answer.paper, "+"),
        answer.ours,
        answer.our_tail,
        "; ".join(runs) or MISSING,
    ]


def _csv_row(answer: Answer) -> dict[str, Any]:
    """The values of a claim by the columns of the CSV."""
    claim = answer.claim
    return {
        "claim": claim.name,
        "text": claim.text,
        "table": claim.table,
        "metric": answer.metric.name,
        "row": claim.row,
        "than": "; ".join(claim.others),
        "columns": "; ".join(claim.columns),
        "direction": claim.direction,
        "paper": answer.paper,
        **{name: getattr(answer, name) for name in TEXTS},
        "seeds": " ".join(map(str, answer.seeds)),
        **DIFFERENCE_COLUMNS.cells(answer.difference),
        **TAIL_COLUMNS.cells(answer.tail),
        "runs": "; ".join(map(str, answer.runs)),
        "pairs": json.dumps(answer.pairs, default=str),
    }


def counted(answers: Sequence[Answer]) -> str:
    """How many claims have which verdict, in a sentence."""
    counts = Counter(answer.verdict for answer in answers)
    parts = [f"{count} {verdict}" for verdict, count in counts.items()]
    return f"Of {len(answers)} claims: {', '.join(parts)}."
