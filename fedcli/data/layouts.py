"""Official archives and folders that torchvision does not read, in the form of `fedcli.data.files`.

Each reader takes the archive or the folder it unpacks to, also inside one more folder.
"""

import io
import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcli.data.files import PARTS, Arrays, checked, one_line
from fedcli.data.folders import decoded, stacked
from fedcli.errors import UserError

LEAF_TEST = 10  # every so-manieth writer is held out for testing


def cinic10(path: Path) -> Arrays:
    """CINIC-10: `train|test/<class>/*.png`; the split `valid` is left out."""
    pictures = [
        _Picture(match[1], match[2], match[3], decoded(io.BytesIO(content), match[3]))
        for match, content in _members(path, r"(train|test)/([^/]+)/([^/.][^/]*\.png)")
    ]
    return _assembled(pictures, path, "train/<class>/*.png and test/<class>/*.png")


def tiny_imagenet(path: Path) -> Arrays:
    """Tiny-ImageNet: `train/<class>/images/*.JPEG`; the labelled split `val` is the test part, as `test` has no labels.

    The classes are called as in the files, by their WordNet numbers.
    """
    pictures, held, labels = [], {}, {}
    names = r"(?:train/([^/]+)/images|val/images)/([^/.][^/]*\.JPEG)|val/val_annotations\.txt"
    for match, content in _members(path, names):
        label, file = match.groups()
        if file is None:
            labels = _listed(content)
        elif label is None:
            held[file] = decoded(io.BytesIO(content), file)
        else:
            pictures.append(_Picture("train", label, file, decoded(io.BytesIO(content), file)))
    pictures += _labelled("test", held, labels, path)
    return _assembled(pictures, path, "train/<class>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt")


def mnist_m(path: Path) -> Arrays:
    """MNIST-M: `mnist_m_train|test/*.png` and the labels in `mnist_m_train|test_labels.txt`, at 28 x 28 pixels."""
    images: dict[str, dict] = {part: {} for part in PARTS}
    labels: dict[str, dict] = {part: {} for part in PARTS}
    for match, content in _members(path, r"mnist_m_(train|test)(?:/([^/.][^/]*\.png)|_labels\.txt)"):
        part, file = match.groups()
        if file is None:
            labels[part] = _listed(content)
        else:
            images[part][file] = decoded(io.BytesIO(content), file, 28)
    pictures = [picture for part in PARTS for picture in _labelled(part, images[part], labels[part], path)]
    return _assembled(pictures, path, "mnist_m_train/*.png and mnist_m_test/*.png with their _labels.txt")


def synth_digits(path: Path) -> Arrays:
    """SynthDigits: `synth_train_32x32.mat` and `synth_test_32x32.mat`, each `X` `[H, W, 3, N]` and `y` `[N, 1]`."""
    from scipy.io import loadmat  # late: it takes a second

    arrays: Arrays = {}
    for match, content in _members(path, r"synth_(train|test)_32x32\.mat"):
        try:
            data = loadmat(io.BytesIO(content))
            images, labels = data["X"].transpose(3, 0, 1, 2), data["y"].reshape(-1)
        except Exception as error:  # SciPy has about ten kinds of them for a damaged file
            raise UserError(
                f"'{match.group()}' in '{path}' cannot be read ({one_line(error)}); it must be MATLAB's; get it again."
            ) from error
        arrays |= {f"x_{match[1]}": images, f"y_{match[1]}": labels % 10}  # a zero may be class 10, as in SVHN
    return checked(arrays, path)


def femnist(path: Path) -> Arrays:
    """FEMNIST as LEAF writes it: `users`, and in `user_data` of each `x` (784 values in [0, 1]) and `y` (0 to 61).

    A fixed random tenth of the writers is the test part. Ink is dark on a bright ground, as in the files.

    Args:
        path: One of its files `all_data_*.json`, or the folder of them.
    """
    folder = path / "all_data" if (path / "all_data").is_dir() else path
    files = sorted(folder.glob("*.json")) if folder.is_dir() else [path]
    images, labels = {}, {}
    for file in files:
        for writer, x, y in _leaf_users(file):
            if writer in labels:
                raise UserError(
                    f"the writer '{writer}' in '{file}' is there twice; every file has its own; remove one."
                )
            images[writer], labels[writer] = x, y
    writers = sorted(labels)
    if len(writers) < 2:
        raise UserError(f"'{path}' has too few writers (got {len(writers)}); some are held out; give all the files.")
    order = np.random.default_rng(0).permutation(len(writers))
    count = max(1, round(len(writers) / LEAF_TEST))
    arrays: Arrays = {"class_names": np.arange(62)}
    for part, numbers in (("train", order[count:]), ("test", order[:count])):
        chosen = sorted(numbers.tolist())
        arrays[f"x_{part}"] = np.concatenate([images[writers[i]] for i in chosen])
        arrays[f"y_{part}"] = np.concatenate([labels[writers[i]] for i in chosen])
        arrays[f"writer_{part}"] = np.repeat(chosen, [len(labels[writers[i]]) for i in chosen])
    return checked(arrays, path)


def _leaf_users(file: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, images uint8 `[n, 28, 28]` and labels of each writer in a file of LEAF's."""
    try:
        content = json.loads(file.read_bytes())
        for writer in content["users"]:
            x, y = (np.asarray(content["user_data"][writer][key]) for key in "xy")
            if x.ndim != 2 or x.shape[1] != 784 or not 0 <= x.min() <= x.max() <= 1:
                raise ValueError(f"the writer {writer} has no images of 784 values from 0 to 1")
            yield writer, np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28), y
    except (ValueError, KeyError, TypeError) as error:  # also of a file that is no JSON, or none of LEAF's
        raise UserError(
            f"'{file}' is not one of LEAF's files ({one_line(error)}); it must have users and user_data; give others."
        ) from error


class Layout(NamedTuple):
    """Files of one data set."""

    read: Callable[[Path], Arrays]
    marker: str | None  # glob of a file that its folder has; None where the folder is an ordinary image folder


LAYOUTS = {
    "cinic10": Layout(cinic10, None),
    "tiny-imagenet": Layout(tiny_imagenet, "val/val_annotations.txt"),
    "femnist": Layout(femnist, "*.json"),
    "synth-digits": Layout(synth_digits, "synth_*_32x32.mat"),
    "mnist-m": Layout(mnist_m, "mnist_m_*_labels.txt"),
}


def holds(name: str, folder: Path) -> bool:
    """Whether a folder has the official files of a data set, in itself or in a folder of its own."""
    marker = LAYOUTS[name].marker if name in LAYOUTS else None
    return marker is not None and any(next(folder.glob(where + marker), None) for where in ("", "*/"))


class _Picture(NamedTuple):
    """An image that has been found."""

    part: str
    label: str
    file: str
    pixels: np.ndarray


def _listed(content: bytes) -> dict[str, str]:
    """The first two words of each line: a file and its class."""
    lines = (line.split() for line in content.decode(errors="replace").splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _labelled(part: str, images: dict[str, np.ndarray], labels: dict[str, str], path: Path) -> list[_Picture]:
    """Images by file with their classes from a list; refused where the two do not name the same files."""
    if odd := set(images) ^ set(labels):
        raise UserError(
            f"the images and the list of their classes in '{path}' do not fit (got {min(odd)} in one of them); "
            "they must name the same files; get it again."
        )
    return [_Picture(part, labels[file], file, pixels) for file, pixels in images.items()]


def _assembled(pictures: list[_Picture], path: Path, needed: str) -> Arrays:
    """The arrays of all images; labels follow the sorted names of the classes."""
    classes = sorted({picture.label for picture in pictures})
    places = {label: place for place, label in enumerate(classes)}
    arrays: Arrays = {"class_names": np.array(classes)}
    for part in PARTS:
        own = [picture for picture in pictures if picture.part == part]
        if not own:
            raise UserError(f"'{path}' has not the images it should have (got none to {part}); it must hold {needed}.")
        arrays[f"x_{part}"] = stacked([picture.pixels for picture in own], [picture.file for picture in own])
        arrays[f"y_{part}"] = np.array([places[picture.label] for picture in own])
    return checked(arrays, path)


def _members(path: Path, pattern: str) -> Iterator[tuple[re.Match, bytes]]:
    """The files of an archive or folder whose names end as the pattern says, with their contents."""
    wanted = re.compile(rf"(?:^|/)(?:{pattern})$")
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if match := wanted.search(file.relative_to(path).as_posix()):
                    yield match, file.read_bytes()
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if match := wanted.search(name):
                        yield match, archive.read(name)
        else:
            with tarfile.open(path, "r|*") as archive:  # one after the other: a compressed file cannot be searched
                for member in archive:
                    if member.isfile() and (match := wanted.search(member.name)):
                        yield match, archive.extractfile(member).read()
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error) as error:
        raise UserError(
            f"'{path}' cannot be read ({one_line(error)}); it must be the official archive or its folder; get it again."
        ) from error
