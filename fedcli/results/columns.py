"""The columns of tables of runs, which of them a user chooses, and what stands in their cells."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import pandas as pd

from fedcli.errors import UserError, unknown
from fedcli.results.groups import SeedGroup, comparable_groups, tested_model
from fedcli.results.intervals import clear_best
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.number_texts import lead_texts, mean_text_of_runs
from fedcli.results.render import MISSING, CellIndex
from fedcli.runs.identity import settings_text
from fedcli.runs.record import state_of
from fedcli.runs.schema import Record

TEXT_COLUMNS = ("Method", "Settings", "Seeds", "Model")  # columns without numbers
LAST = "Last round, %"
LEAD = "Lead over the best other [95 %] (seeds)"
ROUNDS = "Rounds"
FLOATS = "Floats up / down, client and round"
MOST_DIGITS = 6
NO_NAMES: Mapping[str, str] = {}
# Metrics that have a column where a run has a value.
OPTIONAL_METRICS = ("global", "validation", "post", "classifier", "intra", "quality:nmi", "quality:silhouette")


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


DEFAULT_LAYOUT = Layout()


@dataclass(frozen=True)
class Columns:
    """The columns of a table of runs."""

    headline: str  # the title of that with the accuracy of the headline
    metrics: dict[str, Metric]  # of the columns of numbers, by their titles
    optional_metrics: set[str]  # by their names; their column stays empty without a value
    leads: bool  # whether there is a column of leads
    chosen_titles: list[str]  # in the user's order; empty for all columns with something to say


def find_columns(groups: Sequence[SeedGroup], metrics: Sequence[str], leads: bool, layout: Layout) -> Columns:
    """The columns of a table of groups.

    Raises:
        UserError: If a metric is not known, or a column is chosen that the table does not have.
    """
    selections = sorted({group.selection for group in groups})
    headline = f"Selected ({' or '.join(selections)}), %"
    by_title = {headline: find_metric("selected")}
    if selections != ["last"]:  # else it is the selected one
        by_title[LAST] = find_metric("last")
    for name in (*OPTIONAL_METRICS, *metrics):
        metric = find_metric(name)
        by_title[metric.title] = metric
    if layout.digits is not None:
        by_title = {title: replace(metric, decimals=layout.digits) for title, metric in by_title.items()}
    titles = [*TEXT_COLUMNS, *by_title, ROUNDS, FLOATS]
    aliases = {"Accuracy": headline}  # the name in a table for a paper
    if leads:
        titles.append(LEAD)
        aliases["Lead"] = LEAD
    chosen_titles = choose_columns(layout.columns, titles, aliases)
    asked_metrics = {*metrics, *(by_title[title].name for title in chosen_titles if title in by_title)}
    return Columns(headline, by_title, {*OPTIONAL_METRICS} - asked_metrics, leads, chosen_titles)


def choose_columns(
    names: str | Sequence[str], titles: Sequence[str], aliases: Mapping[str, str] = NO_NAMES
) -> list[str]:
    """The titles of the columns that are asked for, in any case, with or without what stands behind their name.

    Args:
        names: Those of the columns; in a text, with commas between them.
        titles: Those that there are.
        aliases: Other names of some titles.

    Raises:
        UserError: If there is no such column.
    """
    by_name: dict[str, str] = {}
    for title in titles:
        for title_or_name in (title, column_name(title)):
            by_name.setdefault(title_or_name.lower(), title)
    for alias, title in aliases.items():
        by_name.setdefault(alias.lower(), title)
    chosen_titles = []
    texts = [names] if isinstance(names, str) else names
    for text in texts:
        rest = text.strip()
        while rest:  # not split at commas, which some titles have
            fitting = [name for name in by_name if re.match(rf"{re.escape(name)}\s*(,|$)", rest.lower())]
            if not fitting:
                known = list(dict.fromkeys(map(column_name, titles)))
                raise unknown("column in --columns", rest.split(",")[0], known, f"there are {', '.join(known)}.")
            longest = max(fitting, key=len)
            chosen_titles.append(by_name[longest])
            rest = rest[len(longest) :].lstrip().removeprefix(",").lstrip()
    return chosen_titles


def column_name(title: str) -> str:
    """The name of a column, without its rule, unit or interval, as "Selected" for "Selected (last), %"."""
    return re.split(r" [(\[]|, ", title)[0]


def first_number_column(titles: Sequence[str]) -> int:
    """The index of the first column of numbers."""
    for index, title in enumerate(titles):
        if title not in TEXT_COLUMNS:
            return index
    return len(titles)


def cells_of(groups: Sequence[SeedGroup], columns: Columns, implied_count: int | None = None) -> pd.DataFrame:
    """The cells of a table, a row a group, by title: the chosen columns, or all.

    A number of runs that equals `implied_count` is left out.
    """
    rows = [_row(group, columns, implied_count) for group in groups]
    headline = columns.metrics[columns.headline]
    if columns.leads:
        for indices in comparable_groups(groups):
            compared = {index: groups[index].records for index in indices}
            texts = lead_texts(headline, compared, implied_count)
            for index, text in texts.items():
                rows[index] = _with_lead(rows[index], columns.headline, text)
    cells = pd.DataFrame(rows, dtype=object)
    return cells[columns.chosen_titles] if columns.chosen_titles else cells


def best_rows(groups: Sequence[SeedGroup], columns: Columns) -> set[int]:
    """The rows, by index, whose headline has a sure lead over the best of the others that it is compared with."""
    headline = columns.metrics[columns.headline]
    rows = set()
    for indices in comparable_groups(groups):
        best_index = clear_best(headline, {index: groups[index].records for index in indices})
        if best_index is not None:
            rows.add(best_index)
    return rows


def cells_under(chosen_titles: Collection[str], rows: Collection[int], titles: Sequence[str]) -> set[CellIndex]:
    """The cells of some rows under some of a table's titles."""
    columns = [column for column, title in enumerate(titles) if title in chosen_titles]
    return set(map(CellIndex._make, itertools.product(rows, columns)))


def _row(group: SeedGroup, columns: Columns, implied_count: int | None) -> dict[str, str]:
    """The cells of a group by column; those of optional metrics stay empty without a value."""
    records = group.records
    states = Counter(map(state_of, records))
    (first, *_) = records
    means = {}
    for title, metric in columns.metrics.items():
        is_left_out = metric.name in columns.optional_metrics and not metric.values(records)
        means[title] = "" if is_left_out else mean_text_of_runs(metric, records, states, implied_count)
    return {
        "Method": group.method,
        "Settings": settings_text(group.differing_settings),
        "Seeds": ", ".join(map(_seed_text, records)),
        "Model": tested_model(first),
        **means,
        ROUNDS: str(first["config"]["rounds"]),
        FLOATS: f"{_mean_floats('floats-up', records)} / {_mean_floats('floats-down', records)}",
    }


def _seed_text(record: Record) -> str:
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


def _mean_floats(name: str, records: Sequence[Record]) -> str:
    values = find_metric(name).values(records)
    return f"{fmean(values):,.0f}" if values else MISSING
