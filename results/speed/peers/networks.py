"""The networks of the workloads, as a user of PyTorch writes them; fedcli loads those that it lacks from this file.

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


def mcmahan_without_padding() -> nn.Module:
    """The same without padding, 582,026 parameters: the `cnn-mcmahan` of fedcli, written again for 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def small(channels: int = 1, image_size: int = 28, num_classes: int = 10) -> nn.Module:
    """A small convolutional network, 21,840 parameters."""
    size = ((image_size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(20 * size**2, 50), nn.ReLU(), nn.Linear(50, num_classes),
    )  # fmt: skip


NETWORKS = {"cnn-mcmahan": mcmahan_without_padding, "mcmahan": mcmahan, "small": small}


def make_network(backbone: str) -> nn.Module:
    """Makes a network as fedcli names it: `cnn-mcmahan`, or a function of this file behind the file's path."""
    _, _, name = backbone.rpartition(":")
    return NETWORKS[name]()
