"""Claims of papers, which runs bear out or contradict."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcli.declarations.names import paper_of


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper that can be right or wrong: a row of a table is ahead of another."""

    name: str  # `paper:ID`
    text: str  # the sentence in our words, without a full stop
    table: str  # name of the table whose cells are compared
    row: str  # the row that the sentence is about
    than: str | tuple[str, ...]  # the row that it is compared with, or several, of which each must be behind
    columns: tuple[str, ...]  # the mean of the differences counts
    direction: str = "higher"  # or "lower": the sign of the row minus the other in the paper
    # Options that a smaller form of the claim may have, with their values, or None for any; sizes (rounds, images,
    # clients, ...) may always be smaller.
    instead: Mapping[str, Any] = field(default_factory=dict)
    less: tuple[str, ...] = ()  # columns whose mean difference is subtracted: is the lead larger than in these?
    see: str = ""  # the study, if any, that limits what the runs say
    # The names of rows in columns where they do not stand under their own, as "FedAvg w/o skew" for "FedAvg".
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    # Columns of the row that it is compared with, where they are others than `columns`; then partitions may differ.
    than_columns: tuple[str, ...] = ()
    # Why it holds whatever is run, by construction or arithmetic, without a full stop; then it is not counted among
    # the reproduced.
    construction: str = ""
    # A row of `than` that has something of the row alone, and what: where the row is ahead of the others and not of
    # this one, that explains the lead.
    control: tuple[str, str] | None = None

    @property
    def paper(self) -> str:
        """The paper, as its name begins."""
        return paper_of(self.name)

    @property
    def others(self) -> tuple[str, ...]:
        """The rows of `than`."""
        return (self.than,) if isinstance(self.than, str) else self.than
