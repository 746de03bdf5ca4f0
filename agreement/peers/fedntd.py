"""The authors' code of FedNTD."""

from dataclasses import dataclass

from agreement.rows import Peer, Row


@dataclass(frozen=True)
class PeerRun:
    """A run of its loss in a plain loop."""

    temperature: float  # tau
    weight: float  # beta, of the distillation


PEER = Peer(
    name="FedNTD",
    module="fedntd",
    commit="be00ee598139654abe650c446a7ba3bc4e340233",
    rows=(
        Row("FedNTD, its loss in a plain loop", "fedntd", PeerRun(temperature=1, weight=1)),
        Row("FedNTD at tau 3", "fedntd, tau 3", PeerRun(temperature=3, weight=0.5)),
    ),
)
