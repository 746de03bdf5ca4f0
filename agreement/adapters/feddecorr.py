"""The authors' code of FedDecorr: its loss, in a plain loop of FedAvg."""

from loss import FedDecorrLoss
from torch import Tensor
from torch.nn import functional

from agreement.adapters import plain_loop
from agreement.adapters.final_tensors import TensorsByQuantity
from agreement.adapters.patches import Patch
from agreement.exchange import Problem
from agreement.peers.feddecorr import PeerConfig
from agreement.rows import Quantity


def run(config: PeerConfig, problem: Problem, patch: Patch) -> TensorsByQuantity:
    """Trains with the loss, which no row changes."""
    decorrelation = FedDecorrLoss()

    def objective(features: Tensor, logits: Tensor, labels: Tensor, received: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels) + config.weight * decorrelation(features)

    return {Quantity.SHARED: plain_loop.run_fedavg(problem, objective)}
