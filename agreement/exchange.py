"""What passes between the process of fedcli and that of a peer, in whose environment there may be no fedcli."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from agreement.rows import Quantity

CLONE_VARIABLE = "FEDCLI_AGREEMENT_CLONE"  # of the environment of a peer's process: the folder of its clone


@dataclass(frozen=True)
class Problem:
    """What a peer solves: images and labels, clients, cohorts, batches and first weights."""

    x: Tensor  # training images
    y: Tensor  # their labels
    x_test: Tensor
    y_test: Tensor
    parts: list[list[int]]  # positions of each client's examples
    batches: dict[tuple[int, int, int], list[list[int]]]  # positions in each batch, by round, client and epoch
    cohorts: list[list[int]]  # the clients of each round
    weights: list[Tensor]  # the parameters that all sides start from
    projection: Tensor  # of a mentee's features on its mentor's, from which all sides start FedKD
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    network_name: str  # a key of `agreement.small_networks.BODIES`

    @property
    def num_clients(self) -> int:
        """The size of the population."""
        return len(self.parts)

    @property
    def num_rounds(self) -> int:
        """The number of rounds."""
        return len(self.cohorts)

    @property
    def share_of_clients(self) -> float:
        """The share of the clients that takes part in a round."""
        first_cohort, *_ = self.cohorts
        return len(first_cohort) / self.num_clients

    @property
    def test_batch(self) -> tuple[Tensor, Tensor]:
        """Some test images and their labels, for peers that test whatever they are told."""
        return self.x_test[:64], self.y_test[:64]


@dataclass(frozen=True)
class RowOutcome:
    """What came of a row in the peer's process."""

    final_vectors: dict[Quantity, Tensor]  # of all that the row compares, in a vector each; none if the row failed
    failure: str = ""  # the traceback


@dataclass(frozen=True)
class PeerOutcome:
    """What came of a peer's rows, and where they ran."""

    row_outcomes: dict[str, RowOutcome]  # by label
    python_version: str
    torch_version: str


def problem_file(exchange_folder: Path, case: str) -> Path:
    """The file of a case's problem."""
    return exchange_folder / f"problem of {case}.pt"


def outcome_file(exchange_folder: Path, module: str) -> Path:
    """The file of what came of a peer's rows."""
    return exchange_folder / f"rows of {module}.pt"


def clone_folder() -> Path:
    """The folder of the peer's clone, in the peer's process."""
    return Path(os.environ[CLONE_VARIABLE])
