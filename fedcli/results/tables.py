"""Tables of runs: which runs stand in a row, what a row says of them, and every run as a row of numbers.

A record is read from `record.json` and never changed. Accuracies are fractions there and percent here. Numbers of two
protocols or data sets cannot be compared, so they share no table and no panel.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pandas as pd

from fedcli.errors import UserError, printable, unknown
from fedcli.registry import find_method, methods
from fedcli.results.frame import STATES, frame_of, state_of
from fedcli.results.metrics import BOLD, DIVERGED, Metric, best, diverged, find_metric
from fedcli.results.render import MISSING, Sheet, github, markdown
from fedcli.runs.config import describe_reductions, flags_of, given_options, recorded_fields, recorded_value, resolve
from fedcli.runs.records import is_packaged, quiet, reductions_of
from fedcli.runs.settings import FIRST, NOT_SETTINGS, differences, draft, settings, settings_text
from fedcli.userfiles import own_paths

OUT = re.compile(r" --out[ =](?:'[^']*'|\S+)")  # where older runs went, which their commands tell; taken there
COMPARABLE = ("protocol", "dataset", "partition", "rounds", "train_examples", "selection")
# Columns that stand there only where a run has the number, and its metric.
SOMETIMES = {
    "Validation at the selected round, %": "validation",
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
    def selection(self) -> str:
        """The rule behind the headline number."""
        return self.records[0]["summary"]["selection"]


def select(records: Iterable[dict], methods: Sequence[str] = (), datasets: Sequence[str] = ()) -> list[dict]:
    """The records of these methods and data sets; of all where none is named. Case does not count.

    Raises:
        UserError: If no record is of one of those that are named.
    """
    kept = list(records)
    for key, names, kind in (("method", methods, "method"), ("dataset", datasets, "data set")):
        there = {record[key].lower(): record[key] for record in kept}
        for name in names:
            if name.lower() not in there:
                raise unknown(f"{kind} among the runs", name, there, f"there are {', '.join(there.values())}.")
        chosen = [name.lower() for name in names or there]
        kept = [record for record in kept if record[key].lower() in chosen]
    return kept


def boards(records: Iterable[dict]) -> dict[str, list[dict]]:
    """The records by protocol and data set, in the order in which these appear."""
    parts: dict[str, list[dict]] = {}
    for record in records:
        parts.setdefault(f"{record['protocol']}, {record['dataset']}", []).append(record)
    return parts


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
    labels = Counter(first["label"] for first in firsts)
    one_method = len({first["method"] for first in firsts}) == 1
    groups = []
    for part, first, (differing, unusual) in zip(parts, firsts, _differences(firsts), strict=True):
        method = first["label"] or first["method"]
        if any(size["what"] == "train_examples" for size in reductions_of(first["record"])):
            method += " (reduced)"  # the notes say what else was smaller
        told_apart = "" if first["label"] and labels[first["label"]] == 1 else settings_text(unusual)
        called = "" if one_method and not first["label"] and told_apart else method
        label = ", ".join(filter(None, (called, told_apart)))
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


def tuned(records: Iterable[dict]) -> Iterator[str]:
    """What was tuned in the runs, a sentence a rule: the options that `fedcli run --tuned` took, with their values."""
    rules: dict[str, set[str]] = {}
    for record in records:
        method = methods().get(record["method"]) if is_packaged(record) else None
        title = method.title.partition(":")[0] if method else record["method"]
        for name, origin in record["origin"].items():
            if origin.startswith("tuned"):
                rule, _, seed = origin.partition(", ")
                (flag,) = flags_of({name: record["config"][name]})
                options = rules.setdefault(f"{rule.capitalize()} ({seed})", set())
                options.add(f"{title} {flag.replace('=', ' ')} on {record['dataset']}")
    for rule, options in rules.items():
        yield markdown(f"{rule}: {'; '.join(sorted(options))}.")


def mean_of_runs(metric: Metric, records: Sequence[dict], states: Counter) -> str:
    """Mean ± sample standard deviation, with the number of runs that have the value and of those that are lost.

    Args:
        metric: What is read of each run.
        records: The runs that there are.
        states: How many of the runs, also of those that are not there, are in which of `STATES`.

    Returns:
        "66.10 ± 0.52 (2 of 3, 1 of 3 diverged)"; where no run counts, the furthest that one has come.
    """
    values, counted, planned = metric.values(records), sum(map(metric.counts, records)), states.total()
    if not counted:
        return next(state for state in STATES if states[state])
    lost = states["finished"] + states["diverged"] - counted
    number = len(values) or counted
    notes = {
        f"{number}" if number + lost == planned else f"{number} of {planned}": True,
        f"{states['diverged'] - lost} diverged": states["diverged"] > lost,
        f"{lost} of {planned} diverged": lost,
        f"{states['failed']} failed": states["failed"],
    }
    told = ", ".join(note for note, applies in notes.items() if applies)
    return f"{metric.mean_text(values) if values else metric.none} ({told})"


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
    rows = pd.DataFrame([_row(member, selected, chosen) for member in groups])
    rows = rows.drop(columns=[column for column in ("Settings", *SOMETIMES) if not rows[column].any()])
    ahead, lines = _best(groups), []
    for place, row in enumerate(rows.to_dict("records")):
        strong = ("Method", selected) if place in ahead else ()
        lines.append([(text, "best" if column in strong else "") for column, text in row.items()])
    same = ", ".join(f"{name} {markdown(value)}" for name, value in agreed(records).items())
    return Sheet(
        list(rows), [lines], list(rows).index(selected), [numbers_of(record, chosen) for record in records],
        setting=same and f"All rows: {same}.", notes=_notes(groups, bool(ahead)),
        details=[column for column in rows if column.startswith(("Validation", "Floats", "Seconds"))],
    )  # fmt: skip


def sheets(
    records: Iterable[dict], metrics: Sequence[str] = (), columns: Sequence[str] = (), title: str = ""
) -> list[Sheet]:
    """A table for each board, see `sheet`; notes that all tables have stand below the last one.

    Args:
        records: The runs.
        metrics: Names of metrics that get a column of their own.
        columns: Parts of the titles of the columns that are shown, in this order; all where empty. A table that has
            none of them is left out. Where empty, all that have a number or a text in a row.
        title: Of the tables.

    Raises:
        UserError: If there is no record, or no table has such a column.
    """
    records = list(records)
    parts = boards(records) or {"": records}
    tables = [sheet(runs, metrics) for runs in parts.values()]
    common = set.intersection(*(set(table.notes) for table in tables))
    there = list(dict.fromkeys(column for table in tables for column in table.columns))
    for text in columns:
        if not _places(text, there):
            raise UserError(f"no column has '{text}' in its title; there are: {', '.join(there)}.")
    shown = []
    for name, table in zip(parts, tables, strict=True):
        notes = [note for note in table.notes if table is tables[-1] or note not in common]
        table = replace(table, title=", ".join(filter(None, (title, name if len(parts) > 1 else ""))), notes=notes)
        places = dict.fromkeys(place for text in columns for place in _places(text, table.columns))
        if not columns:
            lines = [line for block in table.blocks for line in block]
            places = [place for place in range(len(table.columns)) if any(line[place][0] != MISSING for line in lines)]
        if places:
            shown.append(table.select(list(places)))
    return shown


def _places(text: str, titles: Sequence[str]) -> list[int]:
    """The places of the titles that begin with a text, or else of those that have it; case does not count."""
    places = [place for place, title in enumerate(titles) if text.lower() in title.lower()]
    return [place for place in places if titles[place].lower().startswith(text.lower())] or places


def _row(member: SeedGroup, selected: str, metrics: Sequence[Metric]) -> dict[str, str]:
    """The cells of a group by column; `selected` is the title over its headline."""
    records, states = member.records, Counter(map(state_of, member.records))
    runs = pd.DataFrame(map(numbers_of, member.finished or records))
    seeds = [", ".join(str(record["seed"]) for record in member.finished)]
    seeds += [f"seed {record['seed']} {_progress(record)}" for record in records if record["status"] != "finished"]
    columns = {selected: "selected", "Last round, %": "last", **SOMETIMES}
    read = {title: find_metric(name) for title, name in columns.items()} | {metric.title: metric for metric in metrics}
    shown = {title: metric for title, metric in read.items() if title not in SOMETIMES or metric.values(records)}
    means = {title: mean_of_runs(shown[title], records, states) if title in shown else "" for title in read}
    sent = [MISSING if pd.isna(floats) else f"{floats:,.0f}" for floats in runs[["floats_up", "floats_down"]].mean()]
    # Smallest and largest of the runs' median rounds, since runs of different machines have no meaningful mean.
    seconds = runs["seconds_round_median"].dropna()
    paces = dict.fromkeys(f"{pace:.2f}" for pace in (seconds.min(), seconds.max())) if len(seconds) else [MISSING]
    return {
        "Method": member.method,
        "Settings": settings_text(member.settings),
        "Seeds": "; ".join(filter(None, seeds)),
        **means,
        "Rounds": str(records[0]["config"]["rounds"]),
        "Floats up / down, client and round": " / ".join(sent),
        "Seconds a round, median": " to ".join(paces),
    }


def _progress(record: dict) -> str:
    """`finished`, or how far a run came that is not."""
    if record["status"] == "finished":
        return "finished"
    status = "diverged" if diverged(record) else record["status"]
    return f"{status} after {len(record['rounds'])} of {record['config']['rounds']} rounds"


def _best(groups: Sequence[SeedGroup]) -> set[int]:
    """The places of groups that stand out as the best among those they can be compared with."""
    rivals: dict[tuple, dict[int, list[dict]]] = {}
    for place, member in enumerate(groups):
        values = settings(member.records[0])
        rivals.setdefault(tuple(values[name] for name in COMPARABLE), {})[place] = member.records
    return {best(find_metric("selected"), runs) for runs in rivals.values()} - {None}


def _notes(groups: Sequence[SeedGroup], bold: bool) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    records = [record for member in groups for record in member.records]
    repeated = [member.label for member in groups if len({r["seed"] for r in member.finished}) < len(member.finished)]
    smaller = dict.fromkeys(describe_reductions(reductions_of(record)) for record in records)
    options = _given(groups)
    notes = {
        "Mean ± sample standard deviation over runs (number of runs); a value without ± is one run.": True,
        DIVERGED: any(map(diverged, records)),
        f"A seed was run more than once, and each run counts, in: {markdown('; '.join(repeated))}.": repeated,
        f"Reduced against the protocol: {'; or '.join(filter(None, smaller))}.": any(smaller),
        f"Options given with the runs: {markdown('; '.join(options))}.": options,
        **dict.fromkeys(tuned(records), True),
        "Seconds that were measured while the machine did other work are left out.": not all(map(quiet, records)),
        BOLD.format(among=" among rows with the same protocol, data set, partition, rounds and selection rule"): bold,
    }
    return [note for note, applies in notes.items() if applies]


def _given(groups: Sequence[SeedGroup]) -> list[str]:
    """Options that somebody has given and no other line says, with the methods that have them where not all do.

    Rows of a method that differ in an option show it, so what is left is that of the whole method.
    """
    having: dict[str, dict[str, None]] = {}  # methods by options
    for member in groups:
        record = member.records[0]
        told = {"protocol", "dataset", "partition", "rounds", *NOT_SETTINGS, *member.settings}
        told |= {size["what"] for size in reductions_of(record)}
        for name, value in given_options(record["config"], record["origin"]).items():
            if name not in told and not record["origin"][name].startswith("tuned"):
                having.setdefault(settings_text({name: value}), {})[member.method] = None
    shared: dict[str, list[str]] = {}  # options by the methods that have them, as text
    for text, names in having.items():
        every = len(names) == len({member.method for member in groups})
        shared.setdefault("" if every else f" ({'; '.join(names)})", []).append(text)
    return [", ".join(texts) + names for names, texts in shared.items()]


def numbers_of(record: dict, metrics: Sequence[Metric] = ()) -> dict[str, Any]:
    """One run as a flat row; rounds count from 1, accuracies are in percent.

    `seconds_round_median` is that of the median round, which the first one, a warm-up, does not move. Seconds that
    other work disturbed are left out.
    """
    summary, cost, undisturbed = record["summary"], record.get("cost") or {}, quiet(record)
    names = ("selected", "last", "validation", "post", "floats-down", "floats-up")
    selected, last, validation, post, down, up = (find_metric(name).value(record) for name in names)
    chosen = summary["selected_round"]
    seconds = [sum(entry["seconds"].values()) for entry in record["rounds"] if entry.get("seconds")]
    return {
        **{name: record[name] for name in ("method", "protocol", "dataset", "seed", "status")},
        "reduced": describe_reductions(reductions_of(record)),
        "partition_fingerprint": record["partition"]["fingerprint"],
        "selection": summary["selection"],
        "selected": selected,
        "selected_round": None if chosen is None else chosen + 1,
        "last": last,
        "validation_accuracy": validation,
        "rounds_done": len(record["rounds"]),
        **({"post_accuracy": post} if "post" in record else {}),
        **{metric.title: metric.value(record) for metric in metrics},
        "floats_down": down and round(down),
        "floats_up": up and round(up),
        **{name: cost.get(name) for name in ("memory_floats", "buffer_floats")},
        "parameters": record.get("model", {}).get("parameters"),
        "params_sha256": summary.get("params_sha256"),
        "seconds_round_median": median(seconds) if seconds and undisturbed else None,
        "seconds_total": record.get("seconds_total") if undisturbed else None,
        **{name: record.get(name) for name in ("method_hash", "commit")},
        **{f"config.{name}": option for name, option in record["config"].items()},
    }


def every_run(records: Iterable[dict]) -> list[str]:
    """A table with one row a run."""
    rows = []
    for member in group(records):
        for record in member.records:
            run = numbers_of(record)
            rows.append({
                "Method": member.method,
                "Settings": settings_text(member.settings),
                "Seed": str(run["seed"]),
                "Status": _progress(record),
                "Selected, %": run["selected"],
                "Selected round": run["selected_round"],
                "Last round, %": run["last"],
                "Seconds": run["seconds_total"],
                "Partition": run["partition_fingerprint"][:12],
                "Parameters": (run["params_sha256"] or MISSING)[:12],
            })  # fmt: skip
    table = pd.DataFrame(rows)
    for columns, form in ((["Selected, %", "Last round, %"], "{:.2f}"), (["Selected round", "Seconds"], "{:,.0f}")):
        table[columns] = table[columns].astype(object).map(form.format, na_action="ignore").fillna(MISSING)
    table = table.loc[:, table.ne("").any()]
    return github(list(table), table.map(markdown).to_numpy().tolist())


def machines(records: Iterable[dict]) -> list[str]:
    """One line for each machine and set of versions, with the number of runs it did."""
    counts = Counter()
    for record in records:
        texts = []
        for part in (record, *record.get("moved", ())):
            since = f"from round {part['round'] + 1} on " if part is not record else ""
            for name in ("hardware", "versions"):
                values = {key.replace("_", " "): value for key, value in part.get(name, {}).items()}
                pairs = [f"{key} {value}" for key, value in values.items() if value is not None]
                texts += [since + markdown(", ".join(pairs))] if pairs else []
        counts[" · ".join(texts) or "not recorded"] += 1
    return [f"- {count} run{'s' * (count > 1)}: {machine}" for machine, count in counts.items()]


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
