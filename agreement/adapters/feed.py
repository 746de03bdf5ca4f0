"""What an adapter gives its peer: the problem, and the batches of its clients, round by round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from torch import Tensor

Ends = dict[str, list[Tensor]]  # what a run ends with, by what a row can compare


@dataclass(frozen=True)
class Problem:
    """What a peer solves; `agreement.problem.describe` returns its fields."""

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
    network: str  # of agreement/network.py

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


class Feed:
    """The cohort and the batches of the round that a peer is in.

    Attributes:
        problem: The problem.
        round: From 0; an adapter sets it. What a peer does after the last round sees that round's batches.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.round = 0

    @property
    def _round_with_batches(self) -> int:
        return min(self.round, self.problem.num_rounds - 1)

    @property
    def cohort(self) -> list[int]:
        """The clients of the round."""
        return self.problem.cohorts[self._round_with_batches]

    def positions(self, client: int, epoch: int) -> list[list[int]]:
        """The positions of a client's examples in each batch of an epoch."""
        return self.problem.batches[self._round_with_batches, client, epoch]


class EpochLoader:
    """A client's batches, as a peer's loader yields them: each pass is the next epoch of the round.

    Attributes:
        client: The client.
        dataset: Its examples, of which peers ask the number.
    """

    def __init__(self, feed: Feed, client: int, epochs: Sequence[int] | None = None, drop_last: bool = False):
        """Makes the loader of a client.

        Args:
            feed: Of all clients' batches.
            client: The client.
            epochs: The epoch of each pass, over and over; those of local training in their order if None.
            drop_last: Whether a batch that is not full is left out.
        """
        self.client = client
        self.dataset = feed.problem.parts[client]
        self._feed = feed
        self._epochs = cycle(range(feed.problem.epochs) if epochs is None else epochs)
        self._drop_last = drop_last

    def __len__(self) -> int:
        return len(self._positions(epoch=0))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        problem = self._feed.problem
        for positions in self._positions(next(self._epochs)):
            yield problem.x[positions], problem.y[positions]

    def _positions(self, epoch: int) -> list[list[int]]:
        """The positions of the examples in each batch of an epoch."""
        batches = self._feed.positions(self.client, epoch)
        if self._drop_last:
            return [positions for positions in batches if len(positions) == self._feed.problem.batch_size]
        return batches
