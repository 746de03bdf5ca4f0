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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedcli import registry
from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError
from fedcli.figures import find_chart
from fedcli.results.intervals import Interval, MeasuredRuns, mean_interval, paired_difference
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.number_texts import format_interval
from fedcli.results.printed_numbers import find_printed_difference, find_printed_value
from fedcli.results.run_records import find_records
from fedcli.runs.schema import Record

# What metrics are called whose names say too little: by themselves, and before a parameter as in "inter:mnist".
TITLES = {"last": "last round", "intra": "own domain", "inter": "other domains"}
TITLES_BEFORE_PARAMETER = {"inter": "other domains than"}
# What `findings.toml` and a finding in it may have, by key.
KINDS_OF_FILE = {"metrics": list, "figures": dict, "runs": dict, "findings": list}
KINDS_OF_FINDING = {"says": str, "metric": str, "of": str, "than": str, "than_metric": str, "paper": list}
WORDS_OF_KINDS = {str: "a text", list: "a list", dict: "a table"}


@dataclass(frozen=True)
class Study:
    """A folder of runs, and what its page shows.

    Attributes:
        name: The name of the folder.
        intro: The title, the question and the set-up, in Markdown.
        records: The records of the runs.
        finding_lines: The findings, a line each, in Markdown.
        metrics: The names of metrics that get a column in the table.
        figures: What more figures show, by the kind of the chart.
        group_names: The names of groups of runs, by their folders; figures name the runs so.
    """

    name: str
    intro: str
    records: list[Record]
    finding_lines: list[str]
    metrics: list[str]
    figures: dict[str, str]
    group_names: dict[Path, str]


class PrintedColumn(NamedTuple):
    """A column of a table in a paper."""

    table: str
    column: str


@dataclass(frozen=True)
class Finding:
    """What a line says of one group of runs, or of one beside another; an entry of `findings.toml`.

    Attributes:
        sentence: What stands before the numbers; may be empty.
        metric: The metric of the group.
        group: The name of the group.
        baseline: The name of the group that is subtracted; None if none is.
        baseline_metric: The metric of the baseline.
        printed: The paper's numbers, in rows named as the groups; None if the line has none.
    """

    sentence: str
    metric: Metric
    group: str
    baseline: str | None
    baseline_metric: Metric
    printed: PrintedColumn | None


def read_study(folder: Path) -> Study:
    """Reads the study in a folder of runs with `intro.md` and, if it has findings, `findings.toml`.

    Raises:
        UserError: If it has no records, or the file of findings is wrong, or a finding cannot be made.
    """
    file = folder / "findings.toml"
    content: dict[str, Any] = {}
    if file.is_file():
        with _reading(file, "its text"):
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            _check_kinds(content, KINDS_OF_FILE)
    for name in content.get("metrics", []):
        with _reading(file, name):
            _check_text(name)
            find_metric(name)
    for kind, title in content.get("figures", {}).items():
        with _reading(file, kind):
            _check_text(title)
            find_chart(kind)
    groups: dict[str, list[Record]] = {}
    group_names: dict[Path, str] = {}
    for name, entry in content.get("runs", {}).items():
        with _reading(file, entry):
            paths = [folder / path for path in _list_paths(entry)]
            groups[name] = find_records(paths)
            group_names |= _name_paths(paths, name, group_names)
    finding_lines = []
    for entry in content.get("findings", []):
        with _reading(file, entry):
            finding_lines.append(describe_finding(read_finding(entry), groups))
    return Study(
        name=folder.resolve().name,
        intro=(folder / "intro.md").read_text(encoding="utf-8").strip(),
        records=find_records([folder]),
        finding_lines=finding_lines,
        metrics=content.get("metrics", []),
        figures=content.get("figures", {}),
        group_names=group_names,
    )


def _name_paths(paths: Iterable[Path], name: str, group_names: Mapping[Path, str]) -> dict[Path, str]:
    """Names the paths of a group of runs; refuses one that another group has, as figures name a run by its path."""
    named = {}
    for path in paths:
        if path in group_names:
            raise ValueError(f"the groups '{group_names[path]}' and '{name}' are of the same folder, {path}")
        named[path] = name
    return named


@contextmanager
def _reading(file: Path, entry: object) -> Iterator[None]:
    """Names the file and its entry in what is said of an entry that is wrong."""
    try:
        yield
    except (ValueError, UserError) as error:  # a TOMLDecodeError is a ValueError
        raise UserError(f"{file} cannot be read ({error}; got {entry}); see the head of results/studies.py.") from error


def name_groups(study: Study) -> list[Record]:
    """Lists the records of a study, those of a group under its name in the place of the method's."""
    records = []
    for record in study.records:
        name = _find_group_name(record["folder"], study.group_names)
        records.append(record if name is None else {**record, "label": name})
    return records


def _find_group_name(folder: Path, group_names: Mapping[Path, str]) -> str | None:
    """Finds the name of the innermost folder, of a run's own and those around it, that has one."""
    for path in (folder, *folder.parents):
        if path in group_names:
            return group_names[path]
    return None


def describe_modified_checkouts(records: Iterable[Record]) -> str:
    """Says how many runs are of a checkout with changes that are not committed; returns an empty text if none is."""
    commits = [record.get("commit") or "" for record in records]
    count = sum(commit.endswith("+") for commit in commits)
    if not count:
        return ""
    return f"{count} of {len(commits)} runs by a modified checkout"


def read_finding(entry: Mapping[str, Any]) -> Finding:
    """Reads the finding of an entry, whose keys are those at the head of this file.

    Raises:
        ValueError: If a key is missing, unknown or of another kind, or there are two that do not go together.
        UserError: If there is no such metric.
    """
    _check_kinds(entry, KINDS_OF_FINDING)
    for name in ("metric", "of"):
        if name not in entry:
            raise ValueError(f"a finding needs '{name}'")
    if "than_metric" in entry and "than" not in entry:
        raise ValueError("'than_metric' is of the runs that 'than' names, which is missing")
    if "paper" in entry and "than_metric" in entry:
        raise ValueError("the paper's numbers are of one metric, so 'paper' and 'than_metric' do not go together")
    finding = Finding(
        sentence=entry.get("says", ""),
        metric=find_metric(entry["metric"]),
        group=entry["of"],
        baseline=entry.get("than"),
        baseline_metric=find_metric(entry.get("than_metric", entry["metric"])),
        printed=_read_printed_column(entry["paper"]) if "paper" in entry else None,
    )
    if finding.baseline == finding.group and finding.baseline_metric.name == finding.metric.name:
        raise ValueError("'of' and 'than' are the same runs by the same metric, so their difference says nothing")
    return finding


def _read_printed_column(entry: Sequence[Any]) -> PrintedColumn:
    """Reads the table and the column that `paper` names."""
    if len(entry) != len(PrintedColumn._fields):
        raise ValueError("'paper' must be a table and a column")
    for name in entry:
        _check_text(name)
    return PrintedColumn(*entry)


def _list_paths(entry: object) -> list[str]:
    """Lists the folders of a group of runs, which are one text or a list of them."""
    paths = entry if isinstance(entry, list) else [entry]
    for path in paths:
        _check_text(path)
    return paths


def _check_kinds(entry: object, kinds: Mapping[str, type]) -> None:
    """Refuses keys that nobody would read, and values of another kind than theirs."""
    if not isinstance(entry, dict):
        raise ValueError("it must be a table")
    for name, value in entry.items():
        if name not in kinds:
            raise ValueError(f"there is no key '{name}' here, but {', '.join(kinds)}")
        if not isinstance(value, kinds[name]):
            raise ValueError(f"'{name}' must be {WORDS_OF_KINDS[kinds[name]]}")


def _check_text(value: object) -> None:
    """Refuses what is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{value} must be a text")


def describe_finding(finding: Finding, groups: Mapping[str, list[Record]]) -> str:
    """Describes a finding in a line, as "Ours - Theirs, last round: +3.31 [+2.44, +4.19] (3); paper +9.48".

    Args:
        finding: Of which runs it is, and what it says.
        groups: Runs by name.

    Raises:
        ValueError: If there is no such group, or its runs have no such value, or are no pairs, or the paper prints no
            such number.
        UserError: If there is no such table.
    """
    runs = _find_group(groups, finding.group)
    if finding.baseline is None:
        line = describe_group(finding, runs)
    else:
        line = describe_difference(finding, runs, finding.baseline, _find_group(groups, finding.baseline))
    return f"{finding.sentence}. {line}" if finding.sentence else line


def _find_group(groups: Mapping[str, list[Record]], name: str) -> list[Record]:
    """Finds the runs of a group; refuses a name that no group has."""
    if name not in groups:
        raise ValueError(f"[runs] has no group '{name}', but {', '.join(groups) or 'none at all'}")
    return groups[name]


def describe_group(finding: Finding, runs: Sequence[Record]) -> str:
    """Describes the mean of a group, and the paper's number of its row."""
    metric = finding.metric
    _check_runs_differ(runs)
    mean = mean_interval(metric.read_values(runs))
    _check_has_values(mean)
    line = f"{finding.group}, {_name_metric(metric, runs)}: {format_interval(metric, mean, sign='')}"
    printed = finding.printed
    if printed is None:
        return line
    number = find_printed_value(registry.find_table(printed.table), finding.group, printed.column, metric)
    return f"{line}; {_describe_printed(metric, number, printed, finding.group, sign='')}"


def describe_difference(
    finding: Finding, runs: Sequence[Record], baseline: str, baseline_runs: Sequence[Record]
) -> str:
    """Describes how far a group is ahead of its baseline, paired by seed, and how far its row is in the paper."""
    metric = finding.metric
    _check_pairs(runs, baseline_runs)
    lead = paired_difference(MeasuredRuns(metric, runs), MeasuredRuns(finding.baseline_metric, baseline_runs))
    _check_has_values(lead)
    title = _name_metric(metric, runs)
    if finding.baseline_metric.name == metric.name:
        subject = f"{finding.group} - {baseline}, {title}"
    else:
        baseline_title = _name_metric(finding.baseline_metric, baseline_runs)
        subject = f"{finding.group} ({title}) - {baseline} ({baseline_title})"
    line = f"{subject}: {format_interval(metric, lead)}"
    printed = finding.printed
    if printed is None:
        return line
    table = registry.find_table(printed.table)
    number = find_printed_difference(table, finding.group, baseline, (printed.column,), metric)
    return f"{line}; {_describe_printed(metric, number, printed, f'{finding.group} or {baseline}', sign='+')}"


def _describe_printed(metric: Metric, number: float | None, printed: PrintedColumn, rows: str, sign: str) -> str:
    """Describes the number of a column in a paper; refuses a column that has none for `rows`."""
    if number is None:
        raise ValueError(f"{printed.table} has no number in {printed.column} for {rows}")
    return f"paper {metric.format_value(number, sign)}"


def _check_has_values(interval: Interval) -> None:
    """Refuses the interval of no value."""
    if not interval.num_values:
        raise ValueError("no run has this value, or no seed has both runs")


def _check_runs_differ(runs: Iterable[Record]) -> None:
    """Refuses several runs of a seed on one partition, which a mean would count more than others."""
    counts = Counter((record["seed"], record["partition"]["fingerprint"]) for record in runs)
    repeated = [seed for (seed, _), count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"there are several runs of seed {min(repeated)} on one partition")


def _check_pairs(runs: Iterable[Record], others: Iterable[Record]) -> None:
    """Refuses runs that have no single partner of the same seed, data and partition."""
    runs_by_seed = _group_by_seed(runs)
    others_by_seed = _group_by_seed(others)
    for seed in sorted(runs_by_seed.keys() & others_by_seed.keys()):
        partners = [*runs_by_seed[seed], *others_by_seed[seed]]
        images = {record["dataset_fingerprint"] for record in partners}
        partitions = {record["partition"]["fingerprint"] for record in partners}
        if len(partners) > 2 or len(images) > 1 or len(partitions) > 1:
            raise ValueError(f"the runs of seed {seed} are no pair: several, or of other data or partitions")


def _group_by_seed(runs: Iterable[Record]) -> dict[int, list[Record]]:
    """Groups runs by their seeds."""
    by_seed: dict[int, list[Record]] = {}
    for record in runs:
        by_seed.setdefault(record["seed"], []).append(record)
    return by_seed


def _name_metric(metric: Metric, records: Iterable[Record]) -> str:
    """Returns what a metric is called."""
    if metric.name == "selected":
        selections = {SELECTIONS[record["summary"]["selection"]].words for record in records}
        return " or ".join(sorted(selections))
    name, _, parameter = metric.name.partition(":")
    with_spaces = name.replace("-", " ")
    if not parameter:
        return TITLES.get(name, with_spaces)
    title = TITLES_BEFORE_PARAMETER.get(name, with_spaces)
    return f"{title} {parameter.replace('_', ' ')}"
