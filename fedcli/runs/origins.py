"""Where the value of an option comes from: a kind, by which a run decides, and a text, which its record has."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple

FOLLOWS = {"partition_seed": "seed", "cohort_size": "num_clients"}  # options that are another one where none is given


@dataclass(frozen=True)
class GivenOptions:
    """The options of runs as a user gives them.

    Attributes:
        values: Their values, by name; None counts as not given, and a tuple is several values.
        sources: Where the values come from that were not typed, by name.
        tuned: What `fedcli tune` has written, which counts for the options without a value here.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)
    tuned: str | None = None

    @property
    def has_several_values(self) -> bool:
        """Whether an option has several values, which a single run cannot have."""
        return any(isinstance(value, tuple) for value in self.values.values())

    def with_typed(self, values: Mapping[str, Any]) -> "GivenOptions":
        """The same with values that were typed, in place of those of the same options, wherever these come from."""
        sources = {name: source for name, source in self.sources.items() if name not in values}
        return replace(self, values={**self.values, **values}, sources=sources)


class Kind(Enum):
    """Who has chosen a value."""

    DECLARED = auto()  # the option, as its default
    PROTOCOL = auto()
    OTHER_OPTION = auto()  # from which it follows
    USER = auto()  # on the command line, or in a file or a run that was named there


class Origin(NamedTuple):
    """Where a value comes from."""

    kind: Kind
    text: str


DEFAULT = Origin(Kind.DECLARED, "default")
TYPED = Origin(Kind.USER, "command line")
NO_VALIDATION = Origin(Kind.OTHER_OPTION, "no validation part")  # of the rule by which a round is selected


def of_protocol(name: str, dataset: str = "") -> Origin:
    """Returns the origin of a value that a protocol has, for one data set alone if it is named."""
    return Origin(Kind.PROTOCOL, f"protocol {name}, {dataset}" if dataset else f"protocol {name}")


def of_other_option(name: str) -> Origin:
    """Returns the origin of a value that is the other option's."""
    return Origin(Kind.OTHER_OPTION, name)


def of_source(text: str) -> Origin:
    """Returns the origin of a value that was not typed, but stands in a file or a run that the user has named."""
    return Origin(Kind.USER, text)


def recorded_origins(texts: Mapping[str, str]) -> dict[str, Origin]:
    """Returns the origins in a record, by the names of its options."""
    return {name: _origin_of(text) for name, text in texts.items()}


def _origin_of(text: str) -> Origin:
    """Returns the origin that a record has as this text."""
    if text.startswith(DEFAULT.text):
        return Origin(Kind.DECLARED, text)
    if text.startswith("protocol "):
        return Origin(Kind.PROTOCOL, text)
    if text.startswith((*FOLLOWS.values(), NO_VALIDATION.text)):
        return Origin(Kind.OTHER_OPTION, text)
    return Origin(Kind.USER, text)
