"""The authors' code of FedNTD: its loss, in a plain loop of FedAvg."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from agreement.adapters import plain_loop
from agreement.adapters.feed import Ends, Problem
from agreement.peers.fedntd import Setup


def import_without_package(name: str) -> Any:
    """Imports a module of the clone, but not what the packages around it import, which is more than it needs."""
    package = ""
    for part in name.split(".")[:-1]:
        package = f"{package}.{part}" if package else part
        empty = ModuleType(package)
        empty.__path__ = [str(Path(os.environ["CLONE"], *package.split(".")))]
        sys.modules[package] = empty
    return importlib.import_module(name)


def run(setup: Setup, problem: Problem) -> Ends:
    """Trains with the loss."""
    criterion = import_without_package("algorithms.fedntd.criterion").NTD_Loss(
        num_classes=10, tau=setup.temperature, beta=setup.weight
    )

    def objective(features: Tensor, logits: Tensor, labels: Tensor, received: Tensor) -> Tensor:
        return criterion(logits, labels, received)

    return {"shared": plain_loop.average(problem, objective)}
