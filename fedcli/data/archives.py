"""The known data sets' files as their sites give them, downloaded or brought by the user.

Addresses, checksums and readers are torchvision's where it has them; it is imported only when they are needed, because
that takes seconds. The readers of the others take the archive or the folder it unpacks to, also inside one more folder.
Arrays are those of `fedcli.data.files`.
"""

import hashlib
import io
import json
import lzma
import re
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcli.core.backbones import torchvision
from fedcli.data.catalog import KNOWN, Known
from fedcli.data.files import PARTS, Arrays, Room, checked, decoded, one_line, stacked
from fedcli.errors import UserError

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all where the server says so
TIMEOUT = 30  # seconds without a byte before a download is given up


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
        arrays |= {f"x_{match[1]}": images, f"y_{match[1]}": np.where(labels == 10, 0, labels)}  # as in SVHN
    return checked(arrays, path)


def femnist(path: Path) -> Arrays:
    """FEMNIST as LEAF writes it: `users`, and in `user_data` of each `x` (784 values in [0, 1]) and `y` (0 to 61).

    A fixed random tenth of the writers is the test part. Ink is dark on a bright ground, as in the files.

    Args:
        path: One of its files `all_data_*.json`, or the folder of them.
    """
    folder = path / "all_data" if (path / "all_data").is_dir() else path
    files = sorted(filter(Path.is_file, folder.glob("*.json"))) if folder.is_dir() else [path]
    room = Room(path)
    images, labels = {}, {}
    for file in files:
        room.take(file.stat().st_size)
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
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # of what is no JSON, or none of LEAF's
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


def _has_layout(name: str, folder: Path) -> bool:
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


# What a damaged archive raises; the last two one with a password, or in a form that Python does not know.
_DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, RuntimeError,
    NotImplementedError,
)  # fmt: skip


def _members(path: Path, pattern: str) -> Iterator[tuple[re.Match, bytes]]:
    """The files of an archive or folder whose names end as the pattern says, with their contents."""
    wanted, room = re.compile(rf"(?:^|/)(?:{pattern})$"), Room(path)
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if (match := wanted.search(file.relative_to(path).as_posix())) and file.is_file():
                    room.take(file.stat().st_size)
                    yield match, file.read_bytes()
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    if match := wanted.search(member.filename):
                        room.take(member.file_size)
                        yield match, archive.read(member)
        else:
            with tarfile.open(path, "r|*") as archive:  # one after the other: a compressed file cannot be searched
                for member in archive:
                    if member.isfile() and (match := wanted.search(member.name)):
                        room.take(member.size)
                        yield match, archive.extractfile(member).read()
    except _DAMAGED as error:
        raise UserError(
            f"'{path}' cannot be read ({one_line(error)}); it must be the official archive or its folder; get it again."
        ) from error


# Downloads, and files that the user brings


class _File(NamedTuple):
    """One official file."""

    name: str
    urls: tuple[str, ...]
    md5: str


# Of the sets that are not torchvision's.
ARCHIVES = {
    "cinic10": _File(
        "CINIC-10.tar.gz",
        ("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",),
        "6ee4d0c996905fe93221de577967a372",
    ),
    "tiny-imagenet": _File(
        "tiny-imagenet-200.zip",
        ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        "90528d7ca1a48142e341f4ef8d21d0de",
    ),
}
# SHA-256 of official files by their MD5, which is known of all and could be forged: of both CIFAR from Keras, of the
# others from TensorFlow Datasets. For the files that are not here none is known.
SHA256 = {
    "f68b3c2dcbeaaa9fbdd348bbdeb94873": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",  # MNIST
    "d53e105ee54ea40749a09fcbcd1e9432": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "9fb629c4189551a2d022fa330f9573f3": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "ec29112dd5afa0611ce80d1b7f02629c": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",  # FMNIST
    "25c81989df183df01b3e8a0aad5dffbe": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "bef4ecab320f06d8554ea6380940ec79": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "bb300cfdad3c16e7a12a480ee83cd310": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    "58c8d27c78d21e728a6bc7b3cc06412e": "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",  # EMNIST
    "c58f30108f718f92721af3b95e74349a": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",  # CIFAR-10
    "eb9058c3a382ffc7106e4002c42a8d85": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",  # CIFAR-100
    "e26dedcc434d2e4c54c9b2d4a06d8373": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",  # SVHN
    "eb5a983be6a315427106f1b164d9cef3": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
}
DOWNLOADS = tuple(name for name, known in KNOWN.items() if known.source or name in ARCHIVES)
WITH_FILES = tuple(name for name in KNOWN if name in DOWNLOADS or name in LAYOUTS)


def holds(name: str, path: Path) -> bool:
    """Whether a path stands for official files of the named data set: a file, or a folder with one of them."""
    if path.is_file():
        return name in WITH_FILES
    return _has_file(name, path) or _has_layout(name, path)


def read(name: str, path: Path) -> Arrays:
    """The arrays of the official files that the user has.

    Args:
        name: One of `KNOWN`.
        path: The archive, or the folder of the files.

    Raises:
        UserError: A file is missing, damaged or another one.
    """
    if name in DOWNLOADS and (path.is_file() or _has_file(name, path)):
        return _read(name, lambda file, target: _copy(name, path, file, target))
    return LAYOUTS[name].read(path)


def _has_file(name: str, folder: Path) -> bool:
    return any((folder / file.name).is_file() for file in _files(name))


def download(name: str, progress: Progress | None) -> Arrays:
    """The arrays of a data set's official files, from its site.

    Args:
        name: One of `DOWNLOADS`.
        progress: Is told of every piece that arrives.

    Raises:
        UserError: The site cannot be reached, or sends something else.
    """
    return _read(name, lambda file, target: _fetch(name, file, target, progress))


def _torchvision_class(known: Known) -> Any:
    return getattr(torchvision().datasets, known.source)


def _files(name: str) -> list[_File]:
    """The files of a data set that can be downloaded, with their addresses and checksums."""
    known = KNOWN[name]
    if known.source is None:
        return [_secure(ARCHIVES[name])] if name in ARCHIVES else []
    source = _torchvision_class(known)
    if known.source == "EMNIST":
        return [_secure(_File(source.url.rpartition("/")[2], (source.url,), source.md5))]
    if known.source.startswith("CIFAR"):
        return [_secure(_File(source.filename, (source.url,), source.tgz_md5))]
    if known.source in ("SVHN", "USPS"):
        return [_secure(_File(name, (url,), md5)) for url, name, md5 in (source.split_list[part] for part in PARTS)]
    mirrors = source.mirrors
    return [_secure(_File(name, tuple(mirror + name for mirror in mirrors), md5)) for name, md5 in source.resources]


def _secure(file: _File) -> _File:
    """The file with the addresses by HTTPS first, which nobody on the way can change."""
    by_https = [re.sub("^http:", "https:", url) for url in file.urls]
    return file._replace(urls=tuple(dict.fromkeys([*by_https, *file.urls])))


def _read(name: str, obtain: Callable[[_File, Path], str]) -> Arrays:
    """The arrays of official files, each put where its reader looks for it by `obtain`, which returns its origin."""
    known, files = KNOWN[name], _files(name)
    with tempfile.TemporaryDirectory(prefix="fedcli-") as root:
        folder = Path(root, known.source, "raw") if known.source and "MNIST" in known.source else Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            origin = obtain(file, folder / file.name)
            for kind, wanted in (("MD5", file.md5), ("SHA256", SHA256.get(file.md5))):
                with (folder / file.name).open("rb") as content:
                    found = hashlib.file_digest(content, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()
                if wanted not in (found, None):
                    raise UserError(
                        f"'{origin}' is not the whole official file '{file.name}' of '{name}' (got {kind} {found}); it "
                        f"must have {wanted}; get it again from {file.urls[0]}."
                    )
        if known.source is None:
            return LAYOUTS[name].read(folder / files[0].name)
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
    wanted = [official.name for official in _files(name)]
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
