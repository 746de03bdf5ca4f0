"""Computes the claims' differences and verdicts anew from the records, by code that shares nothing with `fedcli`.

    fedcli claims --runs results/records --format csv | python results/recompute.py

Which runs, metrics and rows a claim has stands in the table; values and rounds are read from the records. The exit code
is 1 where a difference, an interval or a verdict disagrees.
"""

import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from scipy import stats

RANKS = ["contradicted", "undecided", "reproduced"]  # the weakest first
MISSING = float("nan")


class Lead(NamedTuple):
    """How far a claim's row is ahead of another: the mean over seeds and its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int  # seeds

    def text(self) -> str:
        """All of it, to seven decimals."""
        return f"{self.mean:.7f} [{self.low:.7f}, {self.high:.7f}] ({self.n})"


NO_LEAD = Lead(MISSING, MISSING, MISSING, 0)


class Answer(NamedTuple):
    """What the records say of a claim, or what the table says of it."""

    verdict: str
    lead: Lead  # over the row that decides
    tail: Lead  # the smallest over the last tenth of the rounds

    def text(self) -> str:
        """All of it, in which two answers are compared."""
        return f"{self.verdict} {self.lead.text()}, last tenth {self.tail.text()}"


def rounds_of(record: dict) -> pd.DataFrame:
    """The tested rounds of a run; the index counts from 1."""
    rounds = pd.DataFrame(record["rounds"])
    rounds.index += 1
    return rounds[rounds["test_accuracy"].notna()]


def percents(record: dict, name: str) -> pd.Series:
    """An accuracy in percent in the tested rounds of a run."""
    return 100 * rounds_of(record)[name].astype(float)


def selected(record: dict, parameter: str) -> float:
    """The accuracy in the round that the rule of the headline chooses."""
    accuracy = percents(record, "test_accuracy")
    rule = record["summary"]["selection"]
    if rule == "best-validation":
        return accuracy[percents(record, "validation_accuracy").idxmax()]
    if rule == "best-test":
        return accuracy.max()
    if rule == "last":
        return accuracy.iloc[-1]
    raise SystemExit(f"no reading of the rule {rule} here; write one.")


def last(record: dict, parameter: str) -> float:
    """The accuracy in the last round."""
    return percents(record, "test_accuracy").iloc[-1]


def at(record: dict, parameter: str) -> float:
    """The accuracy after a fraction of the rounds, as "1/4"."""
    exact_number = Fraction(parameter) * record["config"]["rounds"]
    number = math.floor(exact_number + Fraction(1, 2))
    return percents(record, "test_accuracy").get(number, MISSING)


def last_tenth(record: dict, parameter: str) -> float:
    """The mean accuracy over the last tenth of the rounds."""
    num_rounds = record["config"]["rounds"]
    num_last = max(1, num_rounds // 10)
    first = num_rounds - num_last + 1
    return percents(record, "test_accuracy").loc[first:].mean()


def rounds_to(record: dict, parameter: str) -> float:
    """The first round with an accuracy."""
    accuracy = percents(record, "test_accuracy")
    reached = accuracy.index[accuracy >= float(parameter)]
    return float(reached[0]) if len(reached) else MISSING


def in_domains(record: dict, name: str, parameter: str) -> float:
    """The accuracy on domains, on one of them or the mean over all, by the rule of the headline."""
    count = 3 if record["summary"]["selection"] == "mean-last-3" else 1
    accuracies = pd.DataFrame(rounds_of(record)[name].tail(count).tolist())
    of_rounds = accuracies[parameter] if parameter else accuracies.mean(axis="columns")
    return 100 * of_rounds.mean()


def intra(record: dict, parameter: str) -> float:
    """The accuracy on the clients' own domains."""
    return in_domains(record, "intra", parameter)


def inter(record: dict, parameter: str) -> float:
    """The accuracy on the other domains."""
    return in_domains(record, "inter", parameter)


def drift(record: dict, parameter: str) -> float:
    """A distance between clients, as measured last."""
    measured = rounds_of(record)["drift"].dropna()
    return measured.iloc[-1][parameter]


def quality(record: dict, parameter: str) -> float:
    """A score of the features."""
    return record["quality"][parameter]


def floats_up(record: dict, parameter: str) -> float:
    """What a client sends in a round."""
    tested = rounds_of(record)
    if "floats_up" in tested:
        return tested["floats_up"].mean()
    return record["cost"]["floats_up"]


# By the name of a metric, which a parameter may follow after a colon.
READINGS = {
    "selected": selected,
    "last": last,
    "at": at,
    "last-tenth": last_tenth,
    "rounds-to": rounds_to,
    "intra": intra,
    "inter": inter,
    "drift": drift,
    "quality": quality,
    "floats-up": floats_up,
}


def value(record: dict, metric: str) -> float:
    """The number of a run, accuracies in percent; NaN where it has none."""
    name, _, parameter = metric.partition(":")
    if name not in READINGS:
        raise SystemExit(f"no reading of {metric} here; write one.")
    if record["status"] != "finished":
        return MISSING
    return READINGS[name](record, parameter)


def interval(leads: pd.Series) -> Lead:
    """Mean and 95 % interval of the leads of seeds, by Student's t."""
    leads = leads.dropna()
    mean = leads.mean()
    n = len(leads)
    if n < 2:
        return Lead(mean, MISSING, MISSING, n)
    half_width = leads.sem() * stats.t.ppf(0.975, n - 1)
    return Lead(mean, mean - half_width, mean + half_width, n)


def judge(lead: Lead, direction: str, is_exact: bool) -> str:
    """The verdict on a lead; an exact one, of counts, needs no interval."""
    if is_exact:
        is_above = lead.mean > 0
        is_below = lead.mean < 0
    else:
        is_above = lead.n >= 3 and lead.low > 0
        is_below = lead.n >= 3 and lead.high < 0
    if not (is_above or is_below):
        return "undecided"
    is_as_claimed = is_above if direction == "higher" else is_below
    return "reproduced" if is_as_claimed else "contradicted"


def leads_over(pairs: pd.DataFrame, column: str) -> list[Lead]:
    """The lead over each other row, by a column of the pairs of runs, "value" or "tail"."""
    differences = pairs[column] - pairs[f"{column}_than"]
    weighted = pairs.assign(lead=pairs["share"] * differences)
    by_seed = weighted.groupby(["than", "seed"])["lead"].sum(min_count=1)
    return [interval(leads) for _, leads in by_seed.groupby("than")]


def smallest(leads: list[Lead], sign: int) -> Lead:
    """The lead that is the least in the direction of a claim, of those with a value if one has it."""
    with_value = [lead for lead in leads if lead.n]
    return min(with_value or leads, key=lambda lead: sign * lead.mean)


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
