"""An adapter of each peer, which drives the peer's own classes in the peer's own environment.

Each reads alike: the problem's batches take the place of the peer's data, the peer's model begins with the problem's
weights, the peer runs its rounds, and what it ends with is read back. What an adapter replaces in a peer's modules, it
replaces by `mock.patch`, which agreement/peer_process.py takes back after each row.
"""

from typing import Any, Protocol

from agreement.adapters.final_tensors import TensorsByQuantity
from agreement.adapters.patches import Patch
from agreement.exchange import Problem


class Adapter(Protocol):
    """What a module in this folder has.

    One whose rows change their peer's code has `PATCHES` besides, a `Patch` of patches.py by each name that
    `Change.patch` has.
    """

    def run(self, config: Any, problem: Problem, patch: Patch) -> TensorsByQuantity:
        """Runs the peer, and returns what the run ends with.

        Args:
            config: A `PeerConfig` of the peer's module in agreement/peers.
            problem: What the peer solves.
            patch: Is called with the object that the peer runs: its server, or fluke's algorithm; of a peer that is a
                script with what makes its networks.
        """
