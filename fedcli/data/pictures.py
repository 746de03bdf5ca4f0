"""Image files as pixels."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

from fedcli.data.source import Source
from fedcli.errors import UserError, first_line
from fedcli.reading import check_size

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # no others: for an EPS Pillow starts Ghostscript
LISTED = 20  # names in a message; of more files the rest is counted


def stack_pictures(source: Source, count: int, pictures: Iterable[tuple[str, Path | BinaryIO]]) -> np.ndarray:
    """Returns the pixels uint8 `[count, H, W, 1 or 3]` of image files, each with the name by which messages call it.

    Grey images become coloured where there are coloured ones. Adds to the notes what was done to images.

    Raises:
        UserError: Some images cannot be read, or have other sizes than the first, or all are too large.
    """
    if source.size:  # at least so many, if they are grey
        check_size(count * source.size**2, source.folder)
    pixels: list[np.ndarray] = []
    changes: Counter[str] = Counter()
    broken = []
    for name, file in pictures:
        try:
            picture = _read_picture(file, source.size, changes)
        except Exception as error:  # Pillow raises about ten kinds
            broken.append(f"'{name}' ({first_line(error)})")
            continue
        pixels.append(picture)
        if picture.shape[:2] != pixels[0].shape[:2]:
            height, width = picture.shape[:2]
            fault = f"its size is {(width, height)}, not that of the others"
            raise UserError(f"'{name}' cannot be used ({fault}); import with --size N.")
        check_size(count * picture.size, source.folder)
    if broken:
        raise UserError(
            f"{len(broken)} of {count} images cannot be read (got {_listed(broken)}); each must be an image of 8 bits "
            f"a channel, in {', '.join(FORMATS)}; replace or remove them."
        )
    source.notes.extend(f"{text} in {number:,} of {count:,} images" for text, number in sorted(changes.items()))
    return np.stack(np.broadcast_arrays(*pixels))


def _read_picture(picture: Path | BinaryIO, size: int | None, changes: Counter[str]) -> np.ndarray:
    """Returns an image file as people see it, uint8 `[H, W, 1 or 3]`; adds to `changes` what was done to it.

    It is turned as its EXIF data say, and its transparent places are white.
    """
    with Image.open(picture, formats=FORMATS) as file:
        if file.mode.startswith(("I", "F")):
            raise ValueError(f"its pixels are of mode {file.mode}")
        num_frames = getattr(file, "n_frames", 1)  # most formats have no such attribute
        if file.format != "MPO" and num_frames > 1:  # an MPO is a photograph and its previews
            raise ValueError(f"it has {num_frames} frames")
        image: Image.Image = file
        if file.getexif().get(ExifTags.Base.Orientation) in range(2, 9):  # 1 is upright, and others mean nothing
            image = ImageOps.exif_transpose(file)
            changes["the EXIF orientation was applied"] += 1
        is_grey = image.mode in ("1", "L", "LA")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            if image.getchannel("A").getextrema() != (255, 255):
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
                changes["the alpha channel was composed over white"] += 1
        image = image.convert("L" if is_grey else "RGB")
    if size:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.atleast_3d(np.asarray(image))


def _listed(names: list[str]) -> str:
    """Returns the first of some names, and how many more there are."""
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
