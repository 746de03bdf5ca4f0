"""Data sets that are known by name: their shape and labels, and their files as the sets' sites give them.

Addresses, checksums and readers are torchvision's, which is imported only when they are needed because that takes
seconds. Arrays are those of `fedcli.readers`.
"""

import hashlib
import re
import shutil
import string
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcli.errors import UserError
from fedcli.readers import PARTS, Arrays, checked, one_line

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all where the server says so
TIMEOUT = 30  # seconds without a byte before a download is given up


class Known(NamedTuple):
    """What is known of a data set before its images are there."""

    source: str  # torchvision's class
    channels: int
    image_size: int  # pixels, height and width
    class_names: tuple[str, ...]  # in the order of the official labels
    num_train: int
    num_test: int
    split: str | None = None  # of EMNIST

    @property
    def sizes(self) -> tuple[int, int, int, tuple[int, int, int]]:
        """Numbers of training images, test images and classes, and `(channels, H, W)`."""
        return self.num_train, self.num_test, len(self.class_names), (self.channels, self.image_size, self.image_size)


_DIGITS = tuple(string.digits)
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

KNOWN = {
    "mnist": Known("MNIST", 1, 28, _DIGITS, 60_000, 10_000),
    "fmnist": Known("FashionMNIST", 1, 28, _FASHION, 60_000, 10_000),
    "emnist-digits": Known("EMNIST", 1, 28, _DIGITS, 240_000, 40_000, "digits"),
    "emnist-letters": Known("EMNIST", 1, 28, tuple(string.ascii_lowercase), 124_800, 20_800, "letters"),
    "emnist-byclass": Known(
        "EMNIST", 1, 28, (*_DIGITS, *string.ascii_uppercase, *string.ascii_lowercase), 697_932, 116_323, "byclass"
    ),
    "cifar10": Known("CIFAR10", 3, 32, _CIFAR10, 50_000, 10_000),
    "cifar100": Known("CIFAR100", 3, 32, tuple(_CIFAR100.split()), 50_000, 10_000),
    "svhn": Known("SVHN", 3, 32, _DIGITS, 73_257, 26_032),
    "usps": Known("USPS", 1, 16, _DIGITS, 7_291, 2_007),
}


class _File(NamedTuple):
    """One official file."""

    name: str
    urls: tuple[str, ...]
    md5: str


def holds(name: str, path: Path) -> bool:
    """Whether a path stands for official files of the named data set: a file, or a folder with one of them."""
    return path.is_file() or any((path / file.name).exists() for file in _files(KNOWN[name]))


def read(name: str, path: Path) -> Arrays:
    """The arrays of the official files that the user has.

    Args:
        name: One of `KNOWN`.
        path: The archive, or the folder of the files.

    Raises:
        UserError: A file is missing, damaged or another one.
    """
    return _read(name, lambda file, target: _copy(name, path, file, target))


def download(name: str, progress: Progress | None) -> Arrays:
    """The arrays of a data set's official files, from its site.

    Args:
        name: One of `KNOWN`.
        progress: Is told of every piece that arrives.

    Raises:
        UserError: The site cannot be reached, or sends something else.
    """
    return _read(name, lambda file, target: _fetch(name, file, target, progress))


def official_form(name: str, arrays: Arrays, path: Path) -> Arrays:
    """The arrays with the official labels and class names of a known data set.

    Args:
        name: One of `KNOWN`.
        arrays: Of any reader; their labels follow their own `class_names`.
        path: Where they come from, for the refusal.

    Raises:
        UserError: The images have another shape, or the classes other names.
    """
    known = KNOWN[name]
    expected, shape = (known.image_size, known.image_size, known.channels), arrays["x_train"].shape[1:]
    if shape != expected:
        raise UserError(
            f"the images in '{path}' are not those of '{name}' (got {_size(shape)}); they must be {_size(expected)}; "
            "choose another name for another data set."
        )
    names = arrays["class_names"].tolist()
    places = _places(names, known.class_names)
    if places is None:
        raise UserError(
            f"the classes in '{path}' are not those of '{name}' (got {len(names)}: {', '.join(names[:3])}, …); they "
            f"must be the {len(known.class_names)} official ones, {', '.join(known.class_names[:3])}, …; rename them, "
            "or choose another name for another data set."
        )
    order = np.array(places)
    labels = {f"y_{part}": order[arrays[f"y_{part}"]] for part in PARTS}
    return arrays | labels | {"class_names": np.array(known.class_names)}


def _size(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{height} x {width} pixels with {channels} channel{'s' if channels > 1 else ''}"


def _places(names: Sequence[str], official: Sequence[str]) -> list[int] | None:
    """For each class name its official label; None where they are others. The spelling may differ a little.

    The numbers from 0 stand for the official labels themselves: that is what labels without names come with.
    """
    if len(names) <= len(official) and set(names) == {str(label) for label in range(len(names))}:
        return [int(name) for name in names]
    for fold in (str, _fold):  # exactly first: some sets have A and a
        places = {fold(name): label for label, name in enumerate(official)}
        if len(places) == len(official) and sorted(map(fold, names)) == sorted(places):
            return [places[fold(name)] for name in names]
    return None


def _fold(name: str) -> str:
    """A class name without case, spaces and signs; `T-shirt/top` is also written `t-shirt`."""
    return re.sub("[^a-z0-9]", "", name.lower()).replace("tshirttop", "tshirt")


def _torchvision_class(known: Known) -> Any:
    from fedcli.vision import torchvision

    return getattr(torchvision.datasets, known.source)


def _files(known: Known) -> list[_File]:
    """The files of a data set with the addresses and checksums that torchvision knows."""
    source = _torchvision_class(known)
    if known.source == "EMNIST":
        return [_File(source.url.rpartition("/")[2], (source.url,), source.md5)]
    if known.source.startswith("CIFAR"):
        return [_File(source.filename, (source.url,), source.tgz_md5)]
    if known.source in ("SVHN", "USPS"):
        return [_File(name, (url,), md5) for url, name, md5 in (source.split_list[part] for part in PARTS)]
    return [_File(name, tuple(mirror + name for mirror in source.mirrors), md5) for name, md5 in source.resources]


def _read(name: str, obtain: Callable[[_File, Path], str]) -> Arrays:
    """The arrays of official files, each put where torchvision looks for it by `obtain`, which returns its origin."""
    known = KNOWN[name]
    with tempfile.TemporaryDirectory(prefix="fedcli-") as root:
        folder = Path(root, known.source, "raw") if "MNIST" in known.source else Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        for file in _files(known):
            origin = obtain(file, folder / file.name)
            with (folder / file.name).open("rb") as content:
                md5 = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if md5 != file.md5:
                raise UserError(
                    f"'{origin}' is not the whole official file '{file.name}' of '{name}' (got MD5 {md5}); it must "
                    f"have {file.md5}; get it again from {file.urls[0]}."
                )
        arrays: Arrays = {"class_names": np.array(known.class_names)}
        for part in PARTS:
            arrays[f"x_{part}"], arrays[f"y_{part}"] = _official_part(known, root, part)
    return checked(arrays, Path(name))


def _official_part(known: Known, root: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one part, read by torchvision. Its `download` unpacks, as the files are there and whole."""
    source = _torchvision_class(known)
    if known.source == "SVHN":
        data = source(root, split=part, download=True)
        return data.data.transpose(0, 2, 3, 1), data.labels
    options = {"split": known.split} if known.split else {}
    data = source(root, train=part == "train", download=True, **options)
    images, labels = np.asarray(data.data), np.asarray(data.targets)
    if known.source == "EMNIST":
        images = images.transpose(0, 2, 1)  # the files hold every image with its rows as columns
    return images, labels - 1 if known.split == "letters" else labels  # a to z are 1 to 26 there


def _copy(name: str, path: Path, file: _File, target: Path) -> str:
    """Puts a file of the user's at `target`: the path itself, or what has the official name in that folder."""
    wanted = [official.name for official in _files(KNOWN[name])]
    origin = path / file.name if path.is_dir() else path
    if not origin.is_file() or (path.is_file() and len(wanted) > 1):
        raise UserError(
            f"'{path}' does not hold {file.name}; '{name}' is imported from a folder with {', '.join(wanted)}; "
            "give that folder."
        )
    shutil.copyfile(origin, target)
    return str(origin)


def _fetch(name: str, file: _File, target: Path, progress: Progress | None) -> str:
    """Downloads a file to `target` from the first of its addresses that answers, which it returns."""
    reasons = []
    for url in file.urls:
        try:
            _fetch_url(url, file, target, progress)
            return url
        except (OSError, HTTPException) as error:  # URLError and time-outs are OSErrors
            reasons.append(one_line(error).removeprefix("<urlopen error ").removesuffix(">"))
    raise UserError(
        f"'{name}' could not be downloaded ({file.name}: {reasons[0]}); it needs a network; where there is none, bring "
        f"the official files and run 'fedcli data import {name} PATH'."
    )


def _fetch_url(url: str, file: _File, target: Path, progress: Progress | None) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "fedcli"})  # some sites refuse Python's own
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, target.open("wb") as out:
        length = response.headers.get("Content-Length")
        while piece := response.read(1 << 20):
            out.write(piece)
            if progress:
                progress(file.name, out.tell(), int(length) if length else None)
