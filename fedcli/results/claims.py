"""The papers' claims with verdicts, from records alone.

A claim compares a row of a table with another one, or with several. A run counts for it that has all options of the
cell it belongs to, but for sizes that may be smaller and for what the claim itself allows in place of the cell's; what
differs is said. Two runs are a pair if they have the same seed, partition, images and core, and all options of runs in
which the two cells agree.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedcli.data import datasets
from fedcli.declarations import Cell, Claim, Method
from fedcli.errors import UserError
from fedcli.registry import find_method, find_table
from fedcli.results import comparison, reproduce
from fedcli.results.metrics import Interval, Metric, find_metric, interval, seeds_needed
from fedcli.results.render import MISSING, Sheet
from fedcli.results.tables import NOT_IN_IDENTITY, settings_text
from fedcli.runs.config import SIZES, RunConfig, Setup, describe_reductions, recorded_fields, recorded_value, resolve
from fedcli.runs.records import numerics_of

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "undecided"
NOT_RUN, NO_DATA = "not run", "data not at hand"
VERDICTS = (REPRODUCED, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
FEWEST, MOST_SEEDS = 3, 30  # for a verdict; a claim that needs more is not decided by running more
TAIL = "last-tenth"
Record = dict[str, Any]
Runs = Mapping[str, Sequence[tuple[Path, Record]]]


class Wanted(NamedTuple):
    """A cell as a run.

    Attributes:
        method: What is run.
        setup: With seed 0.
        metric: What is read.
    """

    method: Method
    setup: Setup
    metric: Metric

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets that it reads."""
        return tuple(filter(None, (self.setup.run.dataset, self.setup.run.public_dataset)))

    @property
    def method_options(self) -> set[str]:
        """The names of the method's own options."""
        return {field.name for field in dataclasses.fields(self.method.config)}

    def values(self, seed: int) -> dict[str, Any]:
        """All options that a result depends on, with that seed."""
        found = {name: value for name, value in self.setup.values().items() if name not in NOT_IN_IDENTITY}
        if self.setup.origin["partition_seed"] == "seed":
            found["partition_seed"] = seed
        if found["public_dataset"] is None:  # then the other options of public images say nothing
            found = {name: value for name, value in found.items() if not name.startswith("public_")}
        return found


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
    """

    claim: Claim
    metric: Metric
    paper: float | None
    evidence: tuple[Evidence, ...]
    open_data: bool = True

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
    records = by_method(folders)
    return sorted((answer(claim, records, at_hand) for claim in claims), key=lambda one: VERDICTS.index(one.verdict))


def by_method(folders: Iterable[Path]) -> dict[str, list[tuple[Path, Record]]]:
    """The ended runs under folders with their records, by method; what cannot be read is left out."""
    found: dict[str, list[tuple[Path, Record]]] = {}
    for pairs in reproduce.all_runs(folder for folder in folders if folder.is_dir())[0].values():
        for folder, record in pairs:
            if reproduce.state_of(record) in reproduce.ENDED:
                found.setdefault(record["method"], []).append((folder, record))
    return found


def answer(claim: Claim, records: Runs, at_hand: Callable[[str], bool]) -> Answer:
    """What records say of one claim; the arguments are those of `answers`."""
    singles = [_answer(dataclasses.replace(claim, than=than), records, at_hand) for than in claim.others]
    return singles[0] if len(singles) == 1 else _on_all(claim, singles)


def cells_of(claim: Claim) -> list[list[Cell]]:
    """The cells that a claim compares: a list for each column, the row's cell before those of the others.

    Raises:
        UserError: If the table lacks one.
    """
    cells = {(cell.row, cell.column): cell for cell in find_table(claim.table).cells}
    places = [[(row, column) for row in (claim.row, *claim.others)] for column in (*claim.columns, *claim.less)]
    if lacking := [place for column in places for place in column if place not in cells]:
        raise UserError(
            f"the claim {claim.name} names a cell that {claim.table} does not have (got {' / '.join(lacking[0])}); "
            "name a row and a column of the table."
        )
    return [[cells[place] for place in column] for column in places]


def _answer(claim: Claim, records: Runs, at_hand: Callable[[str], bool]) -> Answer:
    """What records say of a claim on one other row."""
    pairs = [tuple(map(wanted, pair)) for pair in cells_of(claim)]
    table, metric = find_table(claim.table), pairs[0][0].metric
    paper = comparison.printed_lead(table, claim.row, claim.than, claim.columns, metric)
    if paper is not None and claim.less:
        less = comparison.printed_lead(table, claim.row, claim.than, claim.less, metric)
        paper = None if less is None else paper - less
    evidence = _evidence(claim, pairs, records, metric)
    open_data = all(map(at_hand, {name for pair in pairs for run in pair for name in run.data}))
    return Answer(claim, metric, paper, evidence or (Evidence(NOT_RUN if open_data else NO_DATA),), open_data)


def _on_all(claim: Claim, singles: Sequence[Answer]) -> Answer:
    """A claim on several rows: the smallest lead counts, and it is reproduced only where each row has been run."""
    sign = 1 if claim.direction == "higher" else -1
    printed = [single.paper for single in singles if single.paper is not None]
    paper = min(printed, key=lambda lead: sign * lead, default=None)
    run = [single for single in singles if single.has_runs]
    if not run:
        return dataclasses.replace(singles[0], claim=claim, paper=paper)
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
    whole = dataclasses.replace(
        shown, verdict=verdict, why=why, over=over,
        reduced=shown.reduced or next((one.reduced for one in evidence if one.reduced), ""),
        folders=tuple(dict.fromkeys(folder for one in evidence for folder in one.folders)),
    )  # fmt: skip
    return Answer(claim, weakest.metric, paper, (whole,), all(single.open_data for single in singles))


def _lead(claim: Claim, differences: Sequence[float]) -> float:
    """The mean over a claim's columns, less that over those which are taken off."""
    split = len(claim.columns)
    return fmean(differences[:split]) - (fmean(differences[split:]) if claim.less else 0)


def wanted(cell: Cell) -> Wanted:
    """A cell as a run."""
    method = find_method(cell.method)
    return Wanted(
        method, _resolved(cell.method, json.dumps(dict(cell.settings), sort_keys=True)), find_metric(cell.metric)
    )


@cache
def _resolved(method: str, settings: str) -> Setup:
    return resolve(find_method(method), {**json.loads(settings), "seed": 0}, need_data=False)


def departures(record: Record, of: Wanted, instead: Mapping[str, Any]) -> dict[str, Any] | None:
    """In what a record differs from its cell, by option; None if it is no smaller form of it.

    Args:
        record: An ended run of the cell's method.
        of: The cell.
        instead: What may be other, see `Claim`.
    """
    fields = recorded_fields(of.method, of.setup.run.post)
    config = record["config"] if of.setup.post is not None else {**record["config"], "post": None}
    if not config.keys() <= fields.keys() or record["summary"]["selection"] != of.setup.selection:
        return None
    found: dict[str, Any] = {}
    for name, planned in of.values(record["seed"]).items():
        value = recorded_value(config, fields[name])
        if name == "eval_every" and (value == planned or of.metric.fits(record, planned)):
            continue
        if value == planned:
            continue
        smaller = name in SIZES and value is not None and (planned is None or value < planned)
        allowed = name in instead and instead[name] in (None, value)
        if not (smaller or allowed or (name == "eval_every" and of.metric.needs != "drift")):
            return None
        found[name] = value
    return found


def _agree(first: Record, second: Record, row: Wanted, than: Wanted) -> bool:
    """Whether two runs of one seed are a pair: equal in all in which their cells are."""
    their = [
        (record["dataset_fingerprint"], record["partition"]["fingerprint"], numerics_of(record)["core"])
        for record in (first, second)
    ]
    if their[0] != their[1]:
        return False
    run = {field.name: field for field in dataclasses.fields(RunConfig)}
    ours, theirs = row.values(first["seed"]), than.values(second["seed"])
    return all(
        recorded_value(first["config"], run[name]) == recorded_value(second["config"], run[name])
        for name in ours.keys() & theirs.keys() & run.keys()
        if ours[name] == theirs[name] and name != "post"
    )


class Pair(NamedTuple):
    """What two runs of a seed give in one column: their values, or who has none because it diverged."""

    folders: tuple[Path, Path]
    row: float | None
    than: float | None
    tail: float | None  # the difference of the means over the last tenth of the rounds


def _evidence(
    claim: Claim, columns: Sequence[tuple[Wanted, Wanted]], records: Runs, metric: Metric
) -> tuple[Evidence, ...]:
    """The best in full, and the best reduced: that with the most seeds, of these the one nearest to the paper's."""
    groups: dict[str, dict[int, dict[int, Pair]]] = {}  # by what differs, then by seed, then by column
    for number, (row, than) in enumerate(columns):
        sides = [_candidates(one, claim, records) for one in (row, than)]
        for first, departed in sides[0]:
            for second, other in sides[1]:
                seed = first[1]["seed"]
                if seed == second[1]["seed"] and _agree(first[1], second[1], row, than):
                    key = json.dumps([departed, other], sort_keys=True)
                    groups.setdefault(key, {}).setdefault(seed, {}).setdefault(number, _pair(first, second, row, than))
    found = []
    for key, seeds in groups.items():
        whole = {seed: tuple(pairs.values()) for seed, pairs in sorted(seeds.items()) if len(pairs) == len(columns)}
        if whole:
            found.append((json.loads(key), whole))
    full = [one for one in found if not any(one[0])]
    reduced = sorted((one for one in found if any(one[0])), key=_nearness, reverse=True)
    return tuple(_judged(claim, metric, columns[0], departed, whole) for departed, whole in (*full, *reduced[:1]))


def _nearness(group: tuple[list[dict[str, Any]], dict]) -> tuple:
    """The most seeds first, then the fewest differences, then the longest runs."""
    (row, than), seeds = group
    return len(seeds), -len(row | than), row.get("rounds", float("inf")), json.dumps([row, than], sort_keys=True)


def too_short(rounds: int, planned: int) -> bool:
    """Whether a run has less than a tenth of its rounds: what it learnt says nothing, what it sends and holds does."""
    return 10 * rounds < planned


def _candidates(of: Wanted, claim: Claim, records: Runs) -> list[tuple[tuple[Path, Record], dict[str, Any]]]:
    """The runs that a cell can be read from, also in a smaller form, with what differs."""
    found = []
    for folder, record in records.get(of.method.name, ()):
        if of.metric.unit != "floats" and too_short(record["config"]["rounds"], of.setup.run.rounds):
            continue
        departed = departures(record, of, claim.instead)
        if departed is not None and says_something(record, of.metric):
            found.append(((folder, record), departed))
    return found


def says_something(record: Record, metric: Metric) -> bool:
    """Whether a run has a value, or has none because it diverged or never got there."""
    return _value(record, metric) is not None or not metric.counts(record) or metric.none == "never"


def _value(record: Record, metric: Metric) -> float | None:
    """The value of a run; None of one that diverged or has none."""
    return metric.value(record) if metric.counts(record) else None


def _pair(one: tuple[Path, Record], other: tuple[Path, Record], row: Wanted, than: Wanted) -> Pair:
    (folder, first), (other_folder, second) = one, other
    ours, theirs = _value(first, row.metric), _value(second, than.metric)
    tail = None
    tested_alike = first["config"].get("eval_every", 1) == second["config"].get("eval_every", 1)
    if row.metric.name == "selected" and tested_alike:
        ends = find_metric(TAIL).values([first, second])
        tail = ends[0] - ends[1] if len(ends) == 2 else None
    return Pair((folder, other_folder), ours, theirs, tail)


def _judged(
    claim: Claim,
    metric: Metric,
    column: tuple[Wanted, Wanted],
    departed: list[dict[str, Any]],
    seeds: Mapping[int, tuple[Pair, ...]],
) -> Evidence:
    """The verdict of pairs of one size."""
    kept = {seed: pairs for seed, pairs in seeds.items() if all(None not in (one.row, one.than) for one in pairs)}
    differences = [_lead(claim, [one.row - one.than for one in pairs]) for pairs in kept.values()]
    tested = [pairs for pairs in kept.values() if all(one.tail is not None for one in pairs)]
    tails = [_lead(claim, [one.tail for one in pairs]) for pairs in tested]
    lost = [
        sum(any(getattr(one, side) is None for one in pairs) for pairs in seeds.values()) for side in ("row", "than")
    ]
    found, tail = interval(differences), interval(tails)
    verdict, why = judge(found, claim.direction, *lost, exact=metric.unit == "floats")
    event = "never got there" if metric.none == "never" else "diverged"
    words = [
        f"{name}: {count} of {len(seeds)} {event}"
        for name, count in zip((claim.row, claim.than), lost, strict=True)
        if count
    ]
    folders = dict.fromkeys(folder for pairs in seeds.values() for one in pairs for folder in one.folders)
    reduced = _reduction(column, departed)
    return Evidence(verdict, why, reduced, tuple(seeds), found, tail, tuple(folders), "; ".join(words))


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


def _reduction(column: tuple[Wanted, Wanted], departed: Sequence[Mapping[str, Any]]) -> str:
    """What differs from the paper's cells, in words, each option once: the row's, then what only the other one has."""
    sizes: dict[str, str] = {}
    others: dict[str, str] = {}
    for of, differing in zip(column, departed, strict=True):
        planned = of.values(0)
        for name, value in differing.items():
            full = planned[name]
            if name == "train_examples" and full is None:
                full = reproduce.train_size(planned["dataset"])
            if name == "dataset":
                sizes.setdefault(name, f"{value} for {full}")
            elif name == "eval_every":
                sizes.setdefault(name, f"tests every {value} rounds")
            elif name in SIZES and (full is None or value < full):
                sizes.setdefault(name, describe_reductions([{"what": name, "protocol": full, "run": value}]))
            elif name in of.method_options:
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
        steps.append(["fedcli", "quality", str(reproduce.home_of(table))])
    return " && ".join(map(shlex.join, steps))


def _command_of(answer: Answer) -> str:
    return f"`{answer.command}`" if answer.command else ""


def sheet(
    found: Sequence[Answer],
    runs: Callable[[Evidence], str] = lambda evidence: evidence.size,
    decided: Callable[[Answer], str] = _command_of,
) -> Sheet:
    """The claims as a table to be written; of its values each is a size of runs.

    Args:
        found: The claims.
        runs: What is said of the runs of one size.
        decided: What is said of the runs that would decide a claim.
    """
    blocks = []
    for answer in found:
        block = []
        for evidence in answer.evidence:
            texts = [f"`{answer.claim.name}` {answer.claim.text}", evidence.judgement, answer.paper_text]
            texts += [answer.ours(evidence), difference_text(answer.metric, evidence.tail)]
            said = [runs(evidence)] if evidence.folders else []
            said += [] if block else [decided(answer)]
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
            "lost": evidence.lost,
            "runs": "; ".join(map(str, evidence.folders)),
        }
        for evidence in answer.evidence
    ]  # fmt: skip


def counted(found: Sequence[Answer]) -> str:
    """How many claims have which verdict, in a sentence."""
    numbers = [(verdict, sum(one.verdict == verdict for one in found)) for verdict in VERDICTS]
    return f"Of {len(found)} claims: {', '.join(f'{number} {verdict}' for verdict, number in numbers if number)}."
