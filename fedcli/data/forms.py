"""Files in which images come, read into columns: one table of forms, recognised by content.

A path is a folder or an archive, which is unpacked first; one more folder around it does not matter. The first form in
`FORMS` whose pattern matches a file reads the data set. torchvision downloads the official files where it has them, and
reads CIFAR; it is imported only then, because that takes seconds.
"""

import gzip
import json
import math
import os
import re
import socket
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from glob import glob
from http.client import HTTPException
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedcli.core.backbones import torchvision
from fedcli.data.catalog import KNOWN, DatasetInfo
from fedcli.data.files import ARRAYS, PART, PARTS, Arrays, check_size, choose_parts, join_parts, read_npz, reading
from fedcli.data.splits import read_pfllib
from fedcli.errors import UserError

LEAF_TEST = 10  # one writer in so many is held out for testing
TIMEOUT = 30  # seconds without a byte before a download is given up
_PART = f"(?:mnist_m_)?{PART}"  # a folder of the images of a part
_PICTURE = re.compile(f"(?:([^/]+)/)??(?:{_PART}/)?(?:([^/]+)/)?([^/]+)")  # <domain>/<part>/<class>/<file>
_LIST = re.compile(rf"(?:.*/)?{_PART}_(?:labels|annotations)\.txt")  # of the classes of a part's images


class Source(NamedTuple):
    """The files that a set is read from."""

    folder: Path  # the folder that holds them
    names: list[str]  # their paths in it, in order
    info: DatasetInfo | None  # of the set that they are to be, where that is known
    size: int | None  # pixels, height and width that images are resized to
    notes: list[str]  # what the user is told about the reading

    def files(self, pattern: str) -> list[tuple[re.Match, Path]]:
        """The files whose names are as the pattern says; those of several sets, in several folders, are refused."""
        matches = list(filter(None, (re.search(f"(?:^|/)(?:{pattern})$", name) for name in self.names)))
        folders = sorted({os.path.dirname(match.string) or "." for match in matches})
        if len(folders) > 1:
            raise ValueError(f"there are several data sets: give one folder of {', '.join(folders)}")
        return [(match, self.folder / match.string) for match in matches]


def read_parts(pattern: str, read_file: Callable[[Path, re.Match], Arrays], source: Source) -> Arrays:
    """What `read_file` gives by kind of each file of the pattern, whose group `test` says in which part it is."""
    arrays: Arrays = {}
    for match, file in source.files(pattern):
        if match.groupdict().get("split") == (source.info and source.info.split):
            with reading(file, "one of the official files, compressed or not"):
                part = "test" if match["test"] else "train"
                arrays |= {f"{kind}_{part}": values for kind, values in read_file(file, match).items()}
    return arrays


def read_idx(file: Path, match: re.Match) -> Arrays:
    """A file of MNIST, or of a division of EMNIST, in which every image has its rows as columns and a is 1."""
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as content:
        shape = np.frombuffer(content.read(4 * content.read(4)[3]), ">u4").tolist()
        check_size(math.prod(shape), file)
        values = np.frombuffer(content.read(math.prod(shape) + 1), np.uint8).reshape(shape)
    if match["kind"] == "labels":
        return {"y": values - 1 if match["split"] == "letters" else values}
    return {"x": values.transpose(0, 2, 1) if match["split"] else values}


def read_usps(file: Path, match: re.Match) -> Arrays:
    """A file of USPS: labels from 1 and 256 values in [-1, 1], which are rounded down, as torchvision does."""
    from sklearn.datasets import load_svmlight_file  # late: it takes two seconds

    values, labels = load_svmlight_file(file, n_features=256, dtype=np.float32)
    return {"x": ((values.toarray() + 1) / 2 * 255).astype(np.uint8), "y": labels - 1}


def read_matlab(file: Path, match: re.Match) -> Arrays:
    """A file of SVHN or SynthDigits: `X` `[H, W, 3, N]` and `y` `[N, 1]`, where 10 stands for 0."""
    from scipy.io import loadmat  # late: it takes a second

    data = loadmat(file)
    return {"x": data["X"].transpose(3, 0, 1, 2), "y": data["y"].reshape(-1) % 10}


def read_cifar(source: Source) -> Arrays:
    """CIFAR's batches, whose pickles torchvision reads if they have the official MD5, in a folder of any name."""
    ((match, file),) = source.files(CIFAR)
    name = "CIFAR10" if "batches" in match[0] else "CIFAR100"
    reader, arrays = getattr(torchvision().datasets, name), {}
    with reading(file.parent, f"the whole official files of {name}"), TemporaryDirectory(prefix="fedcli-") as root:
        Path(root, reader.base_folder).symlink_to(file.absolute().parent)
        for part in PARTS:
            data = reader(root, train=part == "train")
            arrays |= {f"x_{part}": data.data, f"y_{part}": np.array(data.targets)}
    return arrays | {"class_names": np.array(data.classes)}


def read_leaf(source: Source) -> Arrays:
    """FEMNIST as LEAF writes it: `users`, and in `user_data` of each `x` (784 values in [0, 1]) and `y` (0 to 61).

    Where LEAF has made folders `train` and `test`, these are the parts; else a fixed random tenth of the writers of
    `all_data` is the test part. Ink is dark on a bright ground, as in the files.
    """
    paths = [source.folder.absolute() / name for name in source.names if name.endswith(".json")]
    folders = {file.parent.name for file in paths}
    chosen = set(PARTS) if folders >= set(PARTS) else {"all_data"} if "all_data" in folders else folders
    if folders - chosen:
        source.notes.append(f"left out: {', '.join(sorted(folders - chosen))}")
    written: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}  # images and labels by folder and writer
    for file in [file for file in paths if file.parent.name in chosen]:
        with reading(file, "one of LEAF's files, with users and user_data"):
            content = json.loads(file.read_bytes())
            for writer in content["users"]:
                x, y = (np.asarray(content["user_data"][writer][key]) for key in "xy")
                if x.shape != (len(y), 784) or not 0 <= x.min() <= x.max() <= 1:
                    raise ValueError(f"the writer {writer} has no images of 784 values from 0 to 1 with a label each")
                written[file.parent.name, writer] = np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28), y
        check_size(sum(images.size for images, _ in written.values()), file.parent)
    cells = sorted(written)
    folders, names = np.repeat(cells, [len(written[cell][1]) for cell in cells], axis=0).T
    writers, numbers = np.unique(names, return_inverse=True)
    held_out = np.random.default_rng(0).permutation(len(writers))[: max(1, round(len(writers) / LEAF_TEST))]
    test = folders == "test" if chosen == set(PARTS) else np.isin(numbers, held_out)
    x, y = map(np.concatenate, zip(*map(written.get, cells), strict=True))
    return {"x": x, "y": y, "writer": numbers, "test": test, "class_names": np.arange(62)}


def read_pictures(source: Source) -> Arrays:
    """Image files in folders `train/<class>/*` and `test/<class>/*`, or both inside `<domain>/`.

    `val` stands for `test` where there is none with classes. Without such folders, in `<class>/*` and
    `<domain>/<class>/*`, the images are in no part. Files may lie in one more folder `images`, and a list may tell
    their classes, as in Tiny-ImageNet and MNIST-M. Labels and domains follow the sorted names. Grey images become
    coloured where there are coloured ones.
    """
    rows, pictures = _find_pictures(source), []
    for *_, name in rows:
        with reading(name, "an image of 8 bits a channel, all of one size"):
            with Image.open(source.folder / name) as image:
                if image.mode.startswith(("I", "F")):
                    raise ValueError(f"its pixels are of mode {image.mode}")
                whole = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            if source.size:
                whole = whole.resize((source.size, source.size), Image.Resampling.BILINEAR)
            pictures.append(np.atleast_3d(np.asarray(whole)))
            if pictures[-1].shape[:2] != pictures[0].shape[:2]:
                first = pictures[0].shape[1::-1]
                raise ValueError(f"it has {whole.size} pixels, not {first}: 'fedcli data import NAME PATH --size N'")
        check_size(len(rows) * pictures[-1].size, source.folder)
    domains, parts, labels, _ = np.array(rows).T
    columns = {"x": np.stack(np.broadcast_arrays(*pictures))}
    columns["class_names"], columns["y"] = np.unique(labels, return_inverse=True)
    if any(domains):
        columns["domain_names"], columns["domain"] = np.unique(domains, return_inverse=True)
    return columns | ({"test": parts == "test"} if any(parts) else {})


def _find_pictures(source: Source) -> list[tuple[str, str, str, str]]:
    """Domain, part, class and name of each image that is taken; domain and part are empty where there are none."""
    lists = {}  # of some parts, the class of each image by its file
    for match in filter(None, map(_LIST.fullmatch, source.names)):
        lines = (source.folder / match.string).read_text(errors="replace").splitlines()
        lists[match[1]] = dict(line.split()[:2] for line in lines if len(line.split()) > 1)
    names, rows = [name for name in source.names if not _LIST.fullmatch(name)], []
    for name in [name for name in names if "/images/" in f"/{name}"] or names:  # lists of boxes lie beside `images`
        match = _PICTURE.fullmatch(re.sub("(^|/)images/", r"\1", name))
        if match is None:
            raise ValueError(f"'{name}' lies too deep: move or remove it")
        domain, part, label, file = match.groups(default="")
        label = label or lists.get(part, {}).pop(file, "")
        if label:
            rows.append((domain, part, label, name))
        elif part in lists:
            lists[part][file] = "in no list"
    if odd := [file for files in lists.values() for file in files]:
        raise ValueError(f"images and the list of their classes do not fit: '{odd[0]}' is in one of them")
    if not rows:
        raise ValueError(f"there are no images in folders, but '{source.names[0]}'")
    parts = choose_parts({row[1] for row in rows}, source.notes)
    taken = dict(zip(parts, PARTS, strict=False)) if len(parts) > 1 else {"": ""}
    return [(domain, taken[part], label, name) for domain, part, label, name in rows if part in taken]


# By the form's name: a regular expression that some "/" + relative path must match, and its reader. The first match
# wins, and the last entry matches everything.
CIFAR = r"(?:batches\.)?meta"
IDX = r"(?:emnist-(?P<split>\w+)-)?(?:train|(?P<test>test|t10k))-(?P<kind>images|labels).idx[13]-ubyte(?:\.gz)?"
USPS = r"usps(?P<test>\.t)?(?:\.bz2)?"
MATLAB = r"(?:synth_)?(?:train|(?P<test>test))_32x32\.mat"
FORMS: dict[str, tuple[str, Callable[[Source], Arrays]]] = {
    "PFLlib's train/0.npz": (r"^/train/0\.npz$", lambda source: read_pfllib(source.folder)),
    "MNIST's *-images-idx3-ubyte": (f"/{IDX}$", partial(read_parts, IDX, read_idx)),
    "CIFAR's batches": (f"/{CIFAR}$", read_cifar),
    "USPS's usps and usps.t": (f"/{USPS}$", partial(read_parts, USPS, read_usps)),
    "SVHN's or SynthDigits' *_32x32.mat": (f"/{MATLAB}$", partial(read_parts, MATLAB, read_matlab)),
    "LEAF's all_data_*.json": (r"all_data[^/]*\.json$", read_leaf),
    "image folders <class>/*": ("", read_pictures),
}
FORM = f"an .npz file, or a folder, .zip or .tar in one of these forms: {', '.join(FORMS)}"


def read(path: Path, info: DatasetInfo | None, size: int | None = None) -> tuple[Arrays, list[str]]:
    """The columns of a file, folder or archive, not yet in their one form, and notes for the user.

    `info` describes the known set of that name, if there is one; images in files are resized to its size, else to
    `size`. Call this inside `reading`, which turns an error into one refusal.
    """
    notes: list[str] = []
    if path.suffix == ".npz" and path.is_file():
        with reading(path, ARRAYS):
            return join_parts(read_npz(path), notes), notes
    with TemporaryDirectory(prefix="fedcli-") as temporary:
        folder = path if path.is_dir() or path.is_fifo() else unpack_archive(path, Path(temporary))
        names = files_below(folder)
        common = os.path.commonpath([os.path.dirname(name) for name in names] or [""])
        around = "/".join(takewhile(lambda name: not re.fullmatch(_PART, name), common.split("/")))
        folder, names = folder / around, [name.removeprefix(f"{around}/") for name in names]
        size = info.image_size if info and info.resized else size
        for marker, read_form in FORMS.values():
            if any(re.search(marker, f"/{name}") for name in names):
                arrays = read_form(Source(folder, names, info, size, notes))
                return (arrays if "x" in arrays else join_parts(arrays, notes)), notes
    raise ValueError("it is empty")


def files_below(folder: Path) -> list[str]:
    """The paths of the files in a folder and those below it, in order; hidden ones are left out."""
    names = [name for name in glob("**", root_dir=folder, recursive=True) if (folder / name).is_file()]
    return sorted(names, key=lambda name: name.split("/"))


def unpack_archive(path: Path, folder: Path) -> Path:
    """The empty folder, with what a zip or tar, compressed in any way, holds; names that lead out of it are refused.

    Raises:
        UserError: It unpacks to more than `files.LIMIT`.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_size(sum(_image_bytes(member.filename, member.file_size) for member in archive.infolist()), path)
            archive.extractall(folder)
    else:
        with tarfile.open(path) as archive:
            check_size(sum(_image_bytes(member.name, member.size) for member in archive), path)
            archive.extractall(folder, filter="data")
            while archive.fileobj.read(1 << 20):  # the checksum of a compressed archive stands at its end
                pass
    return folder


def _image_bytes(name: str, size: int) -> int:
    """Bytes of the images in a file of an archive; LEAF's JSON has five characters or more, as `0.0, `, for each."""
    return size // 5 if name.endswith(".json") else size


ARCHIVES = {  # address and MD5 of those that torchvision does not have
    "cinic10": (
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz", "6ee4d0c996905fe93221de577967a372",
    ),
    "tiny-imagenet": ("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),
}  # fmt: skip
DOWNLOADS = tuple(name for name, info in KNOWN.items() if info.source or name in ARCHIVES)


def download_files(name: str, folder: Path) -> None:
    """Downloads the official files of one of `DOWNLOADS` into an empty folder, compared with their MD5, by torchvision.

    Raises:
        UserError: The site cannot be reached, or sends something else.
    """
    datasets, info = torchvision().datasets, KNOWN[name]
    socket.setdefaulttimeout(TIMEOUT)
    try:
        if name in ARCHIVES:
            url, md5 = ARCHIVES[name]
            datasets.utils.download_and_extract_archive(url, folder, md5=md5, remove_finished=True)
            return
        for part in PARTS:
            options = {"split": part} if info.source == "SVHN" else {"train": part == "train"}
            options |= {"split": info.split} if info.split else {}
            getattr(datasets, info.source)(folder, download=True, **options)
    except (OSError, RuntimeError, HTTPException) as error:
        remedy = f"without a network, bring the official files and run 'fedcli data import {name} PATH'."
        raise UserError(f"'{name}' could not be downloaded ({' '.join(str(error).split())}); {remedy}") from error
    finally:
        socket.setdefaulttimeout(None)
