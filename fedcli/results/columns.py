"""The columns of tables of runs, how a user chooses among them, and the cells below them."""

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
from fedcli.results.intervals import MeasuredRuns, find_clear_best
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
    """A column of a table of runs.

    Attributes:
        key: The name by which code finds the column; of a metric, its name as it is typed.
        title: The title above the column.
        metric: The metric whose means the column has; None in other columns.
        is_number: Whether the column holds numbers, which stand to the right.
        is_optional: Whether a cell stays empty if no run of its row has a value.
    """

    key: str
    title: str
    metric: Metric | None = None
    is_number: bool = True
    is_optional: bool = False


METHOD = Column("method", "Method", is_number=False)
SETTINGS = Column("settings", "Settings", is_number=False)
SEEDS = Column("seeds", "Seeds", is_number=False)
MODEL = Column("model", "Model", is_number=False)
LEAD = Column("lead", "Lead over the best other [95 %] (seeds)")
ROUNDS = Column("rounds", "Rounds")
FLOATS = Column("floats", "Floats up / down, client and round")
# The keys of columns whose title or metric depends on the table.
HEADLINE = "headline"  # the accuracy by the rule of the protocol
LAST = "last-round"
GLOBAL = "global"  # what methods with personal models have beside the headline


@dataclass(frozen=True)
class Layout:
    """The columns and decimals that a user chooses; by default a table is shown as it is.

    Attributes:
        columns: The titles of the columns in their order, see `choose_columns`; empty for all columns with something to
            say.
        digits: The number of decimals of percent and plain numbers; None for that of each metric.

    Raises:
        UserError: If `digits` is not a whole number from 0 to `MOST_DIGITS`.
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
class ColumnSet:
    """The columns that a table of runs may have, and which of them the user has chosen.

    Attributes:
        by_key: All these columns by their keys.
        chosen: The columns that the user has chosen, in that order; empty for all columns with something to say.
    """

    by_key: Mapping[str, Column]
    chosen: Sequence[Column]

    @property
    def has_leads(self) -> bool:
        """Whether the column of leads is among them."""
        return LEAD.key in self.by_key

    @property
    def headline(self) -> Metric:
        """The metric of the headline, the accuracy of the round that the protocol's rule selects."""
        return self.metrics[HEADLINE]

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics by the keys of their columns."""
        return {key: column.metric for key, column in self.by_key.items() if column.metric is not None}

    def select(self, cells: pd.DataFrame) -> list[Column]:
        """Selects the columns that a table of cells has, in its order."""
        return [self.by_key[key] for key in cells]


def find_columns(groups: Sequence[SeedGroup], metrics: Sequence[str], *, leads: bool, layout: Layout) -> ColumnSet:
    """Finds the columns that a table of groups may have.

    Args:
        groups: The rows of the table.
        metrics: The names of the metrics that the user asks for.
        leads: Whether the table has a column of leads.
        layout: The columns and decimals that the user chooses.

    Raises:
        UserError: If a metric is not known, or a column is chosen that the table does not have.
    """
    selections = sorted({group.selection for group in groups})

    def find_with_decimals(name: str) -> Metric:
        return replace(find_metric(name), decimals=layout.digits)

    values = [Column(HEADLINE, f"Selected ({' or '.join(selections)}), %", find_with_decimals("selected"))]
    if selections != ["last"]:  # else it is the selected one
        values.append(Column(LAST, "Last round, %", find_with_decimals("last")))
    for name in dict.fromkeys([*OPTIONAL_METRICS, *metrics]):
        metric = find_with_decimals(name)
        values.append(Column(name, metric.title, metric, is_optional=name not in metrics))
    by_key = {column.key: column for column in (METHOD, SETTINGS, SEEDS, MODEL, *values, ROUNDS, FLOATS)}
    aliases = {"Accuracy": HEADLINE}  # the name in a table for a paper
    if leads:
        by_key[LEAD.key] = LEAD
        aliases["Lead"] = LEAD.key
    chosen = choose_columns(layout.columns, by_key.values(), aliases)
    for column in chosen:
        by_key[column.key] = replace(column, is_optional=False)
    return ColumnSet(by_key, chosen)


def choose_columns(names: str | Sequence[str], columns: Iterable[Column], aliases: Mapping[str, str]) -> list[Column]:
    """Chooses columns by their titles, in any case, in full or as `shorten_title` shortens them.

    Args:
        names: The titles, or one text with commas between them.
        columns: All columns that there are.
        aliases: The keys of columns that have other titles too, by these titles.

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
    """Leaves out the rule, the unit or the interval from a title, as in "Selected" for "Selected (last), %"."""
    return re.split(r" [(\[]|, ", title)[0]


def find_number_columns(columns: Sequence[Column]) -> list[int]:
    """Finds the columns of numbers; returns their indices."""
    return [index for index, column in enumerate(columns) if column.is_number]


def build_cells(groups: Sequence[SeedGroup], columns: ColumnSet, implied_count: int | None = None) -> pd.DataFrame:
    """Builds the cells of a table.

    Args:
        groups: The groups of runs.
        columns: The columns.
        implied_count: A number of runs that goes without saying, and is left out.

    Returns:
        Texts, a row a group; the columns are the keys of the chosen columns, or of all columns if none are chosen.
    """
    leads: dict[int, str] = {}  # by the index of the group
    if columns.has_leads:
        for comparable in find_comparable_groups(groups):
            leads |= format_leads(_list_runs(columns.headline, comparable), implied_count)
    rows = [_build_row(group, columns, leads.get(index), implied_count) for index, group in enumerate(groups)]
    cells = pd.DataFrame(rows, dtype=object)
    return cells[[column.key for column in columns.chosen]] if columns.chosen else cells


def find_best_rows(groups: Sequence[SeedGroup], columns: ColumnSet) -> set[int]:
    """Finds the rows whose headline is clearly the best among the rows it is compared with; returns their indices."""
    rows = set()
    for comparable in find_comparable_groups(groups):
        best_index = find_clear_best(_list_runs(columns.headline, comparable))
        if best_index is not None:
            rows.add(best_index)
    return rows


def _list_runs(metric: Metric, groups: Mapping[int, SeedGroup]) -> dict[int, MeasuredRuns]:
    """Lists the runs of groups, from which a metric is read, by the indices of the groups."""
    return {index: MeasuredRuns(metric, group.records) for index, group in groups.items()}


def find_cells_under(keys: Collection[str], rows: Collection[int], columns: Sequence[Column]) -> set[CellIndex]:
    """Finds the cells of some rows, by index, in the columns of a table that have one of some keys."""
    indices = [index for index, column in enumerate(columns) if column.key in keys]
    return set(map(CellIndex._make, itertools.product(rows, indices)))


def _build_row(group: SeedGroup, columns: ColumnSet, lead: str | None, implied_count: int | None) -> dict[str, str]:
    """Builds the cells of a group by the keys of columns; optional cells stay empty if no run has a value.

    Args:
        group: The group of runs.
        columns: The columns.
        lead: The lead of the group; None if the table has no column of leads.
        implied_count: See `build_cells`.
    """
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
        if key == HEADLINE and lead is not None:
            cells[LEAD.key] = lead
    cells[ROUNDS.key] = str(group.first["config"]["rounds"])
    cells[FLOATS.key] = f"{_format_mean_floats('floats-up', records)} / {_format_mean_floats('floats-down', records)}"
    return cells


def _describe_seed(record: Record) -> str:
    """Returns the seed of a run as a text, with the outcome of a run that has not finished."""
    outcome = outcome_of(record)
    if outcome == "finished":
        return str(record["seed"])
    return f"{record['seed']} {outcome} after {len(record['rounds'])} rounds"


def _format_mean_floats(name: str, records: Sequence[Record]) -> str:
    values = find_metric(name).read_values(records)
    return f"{fmean(values):,.0f}" if values else MISSING
