"""Computes the claims' differences and verdicts anew from the records, by code that shares nothing with `fedcli`.

    fedcli claims --runs results/records --format csv | python results/recompute/recompute.py

Which runs, metrics and rows a claim has stands in the table; values and rounds are read from the records. The exit code
is 1 where a difference, an interval or a verdict disagrees.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from leads import NO_LEAD, LacksValue, Lead, lead_over_row, smallest_lead, verdict_on_lead
from readings import better_direction, read_value

RANKS = ["contradicted", "undecided", "reproduced"]  # the weakest first
WITHOUT_RUNS = ("not run", "data not at hand")  # verdicts on claims that have no pair of runs
TOLERANCE = 1e-9  # of a number, in the metric's unit


class Answer(NamedTuple):
    """What the records say of a claim, or what the table says of it; leads above zero are on the claim's side."""

    verdict: str
    lead: Lead  # over the row that decides
    last_tenth: Lead  # the smallest over the last tenth of the rounds

    def agrees_with(self, other: "Answer") -> bool:
        """Whether the verdicts are the same, and the numbers are so up to rounding, or missing in both."""
        numbers = [*self.lead, *self.last_tenth]
        numbers_of_other = [*other.lead, *other.last_tenth]
        are_close = np.allclose(numbers, numbers_of_other, rtol=0, atol=TOLERANCE, equal_nan=True)
        return self.verdict == other.verdict and are_close

    def text(self) -> str:
        """The answer in a line."""
        return f"{self.verdict} {self.lead.text()}, last tenth {self.last_tenth.text()}"


def read_record(folder: str) -> dict:
    """The record of a run."""
    return json.loads((Path(folder) / "record.json").read_text(encoding="utf-8"))


def read_pairs(claim: pd.Series) -> pd.DataFrame:
    """Each pair of a claim: how far its row is ahead of the `other` row, times the pair's share of its seed.

    The column `by_metric` is by the claim's metric, `by_last_tenth` by the accuracy over the last tenth of the rounds;
    both are above zero on the claim's side. The columns `lacks_value` and `other_lacks_value` say which of the two runs
    has no value of the metric.
    """
    sign = 1 if claim["direction"] == "higher" else -1
    rows = []
    for pair in json.loads(claim["pairs"]):
        record = read_record(pair["folder"])
        record_of_other = read_record(pair["folder_than"])
        by_metric = read_value(record, pair["metric"])
        by_metric_of_other = read_value(record_of_other, pair["metric_than"])
        by_last_tenth = read_value(record, "last-tenth") - read_value(record_of_other, "last-tenth")
        rows.append({
            "other": pair["than"],
            "seed": pair["seed"],
            "by_metric": sign * pair["share"] * (by_metric - by_metric_of_other),
            "by_last_tenth": sign * pair["share"] * by_last_tenth,
            "lacks_value": np.isnan(by_metric),
            "other_lacks_value": np.isnan(by_metric_of_other),
        })  # fmt: skip
    return pd.DataFrame(rows)


def compare_with_row(pairs: pd.DataFrame, claim: pd.Series) -> Answer:
    """What the pairs of runs with one other row say of a claim."""
    row_lacks = pairs["lacks_value"].any()
    other_row_lacks = pairs["other_lacks_value"].any()
    if better_direction(claim["metric"], claim["direction"]) == claim["direction"]:
        lacks_value = LacksValue(if_ahead=row_lacks, if_behind=other_row_lacks)
    else:  # the claim is that its row is the worse one
        lacks_value = LacksValue(if_ahead=other_row_lacks, if_behind=row_lacks)
    lead = lead_over_row(pairs, "by_metric")
    is_exact = claim["metric"].startswith("floats")
    return Answer(verdict_on_lead(lead, is_exact, lacks_value), lead, lead_over_row(pairs, "by_last_tenth"))


def recompute(claim: pd.Series) -> Answer:
    """What the records say of a claim."""
    comparisons = []
    for _, pairs in read_pairs(claim).groupby("other"):
        comparisons.append(compare_with_row(pairs, claim))

    weakest_verdict = min((comparison.verdict for comparison in comparisons), key=RANKS.index)
    deciding_leads = [comparison.lead for comparison in comparisons if comparison.verdict == weakest_verdict]
    lead = smallest_lead(deciding_leads)
    if any(deciding_lead.n == 0 for deciding_lead in deciding_leads):  # without a value, which is weaker than any value
        lead = NO_LEAD
    verdict = weakest_verdict
    num_others = len(claim["than"].split("; "))
    if verdict == "reproduced" and len(comparisons) < num_others:
        verdict = "undecided"

    last_tenth = NO_LEAD
    if pd.notna(claim["tail"]):
        last_tenth = smallest_lead([comparison.last_tenth for comparison in comparisons])
    return Answer(verdict, lead, last_tenth)


def answer_of_table(claim: pd.Series) -> Answer:
    """What the table says of a claim."""
    verdict = claim["verdict"]
    if verdict == "by construction":  # reproduced by the numbers
        verdict = "reproduced"
    lead = Lead(claim["ours"], claim["low"], claim["high"], claim["n"])
    last_tenth = Lead(claim["tail"], claim["tail_low"], claim["tail_high"], claim["tail_n"])
    if claim["direction"] == "lower":
        lead = lead.negated()
        last_tenth = last_tenth.negated()
    return Answer(verdict, lead, last_tenth)


def main() -> None:
    """Compares the answers to all claims that have runs, and says where they disagree."""
    table = pd.read_csv(sys.stdin)
    has_pairs = table["pairs"] != "[]"
    judged = table[has_pairs]
    disagreements = []
    for _, claim in table[~has_pairs].iterrows():
        if claim["verdict"] not in WITHOUT_RUNS:
            disagreements.append(f"{claim['claim']}: {claim['verdict']} by fedcli, without a pair of runs")
    for _, claim in judged.iterrows():
        recomputed = recompute(claim)
        printed = answer_of_table(claim)
        if not recomputed.agrees_with(printed):
            disagreements.append(f"{claim['claim']}: {recomputed.text()} here, {printed.text()} by fedcli")
    print(f"{len(judged)} claims recomputed, {len(disagreements)} disagree with fedcli")
    for disagreement in disagreements:
        print(disagreement)
    if disagreements:
        sys.exit(1)


if __name__ == "__main__":
    main()
