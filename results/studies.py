"""Studies: folders of runs, and findings, which are lines made from the records that a `findings.toml` names:

metrics = ["mean-of-last:50"]         # optional: more columns of the study's table

[figures]                             # optional: more figures, the kind of the chart and what it shows
drift = "Distance of the clients' features"

[runs]                                # groups of runs: a name, and their folders beside the file
Ours = "ours"
Theirs = ["theirs/seed-0", "../another-study/theirs"]

[[findings]]
says = "Ours is ahead"                # optional: a sentence without a number
metric = "last"
of = "Ours"
than = "Theirs"                       # optional: take the difference, paired by seed
than_metric = "classifier"            # optional: another metric for the second group
paper = ["paper:2", "a column"]       # optional: table and column of printed numbers, in rows named as the groups
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcli import registry
from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError
from fedcli.results import paper_tables
from fedcli.results.frame import find_records, frame_of
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.statistics import difference, interval, interval_text
from fedcli.runs.schema import Record

# What metrics are called whose names say too little: by themselves, and before a parameter as in "inter:mnist".
TITLES = {"last": "last round", "intra": "own domain", "inter": "other domains"}
TITLES_BEFORE_PARAMETER = {"inter": "other domains than"}


@dataclass(frozen=True)
class Study:
    """A folder of runs, and what its page shows."""

    name: str  # of the folder
    intro: str  # its title, question and set-up, in Markdown
    records: list[Record]
    findings: list[str]  # each a line of Markdown
    metrics: list[str]  # more columns of its table
    figures: dict[str, str]  # what more figures show, by the kind of the chart
    names: dict[Path, str]  # those of its groups of runs, by folder; figures name the runs so


def read_study(folder: Path) -> Study:
    """The study in a folder of runs with `intro.md` and, if it has findings, `findings.toml`.

    Raises:
        UserError: If it has no records, or a finding cannot be made.
    """
    file = folder / "findings.toml"
    content: dict[str, Any] = {}
    if file.is_file():
        with _reading(file, "its text"):
            content = tomllib.loads(file.read_text(encoding="utf-8"))
    groups: dict[str, list[Record]] = {}
    for name, entry in content.get("runs", {}).items():
        paths = [entry] if isinstance(entry, str) else entry
        with _reading(file, entry):
            groups[name] = find_records(folder / path for path in paths)
    findings = []
    for entry in content.get("findings", []):
        with _reading(file, entry):
            findings.append(finding(entry, groups))
    names = {}
    for name, path in content.get("runs", {}).items():
        if isinstance(path, str):
            names[folder / path] = name
    return Study(
        name=folder.resolve().name,
        intro=(folder / "intro.md").read_text(encoding="utf-8").strip(),
        records=find_records([folder]),
        findings=findings,
        metrics=content.get("metrics", []),
        figures=content.get("figures", {}),
        names=names,
    )


@contextmanager
def _reading(file: Path, entry: object) -> Iterator[None]:
    """Names the file and its entry where that cannot be read."""
    try:
        yield
    except (KeyError, ValueError, UserError) as error:  # a TOMLDecodeError is a ValueError
        raise UserError(f"{file} cannot be read ({error}; got {entry}); see the head of results/studies.py.") from error


def named(study: Study) -> list[Record]:
    """The records of a study, those of a group under its name in the place of the method's."""
    records = []
    for record in study.records:
        name = _group_of(record["folder"], study.names)
        records.append(record if name is None else {**record, "label": name})
    return records


def _group_of(folder: Path, names: Mapping[Path, str]) -> str | None:
    """The name of the innermost folder, of a run's own and those around it, that has one."""
    for path in (folder, *folder.parents):
        if path in names:
            return names[path]
    return None


def modified(records: Iterable[Record]) -> str:
    """How many runs are of a checkout with changes that are not committed, in words; empty for none."""
    commits = [record.get("commit") or "" for record in records]
    count = sum(commit.endswith("+") for commit in commits)
    if not count:
        return ""
    return f"{count} of {len(commits)} runs by a modified checkout"


def finding(entry: Mapping[str, Any], groups: Mapping[str, list[Record]]) -> str:
    """A finding as a line, "Ours - Theirs, last round: +3.31 [+2.44, +4.19] (3); paper +9.48".

    Args:
        entry: Its keys, see the head of this file.
        groups: Runs by name.

    Raises:
        KeyError: If a key or a group is missing.
        ValueError: If runs have no such value, or are no pairs, or the paper prints no such number.
    """
    metric = find_metric(entry["metric"])
    of = entry["of"]
    title = _title(metric, groups[of])
    if "than" in entry:
        than = entry["than"]
        than_metric = find_metric(entry.get("than_metric", entry["metric"]))
        _check_pairs(groups[of], groups[than])
        sign = "+"
        result = difference(metric, groups[of], than_metric, groups[than])
        line = f"{of} - {than}, {title}"
        if than_metric.name != metric.name:
            line = f"{of} ({title}) - {than} ({_title(than_metric, groups[than])})"
    else:
        sign = ""
        result = interval(metric.values(groups[of]))
        line = f"{of}, {title}"
    if not result.n:
        raise ValueError("no run has this value, or no seed has both runs")
    line += f": {interval_text(metric, result, sign=sign)}"
    if "paper" in entry:
        line += f"; paper {metric.text(_printed_number(entry, metric), sign)}"
    if "says" in entry:
        line = f"{entry['says']}. {line}"
    return line


def _check_pairs(runs: Iterable[Record], others: Iterable[Record]) -> None:
    """Refuses runs that have no single partner of the same seed, data and partition."""
    pairs = frame_of(runs).merge(frame_of(others), on="seed")
    faulty = pairs.query("seed.duplicated() or images_x != images_y or partition_x != partition_y")["seed"]
    if len(faulty):
        raise ValueError(f"the runs of seed {faulty.min()} are no pair: several, or of other data or partitions")


def _printed_number(entry: Mapping[str, Any], metric: Metric) -> float:
    """The number that the paper prints for a finding: of a row, or how far one row leads on another."""
    name, column = entry["paper"]
    of = entry["of"]
    table = registry.find_table(name)
    if "than" in entry:
        than = entry["than"]
        rows = f"{of} or {than}"
        number = paper_tables.printed_lead(table, of, than, (column,), metric)
    else:
        rows = of
        number = paper_tables.printed_value(table, of, column, metric)
    if number is None:
        raise ValueError(f"{name} has no number in {column} for {rows}")
    return number


def _title(metric: Metric, records: Iterable[Record]) -> str:
    """What a metric is called."""
    if metric.name == "selected":
        selections = {SELECTIONS[record["summary"]["selection"]] for record in records}
        return " or ".join(sorted(selections))
    name, _, parameter = metric.name.partition(":")
    with_spaces = name.replace("-", " ")
    if not parameter:
        return TITLES.get(name, with_spaces)
    title = TITLES_BEFORE_PARAMETER.get(name, with_spaces)
    return f"{title} {parameter.replace('_', ' ')}"
