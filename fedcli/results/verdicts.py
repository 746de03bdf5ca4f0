"""What can be said of a claim: a verdict, by how much its row is ahead, and the runs that show it."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedcli.declarations import Claim
from fedcli.registry import find_table
from fedcli.results.intervals import NO_INTERVAL, Interval, seeds_needed
from fedcli.results.metrics import Metric
from fedcli.results.number_texts import interval_text
from fedcli.results.pairs import Pair
from fedcli.results.plans import table_folder

REPRODUCED = "reproduced"
CONTRADICTED = "contradicted"
UNDECIDED = "undecided"
BY_CONSTRUCTION = "by construction"
NOT_RUN = "not run"
NO_DATA = "data not at hand"
OUTCOMES = (REPRODUCED, BY_CONSTRUCTION, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
OPEN_OUTCOMES = (UNDECIDED, NOT_RUN, NO_DATA)  # what more runs would change
FEWEST_SEEDS = 3  # for a verdict
MOST_SEEDS = 30


class Verdict(NamedTuple):
    """What is said of a claim."""

    outcome: str  # one of `OUTCOMES`
    reason: str = ""  # why it is undecided, and which runs have no value


@dataclass(frozen=True)
class Lead:
    """By how much a claim's row is ahead of another, as a mean over seeds."""

    interval: Interval = NO_INTERVAL
    rows_text: str = ""  # of several rows, over which one, and the lead over the other of two

    def text(self, metric: Metric) -> str:
        """It with its interval and its row."""
        return f"{interval_text(metric, self.interval)} {self.rows_text}".rstrip()


@dataclass(frozen=True)
class Evidence:
    """The runs by which a claim is judged."""

    folders: tuple[Path, ...] = ()
    seeds: tuple[int, ...] = ()
    differences: str = ""  # from the paper's cells, in words; empty in full
    pairs: tuple[Pair, ...] = ()  # none of a verdict that was read from a file


@dataclass(frozen=True)
class Answer:
    """A claim and what the records say of it."""

    claim: Claim
    metric: Metric  # what is compared
    paper_lead: float | None  # None where the paper does not print both numbers
    text_has: str  # what the paper's text has where its cells follow the authors' code, see `Protocol`
    verdict: Verdict
    lead: Lead = Lead()
    tail_lead: Lead = Lead()  # the same of accuracies over the last tenth of the rounds
    evidence: Evidence = Evidence()

    @property
    def size(self) -> str:
        """The size of the runs beside the paper's."""
        if self.evidence.differences:
            return f"reduced to {self.evidence.differences}"
        return "in full, by the authors' code" if self.text_has else "in full, by the text"

    @property
    def needed_seeds(self) -> tuple[int, ...] | None:
        """The seeds that would decide it in full: three, or more where these leave it open.

        None where more than `MOST_SEEDS` would be needed.
        """
        needed: int | None = FEWEST_SEEDS
        lead = self.lead.interval
        is_open = lead.num_values >= FEWEST_SEEDS and lead.low <= 0 <= lead.high
        if is_open and not self.evidence.differences:
            needed = seeds_needed(lead, MOST_SEEDS)
        if needed is None:
            return None
        seeds = find_table(self.claim.table).seeds
        first_new = seeds[-1] + 1
        new_seeds = range(first_new, first_new + needed - len(seeds))
        return (*seeds, *new_seeds)

    @property
    def command(self) -> str:
        """The command that runs its rows in full and measures their features; empty where that would decide nothing."""
        seeds = self.needed_seeds
        if self.verdict.outcome not in (UNDECIDED, NOT_RUN) or seeds is None:
            return ""
        words = ["fedcli", "table", self.claim.table]
        for name in rows_and_columns(self.claim):
            words += ["--only", name]
        words += ["--seeds", ",".join(map(str, seeds))]
        command = shlex.join(words)
        if self.metric.after_the_run:
            command += f" && fedcli quality {table_folder(find_table(self.claim.table))}"
        return command


def rows_and_columns(claim: Claim) -> tuple[str, ...]:
    """The rows and columns of a claim."""
    rows = [claim.row, *claim.other_rows, *claim.row_aliases.values()]
    columns = [*claim.columns, *claim.subtracted_columns, *claim.other_columns]
    return (*rows, *columns)
