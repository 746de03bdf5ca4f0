"""The authors' code of FedDecorr."""

from dataclasses import dataclass

from agreement.rows import Peer, Row


@dataclass(frozen=True)
class PeerConfig:
    """How its loss is run in a plain loop."""

    weight: float  # of the decorrelation


PEER = Peer(
    name="FedDecorr",
    module="feddecorr",
    commit="973e4af2d416e8dacda1fb19a328e440f9e815af",
    rows=(Row(label="FedDecorr, its loss in a plain loop", case="feddecorr", config=PeerConfig(weight=0.01)),),
)
