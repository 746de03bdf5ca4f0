"""The clients' images, the initial model and the network, as the sides other than fedcli read them."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


@cache
def client_images(folder: str, split: str) -> list[TensorDataset]:
    """Returns every client's images for training or testing, which the process keeps."""
    files = sorted(Path(folder, "dataset", split).glob("*.npz"), key=lambda file: int(file.stem))
    clients = []
    for file in files:
        arrays = np.load(file, allow_pickle=True)["data"].item()
        x = torch.from_numpy(arrays["x"])
        y = torch.from_numpy(arrays["y"])
        clients.append(TensorDataset(x, y))
    return clients


def load_initial(network: nn.Module, folder: str) -> None:
    """Gives a network the parameters of the initial model."""
    initial_values = torch.load(Path(folder, "initial.pt"))
    with torch.no_grad():
        for value, initial in zip(network.parameters(), initial_values, strict=True):
            value.copy_(initial)


def initial_network(options: dict[str, Any], folder: str) -> nn.Module:
    """Returns the initial model, in a network as a user of PyTorch writes it."""
    network = user_network(options["backbone"])
    load_initial(network, folder)
    return network


def user_network(backbone: str) -> nn.Module:
    """Returns the network as a user of PyTorch writes it.

    `cnn-mcmahan` is written again: fedcli need not be installed where the other sides run.
    """
    if backbone != "cnn-mcmahan":
        return own_network(backbone)
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def own_network(backbone: str) -> nn.Module:
    """Returns a network of `networks.py`, by its path and name."""
    path, name = backbone.rsplit(":", 1)
    make = runpy.run_path(path)[name]
    return make()
