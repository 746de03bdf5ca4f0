"""The table of claims with their verdicts, and the CSV that has all that is known of each claim.

The project's own verdicts are shipped as such a CSV, which is read here again.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

from fedcli.results.intervals import Interval
from fedcli.results.pairs import Pair
from fedcli.results.render import MISSING, TextTable, escape_markdown, format_code
from fedcli.results.verdicts import FEWEST_SEEDS, Answer, Comparison, Evidence, Lead, Verdict

SHIPPED = "verdicts.csv"


@dataclass(frozen=True)
class IntervalColumns:
    """The names of the columns of the CSV that have the parts of an interval."""

    mean: str
    low: str
    high: str
    num_values: str

    def read(self, row: Mapping[str, Any]) -> Interval:
        """Reads the interval of a row of the CSV."""
        return Interval(mean=row[self.mean], low=row[self.low], high=row[self.high], num_values=row[self.num_values])

    def cells(self, interval: Interval) -> dict[str, float]:
        """Returns the cells that a row of the CSV has of an interval, by column."""
        return {
            self.mean: interval.mean,
            self.low: interval.low,
            self.high: interval.high,
            self.num_values: interval.num_values,
        }


LEAD_COLUMNS = IntervalColumns(mean="ours", low="low", high="high", num_values="n")
LAST_TENTH_COLUMNS = IntervalColumns(mean="tail", low="tail_low", high="tail_high", num_values="tail_n")


def read_shipped() -> dict[str, dict[str, Any]]:
    """Reads the verdicts by the project's own records: the rows of claims that have runs, by the claim's name."""
    texts = ["verdict", "why", "reduced", "over", "tail_over", "seeds", "runs"]
    with files("fedcli.papers").joinpath(SHIPPED).open(encoding="utf-8") as file:
        table = pd.read_csv(file, dtype=dict.fromkeys(texts, str)).fillna(dict.fromkeys(texts, ""))
    return {row["claim"]: row for row in table[table["runs"] != ""].to_dict("records")}


def apply_shipped_row(answer: Answer, row: Mapping[str, Any]) -> Answer:
    """Returns an answer that has no runs with what a row of the CSV says of its claim."""
    comparison = Comparison(
        verdict=Verdict(row["verdict"], row["why"]),
        lead=Lead(LEAD_COLUMNS.read(row), row["over"]),
        last_tenth_lead=Lead(LAST_TENTH_COLUMNS.read(row), row["tail_over"]),
        evidence=Evidence(
            folders=tuple(map(Path, row["runs"].split("; "))),
            seeds=tuple(map(int, row["seeds"].split())),
            reduction=row["reduced"],
        ),
    )
    return replace(answer, comparison=comparison)


NOTES = (
    "Ours: mean over seeds of the difference of two runs that share seed, partition and all options in which the two "
    "cells agree, with its 95 % interval (Student's t) and, in brackets, the number of seeds; of several rows, the "
    "smallest lead.",
    "Reproduced: the interval lies on the paper's side of zero; contradicted: on the other. Undecided: zero is inside, "
    f"there are fewer than {FEWEST_SEEDS} seeds, not every row has been run, or runs without a value are of the row "
    "ahead.",
    "In full: every option is the paper's; by the authors' code where text and code differ, else by the text. Reduced "
    "to: what was smaller or other. Decided by: the runs that it lacks.",
    "By construction: the runs agree, and could not do otherwise; it is not counted as reproduced.",
    "Each claim is judged by its own interval, with no correction for their number: of twenty intervals of 95 % one is "
    "expected to miss what it is of.",
)


def build_claims_table(answers: Sequence[Answer], runs_texts: Sequence[str] | None = None) -> TextTable:
    """Builds the table of claims.

    Args:
        answers: The claims with what the records say of them.
        runs_texts: What the last column says of the runs of each claim, in Markdown; by default how large they are, and
            the commands that would decide the claim.
    """
    titles = ["Claim", "Verdict", "Paper", "Ours", "Over the last tenth of the rounds", "Runs"]
    if runs_texts is None:
        runs_texts = [_describe_runs(answer) for answer in answers]
    return TextTable(
        titles=titles,
        rows=[_build_row(answer, runs_text) for answer, runs_text in zip(answers, runs_texts, strict=True)],
        number_columns=(),
        csv_rows=[_build_csv_row(answer) for answer in answers],
        notes=NOTES,
        is_markdown=True,
    )


def _describe_runs(answer: Answer) -> str:
    """Says how large the runs of a claim are, and which command would decide it."""
    runs = []
    if answer.comparison.evidence.folders:
        runs.append(escape_markdown(answer.size))
    if answer.command:
        runs.append(f"decided by {format_code(answer.command)}")
    return "; ".join(runs) or MISSING


def _build_row(answer: Answer, runs_text: str) -> list[str]:
    """Builds the cells of a claim in the table that is read, in Markdown."""
    claim = answer.claim
    metric = answer.context.metric
    paper_difference = answer.context.paper_difference
    comparison = answer.comparison
    verdict = comparison.verdict
    return [
        f"{format_code(claim.name)} {escape_markdown(claim.text)}",
        escape_markdown(f"{verdict.outcome}, {verdict.reason}" if verdict.reason else verdict.outcome),
        MISSING if paper_difference is None else metric.format_value(paper_difference, "+"),
        escape_markdown(comparison.lead.format(metric)),
        escape_markdown(comparison.last_tenth_lead.format(metric)),
        runs_text,
    ]


def _build_csv_row(answer: Answer) -> dict[str, Any]:
    """Builds what the CSV has of a claim, by column; differences are in the unit of the metric."""
    claim = answer.claim
    context = answer.context
    comparison = answer.comparison
    evidence = comparison.evidence
    return {
        "claim": claim.name,
        "text": claim.text,
        "table": claim.table,
        "metric": context.metric.name,
        "row": claim.row,
        "than": "; ".join(claim.other_rows),
        "columns": "; ".join(claim.columns),
        "direction": claim.direction,
        "paper": context.paper_difference,
        "verdict": comparison.verdict.outcome,
        "why": comparison.verdict.reason,
        "reduced": evidence.reduction,
        "over": comparison.lead.rows_text,
        "tail_over": comparison.last_tenth_lead.rows_text,
        "seeds": " ".join(map(str, evidence.seeds)),
        **LEAD_COLUMNS.cells(comparison.lead.interval),
        **LAST_TENTH_COLUMNS.cells(comparison.last_tenth_lead.interval),
        "runs": "; ".join(map(str, evidence.folders)),
        "pairs": json.dumps([_build_pair_entry(pair) for pair in evidence.pairs]),
    }


def _build_pair_entry(pair: Pair) -> dict[str, Any]:
    """Builds what the CSV's column `pairs` has of a pair of runs, by the names there."""
    contrast = pair.contrast
    return {
        "seed": pair.seed,
        "share": contrast.weight,
        "metric": contrast.cell.metric,
        "folder": str(pair.run.folder),
        "metric_than": contrast.other_cell.metric,
        "folder_than": str(pair.other_run.folder),
        "than": contrast.other_row,
    }


def describe_counts(answers: Sequence[Answer]) -> str:
    """Says in a sentence how many claims have which outcome."""
    counts = Counter(answer.comparison.verdict.outcome for answer in answers)
    parts = [f"{count} {outcome}" for outcome, count in counts.items()]
    return f"Of {len(answers)} claims: {', '.join(parts)}."
