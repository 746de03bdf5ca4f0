"""Local training as a user of PyTorch writes it: modules, `torch.optim`, a client's minibatches without padding."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcli.core.federation import Federation


class Model(NamedTuple):
    """The model of one client."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Scores(NamedTuple):
    """What a model makes of a batch."""

    features: Tensor  # [B, D]
    logits: Tensor  # [B, C]


def load_model(module: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> nn.Module:
    """Copies values into the parameters and buffers of a module, which is returned."""
    with torch.no_grad():
        for name, value in params.items():
            module.get_parameter(name).copy_(value)
        for name, value in module.named_buffers():
            value.copy_(buffers[name])
    return module


def modules_of(fed: Federation, clients: dict) -> list[nn.Module]:
    """Returns the models of clients as modules in training mode; `clients` has parameters and buffers by client."""
    modules = []
    for client, (params, buffers, *_) in clients.items():
        network = fed.networks[fed.architecture[client]]
        module = copy.deepcopy(network.module).train()
        modules.append(load_model(module, params, buffers))
    return modules


def minibatches(
    fed: Federation, round: int, client: int, epochs: range | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the images and labels of each minibatch of a client in a round, without padding."""
    plan = fed.plan(fed.cohort_of(round, [client]), epochs)
    for step in range(int(plan.num_steps[0])):
        size = plan.size[step, 0]
        yield fed.engine.gather(plan.index[step, 0, :size])


def sgd_of(fed: Federation, parameters: Iterable[nn.Parameter], lr: float | None = None) -> torch.optim.SGD:
    """Returns PyTorch's SGD with the options of a federation, or with another learning rate where it is given."""
    config = fed.config
    if lr is None:
        lr = config.lr
    return torch.optim.SGD(parameters, lr, config.momentum, weight_decay=config.weight_decay)


def cross_entropy(module: nn.Module, features: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Returns the loss of a client of FedAvg."""
    return F.cross_entropy(logits, y)


def train_plainly(
    fed: Federation, round: int, client: int, model: Model,
    objective: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] = cross_entropy, *,
    names: Collection[str] | None = None, epochs: range | None = None,
) -> Model:  # fmt: skip
    """Returns the model of a client after a round of SGD with the minibatches and options of a federation.

    `model` is what the client begins with, and `objective` goes from module, features, logits and labels to the loss.
    Parameters outside of `names` stand still. The minibatches are those of other `epochs` of the round, where given.
    """
    (module,) = modules_of(fed, {client: model})
    trained = [value for name, value in module.named_parameters() if names is None or name in names]
    optimizer = sgd_of(fed, trained)
    for x, y in minibatches(fed, round, client, epochs):
        features, logits = module(x)
        loss = objective(module, features, logits, y)
        module.zero_grad()
        loss.backward()
        optimizer.step()
    return model_of(module)


class TrainedPair(NamedTuple):
    """The parameters of a client's two networks after a round."""

    private: dict[str, Tensor]
    shared: dict[str, Tensor]
    further: dict[str, Tensor] | None  # of a module that is trained with them
    num_clipped: int  # gradients that were longer than the bound, of all networks and minibatches


def train_pair(
    fed: Federation, round: int, client: int, private: Model, shared: Model,
    losses: Callable[[Scores, Scores, Tensor], Iterable[Tensor]], clip_norm: float, further: nn.Module | None = None,
) -> TrainedPair:  # fmt: skip
    """Trains two networks of a client for a round of SGD, each by the gradients of both losses, clipped on its own.

    `private` has the architecture of the client, and `shared`, which all clients have, that of the first client.
    `losses` goes from the scores of these two and the labels to the two losses; `further` is a module that is trained
    with them.
    """
    (private_module,) = modules_of(fed, {client: private})
    (shared_module,) = modules_of(fed, {0: shared})
    modules = [private_module, shared_module]
    if further is not None:
        modules.append(further)
    optimizers = [torch.optim.SGD(module.parameters(), fed.config.lr) for module in modules]
    num_clipped = 0
    for x, y in minibatches(fed, round, client):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses(Scores(*private_module(x)), Scores(*shared_module(x)), y):
            loss.backward(retain_graph=True)
        for module, optimizer in zip(modules, optimizers, strict=True):
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
            num_clipped += int(norm > clip_norm)
            optimizer.step()
    return TrainedPair(
        private=params_of(private_module),
        shared=params_of(shared_module),
        further=None if further is None else params_of(further),
        num_clipped=num_clipped,
    )


def means_by_class(rows: dict[int, list[Tensor]]) -> dict[int, Tensor]:
    """Returns the mean [D] of the rows of each class that has one."""
    return {label: torch.stack(of_class).mean(0) for label, of_class in rows.items() if of_class}


def copy_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of tensors, without their gradients."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def params_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the parameters of a module, by name."""
    return copy_tensors(dict(module.named_parameters()))


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the buffers of a module, by name."""
    return copy_tensors(dict(module.named_buffers()))


def model_of(module: nn.Module) -> Model:
    """Returns copies of the parameters and buffers of a module."""
    return Model(params_of(module), buffers_of(module))
