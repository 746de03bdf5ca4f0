"""How accurate trained models are: loaded by fedcli, or exported and loaded by PyTorch alone."""

import subprocess
import sys
from pathlib import Path

import torch

from fedcli.data import datasets

# Prints the accuracy of each exported model on a file of images with labels, by PyTorch alone.
EVALUATE_MODELS = """
import sys, torch
images, labels = torch.load(sys.argv[1])
for file in sys.argv[2:]:
    logits = torch.export.load(file).module()(images)
    print((logits.argmax(1) == labels).double().mean().item())
assert "fedcli" not in sys.modules
"""


def accuracy(model, images, labels):
    """Returns the share of images, of values from 0 to 255, that a loaded model classifies right."""
    return (model(images / 255).argmax(1) == labels).double().mean().item()


def accuracies_by_pytorch(files: list[Path], folder: Path) -> list[float]:
    """Returns the accuracy of each exported model on the digits, by a process without fedcli.

    The images of the test are written into the folder, which is that process's working one.
    """
    data = datasets.load("digits")
    images = folder / "images.pt"
    torch.save((data.x_test / 255, data.y_test), images)
    command = [sys.executable, "-I", "-W", "ignore", "-c", EVALUATE_MODELS, images, *files]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    return [float(line) for line in output.split()]
