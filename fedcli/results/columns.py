"""The columns of tables of runs, which of them a user chooses, and what stands in their cells."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from statistics import fmean

import pandas as pd

from fedcli.errors import UserError, unknown
from fedcli.results.groups import SeedGroup, find_comparable_groups, find_tested_model
from fedcli.results.intervals import find_clear_best
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.number_texts import format_leads, format_mean_of_runs
from fedcli.results.render import MISSING, CellIndex
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import settings_text

MOST_DIGITS = 6
# Metrics that have a column where a run has a value.
OPTIONAL_METRICS = ("global", "validation", "post", "classifier", "intra", "quality:nmi", "quality:silhouette")


@dataclass(frozen=True)
class Column:
    """A column of a table of runs."""

    key: str  # by which code finds it; of a metric, its name as it is typed
    title: str
    metric: Metric | None = None  # whose means it has
    is_number: bool = True  # whether it stands to the right
    is_optional: bool = False  # whether it stays empty where no run has a value


METHOD = Column("method", "Method", is_number=False)
SETTINGS = Column("settings", "Settings", is_number=False)
SEEDS = Column("seeds", "Seeds", is_number=False)
MODEL = Column("model", "Model", is_number=False)
LEAD = Column("lead", "Lead over the best other [95 %] (seeds)")
ROUNDS = Column("rounds", "Rounds")
FLOATS = Column("floats", "Floats up / down, client and round")
# Keys of columns whose title or metric is of a table.
HEADLINE = "headline"  # the accuracy by the rule of the protocol
LAST = "last-round"
GLOBAL = "global"  # what methods with personal models have beside the headline


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
        if self.digits is None:
            return
        is_whole = isinstance(self.digits, Integral) and not isinstance(self.digits, bool)
        if not is_whole or self.digits not in range(MOST_DIGITS + 1):
            raise UserError(f"--digits must be from 0 to {MOST_DIGITS} (got {self.digits}); papers have 1 or 2.")


DEFAULT_LAYOUT = Layout()


@dataclass(frozen=True)
class Columns:
    """The columns that a table of runs may have."""

    by_key: Mapping[str, Column]
    has_leads: bool
    chosen: Sequence[Column]  # in the user's order; empty for all columns with something to say

    @property
    def headline(self) -> Metric:
        """The accuracy by the rule of the protocol."""
        return self.metrics[HEADLINE]

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics by the keys of their columns."""
        return {key: column.metric for key, column in self.by_key.items() if column.metric is not None}

    def of(self, cells: pd.DataFrame) -> list[Column]:
        """The columns that a table of cells has."""
        return [self.by_key[key] for key in cells]


def find_columns(groups: Sequence[SeedGroup], metrics: Sequence[str], *, leads: bool, layout: Layout) -> Columns:
    """The columns of a table of groups.

    Raises:
        UserError: If a metric is not known, or a column is chosen that the table does not have.
    """
    selections = sorted({group.selection for group in groups})

    def metric_of(name: str) -> Metric:
        return replace(find_metric(name), decimals=layout.digits)

    values = [Column(HEADLINE, f"Selected ({' or '.join(selections)}), %", metric_of("selected"))]
    if selections != ["last"]:  # else it is the selected one
        values.append(Column(LAST, "Last round, %", metric_of("last")))
    for name in dict.fromkeys([*OPTIONAL_METRICS, *metrics]):
        metric = metric_of(name)
        values.append(Column(name, metric.title, metric, is_optional=name not in metrics))
    by_key = {column.key: column for column in (METHOD, SETTINGS, SEEDS, MODEL, *values, ROUNDS, FLOATS)}
    aliases = {"Accuracy": HEADLINE}  # the name in a table for a paper
    if leads:
        by_key[LEAD.key] = LEAD
        aliases["Lead"] = LEAD.key
    chosen = choose_columns(layout.columns, by_key.values(), aliases)
    for column in chosen:
        by_key[column.key] = replace(column, is_optional=False)
    return Columns(by_key, leads, chosen)


def choose_columns(names: str | Sequence[str], columns: Iterable[Column], aliases: Mapping[str, str]) -> list[Column]:
    """The columns that are asked for by title, in any case, with or without what stands behind their name.

    Args:
        names: Those of the columns; in a text, with commas between them.
        columns: Those that there are.
        aliases: The keys of columns that have other names too.

    Raises:
        UserError: If there is no such column.
    """
    by_key = {column.key: column for column in columns}
    by_name: dict[str, Column] = {}
    for column in by_key.values():
        by_name.setdefault(column.title.lower(), column)
        by_name.setdefault(shorten_title(column.title).lower(), column)
    for alias, key in aliases.items():
        by_name.setdefault(alias.lower(), by_key[key])
    chosen = []
    texts = [names] if isinstance(names, str) else names
    for text in texts:
        rest = text.strip()
        while rest:  # not split at commas, which some titles have
            fitting = [name for name in by_name if re.match(rf"{re.escape(name)}\s*(,|$)", rest.lower())]
            if not fitting:
                known = list(dict.fromkeys(shorten_title(column.title) for column in by_key.values()))
                raise unknown("column in --columns", rest.split(",")[0], known, f"there are {', '.join(known)}.")
            longest = max(fitting, key=len)
            chosen.append(by_name[longest])
            rest = rest[len(longest) :].lstrip().removeprefix(",").lstrip()
    return chosen


def shorten_title(title: str) -> str:
    """The name of a column, without its rule, unit or interval, as "Selected" for "Selected (last), %"."""
    return re.split(r" [(\[]|, ", title)[0]


def find_first_number_column(columns: Sequence[Column]) -> int:
    """The index of the first column of numbers."""
    for index, column in enumerate(columns):
        if column.is_number:
            return index
    return len(columns)


def build_cells(groups: Sequence[SeedGroup], columns: Columns, implied_count: int | None = None) -> pd.DataFrame:
    """The cells of a table, a row a group, by the keys of columns: the chosen ones, or all.

    A number of runs that equals `implied_count` is left out.
    """
    cells = pd.DataFrame([_build_row(group, columns, implied_count) for group in groups], dtype=object)
    if columns.has_leads:
        leads: dict[int, str] = {}  # by the index of the group
        for indices in find_comparable_groups(groups):
            leads |= format_leads(columns.headline, {index: groups[index].records for index in indices}, implied_count)
        cells.insert(list(cells).index(HEADLINE) + 1, LEAD.key, pd.Series(leads, dtype=object))
    return cells[[column.key for column in columns.chosen]] if columns.chosen else cells


def find_best_rows(groups: Sequence[SeedGroup], columns: Columns) -> set[int]:
    """The rows, by index, whose headline has a sure lead over the best of the others that it is compared with."""
    rows = set()
    for indices in find_comparable_groups(groups):
        best_index = find_clear_best(columns.headline, {index: groups[index].records for index in indices})
        if best_index is not None:
            rows.add(best_index)
    return rows


def find_cells_under(keys: Collection[str], rows: Collection[int], columns: Sequence[Column]) -> set[CellIndex]:
    """The cells of some rows in the columns of a table that have one of some keys."""
    indices = [index for index, column in enumerate(columns) if column.key in keys]
    return set(map(CellIndex._make, itertools.product(rows, indices)))


def _build_row(group: SeedGroup, columns: Columns, implied_count: int | None) -> dict[str, str]:
    """The cells of a group by the keys of columns; optional ones stay empty without a value."""
    records = group.records
    outcomes = Counter(map(outcome_of, records))
    cells = {
        METHOD.key: group.method,
        SETTINGS.key: settings_text(group.differing_settings),
        SEEDS.key: ", ".join(map(_describe_seed, records)),
        MODEL.key: find_tested_model(group.first),
    }
    for key, metric in columns.metrics.items():
        is_left_out = columns.by_key[key].is_optional and not metric.read_values(records)
        cells[key] = "" if is_left_out else format_mean_of_runs(metric, records, outcomes, implied_count)
    cells[ROUNDS.key] = str(group.first["config"]["rounds"])
    cells[FLOATS.key] = f"{_format_mean_floats('floats-up', records)} / {_format_mean_floats('floats-down', records)}"
    return cells


def _describe_seed(record: Record) -> str:
    """The seed of a run, and what has become of one that has not finished."""
    outcome = outcome_of(record)
    if outcome == "finished":
        return str(record["seed"])
    return f"{record['seed']} {outcome} after {len(record['rounds'])} rounds"


def _format_mean_floats(name: str, records: Sequence[Record]) -> str:
    values = find_metric(name).read_values(records)
    return f"{fmean(values):,.0f}" if values else MISSING
