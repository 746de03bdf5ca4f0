"""Names, shapes and classes of the known data sets, and how the built-in and the mixed ones are made.

Everything random comes from fixed seeds.
"""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedcli.core.draws import generator
from fedcli.data.image_arrays import NAMES_OF, Columns, first_of_each, join_rows
from fedcli.errors import UserError

SIZE = 16  # pixels, of the rendered digits and of the pieces of photographs
TYPEFACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmb10", "cmss10", "cmtt10",
)  # fmt: skip
CANVAS = 64  # pixels, of a digit of a typeface before it is made small
_RESIZED_AT_ONCE = 4096  # images that are made float at once


# Makes the columns of the known set of a name, with a function that gives those of the sets that it needs.
Maker = Callable[[str, Callable[[str], Columns]], Columns]


class Archive(NamedTuple):
    """A file in the internet with the images of a set."""

    address: str
    md5: str


class DatasetInfo(NamedTuple):
    """Shape, classes and sizes of a data set, and where its images come from."""

    channels: int
    image_size: int  # pixels, height and width
    class_names: tuple[str, ...]  # in the order of the official labels; empty texts where the files name them
    num_train: int | None = None  # None where it depends on the files
    num_test: int | None = None
    torchvision_class: str | None = None  # that downloads it
    emnist_split: str | None = None  # which of EMNIST's sets it is, as torchvision calls it
    archive: Archive | None = None  # that is downloaded where torchvision has no class
    to_import: str = ""  # files that a user brings where there is no download; images are resized to `image_size`
    domain_names: tuple[str, ...] = ()
    make: Maker | None = None
    needs: tuple[str, ...] = ()  # the sets that it is made from
    fingerprint: str = ""  # of the official images; where it is not known, the numbers below and above tell other ones
    train_counts: tuple[int, ...] = ()  # training images of each class
    test_counts: tuple[int, ...] = ()
    domain_counts: tuple[int, ...] = ()  # images of each domain, of both splits

    @property
    def is_download(self) -> bool:
        """Whether a command downloads it."""
        return self.torchvision_class is not None or self.archive is not None

    @property
    def sizes(self) -> dict[str, Any]:
        """Numbers of `train` and `test` images and of `classes`, and the `shape` (channels, H, W)."""
        shape = (self.channels, self.image_size, self.image_size)
        return {"train": self.num_train, "test": self.num_test, "classes": len(self.class_names), "shape": shape}

    def balanced(self) -> "DatasetInfo":
        """This set with as many images in each class as in every other one."""
        if self.num_train is None or self.num_test is None:
            raise ValueError("a set whose numbers of images are not known has no number for each class")
        count = len(self.class_names)
        train_counts = (self.num_train // count,) * count
        test_counts = (self.num_test // count,) * count
        return self._replace(train_counts=train_counts, test_counts=test_counts)

    def made_of(self, *subsets: "Subset") -> "DatasetInfo":
        """This set with a domain from each subset."""
        needs = tuple(dict.fromkeys(subset.source for subset in subsets))
        num_train = sum(subset.num_train for subset in subsets)
        return self._replace(num_train=num_train, make=partial(_mixture, subsets), needs=needs)


class Subset(NamedTuple):
    """What a mixture takes of a set for one of its domains: examples drawn at random, all where the number is None.

    `drawn_from` says which examples may be trained and tested on:
        splits   those of the set's own training and test split
        pooled   any to train, and all the others to test
        leaky    the first 80 % in the order of classes to train, and all to test
    """

    source: str  # name of the set
    num_train: int
    num_test: int | None = None
    domain: str | None = None  # of the source, where it has several
    drawn_from: str = "splits"


def _mixture(subsets: Sequence[Subset], name: str, load: Callable[[str], Columns]) -> Columns:
    """The columns of a known set with a domain from each subset, at its size and in colour."""
    info = KNOWN[name]
    size = info.image_size
    load_once = lru_cache(1)(load)  # one at a time: some are large
    domains = []
    for number, (subset, domain) in enumerate(zip(subsets, info.domain_names, strict=True)):
        source = load_once(subset.source)
        drawn = _draw_examples(subset, source, name, domain)
        rows = np.concatenate([drawn.train, drawn.test])
        images = resize_rows(source["x"][rows], size)
        columns = {
            "x": np.broadcast_to(images, (len(rows), size, size, 3)),
            "y": source["y"][rows],
            "domain": np.full(len(rows), number),
            "test": np.repeat([False, True], [len(drawn.train), len(drawn.test)]),
        }
        domains.append(columns)
    return join_rows(domains) | {"class_names": source["class_names"]}


class _Drawn(NamedTuple):
    """Examples of a set, by their positions in it."""

    train: np.ndarray
    test: np.ndarray


def _draw_examples(subset: Subset, source: Columns, name: str, domain: str) -> _Drawn:
    """Draws the examples of a domain of the known set `name` from the columns of its source.

    Raises:
        UserError: The source has fewer to train on than the subset needs.
    """
    rng = generator(0, "recipe", name, domain)
    rows = np.arange(len(source["y"]))
    if subset.domain is not None:
        domain_of_row = source["domain_names"][source["domain"]]
        rows = np.flatnonzero(domain_of_row == subset.domain)
    is_test = source["test"][rows]
    to_train = rows
    if subset.drawn_from == "splits":
        to_train = rows[~is_test]
    elif subset.drawn_from == "leaky":
        by_class = rows[np.argsort(source["y"][rows], kind="stable")]
        num_first = (np.arange(len(rows)) % 10 < 8).sum()
        to_train = by_class[:num_first]
    train = rng.permutation(to_train)[: subset.num_train]
    if len(train) < subset.num_train:
        need = f"'{name}' needs {subset.num_train} training images of '{subset.source}' for its domain '{domain}'"
        raise UserError(f"{need} (got {len(to_train)}); import the whole set.")
    test = rows
    if subset.drawn_from == "splits":
        test = rows[is_test]
    elif subset.drawn_from == "pooled":
        test = np.setdiff1d(rows, train)
    if subset.num_test is not None:
        test = rng.permutation(test)[: subset.num_test]
    return _Drawn(train, test)


def resize(images: Tensor, size: int) -> Tensor:
    """Resizes uint8 images `[N, channels, H, W]` to `size` x `size` pixels: bilinear, antialiased, rounded."""
    if images.shape[2:] == (size, size):
        return images
    portions = []
    for portion in images.split(_RESIZED_AT_ONCE):
        small = F.interpolate(portion.float(), (size, size), mode="bilinear", antialias=True)
        portions.append(small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(portions)


def resize_rows(images: np.ndarray, size: int) -> np.ndarray:
    """Resizes uint8 images `[N, H, W, channels]`, as the columns of sets have them, see `resize`."""
    channels_first = torch.from_numpy(images.transpose(0, 3, 1, 2))
    return resize(channels_first, size).numpy().transpose(0, 2, 3, 1)


# Built in: scikit-learn's digits and photographs.


def _built_in(read: Callable[[], Columns]) -> Maker:
    """The maker of a set that needs no other one; its columns are read once."""
    read_once = cache(read)
    return lambda name, load: read_once()


def digits() -> Columns:
    """The columns of the 1,797 digits, 8 x 8, grey."""
    written = _handwritten()
    return {"x": written.images[..., None], "y": written.labels, "test": written.test}


def digit_domains() -> Columns:
    """The columns of the same digits, 16 x 16, in colour, in four domains, with the same test split.

    Plain; inverted; as a difference from crops of photographs; and, for each digit, one of its class in a typeface.
    """
    written = _handwritten()
    labels = written.labels
    larger = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for image in written.images]
    plain = _in_colour(np.stack([np.asarray(image) for image in larger]))
    font = _in_colour(_typeset(labels))
    photos = [np.asarray(photo.resize((213, 142), Image.Resampling.BOX)) for photo in _photographs()]
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


def _in_colour(images: np.ndarray) -> np.ndarray:
    """Grey images `[N, H, W]` with three channels, `[N, H, W, 3]`."""
    return np.repeat(images[..., None], 3, axis=3)


def photos() -> Columns:
    """The columns of unlabelled images: square pieces of scikit-learn's photographs, 16 x 16, in colour.

    Their sides are 16 to 160 pixels of the photograph, uniform in the logarithm.
    """
    rng = np.random.default_rng(3)
    sources = _photographs()
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


def _scikit_learn() -> Path:
    """The folder of scikit-learn's data; importing what reads them would take two seconds."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError("scikit-learn is not installed (got no package sklearn); install fedcli anew.")
    return Path(spec.origin).parent / "datasets"


class _Handwritten(NamedTuple):
    """scikit-learn's digits."""

    images: np.ndarray  # uint8 [1797, 8, 8], bright on dark
    labels: np.ndarray  # [1797]
    test: np.ndarray  # [1797] bool, whether each is in the test split, a fifth


def _handwritten() -> _Handwritten:
    table = np.loadtxt(_scikit_learn() / "data/digits.csv.gz", np.int64, delimiter=",")  # 64 pixels and the label
    images = table[:, :-1].reshape(-1, 8, 8)  # from 0 to 16
    labels = table[:, -1].copy()
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(np.flatnonzero(labels == label)) for label in range(10)])
    rounded = (images * 255 + 8) // 16
    return _Handwritten(rounded.astype(np.uint8), labels, first_of_each(order, labels))


def _photographs() -> list[Image.Image]:
    """scikit-learn's two photographs, 640 x 427, in colour."""
    folder = _scikit_learn() / "images"
    return [Image.open(folder / "china.jpg"), Image.open(folder / "flower.jpg")]


def _typeset(labels: np.ndarray) -> np.ndarray:
    """A digit of each label `[N, 16, 16]`, bright on dark, from a random typeface, size, angle and place."""
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


def _femnist_digits(name: str, load: Callable[[str], Columns]) -> Columns:
    """FEMNIST's ten digits; nine tenths of each writer's, rounded down, are the training split."""
    source = load("femnist")
    if "writer" not in source:
        raise UserError("'femnist' does not say who wrote what (got no writers); import it from LEAF's files.")
    is_digit = source["y"] < 10
    x = source["x"][is_digit]
    y = source["y"][is_digit]
    writer = source["writer"][is_digit]
    order = generator(0, "recipe", "femnist-digits").permutation(len(y))
    order = order[np.argsort(writer[order], kind="stable")]  # by writer, random inside
    train = first_of_each(order, writer, lambda size: max(1, size * 9 // 10))
    return {"x": x, "y": y, "writer": writer, "test": ~train}


_DIGITS = tuple(string.digits)
_CHARACTERS = (*_DIGITS, *string.ascii_uppercase, *string.ascii_lowercase)
_FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_EMNIST = DatasetInfo(channels=1, image_size=28, class_names=(), torchvision_class="EMNIST")
_OFFICE = DatasetInfo(channels=3, image_size=32, class_names=(), to_import="image folders <domain>/<class>/*")

KNOWN = {
    "digits": DatasetInfo(
        channels=1, image_size=8, class_names=_DIGITS, num_train=1438, num_test=359, make=_built_in(digits),
    ),
    "digit-domains": DatasetInfo(
        channels=3, image_size=16, class_names=_DIGITS, num_train=5752, num_test=1436,
        domain_names=("plain", "inverted", "photo", "font"), make=_built_in(digit_domains),
    ),
    "photos": DatasetInfo(
        channels=3, image_size=16, class_names=("photo",), num_train=2000, num_test=200, make=_built_in(photos),
    ),
    "mnist": DatasetInfo(
        channels=1, image_size=28, class_names=_DIGITS, num_train=60_000, num_test=10_000, torchvision_class="MNIST",
        fingerprint="94a3db3da708f867",
    ),
    "fmnist": DatasetInfo(
        channels=1, image_size=28, class_names=_FASHION, num_train=60_000, num_test=10_000,
        torchvision_class="FashionMNIST", fingerprint="237126ab7af84cf2",
    ),
    "emnist-digits": _EMNIST._replace(
        class_names=_DIGITS, num_train=240_000, num_test=40_000, emnist_split="digits",
    ).balanced(),
    "emnist-letters": _EMNIST._replace(
        class_names=tuple(string.ascii_lowercase), num_train=124_800, num_test=20_800, emnist_split="letters",
    ).balanced(),
    "emnist-byclass": _EMNIST._replace(
        class_names=_CHARACTERS, num_train=697_932, num_test=116_323, emnist_split="byclass",
    ),
    "cifar10": DatasetInfo(
        channels=3, image_size=32, class_names=_CIFAR10, num_train=50_000, num_test=10_000,
        torchvision_class="CIFAR10", fingerprint="079662f783f40c00",
    ),
    "cifar100": DatasetInfo(
        channels=3, image_size=32, class_names=("",) * 100, num_train=50_000, num_test=10_000,
        torchvision_class="CIFAR100", fingerprint="478e970f870f5c96",
    ),
    "svhn": DatasetInfo(
        channels=3, image_size=32, class_names=_DIGITS, num_train=73_257, num_test=26_032, torchvision_class="SVHN",
        train_counts=(4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        test_counts=(1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
    ),
    "usps": DatasetInfo(
        channels=1, image_size=16, class_names=_DIGITS, num_train=7_291, num_test=2_007, torchvision_class="USPS",
        train_counts=(1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644),
        test_counts=(359, 264, 198, 166, 200, 160, 170, 147, 166, 177),
    ),
    "cinic10": DatasetInfo(
        channels=3, image_size=32, class_names=_CIFAR10, num_train=90_000, num_test=90_000,
        archive=Archive(
            address="https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
            md5="6ee4d0c996905fe93221de577967a372",
        ),
    ).balanced(),
    "tiny-imagenet": DatasetInfo(
        channels=3, image_size=64, class_names=("",) * 200, num_train=100_000, num_test=10_000,
        archive=Archive(
            address="http://cs231n.stanford.edu/tiny-imagenet-200.zip", md5="90528d7ca1a48142e341f4ef8d21d0de",
        ),
    ).balanced(),
    "femnist": DatasetInfo(
        channels=1, image_size=28, class_names=_CHARACTERS, to_import="the folder of LEAF's all_data_*.json",
    ),
    "synth-digits": DatasetInfo(
        channels=3, image_size=32, class_names=_DIGITS, num_train=479_400, num_test=9_553,
        to_import="SynthDigits.zip or its .mat files",
    ),
    "mnist-m": DatasetInfo(
        channels=3, image_size=28, class_names=_DIGITS, num_train=60_000, num_test=10_000,
        to_import="mnist_m.tar.gz or its folder",
    ),
    "office-caltech": _OFFICE._replace(
        class_names=("",) * 10, domain_names=("amazon", "caltech", "dslr", "webcam"),
        domain_counts=(958, 1123, 157, 295),
    ),
    "office31": _OFFICE._replace(
        class_names=("",) * 31, domain_names=("amazon", "dslr", "webcam"), domain_counts=(2817, 498, 795)
    ),
    "office-home": _OFFICE._replace(
        class_names=("",) * 65, domain_names=("Art", "Clipart", "Product", "Real World"),
        domain_counts=(2427, 4365, 4439, 4357),
    ),
    # A domain from each of others.
    "femnist-digits": DatasetInfo(
        channels=1, image_size=28, class_names=_DIGITS, make=_femnist_digits, needs=("femnist",),
    ),
    "mixed-digits": DatasetInfo(
        channels=3, image_size=28, class_names=_DIGITS, num_test=57_453,
        domain_names=("mnist", "svhn", "usps", "synth-digits", "mnist-m"),
    ).made_of(  # the official training split of USPS has 7,291 images
        Subset("mnist", 7430), Subset("svhn", 7430), Subset("usps", 7430, drawn_from="pooled"),
        Subset("synth-digits", 7430), Subset("mnist-m", 7430),
    ),
    "digits-4": DatasetInfo(
        channels=3, image_size=32, class_names=_DIGITS, num_test=47_592,
        domain_names=("mnist", "usps", "svhn", "synth-digits"),
    ).made_of(Subset("mnist", 150), Subset("usps", 80), Subset("svhn", 5000), Subset("synth-digits", 1800)),
    # For real images without more than MNIST, in numbers as uneven as those of digits-4.
    "digits-real-4": DatasetInfo(
        channels=3, image_size=16, class_names=_DIGITS, num_test=2_077,
        domain_names=("mnist", "digits", "photo", "font"),
    ).made_of(
        Subset("mnist", 150, num_test=1000), Subset("digits", 80),
        Subset("digit-domains", 1200, domain="photo"), Subset("digit-domains", 600, domain="font"),
    ),
}  # fmt: skip


def _add_domain_sets(source: str, num_train: Sequence[int], num_test_leaky: int) -> None:
    """Adds what papers make of a set with domains: training images as published, and two kinds of test images."""
    info = KNOWN[source]._replace(to_import="")
    private = []
    for number, domain in zip(num_train, info.domain_names, strict=True):
        private.append(Subset(source, number, domain=domain))
    leaky = [subset._replace(drawn_from="leaky") for subset in private]
    KNOWN[f"{source}-private"] = info.made_of(*private)
    KNOWN[f"{source}-leaky"] = info._replace(num_test=num_test_leaky).made_of(*leaky)


_add_domain_sets("office-caltech", num_train=(368, 431, 60, 113), num_test_leaky=2533)
_add_domain_sets("office31", num_train=(1082, 192, 305), num_test_leaky=4110)
_add_domain_sets("office-home", num_train=(1400, 2000, 2500, 2000), num_test_leaky=15588)
MADE = {name: info.needs for name, info in KNOWN.items() if info.make}  # the sets that each is made from
BUILT_IN = tuple(name for name, needs in MADE.items() if not needs)
UNSURE = ("mnist-m",)  # of which copies with other numbers of images are in use
DOWNLOADS = tuple(name for name, info in KNOWN.items() if info.is_download)


def with_official_names(name: str, columns: Columns) -> Columns:
    """The columns with the official labels, class names and domains of the known data set `name`.

    Raises:
        ValueError: Shape, classes or domains are others.
    """
    info = KNOWN[name]
    shape = columns["x"].shape[1:]
    remedy = f"as those of '{name}': choose another name for another data set"
    expected = (info.image_size, info.image_size, info.channels)
    if shape != expected:
        raise ValueError(f"the images are {shape}, the channels last, and not {expected} {remedy}")
    columns = _with_official(columns, "y", info.class_names, remedy)
    return _with_official(columns, "domain", info.domain_names, remedy)


def _with_official(columns: Columns, column: str, official: Sequence[str], remedy: str) -> Columns:
    """The columns with the official numbers and names of classes, "y", or domains, "domain".

    Raises:
        ValueError: They are others.
    """
    names = columns[NAMES_OF[column]].tolist() if column in columns else []
    if official == ("",) * len(names):  # of which the number alone is known, or of which there are none
        return columns
    order = official_order(names, official) if any(official) else None
    if order is None:
        listed = f"{len(names)} ({', '.join(names[:3])}…)"
        listed_official = f"{len(official)} ({', '.join(filter(None, official[:4]))}…)"
        noun = {"y": "classes", "domain": "domains"}[column]
        raise ValueError(f"the {noun} are {listed} and not {listed_official} {remedy}")
    official_numbers = np.array(order)[columns[column]]
    return columns | {column: official_numbers, NAMES_OF[column]: np.array(official)}


FACTS = {  # by which a set is told from the official one where its fingerprint is not known, in words
    "train": "training images",
    "test": "test images",
    "train_counts": "training images of its classes",
    "test_counts": "test images of its classes",
    "domain_counts": "images of its domains",
}


def difference_from_official(name: str, facts: Mapping[str, Any]) -> str:
    """In what a set that is called by a known name differs from the official one, as text; empty where it is the same.

    `facts` has the set's `fingerprint`, its numbers of `train` and `test` images, and as tuples its `train_counts` and
    `test_counts` of each class and `domain_counts` of each domain.
    """
    info = KNOWN[name]
    if info.fingerprint:
        is_same = facts["fingerprint"] == info.fingerprint
        return "" if is_same else f"fingerprint {facts['fingerprint']}, not {info.fingerprint}"
    official = {
        "train": info.num_train,
        "test": info.num_test,
        "train_counts": info.train_counts,
        "test_counts": info.test_counts,
        "domain_counts": info.domain_counts,
    }
    if name in UNSURE:
        del official["train"], official["test"]
    for fact, expected in official.items():
        if expected and facts[fact] != expected:
            return f"{_in_words(facts[fact])} {FACTS[fact]}, not {_in_words(expected)}"
    return ""


def _in_words(numbers: int | Sequence[int]) -> str:
    return f"{numbers:,}" if isinstance(numbers, int) else ", ".join(map(str, numbers[:10]))


def official_order(names: Sequence[str], official: Sequence[str]) -> list[int] | None:
    """For each name its position among the official ones; None where they are others.

    Numbers are positions, since labels without names come with them. Case, spaces and signs do not count, unless
    a set has both A and a; `T-shirt/top` is also written `t-shirt`.
    """
    positions = set(map(str, range(len(official))))
    if names and set(names) <= positions:
        return list(map(int, names))
    for spelling in (str, _letters_and_digits):
        labels = {spelling(name): label for label, name in enumerate(official)}
        if len(labels) == len(official) and sorted(map(spelling, names)) == sorted(labels):
            return [labels[spelling(name)] for name in names]
    return None


def _letters_and_digits(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower()).replace("tshirttop", "tshirt")
