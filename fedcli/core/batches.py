"""What a round draws at random: the order of batches, augmentation and dropout.

Every draw is keyed by `(seed, round, client, purpose)`, and depends neither on the method nor on which clients train
together or in which order.

A batch that is not full is padded by `plan_batches`, or left out where the run drops it. `is_real` tells padding from
samples. Of a client that trains alone the padding is cut off before its step (`Engine._iterate_batches`), and of
clients that train together it is masked (`Stack.take_step`), as they are by graphs on CUDA, a single one too: losses
and batch statistics leave it out. A client whose part has less than one batch idles where the run drops what is not
full, and a run in which no client has a full batch is refused (`divide` in `parts.py`). The last batch of public images
is smaller than the others and is never dropped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli.core.draws import generator


class Batch(NamedTuple):
    """One minibatch of one client (stacked: every field but `lr` has the client axis first)."""

    x: Tensor  # [B, channels, H, W], normalised
    y: Tensor  # [B]
    mask: Tensor | None  # [B], False for padding; None when every sample is real
    epoch_end: Tensor  # scalar bool, the last batch of an epoch
    num_batches: Tensor  # scalar, batches in an epoch of this client
    lr: Tensor  # scalar, learning rate of this round
    key: Tensor | None = None  # scalar int64, seed of dropout's masks; None leaves the one in the buffers
    idle: Tensor | None = None  # scalar float32, 1 for a client that has run out of data; None where steps move all


class BatchPlan(NamedTuple):
    """The batches of K clients over T local steps, ragged clients padded (host side, numpy)."""

    # [T, K, B] positions in the training set; 0 where padded.
    index: np.ndarray  # type: ignore[assignment]  # hides a tuple's method, which nobody calls
    size: np.ndarray  # [T, K] real samples in the batch; 0 once a client has run out of data
    epoch_end: np.ndarray  # [T, K] bool
    num_batches: np.ndarray  # [T, K], batches in an epoch of the client
    draws: np.ndarray | None  # [T, K, B, draws of an image] in [0, 1), for augmentation
    keys: np.ndarray  # [T, K], from which dropout draws its masks

    @property
    def num_steps(self) -> np.ndarray:
        """Returns the number of local steps of each client, [K]."""
        return (self.size > 0).sum(0)

    @property
    def num_clients(self) -> int:
        """Returns K."""
        return self.index.shape[1]

    @property
    def width(self) -> int:
        """Returns B, to which batches are padded."""
        return self.index.shape[2]


class BatchRows(NamedTuple):
    """The columns of a `BatchPlan` as tensors on the device, of K clients `[T, K, ...]` or of one `[T, ...]`."""

    index: Tensor  # type: ignore[assignment]  # as in the plan
    size: Tensor
    epoch_end: Tensor
    num_batches: Tensor
    draws: Tensor | None
    keys: Tensor


def count_batches(sizes: Sequence[int], batch_size: int, drop_last: bool) -> list[int]:
    """Counts the batches in an epoch of each client, of the `sizes` of their parts.

    If `drop_last`, an epoch's last batch is left out where it is not full.
    """
    if drop_last:
        return [size // batch_size for size in sizes]
    return [math.ceil(size / batch_size) for size in sizes]


def plan_batches(  # noqa: PLR0913  # all that a batch depends on, of which nothing may be hidden
    parts: Sequence[np.ndarray], client_ids: Sequence[int] | np.ndarray, seed: int, round: int, epochs: range,
    batch_size: int, drop_last: bool, num_draws: int,
) -> BatchPlan:  # fmt: skip
    """Draws the batches of a cohort; T is the most steps of a client, and may be 0.

    `parts` are each client's positions in the training set, `epochs` the local epochs to draw. For `drop_last` see
    `count_batches`. An image's augmentation needs `num_draws`, 0 without one.
    """
    counts = count_batches(list(map(len, parts)), batch_size, drop_last)
    steps = max(counts, default=0) * len(epochs)
    width = min(batch_size, max(4096, *map(len, parts)))  # very large batches are padded to the largest client's data
    plan = _make_empty_plan(steps, len(parts), width, num_draws)
    plan.num_batches[:] = counts
    for k, (part, client, count) in enumerate(zip(parts, client_ids, counts, strict=True)):
        generator_of = partial(generator, seed, round, client)
        for number, epoch in enumerate(epochs):
            drawn = _draw_epoch(part, count, batch_size, width, num_draws, generator_of, epoch)
            rows = slice(number * count, (number + 1) * count)
            plan.index[rows, k] = drawn.index
            plan.size[rows, k] = drawn.size
            plan.epoch_end[rows, k] = drawn.epoch_end
            plan.keys[rows, k] = drawn.keys
            if plan.draws is not None:
                plan.draws[rows, k] = drawn.draws
    return plan


def is_real(sizes: Tensor, width: int) -> Tensor:
    """Says which samples of padded batches are real, bool `[n, B]`, by the sizes `[n]` of the batches."""
    return torch.arange(width, device=sizes.device) < sizes[:, None]


def _make_empty_plan(steps: int, num_clients: int, width: int, num_draws: int) -> BatchPlan:
    """Makes a plan in which all clients have run out of data."""
    shape = (steps, num_clients)
    return BatchPlan(
        index=np.zeros((*shape, width), np.int64),
        size=np.zeros(shape, np.int64),
        epoch_end=np.zeros(shape, bool),
        num_batches=np.zeros(shape, np.int64),
        draws=np.zeros((*shape, width, num_draws), np.float32) if num_draws else None,
        keys=np.zeros(shape, np.int64),
    )


@dataclass(frozen=True)
class _Epoch:
    """The batches of a client in one epoch, `[batches, ...]` of the columns of a `BatchPlan`."""

    index: np.ndarray
    size: np.ndarray
    epoch_end: np.ndarray
    draws: np.ndarray | None
    keys: np.ndarray


def _draw_epoch(
    part: np.ndarray, count: int, batch_size: int, width: int, num_draws: int,
    generator_of: Callable[[str, int], np.random.Generator], epoch: int,
) -> _Epoch:  # fmt: skip
    """Draws `count` batches of a client, padded to `width`, by `generator_of` a purpose and the epoch."""
    used = min(len(part), count * batch_size)
    order = generator_of("order", epoch).permutation(len(part))[:used]
    padded = np.pad(part[order], (0, count * width - used))
    numbers = np.arange(count)
    draws = None
    if num_draws:
        draws = generator_of("augment", epoch).random((count, width, num_draws))
    return _Epoch(
        index=padded.reshape(count, width),
        size=np.clip(used - batch_size * numbers, 0, batch_size),
        epoch_end=numbers == count - 1,
        draws=draws,
        keys=generator_of("dropout", epoch).integers(2**63, size=count),
    )
