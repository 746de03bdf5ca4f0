"""A study, and its findings: lines made from the records that its `findings.toml` names.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results.comparison import printed_lead, printed_value
from fedcli.results.frame import find_records, frame_of
from fedcli.results.metrics import Metric, Record, difference, find_metric, interval

WORDS = {  # of metrics whose names say too little
    "last": "last round", "intra": "own domain", "inter": "other domains", "inter:": "other domains than",
}  # fmt: skip


@dataclass(frozen=True)
class Study:
    """A folder of runs, and what its page shows."""

    name: str  # of the folder
    intro: str  # its title, question and set-up, in Markdown
    records: list[Record]
    findings: list[str]  # each a line of Markdown
    metrics: list[str]  # more columns of its table
    figures: dict[str, str]  # what more figures show, by the kind of the chart


def read_study(folder: Path) -> Study:
    """The study in a folder of runs with `intro.md` and, if it has findings, `findings.toml`.

    Raises:
        UserError: If it has no records, or a finding cannot be made.
    """
    file, groups, lines = folder / "findings.toml", {}, []
    entry: Any = "its text"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for name, entry in content.get("runs", {}).items():
            groups[name] = find_records(folder / path for path in ([entry] if isinstance(entry, str) else entry))
        for entry in content.get("findings", []):
            lines.append(finding(entry, groups))
    except (KeyError, ValueError, UserError) as error:  # a TOMLDecodeError is a ValueError
        raise UserError(f"{file} cannot be read ({error}; got {entry}); see the head of {__name__}.") from error
    intro, shown = (folder / "intro.md").read_text(encoding="utf-8").strip(), content.get("figures", {})
    return Study(folder.resolve().name, intro, find_records([folder]), lines, content.get("metrics", []), shown)


def finding(entry: Mapping[str, Any], groups: Mapping[str, list[Record]]) -> str:
    """A finding as a line, "Ours - Theirs, last round: +3.31 [+2.44, +4.19] (3); paper +9.48".

    Args:
        entry: Its keys, see the head of this file.
        groups: Runs by name.

    Raises:
        KeyError: If a key or a group is missing.
        ValueError: If runs have no such value, or are no pairs.
    """
    of, than = entry["of"], entry.get("than")
    metric, second = (find_metric(entry.get(key, entry["metric"])) for key in ("metric", "than_metric"))
    words = _words(metric, groups[of])
    line, result = f"{of}, {words}", interval(metric.values(groups[of]))
    if than:
        pairs = frame_of(groups[of]).merge(frame_of(groups[than]), on="seed")
        faulty = pairs.query("seed.duplicated() or images_x != images_y or partition_x != partition_y")["seed"]
        if len(faulty):
            raise ValueError(f"the runs of seed {faulty.min()} are no pair: several, or of other data or partitions")
        result = difference(metric, groups[of], second, groups[than])
        line = f"{of} - {than}, {words}"
        if second.name != metric.name:
            line = f"{of} ({words}) - {than} ({_words(second, groups[than])})"
    if not result.n:
        raise ValueError("no run has this value, or no seed has both runs")
    sign = "+" if than else ""
    line += f": {metric.interval_text(result, sign=sign)}"
    if "paper" in entry:
        table, column = find_table(entry["paper"][0]), entry["paper"][1]
        lead = printed_lead(table, of, than, (column,), metric) if than else printed_value(table, of, column, metric)
        if lead is None:
            raise ValueError(f"{table.name} has no number in {column} for {of}{f' or {than}' if than else ''}")
        line += f"; paper {metric.text(lead, sign)}"
    return f"{entry['says']}. {line}" if "says" in entry else line


def _words(metric: Metric, records: Iterable[Record]) -> str:
    """What a metric is, in words."""
    if metric.name == "selected":
        return " or ".join(sorted({SELECTIONS[record["summary"]["selection"]] for record in records}))
    name, colon, parameter = metric.name.partition(":")
    return f"{WORDS.get(name + colon, name.replace('-', ' '))} {parameter.replace('_', ' ')}".rstrip()
