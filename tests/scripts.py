"""Scripts outside of the package, as modules, and how accurate models of runs are: loaded, or by PyTorch alone."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

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


def load_script(file):
    """Imports a script that is no part of the package; it finds modules beside it, as when Python runs it.

    It is imported once: scripts that import it by its name have this same module. Only where another module has that
    name, as the package has that of a script `fedcli.py`, it is imported anew each time.
    """
    name = file.stem
    known = sys.modules.get(name)
    if getattr(known, "__file__", None) == str(file):
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str(file.parent), *sys.path]):
        spec.loader.exec_module(module)
    sys.modules.setdefault(name, module)
    return module


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
