"""The whole models that go between the server and the clients of a round, from which `core/drift.py` measures drift."""

from collections.abc import Sequence

from fedcli.core.clients import Buffers, Client, Params
from fedcli.core.network import Network


class ExchangedModels:
    """Remembers models of a round until the next one starts.

    A part of a model, as a body without its head, is no whole model and is not remembered.

    Attributes:
        received: Parameters of the first whole model that all clients of the round were sent; None where there is none.
        trained: The clients that sent whole models last, stacked; None where none did, or they are not to be kept.
    """

    def __init__(self, networks: Sequence[Network], keep_trained: bool):
        """Prepares for a round; `keep_trained` says whether clients stay in memory after they have been aggregated."""
        self._networks = networks
        self._keep_trained = keep_trained
        self.received: Params | None = None
        self.trained: Client | None = None

    def note_received(self, params: Params, buffers: Buffers) -> None:
        """Takes note of what all clients were sent."""
        if self.received is None and self._is_whole(params, buffers):
            self.received = params

    def note_trained(self, params: Params, buffers: Buffers) -> None:
        """Takes note of the stacked models that clients send."""
        if self._keep_trained and self._is_whole(params, buffers):
            self.trained = Client(params, buffers)

    def _is_whole(self, params: Params, buffers: Buffers) -> bool:
        """Says whether these are all parameters and buffers of one of the networks."""
        names = (params.keys(), buffers.keys())
        return any(names == (network.params.keys(), network.buffers.keys()) for network in self._networks)
