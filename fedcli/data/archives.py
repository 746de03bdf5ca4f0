"""The official files of the data sets known by name, downloaded or brought by the user.

Addresses, checksums and readers are torchvision's where it has them; it is imported only when they are needed, because
that takes seconds. `LAYOUTS` has the readers of the other forms, which take the archive or the folder it unpacks to,
also inside one more folder. Arrays are those of `fedcli.data.files`.
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
from typing import NamedTuple

import numpy as np

from fedcli.core.backbones import torchvision
from fedcli.data.catalog import KNOWN
from fedcli.data.files import PARTS, Arrays, Room, checked, decoded, one_line, stacked
from fedcli.errors import UserError

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all where the server says so
TIMEOUT = 30  # seconds without a byte before a download is given up
LEAF_TEST = 10  # one writer in so many is held out for testing
# What a damaged archive raises; the last two one with a password, or in a form that Python does not know.
_DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, RuntimeError,
    NotImplementedError,
)  # fmt: skip


# Forms that torchvision does not read


def _members(path: Path, pattern: str) -> Iterator[tuple[re.Match, bytes]]:
    """The files of an archive or folder whose names end as the pattern says, with their contents."""
    ending, room = re.compile(rf"(?:^|/)(?:{pattern})$"), Room(path)
    try:
        for name, size, read_content in _entries(path):
            match = ending.search(name)
            if match:
                room.take(size)
                yield match, read_content()
    except _DAMAGED as error:
        raise UserError(
            f"'{path}' cannot be read ({one_line(error)}); it must be the official archive or its folder; get it again."
        ) from error


def _entries(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Name, size in bytes and content of each file of an archive or folder."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                yield file.relative_to(path).as_posix(), file.stat().st_size, file.read_bytes
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                yield member.filename, member.file_size, partial(archive.read, member)
    else:
        with tarfile.open(path, "r|*") as archive:  # one after the other: a compressed file cannot be searched
            for member in archive:
                if member.isfile():
                    yield member.name, member.size, archive.extractfile(member).read


def read_pictures(path: Path, pattern: str, form: str, size: int | None = None) -> Arrays:
    """The arrays of image files; labels follow the sorted names of the classes.

    Args:
        path: Archive or folder.
        pattern: Regular expression of the files' names. Its group `part` is train, or stands for the test part; `file`
            is the image's, and matches nothing in a list of the classes, whose lines begin with a file and its class;
            `label` is the class of an image that is in no list.
        form: What the archive must hold, for the refusal.
        size: Height and width to which all images are resized; where None they must have one size.
    """
    pictures: dict[str, list] = {part: [] for part in PARTS}
    lists: dict[str, dict[str, str]] = {part: {} for part in PARTS}
    for match, content in _members(path, pattern):
        groups = match.groupdict()
        part = "train" if groups["part"] == "train" else "test"
        if groups["file"] is not None:
            pixels = decoded(io.BytesIO(content), groups["file"], size)
            pictures[part].append((groups["file"], groups.get("label"), pixels))
            continue
        for line in content.decode(errors="replace").splitlines():
            words = line.split()
            if len(words) > 1:
                lists[part][words[0]] = words[1]
    labels = {}
    for part in PARTS:
        unlabelled = {file for file, label, _ in pictures[part] if label is None}
        if odd := unlabelled ^ set(lists[part]):
            raise UserError(
                f"the images and the list of their classes in '{path}' do not fit (got {min(odd)} in one of them); "
                "they must name the same files; get it again."
            )
        if not pictures[part]:
            raise UserError(f"'{path}' has not the images it should have (got none to {part}); it must hold {form}.")
        labels[part] = [label or lists[part][file] for file, label, _ in pictures[part]]
    classes = np.unique(labels["train"] + labels["test"])
    arrays: Arrays = {"class_names": classes}
    for part in PARTS:
        files, _, images = zip(*pictures[part], strict=True)
        arrays[f"x_{part}"] = stacked(images, files)
        arrays[f"y_{part}"] = np.searchsorted(classes, labels[part])
    return checked(arrays, path)


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
        try:
            content = json.loads(file.read_bytes())
            for writer in content["users"]:
                x, y = (np.asarray(content["user_data"][writer][key]) for key in "xy")
                if x.ndim != 2 or x.shape[1] != 784 or not 0 <= x.min() <= x.max() <= 1:
                    raise ValueError(f"the writer {writer} has no images of 784 values from 0 to 1")
                if writer in labels:
                    raise UserError(
                        f"the writer '{writer}' in '{file}' is there twice; every file has its own; remove one."
                    )
                images[writer], labels[writer] = np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28), y
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # of what is no JSON, or none of LEAF's
            raise UserError(
                f"'{file}' is not one of LEAF's files ({one_line(error)}); it must have users and user_data; give "
                "others."
            ) from error
    writers = sorted(labels)
    if len(writers) < 2:
        raise UserError(f"'{path}' has too few writers (got {len(writers)}); some are held out; give all the files.")
    order = np.random.default_rng(0).permutation(len(writers))
    count = max(1, round(len(writers) / LEAF_TEST))
    arrays: Arrays = {"class_names": np.arange(62)}
    for part, numbers in (("train", order[count:]), ("test", order[:count])):
        numbers = np.sort(numbers)
        arrays[f"x_{part}"] = np.concatenate([images[writers[i]] for i in numbers])
        arrays[f"y_{part}"] = np.concatenate([labels[writers[i]] for i in numbers])
        arrays[f"writer_{part}"] = np.repeat(numbers, [len(labels[writers[i]]) for i in numbers])
    return checked(arrays, path)


class Layout(NamedTuple):
    """A form of the files of a data set."""

    read: Callable[[Path], Arrays]
    marker: str | None  # glob of a file by which its folder is recognised; None where it is an ordinary image folder


LAYOUTS = {
    "cinic10": Layout(  # its split `valid` is left out
        partial(
            read_pictures,
            pattern=r"(?P<part>train|test)/(?P<label>[^/]+)/(?P<file>[^/.][^/]*\.png)",
            form="train/<class>/*.png and test/<class>/*.png",
        ),
        marker=None,
    ),
    "tiny-imagenet": Layout(  # its split `test` has no labels; classes are called by their WordNet numbers
        partial(
            read_pictures,
            pattern=r"(?P<part>train|val)/(?:(?P<label>[^/]+)/)?"
            r"(?:images/(?P<file>[^/.][^/]*\.JPEG)|val_annotations\.txt)",
            form="train/<class>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt",
        ),
        marker="val/val_annotations.txt",
    ),
    "mnist-m": Layout(
        partial(
            read_pictures,
            pattern=r"mnist_m_(?P<part>train|test)(?:/(?P<file>[^/.][^/]*\.png)|_labels\.txt)",
            form="mnist_m_train/*.png and mnist_m_test/*.png with their _labels.txt",
            size=28,
        ),
        marker="mnist_m_*_labels.txt",
    ),
    "femnist": Layout(femnist, marker="*.json"),
    "synth-digits": Layout(synth_digits, marker="synth_*_32x32.mat"),
}


# Downloads, and official files that the user brings


class OfficialFile(NamedTuple):
    """One official file."""

    name: str
    urls: tuple[str, ...]
    md5: str


# Of the sets that are not torchvision's.
ARCHIVES = {
    "cinic10": OfficialFile(
        "CINIC-10.tar.gz",
        ("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",),
        "6ee4d0c996905fe93221de577967a372",
    ),
    "tiny-imagenet": OfficialFile(
        "tiny-imagenet-200.zip",
        ("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
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
DOWNLOADS = tuple(name for name, info in KNOWN.items() if info.source or name in ARCHIVES)
WITH_FILES = tuple(name for name in KNOWN if name in DOWNLOADS or name in LAYOUTS)


def official_files(name: str) -> list[OfficialFile]:
    """The files of a data set that can be downloaded; none where it cannot be.

    Addresses by HTTPS come first, since nobody on the way can change what they send.
    """
    source = KNOWN[name].source
    if source is None:
        return [ARCHIVES[name]] if name in ARCHIVES else []
    reader = getattr(torchvision().datasets, source)
    if source == "EMNIST":
        files = [(reader.url.rpartition("/")[2], [reader.url], reader.md5)]
    elif source.startswith("CIFAR"):
        files = [(reader.filename, [reader.url], reader.tgz_md5)]
    elif source in ("SVHN", "USPS"):
        files = [(file, [url], md5) for url, file, md5 in (reader.split_list[part] for part in PARTS)]
    else:
        files = [(file, [mirror + file for mirror in reader.mirrors], md5) for file, md5 in reader.resources]
    official = []
    for file, urls, md5 in files:
        by_https = [re.sub("^http:", "https:", url) for url in urls]
        official.append(OfficialFile(file, tuple(dict.fromkeys(by_https + urls)), md5))
    return official


def read(name: str, path: Path) -> Arrays | None:
    """The arrays of the official files that the user has; None where the path does not stand for such files.

    Args:
        name: One of `KNOWN`.
        path: The archive, or the folder of the files.

    Raises:
        UserError: A file is missing, damaged or another one.
    """
    names = [file.name for file in official_files(name)]
    if not names or (path.is_dir() and not any((path / file).is_file() for file in names)):
        layout = LAYOUTS.get(name)
        if layout is None:
            return None
        globs = [layout.marker, f"*/{layout.marker}"] if layout.marker else []
        recognised = path.is_file() or any(any(path.glob(glob)) for glob in globs)
        return layout.read(path) if recognised else None

    def copy(file: OfficialFile, target: Path) -> str:
        origin = path / file.name if path.is_dir() else path
        if not origin.is_file() or (path.is_file() and len(names) > 1):
            raise UserError(
                f"'{path}' does not hold {file.name}; '{name}' is imported from a folder with {', '.join(names)}; "
                "give that folder."
            )
        shutil.copyfile(origin, target)
        return str(origin)

    return _read_official(name, copy)


def download(name: str, progress: Progress | None) -> Arrays:
    """The arrays of a data set's official files, from the first address of each that answers.

    Args:
        name: One of `DOWNLOADS`.
        progress: Is told of every piece that arrives.

    Raises:
        UserError: The site cannot be reached, or sends something else.
    """

    def fetch(file: OfficialFile, target: Path) -> str:
        reasons = []
        for url in file.urls:
            try:
                _fetch_url(url, file, target, progress)
                return url
            except (OSError, HTTPException) as error:  # URLError and time-outs are OSErrors
                reasons.append(one_line(error).removeprefix("<urlopen error ").removesuffix(">"))
        raise UserError(
            f"'{name}' could not be downloaded ({file.name}: {reasons[0]}); it needs a network; where there is none, "
            f"bring the official files and run 'fedcli data import {name} PATH'."
        )

    return _read_official(name, fetch)


def _fetch_url(url: str, file: OfficialFile, target: Path, progress: Progress | None) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "fedcli"})  # some sites refuse Python's own
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, target.open("wb") as out:
        length = response.headers.get("Content-Length")
        while piece := response.read(1 << 20):
            out.write(piece)
            if progress:
                progress(file.name, out.tell(), int(length) if length else None)


def _read_official(name: str, obtain: Callable[[OfficialFile, Path], str]) -> Arrays:
    """The arrays of official files, each put where its reader looks for it by `obtain`, which returns its origin."""
    info, files = KNOWN[name], official_files(name)
    with tempfile.TemporaryDirectory(prefix="fedcli-") as root:
        folder = Path(root, info.source, "raw") if info.source and "MNIST" in info.source else Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            origin = obtain(file, folder / file.name)
            for kind, expected in (("MD5", file.md5), ("SHA256", SHA256.get(file.md5))):
                with (folder / file.name).open("rb") as content:
                    new_hash = partial(hashlib.new, kind, usedforsecurity=False)
                    digest = hashlib.file_digest(content, new_hash).hexdigest()
                if expected is not None and digest != expected:
                    raise UserError(
                        f"'{origin}' is not the whole official file '{file.name}' of '{name}' (got {kind} {digest}); "
                        f"it must have {expected}; get it again from {file.urls[0]}."
                    )
        if info.source is None:
            return LAYOUTS[name].read(folder / files[0].name)
        arrays: Arrays = {"class_names": np.array(info.class_names)}
        reader = getattr(torchvision().datasets, info.source)
        for part in PARTS:
            options = {"split": part} if info.source == "SVHN" else {"train": part == "train"}
            if info.split:
                options["split"] = info.split
            data = reader(root, download=True, **options)  # it unpacks the files, which are there and whole
            images = np.asarray(data.data)
            labels = np.asarray(data.labels if info.source == "SVHN" else data.targets)
            if info.source == "SVHN":
                images = images.transpose(0, 2, 3, 1)
            elif info.source == "EMNIST":
                images = images.transpose(0, 2, 1)  # the files hold every image with its rows as columns
            if info.split == "letters":
                labels = labels - 1  # a to z are 1 to 26 there
            arrays |= {f"x_{part}": images, f"y_{part}": labels}
    return checked(arrays, Path(name))
