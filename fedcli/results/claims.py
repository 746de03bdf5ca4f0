"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with another one, or with several. A run counts for it if it has the settings of its
cell; sizes may be smaller, the claim may allow other values, and what differs is said. Two runs are a pair if they have
the same seed, partition, images, numerics of the core, and the same value of all options in which the two cells agree.
"""

import csv
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from fedcli.data import datasets
from fedcli.declarations import Claim
from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results.comparison import interval_text, printed_lead
from fedcli.results.frame import ENDED, Record, departures, read_runs
from fedcli.results.metrics import Interval, Metric, find_metric, interval, seeds_needed
from fedcli.results.plans import Wanted, home_of, wanted
from fedcli.results.render import MISSING, Sheet
from fedcli.runs.config import RunConfig
from fedcli.runs.settings import differences, differences_text, is_smaller

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "undecided"
NOT_RUN, NO_DATA = "not run", "data not at hand"
VERDICTS = (REPRODUCED, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
FEWEST, MOST_SEEDS = 3, 30  # for a verdict; a claim that needs more is not decided by running more
SHIPPED = "verdicts.csv"
OURS, TAIL = ("ours", "low", "high", "n"), ("tail", "tail_low", "tail_high", "tail_n")  # columns of intervals
RUN_OPTIONS = {field.name for field in fields(RunConfig)} - {"post"}
SHARED = ["seed", "images", "partition", "core", "options"]  # by the two runs of a pair


@dataclass(frozen=True)
class Answer:
    """A claim and what the records say of it."""

    claim: Claim
    metric: Metric  # what is compared
    paper: float | None  # the paper's difference, from the numbers it prints; None where it does not print both
    open_data: bool  # whether the images can be had
    verdict: str  # one of `VERDICTS`
    why: str = ""  # why it is undecided
    reduced: str = ""  # what is smaller or other than in the paper's cells; empty in full
    seeds: tuple[int, ...] = ()  # of the pairs of runs
    difference: Interval | None = None  # the row less the other one; None where no pair has a difference
    tail: Interval | None = None  # the same of the mean over the last tenth of the rounds, where a cell is an accuracy
    lost: str = ""  # the runs that diverged, or never got where they should, in words
    over: str = ""  # of a claim on several rows, which one the difference is on, and what the other one shows
    runs: tuple[Path, ...] = ()  # their folders; none where nothing has been run
    decided: str = ""  # what would decide it, see `fedcli.results.costs.decided_by`, where somebody has asked

    @property
    def size(self) -> str:
        """The size of the runs beside the paper's."""
        return f"reduced to {self.reduced}" if self.reduced else "in full"

    @property
    def ours(self) -> str:
        """Our difference with its interval, and the runs that are lost."""
        difference = f"{difference_text(self.metric, self.difference)} {self.over}".rstrip()
        return f"{difference}; {self.lost}" if self.lost else difference

    @property
    def needed_seeds(self) -> tuple[int, ...]:
        """The seeds that would decide it in full: three, and more only where these leave it open."""
        seeds, number = find_table(self.claim.table).seeds, FEWEST
        difference = None if self.reduced else self.difference
        if difference is not None and difference.n >= FEWEST and not difference.leaves_out_zero:
            number = seeds_needed(difference, MOST_SEEDS)
        return (*seeds, *range(seeds[-1] + 1, seeds[-1] + 1 + number - len(seeds)))

    @property
    def command(self) -> str:
        """What runs the rows and nothing else, in full, and measures their features; empty where that is no use."""
        if self.verdict not in (UNDECIDED, NOT_RUN) or not self.open_data:
            return ""
        table, seeds = find_table(self.claim.table), self.needed_seeds
        command = ["fedcli", "table", self.claim.table]
        command += [word for name in names_of(self.claim) for word in ("--only", name)]
        if seeds != table.seeds:
            command += ["--seeds", ",".join(map(str, seeds))]
        measured = f" && fedcli quality {home_of(table)}" if self.metric.after_the_run else ""
        return shlex.join(command) + measured


def answers(
    claims: Iterable[Claim], folders: Iterable[Path], at_hand: Callable[[str], bool] = datasets.open_to_all
) -> list[Answer]:
    """What the records say of claims, by verdict in the order of `VERDICTS`.

    Args:
        claims: The claims.
        folders: Where runs are looked for, at any depth.
        at_hand: Whether the images of a data set are there, or can be had.

    Raises:
        UserError: If a claim's table has not its cells.
    """
    runs = ended_runs(folders)
    made = [answer(claim, runs, at_hand) for claim in claims]
    return sorted(made, key=lambda answer: VERDICTS.index(answer.verdict))


def with_shipped(answers: Iterable[Answer]) -> list[Answer]:
    """The answers, where there is no run those that the records of the project gave when it was packed.

    `fedcli.papers` holds them as `verdicts.csv`, since the records themselves are not installed.
    """
    lines = files("fedcli.papers").joinpath(SHIPPED).read_text(encoding="utf-8").splitlines()
    shipped = {row["claim"]: row for row in csv.DictReader(lines) if row["runs"]}
    filled = []
    for answer in answers:
        if not answer.runs and (row := shipped.get(answer.claim.name)):
            intervals = [[json.loads(row[name] or "null") for name in names] for names in (OURS, TAIL)]
            difference, tail = (Interval(*ends) if ends[-1] else None for ends in intervals)
            seeds, runs = tuple(map(int, row["seeds"].split())), tuple(map(Path, row["runs"].split("; ")))
            texts = {name: row[name] for name in ("verdict", "why", "reduced", "lost", "over")}
            answer = replace(answer, **texts, seeds=seeds, difference=difference, tail=tail, runs=runs)
        filled.append(answer)
    return sorted(filled, key=lambda answer: VERDICTS.index(answer.verdict))


def ended_runs(folders: Iterable[Path]) -> pd.DataFrame:
    """The runs under folders that have finished or diverged; what cannot be read is left out."""
    return read_runs(folders).loc[lambda runs: runs["state"].isin(ENDED)]


def names_of(claim: Claim) -> tuple[str, ...]:
    """The rows and columns of a claim."""
    return (claim.row, *claim.others, *claim.columns, *claim.less)


def answer(claim: Claim, runs: pd.DataFrame, at_hand: Callable[[str], bool]) -> Answer:
    """What runs say of one claim.

    Args:
        claim: The claim.
        runs: See `ended_runs`.
        at_hand: See `answers`.

    Raises:
        UserError: If its table lacks one of its cells.
    """
    table, columns = find_table(claim.table), (*claim.columns, *claim.less)
    cells = {(cell.row, cell.column): cell for cell in table.cells}
    rows: dict[str, list[Wanted]] = {}
    for row, column in itertools.product((claim.row, *claim.others), columns):
        if (row, column) not in cells:
            raise UserError(
                f"the claim {claim.name} names a cell that {claim.table} does not have (got {row} / {column}); "
                "name a row and a column of the table."
            )
        rows.setdefault(row, []).append(wanted(cells[row, column]))
    metric = rows[claim.row][0].metric
    open_data = all(at_hand(name) for cell in itertools.chain(*rows.values()) for name in cell.setup.data_sets)
    singles = []
    for than in claim.others:
        leads = [printed_lead(table, claim.row, than, part, metric) for part in (claim.columns, claim.less) if part]
        paper = None if None in leads else leads[0] - sum(leads[1:])
        blank = Answer(replace(claim, than=than), metric, paper, open_data, NOT_RUN if open_data else NO_DATA)
        singles.append(_compared(blank, list(zip(rows[claim.row], rows[than], strict=True)), runs))
    return singles[0] if len(singles) == 1 else _smallest_lead(claim, singles)


def _smallest_lead(claim: Claim, singles: Sequence[Answer]) -> Answer:
    """A claim on several rows: the smallest lead counts, and it is reproduced only where each row has been run."""
    sign = 1 if claim.direction == "higher" else -1
    printed = [single.paper for single in singles if single.paper is not None]
    paper = min(printed, key=lambda lead: sign * lead, default=None)

    def strength(single: Answer) -> tuple[int, float]:
        lead = float("-inf") if single.difference is None else sign * single.difference.mean
        return (CONTRADICTED, UNDECIDED, REPRODUCED).index(single.verdict), lead

    run = sorted((single for single in singles if single.runs), key=strength)
    if not run:
        return replace(singles[0], claim=claim, paper=paper)
    verdict, why, over = run[0].verdict, run[0].why, f"over {run[0].claim.than}"
    if len(run) == 2:
        over += f"; {run[1].ours} over {run[1].claim.than}"
    if len(run) < len(singles) and verdict != CONTRADICTED:
        verdict, why = UNDECIDED, f"{why}; {len(run)} of {len(singles)} others run".removeprefix("; ")
    reduced = next((single.reduced for single in run if single.reduced), "")
    folders = dict.fromkeys(folder for single in singles for folder in single.runs)
    return replace(
        run[0], claim=claim, paper=paper, verdict=verdict, why=why, reduced=reduced, over=over, runs=tuple(folders)
    )


def _compared(blank: Answer, columns: Sequence[tuple[Wanted, Wanted]], runs: pd.DataFrame) -> Answer:
    """Judges a claim against one row by its best-matching group of paired runs; returns `blank` without pairs.

    Runs in full go first; else the group of reduced runs with the most seeds, then the fewest options that differ from
    the cell's, then the most rounds.
    """
    parts, claim, metric = [], blank.claim, blank.metric
    for number, (row, than) in enumerate(columns):
        alike = sorted(RUN_OPTIONS - differences(row.settings, than.settings).keys())
        first, second = (_candidates(claim, cell, runs, alike) for cell in (row, than))
        parts.append(first.merge(second, on=SHARED, suffixes=("", "_than")).assign(column=number))
    pairs = pd.concat(parts).drop_duplicates(["form", "form_than", "seed", "column"])
    pairs = pairs[pairs.groupby(["form", "form_than", "seed"])["column"].transform("size") == len(columns)]
    if pairs.empty:
        return blank

    def nearness(forms: tuple[str, str]) -> tuple:
        row, than = map(json.loads, forms)
        seeds = groups.get_group(forms)["seed"].nunique()
        return not (row or than), seeds, -len(row | than), row.get("rounds", inf), forms

    groups = pairs.groupby(["form", "form_than"])
    best = max(groups.groups, key=nearness)
    pairs = groups.get_group(best).sort_values(["seed", "column"])
    other: dict[str, tuple[Any, Any]] = {}  # of the row, then what only the other one has
    for cell, departed in zip(columns[0], map(json.loads, best), strict=True):
        other = {name: (value, cell.settings.get(name)) for name, value in departed.items()} | other
    by_seed, leads, tails = pairs.groupby("seed"), [], []
    for _, each in by_seed:
        if each[["value", "value_than"]].notna().all(axis=None):
            leads.append(_lead(claim, each["value"] - each["value_than"]))
            if (each["tested"] == each["tested_than"]).all() and each[["tail", "tail_than"]].notna().all(axis=None):
                tails.append(_lead(claim, each["tail"] - each["tail_than"]))
    lost = by_seed[["value", "value_than"]].agg(lambda values: values.isna().any()).sum().tolist()
    difference = interval(leads)
    verdict, why = judge(difference, claim.direction, lost, exact=metric.unit == "floats")
    event = "never got there" if metric.none == "never" else "diverged"
    counts = zip((claim.row, claim.than), lost, strict=True)
    return replace(
        blank, verdict=verdict, why=why, reduced=differences_text(other), seeds=tuple(by_seed.groups),
        difference=difference, tail=interval(tails) if metric.name == "selected" else None,
        lost="; ".join(f"{name}: {count} of {len(by_seed)} {event}" for name, count in counts if count),
        runs=tuple(dict.fromkeys(pairs[["folder", "folder_than"]].to_numpy().ravel())),
    )  # fmt: skip


def _lead(claim: Claim, leads: pd.Series) -> float:
    """The mean lead over `claim.columns` less that over `claim.less`, which come after."""
    values, split = leads.tolist(), len(claim.columns)
    return fmean(values[:split]) - (fmean(values[split:]) if claim.less else 0)


def _candidates(claim: Claim, cell: Wanted, runs: pd.DataFrame, alike: Sequence[str]) -> pd.DataFrame:
    """Returns the runs usable for a cell, also reduced ones: keys for pairing, differing options, values.

    Args:
        claim: Says what may differ from the cell.
        cell: The cell.
        runs: See `ended_runs`.
        alike: The options of runs in which the two runs of a pair agree.
    """
    candidates, metric = [], cell.metric
    for run in runs[runs["method"] == cell.setup.method.name].to_dict("records"):
        record = run["record"]
        # What a run of less than a tenth of its rounds has learnt says nothing, what it sends and holds does.
        if metric.unit != "floats" and 10 * record["config"]["rounds"] < cell.setup.run.rounds:
            continue
        departed = departures(run, cell.settings, metric)
        form = {name: value for name, (value, _) in departed.items()}
        refused = {name for name, values in departed.items() if not is_smaller(name, *values)}
        refused -= {name for name, value in claim.instead.items() if value in (None, form.get(name))}
        refused.discard("eval_every")
        if not refused and says_something(record, metric):
            value, tail = (next(iter(read.values([record])), None) for read in (metric, find_metric("last-tenth")))
            core, options = run["numerics"].partition(".")[0], json.dumps([run["settings"].get(name) for name in alike])
            shared = run["seed"], run["images"], run["partition"], core, options
            candidates.append((*shared, json.dumps(form), run["folder"], run["settings"]["eval_every"], value, tail))
    return pd.DataFrame(candidates, columns=[*SHARED, "form", "folder", "tested", "value", "tail"], dtype=object)


def says_something(record: Record, metric: Metric) -> bool:
    """Whether a run has a value, or has none because it diverged or never got there."""
    return not metric.counts(record) or metric.value(record) is not None or metric.none == "never"


def judge(
    difference: Interval | None, direction: str, lost: Sequence[int] = (0, 0), *, exact: bool = False
) -> tuple[str, str]:
    """Verdict on a claim, and why it is undecided.

    A run that diverged has no difference. Leaving it out is fair only where it is a run of the row that is behind.

    Args:
        difference: Of the row less the other one.
        direction: The paper's side of zero, "higher" or "lower".
        lost: Of the row and of the other one, the seeds whose run has no value because it diverged.
        exact: Whether chance has no part in the values, as in counts of floats; then one pair suffices.
    """
    if difference is None:
        return UNDECIDED, "no pair has a value"
    if difference.n < FEWEST and not exact:
        return UNDECIDED, f"n = {difference.n}"
    low, high = (difference.mean, difference.mean) if exact else (difference.low, difference.high)
    if low <= 0 <= high:
        return UNDECIDED, f"zero inside, n = {difference.n}"
    agrees = (low > 0) == (direction == "higher")
    if failed := lost[0 if agrees else 1]:
        return UNDECIDED, f"the better one diverged with {failed} seed{'s' * (failed > 1)}"
    return REPRODUCED if agrees else CONTRADICTED, ""


NOTES = (
    "Ours: mean over seeds of the difference of two runs that share seed, partition and all options in which the two "
    "cells agree, with its 95 % interval (Student's t) and, in brackets, the number of seeds.",
    "Over the last tenth of the rounds: the same of the mean over them, where a cell is the accuracy in one round.",
    "Reproduced: the interval lies on the paper's side of zero; contradicted: on the other. Undecided: zero is inside, "
    f"there are fewer than {FEWEST} seeds, or leaving diverged runs out would favour the one that is ahead.",
    "In full: every option is the paper's. Reduced to: what was smaller or other, the same for both where the paper "
    "has it so. Runs of fewer than a tenth of the rounds count only for what is sent and held.",
    "Over a row: a claim on several rows shows its smallest lead, and counts as reproduced where each has been run.",
    "Decided by: the runs that are lacking, with as many seeds as would do if mean and spread stayed. The pages have "
    "their hours, one after the other, by the runs of such a network that were timed; `fedcli claims` has the command "
    "that makes them, of which --dry-run says what it takes.",
)


def difference_text(metric: Metric, difference: Interval | None) -> str:
    """A difference with its interval and the number of seeds, `+9.70 [+7.10, +12.30] (3)`; of counts it alone."""
    if difference is None:
        return MISSING
    return interval_text(metric, difference) + ("" if metric.unit == "floats" else f" ({difference.n})")


def claims_sheet(answers: Sequence[Answer], runs: Callable[[Answer], str] = lambda answer: answer.size) -> Sheet:
    """The claims as a table to be written.

    Args:
        answers: The claims.
        runs: What is said of the runs of a claim that has some.
    """
    lines, values = [], []
    for answer in answers:
        claim, metric = answer.claim, answer.metric
        verdict = f"{answer.verdict}, {answer.why}" if answer.why else answer.verdict
        paper = MISSING if answer.paper is None else metric.signed(answer.paper)
        deciding = answer.decided or (answer.command and f"`{answer.command}`")
        said = [runs(answer)] if answer.runs else []
        said += [f"decided by {deciding}"] if deciding else []
        texts = [f"`{claim.name}` {claim.text}", verdict, paper, answer.ours, difference_text(metric, answer.tail)]
        texts.append("; ".join(said) or MISSING)
        lines.append(texts)
        values.append({
            "claim": claim.name, "text": claim.text, "table": claim.table, "paper": answer.paper,
            "verdict": answer.verdict, "why": answer.why, "reduced": answer.reduced,
            "seeds": " ".join(map(str, answer.seeds)),
            **dict(zip(OURS, answer.difference or [None] * 4, strict=True)),
            **dict(zip(TAIL, answer.tail or [None] * 4, strict=True)),
            "lost": answer.lost, "over": answer.over, "runs": "; ".join(map(str, answer.runs)),
        })  # fmt: skip
    titles = ["Claim", "Verdict", "Paper", "Ours", "Over the last tenth of the rounds", "Runs"]
    return Sheet(titles, lines, 6, values, notes=NOTES, marked_up=True)


def counted(answers: Sequence[Answer]) -> str:
    """How many claims have which verdict, in a sentence."""
    numbers = Counter(answer.verdict for answer in answers)
    counts = [f"{numbers[verdict]} {verdict}" for verdict in VERDICTS if verdict in numbers]
    return f"Of {len(answers)} claims: {', '.join(counts)}."
