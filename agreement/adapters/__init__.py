"""An adapter of each peer, which drives the peer's own classes in the peer's own environment.

Each reads alike: the problem's batches take the place of the peer's data, the peer's model begins with the problem's
weights, the peer runs its rounds, and what it ends with is read back. What an adapter replaces in a peer's modules, it
replaces by `mock.patch`, which agreement/side.py takes back after each row.
"""

from typing import Any, Protocol

from agreement.adapters.feed import Ends, Problem


class Adapter(Protocol):
    """What a module in this folder has.

    One whose rows change their peer has besides `PATCHES`, by the names that `Setup.patch` has: functions that are
    called with the peer's server, or what makes the networks of a peer that is a script, and with the problem before
    the first round, and change one thing. `run` applies them, so that none of a setup's is left out.
    """

    def run(self, setup: Any, problem: Problem) -> Ends:
        """Runs the peer by a `Setup` of its module in agreement/peers; returns what the run ends with."""
