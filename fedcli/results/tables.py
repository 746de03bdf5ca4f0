"""Tables from run records.

A record is read from `record.json` and never changed. Accuracies are fractions there and percent here.
"""

import re
import shlex
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
from fedcli.runs.settings import FIRST, NOT_SETTINGS, key, settings, settings_text
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
    runs["parameters"] = [_summary(record, "params_sha256") for record in runs["record"]]
    copies = runs.duplicated(["label", "key", "numerics", "seed", "parameters"])
    runs = runs[~(copies & (runs["state"] == "finished") & runs["parameters"].notna())]
    parts = [part for _, part in runs.groupby(["label", "key", "numerics"], sort=False, dropna=False)]
    firsts = [part.iloc[0] for part in parts]
    groups = []
    for part, first, (differing, unusual) in zip(parts, firsts, _differences(firsts), strict=True):
        called = [other["label"] for other in firsts].count(first["label"])
        name = first["method"] if first["label"] is None else first["label"]
        method = name + (" (reduced)" if _is_part(first["record"]) else "")
        told_apart = settings_text(unusual)
        if first["label"] is not None and called == 1:
            told_apart = ""
        one_method = first["label"] is None and len({other["method"] for other in firsts}) == 1
        label = told_apart if one_method and told_apart else ", ".join(filter(None, (method, told_apart)))
        groups.append(SeedGroup(label, method, differing, part.sort_values("seed", kind="stable")["record"].tolist()))
    return groups


def _is_part(record: dict) -> bool:
    """True where training images were left out; the notes say what else was smaller, as rounds have a column."""
    return any(one["what"] == "train_examples" for one in reductions_of(record))


def agreed(records: Iterable[dict]) -> dict[str, Any]:
    """Protocol, data set and partition, those in which all records agree."""
    rows = [settings(record) for record in records]
    return {name: rows[0][name] for name in FIRST[1:] if len({row[name] for row in rows}) == 1}


def headline(records: Iterable[dict]) -> str:
    """What all records agree in, and what makes any of them smaller than their protocol: the title of a figure."""
    records = list(records)
    smaller = {describe_reductions(reductions_of(record)) for record in records} - {""}
    reduced = [f"reduced: {' or '.join(sorted(smaller))}"] if smaller else []
    return "; ".join([", ".join(map(str, agreed(records).values())), *reduced])


def tuned(records: Iterable[dict]) -> Iterator[str]:
    """What was tuned in the runs, a sentence a rule: the options that `fedcli run --tuned` took, with their values."""
    rules: dict[str, dict[str, None]] = {}
    for record in records:
        for name, origin in record.get("origin", {}).items():
            if origin.startswith("tuned"):
                rule, _, seed = origin.partition(", ")
                value = settings_text({name: record["config"][name]}).removeprefix(name.replace("_", " ") + " ")
                option = f"{_title(record)} --{name.replace('_', '-')} {value} on {record['dataset']}"
                rules.setdefault(f"{rule.capitalize()} ({seed})", {})[option] = None
    yield from (markdown(f"{rule}: {'; '.join(sorted(options))}.") for rule, options in rules.items())


def _title(record: dict) -> str:
    """The method as its paper calls it; of a user's own, its name."""
    method = methods().get(record["method"]) if is_packaged(record) else None
    return method.title.partition(":")[0] if method else record["method"]


def sheet(records: Iterable[dict], metrics: Sequence[str] = ()) -> Sheet:
    """A table with one row a group; its values are the runs, one a line, as their records have them.

    Args:
        records: The runs.
        metrics: Names of metrics that get a column of their own.

    Raises:
        UserError: If there is no record, or a metric is not known.
    """
    records = list(records)
    groups = group(records)
    own = [find_metric(name) for name in metrics]
    rows = _rows(groups, own)
    optional = ("Settings", *SOMETIMES)
    columns = [column for column in rows[0] if column not in optional or any(row[column] for row in rows)]
    selected, ahead = _selected_title(groups), _best(groups)
    lines = [
        [(row[column], "best" if strong and column in (columns[0], selected) else "") for column in columns]
        for row, strong in zip(rows, ahead, strict=True)
    ]
    same = ", ".join(f"{key} {markdown(value)}" for key, value in agreed(records).items())
    return Sheet(
        columns, [lines], columns.index(selected), [_flat(record, own) for record in records],
        setting=same and f"All rows: {same}.", notes=list(_notes(groups, any(ahead))),
        details=[column for column in columns if column.startswith(("Validation", "Floats", "Seconds"))],
    )  # fmt: skip


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


def _summary(record: dict, key: str) -> Any:
    return (record.get("summary") or {}).get(key)


def _round_seconds(record: dict) -> float | None:
    """Seconds of the run's median round, which the first one, a warm-up, does not move; None if they were disturbed."""
    totals = [sum(row["seconds"].values()) for row in record["rounds"] if row.get("seconds") and quiet(record)]
    return median(totals) if totals else None


def _total_seconds(record: dict) -> float | None:
    """Seconds of the whole run; None if they were disturbed."""
    return record.get("seconds_total") if quiet(record) else None


def _mean(metric: Metric, records: list[dict], always: bool = True) -> str:
    """Mean ± sample standard deviation (number of values, and the runs that diverged); the value alone where it is one.

    Args:
        metric: What is read of each run.
        records: All runs of a group.
        always: Whether there is a text also where no run has the value.
    """
    known = metric.values(records)
    if not known and not always:
        return ""
    lost = [record for record in records if diverged(record)]
    counted = sum(metric.counts(record) for record in lost)
    notes = [str(len(known))] if known else []
    notes += [f"{counted} diverged"] if counted else []
    notes += [f"{len(lost) - counted} of {len(records)} diverged"] if len(lost) > counted else []
    spread = f" ± {metric.text(stdev(known))}" if len(known) > 1 else ""
    mean = f"{metric.text(fmean(known))}{spread}" if known else MISSING
    return f"{mean} ({', '.join(notes)})" if notes else mean


def _seconds(records: list[dict]) -> str:
    """Smallest and largest of the runs' median rounds: runs of different machines have no meaningful mean."""
    known = [seconds for record in records if (seconds := _round_seconds(record)) is not None]
    if not known:
        return MISSING
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} to {high}"


def _floats(records: Sequence[dict]) -> str:
    """Floats one client sends and receives in a round, on average."""
    sent = [[find_metric(name).value(record) for record in records] for name in ("floats-up", "floats-down")]
    return " / ".join(MISSING if None in values else f"{fmean(values):,.0f}" for values in sent)


def _progress(record: dict) -> str:
    """`finished`, or how far a run came that is not."""
    if record["status"] == "finished":
        return "finished"
    status = "diverged" if diverged(record) else record["status"]
    return f"{status} after {len(record['rounds'])} of {record['config'].get('rounds', '?')} rounds"


def _seeds(member: SeedGroup) -> str:
    """The seeds of the finished runs, then each unfinished one with how far it came."""
    finished = ", ".join(str(record["seed"]) for record in member.finished)
    others = [
        f"seed {record['seed']} {_progress(record)}" for record in member.records if record["status"] != "finished"
    ]
    return "; ".join(filter(None, [finished, *others]))


def _selected_title(groups: list[SeedGroup]) -> str:
    rules = {member.selection for member in groups}
    return f"Selected ({rules.pop() if len(rules) == 1 else 'rule in the row'}), %"


def _rows(groups: list[SeedGroup], own: Sequence[Metric]) -> list[dict[str, str]]:
    """The cells of each group by column."""
    rows = []
    for member in groups:
        runs, done = member.records, member.finished
        rows.append(
            {
                "Method": member.method,
                "Settings": settings_text(member.settings),
                "Seeds": _seeds(member),
                _selected_title(groups): _mean(find_metric("selected"), runs),
                "Last round, %": _mean(find_metric("last"), runs),
                **{title: _mean(find_metric(name), runs, always=False) for title, name in SOMETIMES.items()},
                **{metric.title: _mean(metric, runs) for metric in own},
                "Rounds": str(runs[0]["config"].get("rounds", MISSING)),
                "Validation at the selected round, %": _mean(find_metric("validation"), runs),
                "Floats up / down, client and round": _floats(done or runs),
                "Seconds a round, median": _seconds(done),
            }
        )
    return rows


def rivals(groups: Sequence[SeedGroup]) -> list[list[int]]:
    """The places of groups that can be compared: those of one protocol, data set, partition, size and rule."""
    places: dict[str, list[int]] = {}
    for place, member in enumerate(groups):
        values = settings(member.records[0])
        places.setdefault(key({name: values[name] for name in COMPARABLE}), []).append(place)
    return list(places.values())


def _best(groups: list[SeedGroup]) -> list[bool]:
    """Whether a group stands out as the best among its rivals."""
    ahead = [
        places[winner]
        for places in rivals(groups)
        if (winner := best(find_metric("selected"), [groups[place].records for place in places])) is not None
    ]
    return [place in ahead for place in range(len(groups))]


def _notes(groups: list[SeedGroup], bold: bool) -> Iterator[str]:
    """What a reader must know of the numbers, each only where it applies."""
    records = [record for member in groups for record in member.records]
    repeated = [member.label for member in groups if len({r["seed"] for r in member.finished}) < len(member.finished)]
    yield "Mean ± sample standard deviation over runs (number of runs); a value without ± is one run."
    if any(map(diverged, records)):
        yield (
            "Diverged: a loss became infinite or NaN. Where the best round on validation counts, that of such a run "
            "does; other means are without it, and say so."
        )
    if any(record["status"] != "finished" and not diverged(record) for record in records):
        yield "Unfinished runs enter no mean."
    if repeated:
        yield f"A seed was run more than once, and each run counts, in: {markdown('; '.join(repeated))}."
    if smaller := dict.fromkeys(filter(None, (describe_reductions(reductions_of(record)) for record in records))):
        yield f"Reduced against the protocol: {'; or '.join(smaller)}."
    if given := "; ".join(_given(groups)):
        yield f"Options given with the runs: {given}."
    yield from tuned(records)
    if not all(map(quiet, records)):
        yield "Seconds that were measured while the machine did other work are left out."
    if bold:
        yield BOLD.format(among=" among rows with the same protocol, data set, partition, rounds and selection rule")


def _given(groups: list[SeedGroup]) -> Iterator[str]:
    """Options that somebody has given and no other line says, with the methods that have them where not all do.

    Rows of a method that differ in an option show it, so what is left is that of the whole method.
    """
    having: dict[tuple[str, str], dict[str, Any]] = {}  # by option and value as text, the value by method
    for member in groups:
        record = member.records[0]
        told = {"protocol", "dataset", "partition", "rounds", *NOT_SETTINGS, *member.settings}
        told |= {one["what"] for one in reductions_of(record)}
        origin = record.get("origin", {})
        for name, value in given_options(record["config"], origin).items():
            if name not in told and not origin[name].startswith("tuned"):
                having.setdefault((name, str(value)), {})[member.method] = value
    every = {member.method for member in groups}
    shared: dict[str, dict[str, Any]] = {}  # options by the methods that have them, as text
    for (name, _), values in having.items():
        of = "" if {*values} == every else f" ({'; '.join(values)})"
        shared.setdefault(of, {})[name] = next(iter(values.values()))
    yield from (markdown(settings_text(options) + of) for of, options in shared.items())


def _flat(record: dict, own: Sequence[Metric]) -> dict[str, Any]:
    """One run as a flat row; rounds are counted from 0 as in the record."""
    summary, cost = ((record.get(part) or {}) for part in ("summary", "cost"))
    row = {key: record.get(key) for key in ("method", "protocol", "dataset", "seed", "status")}
    row |= {"reduced": describe_reductions(reductions_of(record))}
    row |= {"partition_fingerprint": record.get("partition", {}).get("fingerprint")}
    row |= {key: summary.get(key) for key in ("selection", "selected", "selected_round", "last")}
    chosen = [entry for entry in record["rounds"] if entry["round"] == summary.get("selected_round")]
    row |= {"validation_accuracy": chosen[0].get("validation_accuracy") if chosen else None}
    row |= {"rounds_done": len(record["rounds"])}
    row |= {"post_accuracy": record["post"].get("test_accuracy")} if "post" in record else {}
    row |= {metric.title: metric.value(record) for metric in own}
    sent = {key: find_metric(key.replace("_", "-")).value(record) for key in ("floats_down", "floats_up")}
    row |= {key: None if value is None else round(value) for key, value in sent.items()}
    row |= {key: cost.get(key) for key in ("memory_floats", "buffer_floats")}
    row |= {"parameters": record.get("model", {}).get("parameters"), "params_sha256": summary.get("params_sha256")}
    row |= {"seconds_round_median": _round_seconds(record), "seconds_total": _total_seconds(record)}
    row |= {key: record.get(key) for key in ("method_hash", "commit")}
    return row | {f"config.{key}": value for key, value in record["config"].items()}


def every_run(groups: list[SeedGroup]) -> list[str]:
    """A table with one row a run."""
    rows = []
    for member in groups:
        for record in member.records:
            selected, last = (_summary(record, key) for key in ("selected", "last"))
            chosen, total = _summary(record, "selected_round"), _total_seconds(record)
            rows.append(
                {
                    "Method": markdown(member.method),
                    "Settings": markdown(settings_text(member.settings)),
                    "Seed": str(record["seed"]),
                    "Status": _progress(record),
                    "Selected, %": MISSING if selected is None else f"{100 * selected:.2f}",
                    "Selected round": MISSING if chosen is None else str(chosen + 1),
                    "Last round, %": MISSING if last is None else f"{100 * last:.2f}",
                    "Seconds": MISSING if total is None else f"{total:,.0f}",
                    "Partition": f"`{markdown(record.get('partition', {}).get('fingerprint', MISSING)[:12])}`",
                    "Parameters": f"`{markdown((_summary(record, 'params_sha256') or MISSING)[:12])}`",
                }
            )
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    return github(columns, [[row[column] for column in columns] for row in rows])


def machines(records: list[dict]) -> list[str]:
    """One line for each machine and set of versions, with the number of runs it did."""

    def words(part: Any) -> str:
        if not isinstance(part, dict):
            return markdown(str(part))
        known = (f"{key.replace('_', ' ')} {value}" for key, value in part.items() if value is not None)
        return markdown(", ".join(known))

    def where(about: dict) -> Iterator[str]:
        yield from (words(about[part]) for part in ("hardware", "versions") if about.get(part))
        for move in about.get("moved", ()):
            yield from (f"from round {move['round'] + 1} on {text}" for text in where(move))

    places = [" · ".join(where(record)) for record in records]
    known = [place or "not recorded" for place in places]
    return [f"- {known.count(place)} run{'s' * (known.count(place) > 1)}: {place}" for place in dict.fromkeys(known)]


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
        now, fields = resolve(method, given, need_data=False).values(), recorded_fields(method, config.get("post"))
    except (UserError, TypeError):  # what it names is there no more, or never was
        return command
    had = {name: recorded_value(config, fields[name]) for name in now if name not in NOT_SETTINGS}
    moved = {name: value for name, value in had.items() if value != now[name]}
    return " ".join([command, *map(shlex.quote, flags_of(moved))])
