"""What can be said of a claim: a verdict, by how much its row is ahead, and the runs that show it."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedcli.declarations import Claim
from fedcli.registry import find_table
from fedcli.results.intervals import NO_INTERVAL, Interval, count_needed_seeds
from fedcli.results.metrics import Metric
from fedcli.results.number_texts import format_interval
from fedcli.results.pairs import Pair
from fedcli.results.plans import find_table_folder

REPRODUCED = "reproduced"
CONTRADICTED = "contradicted"
UNDECIDED = "undecided"
BY_CONSTRUCTION = "by construction"
NOT_RUN = "not run"
NO_DATA = "data not at hand"
OUTCOMES = (REPRODUCED, BY_CONSTRUCTION, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
OPEN_OUTCOMES = (UNDECIDED, NOT_RUN, NO_DATA)  # those that more runs would change
FEWEST_SEEDS = 3  # that a verdict needs
MOST_SEEDS = 30  # that a claim is said to need
BETTER_RUNS_LOST = "runs of the better one are lost"  # a reason that more seeds do not take away


class Verdict(NamedTuple):
    """The verdict on a claim.

    Attributes:
        outcome: One of `OUTCOMES`.
        reason: Why the outcome is undecided, and which runs have no value; empty if there is nothing to say.
    """

    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Lead:
    """By how much a claim's row is ahead of another row.

    Attributes:
        interval: The mean difference over seeds, in the unit of the metric, with its 95 % interval.
        rows_text: Which row the lead is over, if the claim names several; of two rows, also the lead over the other
            one. Empty if the claim names a single row.
    """

    interval: Interval = NO_INTERVAL
    rows_text: str = ""

    def format(self, metric: Metric) -> str:
        """Formats the interval as a number of `metric`, followed by the row that the lead is over."""
        return f"{format_interval(metric, self.interval)} {self.rows_text}".rstrip()


@dataclass(frozen=True)
class Evidence:
    """The runs by which a claim is judged.

    Attributes:
        folders: The folders of all these runs, each once.
        seeds: The seeds of the pairs of runs.
        reduction: How the runs differ from those of the paper, in words; empty if they were run in full.
        pairs: The pairs of runs; empty if the verdict was read from a file.
    """

    folders: tuple[Path, ...] = ()
    seeds: tuple[int, ...] = ()
    reduction: str = ""
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class ClaimContext:
    """What is known of a claim before anything has been run.

    Attributes:
        claim: The claim.
        metric: The metric that is compared.
        paper_difference: By how much the claim's row is ahead of another row in the paper, in the unit of the metric:
            the smallest such difference if the claim names several rows. None if the paper does not print both
            numbers.
        text_has: What the paper's text says where the cells follow the authors' code, see `Protocol`.
        has_data: Whether the images of all data sets of the claim can be had.
    """

    claim: Claim
    metric: Metric
    paper_difference: float | None
    text_has: str
    has_data: bool


@dataclass(frozen=True)
class Comparison:
    """What runs say of a claim's row beside another row, or beside all other rows of the claim.

    Attributes:
        verdict: The verdict.
        lead: The lead by the metric of the claim.
        last_tenth_lead: The lead by the mean accuracy over the last tenth of the rounds; without an interval if the
            metric of the claim is not the selected accuracy.
        evidence: The runs.
    """

    verdict: Verdict
    lead: Lead = Lead()
    last_tenth_lead: Lead = Lead()
    evidence: Evidence = Evidence()


@dataclass(frozen=True)
class Answer:
    """A claim and what the records say of it."""

    context: ClaimContext
    comparison: Comparison

    @property
    def claim(self) -> Claim:
        """The claim."""
        return self.context.claim

    @property
    def size(self) -> str:
        """How large the runs are beside the paper's, in words."""
        reduction = self.comparison.evidence.reduction
        if reduction:
            return f"reduced to {reduction}"
        return "in full, by the authors' code" if self.context.text_has else "in full, by the text"

    @property
    def has_lost_better_runs(self) -> bool:
        """Whether the claim stays open since runs in full of the better row have no value, as if they diverged."""
        is_in_full = not self.comparison.evidence.reduction
        return is_in_full and BETTER_RUNS_LOST in self.comparison.verdict.reason

    @property
    def needed_seeds(self) -> tuple[int, ...] | None:
        """The seeds that would decide the claim by runs in full: three, or more if these leave it open.

        None if more than `MOST_SEEDS` would be needed, or if no number of them decides it.
        """
        needed: int | None = FEWEST_SEEDS
        interval = self.comparison.lead.interval
        is_open = interval.num_values >= FEWEST_SEEDS and interval.low <= 0 <= interval.high
        if is_open and not self.comparison.evidence.reduction:
            needed = count_needed_seeds(interval, MOST_SEEDS)
        if needed is None or self.has_lost_better_runs:
            return None
        seeds = find_table(self.claim.table).seeds
        first_new = max(seeds) + 1
        new_seeds = range(first_new, first_new + needed - len(seeds))
        return (*seeds, *new_seeds)

    @property
    def command(self) -> str:
        """The command that runs the claim's rows in full and measures their features.

        Empty if these runs would not decide the claim.
        """
        seeds = self.needed_seeds
        if self.comparison.verdict.outcome not in (UNDECIDED, NOT_RUN) or seeds is None:
            return ""
        words = ["fedcli", "table", self.claim.table]
        for name in list_rows_and_columns(self.claim):
            words += ["--only", name]
        words += ["--seeds", ",".join(map(str, seeds))]
        command = shlex.join(words)
        if self.context.metric.is_measured_after_run:
            command += f" && fedcli quality {find_table_folder(find_table(self.claim.table))}"
        return command


def list_rows_and_columns(claim: Claim) -> tuple[str, ...]:
    """Lists the names of all rows and columns that a claim compares."""
    rows = [claim.row, *claim.other_rows, *claim.row_aliases.values()]
    columns = [*claim.columns, *claim.subtracted_columns, *claim.other_columns]
    return (*rows, *columns)
