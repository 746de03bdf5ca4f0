"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with another one, or with several. A run counts for it that has all settings of the
cell it belongs to, but for sizes that may be smaller and for what the claim itself allows in place of the cell's; what
differs is said. Two runs are a pair if they have the same seed, partition, images and core, and all options of runs in
which the two cells agree.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from fedcli.data import datasets
from fedcli.declarations import Cell, Claim
from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results import comparison, plans
from fedcli.results.frame import ENDED, Record, departures, read_runs
from fedcli.results.metrics import Interval, Metric, find_metric, interval, seeds_needed
from fedcli.results.plans import Wanted, wanted
from fedcli.results.render import MISSING, Sheet
from fedcli.runs.config import SIZES, RunConfig, describe_reductions
from fedcli.runs.settings import differences, is_smaller, settings_text

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "undecided"
NOT_RUN, NO_DATA = "not run", "data not at hand"
VERDICTS = (REPRODUCED, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
FEWEST, MOST_SEEDS = 3, 30  # for a verdict; a claim that needs more is not decided by running more
TAIL = "last-tenth"
SHIPPED = "verdicts.csv"
RUN_OPTIONS = {field.name for field in dataclasses.fields(RunConfig)} - {"post"}


@dataclass(frozen=True)
class Evidence:
    """What the pairs of one size say of a claim.

    Attributes:
        verdict: One of `VERDICTS`.
        why: Why it is undecided; else empty.
        reduced: What is smaller or other than in the paper's cells; empty in full.
        seeds: Of the pairs.
        difference: The row less the other one; None where no pair has a difference.
        tail: The same of the mean accuracy over the last tenth of the rounds; None where the cells measure another
            thing.
        folders: The folders of all these runs; none where nothing has been run.
        lost: The runs that diverged, or never got where they should, in words.
        over: Of a claim on several rows, the row that the difference is on, in words, and what the others show.
    """

    verdict: str
    why: str = ""
    reduced: str = ""
    seeds: tuple[int, ...] = ()
    difference: Interval | None = None
    tail: Interval | None = None
    folders: tuple[Path, ...] = ()
    lost: str = ""
    over: str = ""

    @property
    def size(self) -> str:
        """The size of the runs beside the paper's; `MISSING` where there are none."""
        if not self.folders:
            return MISSING
        return f"reduced to {self.reduced}" if self.reduced else "in full"

    @property
    def judgement(self) -> str:
        """The verdict, and why it is none."""
        return f"{self.verdict}, {self.why}" if self.why else self.verdict


@dataclass(frozen=True)
class Answer:
    """A claim and what the records say of it.

    Attributes:
        claim: The claim.
        metric: What is compared.
        paper: The paper's difference, from the numbers it prints; None where it does not print both.
        evidence: The runs in full first, then the reduced ones with the most seeds; without runs it says so.
        open_data: Whether the images can be had.
        decided: What would decide it, see `fedcli.results.coverage.decided_by`; empty where nobody has asked.
    """

    claim: Claim
    metric: Metric
    paper: float | None
    evidence: tuple[Evidence, ...]
    open_data: bool = True
    decided: str = ""

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        return self.evidence[0].verdict

    @property
    def has_runs(self) -> bool:
        """Whether there are runs that say anything."""
        return bool(self.evidence[0].folders)

    @property
    def command(self) -> str:
        """What runs the rows and nothing else, in full, where nothing is decided and the data can be had; or empty."""
        return command(self.claim, self.seeds) if self.verdict in (UNDECIDED, NOT_RUN) and self.open_data else ""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that would decide it in full: three, and more only where these leave it open."""
        evidence, number = self.evidence[0], FEWEST
        left_open = evidence.size == "in full" and evidence.difference is not None and evidence.difference.n >= FEWEST
        if left_open and not evidence.difference.leaves_out_zero:
            number = seeds_needed(evidence.difference, MOST_SEEDS)
        seeds = find_table(self.claim.table).seeds
        return (*seeds, *range(seeds[-1] + 1, seeds[-1] + 1 + number - len(seeds)))

    @property
    def paper_text(self) -> str:
        """The paper's difference."""
        return MISSING if self.paper is None else self.metric.signed(self.paper)

    def ours(self, evidence: Evidence) -> str:
        """Our difference with its interval, and the runs that are lost."""
        difference = f"{difference_text(self.metric, evidence.difference)} {evidence.over}".rstrip()
        return "; ".join(filter(None, (difference, evidence.lost)))


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
    known = [answer(claim, runs, at_hand) for claim in claims]
    return sorted(known, key=lambda each: VERDICTS.index(each.verdict))


def with_shipped(known: Iterable[Answer]) -> list[Answer]:
    """The answers, where there is no run those that the records of the project gave when it was packed.

    `fedcli.papers` holds them as `verdicts.csv`, since the records themselves are not installed.
    """
    table = pd.read_csv(files("fedcli.papers").joinpath(SHIPPED), keep_default_na=False, na_values={})
    rows = {name: members.to_dict("records") for name, members in table.groupby("claim")}
    filled = []
    for answer in known:
        evidence = [_shipped_evidence(row) for row in rows.get(answer.claim.name, ()) if row["runs"]]
        filled.append(answer if answer.has_runs or not evidence else replace(answer, evidence=tuple(evidence)))
    return sorted(filled, key=lambda each: VERDICTS.index(each.verdict))


def _shipped_evidence(row: Mapping[str, str]) -> Evidence:
    """What a line of `verdicts.csv` says; the inverse of `_values`."""

    def read(*names: str) -> Interval | None:
        mean, low, high, n = (float(row[name]) if str(row[name]) else None for name in names)
        return None if mean is None else Interval(mean, low, high, int(n))

    seeds = tuple(map(int, str(row["seeds"]).split()))
    folders = tuple(map(Path, row["runs"].split("; ")))
    difference, tail = read("ours", "low", "high", "n"), read("tail", "tail_low", "tail_high", "tail_n")
    texts = row["lost"], row["over"]
    return Evidence(row["verdict"], row["why"], row["reduced"], seeds, difference, tail, folders, *texts)


def ended_runs(folders: Iterable[Path]) -> pd.DataFrame:
    """The runs under folders that have finished or diverged; what cannot be read is left out."""
    runs = read_runs(folders)
    return runs[runs["state"].isin(ENDED)]


def answer(claim: Claim, runs: pd.DataFrame, at_hand: Callable[[str], bool]) -> Answer:
    """What runs say of one claim.

    Args:
        claim: The claim.
        runs: See `ended_runs`.
        at_hand: See `answers`.
    """
    singles = [_answer(replace(claim, than=than), runs, at_hand) for than in claim.others]
    return singles[0] if len(singles) == 1 else _on_all(claim, singles)


def cells_of(claim: Claim) -> list[list[Cell]]:
    """The cells that a claim compares: a list for each column, the row's cell before those of the others.

    Raises:
        UserError: If the table lacks one.
    """
    cells = {(cell.row, cell.column): cell for cell in find_table(claim.table).cells}
    places = [[(row, column) for row in (claim.row, *claim.others)] for column in (*claim.columns, *claim.less)]
    for place in (place for column in places for place in column):
        if place not in cells:
            raise UserError(
                f"the claim {claim.name} names a cell that {claim.table} does not have (got {' / '.join(place)}); "
                "name a row and a column of the table."
            )
    return [[cells[place] for place in column] for column in places]


def _answer(claim: Claim, runs: pd.DataFrame, at_hand: Callable[[str], bool]) -> Answer:
    """What runs say of a claim on one other row."""
    pairs = [tuple(map(wanted, pair)) for pair in cells_of(claim)]
    table, metric = find_table(claim.table), pairs[0][0].metric
    paper = comparison.printed_lead(table, claim.row, claim.than, claim.columns, metric)
    if paper is not None and claim.less:
        less = comparison.printed_lead(table, claim.row, claim.than, claim.less, metric)
        paper = None if less is None else paper - less
    evidence = _evidence(claim, pairs, runs)
    open_data = all(map(at_hand, {name for pair in pairs for run in pair for name in run.data}))
    return Answer(claim, metric, paper, evidence or (Evidence(NOT_RUN if open_data else NO_DATA),), open_data)


def _on_all(claim: Claim, singles: Sequence[Answer]) -> Answer:
    """A claim on several rows: the smallest lead counts, and it is reproduced only where each row has been run."""
    sign = 1 if claim.direction == "higher" else -1
    printed = [single.paper for single in singles if single.paper is not None]
    paper = min(printed, key=lambda lead: sign * lead, default=None)
    run = [single for single in singles if single.has_runs]
    if not run:
        return replace(singles[0], claim=claim, paper=paper)
    severity = (CONTRADICTED, UNDECIDED, REPRODUCED)

    def strength(single: Answer) -> tuple:
        difference = single.evidence[0].difference
        return severity.index(single.verdict), float("-inf") if difference is None else sign * difference.mean

    weakest, *others = sorted(run, key=strength)
    shown = weakest.evidence[0]
    over = f"over {weakest.claim.than}"
    if len(others) == 1:
        over += f"; {others[0].ours(others[0].evidence[0])} over {others[0].claim.than}"
    verdict, why = shown.verdict, shown.why
    if verdict == UNDECIDED and len(others) == 1 and others[0].verdict == REPRODUCED:
        why += f"; ahead of {others[0].claim.than} alone"
    if len(run) < len(singles) and verdict != CONTRADICTED:
        lacking = f"{len(run)} of {len(singles)} others run"
        verdict, why = UNDECIDED, f"{why}; {lacking}" if why else lacking
    evidence = [single.evidence[0] for single in run]
    whole = replace(
        shown, verdict=verdict, why=why, over=over,
        reduced=shown.reduced or next((one.reduced for one in evidence if one.reduced), ""),
        folders=tuple(dict.fromkeys(folder for one in evidence for folder in one.folders)),
    )  # fmt: skip
    return Answer(claim, weakest.metric, paper, (whole,), all(single.open_data for single in singles))


def _lead(claim: Claim, differences: Sequence[float]) -> float:
    """The mean over a claim's columns, less that over those which are taken off."""
    split = len(claim.columns)
    return fmean(differences[:split]) - (fmean(differences[split:]) if claim.less else 0)


def _evidence(claim: Claim, columns: Sequence[tuple[Wanted, Wanted]], runs: pd.DataFrame) -> tuple[Evidence, ...]:
    """The best in full, and the best reduced: that with the most seeds, of these the one nearest to the paper's."""
    pairs = [_pairs(claim, row, than, runs).assign(column=number) for number, (row, than) in enumerate(columns)]
    full, reduced = [], []
    for departed, group in pd.concat(pairs).groupby(["departed_row", "departed_than"], sort=False):
        whole = group.groupby("seed").filter(lambda members: len(members) == len(columns))
        if whole.empty:
            continue
        row, than = map(json.loads, departed)
        found = _judged(claim, columns[0], row, than, whole)
        if row or than:
            # The most seeds first, then the fewest differences, then the longest runs.
            nearness = (len(found.seeds), -len(row | than), row.get("rounds", float("inf")), str(departed))
            reduced.append((nearness, found))
        else:
            full.append(found)
    return (*full, *(found for _, found in sorted(reduced, reverse=True)[:1]))


def _pairs(claim: Claim, row: Wanted, than: Wanted, runs: pd.DataFrame) -> pd.DataFrame:
    """The pairs of runs of two cells, one a seed and a size, with what both measure.

    Returns:
        Columns `seed`, `departed_row` and `departed_than` (what differs from the cells, as JSON), `folder_…` and
        `value_…` of both runs (None of one that diverged), and `tail`, the difference of the means over the last tenth
        of the rounds.
    """
    sides = [_candidates(claim, cell, runs) for cell in (row, than)]
    shared = ["seed", "images", "partition", "core"]
    pairs = sides[0].merge(sides[1], on=shared, suffixes=("_row", "_than"))
    alike, tails = [], []
    for pair in pairs.to_dict("records"):
        planned = differences(row.settings, than.settings)
        other = differences(pair["settings_row"], pair["settings_than"])
        alike.append(all(name in planned or name not in RUN_OPTIONS for name in other))
        ends = find_metric(TAIL).values([pair["record_row"], pair["record_than"]])
        comparable = row.metric.name == "selected" and "eval_every" not in other and len(ends) == 2
        tails.append(ends[0] - ends[1] if comparable else None)
    pairs = pairs.assign(tail=tails)[pd.Series(alike, dtype=bool)]
    return pairs.drop_duplicates(["seed", "departed_row", "departed_than"])


def _candidates(claim: Claim, cell: Wanted, runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that a cell can be read from, also in a smaller form, with what differs and what they measure."""
    found = []
    for run in runs[runs["method"] == cell.setup.method.name].to_dict("records"):
        record, metric = run["record"], cell.metric
        if metric.unit != "floats" and too_short(record["config"]["rounds"], cell.setup.run.rounds):
            continue
        departed = departures(run, cell.settings, metric)
        allowed = [_is_allowed(name, *values, claim, metric) for name, values in departed.items()]
        if all(allowed) and says_something(record, metric):
            about = {name: run[name] for name in ("folder", "record", "settings", "seed", "images", "partition")}
            about["core"] = run["numerics"].partition(".")[0]
            about["departed"] = json.dumps({name: value for name, (value, _) in departed.items()}, sort_keys=True)
            about["value"] = _value(record, metric)
            found.append(about)
    columns = ("folder", "record", "settings", "seed", "images", "partition", "core", "departed", "value")
    return pd.DataFrame(found, columns=columns, dtype=object)


def _is_allowed(name: str, value: Any, planned: Any, claim: Claim, metric: Metric) -> bool:
    """Whether a run may depart so from a claim's cell."""
    if is_smaller(name, value, planned) or (name in claim.instead and claim.instead[name] in (None, value)):
        return True
    return name == "eval_every" and metric.needs != "drift"


def too_short(rounds: int, planned: int) -> bool:
    """Whether a run has less than a tenth of its rounds: what it learnt says nothing, what it sends and holds does."""
    return 10 * rounds < planned


def says_something(record: Record, metric: Metric) -> bool:
    """Whether a run has a value, or has none because it diverged or never got there."""
    return _value(record, metric) is not None or not metric.counts(record) or metric.none == "never"


def _value(record: Record, metric: Metric) -> float | None:
    """The value of a run; None of one that diverged or has none."""
    return metric.value(record) if metric.counts(record) else None


def _judged(
    claim: Claim,
    cells: tuple[Wanted, Wanted],
    departed_row: Mapping[str, Any],
    departed_than: Mapping[str, Any],
    pairs: pd.DataFrame,
) -> Evidence:
    """The verdict of pairs of one size.

    Args:
        claim: The claim.
        cells: The two cells of the first column.
        departed_row: What differs from the first of them.
        departed_than: What differs from the second.
        pairs: See `_pairs`, with every column for each seed.
    """
    metric = cells[0].metric
    values, tails, lost = [], [], [0, 0]
    for _, members in pairs.groupby("seed"):
        failed = [members[side].isna().any() for side in ("value_row", "value_than")]
        lost = [count + one for count, one in zip(lost, failed, strict=True)]
        if not any(failed):
            members = members.sort_values("column")
            values.append(_lead(claim, (members["value_row"] - members["value_than"]).tolist()))
            tails += [] if members["tail"].isna().any() else [_lead(claim, members["tail"].tolist())]
    difference, tail = interval(values), interval(tails)
    verdict, why = judge(difference, claim.direction, *map(int, lost), exact=metric.unit == "floats")
    event = "never got there" if metric.none == "never" else "diverged"
    seeds = sorted(pairs["seed"].unique().tolist())
    words = [
        f"{name}: {count} of {len(seeds)} {event}"
        for name, count in zip((claim.row, claim.than), lost, strict=True)
        if count
    ]
    folders = pairs.sort_values("seed", kind="stable")[["folder_row", "folder_than"]].to_numpy().ravel().tolist()
    reduced = _reduction(cells, (departed_row, departed_than))
    return Evidence(
        verdict, why, reduced, tuple(seeds), difference, tail, tuple(dict.fromkeys(folders)), "; ".join(words)
    )


def judge(
    difference: Interval | None, direction: str, lost: int = 0, lost_other: int = 0, *, exact: bool = False
) -> tuple[str, str]:
    """Verdict on a claim, and why it is undecided.

    A run that diverged has no difference. Leaving it out is fair to a verdict only as long as it was the other's run:
    otherwise the verdict is for a method that failed.

    Args:
        difference: Of the row less the other one.
        direction: The paper's side of zero, "higher" or "lower".
        lost: Seeds whose run of the row has no value because it diverged.
        lost_other: The same of the other row.
        exact: Whether chance has no part in the values, as in counts of floats; then one pair suffices.
    """
    if difference is None:
        return UNDECIDED, "diverged"
    if difference.n < FEWEST and not exact:
        return UNDECIDED, f"n = {difference.n}"
    low, high = (difference.mean, difference.mean) if exact else (difference.low, difference.high)
    if low <= 0 <= high:
        return UNDECIDED, f"zero inside, n = {difference.n}"
    agrees = (low > 0) == (direction == "higher")
    if failed := lost if agrees else lost_other:
        return UNDECIDED, f"the better one diverged with {failed} seed{'s' * (failed > 1)}"
    return REPRODUCED if agrees else CONTRADICTED, ""


def _reduction(cells: tuple[Wanted, Wanted], departed: Sequence[Mapping[str, Any]]) -> str:
    """What differs from the paper's cells, in words, each option once: the row's, then what only the other one has."""
    sizes: dict[str, str] = {}
    others: dict[str, str] = {}
    for cell, differing in zip(cells, departed, strict=True):
        for name, value in differing.items():
            full = cell.settings.get(name)
            if name == "train_examples" and full is None:
                full = plans.train_size(cell.settings["dataset"])
            if name == "dataset":
                sizes.setdefault(name, f"{value} for {full}")
            elif name == "eval_every":
                sizes.setdefault(name, f"tests every {value} rounds")
            elif is_smaller(name, value, full):
                sizes.setdefault(name, describe_reductions([{"what": name, "protocol": full, "run": value}]))
            elif name not in RUN_OPTIONS:
                sizes.setdefault(name, f"{settings_text({name: value})} for {full}")
            elif name not in ("protocol", *SIZES):  # the first is told by the data set
                others.setdefault(name, name.replace("_", " "))
    return ", ".join([*sizes.values(), *([f"another {', '.join(others.values())}"] if others else [])])


NOTES = (
    "Ours: mean over seeds of the difference of two runs that share seed, partition and all options in which the two "
    "cells agree, with its 95 % interval (Student's t) and, in brackets, the number of seeds.",
    "Over the last tenth of the rounds: the same of the mean over them, where a cell is the accuracy in one round.",
    "Reproduced: the interval lies on the paper's side of zero; contradicted: on the other. Undecided: zero is inside, "
    f"there are fewer than {FEWEST} seeds, or leaving diverged runs out would favour the one that is ahead.",
    "In full: every option is the paper's. Reduced to: what was smaller or other, the same for both where the paper "
    "has it so. Runs of fewer than a tenth of the rounds count only for what is sent and held.",
    "Over a row: a claim on several rows shows its smallest lead, and counts as reproduced where each has been run.",
    "Not decided: the command runs the rows in full, with --dry-run it says what that takes, and --rounds, "
    "--local-epochs and --train-examples make it smaller.",
)


def difference_text(metric: Metric, found: Interval | None) -> str:
    """A difference with its interval and the number of seeds, `+9.70 [+7.10, +12.30] (3)`; of counts it alone."""
    if found is None:
        return MISSING
    return interval_text(metric, found) + ("" if metric.unit == "floats" else f" ({found.n})")


def interval_text(metric: Metric, found: Interval, signed: bool = True) -> str:
    """A mean with its interval, `+9.70 [+7.10, +12.30]`; of counts, and of one value, the mean alone."""
    text = metric.signed if signed else metric.text
    if metric.unit == "floats" or found.low is None:
        return text(found.mean)
    return f"{text(found.mean)} [{text(found.low)}, {text(found.high)}]"


def command(claim: Claim, seeds: Sequence[int] = ()) -> str:
    """The command that runs the rows of a claim and nothing else, in full, and what measures their features.

    Args:
        claim: The claim.
        seeds: In the place of the table's own.
    """
    names = (claim.row, *claim.others, *claim.columns, *claim.less)
    table = find_table(claim.table)
    steps = [["fedcli", "table", claim.table, *(word for name in names for word in ("--only", name))]]
    if seeds and tuple(seeds) != table.seeds:
        steps[0] += ["--seeds", ",".join(map(str, seeds))]
    if any(find_metric(cell.metric).after_the_run for cell in table.cells if cell.column in claim.columns):
        steps.append(["fedcli", "quality", str(plans.home_of(table))])
    return " && ".join(map(shlex.join, steps))


def sheet(found: Sequence[Answer], runs: Callable[[Evidence], str] = lambda evidence: evidence.size) -> Sheet:
    """The claims as a table to be written; of its values each is a size of runs.

    Args:
        found: The claims.
        runs: What is said of the runs of one size.
    """
    blocks = []
    for answer in found:
        block = []
        for evidence in answer.evidence:
            texts = [f"`{answer.claim.name}` {answer.claim.text}", evidence.judgement, answer.paper_text]
            texts += [answer.ours(evidence), difference_text(answer.metric, evidence.tail)]
            said = [runs(evidence)] if evidence.folders else []
            deciding = [answer.decided, f"`{answer.command}`" if answer.command else ""]
            said += [] if block else [", ".join(filter(None, deciding))]
            texts.append("; decided by ".join(filter(None, said)) or MISSING)
            if block:  # said in the line above
                texts[0] = texts[2] = ""
            block.append([(text, "") for text in texts])
        blocks.append(block)
    return Sheet(
        ["Claim", "Verdict", "Paper", "Ours", "Over the last tenth of the rounds", "Runs"], blocks, 6,
        [row for answer in found for row in _values(answer)], notes=NOTES, marked_up=True,
    )  # fmt: skip


def _values(answer: Answer) -> list[dict[str, Any]]:
    """A claim as rows with full precision."""
    claim = answer.claim
    head = {
        "claim": claim.name, "text": claim.text, "table": claim.table, "row": claim.row,
        "than": "; ".join(claim.others), "columns": "; ".join(claim.columns), "less": "; ".join(claim.less),
        "metric": answer.metric.name, "direction": claim.direction,
        "paper": answer.paper,
    }  # fmt: skip
    empty: tuple[None, ...] = (None,) * 4
    return [
        {
            **head, "verdict": evidence.verdict, "why": evidence.why, "reduced": evidence.reduced,
            "seeds": " ".join(map(str, evidence.seeds)),
            **dict(zip(("ours", "low", "high", "n"), evidence.difference or empty, strict=True)),
            **dict(zip(("tail", "tail_low", "tail_high", "tail_n"), evidence.tail or empty, strict=True)),
            "lost": evidence.lost, "over": evidence.over,
            "runs": "; ".join(map(str, evidence.folders)),
        }
        for evidence in answer.evidence
    ]  # fmt: skip


def counted(found: Sequence[Answer]) -> str:
    """How many claims have which verdict, in a sentence."""
    numbers = [(verdict, sum(one.verdict == verdict for one in found)) for verdict in VERDICTS]
    return f"Of {len(found)} claims: {', '.join(f'{number} {verdict}' for verdict, number in numbers if number)}."
