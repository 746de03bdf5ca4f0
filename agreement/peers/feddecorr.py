"""The authors' code of FedDecorr: its loss, in a plain loop of FedAvg."""

import importlib
from typing import Any

from torch.nn import functional

from agreement.peers import average_plainly
from agreement.rows import Peer, Row


def run(row: Row, problem: dict[str, Any]) -> dict[str, list]:
    """Trains with the loss; returns what the rounds end with."""
    decorrelation = importlib.import_module("loss").FedDecorrLoss()

    def objective(features, logits, labels, received):
        return functional.cross_entropy(logits, labels) + row.how["weight"] * decorrelation(features)

    return {"shared": average_plainly(problem, objective)}


PEER = Peer(
    name="FedDecorr", module="feddecorr", commit="973e4af2d416e8dacda1fb19a328e440f9e815af",
    rows=(Row("FedDecorr, its loss in a plain loop", "feddecorr", {"weight": 0.01}),),
)  # fmt: skip
