"""Tables of runs: which stand in a row, and what it says of them; and every run as a row.

Accuracies are fractions in records and percent here. Numbers of two protocols or data sets cannot be compared, so they
share no table of runs and no panel.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from fedcli import registry
from fedcli.declarations import flag_of
from fedcli.errors import UserError, printable, unknown
from fedcli.results.frame import find_records, frame_of
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.render import MISSING, Best, Sheet, markdown
from fedcli.results.statistics import BOLD, DIVERGED, best, leads_over_best, mean_of_runs
from fedcli.runs.identity import FIRST, NOT_SETTINGS, reductions, settings, settings_text, what_happened
from fedcli.runs.machine import quiet
from fedcli.runs.options import given_options, inactive_term
from fedcli.runs.record import state_of

TEXTS = ("Method", "Settings", "Seeds", "Model")  # columns without numbers
LAST = "Last round, %"
LEAD = "Lead over the best other [95 %] (seeds)"
ROUNDS = "Rounds"
FLOATS = "Floats up / down, client and round"
OUT = re.compile(r" --out[ =](?:'[^']*'|\S+)")  # in the commands of older runs
MOST_DIGITS = 6
NO_NAMES: Mapping[str, str] = {}
COMPARABLE = ["protocol", "dataset", "partition", "rounds", "train_examples", "selection"]
# Metrics that have a column where a run has a value.
SOMETIMES = ("global", "validation", "post", "classifier", "intra", "quality:nmi", "quality:silhouette")
MODELS = (
    'Model: which one is tested for the headline, the "global" one that all clients share or each client\'s own '
    '"personal" one; the column "global, %" has the global model of methods that have both.'
)

LEADS = "Lead: mean difference from the best other row, paired by seed, with its 95 % interval (Student's t)."
ACROSS_MODELS = (
    "A lead, or bold, of a row with personal models over one with a global model compares two tasks, since a global "
    "model serves all clients and a personal one its own."
)


@dataclass(frozen=True)
class Layout:
    """What a user chooses of a table; the defaults leave it as it is.

    Attributes:
        columns: The columns and their order, see `choose_columns`; empty for all with something to say.
        digits: Decimals of percent and plain numbers; None for those of each metric.

    Raises:
        UserError: If there cannot be so many digits.
    """

    columns: str | Sequence[str] = ()
    digits: int | None = None

    def __post_init__(self) -> None:
        if self.digits is not None and self.digits not in range(MOST_DIGITS + 1):
            raise UserError(f"--digits must be from 0 to {MOST_DIGITS} (got {self.digits}); papers have 1 or 2.")


AS_IT_IS = Layout()


@dataclass(frozen=True)
class SeedGroup:
    """Runs that agree in everything but the seed."""

    label: str  # the method and its settings that most other groups do not have
    method: str  # its name, or the label that stands for it
    settings: dict[str, Any]  # those in which it differs from other groups
    selection: str  # the rule behind the headline
    records: list[dict]  # the runs, by seed

    @property
    def first(self) -> dict:
        """The run of the first seed."""
        return self.records[0]

    @property
    def has_failed(self) -> bool:
        """Whether all runs failed."""
        return all(record["status"] == "failed" for record in self.records)

    @property
    def finished(self) -> list[dict]:
        """The runs that finished."""
        return [record for record in self.records if record["status"] == "finished"]


def select_records(records: Sequence[dict], methods: Sequence[str] = (), datasets: Sequence[str] = ()) -> list[dict]:
    """The records of these methods and data sets, of all if none is named; case does not count.

    Raises:
        UserError: If no record is of a named one.
    """
    of_methods = _select(records, "method", methods, "method")
    return _select(of_methods, "dataset", datasets, "data set")


def _select(records: Sequence[dict], field: str, names: Sequence[str], kind: str) -> list[dict]:
    """The records with one of these names in a field; `kind` is what the field holds, in words."""
    if not names:
        return list(records)
    present = {record[field].lower(): record[field] for record in records}
    for name in names:
        if name.lower() not in present:
            raise unknown(f"{kind} among the runs", name, present, f"there are {', '.join(present.values())}.")
    wanted = {name.lower() for name in names}
    return [record for record in records if record[field].lower() in wanted]


def boards(records: Iterable[dict]) -> dict[str, list[dict]]:
    """The records by protocol and data set, in order of appearance."""
    by_board: dict[str, list[dict]] = {}
    for record in records:
        board = f"{record['protocol']}, {record['dataset']}"
        by_board.setdefault(board, []).append(record)
    return by_board


def group(records: Iterable[dict], by_seed: bool = False) -> list[SeedGroup]:
    """The records as groups that agree in everything but the seed, in order of appearance.

    Numerics and labels divide groups, and if `by_seed`, seeds. Of runs with the same seed and parameters, one counts.
    """
    runs = frame_of(records).drop_duplicates(["label", "key", "numerics", "seed", "state", "parameters"])
    division = ["label", "key", "numerics"]
    if by_seed:
        division.append("seed")
    parts = [part for _, part in runs.groupby(division, sort=False)]
    labels = [part["label"].iloc[0] for part in parts]
    compared = [_compared_settings(part) for part in parts]
    groups = []
    for part, label, values in zip(parts, labels, compared, strict=True):
        differing = _differing(values, compared)
        unusual = {name: value for name, value in differing.items() if _is_unusual(name, values, compared)}
        name = label or values["method"]
        is_told_by_name = labels.count(name) == 1  # a user's label that one group has is enough
        full_name = f"{name}, {settings_text(unusual)}" if unusual and not is_told_by_name else name
        members = part.sort_values("seed", kind="stable")["record"].tolist()
        groups.append(SeedGroup(full_name, name, differing, values["selection"], members))
    return groups


def _compared_settings(runs: pd.DataFrame) -> dict[str, Any]:
    """The settings of the runs of a group, and their numerics."""
    return {**runs["settings"].iloc[0], "numerics": runs["numerics"].iloc[0]}


def _differing(values: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings in which a group differs from others."""
    differing = {}
    for name, value in values.items():
        peers = _peers(name, values, compared)
        if name != "method" and any(other[name] != value for other in peers):
            differing[name] = value
    return differing


def _is_unusual(name: str, values: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> bool:
    """Whether at most half of the compared groups have this group's value of a setting."""
    peers = _peers(name, values, compared)
    same = [other for other in peers if other[name] == values[name]]
    return 2 * len(same) <= len(peers)


def _peers(name: str, values: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The groups that a setting is compared among: all, or those of the method where it is not an option of all."""
    having = [other for other in compared if name in other]
    if len(having) == len(compared) and name not in ("numerics", "code"):
        return having
    return [other for other in having if other["method"] == values["method"]]


def agreed(records: Iterable[dict]) -> dict[str, Any]:
    """Those of protocol, data set and partition in which all records agree."""
    compared = [settings(record) for record in records]
    same = {}
    for name in ("protocol", "dataset", "partition"):
        values = {of_record[name] for of_record in compared}
        if len(values) == 1:
            same[name] = values.pop()
    return same


def tested_model(record: dict) -> str:
    """Which model the headline of a run is of, "global" or "personal"; empty where an older record cannot tell."""
    method = registry.methods().get(record["method"])
    return record.get("tested") or (method.tested if method else "")


def sheet(
    records: Sequence[dict],
    metrics: Sequence[str] = (),
    title: str = "",
    by_seed: bool = False,
    leads: bool = False,
    layout: Layout = AS_IT_IS,
) -> Sheet:
    """A table with a row for each group, or for each run if `by_seed`, and more `metrics`; its values are the runs.

    With `leads`, a column has the lead of each row's headline over the best of the others that it is compared with,
    with its 95 % interval, paired by seed.

    Raises:
        UserError: If a metric or a column is not known.
    """
    groups = group(records, by_seed)
    columns = find_columns(groups, metrics, leads, layout)
    cells = cells_of(groups, columns)
    if not columns.chosen:
        cells = _with_something_to_say(cells)
    titles = list(cells)
    same = ", ".join(f"{name} {markdown(value)}" for name, value in agreed(records).items())
    found_metrics = [find_metric(name) for name in metrics]
    notes = _notes_on_numbers(groups)
    notes += notes_on_runs(groups)
    notes += notes_on_metrics(groups, columns)
    notes += _notes_on_leads(groups, cells)
    return Sheet(
        columns=titles,
        lines=cells.to_numpy().tolist(),
        first_number_column=first_number_column(titles),
        values=[numbers_of(record, found_metrics) for record in records],
        title=title,
        setting=f"All rows: {same}." if same else "",
        notes=notes,
    )


def sheets(
    records: Iterable[dict], metrics: Sequence[str] = (), leads: bool = False, layout: Layout = AS_IT_IS
) -> list[Sheet]:
    """A table for each board, which titles name where there are several; see `sheet`."""
    by_board = boards(records)
    tables = []
    for board, runs in by_board.items():
        title = board if len(by_board) > 1 else ""
        tables.append(sheet(runs, metrics, title, leads=leads, layout=layout))
    return tables


@dataclass(frozen=True)
class Columns:
    """The columns of a table of runs."""

    headline: str  # the title of that with the accuracy of the headline
    metrics: dict[str, Metric]  # of the columns of numbers, by their titles
    optional: set[str]  # metrics whose column stays empty without a value
    leads: bool  # whether there is a column of leads
    chosen: list[str]  # titles, as the user has chosen them; empty for all columns with something to say


def find_columns(groups: Sequence[SeedGroup], metrics: Sequence[str], leads: bool, layout: Layout) -> Columns:
    """The columns of a table of groups.

    Raises:
        UserError: If a metric is not known, or a column is chosen that the table does not have.
    """
    selections = sorted({member.selection for member in groups})
    headline = f"Selected ({' or '.join(selections)}), %"
    by_title = {headline: find_metric("selected")}
    if selections != ["last"]:  # else it is the selected one
        by_title[LAST] = find_metric("last")
    for name in (*SOMETIMES, *metrics):
        metric = find_metric(name)
        by_title[metric.title] = metric
    if layout.digits is not None:
        by_title = {title: replace(metric, decimals=layout.digits) for title, metric in by_title.items()}
    titles = [*TEXTS, *by_title, ROUNDS, FLOATS]
    aliases = {"Accuracy": headline}  # as a table for a paper names it
    if leads:
        titles.append(LEAD)
        aliases["Lead"] = LEAD
    chosen = choose_columns(layout.columns, titles, aliases)
    asked = {*metrics, *(by_title[title].name for title in chosen if title in by_title)}
    return Columns(headline, by_title, {*SOMETIMES} - asked, leads, chosen)


def choose_columns(
    asked: str | Sequence[str], titles: Sequence[str], aliases: Mapping[str, str] = NO_NAMES
) -> list[str]:
    """The titles of the columns that are asked for, in any case, with or without what stands behind their name.

    Args:
        asked: Their names; in a text, with commas between them.
        titles: Those that there are.
        aliases: Other names of some titles.

    Raises:
        UserError: If there is no such column.
    """
    by_name: dict[str, str] = {}
    for title in titles:
        for name in (title, column_name(title)):
            by_name.setdefault(name.lower(), title)
    for name, title in aliases.items():
        by_name.setdefault(name.lower(), title)
    chosen = []
    texts = [asked] if isinstance(asked, str) else asked
    for text in texts:
        rest = text.strip()
        while rest:  # not split at commas, which some titles have
            fitting = [name for name in by_name if re.match(rf"{re.escape(name)}\s*(,|$)", rest.lower())]
            if not fitting:
                names = list(dict.fromkeys(map(column_name, titles)))
                raise unknown("column in --columns", rest.split(",")[0], names, f"there are {', '.join(names)}.")
            longest = max(fitting, key=len)
            chosen.append(by_name[longest])
            rest = rest[len(longest) :].lstrip().removeprefix(",").lstrip()
    return chosen


def column_name(title: str) -> str:
    """The name of a column, without its rule, unit or interval, as "Selected" for "Selected (last), %"."""
    return re.split(r" [(\[]|, ", title)[0]


def first_number_column(titles: Sequence[str]) -> int:
    """The index of the first column of numbers."""
    for index, title in enumerate(titles):
        if title not in TEXTS:
            return index
    return len(titles)


def cells_of(groups: Sequence[SeedGroup], columns: Columns, usual: int | None = None) -> pd.DataFrame:
    """The cells of a table, a row a group, by title: the chosen columns, or all.

    A headline whose lead over the best other is sure is `Best`. A number of runs that is the `usual` one is left out.
    """
    rows = [_row(member, columns, usual) for member in groups]
    headline = columns.metrics[columns.headline]
    for indices in _comparable(groups):
        compared = {index: groups[index].records for index in indices}
        ahead = best(headline, compared)
        if ahead is not None:
            for title in ("Method", columns.headline):
                rows[ahead][title] = Best(rows[ahead][title])
        if columns.leads:
            texts = leads_over_best(headline, compared, usual)
            for index, text in texts.items():
                rows[index] = _with_lead(rows[index], columns.headline, text)
    cells = pd.DataFrame(rows, dtype=object)
    return cells[columns.chosen] if columns.chosen else cells


def _comparable(groups: Sequence[SeedGroup]) -> list[list[int]]:
    """The indices of groups whose numbers are compared with each other."""
    compared = pd.DataFrame([settings(member.records[0]) for member in groups], dtype=object)
    return [list(indices) for indices in compared.groupby(COMPARABLE, dropna=False).groups.values()]


def _with_something_to_say(cells: pd.DataFrame) -> pd.DataFrame:
    """The columns that are not empty; that of the model only where rows differ in it."""
    if len({*cells["Model"]} - {""}) < 2:
        cells = cells.drop(columns="Model")
    return cells.loc[:, (cells != "").any()]


def _row(member: SeedGroup, columns: Columns, usual: int | None) -> dict[str, str]:
    """The cells of a group by column; those of optional metrics stay empty without a value."""
    records = member.records
    states = Counter(map(state_of, records))
    (first, *_) = records
    means = {}
    for title, metric in columns.metrics.items():
        is_left_out = metric.name in columns.optional and not metric.values(records)
        means[title] = "" if is_left_out else mean_of_runs(metric, records, states, usual)
    return {
        "Method": member.method,
        "Settings": settings_text(member.settings),
        "Seeds": ", ".join(map(_seed_text, records)),
        "Model": tested_model(first),
        **means,
        ROUNDS: str(first["config"]["rounds"]),
        FLOATS: f"{_mean_floats('floats-up', records)} / {_mean_floats('floats-down', records)}",
    }


def _seed_text(record: dict) -> str:
    """The seed of a run, and what has become of one that has not finished."""
    state = state_of(record)
    if state == "finished":
        return str(record["seed"])
    return f"{record['seed']} {state} after {len(record['rounds'])} rounds"


def _with_lead(row: dict[str, str], headline: str, text: str) -> dict[str, str]:
    """The cells of a group with its lead behind its headline."""
    cells = {}
    for title, cell in row.items():
        cells[title] = cell
        if title == headline:
            cells[LEAD] = text
    return cells


def _mean_floats(name: str, records: Sequence[dict]) -> str:
    values = find_metric(name).values(records)
    return f"{fmean(values):,.0f}" if values else MISSING


def _all_records(groups: Sequence[SeedGroup]) -> list[dict]:
    return [record for member in groups for record in member.records]


def _notes_on_numbers(groups: Sequence[SeedGroup]) -> list[str]:
    """What a reader must know to read the numbers of a table, each only where it applies."""
    records = _all_records(groups)
    notes = ["Mean ± sample standard deviation over runs (number of runs); a value without ± is one run."]
    if len(set(map(tested_model, records))) > 1:
        notes.append(MODELS)
    if "diverged" in map(state_of, records):
        notes.append(DIVERGED)
    return notes


def _notes_on_leads(groups: Sequence[SeedGroup], cells: pd.DataFrame) -> list[str]:
    """What a reader must know of leads and bold, each only where it applies."""
    has_bold = any(isinstance(cell, Best) for cell in cells.to_numpy().flat)
    notes = []
    if LEAD in cells:
        notes.append(LEADS)
    if has_bold:
        among = " among rows with the same protocol, data set, partition, rounds and selection rule"
        notes.append(BOLD.format(among=among))
    if (has_bold or LEAD in cells) and compares_models(groups):
        notes.append(ACROSS_MODELS)
    return notes


def compares_models(groups: Sequence[SeedGroup]) -> bool:
    """Whether rows with a global model are compared with rows of personal ones."""
    for indices in _comparable(groups):
        kinds = {tested_model(groups[index].records[0]) for index in indices}
        if {"global", "personal"} <= kinds:
            return True
    return False


def notes_on_runs(groups: Sequence[SeedGroup]) -> list[str]:
    """What a reader must know of the runs behind a table, each only where it applies."""
    notes = []
    reduced = dict.fromkeys(", ".join(reductions(record).values()) for record in _all_records(groups))
    if any(reduced):
        notes.append(f"Reduced against the protocol: {'; or '.join(filter(None, reduced))}.")
    options: dict[str, None] = {}  # in words, each once
    for member in groups:
        record = member.records[0]
        method = registry.methods().get(record["method"])
        inactive = inactive_term(record["config"], method) if method else ""
        if inactive:
            notes.append(f"Inactive in {markdown(member.label)}: {inactive}.")
        shown = {*FIRST, "rounds", *NOT_SETTINGS, *member.settings, *reductions(record)}
        for name, value in given_options(record["config"], record["origin"]).items():
            if name not in shown:
                options[settings_text({name: value})] = None
    notes += changes_of(groups)
    if options:
        notes.append(f"Options given with the runs: {markdown('; '.join(options))}.")
    return list(dict.fromkeys(notes))


def notes_on_metrics(groups: Sequence[SeedGroup], columns: Columns) -> list[str]:
    """Which runs lack a metric or have another than the others, a sentence for each such metric."""
    sentences = []
    for metric in columns.metrics.values():
        without = []
        for member in groups:
            seeds = [str(record["seed"]) for record in member.finished if not record["config"].get(metric.option)]
            if metric.option and seeds:
                without.append(f"{markdown(member.label)} (seed {', '.join(seeds)})")
        if without:
            sentences.append(
                f"{metric.name} is not in the records of {', '.join(without)}: it needs runs with "
                f"{flag_of(metric.option)}."
            )
    return [*sentences, *_of_different_rounds(groups, columns)]


def _of_different_rounds(groups: Sequence[SeedGroup], columns: Columns) -> list[str]:
    """Which rows have values of the last round's models where others have those of the headline's."""
    sentences = []
    for metric in columns.metrics.values():
        if not metric.different_rounds(_all_records(groups)):
            continue
        last = []
        for member in groups:
            measured = [record for record in member.records if metric.value(record) is not None]
            seeds = [str(record["seed"]) for record in measured if "selected" not in metric.rules(record)]
            if seeds:
                last.append(f"{markdown(member.label)} (seed {', '.join(seeds)})")
        sentences.append(
            f"{metric.name} is of the last round's models of {', '.join(last)} and of the headline's of the others, "
            "which do not compare: 'fedcli quality' measures the headline's."
        )
    return sentences


def changes_of(groups: Sequence[SeedGroup]) -> list[str]:
    """What of code, machine and versions has changed between the rounds of runs, a sentence each."""
    changes = []
    for member in groups:
        for record in member.records:
            label = f"{markdown(member.label)}, seed {record['seed']}"
            changes += [f"{label}: {markdown(change)}." for change in what_happened(record)]
    return changes


def numbers_of(record: dict, metrics: Sequence[Metric] = ()) -> dict[str, Any]:
    """One run as a flat row; rounds count from 1, accuracies are in percent.

    The median round leaves out the first one's warming up. Seconds that other work disturbed are left out.
    """
    summary = record["summary"]
    undisturbed = quiet(record)
    down = find_metric("floats-down").value(record)
    up = find_metric("floats-up").value(record)
    seconds = [sum(entry["seconds"].values()) for entry in record["rounds"]]
    return {
        **{name: record[name] for name in ("method", "protocol", "dataset", "seed", "status")},
        "reduced": ", ".join(reductions(record).values()),
        "changed": "; ".join(what_happened(record)),
        "partition_fingerprint": record["partition"]["fingerprint"],
        "tested": tested_model(record),
        "selection": summary["selection"],
        "selected": find_metric("selected").value(record),
        "selected_round": None if summary["selected_round"] is None else summary["selected_round"] + 1,
        "last": find_metric("last").value(record),
        "validation_accuracy": find_metric("validation").value(record),
        "rounds_done": len(record["rounds"]),
        "post_accuracy": find_metric("post").value(record),
        **{metric.title: metric.value(record) for metric in metrics},
        "floats_down": down and round(down),
        "floats_up": up and round(up),
        **{name: (record["cost"] or {}).get(name) for name in ("memory_floats", "buffer_floats")},
        "parameters": record["model"]["parameters"],
        "params_sha256": summary.get("params_sha256"),
        "seconds_round_median": median(seconds) if seconds and undisturbed else None,
        "seconds_total": record["seconds_total"] if undisturbed else None,
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
    return numbers_of_records(find_records(paths), metrics)


def numbers_of_records(records: Sequence[dict], metrics: Sequence[str] = ()) -> pd.DataFrame:
    """The same of records, each with its `folder`."""
    chosen = [find_metric(name) for name in metrics]
    numbers = pd.DataFrame([{"folder": record["folder"], **numbers_of(record, chosen)} for record in records])
    options = pd.DataFrame(map(settings, records), dtype=object)
    differ = [name for name in options if name not in numbers and options[name].astype(str).nunique() > 1]
    return numbers.filter(regex=r"^(?!config\.)").join(options[differ])


def machines(records: Iterable[dict]) -> list[str]:
    """A line for each machine and its versions, with the number of its runs; a run that moved counts on each."""
    counts: Counter[str] = Counter()
    for record in records:
        for part in (record, *record["moved"]):
            facts = {**part.get("hardware", {}), **part.get("versions", {})}
            recorded = {name: value for name, value in facts.items() if value is not None}
            counts[settings_text(recorded)] += 1
    lines = []
    for machine, count in counts.items():
        runs = "run" if count == 1 else "runs"
        lines.append(f"- {count} {runs}: {markdown(machine)}")
    return lines


def commands(records: Iterable[dict]) -> list[str]:
    """The commands that made these runs, without their folders, each once."""
    texts = dict.fromkeys(OUT.sub("", printable(record["command"])) for record in records)
    return [text for text in texts if text.startswith("fedcli ")]
