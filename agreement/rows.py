"""What is compared: the rows of a peer. A row is a run of a peer that is held to a case, a run of fedcli.

Both sides have the same clients, batches and first weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any


class Quantity(StrEnum):
    """What a row can compare after the last round; results.json and the page have it by these values."""

    SHARED = "shared"  # the parameters of the server's model, or those that the clients share
    STATISTICS = "statistics"  # the running means and variances of the server's model
    PERSONAL = "personal"  # the parameters of the clients' own models
    BODIES = "bodies"  # the same without their heads
    HEAD = "head"  # the head of the server's model
    KEPT = "kept"  # what the clients keep between rounds
    CLASS_VECTORS = "class vectors"  # the server's prototypes or mean outputs, one of each class


class SharedPart(Enum):
    """Which part of a model the clients of a peer share through its server."""

    MODEL = "all of it"
    HEAD = "its head"
    ALL_BUT_NORMALISATION = "all but its batch normalisation"
    COMPRESSED = "all of it, which the server has only as it is sent"

    @property
    def quantity(self) -> Quantity:
        """What a row compares of it."""
        return Quantity.HEAD if self is SharedPart.HEAD else Quantity.SHARED


@dataclass(frozen=True)
class Explanation:
    """Why a row differs from fedcli, and what shows it."""

    cause: str  # with the place in the peer's code
    paper_says: str  # the equation that decides, and what it says
    closed_by: "Row | None" = None  # the run in which nothing but the cause is changed; None where it is open


@dataclass(frozen=True)
class Change:
    """What a row changes of its peer."""

    text: str  # for the page
    patch: str = ""  # the adapter's function that makes it; empty where the row's `config` does


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of a peer, and what it is held to."""

    # "METHOD, options or clients", then "; changed: what" if the peer is changed and "; fedcli: what" if fedcli is run
    # otherwise than by default; each once.
    label: str
    case: str  # a key of `agreement.cases.CASES`
    config: Any  # what the peer's adapter runs: a `PeerConfig` of the peer's module
    compared: tuple[Quantity, ...] = (Quantity.SHARED,)
    change: Change | None = None  # None for the peer's code and defaults as they are
    explanation: Explanation | None = None  # None where the row agrees


def list_rows(*rows: Row) -> tuple[Row, ...]:
    """Lists rows, and after each the row that closes it."""
    listed = []
    for row in rows:
        listed.append(row)
        if row.explanation and row.explanation.closed_by:
            listed.append(row.explanation.closed_by)
    return tuple(listed)


@dataclass(frozen=True)
class Package:
    """A package of the registry."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Peer:
    """A project whose code is run."""

    name: str
    module: str  # of its rows in agreement/peers, and of its adapter in agreement/adapters
    rows: tuple[Row, ...]  # with those that close others, see `list_rows`
    commit: str = ""  # of the clone; empty for a package
    package: Package | None = None  # None for a clone alone
    source_folders: tuple[str, ...] = (".",)  # of the clone, from which its modules are imported
    # Modules that it imports and does not need here, each with the names that it imports from them.
    absent_modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
