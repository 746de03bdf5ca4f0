"""Numbers that a paper's table reads from the record of a finished run, by name.

    selected            test accuracy by the protocol's selection rule
    last                test accuracy of the last round
    best                highest test accuracy of any round
    last-tenth          mean test accuracy of the last tenth of the rounds, of at least one
    validation          validation accuracy at the selected round
    post                test accuracy after the step that follows the last round
    classifier          accuracy of the classifier, for methods whose headline is the nearest prototype's
    at:1/5              test accuracy after that fraction of the rounds
    rounds-to:70        the first round whose test accuracy reaches 70 percent, counted from 1; no value if none does
    reached:70          test accuracy of that round; no value if there is none
    drift:NAME          how far the clients' models had drifted apart when last measured, such as feature_distance
    domain:NAME         accuracy on the test images of a domain; `domain` is the mean over the domains
    intra:NAME          accuracy of the models of a domain's clients on that domain; `intra` is the mean
    inter:NAME          accuracy of the models of a domain's clients on the other domains; `inter` is the mean
    quality:NAME        a measure of the features, such as nmi or silhouette
    floats-up           floats a client sends in a round
    floats-down         floats a client receives in a round
    memory-floats       floats a client must hold
    total-floats        floats sent up by all clients in all rounds
    total-memory-floats the memory of all clients, counted anew in each round

Accuracies are fractions in a record and percent here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """A number of a run.

    Attributes:
        name: As in a table's cells.
        unit: "percent", "floats", "rounds", or "" for a plain number.
        value: From the record of a finished run to the number, in that unit; None where there is none.
        better: "higher", "lower", or "" where no value is the best.
        field: Where papers/reported.json has the paper's number.
        none: What a finished run without a value is shown as.
    """

    name: str
    unit: str
    value: Callable[[Record], float | None]
    better: str = ""
    field: str = "mean"
    none: str = "not measured"


def find_metric(name: str) -> Metric:
    """The metric of that name.

    Raises:
        ValueError: If there is none; a table that names it is wrong.
    """
    kind, _, parameter = name.partition(":")
    if not parameter and kind in COSTS:
        return Metric(name, "floats", COSTS[kind])
    if not parameter and kind in ACCURACIES:
        return Metric(name, "percent", _percent(ACCURACIES[kind]), "higher")
    if kind in ("domain", "intra", "inter"):
        value = _of_domain("domains" if kind == "domain" else kind, parameter)
        return Metric(name, "percent", _percent(value), "higher")
    if parameter and kind == "at":
        return Metric(name, "percent", _percent(_at(Fraction(parameter))), "higher")
    if parameter and kind == "rounds-to":
        value = _rounds_to(float(parameter) / 100)
        return Metric(name, "rounds", value, "lower", field="rounds_to_target", none="never")
    if parameter and kind == "reached":
        return Metric(name, "percent", _percent(_reached(float(parameter) / 100)), "higher", none="never")
    if parameter and kind == "drift":
        return Metric(name, "", _last_drift(parameter))
    if parameter and kind == "quality":
        return Metric(name, "", lambda record: record.get("quality", {}).get(parameter), "higher")
    raise ValueError(f"unknown metric '{name}'; see fedcli/results/metrics.py")


def _percent(fraction: Callable[[Record], float | None]) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        found = fraction(record)
        return None if found is None else 100 * found

    return value


def _tested(record: Record) -> list[dict]:
    return [entry for entry in record["rounds"] if entry["test_accuracy"] is not None]


def _selected_mean(record: Record, read: Callable[[dict], float | None]) -> float | None:
    """Mean of what is read from the rounds that the selection rule chooses; None where it is missing from one."""
    tested, summary = _tested(record), record["summary"]
    if summary["selection"] == "mean-last-3":
        chosen = tested[-3:]
    else:
        chosen = [entry for entry in tested if entry["round"] == summary["selected_round"]]
    values = [read(entry) for entry in chosen]
    return fmean(values) if values and None not in values else None


def _of_domain(key: str, name: str) -> Callable[[Record], float | None]:
    def read(entry: dict) -> float | None:
        by_domain = entry.get(key) or {}
        if not name:
            return fmean(by_domain.values()) if by_domain else None
        return by_domain.get(name)

    return lambda record: _selected_mean(record, read)


def _at(fraction: Fraction) -> Callable[[Record], float | None]:
    """Accuracy after that share of the planned rounds, to the nearest round; None if it was not evaluated there."""

    def value(record: Record) -> float | None:
        number = max(1, int(fraction * record["config"]["rounds"] + Fraction(1, 2)))
        found = [entry["test_accuracy"] for entry in record["rounds"] if entry["round"] == number - 1]
        return found[0] if found else None

    return value


def _rounds_to(target: float) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        reached = (entry["round"] + 1 for entry in _tested(record) if entry["test_accuracy"] >= target)
        return next(reached, None)

    return value


def _reached(target: float) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        return next((accuracy for entry in _tested(record) if (accuracy := entry["test_accuracy"]) >= target), None)

    return value


def _last_tenth(record: Record) -> float | None:
    first = record["config"]["rounds"] - max(1, record["config"]["rounds"] // 10)
    found = [entry["test_accuracy"] for entry in _tested(record) if entry["round"] >= first]
    return fmean(found) if found else None


def _last_drift(name: str) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        return next((entry["drift"].get(name) for entry in reversed(record["rounds"]) if entry.get("drift")), None)

    return value


def _cost(key: str, in_all: bool = False) -> Callable[[Record], float | None]:
    """Floats of one client in one round, or of the cohort in all rounds, one way as the papers count."""

    def value(record: Record) -> float | None:
        config, found = record["config"], (record["cost"] or {}).get(key)
        return found if found is None or not in_all else found * config["cohort_size"] * config["rounds"]

    return value


def _all_sent(record: Record) -> float | None:
    """Floats that all clients send in all rounds; a round may send more than another."""
    last = (record["cost"] or {}).get("floats_up")
    if last is None:
        return None
    config = record["config"]
    per_round = fmean(entry.get("floats_up", last) for entry in record["rounds"])  # the last one's in older records
    return per_round * config["cohort_size"] * config["rounds"]


ACCURACIES = {
    "selected": lambda record: record["summary"]["selected"],
    "last": lambda record: record["summary"]["last"],
    "best": lambda record: max((entry["test_accuracy"] for entry in _tested(record)), default=None),
    "last-tenth": _last_tenth,
    "post": lambda record: record.get("post", {}).get("test_accuracy"),
    "validation": lambda record: _selected_mean(record, lambda entry: entry["validation_accuracy"]),
    "classifier": lambda record: _selected_mean(record, lambda entry: entry.get("classifier_accuracy")),
}
COSTS = {
    "floats-up": _cost("floats_up"),
    "floats-down": _cost("floats_down"),
    "memory-floats": _cost("memory_floats"),
    "total-floats": _all_sent,
    "total-memory-floats": _cost("memory_floats", in_all=True),
}
