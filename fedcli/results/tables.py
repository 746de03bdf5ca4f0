"""Tables of runs: which runs stand in a row, what a row says of them, and every run as a row of numbers.

A record is read from `record.json` and never changed. Accuracies are fractions there and percent here. Numbers of two
protocols or data sets cannot be compared, so they share no table and no panel.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from fedcli import registry
from fedcli.errors import UserError, printable, unknown
from fedcli.results.frame import STATES, find_records, frame_of, record_files, state_of
from fedcli.results.metrics import BOLD, DIVERGED, Metric, best, diverged, find_metric
from fedcli.results.render import MISSING, Best, Sheet, github, markdown
from fedcli.runs.config import given_options, inactive_term
from fedcli.runs.records import quiet
from fedcli.runs.settings import FIRST, NOT_SETTINGS, reductions, settings, settings_text

OUT = re.compile(r" --out[ =](?:'[^']*'|\S+)")  # where a run went, which the commands of older ones tell
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
    """Runs that agree in everything but the seed."""

    label: str  # short name among the groups made with it: the method, and those settings that most of them do not have
    method: str  # its name, marked where the runs used part of the data
    settings: dict[str, Any]  # the options in which it differs from the other groups, by name
    records: list[dict]  # the runs, by seed

    @property
    def finished(self) -> list[dict]:
        """The runs that went through."""
        return [record for record in self.records if record["status"] == "finished"]

    @property
    def selection(self) -> str:
        """The rule behind the headline number."""
        return self.records[0]["summary"]["selection"]


def select_records(records: Iterable[dict], methods: Sequence[str] = (), datasets: Sequence[str] = ()) -> list[dict]:
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
    rows = [{**part["settings"].iloc[0], "numerics": part["numerics"].iloc[0]} for part in parts]
    labels = Counter(part["label"].iloc[0] for part in parts)
    groups = []
    for part, row in zip(parts, rows, strict=True):
        differing, unusual = _differences(row, rows)
        records, label = part.sort_values("seed", kind="stable")["record"].tolist(), part["label"].iloc[0]
        method = label or row["method"]
        if "train_examples" in reductions(records[0]):
            method += " (reduced)"  # the notes say what else was smaller
        told_apart = settings_text(unusual) if not label or labels[label] > 1 else ""
        called = method if label or not told_apart or runs["method"].nunique() > 1 else ""
        groups.append(SeedGroup(", ".join(filter(None, (called, told_apart))), method, differing, records))
    return groups


def _differences(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in which a run differs, from all others or from its own method's, and the unusual ones of them.

    An option that only some methods have, or only beside some choice of another, tells nothing about the others. Usual
    is a value that more than half of those have that are compared.
    """
    differing, unusual = {}, {}
    for name in dict.fromkeys(name for each in rows for name in each if name in row and name != "method"):
        everywhere = name not in ("numerics", "code") and all(name in other for other in rows)
        peers = rows if everywhere else [other for other in rows if other["method"] == row["method"]]
        values = [other[name] for other in peers if name in other]
        if values.count(row[name]) < len(values):
            differing[name] = row[name]
            if 2 * values.count(row[name]) <= len(values):
                unusual[name] = row[name]
    return differing, unusual


def agreed(records: Iterable[dict]) -> dict[str, Any]:
    """Protocol, data set and partition, those in which all records agree."""
    rows = [settings(record) for record in records]
    return {name: rows[0][name] for name in FIRST[1:] if len({row[name] for row in rows}) == 1}


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
    groups, chosen = group(records), [find_metric(name) for name in metrics]
    rules = {member.selection for member in groups}
    selected = f"Selected ({rules.pop() if len(rules) == 1 else 'rule in the row'}), %"
    columns = {selected: "selected", "Last round, %": "last", **SOMETIMES}
    read = {title: find_metric(name) for title, name in columns.items()} | {metric.title: metric for metric in chosen}
    rows = [_row(member, read) for member in groups]
    titles = _titles(rows)
    rivals: dict[tuple, dict[int, list[dict]]] = {}  # the groups that can be compared, by what they agree in
    for index, member in enumerate(groups):
        values = settings(member.records[0])
        rivals.setdefault(tuple(values[name] for name in COMPARABLE), {})[index] = member.records
    ahead = {best(read[selected], runs) for runs in rivals.values()} - {None}
    for index in ahead:
        rows[index] |= {title: Best(rows[index][title]) for title in ("Method", selected)}
    same = ", ".join(f"{name} {markdown(value)}" for name, value in agreed(records).items())
    return Sheet(
        titles, [[row[title] for title in titles] for row in rows], titles.index(selected),
        [numbers_of(record, chosen) for record in records],
        setting=same and f"All rows: {same}.", notes=_notes(groups, bool(ahead)),
    )  # fmt: skip


def sheets(records: Iterable[dict], metrics: Sequence[str] = (), columns: Sequence[str] = ()) -> list[Sheet]:
    """A table for each board, see `sheet`; notes that all tables have stand below the last one.

    Args:
        records: The runs.
        metrics: Names of metrics that get a column of their own.
        columns: Parts of the titles of the columns that are shown, in this order, and the metrics'; all where empty. A
            table that has none of them is left out.

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
    texts = [*columns, *(find_metric(name).title for name in metrics)] if columns else [""]  # which is in every title
    shown = []
    for name, table in zip(parts, tables, strict=True):
        places = dict.fromkeys(index for text in texts for index in _places(text, table.columns))
        notes = [note for note in table.notes if table is tables[-1] or note not in common]
        table = replace(table, title=name if len(parts) > 1 else "", notes=notes)
        if places:
            shown.append(table.select([*places]))
    return shown


def _places(text: str, titles: Sequence[str]) -> list[int]:
    """The places of the titles that begin with a text, or else of those that have it; case does not count."""
    places = [index for index, title in enumerate(titles) if text.lower() in title.lower()]
    return [index for index in places if titles[index].lower().startswith(text.lower())] or places


def _row(member: SeedGroup, read: dict[str, Metric]) -> dict[str, str]:
    """The cells of a group by column; `read` has the metrics whose means over runs are shown."""
    records, states = member.records, Counter(map(state_of, member.records))
    runs = pd.DataFrame(map(numbers_of, member.finished or records))
    seeds = [", ".join(str(record["seed"]) for record in member.finished)]
    seeds += [f"seed {record['seed']} {_progress(record)}" for record in records if record["status"] != "finished"]
    shown = {title: metric for title, metric in read.items() if title not in SOMETIMES or metric.values(records)}
    # Smallest and largest of the runs' median rounds, since runs of different machines have no meaningful mean.
    paces = runs["seconds_round_median"].astype(float).agg(["min", "max"])
    return {
        "Method": member.method,
        "Settings": settings_text(member.settings),
        "Seeds": "; ".join(filter(None, seeds)),
        **{title: mean_of_runs(read[title], records, states) if title in shown else "" for title in read},
        "Rounds": str(records[0]["config"]["rounds"]),
        "Floats up / down, client and round": " / ".join(map(_decimal_text, runs[["floats_up", "floats_down"]].mean())),
        "Seconds a round, median": " to ".join(dict.fromkeys(_decimal_text(pace, 2) for pace in paces)),
    }


def _decimal_text(value: float | None, decimals: int = 0) -> str:
    """A number with so many decimals; None and NaN as missing."""
    return MISSING if pd.isna(value) else f"{value:,.{decimals}f}"


def _progress(record: dict) -> str:
    """`finished`, or how far a run came that is not."""
    status = "diverged" if diverged(record) else record["status"]
    done = f" after {len(record['rounds'])} of {record['config']['rounds']} rounds"
    return status if status == "finished" else status + done


def _notes(groups: Sequence[SeedGroup], bold: bool) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    records = [record for member in groups for record in member.records]
    repeated = [member.label for member in groups if len({r["seed"] for r in member.finished}) < len(member.finished)]
    smaller = dict.fromkeys(", ".join(reductions(record).values()) for record in records)
    inactive = {}
    for member in groups:
        if method := registry.methods().get(member.records[0]["method"]):
            text = inactive_term(member.records[0]["config"], method)
            inactive[f"Inactive in {markdown(member.label)}: {text}."] = text
    notes = {
        "Mean ± sample standard deviation over runs (number of runs); a value without ± is one run.": True,
        DIVERGED: any(map(diverged, records)),
        f"A seed was run more than once, and each run counts, in: {markdown('; '.join(repeated))}.": repeated,
        f"Reduced against the protocol: {'; or '.join(filter(None, smaller))}.": any(smaller),
        **inactive,
        **dict.fromkeys(_given(groups), True),
        "Seconds that were measured while the machine did other work are left out.": not all(map(quiet, records)),
        BOLD.format(among=" among rows with the same protocol, data set, partition, rounds and selection rule"): bold,
    }
    return [note for note, applies in notes.items() if applies]


def _given(groups: Sequence[SeedGroup]) -> list[str]:
    """Options that somebody has given or tuned, a sentence for each source, with their methods where not all have them.

    Given ones that another line says are left out: rows of a method that differ in an option show it.
    """
    rows = []
    for member in groups:
        record = member.records[0]
        told = {"protocol", "dataset", "partition", "rounds", *NOT_SETTINGS, *member.settings}
        told |= reductions(record).keys()
        for name, value in given_options(record["config"], record["origin"]).items():
            source = record["origin"][name]
            is_tuned = source.startswith("tuned")
            if is_tuned or name not in told:
                source = source if is_tuned else "given with the runs"
                rows.append((source, settings_text({name: value}), member.method))
    options = pd.DataFrame(rows, columns=["source", "option", "methods"]).drop_duplicates()
    options = options.groupby(["source", "option"], sort=False)["methods"].agg("; ".join).reset_index()
    every = "; ".join(dict.fromkeys(member.method for member in groups))
    texts: dict[str, list[str]] = {}
    for (source, methods), part in options.groupby(["source", "methods"], sort=False):
        names = ", ".join(part["option"])
        texts.setdefault(source, []).append(names if methods == every else f"{names} ({methods})")
    return [f"Options {source}: {markdown('; '.join(parts))}." for source, parts in texts.items()]


def numbers_of(record: dict, metrics: Sequence[Metric] = ()) -> dict[str, Any]:
    """One run as a flat row; rounds count from 1, accuracies are in percent.

    `seconds_round_median` is that of the median round, which the first one, a warm-up, does not move. Seconds that
    other work disturbed are left out.
    """
    summary, undisturbed = record["summary"], quiet(record)
    names = ("selected", "last", "validation", "post", "floats-down", "floats-up")
    selected, last, validation, post, down, up = (find_metric(name).value(record) for name in names)
    seconds = [sum(entry["seconds"].values()) for entry in record["rounds"] if entry.get("seconds")]
    return {
        **{name: record[name] for name in ("method", "protocol", "dataset", "seed", "status")},
        "reduced": ", ".join(reductions(record).values()),
        "partition_fingerprint": record["partition"]["fingerprint"],
        "selection": summary["selection"],
        "selected": selected,
        "selected_round": None if summary["selected_round"] is None else summary["selected_round"] + 1,
        "last": last,
        "validation_accuracy": validation,
        "rounds_done": len(record["rounds"]),
        **({"post_accuracy": post} if "post" in record else {}),
        **{metric.title: metric.value(record) for metric in metrics},
        "floats_down": down and round(down),
        "floats_up": up and round(up),
        **{name: (record.get("cost") or {}).get(name) for name in ("memory_floats", "buffer_floats")},
        "parameters": record.get("model", {}).get("parameters"),
        "params_sha256": summary.get("params_sha256"),
        "seconds_round_median": median(seconds) if seconds and undisturbed else None,
        "seconds_total": record.get("seconds_total") if undisturbed else None,
        **{name: record.get(name) for name in ("method_hash", "commit")},
        **{f"config.{name}": option for name, option in record["config"].items()},
    }


def numbers_of_runs(paths: Iterable[str | Path], metrics: Sequence[str] = ()) -> pd.DataFrame:
    """All runs under some paths, a row each; the function behind `fedcli.frame`.

    Args:
        paths: Folders of runs, or folders that hold these at any depth.
        metrics: Names of metrics that get a column, as of `fedcli table --metric`.

    Returns:
        The `folder` of a run, its method, protocol, data set and seed, the options in which the runs differ, and its
        numbers as in the CSV of a table: `selected` is the headline, `last` the last round, both in percent.

    Raises:
        UserError: If there is no run, or a record cannot be read.
    """
    paths, chosen = list(map(Path, paths)), [find_metric(name) for name in metrics]
    records = find_records(paths)
    numbers = pd.DataFrame([numbers_of(record, chosen) for record in records]).filter(regex=r"^(?!config\.)")
    numbers.insert(0, "folder", [file.parent for file, _ in record_files(paths)])
    options = pd.DataFrame([settings(record) for record in records], dtype=object)
    differ = [name for name in options if name not in numbers and options[name].astype(str).nunique() > 1]
    names = numbers.columns.get_loc("status")  # of the columns before it, which say what a run is
    return pd.concat([numbers.iloc[:, :names], options[differ], numbers.iloc[:, names:]], axis=1)


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
                "Selected, %": _decimal_text(run["selected"], 2),
                "Selected round": _decimal_text(run["selected_round"]),
                "Last round, %": _decimal_text(run["last"], 2),
                "Seconds": _decimal_text(run["seconds_total"]),
            })  # fmt: skip
    titles = _titles(rows)
    return github(titles, [[markdown(row[title]) for title in titles] for row in rows])


def _titles(rows: Sequence[dict[str, str]]) -> list[str]:
    """The columns in which any row has a number or a text."""
    return [title for title in rows[0] if any(row[title] not in ("", MISSING) for row in rows)]


def machines(records: Iterable[dict]) -> list[str]:
    """One line for each machine and set of versions, with the number of runs it did."""
    counts = Counter()
    for record in records:
        texts = []
        for part in (record, *record.get("moved", ())):
            since = f"from round {part['round'] + 1} on " if part is not record else ""
            for values in (part.get("hardware", {}), part.get("versions", {})):
                pairs = [f"{key.replace('_', ' ')} {value}" for key, value in values.items() if value is not None]
                texts += [since + markdown(", ".join(pairs))] if pairs else []
        counts[" · ".join(texts) or "not recorded"] += 1
    return [f"- {count} run{'s' * (count > 1)}: {machine}" for machine, count in counts.items()]


def commands(records: Iterable[dict]) -> list[str]:
    """The commands that made these runs, but for the folders that they went to; each once."""
    texts = dict.fromkeys(OUT.sub("", printable(record.get("command", ""))) for record in records)
    return [text for text in texts if text.startswith("fedcli ")]
