"""The numbers of a run, read from its record by the names of metrics."""

import math
from fractions import Fraction

import numpy as np
import pandas as pd

MISSING = float("nan")
ROUNDING = 1e-9  # of accuracies in percent, since 100 times 0.6002 is a little less than 60.02
BEST_BY = {"best-validation": "validation_accuracy", "best-test": "test_accuracy"}  # by the rule of the headline
AVERAGED_ROUNDS = {"last": 1, "mean-last-3": 3}  # the last ones that are tested, by the rule of the headline


def tested_rounds(record: dict) -> pd.DataFrame:
    """The tested rounds of a run; the index counts from 1."""
    if not record["rounds"]:
        return pd.DataFrame({"test_accuracy": []})
    rounds = pd.DataFrame(record["rounds"])
    rounds.index += 1
    return rounds[rounds["test_accuracy"].notna()]


def accuracy_curve(record: dict) -> pd.Series:
    """The accuracies in the tested rounds of a run, in percent."""
    return 100 * tested_rounds(record)["test_accuracy"].astype(float)


def headline_rounds(record: dict) -> pd.DataFrame:
    """The tested rounds of which the headline is the mean, by its rule."""
    tested = tested_rounds(record)
    rule = record["summary"]["selection"]
    if rule in AVERAGED_ROUNDS:
        return tested.tail(AVERAGED_ROUNDS[rule])
    if rule not in BEST_BY:
        raise SystemExit(f"no reading of the rule {rule} here; write one.")
    if tested.empty:
        return tested
    best = tested[BEST_BY[rule]].astype(float).idxmax()
    return tested.loc[[best]]


def selected_accuracy(record: dict) -> float:
    """The accuracy in the rounds that the rule of the headline chooses."""
    return 100 * headline_rounds(record)["test_accuracy"].astype(float).mean()


def last_accuracy(record: dict) -> float:
    """The accuracy in the last round."""
    return accuracy_curve(record).iloc[-1]


def accuracy_at(record: dict, fraction: str) -> float:
    """The accuracy after a fraction of the rounds, as "1/4"."""
    exact_number = Fraction(fraction) * record["config"]["rounds"]
    number = max(1, math.floor(exact_number + Fraction(1, 2)))
    return accuracy_curve(record).get(number, MISSING)


def mean_of_last_tenth(record: dict) -> float:
    """The mean accuracy over the last tenth of the rounds."""
    num_rounds = record["config"]["rounds"]
    num_last = max(1, num_rounds // 10)
    first = num_rounds - num_last + 1
    return accuracy_curve(record).loc[first:].mean()


def rounds_to(record: dict, percent: str) -> float:
    """The first round with an accuracy of at least so many percent."""
    accuracy = accuracy_curve(record)
    reached = accuracy.index[accuracy >= float(percent) - ROUNDING]
    return float(reached[0]) if len(reached) else MISSING


def domain_accuracy(record: dict, name: str, domain: str) -> float:
    """The accuracy on a domain, or the mean over all where it is empty, in the rounds of the headline."""
    rounds = headline_rounds(record)
    if name not in rounds:
        return MISSING
    accuracies = []
    for by_domain in rounds[name]:
        if domain:
            accuracies.append(by_domain.get(domain, MISSING))
        else:
            accuracies.append(np.mean(list(by_domain.values())))
    return 100 * np.mean(accuracies)


def own_domain_accuracy(record: dict, domain: str = "") -> float:
    """The accuracy on the clients' own domains."""
    return domain_accuracy(record, "intra", domain)


def other_domain_accuracy(record: dict, domain: str = "") -> float:
    """The accuracy on the other domains."""
    return domain_accuracy(record, "inter", domain)


def drift(record: dict, distance: str) -> float | None:
    """A distance between clients, as measured last."""
    for entry in reversed(record["rounds"]):
        if entry.get("drift"):
            return entry["drift"].get(distance)
    return None


def quality(record: dict, score: str) -> float | None:
    """A score of the features."""
    return record.get("quality", {}).get(score)


def floats_up(record: dict) -> float:
    """What a client sends in a round, the mean over all rounds; older records have the last round's alone."""
    of_last_round = record["cost"]["floats_up"]
    return np.mean([entry.get("floats_up", of_last_round) for entry in record["rounds"]])


# By the name of a metric, which an argument may follow after a colon.
READINGS = {
    "selected": selected_accuracy,
    "last": last_accuracy,
    "at": accuracy_at,
    "last-tenth": mean_of_last_tenth,
    "rounds-to": rounds_to,
    "intra": own_domain_accuracy,
    "inter": other_domain_accuracy,
    "drift": drift,
    "quality": quality,
    "floats-up": floats_up,
}
LOWER_IS_BETTER = ("rounds-to",)
NEITHER_IS_BETTER = ("drift", "floats-up")
OF_HEADLINE_ROUNDS = ("selected", "intra", "inter")


def read_value(record: dict, metric: str) -> float:
    """The number of a run, accuracies in percent; NaN where it has none."""
    name, _, argument = metric.partition(":")
    if name not in READINGS:
        raise SystemExit(f"no reading of {metric} here; write one.")
    if not has_value(record, name):
        return MISSING
    arguments = [argument] if argument else []
    value = READINGS[name](record, *arguments)
    return MISSING if value is None else value


def better_direction(metric: str, direction: str) -> str:
    """Which values of a metric are better, "higher" or "lower"; those of a claim's direction where neither are."""
    name, _, _ = metric.partition(":")
    if name in NEITHER_IS_BETTER:
        return direction
    return "lower" if name in LOWER_IS_BETTER else "higher"


def has_value(record: dict, name: str) -> bool:
    """Whether a run counts for a metric: one that has finished, or one that diverged after its best round.

    That is a best round by validation, which was chosen without the test images.
    """
    if record["status"] == "finished":
        return True
    has_diverged = record["status"] == "failed" and record.get("error", "").startswith("NonFiniteLoss")
    is_by_validation = record["summary"]["selection"] == "best-validation"
    return has_diverged and is_by_validation and name in OF_HEADLINE_ROUNDS
