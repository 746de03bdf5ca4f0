"""What a round draws at random: the order of batches, augmentation and dropout.

Every draw is keyed by `(seed, round, client, purpose)`, and depends neither on the method nor on which clients train
together or in which order.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli.core.augment import augment


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


def generator(seed: int, *key: int | str) -> np.random.Generator:
    """Makes the random generator of one purpose, as `generator(seed, round, client, "order", epoch)`."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else int(part) for part in key]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words])))


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
    def steps(self) -> np.ndarray:
        """Returns the number of local steps of each client, [K]."""
        return (self.size > 0).sum(0)


def plan_batches(  # noqa: PLR0913  # all that a batch depends on, of which nothing may be hidden
    parts: Sequence[np.ndarray], client_ids: Sequence[int] | np.ndarray, seed: int, round: int, epochs: range,
    batch_size: int, drop_last: bool, num_draws: int,
) -> BatchPlan:  # fmt: skip
    """Draws the batches of a cohort; T is the most steps of a client, and may be 0.

    `parts` are each client's positions in the training set, `epochs` the local epochs to draw. If `drop_last`, an
    epoch's last batch is left out where it is not full. An image's augmentation needs `num_draws`, 0 without one.
    """
    counts = [len(part) // batch_size if drop_last else math.ceil(len(part) / batch_size) for part in parts]
    num_clients = len(parts)
    steps = max(counts, default=0) * len(epochs)
    width = min(batch_size, max(4096, *map(len, parts)))  # very large batches are padded to the largest client's data
    index = np.zeros((steps, num_clients, width), np.int64)
    size = np.zeros((steps, num_clients), np.int64)
    epoch_end = np.zeros((steps, num_clients), bool)
    draws = np.zeros((steps, num_clients, width, num_draws), np.float32) if num_draws else None
    keys = np.zeros((steps, num_clients), np.int64)
    for k, (part, client, count) in enumerate(zip(parts, client_ids, counts, strict=True)):
        used = min(len(part), count * batch_size)
        for e, epoch in enumerate(epochs):
            rows = slice(e * count, (e + 1) * count)
            order = generator(seed, round, client, "order", epoch).permutation(len(part))[:used]
            index[rows, k] = np.pad(part[order], (0, count * width - used)).reshape(count, width)
            size[rows, k] = np.clip(used - batch_size * np.arange(count), 0, batch_size)
            epoch_end[rows.stop - 1 : rows.stop, k] = count > 0
            keys[rows, k] = generator(seed, round, client, "dropout", epoch).integers(2**63, size=count)
            if draws is not None:
                draws[rows, k] = generator(seed, round, client, "augment", epoch).random((count, width, num_draws))
    return BatchPlan(index, size, epoch_end, np.tile(counts, (steps, 1)), draws, keys)


@dataclass(frozen=True)
class Transform:
    """Turns uint8 images into what a network is given."""

    mean: tuple[float, ...]  # per channel, of images in [0, 1]
    std: tuple[float, ...]
    augmentation: str  # a key of `fedcli.core.augment.NUM_DRAWS`
    dtype: torch.dtype

    def __call__(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Normalises uint8 images `[..., channels, H, W]`, augmented by draws `[..., NUM_DRAWS]` if given."""
        x = images.to(self.dtype) / 255
        if draws is not None:
            x = augment(x.flatten(0, -4), draws.flatten(0, -2), self.augmentation).reshape(x.shape)
        return (x - _per_channel(self.mean, x.dtype, x.device)) / _per_channel(self.std, x.dtype, x.device)


@cache
def _per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a tensor `[channels, 1, 1]` once, as making one from numbers waits for a CUDA device."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]
