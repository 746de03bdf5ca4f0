"""The networks of the comparison, which every side builds by itself: 6,390 parameters for digits, in one order.

`batch_norm` has batch normalisation besides, 12 parameters more.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

NUM_CLASSES = 10
NUM_CHANNELS = 6  # of the convolution
NUM_FEATURES = 16
NUM_HEAD_TENSORS = 2  # weight and bias, the last parameters of a model


def small_body(channels: int = 1, image_size: int = 8) -> nn.Sequential:
    """From images to features."""
    return nn.Sequential(
        nn.Conv2d(channels, NUM_CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(NUM_CHANNELS * image_size**2, NUM_FEATURES),
        nn.ReLU(),
    )


def batch_norm_body(channels: int = 1, image_size: int = 8) -> nn.Sequential:
    """The same with batch normalisation after the convolution."""
    convolution, *rest = small_body(channels, image_size)
    return nn.Sequential(convolution, nn.BatchNorm2d(NUM_CHANNELS), *rest)


def head(num_classes: int = NUM_CLASSES) -> nn.Linear:
    """From features to logits."""
    return nn.Linear(NUM_FEATURES, num_classes)


def small(channels: int = 1, image_size: int = 8, num_classes: int = NUM_CLASSES) -> nn.Sequential:
    """The body and a linear head, as fedcli takes a network of one's own."""
    return nn.Sequential(*small_body(channels, image_size), head(num_classes))


def batch_norm(channels: int = 1, image_size: int = 8, num_classes: int = NUM_CLASSES) -> nn.Sequential:
    """The body with batch normalisation and a linear head."""
    return nn.Sequential(*batch_norm_body(channels, image_size), head(num_classes))


BODIES = {"small": small_body, "batch_norm": batch_norm_body}  # by the names of the whole networks


def make_body(network_name: str) -> nn.Sequential:
    """Makes the body of a network for digits."""
    return BODIES[network_name]()


def make_network(network_name: str, weights: list[Tensor]) -> nn.Sequential:
    """Makes a network for digits with these weights."""
    network = nn.Sequential(*make_body(network_name), head())
    load_weights(network, weights)
    return network


def load_weights(model: nn.Module, weights: list[Tensor]) -> nn.Module:
    """Gives a model of a peer, of the same parameters in the same order, the weights that all sides start from."""
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data = value.clone()
    return model


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """The values of tensors in one vector, in float64; an empty one of no tensors."""
    vectors = [value.detach().double().flatten() for value in tensors]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *vectors])


def select_body(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """All of a model's parameters but its head's."""
    return parameters[:-NUM_HEAD_TENSORS]


def select_head(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parameters of a model's head."""
    return parameters[-NUM_HEAD_TENSORS:]


def copy_parameters(model: nn.Module) -> list[Tensor]:
    """A copy of a model's parameters."""
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def copy_statistics(model: nn.Module) -> list[Tensor]:
    """A copy of the running means and variances of a model's batch normalisation."""
    statistics = []
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            statistics.append(buffer.detach().cpu().clone())
    return statistics
