"""The data sets that are known by name before their images are there: shape, classes, domains and sizes."""

import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcli.data.files import PARTS, Arrays
from fedcli.errors import UserError


class Known(NamedTuple):
    """What is known of a data set."""

    channels: int
    image_size: int  # pixels, height and width
    class_names: tuple[str, ...] | int  # in the order of the official labels; their number where the files name them
    num_train: int | None = None  # None where it depends on the files
    num_test: int | None = None
    source: str | None = None  # torchvision's class, where that reads the official files
    split: str | None = None  # of EMNIST
    files: str = ""  # what can be imported, where it is not what a download brings
    domain_names: tuple[str, ...] = ()
    resized: bool = False  # image files of any size are made `image_size`

    @property
    def num_classes(self) -> int:
        """C."""
        return self.class_names if isinstance(self.class_names, int) else len(self.class_names)

    @property
    def sizes(self) -> tuple[int | None, int | None, int, tuple[int, int, int]]:
        """Numbers of training images, test images and classes, and `(channels, H, W)`."""
        return self.num_train, self.num_test, self.num_classes, (self.channels, self.image_size, self.image_size)


_DIGITS = tuple(string.digits)
_CHARACTERS = (*_DIGITS, *string.ascii_uppercase, *string.ascii_lowercase)
_FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_FOLDERS = "image folders <domain>/train/<class>/* and <domain>/test/<class>/*"


def _office(classes: int, domains: tuple[str, ...], num_train: int | None = None, num_test: int | None = None) -> Known:
    """Photographs of office things in several domains, at 32 x 32 pixels."""
    return Known(3, 32, classes, num_train, num_test, domain_names=domains, resized=True)


_CALTECH = ("amazon", "caltech", "dslr", "webcam")
_OFFICE31 = ("amazon", "dslr", "webcam")
_HOME = ("Art", "Clipart", "Product", "Real World")

KNOWN = {
    "mnist": Known(1, 28, _DIGITS, 60_000, 10_000, "MNIST"),
    "fmnist": Known(1, 28, _FASHION, 60_000, 10_000, "FashionMNIST"),
    "emnist-digits": Known(1, 28, _DIGITS, 240_000, 40_000, "EMNIST", "digits"),
    "emnist-letters": Known(1, 28, tuple(string.ascii_lowercase), 124_800, 20_800, "EMNIST", "letters"),
    "emnist-byclass": Known(1, 28, _CHARACTERS, 697_932, 116_323, "EMNIST", "byclass"),
    "cifar10": Known(3, 32, _CIFAR10, 50_000, 10_000, "CIFAR10"),
    "cifar100": Known(3, 32, tuple(_CIFAR100.split()), 50_000, 10_000, "CIFAR100"),
    "svhn": Known(3, 32, _DIGITS, 73_257, 26_032, "SVHN"),
    "usps": Known(1, 16, _DIGITS, 7_291, 2_007, "USPS"),
    "cinic10": Known(3, 32, _CIFAR10, 90_000, 90_000),
    "tiny-imagenet": Known(3, 64, 200, 100_000, 10_000),
    "femnist": Known(1, 28, _CHARACTERS, files="the folder of LEAF's all_data_*.json"),
    "synth-digits": Known(3, 32, _DIGITS, 479_400, 9_553, files="SynthDigits.zip or the folder of its two .mat files"),
    "mnist-m": Known(3, 28, _DIGITS, 60_000, 10_000, files="mnist_m.tar.gz or its folder", resized=True),
    "office-caltech": _office(10, _CALTECH)._replace(files="image folders <domain>/<class>/*"),
    "office31": _office(31, _OFFICE31)._replace(files="image folders <domain>/<class>/*"),
    "office-home": _office(65, _HOME)._replace(files="image folders <domain>/<class>/*"),
    # Made from the ones above by `recipes`; a -private set trains on so many images of each domain as published.
    "femnist-digits": Known(1, 28, _DIGITS),
    "mixed-digits": Known(
        3, 28, _DIGITS, 37_150, 57_453, files=_FOLDERS, resized=True,
        domain_names=("mnist", "svhn", "usps", "synth-digits", "mnist-m"),
    ),
    "digits-4": Known(
        3, 32, _DIGITS, 7_030, 47_592, files=_FOLDERS, resized=True,
        domain_names=("mnist", "usps", "svhn", "synth-digits"),
    ),
    "digits-real-4": Known(3, 16, _DIGITS, 2_030, 2_077, domain_names=("mnist", "digits", "photo", "font")),
    "office-caltech-private": _office(10, _CALTECH, 972),
    "office31-private": _office(31, _OFFICE31, 1_579),
    "office-home-private": _office(65, _HOME, 7_900),
    "office-caltech-leaky": _office(10, _CALTECH, 972, 2_533),
    "office31-leaky": _office(31, _OFFICE31, 1_579, 4_110),
    "office-home-leaky": _office(65, _HOME, 7_900, 15_588),
}  # fmt: skip


def known_form(name: str, arrays: Arrays, path: Path) -> Arrays:
    """The arrays with the official labels, class names and domains of a known data set.

    Args:
        name: One of `KNOWN`.
        arrays: Of any reader; their labels follow their own `class_names`, their domains their `domain_names`.
        path: Where they come from, for the refusal.

    Raises:
        UserError: The images have another shape, or the classes or domains are others.
    """
    known = KNOWN[name]
    expected, shape = (known.image_size, known.image_size, known.channels), arrays["x_train"].shape[1:]
    if shape != expected:
        raise UserError(
            f"the images in '{path}' are not those of '{name}' (got {_size(shape)}); they must be {_size(expected)}; "
            "choose another name for another data set."
        )
    arrays = _renamed(name, arrays, path, "y", "class_names", known.class_names)
    if known.domain_names or "domain_names" in arrays:
        arrays = _renamed(name, arrays, path, "domain", "domain_names", known.domain_names)
    return arrays


def _renamed(name: str, arrays: Arrays, path: Path, kind: str, key: str, official: tuple[str, ...] | int) -> Arrays:
    """The arrays with labels or domains that count the official names."""
    names, what = arrays.get(key, np.array([])).tolist(), "classes" if kind == "y" else "domains"
    if isinstance(official, int):
        places = range(official) if len(names) == official else None
        expected = f"be {official}"
    else:
        places = _places(names, official)
        shown = f"{', '.join(official[:3])}, …" if len(official) > 5 else ", ".join(official) or "none"
        expected = f"be the {len(official)} official ones, {shown}"
    if places is None:
        raise UserError(
            f"the {what} in '{path}' are not those of '{name}' (got {len(names)}: {', '.join(names[:3])}, …); they "
            f"must {expected}; rename them, or choose another name for another data set."
        )
    if isinstance(official, int):
        return arrays
    order = np.array(places)
    return arrays | {f"{kind}_{part}": order[arrays[f"{kind}_{part}"]] for part in PARTS} | {key: np.array(official)}


def _size(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{height} x {width} pixels with {channels} channel{'s' if channels > 1 else ''}"


def _places(names: Sequence[str], official: Sequence[str]) -> list[int] | None:
    """For each name its official place; None where they are others. The spelling may differ a little.

    The numbers from 0 stand for the official places themselves: that is what labels without names come with.
    """
    if 0 < len(names) <= len(official) and set(names) == {str(label) for label in range(len(names))}:
        return [int(name) for name in names]
    for fold in (str, _fold):  # exactly first: some sets have A and a
        places = {fold(name): label for label, name in enumerate(official)}
        if len(places) == len(official) and sorted(map(fold, names)) == sorted(places):
            return [places[fold(name)] for name in names]
    return None


def _fold(name: str) -> str:
    """A name without case, spaces and signs; `T-shirt/top` is also written `t-shirt`."""
    return re.sub("[^a-z0-9]", "", name.lower()).replace("tshirttop", "tshirt")
