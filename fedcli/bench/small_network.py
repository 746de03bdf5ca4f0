"""The network of the workload w4, as a user of PyTorch writes it: so small that Python takes much of a step."""

from torch import nn


def compute_pooled_side(side: int) -> int:
    """Returns the side of an image after a convolution of 5 x 5 without padding, and pooling of 2 x 2."""
    return (side - 4) // 2


def small(channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Returns two convolutions and two linear layers; 21,840 parameters on grey images of 28 x 28 pixels."""
    side = compute_pooled_side(compute_pooled_side(image_size))
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(20 * side**2, 50), nn.ReLU(), nn.Linear(50, num_classes),
    )  # fmt: skip
