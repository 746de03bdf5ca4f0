"""The peers: of each its rows, and in the dataclass `PeerConfig` how a row runs it. No peer is imported here."""

import importlib

from agreement.rows import Peer

MODULES = ("fluke", "flower", "pfllib", "flbench", "niid_bench", "fl_simulator", "feddecorr", "fedntd")


def load_peers() -> list[Peer]:
    """Loads the peers, in the order of the page."""
    return [load_peer(module) for module in MODULES]


def load_peer(module: str) -> Peer:
    """Loads a peer by the name of its module."""
    return importlib.import_module(f"agreement.peers.{module}").PEER
