"""The authors' code of FedNTD: its loss, in a plain loop of FedAvg."""

import importlib
import sys
from types import ModuleType
from typing import Any

from torch import Tensor

from agreement.adapters import plain_loop
from agreement.adapters.final_tensors import TensorsByQuantity
from agreement.adapters.patches import Patch
from agreement.exchange import Problem, clone_folder
from agreement.peers.fedntd import PeerConfig
from agreement.rows import Quantity
from agreement.small_networks import NUM_CLASSES


def import_without_package(name: str) -> Any:
    """Imports a module of the clone, but not what the packages around it import, which is more than it needs."""
    package = ""
    for part in name.split(".")[:-1]:
        package = f"{package}.{part}" if package else part
        empty = ModuleType(package)
        empty.__path__ = [str(clone_folder().joinpath(*package.split(".")))]
        sys.modules[package] = empty
    return importlib.import_module(name)


def run(config: PeerConfig, problem: Problem, patch: Patch) -> TensorsByQuantity:
    """Trains with the loss, which no row changes."""
    criterion = import_without_package("algorithms.fedntd.criterion").NTD_Loss(
        num_classes=NUM_CLASSES, tau=config.temperature, beta=config.weight
    )

    def objective(features: Tensor, logits: Tensor, labels: Tensor, received: Tensor) -> Tensor:
        return criterion(logits, labels, received)

    return {Quantity.SHARED: plain_loop.run_fedavg(problem, objective)}
