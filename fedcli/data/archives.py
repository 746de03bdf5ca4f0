"""The known data sets' files as their sites give them, downloaded or brought by the user.

Addresses, checksums and readers are torchvision's where it has them; it is imported only when they are needed, because
that takes seconds. The other sets' readers are in `fedcli.data.layouts`. Arrays are those of `fedcli.data.files`.
"""

import hashlib
import shutil
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcli.core.backbones import torchvision
from fedcli.data import layouts
from fedcli.data.catalog import KNOWN, Known
from fedcli.data.files import PARTS, Arrays, checked, one_line
from fedcli.errors import UserError

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all where the server says so
TIMEOUT = 30  # seconds without a byte before a download is given up


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
DOWNLOADS = tuple(name for name, known in KNOWN.items() if known.source or name in ARCHIVES)
WITH_FILES = tuple(name for name in KNOWN if name in DOWNLOADS or name in layouts.LAYOUTS)


def holds(name: str, path: Path) -> bool:
    """Whether a path stands for official files of the named data set: a file, or a folder with one of them."""
    if path.is_file():
        return name in WITH_FILES
    return _has_file(name, path) or layouts.holds(name, path)


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
    return layouts.LAYOUTS[name].read(path)


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
        return [ARCHIVES[name]] if name in ARCHIVES else []
    source = _torchvision_class(known)
    if known.source == "EMNIST":
        return [_File(source.url.rpartition("/")[2], (source.url,), source.md5)]
    if known.source.startswith("CIFAR"):
        return [_File(source.filename, (source.url,), source.tgz_md5)]
    if known.source in ("SVHN", "USPS"):
        return [_File(name, (url,), md5) for url, name, md5 in (source.split_list[part] for part in PARTS)]
    return [_File(name, tuple(mirror + name for mirror in source.mirrors), md5) for name, md5 in source.resources]


def _read(name: str, obtain: Callable[[_File, Path], str]) -> Arrays:
    """The arrays of official files, each put where its reader looks for it by `obtain`, which returns its origin."""
    known, files = KNOWN[name], _files(name)
    with tempfile.TemporaryDirectory(prefix="fedcli-") as root:
        folder = Path(root, known.source, "raw") if known.source and "MNIST" in known.source else Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            origin = obtain(file, folder / file.name)
            with (folder / file.name).open("rb") as content:
                md5 = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if md5 != file.md5:
                raise UserError(
                    f"'{origin}' is not the whole official file '{file.name}' of '{name}' (got MD5 {md5}); it must "
                    f"have {file.md5}; get it again from {file.urls[0]}."
                )
        if known.source is None:
            return layouts.LAYOUTS[name].read(folder / files[0].name)
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
