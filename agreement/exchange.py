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
    fedkd_projection: Tensor  # of a mentee's features on its mentor's, from which all sides start FedKD
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
        return len(self.cohorts[0]) / self.num_clients

    @property
    def test_batch(self) -> tuple[Tensor, Tensor]:
        """Some test images and their labels, for peers that test whatever they are told."""
        return self.x_test[:64], self.y_test[:64]


VectorByQuantity = dict[Quantity, Tensor]  # what a run ends with: all values of a quantity in one vector


@dataclass(frozen=True)
class RowFailure:
    """A row that did not run in the peer's process."""

    traceback: str


@dataclass(frozen=True)
class PeerRun:
    """What the rows of a peer have ended with, and where they ran."""

    rows: dict[str, VectorByQuantity | RowFailure]  # by label
    python_version: str
    torch_version: str


def problem_file(exchange_folder: Path, case: str) -> Path:
    """The file of a case's problem."""
    return exchange_folder / f"problem of {case}.pt"


def run_file(exchange_folder: Path, module: str) -> Path:
    """The file of a peer's run."""
    return exchange_folder / f"rows of {module}.pt"


def clone_folder() -> Path:
    """The folder of the peer's clone, in the peer's process."""
    return Path(os.environ[CLONE_VARIABLE])
