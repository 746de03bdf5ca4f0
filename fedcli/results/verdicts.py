"""What can be said of a claim: a verdict, by how much its row is ahead, and the runs that show it."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedcli.declarations import Claim
from fedcli.registry import find_table
from fedcli.results.intervals import NO_INTERVAL, Interval, seeds_needed
from fedcli.results.metrics import Metric
from fedcli.results.number_texts import interval_text
from fedcli.results.plans import table_folder

REPRODUCED = "reproduced"
CONTRADICTED = "contradicted"
UNDECIDED = "undecided"
BY_CONSTRUCTION = "by construction"
NOT_RUN = "not run"
NO_DATA = "data not at hand"
VERDICTS = (REPRODUCED, BY_CONSTRUCTION, CONTRADICTED, UNDECIDED, NOT_RUN, NO_DATA)
OPEN_VERDICTS = (UNDECIDED, NOT_RUN, NO_DATA)  # what more runs would change
FEWEST_SEEDS = 3  # for a verdict
MOST_SEEDS = 30


class Judgement(NamedTuple):
    """What is said of a claim."""

    verdict: str  # one of `VERDICTS`
    why: str = ""  # it is undecided, and which runs have no value


@dataclass(frozen=True)
class Lead:
    """By how much a claim's row is ahead of the other, as a mean over seeds."""

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
    reduction: str = ""  # what differs from the paper's cells; empty in full
    # A row of the CSV's column `pairs` for each pair of runs, see `_rows_of_pairs`.
    pairs: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Answer:
    """A claim and what the records say of it."""

    claim: Claim
    metric: Metric  # what is compared
    judgement: Judgement
    paper_lead: float | None  # None where the paper does not print both numbers
    text_has: str = ""  # what the paper's text has where its cells follow the authors' code, see `Protocol`
    lead: Lead = Lead()
    tail_lead: Lead = Lead()  # the same of accuracies over the last tenth of the rounds
    evidence: Evidence = Evidence()

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        return self.judgement.verdict

    @property
    def size(self) -> str:
        """The size of the runs beside the paper's."""
        if self.evidence.reduction:
            return f"reduced to {self.evidence.reduction}"
        return "in full, by the authors' code" if self.text_has else "in full, by the text"

    @property
    def needed_seeds(self) -> tuple[int, ...]:
        """The seeds that would decide it in full: three, or more where these leave it open."""
        needed = FEWEST_SEEDS
        lead = self.lead.interval
        is_open = lead.num_values >= FEWEST_SEEDS and lead.low <= 0 <= lead.high
        if is_open and not self.evidence.reduction:
            needed = seeds_needed(lead, MOST_SEEDS)
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
        for name in rows_and_columns(self.claim):
            words += ["--only", name]
        words += ["--seeds", ",".join(map(str, self.needed_seeds))]
        command = shlex.join(words)
        if self.metric.after_the_run:
            command += f" && fedcli quality {table_folder(find_table(self.claim.table))}"
        return command


def rows_and_columns(claim: Claim) -> tuple[str, ...]:
    """The rows and columns of a claim."""
    rows = [claim.row, *claim.other_rows, *claim.row_aliases.values()]
    columns = [*claim.columns, *claim.subtracted_columns, *claim.other_columns]
    return (*rows, *columns)
