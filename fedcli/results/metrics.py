"""Numbers that tables read from the record of a run, by name.

`@metric` makes a function of a record a metric, and says what it is; some take a parameter, `NAME:PARAMETER`. A user's
own is a plain function in a file, `./file.py:NAME`. Accuracies are fractions in a record and percent in tables.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedcli.errors import UserError, unknown
from fedcli.userfiles import from_file, is_from_file

Record = dict[str, Any]
DECIMALS = {"percent": 2, "": 3, "floats": 0}


class Interval(NamedTuple):
    """A mean over seeds with the interval that holds the expected value in 95 of 100 cases.

    Attributes:
        mean: Of the values.
        low: Its lower end; None with one value.
        high: Its upper end; None with one value.
        n: Number of values.
    """

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def leaves_out_zero(self) -> bool:
        """Whether it lies on one side of zero."""
        return self.low is not None and not self.low <= 0 <= self.high


def interval(values: Sequence[float]) -> Interval | None:
    """The mean with its 95 % interval by Student's t; None without a value."""
    if not values:
        return None
    mean, count = fmean(values), len(values)
    if count == 1:
        return Interval(mean, None, None, 1)
    from scipy.special import stdtrit  # late: it takes a second

    half = float(stdtrit(count - 1, 0.975)) * stdev(values) / count**0.5
    return Interval(mean, mean - half, mean + half, count)


def seeds_needed(found: Interval, most: int) -> int:
    """With how many seeds the interval would leave out zero if mean and spread stayed; `most` + 1 where not so soon."""
    from scipy.special import stdtrit

    spread = (found.high - found.mean) * found.n**0.5 / float(stdtrit(found.n - 1, 0.975))
    enough = (n for n in range(2, most + 1) if float(stdtrit(n - 1, 0.975)) * spread / n**0.5 < abs(found.mean))
    return next(enough, most + 1)


@dataclass(frozen=True)
class Metric:
    """A number of a run.

    Attributes:
        name: As in a table's cells.
        unit: "percent", "floats", "rounds", or "" for a plain number.
        value: From the record of a run to the number, in that unit; None where there is none.
        better: "higher", "lower", or "" where no value is the best.
        field: Where papers/reported.json has the paper's number.
        none: What a finished run without a value is shown as.
        needs: What it is read from: the "last" round or the model after it, the "selected" round, "every" round that
            was to be tested, or the "drift" of the clients' models.
    """

    name: str
    unit: str
    value: Callable[[Record], float | None]
    better: str = ""
    field: str = "mean"
    none: str = "not measured"
    needs: str = "every"

    @property
    def title(self) -> str:
        """Name and unit, as over a column."""
        return f"{self.name}, %" if self.unit == "percent" else self.name

    @property
    def after_the_run(self) -> bool:
        """Whether it is measured, by `fedcli quality`, on the models that a run leaves."""
        return self.name.partition(":")[0] == "quality"

    def text(self, value: float) -> str:
        """A value with the decimals of the unit."""
        return f"{value:,.{DECIMALS.get(self.unit, 0 if value == round(value) else 1)}f}"

    def signed(self, value: float) -> str:
        """A difference with its sign and the decimals of the unit."""
        return f"{value:+,.{DECIMALS.get(self.unit, 1)}f}"

    def counts(self, record: Record) -> bool:
        """Whether a run enters means: a finished one, and one that diverged after its best round on validation."""
        if self.needs == "selected" and diverged(record) and record["summary"]["selection"] == "best-validation":
            return self.value(record) is not None
        return record["status"] == "finished"

    def fits(self, record: Record, eval_every: int) -> bool:
        """Whether a run gives the number that one tested after every `eval_every` rounds would give."""
        if self.needs == "drift":
            return record["config"].get("drift_every", 0) > 0
        of_last = self.needs == "last" or (self.needs == "selected" and record["summary"]["selection"] == "last")
        return of_last or record["config"].get("eval_every", 1) == eval_every

    def values(self, records: Iterable[Record]) -> list[float]:
        """The values of the runs that count and have one."""
        found = [self.value(record) for record in records if self.counts(record)]
        return [value for value in found if value is not None]


def difference(
    metric: Metric, first: Iterable[Record], second: Iterable[Record], second_metric: Metric | None = None
) -> Interval | None:
    """A metric of runs less that of others, paired over the seeds that both have; None where there is no such seed.

    Args:
        metric: What is compared.
        first: Runs of one kind.
        second: Runs of another.
        second_metric: What is read of these, where it is not the same.
    """
    ours, theirs = _by_seed(metric, first), _by_seed(second_metric or metric, second)
    return interval([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def _by_seed(metric: Metric, runs: Iterable[Record]) -> dict[int, float]:
    """The values of the runs that count, by seed."""
    values = {record["seed"]: metric.value(record) for record in runs if metric.counts(record)}
    return {seed: value for seed, value in values.items() if value is not None}


def best(metric: Metric, groups: Sequence[Sequence[Record]]) -> int | None:
    """Which group of runs has the best mean, so that the interval of its lead over the second leaves out zero.

    Args:
        metric: What is compared.
        groups: The runs of each; one without a value is out.

    Returns:
        The place of the group; None where none stands out, or its mean leaves out a run that diverged.
    """
    means = {place: fmean(values) for place, runs in enumerate(groups) if (values := metric.values(runs))}
    if len(means) < 2 or not metric.better:
        return None
    first, second = sorted(means, key=means.get, reverse=metric.better == "higher")[:2]
    ahead = difference(metric, groups[first], groups[second])
    whole = all(metric.counts(record) or not diverged(record) for record in groups[first])
    if not whole or ahead is None or not ahead.leaves_out_zero:
        return None
    return first if (ahead.mean > 0) == (metric.better == "higher") else None


BOLD = (
    "Bold: the best mean{among}, where the 95 % interval (Student's t) of its lead over the second, paired over the "
    "seeds that both have, leaves out zero."
)


@dataclass(frozen=True)
class Kind:
    """An entry of `METRICS`; the attributes that are not here are those of `Metric`.

    Attributes:
        read: From a record, and the parameter of metrics that have one, to the number; accuracies as fractions.
        help: What it is, one line.
        parameter: From what stands behind the colon to the parameter; None for a metric without one.
        optional: Whether the parameter may be left out; it is "" then.
        names: Where the parameter is a name, those that a record has.
    """

    read: Callable[..., float | None]
    help: str
    parameter: Callable[[str], Any] | None = None
    optional: bool = False
    names: Callable[[Record], Iterable[str]] | None = None
    unit: str = "percent"
    better: str = "higher"
    field: str = "mean"
    none: str = "not measured"
    needs: str = "last"


METRICS: dict[str, Kind] = {}


def metric(name: str, help: str, **about: Any) -> Callable[[Callable], Callable]:
    """Registers the function below it as the metric of that name; the arguments are those of `Kind`."""

    def register(read: Callable[..., float | None]) -> Callable[..., float | None]:
        METRICS[name] = Kind(read, help, **about)
        return read

    return register


def find_metric(name: str) -> Metric:
    """The metric of that name, or a user's own, `./file.py:NAME`, a function of a record.

    Raises:
        UserError: If there is none, or it has another parameter; of a user's own also when it gives no number.
    """
    if is_from_file(name):
        own = from_file(name, "metric")

        def checked(record: Record) -> float | None:
            found = own(record)
            if not (found is None or isinstance(found, int | float)):
                raise own.refuse(f"is no metric (it returned {type(found).__name__})", "return a number or None")
            return found

        return Metric(own.name, "", checked)
    key, colon, text = name.partition(":")
    if key not in METRICS:
        raise unknown("metric", key, METRICS, f"there are {', '.join(METRICS)}, and your own by ./file.py:NAME.")
    kind = METRICS[key]
    wanted = "" if kind.parameter is None else f"{key}:PARAMETER"
    if bool(colon) != bool(text) or (text and not wanted) or (wanted and not text and not kind.optional):
        raise UserError(f"the metric '{key}' is not read so (got '{name}'); it is {wanted or key}, write it like that.")
    try:
        given = [] if kind.parameter is None else [kind.parameter(text) if text else ""]
    except ValueError:
        raise UserError(f"the metric '{name}' has no number behind the colon (got '{text}'); give one.") from None
    scale = 100 if kind.unit == "percent" else 1

    def value(record: Record) -> float | None:
        found = kind.read(record, *given)
        return None if found is None else scale * found

    return Metric(name, kind.unit, value, kind.better, kind.field, kind.none, kind.needs)


def refuse_absent(name: str, records: Iterable[Record]) -> None:
    """Refuses a metric that asks for a name, as that of a term, that none of the runs has, where they have others.

    Raises:
        UserError: With the names that they have.
    """
    key, _, wanted = name.partition(":")
    kind = METRICS.get(key)
    if kind is None or kind.names is None or not wanted:
        return
    there = dict.fromkeys(one for record in records for one in kind.names(record))
    if there and wanted not in there:
        raise unknown(key, wanted, there, f"the runs have {', '.join(there)}.")


def diverged(record: Record) -> bool:
    """Whether the run ended because a loss was infinite or NaN."""
    return record["status"] == "failed" and record.get("error", "").startswith("NonFiniteLoss")


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


@metric("selected", "test accuracy by the protocol's selection rule", needs="selected")
def _selected(record: Record) -> float | None:
    return record["summary"]["selected"]


@metric("last", "test accuracy of the last round")
def _last(record: Record) -> float | None:
    return record["summary"]["last"]


@metric("best", "highest test accuracy of any round", needs="every")
def _best(record: Record) -> float | None:
    return max((entry["test_accuracy"] for entry in _tested(record)), default=None)


@metric("last-tenth", "mean test accuracy of the last tenth of the rounds, of at least one", needs="every")
def _last_tenth(record: Record) -> float | None:
    first = record["config"]["rounds"] - max(1, record["config"]["rounds"] // 10)
    found = [entry["test_accuracy"] for entry in _tested(record) if entry["round"] >= first]
    return fmean(found) if found else None


def _of_last(name: str, help: str, combine: Callable[[list[float]], float], **about: Any) -> None:
    """Registers a number of the test accuracies of the last rounds, as many as its parameter says."""

    def read(record: Record, rounds: int) -> float | None:
        found = [one["test_accuracy"] for one in _tested(record) if one["round"] >= record["config"]["rounds"] - rounds]
        return combine(found) if found else None

    metric(name, help, parameter=int, needs="every", **about)(read)


_of_last("mean-of-last", "mean test accuracy of so many last rounds, as mean-of-last:50", fmean)
_of_last("least-of-last", "lowest test accuracy of so many last rounds, as least-of-last:50", min)
_of_last("most-of-last", "highest test accuracy of so many last rounds, as most-of-last:50", max)
_of_last(
    "deviation-of-last", "sample standard deviation of the test accuracies of so many last rounds",
    lambda found: stdev(found) if len(found) > 1 else 0.0, better="lower",
)  # fmt: skip


@metric("largest-step", "largest change of the test accuracy from a tested round to the next", needs="every", better="")
def _largest_step(record: Record) -> float | None:
    found = [entry["test_accuracy"] for entry in _tested(record)]
    return max((abs(after - before) for before, after in pairwise(found)), default=None)


@metric("round", "test accuracy of that round, counted from 1, as round:5", parameter=int, needs="every")
def _of_round(record: Record, number: int) -> float | None:
    return next((entry["test_accuracy"] for entry in record["rounds"] if entry["round"] == number - 1), None)


def _span(text: str) -> tuple[int, int]:
    first, last = map(int, text.split("-"))
    return first, last


@metric("rounds", "mean test accuracy of these rounds, counted from 1, as rounds:1-20", parameter=_span, needs="every")
def _of_rounds(record: Record, span: tuple[int, int]) -> float | None:
    found = [entry["test_accuracy"] for entry in _tested(record) if span[0] <= entry["round"] + 1 <= span[1]]
    return fmean(found) if found else None


@metric(
    "best-round", "the round with the highest test accuracy, counted from 1", unit="rounds", better="", needs="every"
)
def _best_round(record: Record) -> int | None:
    best = max(_tested(record), key=lambda entry: entry["test_accuracy"], default=None)
    return None if best is None else best["round"] + 1


@metric("validation", "validation accuracy at the selected round", needs="selected")
def _validation(record: Record) -> float | None:
    return _selected_mean(record, lambda entry: entry["validation_accuracy"])


@metric("post", "test accuracy after the step that follows the last round")
def _post(record: Record) -> float | None:
    return record.get("post", {}).get("test_accuracy")


@metric("classifier", "accuracy of the classifier, where the headline is the nearest prototype's", needs="selected")
def _classifier(record: Record) -> float | None:
    return _selected_mean(record, lambda entry: entry.get("classifier_accuracy"))


@metric(
    "classifier-of-last", "mean accuracy of the classifier over so many last rounds, as classifier-of-last:50",
    parameter=int, needs="every",
)  # fmt: skip
def _classifier_of_last(record: Record, rounds: int) -> float | None:
    last = [entry for entry in _tested(record) if entry["round"] >= record["config"]["rounds"] - rounds]
    values = [entry["classifier_accuracy"] for entry in last if entry.get("classifier_accuracy") is not None]
    return fmean(values) if values else None


@metric(
    "at", "test accuracy after that fraction of the planned rounds, as at:1/5, to the nearest",
    parameter=Fraction, needs="every",
)  # fmt: skip
def _at(record: Record, fraction: Fraction) -> float | None:
    number = max(1, int(fraction * record["config"]["rounds"] + Fraction(1, 2)))
    found = [entry["test_accuracy"] for entry in record["rounds"] if entry["round"] == number - 1]
    return found[0] if found else None


@metric(
    "rounds-to", "the first round, counted from 1, whose test accuracy reaches so many percent, as rounds-to:70",
    parameter=float, unit="rounds", better="lower", field="rounds_to_target", none="never",
    needs="every",
)  # fmt: skip
def _rounds_to(record: Record, percent: float) -> float | None:
    reached = (entry["round"] + 1 for entry in _tested(record) if entry["test_accuracy"] >= percent / 100)
    return next(reached, None)


@metric("reached", "test accuracy of that round, as reached:70", parameter=float, none="never", needs="every")
def _reached(record: Record, percent: float) -> float | None:
    reached = (entry["test_accuracy"] for entry in _tested(record))
    return next((accuracy for accuracy in reached if accuracy >= percent / 100), None)


def _by_domain(name: str, key: str, help: str) -> None:
    """Registers an accuracy that rounds have by domain; without the name of one, it is the mean over them."""

    def read(record: Record, domain: str) -> float | None:
        def of_round(entry: dict) -> float | None:
            found = entry.get(key) or {}
            return found.get(domain) if domain else fmean(found.values()) if found else None

        return _selected_mean(record, of_round)

    def names(record: Record) -> Iterable[str]:
        return dict.fromkeys(domain for entry in _tested(record) for domain in entry.get(key) or ())

    metric(name, help, parameter=str, optional=True, names=names, needs="selected")(read)


_by_domain("domain", "domains", "accuracy on the test images of a domain, or the mean over domains")
_by_domain("intra", "intra", "accuracy of the models of a domain's clients on that domain, or the mean over domains")
_by_domain("inter", "inter", "accuracy of the models of a domain's clients on the other domains, or the mean")


@metric(
    "quality", "a measure of the features, as quality:nmi or quality:silhouette", parameter=str, unit="",
    names=lambda record: (name for name, found in record.get("quality", {}).items() if isinstance(found, int | float)),
)  # fmt: skip
def _quality(record: Record, name: str) -> float | None:
    return record.get("quality", {}).get(name)


@metric(
    "drift", "how far the clients' models had drifted apart when last measured, as drift:feature_distance",
    parameter=str, unit="", better="", needs="drift",
    names=lambda record: dict.fromkeys(name for entry in record["rounds"] for name in entry.get("drift") or ()),
)  # fmt: skip
def _drift(record: Record, name: str) -> float | None:
    return next((entry["drift"].get(name) for entry in reversed(record["rounds"]) if entry.get("drift")), None)


@metric(
    "term", "a term of the objective in the last round, as term:cross_entropy", parameter=str, unit="", better="",
    names=lambda record: record["rounds"][-1]["terms"] if record["rounds"] else (),
)  # fmt: skip
def _term(record: Record, name: str) -> float | None:
    return record["rounds"][-1]["terms"].get(name) if record["rounds"] else None


def _cost(record: Record, key: str) -> int | None:
    return (record["cost"] or {}).get(key)


def _of_a_round(record: Record, key: str) -> float | None:
    """The mean over rounds, as one may send more than another; older records have the last one's alone."""
    last = _cost(record, key)
    return None if last is None else fmean([entry.get(key, last) for entry in record["rounds"]] or [last])


for _name, _help, _read in (
    ("floats-up", "floats a client sends in a round, on average", partial(_of_a_round, key="floats_up")),
    ("floats-down", "floats a client receives in a round, on average", partial(_of_a_round, key="floats_down")),
    ("memory-floats", "floats a client must hold", partial(_cost, key="memory_floats")),
):
    metric(_name, _help, unit="floats", better="")(_read)


@metric("total-floats", "floats sent up by all clients in all rounds, as the papers count", unit="floats", better="")
def _all_sent(record: Record) -> float | None:
    per_round, config = _of_a_round(record, "floats_up"), record["config"]
    return None if per_round is None else per_round * config["cohort_size"] * config["rounds"]


@metric("total-memory-floats", "the memory of all clients, counted anew in each round", unit="floats", better="")
def _all_memory(record: Record) -> float | None:
    found, config = _cost(record, "memory_floats"), record["config"]
    return None if found is None else found * config["cohort_size"] * config["rounds"]
