"""The clients' images and the initial model, as the sides other than fedcli read them."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


@cache
def load_client_images(folder: Path, split: str) -> list[TensorDataset]:
    """Returns every client's images for training or testing, which the process keeps."""
    files = sorted((folder / "dataset" / split).glob("*.npz"), key=lambda file: int(file.stem))
    clients = []
    for file in files:
        arrays = np.load(file, allow_pickle=True)["data"].item()
        x = torch.from_numpy(arrays["x"])
        y = torch.from_numpy(arrays["y"])
        clients.append(TensorDataset(x, y))
    return clients


def load_initial_model(network: nn.Module, folder: Path) -> None:
    """Gives a network the parameters of the initial model."""
    initial_values = torch.load(folder / "initial.pt", map_location="cpu")
    with torch.no_grad():
        for value, initial in zip(network.parameters(), initial_values, strict=True):
            value.copy_(initial)
