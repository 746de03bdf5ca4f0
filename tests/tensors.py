"""Makes tensors: of given values in float64, and random ones that are the same in every call."""

import torch


def doubles(values):
    """Returns values as a tensor of type float64."""
    return torch.tensor(values, dtype=torch.float64)


def image_batch(num_images, channels=3, size=32, seed=0, dtype=torch.float64):
    """Returns a batch of random images of normal numbers, [B, C, H, W]."""
    return torch.randn(num_images, channels, size, size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=0):
    """Returns normal numbers of type float64 in this shape, which depend on the seed alone."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
