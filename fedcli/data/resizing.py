"""Images in another size."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

RESIZED_AT_ONCE = 4096  # images that are made float at once


def resize(images: Tensor, size: int) -> Tensor:
    """Resizes uint8 images `[N, channels, H, W]` to `size` x `size` pixels: bilinear, antialiased, rounded."""
    if images.shape[2:] == (size, size):
        return images
    portions = []
    for portion in images.split(RESIZED_AT_ONCE):
        small = F.interpolate(portion.float(), (size, size), mode="bilinear", antialias=True)
        portions.append(small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(portions)


def resize_rows(images: np.ndarray, size: int) -> np.ndarray:
    """Resizes uint8 images `[N, H, W, channels]`, as the columns of sets have them, see `resize`."""
    channels_first = torch.from_numpy(images.transpose(0, 3, 1, 2))
    return resize(channels_first, size).numpy().transpose(0, 2, 3, 1)
