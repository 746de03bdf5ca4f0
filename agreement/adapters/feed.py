"""What adapters share: the batches of the clients, round by round; the change of a run; what a run ends with."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from operator import attrgetter
from typing import Any

from torch import Tensor

from agreement.exchange import Problem
from agreement.rows import Quantity
from agreement.small_networks import body_of, parameters_or_number

FinalTensors = dict[Quantity, list[Tensor]]  # what a run ends with
Patch = Callable[[Any, Problem], None]  # is given what it changes and the problem, before the first round


def apply_patch(patches: Mapping[str, Patch], name: str, target: Any, problem: Problem) -> None:
    """Makes the change of a peer's run, if it has one."""
    if name:
        patches[name](target, problem)


def refuse_unsupported(problem: Problem, *, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
    """Refuses a problem that asks for momentum or weight decay of which a peer knows nothing.

    Args:
        problem: The problem.
        momentum: What the peer has by itself, whatever it is told.
        weight_decay: Likewise.

    Raises:
        ValueError: If the problem asks for another one.
    """
    if problem.momentum not in (0, momentum):
        raise ValueError(f"its clients train with momentum {momentum} (got {problem.momentum}).")
    if problem.weight_decay not in (0, weight_decay):
        raise ValueError(f"its clients train with weight decay {weight_decay} (got {problem.weight_decay}).")


def read_personal_models(models: Iterable[Sequence[Tensor]]) -> FinalTensors:
    """The parameters of the clients' models, whole and without their heads."""
    personal: list[Tensor] = []
    bodies: list[Tensor] = []
    for params in models:
        personal += params
        bodies += body_of(params)
    return {Quantity.PERSONAL: personal, Quantity.BODIES: bodies}


def read_kept(clients: Iterable[Any], attributes: Sequence[str]) -> list[Tensor]:
    """What stays with the clients, by its attributes: models, or numbers."""
    kept: list[Tensor] = []
    for client in clients:
        for attribute in attributes:
            kept += parameters_or_number(attrgetter(attribute)(client))
    return kept


class Feed:
    """The cohort and the batches of the round that a peer is in.

    Attributes:
        problem: The problem.
        round: From 0; an adapter sets it.
    """

    def __init__(self, problem: Problem, num_rounds_more: int = 0):
        """Makes the feed.

        Args:
            problem: The problem.
            num_rounds_more: The rounds that a peer trains after the last one, which see that one's cohort and batches.
        """
        self.problem = problem
        self.round = 0
        self._num_rounds_more = num_rounds_more

    @property
    def _round_with_batches(self) -> int:
        last = self.problem.num_rounds - 1
        if not 0 <= self.round <= last + self._num_rounds_more:
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
