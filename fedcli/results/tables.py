"""Tables from run records.

A record is read from `record.json` and never changed. Accuracies are fractions there and percent here.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from fedcli.errors import UserError, printable
from fedcli.registry import find_method, methods
from fedcli.results.frame import frame_of
from fedcli.results.metrics import BOLD, Metric, best, diverged, find_metric
from fedcli.results.render import MISSING, Sheet, github, markdown
from fedcli.runs.config import describe_reductions, flags_of, given_options, recorded_fields, recorded_value, resolve
from fedcli.runs.records import is_packaged, quiet, reductions_of
from fedcli.runs.settings import FIRST, NOT_SETTINGS, differences, draft, key, settings, settings_text
from fedcli.userfiles import own_paths

OUT = re.compile(r" --out[ =](?:'[^']*'|\S+)")  # where older runs went, which their commands tell; taken there
COMPARABLE = ("protocol", "dataset", "partition", "rounds", "train_examples", "selection")
# Columns that stand there only where a run has the number, and its metric.
SOMETIMES = {
    "After --post, %": "post",
    "By the classifier, %": "classifier",
    "Inside its own domain, %": "intra",
    "NMI": "quality:nmi",
    "Silhouette": "quality:silhouette",
}


@dataclass(frozen=True)
class SeedGroup:
    """Runs that agree in everything but the seed.

    Attributes:
        label: Short name among the groups made with it: the method, and those settings that most of them do not have.
        method: Name of the method, marked where the runs used part of the data.
        settings: The options in which it differs from the other groups, by name.
        records: The runs, by seed.
    """

    label: str
    method: str
    settings: dict[str, Any]
    records: list[dict]

    @property
    def finished(self) -> list[dict]:
        """The runs that went through."""
        return [record for record in self.records if record["status"] == "finished"]

    @property
    def diverged(self) -> list[dict]:
        """The runs that ended because a loss was infinite or NaN."""
        return [record for record in self.records if diverged(record)]

    @property
    def selection(self) -> str:
        """The rule behind the headline number."""
        return self.records[0]["summary"]["selection"]


def group(records: Iterable[dict]) -> list[SeedGroup]:
    """The records as groups that agree in everything but the seed, in the order in which they appear.

    The machine (device, chunk size, checkpoint interval) does not divide a group. Other numerics do, and a label. Of
    finished runs with the same seed and parameters, one counts.

    Raises:
        UserError: If there is no record.
    """
    runs = frame_of(records)
    if runs.empty:
        raise UserError("there is no run to show (got 0 records); give the folder of one run or of several runs.")
    runs["parameters"] = [record["summary"].get("params_sha256") for record in runs["record"]]
    copies = runs.duplicated(["label", "key", "numerics", "seed", "parameters"])
    runs = runs[~(copies & (runs["state"] == "finished") & runs["parameters"].notna())]
    parts = [part for _, part in runs.groupby(["label", "key", "numerics"], sort=False)]
    firsts = [part.iloc[0] for part in parts]
    labels = [first["label"] for first in firsts]
    one_method = len({first["method"] for first in firsts}) == 1
    groups = []
    for part, first, (differing, unusual) in zip(parts, firsts, _differences(firsts), strict=True):
        method = first["label"] or first["method"]
        if any(size["what"] == "train_examples" for size in reductions_of(first["record"])):
            method += " (reduced)"  # the notes say what else was smaller
        is_told_by_label = first["label"] and labels.count(first["label"]) == 1
        told_apart = "" if is_told_by_label else settings_text(unusual)
        called = [] if one_method and not first["label"] and told_apart else [method]
        label = ", ".join([*called, *([told_apart] if told_apart else [])])
        groups.append(SeedGroup(label, method, differing, part.sort_values("seed", kind="stable")["record"].tolist()))
    return groups


def _differences(firsts: Sequence[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each run the settings in which it differs, from all others or from its own method's, and the unusual ones.

    An option that only some methods have, or only beside some choice of another, tells nothing about the others. Usual
    is a value that more than half of those have that are compared.
    """
    rows = [{**first["settings"], "numerics": first["numerics"]} for first in firsts]
    shown: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}) for _ in rows]
    for name in dict.fromkeys(name for row in rows for name in row if name != "method"):
        everywhere = name not in ("numerics", "code") and all(name in row for row in rows)
        for row, (differing, unusual) in zip(rows, shown, strict=True):
            peers = rows if everywhere else [other for other in rows if other["method"] == row["method"]]
            others = [other[name] for other in peers if name in other]
            if name in row and any(value != row[name] for value in others):
                differing[name] = row[name]
                if 2 * others.count(row[name]) <= len(others):
                    unusual[name] = row[name]
    return shown


def agreed(records: Iterable[dict]) -> dict[str, Any]:
    """Protocol, data set and partition, those in which all records agree."""
    rows = [settings(record) for record in records]
    return {name: rows[0][name] for name in FIRST[1:] if len({row[name] for row in rows}) == 1}


def smaller_than_protocol(records: Iterable[dict]) -> list[str]:
    """What was smaller in runs than their protocols say, each form once, in words."""
    texts = dict.fromkeys(describe_reductions(reductions_of(record)) for record in records)
    return [text for text in texts if text]


def headline(records: Iterable[dict]) -> str:
    """What all records agree in, and what makes any of them smaller than their protocol: the title of a figure."""
    records = list(records)
    text, smaller = ", ".join(map(str, agreed(records).values())), sorted(smaller_than_protocol(records))
    return f"{text}; reduced: {' or '.join(smaller)}" if smaller else text


def tuned(records: Iterable[dict]) -> Iterator[str]:
    """What was tuned in the runs, a sentence a rule: the options that `fedcli run --tuned` took, with their values."""
    rules: dict[str, set[str]] = {}
    for record in records:
        method = methods().get(record["method"]) if is_packaged(record) else None
        title = method.title.partition(":")[0] if method else record["method"]
        for name, origin in record["origin"].items():
            if origin.startswith("tuned"):
                rule, _, seed = origin.partition(", ")
                value = settings_text({name: record["config"][name]}).removeprefix(name.replace("_", " ") + " ")
                option = f"{title} --{name.replace('_', '-')} {value} on {record['dataset']}"
                rules.setdefault(f"{rule.capitalize()} ({seed})", set()).add(option)
    for rule, options in rules.items():
        yield markdown(f"{rule}: {'; '.join(sorted(options))}.")


def sheet(records: Iterable[dict], metrics: Sequence[str] = ()) -> Sheet:
    """A table with one row a group; its values are the runs, one a line.

    Args:
        records: The runs.
        metrics: Names of metrics that get a column of their own.

    Raises:
        UserError: If there is no record, or a metric is not known.
    """
    records = list(records)
    groups = group(records)
    chosen = [find_metric(name) for name in metrics]
    rules = {member.selection for member in groups}
    selected = f"Selected ({rules.pop() if len(rules) == 1 else 'rule in the row'}), %"
    rows = [_row(member, selected, chosen) for member in groups]
    optional = ("Settings", *SOMETIMES)
    columns = [column for column in rows[0] if column not in optional or any(row[column] for row in rows)]
    ahead = _best(groups)
    lines = []
    for place, row in enumerate(rows):
        strong = (columns[0], selected) if place in ahead else ()
        lines.append([(row[column], "best" if column in strong else "") for column in columns])
    same = ", ".join(f"{name} {markdown(value)}" for name, value in agreed(records).items())
    return Sheet(
        columns, [lines], columns.index(selected), [_flat(record, chosen) for record in records],
        setting=same and f"All rows: {same}.", notes=list(_notes(groups, bool(ahead))),
        details=[column for column in columns if column.startswith(("Validation", "Floats", "Seconds"))],
    )  # fmt: skip


def _row(member: SeedGroup, selected: str, metrics: Sequence[Metric]) -> dict[str, str]:
    """The cells of a group by column; `selected` is the title over its headline."""
    runs, done = member.records, member.finished
    seeds = [", ".join(str(record["seed"]) for record in done)] if done else []
    seeds += [f"seed {record['seed']} {_progress(record)}" for record in runs if record["status"] != "finished"]
    sent = []
    for name in ("floats-up", "floats-down"):
        values = [find_metric(name).value(record) for record in done or runs]
        sent.append(MISSING if None in values else f"{fmean(values):,.0f}")
    # Smallest and largest of the runs' median rounds, since runs of different machines have no meaningful mean.
    seconds = [value for record in done if (value := _round_seconds(record)) is not None]
    paces = dict.fromkeys([f"{min(seconds):.2f}", f"{max(seconds):.2f}"]) if seconds else [MISSING]
    return {
        "Method": member.method,
        "Settings": settings_text(member.settings),
        "Seeds": "; ".join(seeds),
        selected: _mean(find_metric("selected"), runs),
        "Last round, %": _mean(find_metric("last"), runs),
        **{title: _mean(find_metric(name), runs, missing="") for title, name in SOMETIMES.items()},
        **{metric.title: _mean(metric, runs) for metric in metrics},
        "Rounds": str(runs[0]["config"]["rounds"]),
        "Validation at the selected round, %": _mean(find_metric("validation"), runs),
        "Floats up / down, client and round": " / ".join(sent),
        "Seconds a round, median": " to ".join(paces),
    }


def _mean(metric: Metric, records: list[dict], missing: str | None = None) -> str:
    """Mean ± sample standard deviation (number of values, and the runs that diverged); the value alone where it is one.

    Args:
        metric: What is read of each run.
        records: All runs of a group.
        missing: The text where no run has the value; where not given, it says how many diverged.
    """
    values = metric.values(records)
    if not values and missing is not None:
        return missing
    lost = [record for record in records if diverged(record)]
    counted = sum(metric.counts(record) for record in lost)
    notes = [str(len(values))] if values else []
    notes += [f"{counted} diverged"] if counted else []
    notes += [f"{len(lost) - counted} of {len(records)} diverged"] if len(lost) > counted else []
    spread = f" ± {metric.text(stdev(values))}" if len(values) > 1 else ""
    mean = f"{metric.text(fmean(values))}{spread}" if values else MISSING
    return f"{mean} ({', '.join(notes)})" if notes else mean


def _progress(record: dict) -> str:
    """`finished`, or how far a run came that is not."""
    if record["status"] == "finished":
        return "finished"
    status = "diverged" if diverged(record) else record["status"]
    return f"{status} after {len(record['rounds'])} of {record['config']['rounds']} rounds"


def _round_seconds(record: dict) -> float | None:
    """Seconds of the run's median round, which the first one, a warm-up, does not move; None if they were disturbed."""
    totals = [sum(entry["seconds"].values()) for entry in record["rounds"] if entry.get("seconds")]
    return median(totals) if totals and quiet(record) else None


def rivals(groups: Sequence[SeedGroup]) -> list[list[int]]:
    """The places of groups that can be compared: those of one protocol, data set, partition, size and rule."""
    places: dict[str, list[int]] = {}
    for place, member in enumerate(groups):
        values = settings(member.records[0])
        places.setdefault(key({name: values[name] for name in COMPARABLE}), []).append(place)
    return list(places.values())


def _best(groups: Sequence[SeedGroup]) -> set[int]:
    """The places of groups that stand out as the best among those they can be compared with."""
    ahead = set()
    for places in rivals(groups):
        winner = best(find_metric("selected"), [groups[place].records for place in places])
        if winner is not None:
            ahead.add(places[winner])
    return ahead


def _notes(groups: Sequence[SeedGroup], bold: bool) -> Iterator[str]:
    """What a reader must know of the numbers, each only where it applies."""
    records = [record for member in groups for record in member.records]
    yield "Mean ± sample standard deviation over runs (number of runs); a value without ± is one run."
    if any(map(diverged, records)):
        yield (
            "Diverged: a loss became infinite or NaN. Where the best round on validation counts, that of such a run "
            "does; other means are without it, and say so."
        )
    if any(record["status"] != "finished" and not diverged(record) for record in records):
        yield "Unfinished runs enter no mean."
    repeated = [member.label for member in groups if len({r["seed"] for r in member.finished}) < len(member.finished)]
    if repeated:
        yield f"A seed was run more than once, and each run counts, in: {markdown('; '.join(repeated))}."
    if smaller := smaller_than_protocol(records):
        yield f"Reduced against the protocol: {'; or '.join(smaller)}."
    if given := "; ".join(_given(groups)):
        yield f"Options given with the runs: {given}."
    yield from tuned(records)
    if not all(map(quiet, records)):
        yield "Seconds that were measured while the machine did other work are left out."
    if bold:
        yield BOLD.format(among=" among rows with the same protocol, data set, partition, rounds and selection rule")


def _given(groups: Sequence[SeedGroup]) -> Iterator[str]:
    """Options that somebody has given and no other line says, with the methods that have them where not all do.

    Rows of a method that differ in an option show it, so what is left is that of the whole method.
    """
    having: dict[tuple[str, str], dict[str, Any]] = {}  # by option and value as text, the value by method
    for member in groups:
        record = member.records[0]
        told = {"protocol", "dataset", "partition", "rounds", *NOT_SETTINGS, *member.settings}
        told |= {size["what"] for size in reductions_of(record)}
        for name, value in given_options(record["config"], record["origin"]).items():
            if name not in told and not record["origin"][name].startswith("tuned"):
                having.setdefault((name, str(value)), {})[member.method] = value
    every = {member.method for member in groups}
    shared: dict[str, dict[str, Any]] = {}  # options by the methods that have them, as text
    for (name, _), values in having.items():
        owners = "" if {*values} == every else f" ({'; '.join(values)})"
        shared.setdefault(owners, {})[name] = next(iter(values.values()))
    for owners, options in shared.items():
        yield markdown(settings_text(options) + owners)


def _flat(record: dict, metrics: Sequence[Metric]) -> dict[str, Any]:
    """One run as a flat row; rounds count from 1, accuracies are in percent."""
    summary, cost, config = record["summary"], record.get("cost") or {}, record["config"]

    def value(name: str) -> float | None:
        return find_metric(name).value(record)

    sent = {name: value(name.replace("_", "-")) for name in ("floats_down", "floats_up")}
    chosen = summary["selected_round"]
    return {
        **{name: record[name] for name in ("method", "protocol", "dataset", "seed", "status")},
        "reduced": describe_reductions(reductions_of(record)),
        "partition_fingerprint": record["partition"]["fingerprint"],
        "selection": summary["selection"],
        "selected": value("selected"),
        "selected_round": None if chosen is None else chosen + 1,
        "last": value("last"),
        "validation_accuracy": value("validation"),
        "rounds_done": len(record["rounds"]),
        **({"post_accuracy": value("post")} if "post" in record else {}),
        **{metric.title: metric.value(record) for metric in metrics},
        **{name: None if floats is None else round(floats) for name, floats in sent.items()},
        **{name: cost.get(name) for name in ("memory_floats", "buffer_floats")},
        "parameters": record.get("model", {}).get("parameters"),
        "params_sha256": summary.get("params_sha256"),
        "seconds_round_median": _round_seconds(record),
        "seconds_total": record.get("seconds_total") if quiet(record) else None,
        **{name: record.get(name) for name in ("method_hash", "commit")},
        **{f"config.{name}": option for name, option in config.items()},
    }


def every_run(groups: Iterable[SeedGroup]) -> list[str]:
    """A table with one row a run."""

    def text(value: float | None, form: str) -> str:
        return MISSING if value is None else format(value, form)

    rows = []
    for member in groups:
        for record in member.records:
            run = _flat(record, ())
            rows.append(
                {
                    "Method": markdown(member.method),
                    "Settings": markdown(settings_text(member.settings)),
                    "Seed": str(run["seed"]),
                    "Status": _progress(record),
                    "Selected, %": text(run["selected"], ".2f"),
                    "Selected round": text(run["selected_round"], "d"),
                    "Last round, %": text(run["last"], ".2f"),
                    "Seconds": text(run["seconds_total"], ",.0f"),
                    "Partition": f"`{markdown(run['partition_fingerprint'][:12])}`",
                    "Parameters": f"`{markdown((run['params_sha256'] or MISSING)[:12])}`",
                }
            )
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    return github(columns, [[row[column] for column in columns] for row in rows])


def machines(records: Iterable[dict]) -> list[str]:
    """One line for each machine and set of versions, with the number of runs it did."""

    def words(about: dict) -> list[str]:
        texts = []
        for part in (about[name] for name in ("hardware", "versions") if about.get(name)):
            pairs = [f"{name.replace('_', ' ')} {value}" for name, value in part.items() if value is not None]
            texts.append(markdown(", ".join(pairs)))
        return texts

    counts = Counter()
    for record in records:
        texts = words(record)
        for move in record.get("moved", ()):
            texts += [f"from round {move['round'] + 1} on {text}" for text in words(move)]
        counts[" · ".join(texts) or "not recorded"] += 1
    return [f"- {count} run{'s' * (count > 1)}: {place}" for place, count in counts.items()]


def commands(records: Iterable[dict]) -> list[str]:
    """What to type to make these runs again, as far as they were made so; each command once."""
    return [*dict.fromkeys(_command(record) for record in records if record.get("command", "").startswith("fedcli "))]


def _command(record: dict) -> str:
    """A run's command, with the options that its protocol or a default would set otherwise by now."""
    command, config, origin = OUT.sub("", printable(record["command"])), record["config"], record.get("origin", {})
    given = {name: value for name, value in given_options(config, origin).items() if value is not None}
    given |= {name: record[name] for name in ("protocol", "dataset", "seed")}
    if own_paths([record["method"], record["method_source"], *given.values(), *config.values()]):
        return command  # a file of the user's is not imported because a record names it
    try:
        method = find_method(record["method"])
        setup = resolve(method, given, need_data=False)
    except (UserError, TypeError):  # what it names is there no more, or never was
        return command
    fields = recorded_fields(method, config.get("post"))
    other = differences(settings(record), settings(draft(setup)))
    values = {name: recorded_value(config, fields[name]) for name in other if name in fields}
    moved = {name: value for name, value in values.items() if value != setup.values().get(name)}
    return " ".join([command, *map(shlex.quote, flags_of(moved))])
