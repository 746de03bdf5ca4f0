"""Numbers in float64, and numbers and images that are the same in every call."""

import torch


def doubles(values):
    """These values in float64."""
    return torch.tensor(values, dtype=torch.float64)


def image_batch(batch, channels=3, size=32, seed=0, dtype=torch.float64):
    """A batch of images of normal numbers, [B, C, H, W]."""
    return torch.randn(batch, channels, size, size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=0):
    """Normal numbers in float64, the same in every call."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
