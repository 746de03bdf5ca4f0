"""The numbers of a run, read from its record by the names of metrics."""

import math
from fractions import Fraction

import pandas as pd

MISSING = float("nan")


def rounds_of(record: dict) -> pd.DataFrame:
    """The tested rounds of a run; the index counts from 1."""
    rounds = pd.DataFrame(record["rounds"])
    rounds.index += 1
    return rounds[rounds["test_accuracy"].notna()]


def percents(record: dict, name: str) -> pd.Series:
    """An accuracy in percent in the tested rounds of a run."""
    return 100 * rounds_of(record)[name].astype(float)


def selected(record: dict) -> float:
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


def last(record: dict) -> float:
    """The accuracy in the last round."""
    return percents(record, "test_accuracy").iloc[-1]


def at(record: dict, fraction: str) -> float:
    """The accuracy after a fraction of the rounds, as "1/4"."""
    exact_number = Fraction(fraction) * record["config"]["rounds"]
    number = math.floor(exact_number + Fraction(1, 2))
    return percents(record, "test_accuracy").get(number, MISSING)


def last_tenth(record: dict) -> float:
    """The mean accuracy over the last tenth of the rounds."""
    num_rounds = record["config"]["rounds"]
    num_last = max(1, num_rounds // 10)
    first = num_rounds - num_last + 1
    return percents(record, "test_accuracy").loc[first:].mean()


def rounds_to(record: dict, percent: str) -> float:
    """The first round with an accuracy of so many percent."""
    accuracy = percents(record, "test_accuracy")
    reached = accuracy.index[accuracy >= float(percent)]
    return float(reached[0]) if len(reached) else MISSING


def in_domains(record: dict, name: str, domain: str) -> float:
    """The accuracy on a domain, or the mean over all where it is empty, by the rule of the headline."""
    count = 3 if record["summary"]["selection"] == "mean-last-3" else 1
    accuracies = pd.DataFrame(rounds_of(record)[name].tail(count).tolist())
    of_rounds = accuracies[domain] if domain else accuracies.mean(axis="columns")
    return 100 * of_rounds.mean()


def intra(record: dict, domain: str = "") -> float:
    """The accuracy on the clients' own domains."""
    return in_domains(record, "intra", domain)


def inter(record: dict, domain: str = "") -> float:
    """The accuracy on the other domains."""
    return in_domains(record, "inter", domain)


def drift(record: dict, distance: str) -> float:
    """A distance between clients, as measured last."""
    measured = rounds_of(record)["drift"].dropna()
    return measured.iloc[-1][distance]


def quality(record: dict, score: str) -> float:
    """A score of the features."""
    return record["quality"][score]


def floats_up(record: dict) -> float:
    """What a client sends in a round."""
    tested = rounds_of(record)
    if "floats_up" in tested:
        return tested["floats_up"].mean()
    return record["cost"]["floats_up"]


# By the name of a metric, which an argument may follow after a colon.
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
    name, _, argument = metric.partition(":")
    if name not in READINGS:
        raise SystemExit(f"no reading of {metric} here; write one.")
    if record["status"] != "finished":
        return MISSING
    arguments = [argument] if argument else []
    return READINGS[name](record, *arguments)
