"""Clients that train together: their tensors, for a graph at fixed addresses, and one step of all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcli.core.batches import Batch
from fedcli.core.clients import Aux, Client
from fedcli.core.graphs import Work
from fedcli.core.trees import Tree, tree_map, where


class Rows(NamedTuple):
    """What K clients need of a plan, on the device; [T, K, ...], or [K, ...] for one step."""

    index: Tensor  # [T, K, B]
    size: Tensor  # [T, K]
    epoch_end: Tensor  # [T, K]
    draws: Tensor | None  # [T, K, B, NUM_DRAWS]
    keys: Tensor  # [T, K]


class Stack:
    """Clients that train together: their tensors, and the step that moves them on.

    Attributes:
        clients: Stacked.
        totals: Sums of the terms so far, `[K]` by name; empty before the first step.
        kept: Whether it is used again in later rounds.
        eager_steps: How many steps were taken without a graph.
        replay: The step as a graph; None as long as there is none.
    """

    def __init__(
        self,
        update: Callable[..., tuple[Client, Aux]],
        gather: Callable[..., tuple[Tensor, Tensor]],
        padded: bool,
        fixed: bool,
    ):
        """A stack without clients.

        Args:
            update: A local step of stacked clients: clients, batch and context to clients and what comes beside.
            gather: From positions and draws to network input and labels.
            padded: Whether some batches are not full, so that a mask has to be carried along.
            fixed: Whether the clients' tensors stay where they are. Without a graph new ones are faster: on a CPU the
                memory of the old ones is then used for the next, and not given back to the system in every step.
        """
        self._update, self._gather, self._padded, self._fixed = update, gather, padded, fixed
        self.kept = False
        self.clients: Client | None = None
        self.totals: dict[str, Tensor] = {}
        self.eager_steps = 0
        self.replay: Work | None = None

    def begin(self, clients: Client, context: Tree, rows: Rows, num_batches: Tensor, rate: Tensor) -> None:
        """Takes clients, their context and the first of the `rows`; when used again, into the same tensors."""
        given = (clients, context, tree_map(lambda leaf: leaf[0], rows), num_batches, rate)
        if self.clients is None:
            self._given = tree_map(_copy, given)
            self.clients, self._context, self._now, self._num_batches, self._rate = self._given
        else:
            tree_map(_write, self._given, given)
            tree_map(Tensor.zero_, self.totals)

    def set_rows(self, rows: Rows, t: int) -> None:
        """Makes step t the next."""
        tree_map(lambda own, all_steps: own.copy_(all_steps[t]), self._now, rows)

    def step(self) -> None:
        """One local step of each client; those that have run out of data stand still."""
        now = self._now
        x, y = self._gather(now.index, now.draws)
        places = torch.arange(now.index.shape[1], device=y.device)
        mask = places < now.size[:, None] if self._padded else None
        batch = Batch(x, y, mask, now.epoch_end, self._num_batches, self._rate, now.keys)
        after, aux = self._update(self.clients, batch, self._context)
        active = now.size > 0
        if self._fixed:
            tree_map(lambda own, new: _replace(active, own, new), self.clients, after)
        else:
            self.clients = where(active, after, self.clients)
        if not self.totals:
            self.totals = tree_map(torch.zeros_like, aux.terms)
        tree_map(lambda total, term: total.add_(torch.where(active, term, 0.0)), self.totals, aux.terms)


def _copy(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf


def _write(own: Any, new: Any) -> None:
    if isinstance(own, Tensor):
        own.copy_(new)


def _replace(active: Tensor, own: Tensor, new: Tensor) -> None:
    torch.where(active.reshape(-1, *[1] * (own.dim() - 1)), new, own, out=own)
