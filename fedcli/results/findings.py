"""What a study shows: lines made from the records that its `findings.toml` names.

metrics = ["mean-of-last:50"]         # more columns of the study's table; may be left out

[figures]                             # more figures: the kind of the chart, and what it shows; may be left out
drift = "Distance of the clients' features"

[runs]                                # groups of runs: a name, and their folders beside the file
Ours = "ours"
Theirs = ["theirs/seed-0", "../another-study/theirs"]

[[findings]]
says = "Ours is ahead"                # a sentence without a number; may be left out
metric = "last"
of = "Ours"
than = "Theirs"                       # the difference of both, paired by seed; without it the mean of the first
than_metric = "classifier"            # of the second, where it is another one than of the first
beside = "classifier"                 # another metric in the same line
beside_than = "selected"              # of the second, where it is another one there
paper = ["paper:2", "a column"]       # table and column of the printed numbers, whose rows have the groups' names
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results.claims import interval_text
from fedcli.results.comparison import printed_value
from fedcli.results.frame import find_records
from fedcli.results.metrics import Metric, Record, difference, find_metric, interval

FILE = "findings.toml"
RULES = {
    "last": "last round",
    "best-validation": "best round by validation",
    "best-test": "best round",
    "mean-last-3": "mean of the last 3 tested rounds",
}
WORDS = {  # of a metric, by its name, or for any parameter; the others are called by their names
    "last": "last round",
    "mean-of-last:": "mean of the last {} rounds",
    "deviation-of-last:": "standard deviation over the last {} rounds",
    "least-of-last:": "lowest of the last {} rounds",
    "round:": "round {}",
    "rounds:": "mean of rounds {}",
    "rounds-to:": "rounds to {:.3g} %",
    "validation": "validation accuracy in the best round",
    "classifier": "by the classifier in the rounds that count",
    "classifier-of-last:": "by the classifier, mean of the last {} rounds",
    "intra": "own domain",
    "inter": "other domains",
    "inter:": "other domains than {}",
    "quality:nmi": "NMI",
    "quality:clients_cosine_same": "median cosine of features of one class",
    "quality:clients_cosine_other": "median cosine of features of two classes",
    "quality:": "{}",
    "drift:": "{} when last measured",
    "term:": "{} in the last round",
    "post": "after the step behind the last round",
    "memory-floats": "floats that a client holds",
    "floats-up": "floats that a client sends in a round",
    "largest-step": "largest step from a round to the next",
}


@dataclass(frozen=True)
class Findings:
    """What a study shows.

    Attributes:
        lines: The findings, each a line of Markdown.
        metrics: Names of the metrics that get a column in its table.
        figures: What its further figures show, by the kind of the chart.
    """

    lines: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)


def read_findings(study: Path) -> Findings:
    """What a study shows; nothing where it has no such file.

    Args:
        study: Its folder.

    Raises:
        UserError: If the file, or a finding in it, cannot be read.
    """
    file = study / FILE
    if not file.is_file():
        return Findings()
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        groups = {name: _runs(study, folders) for name, folders in content.get("runs", {}).items()}
    except (tomllib.TOMLDecodeError, UserError) as error:
        raise UserError(f"{file} cannot be read (got {error}); see the head of fedcli/results/findings.py.") from error
    lines = []
    for entry in content.get("findings", []):
        try:
            lines.append(finding(entry, groups))
        except (KeyError, ValueError, UserError) as error:
            raise UserError(f"a finding in {file} cannot be made (got {entry}: {error}); correct it.") from error
    return Findings(lines, content.get("metrics", []), content.get("figures", {}))


def _runs(study: Path, folders: str | list[str]) -> list[Record]:
    names = [folders] if isinstance(folders, str) else folders
    return find_records(study / name for name in names)


def finding(entry: Mapping[str, Any], groups: Mapping[str, list[Record]]) -> str:
    """A finding as a line, "Ours - Theirs, last round: +3.31 [+2.44, +4.19], 3 seeds; paper +9.48".

    Args:
        entry: Its keys, see the head of this file.
        groups: Runs by name.

    Raises:
        KeyError: If a key or a group is missing.
        ValueError: If the runs have no such value, or a key is not known.
    """
    if unknown := entry.keys() - {"says", "metric", "of", "than", "than_metric", "beside", "beside_than", "paper"}:
        raise ValueError(f"unknown key {min(unknown)}")
    of, than = entry["of"], entry.get("than")
    metric = find_metric(entry["metric"])
    second = find_metric(entry.get("than_metric", entry["metric"]))
    if than is None:
        result = interval(metric.values(groups[of]))
    else:
        _refuse_unlike(groups[of], groups[than])
        result = difference(metric, groups[of], groups[than], second)
    if result is None:
        raise ValueError("no run has this value, or no seed has both runs")
    if than is None:
        line = f"{of}, {_words(metric, groups[of])}"
    elif second.name == metric.name:
        line = f"{of} - {than}, {_words(metric, groups[of])}"
    else:
        line = f"{of} ({_words(metric, groups[of])}) - {than} ({_words(second, groups[than])})"
    unit = "run" if than is None else "seed"
    line += f": {interval_text(metric, result, signed=than is not None)}, {result.n} {unit}{'s' * (result.n > 1)}"
    if "paper" in entry:
        line += f"; paper {_paper(metric, entry['paper'], of, than)}"
    if "beside" in entry:
        beside, other = find_metric(entry["beside"]), find_metric(entry.get("beside_than", entry["beside"]))
        judged = difference(beside, groups[of], groups[than], other)
        line += f"; {_words(beside, groups[of])} {interval_text(beside, judged)}"
    return f"{entry['says']}. {line}" if "says" in entry else line


def _refuse_unlike(first: list[Record], second: list[Record]) -> None:
    """Refuses a pair of groups of which one has two runs of a seed, or of which two of a seed have other clients."""
    sides = [
        {record["seed"]: (record["dataset_fingerprint"], record["partition"]["fingerprint"]) for record in runs}
        for runs in (first, second)
    ]
    if [len(side) for side in sides] != [len(first), len(second)]:
        raise ValueError("a difference is of groups with one run a seed")
    for seed in sides[0].keys() & sides[1].keys():
        if sides[0][seed] != sides[1][seed]:
            raise ValueError(f"the two runs of seed {seed} have other images or another partition")


def _words(metric: Metric, records: Iterable[Record]) -> str:
    """What a metric is, in words."""
    if metric.name == "selected":
        return " or ".join(sorted({RULES[record["summary"]["selection"]] for record in records}))
    if metric.name in WORDS:
        return WORDS[metric.name]
    name, _, parameter = metric.name.partition(":")
    value = float(parameter) if name == "rounds-to" else parameter.replace("_", " ")
    return WORDS.get(f"{name}:", metric.name).format(value)


def _paper(metric: Metric, place: list[str], of: str, than: str | None) -> str:
    """What the paper prints, for a group or as the difference of two."""
    table, column = place
    values = [printed_value(find_table(table), row, column, metric) for row in (of, than) if row is not None]
    if None in values:
        raise ValueError(f"{table} has no number in {column} for {of}{f' or {than}' if than else ''}")
    return metric.text(values[0]) if than is None else metric.signed(values[0] - values[1])
