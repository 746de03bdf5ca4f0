"""The authors' code of FedNTD."""

from dataclasses import dataclass

from agreement.rows import Peer, Row


@dataclass(frozen=True)
class PeerConfig:
    """How its loss is run in a plain loop."""

    temperature: float  # tau
    weight: float  # beta, of the distillation


PEER = Peer(
    name="FedNTD",
    module="fedntd",
    commit="be00ee598139654abe650c446a7ba3bc4e340233",
    rows=(
        Row(label="FedNTD, its loss in a plain loop", case="fedntd", config=PeerConfig(temperature=1, weight=1)),
        Row(
            label="FedNTD, its loss in a plain loop, tau 3",
            case="fedntd, tau 3",
            config=PeerConfig(temperature=3, weight=0.5),
        ),
    ),
)
