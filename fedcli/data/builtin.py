"""Data sets that need no network: scikit-learn's digits, as they are and rendered, and pieces of its photographs.

Everything random comes from fixed seeds. Both sets of digits divide them into training and test part alike.
"""

from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedcli.data.files import Arrays, divided

DOMAINS = ("plain", "inverted", "photo", "font")
SIZE = 16  # pixels, of the rendered digits and of the pieces of photographs
NUM_PHOTOS = (2000, 200)  # pieces to train and to test
TYPEFACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmb10", "cmss10", "cmtt10",
)  # fmt: skip
CANVAS = 64  # pixels, on which a digit of a typeface is drawn before it is made small


def digits() -> Arrays:
    """The 1,797 digits, 8 x 8, grey, in the form of `fedcli.data.files`."""
    images, labels = _handwritten()
    return divided(_held_out(labels), x=images[..., None], y=labels) | {"class_names": np.arange(10).astype(str)}


def digit_domains() -> Arrays:
    """The same digits, 16 x 16, in colour, under the renderings `DOMAINS`, in the form of `fedcli.data.files`.

    Plain; inverted; as a difference from photographs; and, for each digit, one of its class drawn from a typeface.
    A digit is in the training part of all domains or in the test part of all.
    """
    small, labels = _handwritten()
    plain = np.stack([Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for image in small])
    plain, font = (np.repeat(images[..., None], 3, axis=3) for images in (plain, _drawn(labels)))
    photo = np.abs(_photo_crops(len(labels)).astype(np.int16) - plain).astype(np.uint8)
    x, domain = np.concatenate([plain, 255 - plain, photo, font]), np.repeat(np.arange(4), len(labels))
    names = {"class_names": np.arange(10).astype(str), "domain_names": np.array(DOMAINS)}
    return divided(np.tile(_held_out(labels), 4), x=x, y=np.tile(labels, 4), domain=domain) | names


def photos() -> Arrays:
    """Unlabelled public images: square pieces of scikit-learn's photographs, 16 x 16, in colour.

    Their sides are 16 to 160 pixels of the photograph, uniform in the logarithm. All have the one class `photo`.
    """
    rng, pieces = np.random.default_rng(3), []
    sources = [Image.fromarray(photo) for photo in _photographs()]
    for _ in range(sum(NUM_PHOTOS)):
        photo, side = sources[rng.integers(len(sources))], round(SIZE * 10 ** rng.uniform())
        left, top = (int(rng.integers(length - side + 1)) for length in photo.size)
        box = (left, top, left + side, top + side)
        pieces.append(np.asarray(photo.resize((SIZE, SIZE), Image.Resampling.BOX, box=box)))
    test, y = np.arange(len(pieces)) >= NUM_PHOTOS[0], np.zeros(len(pieces), np.int64)
    return divided(test, x=np.stack(pieces), y=y) | {"class_names": np.array(["photo"])}


def blended(images: np.ndarray, seed: int) -> np.ndarray:
    """Grey images uint8 `[N, size, size]` as the difference |piece - image| `[N, size, size, 3]` from random pieces of
    scikit-learn's photographs, which the seed chooses.
    """
    sources, size, rng = _photographs(), images.shape[1], np.random.default_rng(seed)
    number = rng.integers(len(sources), size=len(images))
    top, left = (rng.integers(length - size + 1, size=len(images)) for length in sources.shape[1:3])
    rows, columns = (start[:, None] + np.arange(size) for start in (top, left))
    pieces = sources[number[:, None, None], rows[:, :, None], columns[:, None, :]]
    return np.where(pieces > images[..., None], pieces - images[..., None], images[..., None] - pieces)


def _of_scikit_learn(file: str) -> Path:
    """Where a file of scikit-learn's data sets is; importing what reads them would take two seconds."""
    return Path(find_spec("sklearn").origin).parent / "datasets" / file


def _handwritten() -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 `[1797, 8, 8]`, bright on dark, and labels `[1797]`."""
    table = np.loadtxt(_of_scikit_learn("data/digits.csv.gz"), np.int64, delimiter=",")  # 64 pixels and the label
    images, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1].copy()
    return ((images * 255 + 8) // 16).astype(np.uint8), labels  # from 0..16, rounded


def _photographs() -> np.ndarray:
    """scikit-learn's two photographs, uint8 `[2, 427, 640, 3]`."""
    return np.stack([np.asarray(Image.open(_of_scikit_learn(f"images/{name}.jpg"))) for name in ("china", "flower")])


def _held_out(labels: np.ndarray) -> np.ndarray:
    """Whether each digit is in the test part, bool `[N]`: a random fifth of each class."""
    rng, test = np.random.default_rng(0), np.zeros(len(labels), bool)
    for label in range(10):
        members = rng.permutation(np.flatnonzero(labels == label))
        test[members[: round(len(members) / 5)]] = True
    return test


def _photo_crops(count: int) -> np.ndarray:
    """Random crops `[count, 16, 16, 3]` of scikit-learn's photographs at a third of their size."""
    photos = [np.asarray(Image.fromarray(photo).resize((213, 142), Image.Resampling.BOX)) for photo in _photographs()]
    rng, crops = np.random.default_rng(1), []
    for _ in range(count):
        photo = photos[rng.integers(len(photos))]
        top, left = rng.integers(photo.shape[0] - SIZE + 1), rng.integers(photo.shape[1] - SIZE + 1)
        crops.append(photo[top : top + SIZE, left : left + SIZE])
    return np.stack(crops)


def _drawn(labels: np.ndarray) -> np.ndarray:
    """A digit of each label `[N, 16, 16]`, bright on dark, from a random typeface, size, angle and place."""
    import matplotlib  # late: it takes a second

    folder, fonts = Path(matplotlib.get_data_path(), "fonts", "ttf"), []
    for name, size in product(TYPEFACES, (52, 60, 68)):
        fonts.append(ImageFont.truetype(str(folder / f"{name}.ttf"), size, layout_engine=ImageFont.Layout.BASIC))
    rng, images = np.random.default_rng(2), []
    for label in labels:
        canvas = Image.new("L", (CANVAS, CANVAS))
        center = CANVAS / 2 + rng.uniform(-4, 4, 2)
        font = fonts[rng.integers(len(fonts))]
        ImageDraw.Draw(canvas).text(tuple(center), str(label), fill=255, font=font, anchor="mm")
        turned = canvas.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR)
        images.append(np.asarray(turned.resize((SIZE, SIZE), Image.Resampling.BOX)))
    return np.stack(images)
