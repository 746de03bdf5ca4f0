"""Claims of papers, which runs bear out or contradict."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcli.declarations.checks import refuse_other, require_texts
from fedcli.declarations.names import paper_of


@dataclass(frozen=True)
class Control:
    """A row that shares one thing with the row of a claim, so that a lead over the others may come from that alone.

    Attributes:
        row: One of the claim's `other_rows`.
        explanation: What it shares, as "longer training". It is named where the claim's row is ahead of all other rows
            and not clearly of this one.
    """

    row: str
    explanation: str


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper that can be right or wrong: a row of a table is ahead of other rows.

    The lead on another row is the mean of the differences over `columns`, each between runs of the same seed. A claim
    about several other rows is borne out where the smallest of the leads is.

    Attributes:
        name: `paper:ID`.
        text: The sentence in our words, without a full stop.
        table: Name of the table whose cells are compared.
        row: The row that the sentence is about.
        other_rows: The rows that it is compared with, each of which must be behind.
        columns: The columns in which they are compared.
        direction: "higher" or "lower": on which side the paper has the row's numbers.
        other_columns: The columns of the other rows, one for each of `columns`, where they are not the same; partitions
            of such runs may differ.
        subtracted_columns: Columns whose lead is subtracted, where the claim is that the row leads by more in `columns`
            than in these.
        row_aliases: What a row is called in columns that do not have it under its own name, as
            `{"FedAvg": "FedAvg w/o skew"}`.
        allowed_options: Options that the runs may have other than in the table, with the value allowed, or None for any
            value. Sizes (rounds, images, clients, ...) may always be smaller.
        limiting_study: The study, if any, that limits what the runs say.
        construction: Why the claim holds whatever is run, by construction or arithmetic, without a full stop; it is
            then not counted among the reproduced. Empty where it may fail.
        control: The one of `other_rows` that may explain the lead, if there is one.

    Raises:
        UserError: Several rows or columns are one text, the direction is another, or the control none of `other_rows`.

    Example:
        >>> Claim(
        ...     name="mine:ahead",
        ...     text="Where clients have two classes, my method is ahead of FedAvg and FedProx",
        ...     table="mine:accuracy",
        ...     row="My method",
        ...     other_rows=("FedAvg", "FedProx"),
        ...     columns=("two classes a client",),
        ... )  # doctest: +SKIP
    """

    name: str
    text: str
    table: str
    row: str
    other_rows: tuple[str, ...]
    columns: tuple[str, ...]
    direction: str = "higher"
    other_columns: tuple[str, ...] = ()
    subtracted_columns: tuple[str, ...] = ()
    row_aliases: Mapping[str, str] = field(default_factory=dict)
    allowed_options: Mapping[str, Any] = field(default_factory=dict)
    limiting_study: str = ""
    construction: str = ""
    control: Control | None = None

    def __post_init__(self) -> None:
        """Refuses what would turn the verdict round or compare other rows than those meant."""
        for name in ("other_rows", "columns", "other_columns", "subtracted_columns"):
            require_texts(f"{name} of the claim '{self.name}'", getattr(self, name), "titles")
        refuse_other(f"direction of the claim '{self.name}'", self.direction, ("higher", "lower"))
        if self.control is not None:
            refuse_other(f"the control of the claim '{self.name}'", self.control.row, self.other_rows)

    @property
    def paper(self) -> str:
        """The paper, as its name begins."""
        return paper_of(self.name)
