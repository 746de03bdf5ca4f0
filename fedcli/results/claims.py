"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with one or more others. A run counts if it has the settings of its cell, smaller
sizes, or values that the claim allows; what differs is said. Two runs are a pair if they share seed, partition, images,
numerics of the core, and all options in which the two cells agree.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd

from fedcli.data import datasets
from fedcli.declarations import Claim
from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results.frame import read_runs
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.paper_tables import printed_lead
from fedcli.results.plans import PlannedRun, home_of, plan_cell
from fedcli.results.render import MISSING, Sheet
from fedcli.results.statistics import NO_INTERVAL, Interval, interval, interval_text, seeds_needed
from fedcli.runs.identity import departures, differences, differences_text, is_smaller
from fedcli.runs.options import RunConfig
from fedcli.runs.record import ENDED

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "undecided"
NOT_RUN, NO_DATA = "not run", "data not at hand"
VERDICTS = (REPRODUCED, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
FEWEST, MOST_SEEDS = 3, 30  # for a verdict
SHIPPED = "verdicts.csv"
# Columns of the CSV.
TEXTS = ("verdict", "why", "reduced", "over")
INTERVALS = {"difference": ["ours", "low", "high", "n"], "tail": ["tail", "tail_low", "tail_high", "tail_n"]}
SHARED = ["seed", "images", "partition", "core", "options"]  # by the two runs of a pair
FORMS = ["form", "form_than"]  # the options of the two that are not as in their cells


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
    runs: tuple[Path, ...] = ()  # folders; none where nothing has been run

    @property
    def size(self) -> str:
        """The size of the runs beside the paper's."""
        return f"reduced to {self.reduced}" if self.reduced else "in full"

    @property
    def ours(self) -> str:
        """Our difference with its interval."""
        return f"{interval_text(self.metric, self.difference)} {self.over}".rstrip()

    @property
    def needed_seeds(self) -> tuple[int, ...]:
        """The seeds that would decide it in full: three, or more where these leave it open."""
        seeds, number = find_table(self.claim.table).seeds, FEWEST
        if not self.reduced and self.difference.n >= FEWEST and self.difference.low <= 0 <= self.difference.high:
            number = seeds_needed(self.difference, MOST_SEEDS)
        return (*seeds, *range(seeds[-1] + 1, seeds[-1] + 1 + number - len(seeds)))

    @property
    def command(self) -> str:
        """What runs its rows in full and measures their features; empty where that is no use."""
        if self.verdict not in (UNDECIDED, NOT_RUN):
            return ""
        options = [word for name in names_of(self.claim) for word in ("--only", name)]
        options += ["--seeds", ",".join(map(str, self.needed_seeds))]
        measured = f" && fedcli quality {home_of(find_table(self.claim.table))}" if self.metric.after_the_run else ""
        return shlex.join(["fedcli", "table", self.claim.table, *options]) + measured


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
    runs, packed = read_runs(folders), _shipped() if shipped else {}
    answers = [_answer(claim, runs[runs["state"].isin(ENDED)], at_hand) for claim in claims]
    answers = [each if each.runs else replace(each, **packed.get(each.claim.name, {})) for each in answers]
    return sorted(answers, key=lambda answer: VERDICTS.index(answer.verdict))


def _shipped() -> dict[str, dict[str, Any]]:
    """The parts of answers that come from the project's records, by the names of claims that have runs."""
    texts = [*TEXTS, "seeds", "runs"]
    with files("fedcli.papers").joinpath(SHIPPED).open(encoding="utf-8") as file:
        table = pd.read_csv(file, dtype=dict.fromkeys(texts, str)).fillna(dict.fromkeys(texts, ""))
    parts = {}
    for row in table[table["runs"] != ""].to_dict("records"):
        intervals = {name: Interval(*(row[column] for column in columns)) for name, columns in INTERVALS.items()}
        seeds, runs = map(int, row["seeds"].split()), map(Path, row["runs"].split("; "))
        parts[row["claim"]] = {name: row[name] for name in TEXTS} | intervals | {"seeds": (*seeds,), "runs": (*runs,)}
    return parts


def names_of(claim: Claim) -> tuple[str, ...]:
    """The rows and columns of a claim."""
    return (claim.row, *claim.others, *claim.columns, *claim.less)


def _answer(claim: Claim, runs: pd.DataFrame, at_hand: Callable[[str], bool]) -> Answer:
    """What runs say of a claim. Of several rows the smallest lead counts; reproduced needs runs of all."""
    table, columns, rows, answers = find_table(claim.table), (*claim.columns, *claim.less), {}, []
    cells = {(cell.row, cell.column): cell for cell in table.cells}
    for row in (claim.row, *claim.others):
        if absent := [f"{row} / {column}" for column in columns if (row, column) not in cells]:
            raise UserError(
                f"the claim {claim.name} names a cell that {claim.table} does not have (got {absent[0]}); "
                "name a row and a column of the table."
            )
        rows[row] = [plan_cell(table, cells[row, column]) for column in columns]
    metric, planned = find_metric(cells[row, columns[0]].metric), [run for row in rows.values() for run in row]
    not_run = NOT_RUN if all(at_hand(name) for run in planned for name in run.setup.data_sets) else NO_DATA
    for than in claim.others:
        leads = [printed_lead(table, claim.row, than, part, metric) for part in (claim.columns, claim.less) if part]
        blank = Answer(replace(claim, than=than), metric, None if None in leads else leads[0] - sum(leads[1:]), not_run)
        answers.append(_compared(blank, rows[claim.row], rows[than], runs))
    sign = 1 if claim.direction == "higher" else -1
    paper = min((each.paper for each in answers if each.paper is not None), key=lambda lead: sign * lead, default=None)
    run = [each for each in answers if each.runs]
    if len(answers) == 1 or not run:
        return replace(answers[0], claim=claim, paper=paper)
    weakest_first = (CONTRADICTED, UNDECIDED, REPRODUCED)
    # The mean is NaN where there is no difference, which comes first.
    run.sort(key=lambda each: (weakest_first.index(each.verdict), each.difference.n > 0, sign * each.difference.mean))
    least, *others = run
    verdict, why, over = least.verdict, least.why, f"over {least.claim.than}"
    if len(others) == 1:
        over += f"; {others[0].ours} over {others[0].claim.than}"
    if len(run) < len(answers) and verdict != CONTRADICTED:
        verdict, why = UNDECIDED, f"{why}; {len(run)} of {len(answers)} others run".removeprefix("; ")
    reduced = next((each.reduced for each in run if each.reduced), "")
    folders = tuple(dict.fromkeys(folder for each in answers for folder in each.runs))
    return replace(least, claim=claim, paper=paper, verdict=verdict, why=why, reduced=reduced, over=over, runs=folders)


def _compared(blank: Answer, rows: Sequence[PlannedRun], others: Sequence[PlannedRun], runs: pd.DataFrame) -> Answer:
    """Judges a claim against one row by its best group of paired runs; returns `blank` without pairs.

    Runs in full go first; then those with the most seeds, the fewest options unlike the cell's, and the most rounds.
    """
    claim, metric, parts = blank.claim, blank.metric, []
    # The mean lead over `claim.columns` less that over `claim.less`.
    shares = [1 / len(claim.columns)] * len(claim.columns) + [-1 / len(claim.less) for _ in claim.less]
    for share, row, than in zip(shares, rows, others, strict=True):
        unlike = differences(row.settings, than.settings).keys() | {"post"}
        alike = [field.name for field in fields(RunConfig) if field.name not in unlike]
        first, second = (_candidates(claim, metric, cell, runs, alike) for cell in (row, than))
        part = first.merge(second, on=SHARED, suffixes=("", "_than")).drop_duplicates([*FORMS, "seed"])
        parts.append(part.assign(share=share))
    pairs = pd.concat(parts)
    pairs = pairs[pairs.groupby([*FORMS, "seed"])["share"].transform("size") == len(shares)]
    if pairs.empty:
        return blank

    def nearness(pairs: pd.DataFrame) -> tuple:
        first = pairs.iloc[0]
        row, both = first["departed"], first["departed"] | first["departed_than"]
        return not both, pairs["seed"].nunique(), -len(both), row.get("rounds", [inf])[0], *first[FORMS]

    pairs = max((group for _, group in pairs.groupby(FORMS)), key=nearness).sort_values("seed", kind="stable")
    departed = pairs.iloc[0]["departed_than"] | pairs.iloc[0]["departed"]
    leads = pairs[["value", "tail"]] - pairs[["value_than", "tail_than"]].to_numpy()
    leads = leads.mul(pairs["share"], axis=0).groupby(pairs["seed"]).sum(min_count=len(shares))
    difference, tail = (interval(leads[name].dropna().tolist()) for name in leads)
    lost = pairs[["value", "value_than"]].isna().groupby(pairs["seed"]).any().sum().tolist()
    verdict, why = judge(difference, claim.direction, lost, exact=metric.unit == "floats")
    counts = zip((claim.row, claim.than), lost, strict=True)
    without = [f"{name}: {count} of {len(leads)} without a value" for name, count in counts if count]
    return replace(
        blank, verdict=verdict, why="; ".join(filter(None, [why, *without])), difference=difference,
        tail=tail if metric.name == "selected" else NO_INTERVAL, reduced=differences_text(departed),
        seeds=tuple(leads.index), runs=tuple(dict.fromkeys(pairs[["folder", "folder_than"]].to_numpy().ravel())),
    )  # fmt: skip


def _candidates(
    claim: Claim, metric: Metric, cell: PlannedRun, runs: pd.DataFrame, alike: Sequence[str]
) -> pd.DataFrame:
    """The runs usable for a cell, also reduced ones that the claim allows; a pair shares the options `alike`."""
    candidates, planned, instead = [], cell.settings, {"eval_every": None, **claim.instead}
    for run in runs[runs["method"] == cell.setup.method.name].to_dict("records"):
        record = run["record"]
        departed = departures(record, run["settings"], planned, metric.needs)
        allowed = [
            is_smaller(name, value, full) or (name in instead and instead[name] in (None, value))
            for name, (value, full) in departed.items()
        ]
        # A run of less than a tenth of its rounds says nothing but what it sends and holds.
        enough = metric.unit == "floats" or 10 * record["config"]["rounds"] >= cell.setup.run.rounds
        if not (enough and all(allowed)):
            continue
        value, tail = (next(iter(read.values([record])), None) for read in (metric, find_metric("last-tenth")))
        if value is not None or metric.none == "never" or not metric.counts(record):
            form = json.dumps({name: value for name, (value, _) in departed.items()})
            core, options = run["numerics"].partition(".")[0], json.dumps([run["settings"].get(name) for name in alike])
            shared = run["seed"], run["images"], run["partition"], core, options
            candidates.append((*shared, form, departed, run["folder"], value, tail))
    columns = [*SHARED, "form", "departed", "folder", "value", "tail"]
    return pd.DataFrame(candidates, columns=columns, dtype=object).astype({"value": float, "tail": float})


def judge(difference: Interval, direction: str, lost: Sequence[int], *, exact: bool) -> tuple[str, str]:
    """Verdict on a claim, and why it is undecided.

    A run that diverged has no difference. Leaving it out is fair only where its row is behind.

    Args:
        difference: The row less the other one.
        direction: The paper's side of zero, "higher" or "lower".
        lost: How many seeds have no value for the row and for the other one.
        exact: Whether one pair suffices, as for counts of floats, in which chance has no part.
    """
    if not difference.n:
        return UNDECIDED, "no pair has a value"
    if difference.n < FEWEST and not exact:
        return UNDECIDED, f"n = {difference.n}"
    low, high = (difference.mean, difference.mean) if exact else (difference.low, difference.high)
    if low <= 0 <= high:
        return UNDECIDED, f"zero inside, n = {difference.n}"
    agrees = (low > 0) == (direction == "higher")
    if lost[0 if agrees else 1]:
        return UNDECIDED, "runs of the better one are lost"
    return REPRODUCED if agrees else CONTRADICTED, ""


NOTES = (
    "Ours: mean over seeds of the difference of two runs that share seed, partition and all options in which the two "
    "cells agree, with its 95 % interval (Student's t) and, in brackets, the number of seeds; of several rows, the "
    "smallest lead.",
    "Reproduced: the interval lies on the paper's side of zero; contradicted: on the other. Undecided: zero is inside, "
    f"there are fewer than {FEWEST} seeds, not every row has been run, or runs without a value are of the row ahead.",
    "In full: every option is the paper's. Reduced to: what was smaller or other. Decided by: the runs that it lacks.",
)


def claims_sheet(answers: Sequence[Answer]) -> Sheet:
    """The claims as a table; its last column has the commands that would decide a claim."""
    lines, values = [], []
    for answer in answers:
        claim, metric = answer.claim, answer.metric
        verdict = f"{answer.verdict}, {answer.why}" if answer.why else answer.verdict
        paper = MISSING if answer.paper is None else metric.text(answer.paper, "+")
        texts = [f"`{claim.name}` {claim.text}", verdict, paper, answer.ours, interval_text(metric, answer.tail)]
        said = answer.size if answer.runs else "", f"decided by `{answer.command}`" if answer.command else ""
        lines.append([*texts, "; ".join(filter(None, said)) or MISSING])
        values.append({
            "claim": claim.name, "text": claim.text, "table": claim.table, "paper": answer.paper,
            **{name: getattr(answer, name) for name in TEXTS}, "seeds": " ".join(map(str, answer.seeds)),
            **dict(zip(INTERVALS["difference"], answer.difference, strict=True)),
            **dict(zip(INTERVALS["tail"], answer.tail, strict=True)), "runs": "; ".join(map(str, answer.runs)),
        })  # fmt: skip
    titles = ["Claim", "Verdict", "Paper", "Ours", "Over the last tenth of the rounds", "Runs"]
    return Sheet(titles, lines, 6, values, notes=NOTES, marked_up=True)


def counted(answers: Sequence[Answer]) -> str:
    """How many claims have which verdict, in a sentence."""
    numbers = Counter(answer.verdict for answer in answers)
    return f"Of {len(answers)} claims: {', '.join(f'{count} {verdict}' for verdict, count in numbers.items())}."
