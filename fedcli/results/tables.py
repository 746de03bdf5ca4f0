"""Tables of runs: which stand in a row, and what it says of them; every run as a row; and a paper's table beside ours.

Accuracies are fractions in records and percent here. Numbers of two protocols or data sets cannot be compared, so they
share no table of runs and no panel.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pandas as pd

from fedcli import registry
from fedcli.declarations import Table
from fedcli.errors import printable, unknown
from fedcli.results.frame import find_records, frame_of
from fedcli.results.metrics import BOLD, DIVERGED, Metric, best, find_metric, interval
from fedcli.results.plans import IN_TEXT, TablePlan, plan_cell
from fedcli.results.render import MISSING, Best, Sheet, markdown
from fedcli.runs.identity import FIRST, NOT_SETTINGS, departures, reductions, settings, settings_text
from fedcli.runs.machine import quiet
from fedcli.runs.options import given_options, inactive_term
from fedcli.runs.record import STATES, state_of

OUT = re.compile(r" --out[ =](?:'[^']*'|\S+)")  # in the commands of older runs
COMPARABLE = ["protocol", "dataset", "partition", "rounds", "train_examples", "selection"]
# Metrics that have a column where a run has a value.
SOMETIMES = ("validation", "post", "classifier", "intra", "quality:nmi", "quality:silhouette")
SCALED = re.compile(r"_(1e\d+)_floats$")  # in the name of a printed column, its unit
Place = tuple[str, str]  # row and column of a cell


@dataclass(frozen=True)
class SeedGroup:
    """Runs that agree in everything but the seed."""

    label: str  # the method and its settings that most other groups do not have
    method: str  # its name, or the label that stands for it
    settings: dict[str, Any]  # those in which it differs from other groups
    selection: str  # the rule behind the headline
    records: list[dict]  # the runs, by seed

    @property
    def finished(self) -> list[dict]:
        """The runs that finished."""
        return [record for record in self.records if record["status"] == "finished"]


def select_records(records: Sequence[dict], methods: Sequence[str] = (), datasets: Sequence[str] = ()) -> list[dict]:
    """The records of these methods and data sets, of all if none is named; case does not count.

    Raises:
        UserError: If no record is of a named one.
    """
    for key, names, kind in (("method", methods, "method"), ("dataset", datasets, "data set")):
        there = {record[key].lower(): record[key] for record in records}
        for name in names:
            if name.lower() not in there:
                raise unknown(f"{kind} among the runs", name, there, f"there are {', '.join(there.values())}.")
        records = [record for record in records if record[key].lower() in map(str.lower, names or there)]
    return records


def boards(records: Iterable[dict]) -> dict[str, list[dict]]:
    """The records by protocol and data set, in order of appearance."""
    parts: dict[str, list[dict]] = {}
    for record in records:
        parts.setdefault(f"{record['protocol']}, {record['dataset']}", []).append(record)
    return parts


def group(records: Iterable[dict], each: bool = False) -> list[SeedGroup]:
    """The records as groups that agree in everything but the seed, in order of appearance.

    Numerics and labels divide groups, and if `each`, seeds. Of runs with the same seed and parameters, one counts.
    """
    runs = frame_of(records).drop_duplicates(["label", "key", "numerics", "seed", "state", "parameters"])
    parts = [part for _, part in runs.groupby(["label", "key", "numerics", *(["seed"] if each else [])], sort=False)]
    rows = [{**part["settings"].iloc[0], "numerics": part["numerics"].iloc[0]} for part in parts]
    labels = Counter(part["label"].iloc[0] for part in parts)
    groups = []
    for part, row in zip(parts, rows, strict=True):
        differing, unusual = _differences(row, rows)
        name = label = part["label"].iloc[0] or row["method"]
        if unusual and labels[name] != 1:  # a user's label that one group has is enough
            label = f"{name}, {settings_text(unusual)}"
        records = part.sort_values("seed", kind="stable")["record"].tolist()
        groups.append(SeedGroup(label, name, differing, row["selection"], records))
    return groups


def _differences(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in which a run differs, and those of them that at most half of the compared runs share.

    An option that not all runs have is compared among those of the method alone.
    """
    differing, unusual = {}, {}
    for name, value in row.items():
        everywhere = name not in ("numerics", "code") and all(name in other for other in rows)
        peers = [other for other in rows if name in other and (everywhere or other["method"] == row["method"])]
        same = [other for other in peers if other[name] == value]
        if len(same) < len(peers) and name != "method":
            differing[name] = value
            if 2 * len(same) <= len(peers):
                unusual[name] = value
    return differing, unusual


def agreed(records: Iterable[dict]) -> dict[str, Any]:
    """Those of protocol, data set and partition in which all records agree."""
    rows = [settings(record) for record in records]
    return {name: rows[0][name] for name in FIRST[1:] if len({row[name] for row in rows}) == 1}


def mean_of_runs(metric: Metric, records: Sequence[dict], states: Counter) -> str:
    """Mean ± sample standard deviation, with the number of runs that have the value.

    Args:
        metric: What is read of each run.
        records: The runs that have begun.
        states: The number of all planned runs by state.

    Returns:
        "66.10 ± 0.52 (3)", or "66.10 ± 0.52 (2 of 3 runs; 1 diverged)"; the state of the furthest if no run counts.
    """
    values, counted, planned = metric.values(records), sum(map(metric.counts, records)), states.total()
    if not counted:
        return next(state for state in STATES if states[state])
    number = len(values) or counted
    told = [str(number) if number == planned else f"{number} of {planned} runs"]
    told += [f"{states[state]} {state}" for state in ("diverged", "failed") if states[state]]
    return f"{metric.mean_text(values) if values else metric.none} ({'; '.join(told)})"


def sheet(records: Sequence[dict], metrics: Sequence[str] = (), title: str = "", each: bool = False) -> Sheet:
    """A table with a row for each group, or for each run if `each`, and more `metrics`; its values are the runs.

    Raises:
        UserError: If a metric is not known.
    """
    groups, chosen = group(records, each), [find_metric(name) for name in metrics]
    selected = f"Selected ({' or '.join(sorted({member.selection for member in groups}))}), %"
    read = {selected: find_metric("selected"), "Last round, %": find_metric("last")}
    read |= {metric.title: metric for metric in (*map(find_metric, SOMETIMES), *chosen)}
    rows = [_row(member, read, {*SOMETIMES} - {*metrics}) for member in groups]
    compared = pd.DataFrame([settings(member.records[0]) for member in groups], dtype=object)
    for indices in compared.groupby(COMPARABLE, dropna=False).groups.values():
        ahead = best(read[selected], {index: groups[index].records for index in indices})
        if ahead is not None:
            rows[ahead] |= {title: Best(rows[ahead][title]) for title in ("Method", selected)}
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    same = ", ".join(f"{name} {markdown(value)}" for name, value in agreed(records).items())
    return Sheet(
        titles, [[row[title] for title in titles] for row in rows], titles.index(selected),
        [numbers_of(record, chosen) for record in records], title=title, setting=same and f"All rows: {same}.",
        notes=_notes(groups, bold=any(isinstance(row["Method"], Best) for row in rows)),
    )  # fmt: skip


def sheets(records: Iterable[dict], metrics: Sequence[str] = ()) -> list[Sheet]:
    """A table for each board, which titles name where there are several; see `sheet`."""
    parts = boards(records)
    return [sheet(runs, metrics, name if len(parts) > 1 else "") for name, runs in parts.items()]


def _row(member: SeedGroup, read: dict[str, Metric], optional: set[str]) -> dict[str, str]:
    """The cells of a group by column; those of optional metrics stay empty without a value."""
    records, states = member.records, Counter(map(state_of, member.records))
    seeds = [f"{record['seed']} {state_of(record)} after {len(record['rounds'])} rounds" for record in records]
    means = {title: mean_of_runs(metric, records, states) for title, metric in read.items()}
    means |= {metric.title: "" for metric in read.values() if metric.name in optional and not metric.values(records)}
    floats = [find_metric(name).values(records) for name in ("floats-up", "floats-down")]
    sent = [f"{fmean(values):,.0f}" if values else MISSING for values in floats]
    return {
        "Method": member.method,
        "Settings": settings_text(member.settings),
        "Seeds": re.sub(r" finished after \d+ rounds", "", ", ".join(seeds)),
        **means,
        "Rounds": str(records[0]["config"]["rounds"]),
        "Floats up / down, client and round": " / ".join(sent),
    }


def _notes(groups: Sequence[SeedGroup], bold: bool) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    records = [record for member in groups for record in member.records]
    smaller = dict.fromkeys(", ".join(reductions(record).values()) for record in records)
    given, inactive = {}, {}
    for member in groups:
        record, method = member.records[0], registry.methods().get(member.records[0]["method"])
        if text := method and inactive_term(record["config"], method):
            inactive[f"Inactive in {markdown(member.label)}: {text}."] = True
        told = {*FIRST, "rounds", *NOT_SETTINGS, *member.settings, *reductions(record)}
        options = given_options(record["config"], record["origin"])
        given |= {settings_text({name: value}): True for name, value in options.items() if name not in told}
    notes = {
        "Mean ± sample standard deviation over runs (number of runs); a value without ± is one run.": True,
        DIVERGED: "diverged" in map(state_of, records),
        f"Reduced against the protocol: {'; or '.join(filter(None, smaller))}.": any(smaller),
        **inactive,
        f"Options given with the runs: {markdown('; '.join(given))}.": given,
        BOLD.format(among=" among rows with the same protocol, data set, partition, rounds and selection rule"): bold,
    }
    return [note for note, applies in notes.items() if applies]


def numbers_of(record: dict, metrics: Sequence[Metric] = ()) -> dict[str, Any]:
    """One run as a flat row; rounds count from 1, accuracies are in percent.

    The median round leaves out the first one's warming up. Seconds that other work disturbed are left out.
    """
    summary, undisturbed = record["summary"], quiet(record)
    selected, down, up = (find_metric(name).value(record) for name in ("selected", "floats-down", "floats-up"))
    seconds = [sum(entry["seconds"].values()) for entry in record["rounds"] if entry.get("seconds")]
    return {
        **{name: record[name] for name in ("method", "protocol", "dataset", "seed", "status")},
        "reduced": ", ".join(reductions(record).values()),
        "partition_fingerprint": record["partition"]["fingerprint"],
        "selection": summary["selection"],
        "selected": selected,
        "selected_round": None if summary["selected_round"] is None else summary["selected_round"] + 1,
        "last": find_metric("last").value(record),
        "validation_accuracy": find_metric("validation").value(record),
        "rounds_done": len(record["rounds"]),
        "post_accuracy": find_metric("post").value(record),
        **{metric.title: metric.value(record) for metric in metrics},
        "floats_down": down and round(down),
        "floats_up": up and round(up),
        **{name: (record["cost"] or {}).get(name) for name in ("memory_floats", "buffer_floats")},
        "parameters": record["model"].get("parameters"),
        "params_sha256": summary.get("params_sha256"),
        "seconds_round_median": median(seconds) if seconds and undisturbed else None,
        "seconds_total": record.get("seconds_total") if undisturbed else None,
        **{name: record.get(name) for name in ("method_hash", "commit")},
        **{f"config.{name}": option for name, option in record["config"].items()},
    }


def numbers_of_runs(paths: Iterable[str | Path], metrics: Sequence[str] = ()) -> pd.DataFrame:
    """All runs under some paths, a row each; the function behind `fedcli.frame`.

    Args:
        paths: Folders that hold runs at any depth.
        metrics: Names of metrics that get a column, as of `fedcli table --metric`.

    Returns:
        The `folder` of a run, its numbers as in the CSV of a table (`selected` is the headline, `last` the last round,
        both in percent), and the options in which the runs differ.

    Raises:
        UserError: If there is no run, or a record cannot be read.
    """
    records, chosen = find_records(paths), [find_metric(name) for name in metrics]
    numbers = pd.DataFrame([{"folder": record["folder"], **numbers_of(record, chosen)} for record in records])
    options = pd.DataFrame(map(settings, records), dtype=object)
    differ = [name for name in options if name not in numbers and options[name].astype(str).nunique() > 1]
    return numbers.filter(regex=r"^(?!config\.)").join(options[differ])


def machines(records: Iterable[dict]) -> list[str]:
    """A line for each machine and its versions, with the number of its runs; a run that moved counts on each."""
    parts = [part for record in records for part in (record, *record.get("moved", ()))]
    rows = [{**part.get("hardware", {}), **part.get("versions", {})} for part in parts]
    counts = Counter(settings_text({key: value for key, value in row.items() if value is not None}) for row in rows)
    return [f"- {count} run{'s' if count > 1 else ''}: {markdown(machine)}" for machine, count in counts.items()]


def commands(records: Iterable[dict]) -> list[str]:
    """The commands that made these runs, without their folders, each once."""
    texts = dict.fromkeys(OUT.sub("", printable(record["command"])) for record in records)
    return [text for text in texts if text.startswith("fedcli ")]


# A paper's table beside ours


@cache
def reported() -> dict[str, dict[str, Any]]:
    """The papers' own numbers, `papers/reported.json`, by paper and table."""
    return json.loads(files("fedcli.papers").joinpath("reported.json").read_text(encoding="utf-8"))


def _reported(table: Table) -> dict[str, Any]:
    """What the paper says of a table; empty for one of no paper here."""
    paper, name = table.reported
    return reported().get(paper, {}).get(name, {})


def printed(table: Table) -> dict[Place, dict[str, Any]]:
    """The paper's entries of a table by row and column."""
    return {(entry["method"], entry["column"]): entry for entry in _reported(table).get("rows", ())}


def printed_value(table: Table, row: str, column: str, metric: Metric) -> float | None:
    """The paper's number in a cell, floats in ones; None if it prints none."""
    value = printed(table).get((row, column), {}).get(metric.field)
    return None if value is None else value * _printed_unit(column)


def _printed_unit(column: str) -> float:
    """The unit in which the paper prints a column of floats; 1 for other numbers."""
    return float(match[1]) if (match := SCALED.search(column)) else 1.0


def printed_lead(table: Table, row: str, than: str, columns: tuple[str, ...], metric: Metric) -> float | None:
    """The paper's lead of a row on another, the mean over columns, by its cells or as printed; None if it has none."""
    values = [[printed_value(table, name, column, metric) for name in (row, than)] for column in columns]
    if all(None not in pair for pair in values):
        return fmean(first - second for first, second in values)
    gains = [gain for gain in table.gains if (gain.more, gain.less, gain.columns) == ((row,), (than,), columns)]
    return printed_value(table, gains[0].row, gains[0].column, metric) if gains else None


def printed_accuracy(record: Mapping[str, Any]) -> float | None:
    """The paper's accuracy in percent for the setting of a run, by the first table that has it, else None."""
    run = frame_of([record]).iloc[0]
    alike = record["method"], record["protocol"], record["dataset"]
    for table in registry.tables().values():
        for cell in table.cells:
            is_alike = (cell.method, cell.settings.get("protocol"), cell.settings.get("dataset")) == alike
            if is_alike and cell.metric in ("selected", "last", "best"):  # points of a learning curve
                metric = find_metric(cell.metric)
                number = printed_value(table, cell.row, cell.column, metric)
                if number is not None and not departures(
                    record, run["settings"], plan_cell(table, cell).settings, metric.needs
                ):
                    return number
    return None


def compare(plan: TablePlan) -> Sheet:
    """The table beside the paper's; its values are cells, with floats in ones."""
    table, texts, numbers = plan.table, {}, {}  # of each cell, by row and column
    planned = {(each.cell.row, each.cell.column): each for each in plan.cells}
    metrics = {each.cell.column: each.metric for each in plan.cells}
    for key in [key for key in printed(table) | planned if key in planned]:  # in the order of the paper
        each, states = planned[key], Counter(run.state for run in planned[key].runs)
        text = mean_of_runs(each.metric, each.records, states)
        texts[key], numbers[key] = _beside(table, key, each.metric, text, each.metric.values(each.records))
        numbers[key] |= {
            "method": each.cell.method,
            "runs_planned": states.total(),
            "runs_counted": sum(map(each.metric.counts, each.records)),
            **{f"runs_{state.replace(' ', '_')}": states[state] for state in STATES},
        }
    for gain in table.gains:
        more, less = ([(row, column) for row in rows for column in gain.columns] for rows in (gain.more, gain.less))
        if planned.keys() >= {*more, *less}:
            more, less = ([numbers[key]["ours"] for key in keys] for keys in (more, less))
            values = [] if None in (*more, *less) else [fmean(more) - (max if gain.best else fmean)(less)]
            metric, key = metrics[gain.columns[0]], (gain.row, gain.column)
            text = metric.text(values[0], "+") if values else "not run"
            texts[key], numbers[key] = _beside(table, key, metric, text, values)
    for column, metric in metrics.items():
        ahead = best(metric, {key: each.records for key, each in planned.items() if key[1] == column})
        if ahead is not None:
            texts[ahead]["ours"] = Best(texts[ahead]["ours"])
    columns, lines = list(dict.fromkeys(column for _, column in texts)), []
    for row in dict.fromkeys(row for row, _ in texts):
        first = row
        for name in ("paper", "ours", "difference"):
            shown = [texts[row, column][name] if (row, column) in texts else "" for column in columns]
            if any(shown):
                lines.append([first, "ours, reduced" if name == "ours" and plan.reduction else name, *shown])
                first = ""
    return Sheet(
        ["Method", "", *[SCALED.sub(" floats", column).replace("_", " ") for column in columns]], lines, 2,
        [{**cell, "reduced": plan.reduction} for cell in numbers.values()],
        title=plan.title,
        setting=f"**Reduced: {plan.reduction}. Not the paper's setting.**" if plan.reduction else "",
        notes=_table_notes(plan, texts.values()),
    )  # fmt: skip


def _beside(
    table: Table, key: Place, metric: Metric, text: str, values: Sequence[float]
) -> tuple[dict[str, str], dict[str, Any]]:
    """A cell beside the paper's: the texts of its lines, and its numbers for the CSV.

    The `text` shows our `values`, one a run. Floats are rounded as the paper's before they are compared.
    """
    entry, target, unit = printed(table).get(key, {}), printed_value(table, *key, metric), _printed_unit(key[1])
    deviation, differences = None, []
    if target is not None:
        deviation = entry.get("std") if metric.field == "mean" else None
        differences = [(unit * round(value / unit) if metric.unit == "floats" else value) - target for value in values]
        paper = metric.text(target) + ("" if deviation is None else f" ± {metric.text(deviation)}")
    else:
        lacking = metric.none if entry.get("printed") == "0" else "no number"  # not printed, or not legible
        paper = lacking if entry else ""
    difference = interval(differences)
    told = metric.interval_text(difference, count=False) if differences else ""
    return {"paper": paper, "ours": text, "difference": told}, {
        "row": key[0], "column": key[1], "metric": metric.name, "unit": metric.unit, "paper": target,
        "paper_std": deviation, "ours": fmean(values) if values else None,
        "ours_std": stdev(values) if len(values) > 1 else None,
        "difference_low": difference.low, "difference_high": difference.high,
    }  # fmt: skip


def _table_notes(plan: TablePlan, cells: Collection[Mapping[str, str]]) -> list[str]:
    """What a reader must know of the numbers, each only where it applies."""
    table, content = plan.table, _reported(plan.table)
    old = [str(run.folder) for run in plan.runs if run.outdated]
    failed = [f"{run.folder} ({run.record['error']})" for run in plan.runs if run.record and "error" in run.record]
    idle = dict.fromkeys(inactive_term(run.setup.values(), run.setup.method) for run in plan.runs)
    of_page = [] if table.reported[1] == IN_TEXT else [content.get(key) for key in ("setting", "notes")]
    notes = {
        "Ours: mean ± sample standard deviation over seeds (runs).": True,
        "Difference: ours less the paper's, taken as exact, with a 95 % interval over seeds (Student's t); floats are "
        "rounded as the paper's.": any(texts["difference"] for texts in cells),
        DIVERGED: any(run.state == "diverged" for run in plan.runs),
        BOLD.format(among=" of ours in a column"): any(isinstance(texts["ours"], Best) for texts in cells),
        f"The round that counts in a run: {', '.join(sorted({run.setup.selection for run in plan.runs}))}.": True,
        f"Failed: {'; '.join(failed)}.": failed,
        **{f"Inactive: {text}.": text for text in idle},
        f"Made with another version of the code, which computed something else: {', '.join(old)}.": old,
        **{f"Paper: {text.rstrip('.')}.": True for text in of_page if text},
        **dict.fromkeys(table.notes, True),
    }  # fmt: skip
    return [note for note, applies in notes.items() if applies]
