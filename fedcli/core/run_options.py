"""What the core needs of the options of a run; `fedcli.runs.options.RunConfig` has them, and says what they mean."""

from typing import Protocol


class DivisionOptions(Protocol):
    """What decides how a client's examples are divided into training, validation and test."""

    @property
    def local_test(self) -> float:
        """Share for the client's own test part."""

    @property
    def validation(self) -> float:
        """Share of the rest for validation."""

    @property
    def partition_seed(self) -> int | None:
        """Seed of the draw of test parts; 0 if None."""

    @property
    def batch_size(self) -> int:
        """Examples in a minibatch."""

    @property
    def drop_last(self) -> bool:
        """Whether a batch that is not full is left out."""


class RunOptions(DivisionOptions, Protocol):
    """The options of a run, each with a value."""

    # The clients and their networks.
    num_clients: int
    cohort_size: int
    weighting: str
    backbone: str  # several with commas between
    seed: int
    # Their training.
    rounds: int
    local_epochs: int
    public_batch_size: int
    optimizer: str
    lr: float
    lr_decay: float
    lr_schedule: str
    warmup_rounds: int
    momentum: float
    weight_decay: float
    precision: str
    # What is measured.
    eval_every: int
    per_class: bool
