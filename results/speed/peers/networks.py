"""The two networks that are not fedcli's by name; each side loads them from this file.

`small` is that of the workload w4 of `fedcli bench`, written again: fedcli need not be installed where the other sides
run.
"""

from torch import nn


def mcmahan(channels: int = 1, image_size: int = 28, num_classes: int = 10) -> nn.Module:
    """McMahan et al.'s convolutional network with padding, 1,663,370 parameters."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * (image_size // 4) ** 2, 512), nn.ReLU(), nn.Linear(512, num_classes),
    )  # fmt: skip


def small(channels: int = 1, image_size: int = 28, num_classes: int = 10) -> nn.Module:
    """A small convolutional network, 21,840 parameters."""
    size = ((image_size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(20 * size**2, 50), nn.ReLU(), nn.Linear(50, num_classes),
    )  # fmt: skip
