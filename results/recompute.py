"""Computes the claims' differences and verdicts anew from the records, by code that shares nothing with `fedcli`.

    fedcli claims --runs results/records --format csv | python results/recompute.py

Which runs, metrics and rows a claim has stands in the table; values and rounds are read from the records. The exit code
is 1 where a difference, an interval or a verdict disagrees.
"""

import json
import sys
from pathlib import Path

import pandas as pd
from scipy import stats

COLUMNS = ["mean", "low", "high", "n"]
RANKS = ["contradicted", "undecided", "reproduced"]  # the weakest first


def rounds_of(record: dict) -> pd.DataFrame:
    """The tested rounds of a run; the index counts from 1."""
    rounds = pd.DataFrame(record["rounds"]).set_index(pd.RangeIndex(1, len(record["rounds"]) + 1))
    return rounds[rounds["test_accuracy"].notna()]


def value(record: dict, metric: str) -> float:
    """The number of a run, accuracies in percent; NaN where it has none."""
    name, _, parameter = metric.partition(":")
    tested, planned = rounds_of(record), record["config"]["rounds"]
    accuracy = 100 * tested["test_accuracy"].astype(float)
    chosen = {  # by the rule of the headline
        "best-validation": lambda: tested["validation_accuracy"].astype(float).idxmax(),
        "best-test": accuracy.idxmax,
        "last": lambda: tested.index[-1],
    }
    if record["status"] != "finished":
        return float("nan")
    if name == "selected":
        return accuracy[chosen[record["summary"]["selection"]]()]
    if name == "last":
        return accuracy.iloc[-1]
    if name == "at":
        top, bottom = map(int, parameter.split("/"))
        return accuracy.get(int(top * planned / bottom + 0.5), float("nan"))
    if name == "last-tenth":
        return accuracy.loc[planned - max(1, planned // 10) + 1 :].mean()
    if name == "rounds-to":
        return float(next((number for number, percent in accuracy.items() if percent >= float(parameter)), "nan"))
    if name in ("intra", "inter"):
        last = tested[name].tail(3) if record["summary"]["selection"] == "mean-last-3" else tested[name].tail(1)
        return 100 * last.map(lambda of: of[parameter] if parameter else sum(of.values()) / len(of)).mean()
    if name == "drift":
        return tested["drift"].dropna().iloc[-1][parameter]
    if name == "quality":
        return record["quality"][parameter]
    if name == "floats-up":
        return tested["floats_up"].mean() if "floats_up" in tested else record["cost"]["floats_up"]
    raise SystemExit(f"no reading of {metric} here; write one.")


def interval(leads: pd.Series) -> pd.Series:
    """Mean and 95 % interval of the leads, by Student's t."""
    leads, error = leads.dropna(), float("nan")
    if len(leads) > 1:
        error = leads.sem() * stats.t.ppf(0.975, len(leads) - 1)
    return pd.Series([leads.mean(), leads.mean() - error, leads.mean() + error, len(leads)], COLUMNS, dtype=float)


def judge(lead: pd.Series, direction: str, exact: bool) -> str:
    """The verdict on a lead."""
    low, high = (lead["mean"], lead["mean"]) if exact else (lead["low"], lead["high"])
    if (lead["n"] < 3 and not exact) or not (low > 0 or high < 0):
        return "undecided"
    return "reproduced" if (low > 0) == (direction == "higher") else "contradicted"


def recompute(claim: pd.Series) -> tuple[pd.Series, pd.Series, str]:
    """The smallest lead of a claim, that over the last tenth of the rounds, and the verdict."""
    pairs, sign = pd.DataFrame(json.loads(claim["pairs"])), 1 if claim["direction"] == "higher" else -1
    for end in ("", "_than"):
        records = [json.loads((Path(folder) / "record.json").read_text()) for folder in pairs[f"folder{end}"]]
        pairs[f"value{end}"] = list(map(value, records, pairs[f"metric{end}"]))
        pairs[f"tail{end}"] = [value(record, "last-tenth") for record in records]
    leads = {}
    for kind in ("value", "tail"):
        pairs["lead"] = pairs["share"] * (pairs[kind] - pairs[f"{kind}_than"])
        seeds = pairs.groupby(["than", "seed"])["lead"].sum(min_count=1)
        leads[kind] = seeds.groupby("than").apply(interval).unstack()
    lead, tail = leads["value"], leads["tail"]
    exact = claim["metric"].startswith("floats")
    lead["verdict"] = [judge(row, claim["direction"], exact) for _, row in lead.iterrows()]
    lead["rank"], lead["size"] = lead["verdict"].map(RANKS.index), sign * lead["mean"]
    least = lead.sort_values(["rank", "size"]).iloc[0]
    verdict = least["verdict"]
    if len(lead) < len(claim["than"].split("; ")) and verdict == "reproduced":
        verdict = "undecided"
    return least[COLUMNS], tail.loc[(sign * tail["mean"]).idxmin()], verdict


def main() -> None:
    """Compares all claims that have runs."""
    table, faults = pd.read_csv(sys.stdin), []
    judged = table[table["pairs"] != "[]"]
    for _, claim in judged.iterrows():
        lead, tail, verdict = recompute(claim)
        here = [*lead, *(tail[["mean", "low", "high"]] if pd.notna(claim["tail"]) else [float("nan")] * 3)]
        there = claim[["ours", "low", "high", "n", "tail", "tail_low", "tail_high"]].astype(float)
        is_verdict = verdict == {"by construction": "reproduced"}.get(claim["verdict"], claim["verdict"])
        if not is_verdict or [f"{number:.7f}" for number in here] != [f"{number:.7f}" for number in there]:
            faults.append(f"{claim['claim']}: {verdict} {here} here, {claim['verdict']} {there.tolist()} there")
    print(f"{len(judged)} claims recomputed, {len(faults)} otherwise", *faults, sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
