"""The peers, each by its own classes, which are given the batches and first weights of the problem."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from agreement import network


class Feed:
    """The batches of the round that a peer is in.

    Attributes:
        problem: What `agreement.problem.describe` returns.
        round: From 0; an adapter sets it.
    """

    def __init__(self, problem: dict[str, Any]):
        self.problem = problem
        self.round = 0

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


def statistics_of(model: nn.Module) -> list[Tensor]:
    """A copy of the running means and variances of a model's batch normalisation."""
    buffers = [torch.zeros(0)]
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffers.append(buffer.detach().cpu().clone())
    return buffers


def average_plainly(problem: dict[str, Any], objective: Callable[..., Tensor]) -> list[Tensor]:
    """The parameters after rounds of FedAvg in a plain loop.

    Args:
        problem: What `agreement.problem.describe` returns.
        objective: From features, logits and labels of a batch, and the received model's logits, to the loss.
    """
    feed = Feed(problem)
    shared = problem["weights"]
    for number in range(len(problem["cohorts"])):
        feed.round = number
        examples = sum(len(problem["parts"][client]) for client in feed.cohort)
        mean = [torch.zeros_like(value) for value in shared]
        for client in feed.cohort:
            model = network.start(network.small(), shared)
            received = network.start(network.small(), shared)
            optimizer = torch.optim.SGD(model.parameters(), problem["lr"])
            for epoch in range(problem["epochs"]):
                for x, y in feed.batches(client, epoch):
                    features = model[:-1](x)
                    loss = objective(features, model[-1](features), y, received(x).detach())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            for total, value in zip(mean, parameters_of(model), strict=True):
                total += len(problem["parts"][client]) / examples * value
        shared = mean
    return shared
