"""FedAvg in a plain loop, for peers of which the loss alone is run."""

from collections.abc import Callable

import torch
from torch import Tensor

from agreement import small_networks
from agreement.adapters.feed import EpochLoader, Feed
from agreement.exchange import Problem

# From features, logits and labels of a batch, and the received model's logits, to the loss.
Objective = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def run_fedavg(problem: Problem, objective: Objective) -> list[Tensor]:
    """The parameters after all rounds."""
    feed = Feed(problem)
    shared = problem.weights
    for number in range(problem.num_rounds):
        feed.round = number
        num_examples = sum(len(problem.parts[client]) for client in feed.cohort)
        mean = [torch.zeros_like(value) for value in shared]
        for client in feed.cohort:
            share = len(problem.parts[client]) / num_examples
            trained = train(EpochLoader(feed, client), shared, problem, objective)
            for total, value in zip(mean, trained, strict=True):
                total += share * value
        shared = mean
    return shared


def train(loader: EpochLoader, shared: list[Tensor], problem: Problem, objective: Objective) -> list[Tensor]:
    """A client's parameters after its local epochs of SGD, from those that the server has sent."""
    model = small_networks.make_network(problem.network_name, shared)
    received = small_networks.make_network(problem.network_name, shared)
    body = model[:-1]
    head = model[-1]
    optimizer = torch.optim.SGD(
        model.parameters(), problem.lr, momentum=problem.momentum, weight_decay=problem.weight_decay
    )
    for _ in range(problem.epochs):
        for x, y in loader:
            features = body(x)
            loss = objective(features, head(features), y, received(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return small_networks.copy_parameters(model)
