"""Tables of papers: the run that gives each of their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedcli.declarations.checks import require_texts


@dataclass(frozen=True)
class Cell:
    """A number of a paper's table, and the run that gives ours.

    Attributes:
        row: Where the number stands, as `method` in papers/reported.json.
        column: Likewise, as `column` there.
        method: Name of the method that is run.
        settings: Run and method options by field name, protocol and data set among them.
        metric: What is read from the run's record; see fedcli/results/metric_kinds.py.
    """

    row: str
    column: str
    method: str
    settings: Mapping[str, Any]
    metric: str = "selected"


@dataclass(frozen=True)
class Gain:
    """A number of a paper's table that follows from others: the mean of some rows less that of other rows.

    Attributes:
        row: Where the number stands, as `method` in papers/reported.json.
        column: Likewise, as `column` there.
        leading_rows: The rows whose mean it is.
        other_rows: The rows whose mean is subtracted.
        columns: The columns over which each mean is taken; `column` if empty.
        over_best: Subtract the best of `other_rows` and not their mean.
    """

    row: str
    column: str
    leading_rows: tuple[str, ...]
    other_rows: tuple[str, ...]
    columns: tuple[str, ...] = ()
    over_best: bool = False

    def __post_init__(self) -> None:
        """Refuses a text for several rows or columns."""
        for name in ("leading_rows", "other_rows", "columns"):
            require_texts(f"{name} of the gain '{self.row}'", getattr(self, name), "titles")

    @property
    def compared_columns(self) -> tuple[str, ...]:
        """The columns over which each mean is taken."""
        return self.columns or (self.column,)


@dataclass(frozen=True)
class Table:
    """A table of a paper, as runs.

    Attributes:
        name: `paper:ID`, as in `fedcli table paper:ID`.
        title: What the table shows, one line.
        reported: The paper and the table in papers/reported.json.
        cells: Its numbers row by row; cells of the same method and settings share their runs.
        seeds: Of each run.
        notes: What the paper leaves open, and rows that it does not have.
        gains: Numbers that follow from its cells.
    """

    name: str
    title: str
    reported: tuple[str, str]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    notes: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a text for several notes."""
        require_texts(f"notes of the table '{self.name}'", self.notes, "texts")

    @property
    def reported_paper(self) -> str:
        """The paper in papers/reported.json."""
        paper, _ = self.reported
        return paper

    @property
    def reported_table(self) -> str:
        """The table in papers/reported.json."""
        _, table = self.reported
        return table


class Row(NamedTuple):
    """What a row of a table is of: a method, and what it is run with there."""

    method: str
    settings: Mapping[str, Any]  # run and method options by field name


def row(method: str, **settings: Any) -> Row:
    """Returns a row of a table, as `row("fedprox", proximal_weight=0.1)`."""
    return Row(method, settings)


def column(protocol: str, dataset: str, **settings: Any) -> dict[str, Any]:
    """Returns a column of a table, as `column("own:digits", "digits", num_clients=20)`; a row overrides it."""
    return {"protocol": protocol, "dataset": dataset, **settings}


def grid(
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    columns: Mapping[str, Mapping[str, Any]],
    metric: str = "selected",
) -> tuple[Cell, ...]:
    """Every row with every column.

    Args:
        rows: Method and settings of each row, as `row` gives them.
        columns: Settings of each column; a row's own override them.
        metric: What is read from each record.
    """
    cells = []
    for title, (method, of_row) in rows.items():
        for heading, of_column in columns.items():
            cells.append(Cell(title, heading, method, {**of_column, **of_row}, metric))
    return tuple(cells)
