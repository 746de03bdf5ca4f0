"""Tables of runs with a row for each setting, and tables of numbers with a row for each run.

Accuracies are fractions in records and percent here. Numbers of two protocols or data sets cannot be compared, so they
share no table of runs and no panel.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from fedcli.errors import UserError, printable
from fedcli.results import notes
from fedcli.results.columns import (
    DEFAULT_LAYOUT,
    HEADLINE,
    LEAD,
    METHOD,
    MODEL,
    Layout,
    build_cells,
    find_best_rows,
    find_cells_under,
    find_columns,
    find_number_columns,
)
from fedcli.results.groups import find_shared_settings, find_tested_model, group_by_leaderboard, group_runs
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.render import TextTable
from fedcli.results.run_records import find_records
from fedcli.runs.identity import recorded_changes, settings_of
from fedcli.runs.machine import is_undisturbed
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import reductions

OUT_OPTION = re.compile(r" --out[ =](?:'[^']*'|\S+)")  # in the commands of older runs


def build_table(
    records: Sequence[Record],
    metrics: Sequence[str] = (),
    title: str = "",
    *,
    by_seed: bool = False,
    leads: bool = False,
    layout: Layout = DEFAULT_LAYOUT,
) -> TextTable:
    """Builds a table with a row for each group of runs; its CSV has a line for each run.

    Args:
        records: The records of the runs.
        metrics: The names of metrics that get a column.
        title: The title of the table; empty for none.
        by_seed: Whether each seed is a row of its own.
        leads: Whether a column has the lead of each row's headline over the best of the rows that it is compared with,
            with its 95 % interval, paired by seed.
        layout: The columns and decimals that the user chooses.

    Raises:
        UserError: If a metric or a column is not known.
    """
    groups = group_runs(records, by_seed=by_seed)
    columns = find_columns(groups, metrics, leads=leads, layout=layout)
    cells = build_cells(groups, columns)
    if not columns.chosen:
        cells = _select_informative_columns(cells)
    shown = columns.select(cells)
    best = find_cells_under({METHOD.key, HEADLINE}, find_best_rows(groups, columns), shown)
    found_metrics = [find_metric(name) for name in dict.fromkeys(metrics)]
    table_notes = notes.write_notes_on_numbers(groups)
    table_notes += notes.write_notes_on_runs(groups)
    table_notes += notes.write_notes_on_metrics(groups, columns)
    table_notes += notes.write_notes_on_leads(groups, has_leads=LEAD.key in cells, has_bold=bool(best))
    return TextTable(
        titles=[column.title for column in shown],
        rows=cells.to_numpy().tolist(),
        number_columns=find_number_columns(shown),
        best=best,
        csv_rows=[collect_numbers(record, found_metrics) for record in records],
        title=title,
        subject=write_subject(records),
        notes=table_notes,
    )


def build_tables(
    records: Iterable[Record], metrics: Sequence[str] = (), *, leads: bool = False, layout: Layout = DEFAULT_LAYOUT
) -> list[TextTable]:
    """Builds a table for each protocol and data set, which titles name if there are several tables.

    For the arguments see `build_table`.
    """
    by_leaderboard = group_by_leaderboard(records)
    tables = []
    for leaderboard, runs in by_leaderboard.items():
        title = leaderboard if len(by_leaderboard) > 1 else ""
        tables.append(build_table(runs, metrics, title, leads=leads, layout=layout))
    return tables


def write_subject(records: Sequence[Record]) -> str:
    """Says which of protocol, data set and partition all rows share; returns an empty text if they share none."""
    texts = [f"{name} {value}" for name, value in find_shared_settings(records).items()]
    return f"All rows: {', '.join(texts)}." if texts else ""


def _select_informative_columns(cells: pd.DataFrame) -> pd.DataFrame:
    """Leaves out the columns that are empty, and that of the model if all rows agree in it."""
    if len({*cells[MODEL.key]} - {""}) < 2:
        cells = cells.drop(columns=MODEL.key)
    return cells.loc[:, (cells != "").any()]


def collect_numbers(record: Record, metrics: Sequence[Metric] = ()) -> dict[str, Any]:
    """Collects the numbers of a run.

    Rounds count from 1, and accuracies are in percent. The time of a round is the median, so that the first round's
    warming up does not count. Times that other work disturbed are left out.

    Args:
        record: The record of the run.
        metrics: Further metrics, which get a column by their title.

    Returns:
        The numbers by column; the column of an option is `config.<name>`.

    Raises:
        UserError: If a metric's title is that of another column, or of another metric.
    """
    summary = record["summary"]
    facts = {
        "method": record["method"],
        "protocol": record["protocol"],
        "dataset": record["dataset"],
        "seed": record["seed"],
        "status": record["status"],
        "reduced": ", ".join(reductions(record).values()),
        "changed": "; ".join(recorded_changes(record)),
        "partition_fingerprint": record["partition"]["fingerprint"],
        "tested": find_tested_model(record),
        "selection": summary["selection"],
        "selected": find_metric("selected").read_value(record),
        "selected_round": None if summary["selected_round"] is None else summary["selected_round"] + 1,
        "last": find_metric("last").read_value(record),
        "validation_accuracy": find_metric("validation").read_value(record),
        "rounds_done": len(record["rounds"]),
        "post_accuracy": find_metric("post").read_value(record),
    }
    measured = _read_metrics(record, metrics)
    cost = record["cost"] or {}
    seconds = [sum(entry["seconds"].values()) for entry in record["rounds"]]
    undisturbed = is_undisturbed(record)
    costs_and_code = {
        "floats_down": _round_number(find_metric("floats-down").read_value(record)),
        "floats_up": _round_number(find_metric("floats-up").read_value(record)),
        "memory_floats": cost.get("memory_floats"),
        "buffer_floats": cost.get("buffer_floats"),
        "parameters": record["model"]["parameters"],
        "params_sha256": summary.get("params_sha256"),
        "seconds_round_median": median(seconds) if seconds and undisturbed else None,
        "seconds_total": record["seconds_total"] if undisturbed else None,
        "method_hash": record.get("method_hash"),
        "commit": record.get("commit"),
    }
    options = {f"config.{name}": value for name, value in record["config"].items()}
    for title in measured:
        if title in facts or title in costs_and_code or title in options:
            raise UserError(
                f"a table has a column '{title}' already (got a metric of that name); call yours otherwise."
            )
    return {**facts, **measured, **costs_and_code, **options}


def _read_metrics(record: Record, metrics: Sequence[Metric]) -> dict[str, float | None]:
    """Reads the values of metrics by their titles; raises UserError if two have one title."""
    values: dict[str, float | None] = {}
    for metric in metrics:
        if metric.title in values:
            raise UserError(f"two metrics are called '{metric.title}', as their columns would be; rename one of them.")
        values[metric.title] = metric.read_value(record)
    return values


def _round_number(value: float | None) -> float | None:
    return round(value) if value else value


def read_numbers(paths: Iterable[str | Path], metrics: Sequence[str] = ()) -> pd.DataFrame:
    """Reads all runs under some paths as a table, a row a run; the function behind `fedcli.frame`.

    Args:
        paths: Folders that hold runs at any depth.
        metrics: The names of metrics that get a column, as of `fedcli table --metric`.

    Returns:
        The column `folder`, the columns of a table's CSV (`selected` is the accuracy of the headline and `last` that of
        the last round, both in percent), and a column for each option in which the runs differ.

    Raises:
        UserError: If there is no run, a record cannot be read, or a metric is of a name that no run has.
    """
    return tabulate_numbers(find_records(paths), metrics)


def tabulate_numbers(records: Sequence[Record], metrics: Sequence[str] = ()) -> pd.DataFrame:
    """Makes the table of `read_numbers` from records, each with its `folder`."""
    columns = [find_metric(name) for name in dict.fromkeys(metrics)]
    for metric in columns:
        metric.refuse_unknown_name(records)
    numbers = pd.DataFrame([{"folder": record["folder"], **collect_numbers(record, columns)} for record in records])
    settings = pd.DataFrame(map(settings_of, records), dtype=object)
    differing = [name for name in settings if name not in numbers and settings[name].astype(str).nunique() > 1]
    return numbers.filter(regex=r"^(?!config\.)").join(settings[differing])


def list_commands(records: Iterable[Record]) -> list[str]:
    """Lists the commands that made some runs, without their folders, each once."""
    texts = dict.fromkeys(OUT_OPTION.sub("", printable(record["command"])) for record in records)
    return [text for text in texts if text.startswith("fedcli ")]
