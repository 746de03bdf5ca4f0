"""The peers, each by its own classes, which are given the batches and first weights of the problem."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class Feed:
    """The batches of the round that a peer is in.

    Attributes:
        problem: What `agreement.problem.describe` returns.
        round: From 0; an adapter sets it.
    """

    def __init__(self, problem: dict[str, Any]):
        self.problem, self.round = problem, 0

    @property
    def last_round(self) -> int:
        """The number of the last round."""
        return len(self.problem["cohorts"]) - 1

    @property
    def cohort(self) -> list[int]:
        """The clients of the round."""
        return self.problem["cohorts"][min(self.round, self.last_round)]

    def positions(self, client: int, epoch: int) -> list[list[int]]:
        """The positions of a client's examples in each batch of an epoch."""
        return self.problem["batches"][min(self.round, self.last_round), client, epoch]

    def batches(self, client: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The images and labels of each batch of an epoch."""
        for positions in self.positions(client, epoch):
            yield self.problem["x"][positions], self.problem["y"][positions]


def parameters_of(model: nn.Module) -> list[Tensor]:
    """A copy of a model's parameters."""
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]
