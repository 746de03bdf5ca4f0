"""The batches of the clients, round by round, as adapters hand them to their peers."""

from collections.abc import Iterator, Sequence
from itertools import cycle

from torch import Tensor

from agreement.exchange import Problem


class Feed:
    """The cohort and the batches of the round that a peer is in.

    Attributes:
        problem: The problem.
        round: From 0; an adapter sets it.
    """

    def __init__(self, problem: Problem, num_extra_rounds: int = 0):
        """Makes the feed.

        Args:
            problem: The problem.
            num_extra_rounds: The rounds that a peer trains after the last one, which see that one's cohort and batches.
        """
        self.problem = problem
        self.round = 0
        self._num_extra_rounds = num_extra_rounds

    @property
    def _round_with_batches(self) -> int:
        last = self.problem.num_rounds - 1
        if not 0 <= self.round <= last + self._num_extra_rounds:
            raise IndexError(f"there are no batches for round {self.round}.")
        return min(self.round, last)

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

    def __init__(self, feed: Feed, client: int, epoch_of_pass: Sequence[int] | None = None, drop_last: bool = False):
        """Makes the loader of a client.

        Args:
            feed: Of all clients' batches.
            client: The client.
            epoch_of_pass: The epoch of each pass, over and over; those of local training in their order if None.
            drop_last: Whether a batch that is not full is left out.
        """
        self.client = client
        self.dataset = feed.problem.parts[client]
        self._feed = feed
        self._epochs = cycle(range(feed.problem.epochs) if epoch_of_pass is None else epoch_of_pass)
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
