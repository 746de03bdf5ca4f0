"""Protocols: the experimental set-ups of papers, with what each says of its data sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcli.declarations.checks import refuse_other, require_texts
from fedcli.declarations.names import paper_of

VALIDATION_ACCURACY = "validation_accuracy"


@dataclass(frozen=True)
class Selection:
    """A rule for the headline of a run, which is a test accuracy.

    Attributes:
        words: The rule in words.
        best_by: The accuracy by which the best round is taken, as a record names it; None where the last one is.
        num_averaged: The headline is the mean of so many tested rounds, the last ones.
    """

    words: str
    best_by: str | None = None
    num_averaged: int = 1

    @property
    def needs_validation(self) -> bool:
        """Whether there is no headline without images for validation."""
        return self.best_by == VALIDATION_ACCURACY

    @property
    def is_of_last_round(self) -> bool:
        """Whether the headline is the last round's accuracy."""
        return self.best_by is None and self.num_averaged == 1


SELECTIONS = {  # rules for the headline of a run, by their names in records
    "best-validation": Selection("round with the best validation accuracy", best_by=VALIDATION_ACCURACY),
    "best-test": Selection("round with the best test accuracy", best_by="test_accuracy"),
    "last": Selection("last round"),
    "mean-last-3": Selection("mean of the last three tested rounds", num_averaged=3),
}
EVALUATIONS = ("server", "clients", "domains")  # what models are tested on, see fedcli/core/evaluation.py


@dataclass(frozen=True)
class DataSetting:
    """What a protocol says of one data set.

    Attributes:
        backbone: The network, as in `--backbone`.
        mean: Mean of each channel, of pixels in [0, 1].
        std: Standard deviation of each channel, likewise.
        source: Where the constants come from.
        augmentation: As in `--augmentation`.
        top_k: A test image counts as right if its class is among the k most likely.
        settings: Run options for this data set.
        method_options: Options of single methods for this data set, by method.
    """

    backbone: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    augmentation: str = "none"
    top_k: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class PublicSetting:
    """What a protocol says of one set of public images; its fields are as those of `DataSetting`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    augmentation: str = "none"


@dataclass(frozen=True)
class Protocol:
    """An experimental set-up of a paper: what is fixed when methods are compared.

    Attributes:
        name: `paper:setting`, as in `--protocol`.
        summary: What it is, in one sentence.
        source: Section or table of the paper.
        settings: Run options by the field names of `RunConfig`; the command line overrides them.
        datasets: Settings by data set; another data set needs `--backbone`.
        selection: The headline of a run, one of `SELECTIONS`.
        evaluation: What models are tested on, one of `EVALUATIONS`.
        public: Settings by set of public images; another one is normalised by its own mean and not augmented.
        method_options: Options of single methods, by method; those of a data set override them.
        notes: Where each value comes from that the paper does not give.
        text_has: What the paper's text has where the protocol and the methods' defaults follow the authors' code,
            without a full stop; empty where the two agree or there is no code. A run in full is by the one or by the
            other.

    Raises:
        UserError: There is no such selection or evaluation, or `notes` is a text.
    """

    name: str
    summary: str
    source: str
    settings: Mapping[str, Any]
    datasets: Mapping[str, DataSetting]
    selection: str
    evaluation: str = "server"
    public: Mapping[str, PublicSetting] = field(default_factory=dict)
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    text_has: str = ""

    def __post_init__(self) -> None:
        """Refuses words that no run would know, and a text for several notes."""
        refuse_other(f"selection of the protocol '{self.name}'", self.selection, SELECTIONS)
        refuse_other(f"evaluation of the protocol '{self.name}'", self.evaluation, EVALUATIONS)
        require_texts(f"notes of the protocol '{self.name}'", self.notes, "texts")

    @property
    def paper(self) -> str:
        """The paper, as its name begins."""
        return paper_of(self.name)
