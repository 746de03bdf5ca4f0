"""The authors' code of FedDecorr: its loss, in a plain loop of FedAvg."""

from loss import FedDecorrLoss
from torch import Tensor
from torch.nn import functional

from agreement.adapters import plain_loop
from agreement.adapters.feed import Ends, Problem
from agreement.peers.feddecorr import Setup


def run(setup: Setup, problem: Problem) -> Ends:
    """Trains with the loss."""
    decorrelation = FedDecorrLoss()

    def objective(features: Tensor, logits: Tensor, labels: Tensor, received: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels) + setup.weight * decorrelation(features)

    return {"shared": plain_loop.average(problem, objective)}
