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

    @property
    def num_clients(self) -> int:
        """Size of the population, N."""

    @property
    def cohort_size(self) -> int:
        """Clients that take part in a round, K."""

    @property
    def weighting(self) -> str:
        """What a client counts in means: "examples" or "uniform"."""

    @property
    def backbone(self) -> str:
        """The network; several with commas between."""

    @property
    def seed(self) -> int:
        """Seed of the initial model, the cohorts and the batches."""

    # Their training.

    @property
    def rounds(self) -> int:
        """Number of rounds."""

    @property
    def local_epochs(self) -> int:
        """Passes over a client's data in a round."""

    @property
    def public_batch_size(self) -> int:
        """Public images in a minibatch."""

    @property
    def optimizer(self) -> str:
        """The clients' optimizer."""

    @property
    def lr(self) -> float:
        """Learning rate of the first round."""

    @property
    def lr_decay(self) -> float:
        """Factor on the learning rate after each round."""

    @property
    def lr_schedule(self) -> str:
        """How the learning rate falls, beside that factor."""

    @property
    def warmup_rounds(self) -> int:
        """Rounds at the start in which the learning rate rises."""

    @property
    def momentum(self) -> float:
        """Momentum."""

    @property
    def weight_decay(self) -> float:
        """Weight decay."""

    @property
    def precision(self) -> str:
        """Arithmetic of training."""

    # What is measured.

    @property
    def eval_every(self) -> int:
        """Rounds from one test to the next."""

    @property
    def per_class(self) -> bool:
        """Whether each class's counts are recorded."""
