"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with one or more others. A run counts if it has the settings of its cell, smaller
sizes, or values that the claim allows; what differs is said. Two runs are a pair if they share seed, partition, images,
numerics of the core, and all options in which the two cells agree.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd

from fedcli.data import datasets
from fedcli.declarations import Cell, Claim, Table
from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results.frame import read_runs
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.paper_tables import printed_lead, printed_value
from fedcli.results.plans import PlannedRun, home_of, plan_cell
from fedcli.results.render import MISSING, Sheet
from fedcli.results.statistics import NO_INTERVAL, Interval, interval, interval_text, seeds_needed
from fedcli.runs.identity import code_changes, departures, differences, differences_text, is_smaller
from fedcli.runs.options import RunConfig
from fedcli.runs.record import ENDED

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "undecided"
BY_CONSTRUCTION, NOT_RUN, NO_DATA = "by construction", "not run", "data not at hand"
VERDICTS = (REPRODUCED, BY_CONSTRUCTION, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
OPEN = (UNDECIDED, NOT_RUN, NO_DATA)  # what more runs would change
FEWEST, MOST_SEEDS = 3, 30  # for a verdict
SHIPPED = "verdicts.csv"
# Columns of the CSV.
TEXTS = ("verdict", "why", "reduced", "over", "tail_over")
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
        seeds = find_table(self.claim.table).seeds
        number = FEWEST
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
    runs = read_runs(folders)
    packed = _shipped() if shipped else {}
    of_one_code = ~runs["record"].map(code_changes).astype(bool)
    counted = runs[runs["state"].isin(ENDED) & of_one_code]
    answers = [_answer(claim, counted, at_hand) for claim in claims]
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
        seeds = map(int, row["seeds"].split())
        runs = map(Path, row["runs"].split("; "))
        parts[row["claim"]] = {name: row[name] for name in TEXTS} | intervals | {"seeds": (*seeds,), "runs": (*runs,)}
    return parts


def names_of(claim: Claim) -> tuple[str, ...]:
    """The rows and columns of a claim."""
    rows = claim.row, *claim.others, *claim.elsewhere.values()
    return (*rows, *claim.columns, *claim.less, *claim.than_columns)


@dataclass(frozen=True)
class Contrast:
    """Two cells of a table that a claim compares."""

    row: Cell
    than: Cell
    share: float  # of their difference in the claim's; the mean over `columns` less that over `less`


def contrasts(claim: Claim, table: Table, than: str) -> list[Contrast]:
    """The cells in which a claim's row is compared with another row.

    Raises:
        UserError: If the table has not such a cell.
    """
    cells = {(cell.row, cell.column): cell for cell in table.cells}

    def cell_of(row: str, column: str) -> Cell:
        name = row if (row, column) in cells else claim.elsewhere.get(row, row)
        if (name, column) not in cells:
            raise UserError(
                f"the claim {claim.name} names a cell that {claim.table} does not have (got {name} / {column}); "
                "name a row and a column of the table."
            )
        return cells[name, column]

    compared = []
    than_columns = claim.than_columns or claim.columns
    for column, than_column in zip(claim.columns, than_columns, strict=True):
        compared.append(Contrast(cell_of(claim.row, column), cell_of(than, than_column), 1 / len(claim.columns)))
    for column in claim.less:
        compared.append(Contrast(cell_of(claim.row, column), cell_of(than, column), -1 / len(claim.less)))
    return compared


def _paper_lead(claim: Claim, table: Table, than: str, compared: Sequence[Contrast], metric: Metric) -> float | None:
    """The paper's lead of a claim's row on another; None where it prints no number for it."""
    if not (claim.elsewhere or claim.than_columns):
        whole = printed_lead(table, claim.row, than, claim.columns, metric)
        if not claim.less or whole is None:
            return whole
        subtracted = printed_lead(table, claim.row, than, claim.less, metric)
        return None if subtracted is None else whole - subtracted
    lead = 0.0
    for pair in compared:
        value = printed_value(table, pair.row.row, pair.row.column, metric)
        other = printed_value(table, pair.than.row, pair.than.column, metric)
        if value is None or other is None:
            return None
        lead += pair.share * (value - other)
    return lead


def _answer(claim: Claim, runs: pd.DataFrame, at_hand: Callable[[str], bool]) -> Answer:
    """What runs say of a claim. Of several rows the smallest lead counts; reproduced needs runs of all."""
    table = find_table(claim.table)
    compared = {than: contrasts(claim, table, than) for than in claim.others}
    first = compared[claim.others[0]][0].row
    metric = find_metric(first.metric)
    cells = [cell for pairs in compared.values() for pair in pairs for cell in (pair.row, pair.than)]
    planned = {id(cell): plan_cell(table, cell) for cell in cells}
    data_sets = {name for run in planned.values() for name in run.setup.data_sets}
    papers = [_paper_lead(claim, table, than, compared[than], metric) for than in claim.others]
    sign = 1 if claim.direction == "higher" else -1
    blank = Answer(
        claim,
        metric,
        min((lead for lead in papers if lead is not None), key=lambda lead: sign * lead, default=None),
        NOT_RUN if all(map(at_hand, data_sets)) else NO_DATA,
        text_has=planned[id(first)].setup.protocol.text_has,
    )
    pairs = {than: _pairs(claim, compared[than], planned, runs) for than in claim.others}
    form = _common_form(pairs)
    pairs = {than: part[part["form"] == form] for than, part in pairs.items()}
    answers = {than: _compared(blank, than, part) for than, part in pairs.items() if not part.empty}
    if not answers:
        return blank
    answer = _weakest(answers, blank) if len(claim.others) > 1 else answers[claim.others[0]]
    if answer.verdict == REPRODUCED and claim.construction:
        return replace(answer, verdict=BY_CONSTRUCTION, why=claim.construction)
    return answer


def _weakest(answers: Mapping[str, Answer], blank: Answer) -> Answer:
    """The answer by the row on which the lead is smallest.

    Args:
        answers: By the rows that have runs.
        blank: The answer without runs.
    """
    claim = blank.claim
    sign = 1 if blank.claim.direction == "higher" else -1
    weakest_first = (CONTRADICTED, UNDECIDED, REPRODUCED)

    def strength(than: str) -> tuple:
        each = answers[than]  # the mean is NaN where there is no difference, which comes first
        return weakest_first.index(each.verdict), each.difference.n > 0, sign * each.difference.mean

    least, *others = sorted(answers, key=strength)
    verdict = answers[least].verdict
    why = answers[least].why
    over = f"over {least}"
    if len(others) == 1:
        over += f"; {answers[others[0]].ours} over {others[0]}"
    control, explanation = claim.control or ("", "")
    leads_elsewhere = bool(others) and all(answers[than].verdict == REPRODUCED for than in others)
    if least == control and verdict == UNDECIDED and leads_elsewhere:
        why = f"{explanation} explains the lead as far as told; {why}"
    if len(answers) < len(claim.others) and verdict != CONTRADICTED:
        verdict = UNDECIDED
        why = f"{why}; {len(answers)} of {len(claim.others)} others run".removeprefix("; ")
    tails = {than: each.tail for than, each in answers.items() if each.tail.n}
    tail_over = min(tails, key=lambda than: sign * tails[than].mean, default="")
    return replace(
        answers[least],
        verdict=verdict,
        why=why,
        reduced=next((answers[than].reduced for than in (least, *others) if answers[than].reduced), ""),
        over=over,
        tail=tails.get(tail_over, NO_INTERVAL),
        tail_over=f"over {tail_over}" if tail_over not in ("", least) else "",
        runs=tuple(dict.fromkeys(folder for each in answers.values() for folder in each.runs)),
        pairs=tuple(pair for each in answers.values() for pair in each.pairs),
    )


def _pairs(
    claim: Claim, compared: Sequence[Contrast], planned: Mapping[int, PlannedRun], runs: pd.DataFrame
) -> pd.DataFrame:
    """The pairs of runs of a claim's row and another, a row a pair and a column of the claim.

    Of one form, the options that are not as in the cells, only seeds count that have all columns.

    Args:
        claim: The claim.
        compared: The cells.
        planned: The run of each cell, by its `id`.
        runs: All that have ended.
    """
    parts = []
    for contrast in compared:
        row = planned[id(contrast.row)]
        than = planned[id(contrast.than)]
        unlike = differences(row.settings, than.settings).keys() | {"post"}
        alike = [field.name for field in fields(RunConfig) if field.name not in unlike]
        shared = [name for name in SHARED if name != "partition" or not unlike & {"partition", "partition_seed"}]
        first = _candidates(claim, find_metric(contrast.row.metric), row, runs, alike)
        second = _candidates(claim, find_metric(contrast.than.metric), than, runs, alike)
        part = first.merge(second, on=shared, suffixes=("", "_than"))
        of_one_rule = [bool(rules & others) for rules, others in zip(part["rules"], part["rules_than"], strict=True)]
        part = part[pd.Series(of_one_rule, part.index, dtype=bool)].drop_duplicates([*FORMS, "seed"])
        parts.append(part.assign(share=contrast.share, metric=contrast.row.metric, metric_than=contrast.than.metric))
    pairs = pd.concat(parts)
    return pairs[pairs.groupby([*FORMS, "seed"])["share"].transform("size") == len(compared)]


def _nearness(pairs: pd.DataFrame) -> tuple:
    """How near pairs of one form are to the paper's: in full, with the most seeds, the fewest other options."""
    first = pairs.iloc[0]
    row = first["departed"]
    both = first["departed"] | first["departed_than"]
    return not both, pairs["seed"].nunique(), -len(both), row.get("rounds", [inf])[0], *first[FORMS]


def _common_form(pairs: Mapping[str, pd.DataFrame]) -> str | None:
    """The form of the row's runs in which it is compared with the most rows, then the one nearest to the paper's.

    A lead on one row in one form and on another row in another form are no leads of one claim.
    """
    nearest: dict[str, list[tuple]] = {}
    for part in pairs.values():
        for form, of_form in part.groupby("form"):
            nearest.setdefault(form, []).append(max(_nearness(group) for _, group in of_form.groupby(FORMS)))
    return max(nearest, key=lambda form: (len(nearest[form]), min(nearest[form])), default=None)


def _compared(blank: Answer, than: str, pairs: pd.DataFrame) -> Answer:
    """Judges a claim against one row by the group of pairs that is nearest to the paper's."""
    claim = blank.claim
    metric = blank.metric
    pairs = max((group for _, group in pairs.groupby(FORMS)), key=_nearness).sort_values("seed", kind="stable")
    departed = pairs.iloc[0]["departed_than"] | pairs.iloc[0]["departed"]
    columns = pairs["seed"].value_counts().max()
    leads = pairs[["value", "tail"]] - pairs[["value_than", "tail_than"]].to_numpy()
    leads = leads.mul(pairs["share"], axis=0).groupby(pairs["seed"]).sum(min_count=columns)
    difference, tail = (interval(leads[name].dropna().tolist()) for name in leads)
    lost = pairs[["value", "value_than"]].isna().groupby(pairs["seed"]).any().sum().tolist()
    verdict, why = judge(difference, claim.direction, lost, exact=metric.unit == "floats")
    counts = zip((claim.row, than), lost, strict=True)
    without = [f"{name}: {count} of {len(leads)} without a value" for name, count in counts if count]
    kept = pairs[["seed", "share", "metric", "folder", "metric_than", "folder_than"]].assign(than=than)
    return replace(
        blank,
        verdict=verdict,
        why="; ".join(filter(None, [why, *without])),
        difference=difference,
        tail=tail if metric.name == "selected" else NO_INTERVAL,
        reduced=differences_text(departed),
        seeds=tuple(leads.index),
        runs=tuple(dict.fromkeys(pairs[["folder", "folder_than"]].to_numpy().ravel())),
        pairs=tuple(kept.to_dict("records")),
    )


def _candidates(
    claim: Claim, metric: Metric, cell: PlannedRun, runs: pd.DataFrame, alike: Sequence[str]
) -> pd.DataFrame:
    """The runs usable for a cell, also reduced ones that the claim allows; a pair shares the options `alike`."""
    candidates = []
    planned = cell.settings
    instead = {"eval_every": None, **claim.instead}
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
            candidate = {
                "seed": run["seed"],
                "images": run["images"],
                "partition": run["partition"],
                "core": run["numerics"].partition(".")[0],
                "options": json.dumps([run["settings"].get(name) for name in alike]),
                "form": form,
                "departed": departed,
                "folder": run["folder"],
                "value": value,
                "tail": tail,
                "rules": metric.rules(record) if value is not None else {"last", "selected"},
            }
            candidates.append(candidate)
    columns = [*SHARED, "form", "departed", "folder", "value", "tail", "rules"]
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
    "In full: every option is the paper's; by the authors' code where text and code differ, else by the text. Reduced "
    "to: what was smaller or other. Decided by: the runs that it lacks.",
    "By construction: the runs agree, and could not do otherwise; it is not counted as reproduced.",
    "Each claim is judged by its own interval, with no correction for their number: of twenty intervals of 95 % one is "
    "expected to miss what it is of.",
)


def claims_sheet(answers: Sequence[Answer]) -> Sheet:
    """The claims as a table; its last column has the commands that would decide a claim."""
    lines = []
    values = []
    for answer in answers:
        claim = answer.claim
        metric = answer.metric
        verdict = f"{answer.verdict}, {answer.why}" if answer.why else answer.verdict
        paper = MISSING if answer.paper is None else metric.text(answer.paper, "+")
        texts = [f"`{claim.name}` {claim.text}", verdict, paper, answer.ours, answer.our_tail]
        said = answer.size if answer.runs else "", f"decided by `{answer.command}`" if answer.command else ""
        lines.append([*texts, "; ".join(filter(None, said)) or MISSING])
        values.append({
            "claim": claim.name, "text": claim.text, "table": claim.table, "metric": metric.name, "row": claim.row,
            "than": "; ".join(claim.others), "columns": "; ".join(claim.columns), "direction": claim.direction,
            "paper": answer.paper,
            **{name: getattr(answer, name) for name in TEXTS}, "seeds": " ".join(map(str, answer.seeds)),
            **dict(zip(INTERVALS["difference"], answer.difference, strict=True)),
            **dict(zip(INTERVALS["tail"], answer.tail, strict=True)), "runs": "; ".join(map(str, answer.runs)),
            "pairs": json.dumps(answer.pairs, default=str),
        })  # fmt: skip
    titles = ["Claim", "Verdict", "Paper", "Ours", "Over the last tenth of the rounds", "Runs"]
    return Sheet(titles, lines, 6, values, notes=NOTES, marked_up=True)


def counted(answers: Sequence[Answer]) -> str:
    """How many claims have which verdict, in a sentence."""
    numbers = Counter(answer.verdict for answer in answers)
    return f"Of {len(answers)} claims: {', '.join(f'{count} {verdict}' for verdict, count in numbers.items())}."
