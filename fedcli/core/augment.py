"""Augments images by random draws that come as arguments.

An augmentation is a pure function of images in [0, 1], which stay there unrounded, and of uniform draws in [0, 1),
`NUM_DRAWS` of them for each image, so that it is the same on every device.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

CROP_PADDING = 4  # pixels
ROTATION = 15.0  # degrees, each way
TRIES = 10  # draws of a crop's shape before the whole image is taken
LEAST_AREA = 0.2  # of a crop, as a share of the image's
RATIOS = (3 / 4, 4 / 3)  # of a crop's width to its height, from the first to the second
JITTER_SHARE = 0.8  # how many images change their colours
JITTER = 0.4  # largest change of brightness, contrast and saturation, as a share
HUE_TURN = 0.1  # largest turn of the hue, each way, as a share of the colour circle
GREY_SHARE = 0.2  # how many images turn grey

# What an image's draws decide, and how many there are of each, in their order.
_CROP_FLIP = {"across": 1, "down": 1, "flip": 1, "turn": 1}
_RESIZED_CROP = {
    "shapes": 2 * TRIES,  # area and ratio of the rectangle at each try
    "top": 1,
    "left": 1,
    "flip": 1,
}
_COLOUR = {
    "jitter": 1,  # whether the colours change
    "keys": 4,  # their order is that of the four changes
    "strengths": 3,  # of brightness, contrast and saturation
    "hue": 1,
    "grey": 1,  # whether the image turns grey
}
NUM_DRAWS = {
    "none": 0,
    "crop-flip": sum(_CROP_FLIP.values()),
    "crop-flip-rotate": sum(_CROP_FLIP.values()),
    "resized-crop": sum(_RESIZED_CROP.values()),
    "resized-crop-colour": sum(_RESIZED_CROP.values()) + sum(_COLOUR.values()),
}


def augment(images: Tensor, draws: Tensor, augmentation: str) -> Tensor:
    """Augments images `[N, channels, H, W]` by draws `[N, NUM_DRAWS[augmentation]]`."""
    if augmentation == "none":
        return images
    if augmentation in ("crop-flip", "crop-flip-rotate"):
        return crop_flip(images, draws, rotate=augmentation == "crop-flip-rotate")
    if augmentation == "resized-crop":
        return resized_crop(images, draws)
    if augmentation == "resized-crop-colour":
        num_of_crop = NUM_DRAWS["resized-crop"]
        cropped = resized_crop(images, draws[:, :num_of_crop])
        return colour_jitter(cropped, draws[:, num_of_crop:])
    raise ValueError(f"unknown augmentation '{augmentation}'")


def _split_draws(draws: Tensor, counts: dict[str, int]) -> dict[str, Tensor]:
    """Divides draws `[N, D, ...]` by what they decide: `[N, count, ...]` each."""
    columns = draws.split(list(counts.values()), dim=1)
    return dict(zip(counts, columns, strict=True))


def crop_flip(images: Tensor, draws: Tensor, rotate: bool) -> Tensor:
    """Shifts images by up to 4 pixels, mirrors half of them and, if asked, turns them by up to 15 degrees.

    What moves in from outside is black, as in a crop of the padded image that is then turned. Pixels are moved, never
    blended (nearest neighbour). Images are `[N, channels, H, W]`, draws `[N, 4]`.
    """
    n, channels, height, width = images.shape
    padded = F.pad(images, [CROP_PADDING, CROP_PADDING + 1] * 2)  # + 1: a draw below 1 may be 1 in float32
    draw = _split_draws(draws[..., None], _CROP_FLIP)  # [N, 1, 1] each
    shift_across = (draw["across"].double() * (2 * CROP_PADDING + 1)).floor().long()  # pixels of the padded image
    shift_down = (draw["down"].double() * (2 * CROP_PADDING + 1)).floor().long()
    largest_turn = ROTATION if rotate else 0.0
    angle = torch.deg2rad((2 * draw["turn"].double() - 1) * largest_turn)
    # In float64: where a pixel comes from must not depend on the precision of the run.
    row = (torch.arange(height, device=images.device).double() - (height - 1) / 2)[None, :, None]
    column = (torch.arange(width, device=images.device).double() - (width - 1) / 2)[None, None, :]
    cosine = angle.cos()
    sine = angle.sin()
    # Where each pixel of the turned image looks in the mirrored one, then in the padded image: [N, H, W].
    source_row = (cosine * row - sine * column + (height - 1) / 2).round().long()
    source_column = (sine * row + cosine * column + (width - 1) / 2).round().long()
    inside = (source_row >= 0) & (source_row < height) & (source_column >= 0) & (source_column < width)
    source_row = source_row.clamp(0, height - 1)
    source_column = source_column.clamp(0, width - 1)
    source_column = torch.where(draw["flip"] < 0.5, width - 1 - source_column, source_column)
    padded_width = padded.shape[-1]
    source = (source_row + shift_down) * padded_width + source_column + shift_across  # in the flattened padded image
    moved = padded.flatten(2).gather(2, source.reshape(n, 1, -1).expand(-1, channels, -1))
    return torch.where(inside[:, None], moved.reshape(images.shape), 0.0)


def resized_crop(images: Tensor, draws: Tensor) -> Tensor:
    """Enlarges a random rectangle of each image to the image's size (bilinear), and mirrors half of them.

    The rectangle is torchvision's `RandomResizedCrop(scale=(0.2, 1), ratio=(3 / 4, 4 / 3))`: share of the area uniform,
    ratio log-uniform, the first of ten tries that fits. Images are `[N, channels, H, W]`, draws `[N, 23]`.
    """
    height, width = images.shape[2:]
    draw = _split_draws(draws, _RESIZED_CROP)
    area_draws, ratio_draws = draw["shapes"].double().unflatten(1, (TRIES, 2)).unbind(2)  # [N, TRIES] each
    area = height * width * (LEAST_AREA + (1 - LEAST_AREA) * area_draws)
    lowest = math.log(RATIOS[0])
    highest = math.log(RATIOS[1])
    ratio = (lowest + (highest - lowest) * ratio_draws).exp()
    columns = (area * ratio).sqrt().round()
    rows = (area / ratio).sqrt().round()
    fits = (columns <= width) & (rows <= height) & (columns > 0) & (rows > 0)
    first = fits.int().argmax(1, keepdim=True)
    any_fits = fits.any(1)
    rows = torch.where(any_fits, rows.gather(1, first)[:, 0], height)
    columns = torch.where(any_fits, columns.gather(1, first)[:, 0], width)
    # At most the last place: a draw below 1 may be 1 in float32.
    top = torch.minimum((draw["top"][:, 0].double() * (height - rows + 1)).floor(), height - rows)
    left = torch.minimum((draw["left"][:, 0].double() * (width - columns + 1)).floor(), width - columns)
    down = _make_interpolation(top, rows, height)
    across = _make_interpolation(left, columns, width)
    across = torch.where(draw["flip"][..., None] < 0.5, across.flip(1), across)
    with _without_tf32():
        return down.to(images.dtype)[:, None] @ images @ across.to(images.dtype).mT[:, None]


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Multiplies with all bits of float32: pixels are data, also in a run whose networks multiply with fewer."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _make_interpolation(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Returns weights `[N, size, size]` of input pixels in each output pixel, where `length` pixels become `size`."""
    pixels = torch.arange(size, device=start.device).double()
    # Centre of each output pixel in the crop; beyond the middle of its outermost pixels, these are repeated.
    source = ((pixels + 0.5) * length[:, None] / size - 0.5).clamp(min=0)
    source = start[:, None] + torch.minimum(source, length[:, None] - 1)
    return (1 - (source[..., None] - pixels).abs()).clamp(min=0)


def colour_jitter(images: Tensor, draws: Tensor) -> Tensor:
    """Changes the colours of images 8 times in 10, and then turns them grey 2 times in 10.

    torchvision's `RandomApply([ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8)` and `RandomGrayscale(0.2)`: brightness,
    contrast, saturation and hue, in a random order. Images are `[N, 1 or 3, H, W]`, draws `[N, 10]`; grey stays grey.
    """
    colour = images.expand(-1, 3, -1, -1)
    draw = _split_draws(draws.double(), _COLOUR)
    order = draw["keys"].argsort(1)  # [N, 4], the number of the change at each place
    factors = (1 + JITTER * (2 * draw["strengths"] - 1)).to(images.dtype)[..., None, None, None]  # [N, 3, 1, 1, 1]
    brightness, contrast, saturation = factors.unbind(1)
    turns = (HUE_TURN * (2 * draw["hue"] - 1)).to(images.dtype)[..., None]
    image = torch.arange(len(images), device=images.device)
    changed = colour
    for place in range(4):
        grey = _grey(changed)
        candidates = [
            _blend(changed, torch.zeros_like(grey), brightness),
            _blend(changed, grey.mean((1, 2, 3), keepdim=True), contrast),
            _blend(changed, grey, saturation),
            _turn_hue(changed, turns),
        ]
        changed = torch.stack(candidates)[order[:, place], image]
    colour = torch.where(draw["jitter"][..., None, None] < JITTER_SHARE, changed, colour)
    colour = torch.where(draw["grey"][..., None, None] < GREY_SHARE, _grey(colour), colour)
    channels = images.shape[1]
    return colour[:, :channels]


def _grey(images: Tensor) -> Tensor:
    """Returns the luminance `[N, 1, H, W]` of images `[N, 3, H, W]`."""
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (factor * images + (1 - factor) * other).clamp(0, 1)


def _turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Moves the hue of images `[N, 3, H, W]` by `turns` `[N, 1, 1]` of the colour circle."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    divisor = torch.where(chroma > 0, chroma, 1)  # of a grey pixel, whose hue is of no account
    if_red = (green - blue) / divisor
    if_green = (blue - red) / divisor + 2
    if_blue = (red - green) / divisor + 4
    if_not_red = torch.where(value == green, if_green, if_blue)
    hue = torch.where(value == red, if_red, if_not_red)  # in sixths of the circle
    turned = []
    for sixths in (5, 3, 1):  # of red, green and blue
        distance = (hue + 6 * turns + sixths) % 6
        taken = torch.minimum(distance, 4 - distance).clamp(0, 1)  # share of the chroma that this channel lacks
        turned.append(value - chroma * taken)
    return torch.stack(turned, 1)


@dataclass(frozen=True)
class Transform:
    """Turns uint8 images into what a network is given."""

    mean: tuple[float, ...]  # per channel, of images in [0, 1]
    std: tuple[float, ...]
    augmentation: str  # a key of `NUM_DRAWS`
    dtype: torch.dtype

    def __call__(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Normalises uint8 images `[..., channels, H, W]`, augmented by draws `[..., NUM_DRAWS]` if given."""
        x = images.to(self.dtype) / 255
        if draws is not None:
            augmented = augment(x.flatten(0, -4), draws.flatten(0, -2), self.augmentation)
            x = augmented.reshape(x.shape)
        mean = _per_channel(self.mean, x.dtype, x.device)
        std = _per_channel(self.std, x.dtype, x.device)
        return (x - mean) / std


@cache
def _per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a tensor `[channels, 1, 1]` once, as making one from numbers waits for a CUDA device."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]
