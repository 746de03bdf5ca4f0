"""Computes the claims' differences and verdicts anew from the records, by code that shares nothing with `fedcli`.

    fedcli claims --runs results/records --format csv | python results/recompute/recompute.py

Which runs, metrics and rows a claim has stands in the table; values and rounds are read from the records. The exit code
is 1 where a difference, an interval or a verdict disagrees.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from leads import NO_LEAD, Lead, judge, leads_over, smallest
from readings import value

RANKS = ["contradicted", "undecided", "reproduced"]  # the weakest first


class Answer(NamedTuple):
    """What the records say of a claim, or what the table says of it."""

    verdict: str
    lead: Lead  # over the row that decides
    tail: Lead  # the smallest over the last tenth of the rounds

    def text(self) -> str:
        """All of it, in which two answers are compared."""
        return f"{self.verdict} {self.lead.text()}, last tenth {self.tail.text()}"


def read_pairs(claim: pd.Series) -> pd.DataFrame:
    """The pairs of runs of a claim, a row a pair.

    The columns `value`, of the claim's metric, and `tail`, over the last tenth of the rounds, are of the claim's row;
    `value_than` and `tail_than` are of the other row.
    """
    pairs = pd.DataFrame(json.loads(claim["pairs"]))
    for side in ("", "_than"):
        values = []
        tails = []
        for folder, metric in zip(pairs[f"folder{side}"], pairs[f"metric{side}"], strict=True):
            record = json.loads((Path(folder) / "record.json").read_text())
            values.append(value(record, metric))
            tails.append(value(record, "last-tenth"))
        pairs[f"value{side}"] = values
        pairs[f"tail{side}"] = tails
    return pairs


def recompute(claim: pd.Series) -> Answer:
    """What the records say of a claim."""
    direction = claim["direction"]
    sign = 1 if direction == "higher" else -1
    is_exact = claim["metric"].startswith("floats")
    pairs = read_pairs(claim)

    leads = leads_over(pairs, "value")
    verdicts = [judge(lead, direction, is_exact) for lead in leads]
    verdict = min(verdicts, key=RANKS.index)
    deciding = [lead for lead, of_lead in zip(leads, verdicts, strict=True) if of_lead == verdict]
    num_others = len(claim["than"].split("; "))
    if verdict == "reproduced" and len(leads) < num_others:
        verdict = "undecided"

    tail = NO_LEAD
    if pd.notna(claim["tail"]):
        tail = smallest(leads_over(pairs, "tail"), sign)
    return Answer(verdict, smallest(deciding, sign), tail)


def answer_of_table(claim: pd.Series) -> Answer:
    """What the table says of a claim."""
    verdict = claim["verdict"]
    if verdict == "by construction":  # reproduced by the numbers
        verdict = "reproduced"
    lead = Lead(claim["ours"], claim["low"], claim["high"], claim["n"])
    tail = Lead(claim["tail"], claim["tail_low"], claim["tail_high"], claim["tail_n"])
    return Answer(verdict, lead, tail)


def main() -> None:
    """Compares all claims that have runs."""
    table = pd.read_csv(sys.stdin)
    judged = table[table["pairs"] != "[]"]
    faults = []
    for _, claim in judged.iterrows():
        here = recompute(claim).text()
        there = answer_of_table(claim).text()
        if here != there:
            faults.append(f"{claim['claim']}: {here} here, {there} there")
    print(f"{len(judged)} claims recomputed, {len(faults)} otherwise")
    for fault in faults:
        print(fault)
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
