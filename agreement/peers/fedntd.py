"""The authors' code of FedNTD: its loss, in a plain loop of FedAvg."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from agreement.peers import average_plainly
from agreement.rows import Peer, Row


def run(row: Row, problem: dict[str, Any]) -> dict[str, list]:
    """Trains with the loss; returns what the rounds end with."""
    for name in ("algorithms", "algorithms.fedntd"):  # whose own modules import more than the loss needs
        package = ModuleType(name)
        package.__path__ = [str(Path(os.environ["CLONE"], *name.split(".")))]
        sys.modules[name] = package
    criterion = importlib.import_module("algorithms.fedntd.criterion").NTD_Loss(**row.how)

    def objective(features, logits, labels, received):
        return criterion(logits, labels, received)

    return {"shared": average_plainly(problem, objective)}


PEER = Peer(
    name="FedNTD", module="fedntd", commit="be00ee598139654abe650c446a7ba3bc4e340233",
    rows=(
        Row("FedNTD, its loss in a plain loop", "fedntd", {"num_classes": 10, "tau": 1, "beta": 1}),
        Row("FedNTD at tau 3", "fedntd, tau 3", {"num_classes": 10, "tau": 3, "beta": 0.5}),
    ),
)  # fmt: skip
