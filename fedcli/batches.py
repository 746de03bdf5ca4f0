"""What a round draws at random, as tensors: cohorts, batch orders and augmentation.

Every draw is keyed by `(seed, round, client, purpose)`, so it depends neither on the method, nor on how many clients
are trained together, nor on their order.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

AUGMENTATIONS = ("none", "crop-flip", "crop-flip-rotate")
CROP_PADDING = 4  # pixels
ROTATION = 15.0  # degrees, each way
NUM_DRAWS = 4  # per image: horizontal shift, vertical shift, flip, angle


class Batch(NamedTuple):
    """One minibatch of one client (stacked: every field but `lr` has the client axis first)."""

    x: Tensor  # [B, channels, H, W], normalised
    y: Tensor  # [B]
    mask: Tensor | None  # [B], False for padding; None when every sample is real
    epoch_end: Tensor  # scalar bool, the last batch of an epoch
    num_batches: Tensor  # scalar, batches in an epoch of this client
    lr: Tensor  # scalar, learning rate of this round


def generator(seed: int, *key: int | str) -> np.random.Generator:
    """The random generator of one purpose, for example `generator(seed, round, client, "order", epoch)`."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else int(part) for part in key]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words])))


def draw_cohort(seed: int, round: int, num_clients: int, cohort_size: int) -> np.ndarray:
    """The ids of a round's clients, ascending, drawn without replacement."""
    drawn = generator(seed, round, "cohort").choice(num_clients, cohort_size, replace=False)
    return np.sort(drawn)


@dataclass(frozen=True)
class Plan:
    """The batches of K clients over T local steps, ragged clients padded (host side, numpy)."""

    index: np.ndarray  # [T, K, B] positions in the training set; 0 where padded
    size: np.ndarray  # [T, K] real samples in the batch; 0 once a client has run out of data
    epoch_end: np.ndarray  # [T, K] bool
    num_batches: np.ndarray  # [K]
    draws: np.ndarray | None  # [T, K, B, NUM_DRAWS] in [0, 1), for augmentation

    @property
    def steps(self) -> np.ndarray:
        """Local steps of each client, [K]."""
        return (self.size > 0).sum(0)


def plan_batches(
    parts: Sequence[np.ndarray],
    client_ids: Sequence[int],
    seed: int,
    round: int,
    epochs: range,
    batch_size: int,
    drop_last: bool,
    augment: bool,
) -> Plan:
    """Draws the batches of a cohort.

    Args:
        parts: Training examples of each client, positions in the training set.
        client_ids: Their ids, which key the draws.
        seed: Seed of the run.
        round: The round, from 0.
        epochs: Which local epochs of the round; each has its own draws, so `range(0, 3)` and `range(3, 6)` together
            are `range(0, 6)`.
        batch_size: B.
        drop_last: Leave out an epoch's last batch where it is not full.
        augment: Whether the images are augmented, and so need draws.

    Returns:
        The plan; T is the largest number of steps of any client and may be 0.
    """
    counts = [len(part) // batch_size if drop_last else -(-len(part) // batch_size) for part in parts]
    steps, num_clients = max(counts, default=0) * len(epochs), len(parts)
    index = np.zeros((steps, num_clients, batch_size), np.int64)
    size = np.zeros((steps, num_clients), np.int64)
    epoch_end = np.zeros((steps, num_clients), bool)
    draws = np.zeros((steps, num_clients, batch_size, NUM_DRAWS), np.float32) if augment else None
    for k, (part, client, count) in enumerate(zip(parts, client_ids, counts, strict=True)):
        used = min(len(part), count * batch_size)
        for e, epoch in enumerate(epochs):
            rows = slice(e * count, (e + 1) * count)
            order = generator(seed, round, client, "order", epoch).permutation(len(part))[:used]
            padded = np.zeros(count * batch_size, np.int64)
            padded[:used] = part[order]
            index[rows, k] = padded.reshape(count, batch_size)
            size[rows, k] = np.clip(used - batch_size * np.arange(count), 0, batch_size)
            epoch_end[rows.stop - 1 : rows.stop, k] = count > 0
            if draws is not None:
                uniform = generator(seed, round, client, "augment", epoch).random((count, batch_size, NUM_DRAWS))
                draws[rows, k] = uniform.astype(np.float32)
    return Plan(index, size, epoch_end, np.array(counts), draws)


def augment_images(images: Tensor, draws: Tensor, rotate: bool) -> Tensor:
    """Images shifted by up to 4 pixels, mirrored half of the time and, if asked, turned by up to 15 degrees.

    What moves in from outside is black, as in a crop of the padded image that is then turned.

    Args:
        images: `[N, channels, H, W]` in [0, 1].
        draws: `[N, NUM_DRAWS]`, uniform in [0, 1).
        rotate: Whether to turn them.

    Returns:
        Images of the same shape; pixels are moved, never blended (nearest neighbour).
    """
    n, _, height, width = images.shape
    steps = 2 * CROP_PADDING + 1
    shift = (draws[:, :2].double() * steps).floor().long() - CROP_PADDING  # [N, 2] pixels
    mirrored = draws[:, 2, None, None] < 0.5
    angle = torch.deg2rad((2 * draws[:, 3].double() - 1) * (ROTATION if rotate else 0.0))
    # In float64: where a pixel comes from must not depend on the precision of the run.
    row = (torch.arange(height, device=images.device).double() - (height - 1) / 2)[None, :, None]
    column = (torch.arange(width, device=images.device).double() - (width - 1) / 2)[None, None, :]
    cosine, sine = angle.cos()[:, None, None], angle.sin()[:, None, None]
    # Where each pixel of the turned image looks in the mirrored one, then in the crop, then in the image: [N, H, W].
    source_row = (cosine * row - sine * column + (height - 1) / 2).round().long()
    source_column = (sine * row + cosine * column + (width - 1) / 2).round().long()
    inside = (source_row >= 0) & (source_row < height) & (source_column >= 0) & (source_column < width)
    source_row = source_row + shift[:, 1, None, None]
    source_column = torch.where(mirrored, width - 1 - source_column, source_column) + shift[:, 0, None, None]
    inside &= (source_row >= 0) & (source_row < height) & (source_column >= 0) & (source_column < width)
    flat = source_row.clamp(0, height - 1) * width + source_column.clamp(0, width - 1)
    moved = images.flatten(2).gather(2, flat.reshape(n, 1, -1).expand(-1, images.shape[1], -1))
    return torch.where(inside[:, None], moved.reshape(images.shape), 0.0)


@dataclass(frozen=True)
class Transform:
    """From uint8 images to what a network is given."""

    mean: tuple[float, ...]  # per channel, of images in [0, 1]
    std: tuple[float, ...]
    augmentation: str
    dtype: torch.dtype

    def __call__(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Normalised images.

        Args:
            images: uint8 `[..., channels, H, W]`.
            draws: `[..., NUM_DRAWS]`, uniform in [0, 1); None leaves the images as they are.

        Returns:
            `[..., channels, H, W]` in the precision of the run.
        """
        x = images.to(self.dtype) / 255
        if draws is not None and self.augmentation != "none":
            rotate = self.augmentation == "crop-flip-rotate"
            x = augment_images(x.flatten(0, -4), draws.flatten(0, -2), rotate).reshape(x.shape)
        mean = torch.tensor(self.mean, dtype=self.dtype, device=x.device)[:, None, None]
        std = torch.tensor(self.std, dtype=self.dtype, device=x.device)[:, None, None]
        return (x - mean) / std
