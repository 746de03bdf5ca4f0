"""How much a round sends: the floats that go down to its clients and up to the server."""

from fedcli.core.clients import Buffers, Params
from fedcli.core.trees import Tree, count_floats


class Traffic:
    """Counts what all clients of a round together are sent and send.

    Attributes:
        down: Floats that clients were sent, by "params", "buffers" and "other".
        up: Floats that they sent.
    """

    def __init__(self) -> None:
        self.down = {"params": 0, "buffers": 0, "other": 0}
        self.up = {"params": 0, "buffers": 0, "other": 0}

    def count_models_down(self, params: Params, buffers: Buffers, num_clients: int) -> None:
        """Counts one model that is sent to so many clients."""
        self.down["params"] += num_clients * count_floats(params)
        self.down["buffers"] += num_clients * count_floats(buffers)

    def count_down(self, tree: Tree, num_clients: int = 1) -> None:
        """Counts what is no model and is sent to so many clients."""
        self.down["other"] += num_clients * count_floats(tree)

    def count_models_up(self, params: Params, buffers: Buffers) -> None:
        """Counts the models `[K, ...]` that clients send."""
        self.up["params"] += count_floats(params)
        self.up["buffers"] += count_floats(buffers)

    def count_up(self, stacked: Tree, share: float = 1.0) -> None:
        """Counts what is no model, of which clients send a share."""
        self.up["other"] += round(share * count_floats(stacked))
