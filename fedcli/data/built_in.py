"""The data sets that need no files: scikit-learn's digits, as they are and in four domains, and its photographs.

Draws come from fixed seeds.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedcli.data.image_arrays import Columns, first_of_each
from fedcli.errors import UserError

SIZE = 16  # pixels, of the rendered digits and of the pieces of photographs
TYPEFACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmb10", "cmss10", "cmtt10",
)  # fmt: skip
CANVAS = 64  # pixels, of a digit of a typeface before it is made small


@cache
def digits() -> Columns:
    """Returns the columns of the 1,797 digits, 8 x 8, grey."""
    written = _load_handwritten()
    return {"x": written.images[..., None], "y": written.labels, "test": written.test}


@cache
def digit_domains() -> Columns:
    """Returns the columns of the same digits, 16 x 16, in colour, in four domains, with the same test split.

    Plain; inverted; as a difference from crops of photographs; and, for each digit, one of its class in a typeface.
    """
    written = _load_handwritten()
    labels = written.labels
    larger = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for image in written.images]
    plain = _repeat_channels(np.stack([np.asarray(image) for image in larger]))
    font = _repeat_channels(_draw_typeset(labels))
    photos = [np.asarray(photo.resize((213, 142), Image.Resampling.BOX)) for photo in _load_photographs()]
    rng = np.random.default_rng(1)
    crops = []
    for _ in labels:
        photo = photos[rng.integers(len(photos))]
        height, width, _ = photo.shape
        top = rng.integers(height - SIZE + 1)
        left = rng.integers(width - SIZE + 1)
        crops.append(photo[top : top + SIZE, left : left + SIZE])
    photo = np.abs(np.stack(crops).astype(np.int16) - plain).astype(np.uint8)
    return {
        "x": np.concatenate([plain, 255 - plain, photo, font]),
        "y": np.tile(labels, 4),
        "domain": np.repeat(np.arange(4), len(labels)),
        "test": np.tile(written.test, 4),
    }


def _repeat_channels(images: np.ndarray) -> np.ndarray:
    """Grey images `[N, H, W]` with three channels, `[N, H, W, 3]`."""
    return np.repeat(images[..., None], 3, axis=3)


@cache
def photos() -> Columns:
    """Returns the columns of unlabelled images: square pieces of scikit-learn's photographs, 16 x 16, in colour.

    Their sides are 16 to 160 pixels of the photograph, uniform in the logarithm.
    """
    rng = np.random.default_rng(3)
    sources = _load_photographs()
    pieces = []
    for _ in range(2200):
        photo = sources[rng.integers(len(sources))]
        side = round(SIZE * 10 ** rng.uniform())
        width, height = photo.size
        left = int(rng.integers(width - side + 1))
        top = int(rng.integers(height - side + 1))
        box = (left, top, left + side, top + side)
        pieces.append(np.asarray(photo.resize((SIZE, SIZE), Image.Resampling.BOX, box)))
    return {"x": np.stack(pieces), "y": np.zeros(2200, np.int64), "test": np.arange(2200) >= 2000}


def _find_scikit_learn_data() -> Path:
    """Returns the folder of scikit-learn's data; importing what reads them would take two seconds."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError("scikit-learn is not installed (got no package sklearn); install fedcli anew.")
    return Path(spec.origin).parent / "datasets"


class _Handwritten(NamedTuple):
    """scikit-learn's digits."""

    images: np.ndarray  # uint8 [1797, 8, 8], bright on dark
    labels: np.ndarray  # [1797]
    test: np.ndarray  # [1797] bool, whether each is in the test split, a fifth


def _load_handwritten() -> _Handwritten:
    table = np.loadtxt(
        _find_scikit_learn_data() / "data/digits.csv.gz", np.int64, delimiter=","
    )  # 64 pixels and the label
    images = table[:, :-1].reshape(-1, 8, 8)  # from 0 to 16
    labels = table[:, -1].copy()
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(np.flatnonzero(labels == label)) for label in range(10)])
    rounded = (images * 255 + 8) // 16
    return _Handwritten(rounded.astype(np.uint8), labels, first_of_each(order, labels))


def _load_photographs() -> list[Image.Image]:
    """scikit-learn's two photographs, 640 x 427, in colour."""
    folder = _find_scikit_learn_data() / "images"
    return [Image.open(folder / "china.jpg"), Image.open(folder / "flower.jpg")]


def _draw_typeset(labels: np.ndarray) -> np.ndarray:
    """Returns a digit of each label `[N, 16, 16]`, bright on dark, from a random typeface, size, angle and place."""
    import matplotlib  # late: it takes a second

    fonts = []
    for name in TYPEFACES:
        file = f"{matplotlib.get_data_path()}/fonts/ttf/{name}.ttf"
        for size in (52, 60, 68):
            fonts.append(ImageFont.truetype(file, size, layout_engine=ImageFont.Layout.BASIC))
    rng = np.random.default_rng(2)
    images = []
    for label in labels:
        canvas = Image.new("L", (CANVAS, CANVAS))
        center = CANVAS / 2 + rng.uniform(-4, 4, 2)
        font = fonts[rng.integers(len(fonts))]
        ImageDraw.Draw(canvas).text(tuple(center), str(label), fill=255, font=font, anchor="mm")
        turned = canvas.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR)
        images.append(np.asarray(turned.resize((SIZE, SIZE), Image.Resampling.BOX)))
    return np.stack(images)
