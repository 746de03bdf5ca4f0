"""The networks of the comparison, which every side builds by itself: 6,390 parameters for digits, in one order.

`normed` has batch normalisation besides, 12 parameters more.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def body(channels: int = 1, image_size: int = 8, network: str = "small") -> nn.Sequential:
    """From images to 16 features; with batch normalisation in the network "normed"."""
    normalisation = [nn.BatchNorm2d(6)] if network == "normed" else []
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1), *normalisation, nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * image_size**2, 16), nn.ReLU(),
    )  # fmt: skip


def head(num_classes: int = 10) -> nn.Linear:
    """From 16 features to logits."""
    return nn.Linear(16, num_classes)


def small(channels: int = 1, image_size: int = 8, num_classes: int = 10) -> nn.Sequential:
    """The body and a linear head, as fedcli takes a network of one's own."""
    return nn.Sequential(*body(channels, image_size), head(num_classes))


def normed(channels: int = 1, image_size: int = 8, num_classes: int = 10) -> nn.Sequential:
    """The body with batch normalisation and a linear head."""
    return nn.Sequential(*body(channels, image_size, "normed"), head(num_classes))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """The values of tensors in one vector, in float64."""
    return torch.cat([value.detach().double().flatten() for value in tensors])


def load_weights(model: nn.Module, weights: list[Tensor]) -> nn.Module:
    """Gives a model of a peer, of the same parameters in the same order, the weights that all sides start from."""
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data = value.clone()
    return model


NUM_OF_HEAD = 2  # the head's weight and bias, the last parameters of a model


def body_of(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """All of a model's parameters but its head's."""
    return parameters[:-NUM_OF_HEAD]


def head_of(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parameters of a model's head."""
    return parameters[-NUM_OF_HEAD:]


def parameters_of(model: nn.Module) -> list[Tensor]:
    """A copy of a model's parameters."""
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def parameters_or_number(kept: nn.Module | float) -> list[Tensor]:
    """What a client keeps: a copy of a model's parameters, or a number as a tensor."""
    return parameters_of(kept) if isinstance(kept, nn.Module) else [torch.tensor(kept)]


def statistics_of(model: nn.Module) -> list[Tensor]:
    """A copy of the running means and variances of a model's batch normalisation."""
    statistics = [torch.zeros(0)]  # of a model that has none
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            statistics.append(buffer.detach().cpu().clone())
    return statistics
