"""Tables of runs in the forms that users ask for: Markdown, CSV, and LaTeX as papers print them."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

import pandas as pd

from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError, unknown
from fedcli.results import notes
from fedcli.results.columns import (
    DEFAULT_LAYOUT,
    FLOATS,
    GLOBAL,
    HEADLINE,
    LAST,
    LEAD,
    MODEL,
    ROUNDS,
    SEEDS,
    Column,
    ColumnSet,
    Layout,
    build_cells,
    find_best_rows,
    find_cells_under,
    find_columns,
    find_number_columns,
    shorten_title,
)
from fedcli.results.groups import SeedGroup, find_shared_settings, group_by_leaderboard, group_runs
from fedcli.results.metrics import find_metric
from fedcli.results.render import MISSING, TextTable, render
from fedcli.results.tables import build_table, build_tables, write_subject
from fedcli.results.words import describe_data, join_words, name_method
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record
from fedcli.userfiles import names_user_file

FORMATS = ("markdown", "csv", "latex")
# Metrics that papers print only where they discuss them.
DISCUSSED_METRICS = {"validation", "quality:nmi", "quality:silhouette"}
LATEX_LABEL = re.compile(r"[A-Za-z0-9:.\-_/+]*")  # in LaTeX, other characters may mean something
NAMED_METRICS = ("intra", "inter", "class")  # metrics of what has a name, as a domain
HEADINGS = {  # of metrics whose names do not read as a column of a paper
    "clients:mean": "Mean of clients", "clients:std": "Deviation of clients", "clients:worst": "Worst client",
    "macro-f1": "Macro-F1", "quality:nmi": "NMI", "quality:silhouette": "Silhouette",
}  # fmt: skip


def write_tables(
    records: Sequence[Record], metrics: Sequence[str] = (), format: str = "markdown", layout: Layout = DEFAULT_LAYOUT,
    latex_label: str = "",
) -> str:  # fmt: skip
    r"""Writes tables of runs as a text: a table for each protocol and data set, or a CSV with a line for each run.

    Args:
        records: The records of the runs.
        metrics: The names of metrics that get a column.
        format: One of `FORMATS`.
        layout: The columns and decimals that the user chooses.
        latex_label: LaTeX's `\label`; if there are several tables, each label begins with it. By default a label is
            made of the protocol and the data set.

    Raises:
        UserError: If a metric, a column or the format is not known, a metric is of a name that no run has, columns are
            chosen of a CSV, or the label cannot be one.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS, f"there are {', '.join(FORMATS)}.")
    if latex_label and format != "latex":
        raise UserError(
            f"a label is for LaTeX (got label '{latex_label}' and --format {format}); leave one of them out."
        )
    for name in metrics:
        find_metric(name).refuse_unknown_name(records)
    if format == "csv":
        if layout != DEFAULT_LAYOUT:
            raise UserError(
                "--columns and --digits are for tables that are read (got --format csv, which has everything in full); "
                "leave them out."
            )
        return render(build_table(records, metrics), format)
    if format == "latex":
        by_leaderboard = group_by_leaderboard(records)
        latex_tables = []
        for runs, name in zip(by_leaderboard.values(), _choose_latex_labels(by_leaderboard, latex_label), strict=True):
            table = replace(build_paper_table(runs, metrics, layout), latex_label=name)
            latex_tables.append(render(table, format))
        return "\n".join(latex_tables)
    return "\n".join(render(table, format) for table in build_tables(records, metrics, leads=True, layout=layout))


def _choose_latex_labels(names: Collection[str], given: str) -> list[str]:
    r"""Chooses a `\label` for each of the tables of these names, no two the same; for `given` see `write_tables`."""
    if not LATEX_LABEL.fullmatch(given):
        raise UserError(
            f"a label of LaTeX must be letters, digits and :.-_/+ (got '{given}'); write one as 'tab:main-results'."
        )
    if given and len(names) == 1:
        return [given]
    labels: list[str] = []
    for name in names:
        first_choice = f"{given}-{slugify(name)}" if given else f"tab:{slugify(name)}"
        number = 2
        label = first_choice
        while label in labels:
            label = f"{first_choice}-{number}"
            number += 1
        labels.append(label)
    return labels


def slugify(text: str) -> str:
    """Turns a text into lower-case words with hyphens between them; returns an empty text if it has no such words."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def build_paper_table(
    records: Sequence[Record], metrics: Sequence[str] = (), layout: Layout = DEFAULT_LAYOUT
) -> TextTable:
    """Builds a table as papers print it: with the names of methods in their papers, and with a caption.

    Unless the user chooses columns, the table has no costs, and neither seeds nor rounds if all rows share them; the
    caption tells those.

    Args:
        records: The records of the runs.
        metrics: The names of metrics that get a column.
        layout: The columns and decimals that the user chooses.

    Raises:
        UserError: If a metric or a column is not known.
    """
    groups = [replace(group, method=name_method(group.first)) for group in group_runs(records)]
    columns = find_columns(groups, metrics, leads=True, layout=layout)
    seeds = _find_common_seeds(groups)
    cells = build_cells(groups, columns, implied_count=len(seeds) or None)
    if not columns.chosen:
        cells = _select_paper_columns(cells, columns, same_seeds=bool(seeds))
    shown = columns.select(cells)
    number_columns = find_number_columns(shown)
    cells.iloc[:, number_columns] = cells.iloc[:, number_columns].replace("", MISSING)
    best = find_cells_under({HEADLINE}, find_best_rows(groups, columns), shown)
    return TextTable(
        titles=[_write_heading(column) for column in shown],
        rows=cells.to_numpy().tolist(),
        number_columns=number_columns,
        best=best,
        subject=write_subject(records),
        notes=[*notes.write_notes_on_runs(groups), *notes.write_notes_on_metrics(groups, columns)],
        caption=_write_caption(groups, list(cells), seeds, has_bold=bool(best)),
    )


def _select_paper_columns(cells: pd.DataFrame, columns: ColumnSet, *, same_seeds: bool) -> pd.DataFrame:
    """Leaves out the columns that papers do not have: costs, what the caption says, and validation unless asked for."""
    hidden = [FLOATS.key]
    if same_seeds:
        hidden.append(SEEDS.key)
    for key in (ROUNDS.key, MODEL.key):
        if cells[key].nunique() == 1:
            hidden.append(key)
    hidden += [column.key for column in columns.select(cells) if column.is_optional and column.key in DISCUSSED_METRICS]
    cells = cells.drop(columns=hidden)
    return cells.loc[:, (cells != "").any()]


def _find_common_seeds(groups: Sequence[SeedGroup]) -> list[int]:
    """Finds the seeds of the groups' runs; returns an empty list if there are none.

    There are none either if a run has not finished, or a group has several runs of one seed.
    """
    seeds = [record["seed"] for record in groups[0].records]
    if len(set(seeds)) < len(seeds):
        return []
    for group in groups:
        has_finished = len(group.finished) == len(group.records)
        if not has_finished or [record["seed"] for record in group.records] != seeds:
            return []
    return seeds


def _write_heading(column: Column) -> str:
    """Writes the heading of a column of a paper's table, whose caption says the unit."""
    if column.key == HEADLINE:
        return "Accuracy"
    if column.key == LEAD.key:
        return "Lead [95 %]"
    if column.metric is None or column.key == LAST:
        return shorten_title(column.title)
    metric = column.metric.name
    if metric in HEADINGS:
        return HEADINGS[metric]
    name, _, parameter = metric.partition(":")
    if name == "domain" and parameter:
        return describe_data(parameter)
    if names_user_file(column.key):
        words = metric.replace("_", " ")
    else:
        detail = describe_data(parameter) if name in NAMED_METRICS else parameter
        words = f"{name.replace('-', ' ')} {detail}".strip()
    return words[:1].upper() + words[1:]


def _write_caption(groups: Sequence[SeedGroup], keys: Collection[str], seeds: Sequence[int], *, has_bold: bool) -> str:
    """Writes the caption: data, seeds, the rule of the headline, leads, bold, and what a reader must know of the runs.

    Args:
        groups: The groups of runs, one a row.
        keys: The keys of the columns.
        seeds: The seeds that all rows share; empty if they differ.
        has_bold: Whether a cell is bold.
    """
    records = [record for group in groups for record in group.records]
    sentences = [_write_first_sentence(records, seeds)]
    if HEADLINE in keys:
        rules = dict.fromkeys(f"of the {SELECTIONS[group.selection].words}" for group in groups)
        sentences.append(f"Accuracy: {' or '.join(rules)}.")
    if LEAD.key in keys:
        sentences.append(notes.LEADS)
    if has_bold:
        sentences.append(notes.BOLD_IN_CAPTION)
    if MODEL.key in keys:
        sentences.append(notes.MODELS_IN_CAPTION)
    if GLOBAL in keys:
        sentences.append(notes.GLOBAL_IN_CAPTION)
    if LEAD.key in keys and notes.compares_models(groups):
        sentences.append(notes.ACROSS_MODELS)
    if "diverged" in map(outcome_of, records):
        sentences.append(notes.DIVERGED)
    return " ".join([*sentences, *notes.write_notes_on_changes(groups)])


def _write_first_sentence(records: Sequence[Record], seeds: Sequence[int]) -> str:
    """Says what is measured, on which data, and how often."""
    shared = find_shared_settings(records)
    words = "Test accuracy in percent"
    data = describe_data(shared.get("dataset", ""), shared.get("partition", ""))
    if data:
        words += f" on {data}"
    rounds = {record["config"]["rounds"] for record in records}
    if len(rounds) == 1:
        words += f", after {rounds.pop()} rounds"
    if len(seeds) == 1:
        return f"{words}; seed {seeds[0]}."
    runs_text = f"seeds {_describe_seeds(seeds)}" if seeds else "runs (number of runs)"
    return f"{words}: mean ± sample standard deviation over {runs_text}."


def _describe_seeds(seeds: Sequence[int]) -> str:
    """Describes seeds as "0 to 4", or as a list if they are no range."""
    first = seeds[0]
    last = seeds[-1]
    is_range = len(seeds) > 2 and list(seeds) == list(range(first, last + 1))
    return f"{first} to {last}" if is_range else join_words(list(map(str, seeds)))
