"""Reads files of images into columns: one table of file formats, recognised by the names of the files.

A path is a folder or an archive, which is unpacked first; one more folder around it does not matter. The first format
in `FILE_FORMATS` whose pattern matches a file reads the set.
"""

import gzip
import json
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from fedcli.data import hugging_face
from fedcli.data.dataset_info import DatasetInfo
from fedcli.data.image_arrays import SPLIT, SPLITS, Arrays, Columns, choose_splits, join_rows, join_splits, read_npz
from fedcli.data.pictures import Source, stack_pictures
from fedcli.data.reading import check_size, reading
from fedcli.errors import UserError
from fedcli.vision import torchvision

_SPLIT = f"(?:mnist_m_)?{SPLIT}"  # a folder of the images of a split
_PICTURE = re.compile(f"(?:([^/]+)/)??(?:{_SPLIT}/)?(?:([^/]+)/)?([^/]+)")  # <domain>/<split>/<class>/<file>
_CLASS_LIST = re.compile(rf"(?:.*/)?{_SPLIT}_(?:labels|annotations)\.txt")  # of a split's images
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")


def read_official(read_file: Callable[[Path, re.Match, str], Arrays], source: Source) -> Arrays:
    """The arrays that `read_file` returns for each file and its split; of EMNIST, for those of the set.

    Files of several sets, in several folders, are refused.
    """
    folders = sorted({os.path.dirname(match.string) or "." for match in source.matches})
    if len(folders) > 1:
        raise ValueError(f"there are several data sets: give one folder of {', '.join(folders)}")
    emnist_split = source.info.emnist_split if source.info else None
    arrays: Arrays = {}
    for match in source.matches:
        groups = match.groupdict()
        if groups.get("emnist_split") == emnist_split:
            file = source.folder / match.string
            split = "test" if groups.get("test") else "train"
            with reading(file, "one of the official files, whole, compressed or not"):
                arrays |= read_file(file, match, split)
    return arrays


def read_idx(file: Path, match: re.Match, split: str) -> Arrays:
    """A file of MNIST, or of EMNIST, where images are transposed and letters count from 1."""
    open_file = gzip.open if file.suffix == ".gz" else open
    with open_file(file, "rb") as content:
        _, _, _, num_axes = content.read(4)
        shape = np.frombuffer(content.read(4 * num_axes), ">u4")
        count = int(shape.prod())
        check_size(count, file)  # before the rest is unpacked
        values = np.frombuffer(content.read(count + 1), np.uint8).reshape(shape)
    emnist_split = match["emnist_split"]
    if match["content"] == "labels":
        first_label = 1 if emnist_split == "letters" else 0
        return {f"y_{split}": values - first_label}
    if emnist_split:
        values = values.transpose(0, 2, 1)
    return {f"x_{split}": values}


def read_usps(file: Path, match: re.Match, split: str) -> Arrays:
    """A file of USPS: labels from 1 and 256 values in [-1, 1], rounded down as by torchvision."""
    from sklearn.datasets import load_svmlight_file  # late: it takes two seconds

    values, labels = load_svmlight_file(file, n_features=256, dtype=np.float32)
    pixels = (values.toarray() + 1) / 2 * 255
    return {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels - 1}


def read_matlab(file: Path, match: re.Match, split: str) -> Arrays:
    """A file of SVHN or SynthDigits: `X` `[H, W, 3, N]` and `y` `[N, 1]`, where 10 stands for 0."""
    from scipy.io import loadmat  # late: it takes a second

    data = loadmat(file)
    return {f"x_{split}": data["X"].transpose(3, 0, 1, 2), f"y_{split}": data["y"].reshape(-1) % 10}


def read_cifar(file: Path, match: re.Match, split: str) -> Arrays:
    """CIFAR's batches, beside the file `meta`; torchvision reads their pickles if they have the official MD5."""
    sets = torchvision().datasets
    reader = sets.CIFAR10 if file.name.startswith("batches") else sets.CIFAR100
    with TemporaryDirectory(prefix="fedcli-") as root:
        Path(root, reader.base_folder).symlink_to(file.absolute().parent)
        train = reader(root, train=True)
        test = reader(root, train=False)
    return {
        "x_train": train.data,
        "y_train": np.array(train.targets),
        "x_test": test.data,
        "y_test": np.array(test.targets),
        "class_names": np.array(train.classes),
    }


class _Pages(NamedTuple):
    """What a writer of FEMNIST has written, in one of LEAF's folders."""

    folder: str
    writer: str
    images: np.ndarray  # uint8 [n, 28, 28]
    labels: np.ndarray  # [n]


def read_leaf(source: Source) -> Columns:
    """FEMNIST as LEAF writes it: `users`, and in `user_data` of each `x` (784 values in [0, 1]) and `y` (0 to 61).

    LEAF's folders `train` and `test` are the splits; without both, those of a fixed random tenth of the writers are the
    test split.
    """
    paths = [source.folder.absolute() / name for name in source.names if name.endswith(".json")]
    folders = {file.parent.name for file in paths}
    if folders >= set(SPLITS):
        chosen = set(SPLITS)
    elif "all_data" in folders:
        chosen = {"all_data"}
    else:
        chosen = folders
    if folders - chosen:
        source.notes.append(f"left out: {', '.join(sorted(folders - chosen))}")
    all_pages = _read_pages([path for path in paths if path.parent.name in chosen])
    writers, numbers = np.unique([pages.writer for pages in all_pages], return_inverse=True)
    if chosen == set(SPLITS):
        test = np.array([pages.folder == "test" for pages in all_pages])
    else:
        num_held_out = max(1, round(len(writers) / 10))
        held_out = np.random.default_rng(0).permutation(len(writers))[:num_held_out]
        test = np.isin(numbers, held_out)
    counts = [len(pages.labels) for pages in all_pages]
    return {
        "x": np.concatenate([pages.images for pages in all_pages]),
        "y": np.concatenate([pages.labels for pages in all_pages]),
        "writer": np.repeat(numbers, counts),
        "test": np.repeat(test, counts),
        "class_names": np.arange(62),
    }


def _read_pages(paths: list[Path]) -> list[_Pages]:
    """What the writers in some of LEAF's files have written, by folder and then by writer."""
    written: dict[tuple[str, str], _Pages] = {}  # by folder and writer
    for path in paths:
        folder = path.parent.name
        with reading(path, "one of LEAF's files, with users and user_data"):
            content = json.loads(path.read_bytes())
            for writer in content["users"]:
                x = np.asarray(content["user_data"][writer]["x"])
                y = np.asarray(content["user_data"][writer]["y"])
                if x.shape != (len(y), 784) or not 0 <= x.min() <= x.max() <= 1:
                    raise ValueError(f"the writer {writer} has no images of 784 values from 0 to 1 with a label each")
                pixels = np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28)
                written[folder, writer] = _Pages(folder, writer, pixels, y)
        check_size(sum(pages.images.size for pages in written.values()), path.parent)
    return [written[key] for key in sorted(written)]


def read_pfllib(source: Source) -> Columns:
    """The columns of all clients' images, of `train/*.npz` and then `test/*.npz`, with their `client` `[N]`.

    Raises:
        UserError: Files are missing or are none of PFLlib's.
    """
    files: list[Columns] = []
    for split in SPLITS:
        for client in range(len(list(source.folder.glob("train/*.npz")))):
            path = source.folder / split / f"{client}.npz"
            with reading(path, "an image set's file as PFLlib's generate_*.py write it, a dict of arrays x and y"):
                content = _read_pickled_dict(path)
                x = _stored_array(content["x"])
                y = _stored_array(content["y"])
                if len(x) != len(y):
                    raise ValueError(f"{len(x)} images, {len(y)} labels")
                client_of_image = np.full(len(y), client)
                is_test = np.full(len(y), split == "test")
                files.append({"x": x, "y": y, "client": client_of_image, "test": is_test})
    return join_rows(files)


def _read_pickled_dict(path: Path) -> dict[str, Any]:
    """The dict that an `.npz` file holds pickled, as its only array `data`."""
    with zipfile.ZipFile(path) as archive, archive.open("data.npy") as member:
        np.lib.format.read_magic(member)
        np.lib.format.read_array_header_1_0(member)
        (content,) = _Unpickler(member).load().state[4]
    return content


class _Stored:
    """The arguments and the state of an array or a dtype in a pickle; nothing is made of them."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: tuple) -> None:
        self.state = state


def _stored_array(stored: _Stored) -> np.ndarray:
    """The array of numbers that a pickle describes by shape, dtype, order and bytes; NumPy refuses objects."""
    _, shape, dtype, is_fortran, content = stored.state
    number_type, *_ = dtype.arguments  # as "f8"
    _, byte_order, *_ = dtype.state
    values = np.frombuffer(content, byte_order + number_type)
    return values.reshape(shape, order="F" if is_fortran else "C")


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of numbers, texts, dicts and arrays, and runs nothing that it says.

    A pickle may have any function called. Here the three that an array needs stand for `_Stored`; others are refused.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" or name not in ("_reconstruct", "ndarray", "dtype"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return _Stored


def read_pictures(source: Source) -> Columns:
    """Image files in folders `train/<class>/*` and `test/<class>/*`, or both inside `<domain>/`.

    Without such folders the images are in no split. Files may lie in one more folder `images`, and a list may tell
    their classes, as in Tiny-ImageNet and MNIST-M. Grey images become coloured where there are coloured ones.

    Raises:
        UserError: Some images cannot be read.
    """
    pictures = _find_pictures(source)
    named_files = [(picture.name, source.folder / picture.name) for picture in pictures]
    pixels = stack_pictures(source, len(pictures), named_files)
    domains = np.array([picture.domain for picture in pictures])
    splits = np.array([picture.split for picture in pictures])
    columns = {"x": pixels, "y": np.array([picture.label for picture in pictures])}
    if any(domains):
        columns["domain_names"], columns["domain"] = np.unique(domains, return_inverse=True)
    if any(splits):
        columns["test"] = splits != "train"
    return columns


class _Picture(NamedTuple):
    """An image file, and what its folders say of it."""

    domain: str  # empty where there are none; so is the split
    split: str
    label: str
    name: str  # its path


def _find_pictures(source: Source) -> list[_Picture]:
    """The image files of a set, each with its class."""
    classes = _read_class_lists(source)
    others = [name for name in source.names if not _CLASS_LIST.fullmatch(name)]
    names = [name for name in others if name.lower().endswith(SUFFIXES)]
    if 0 < len(names) < len(others):
        source.notes.append(f"left out: {len(others) - len(names):,} files that are no images by their suffix")
    in_images = [name for name in names if "/images/" in f"/{name}"]
    names = in_images or names  # lists of boxes lie beside `images`
    pictures = []
    unfit = []  # files that are in a folder or in a list alone
    for name in names:
        match = _PICTURE.fullmatch(re.sub("(^|/)images/", r"\1", name))
        if match is None:
            raise ValueError(f"'{name}' lies too deep: move or remove it")
        domain, split, label, file = match.groups(default="")
        if not label:
            label = classes.get(split, {}).pop(file, "")
        if label:
            pictures.append(_Picture(domain, split, label, name))
        elif split in classes:
            unfit.append(file)
    for files_without_images in classes.values():
        unfit += files_without_images
    if unfit:
        (file, *_) = unfit
        raise ValueError(f"images and the list of their classes do not fit: '{file}' is in one of them")
    if not pictures:
        (file, *_) = source.names
        raise ValueError(f"there are no images in folders, but '{file}'")
    splits = choose_splits({picture.split for picture in pictures}, source.notes)
    return [picture for picture in pictures if picture.split in splits]


def _read_class_lists(source: Source) -> dict[str, dict[str, str]]:
    """Of the splits that have a list of them, the class of each image by its file."""
    classes = {}
    for name in source.names:
        match = _CLASS_LIST.fullmatch(name)
        if match is not None:
            text = (source.folder / name).read_text(errors="replace")
            split = match[1]
            classes[split] = dict(re.findall(r"^(\S+)[ \t]+(\S+)", text, re.MULTILINE))
    return classes


class FileFormat(NamedTuple):
    """How files keep a set of images."""

    pattern: str  # a regular expression of the last part of a path
    read: Callable[[Source], Arrays]  # the set's arrays, or its columns


# By name. The first format that matches a file wins, and the last one matches everything.
FILE_FORMATS = {
    "PFLlib's train/0.npz": FileFormat(r"^train/0\.npz$", read_pfllib),
    "MNIST's *-images-idx3-ubyte": FileFormat(
        r"(?:emnist-(?P<emnist_split>\w+)-)?(?:train|(?P<test>test|t10k))-(?P<content>images|labels).idx[13]-ubyte"
        r"(?:\.gz)?$",
        partial(read_official, read_idx),
    ),
    "CIFAR's batches": FileFormat(r"(?:batches\.)?meta$", partial(read_official, read_cifar)),
    "USPS's usps and usps.t": FileFormat(r"usps(?P<test>\.t)?(?:\.bz2)?$", partial(read_official, read_usps)),
    "SVHN's or SynthDigits' *_32x32.mat": FileFormat(
        r"(?:synth_)?(?:train|(?P<test>test))_32x32\.mat$", partial(read_official, read_matlab),
    ),
    "LEAF's all_data_*.json": FileFormat(r"all_data[^/]*\.json$", read_leaf),
    hugging_face.FILES: FileFormat(hugging_face.PATTERN, hugging_face.read_hugging_face),
    "image folders <class>/*": FileFormat("", read_pictures),
}  # fmt: skip
ACCEPTED = f"an .npz file, or a folder, .zip or .tar in one of these forms: {', '.join(FILE_FORMATS)}"


def read(path: Path, info: DatasetInfo | None, size: int | None, notes: list[str]) -> Columns:
    """The columns of a file, folder or archive, not yet converted; adds notes for the user.

    `info` is of the known set that the files are to be; `size`, in pixels, is for images of other sets. Call this
    inside `reading`.
    """
    if path.suffix == ".npz" and path.is_file():
        return join_splits(read_npz(path), notes)
    with TemporaryDirectory(prefix="fedcli-") as temporary:
        folder = path if path.is_dir() else unpack_archive(path, Path(temporary))
        names = files_below(folder)
        common = os.path.commonpath([os.path.dirname(name) for name in names] or [""])
        around = re.sub(f"(^|/){_SPLIT}(/.*)?$", "", common)  # the folders above those of the splits
        names = [name.removeprefix(f"{around}/") for name in names]
        if info and info.to_import:
            size = info.image_size
        for file_format in FILE_FORMATS.values():
            whole_pattern = re.compile(f"(?:^|/){file_format.pattern}")
            matches = list(filter(None, map(whole_pattern.search, names)))
            if matches:
                arrays = file_format.read(Source(folder / around, names, matches, info, size, notes))
                return arrays if "x" in arrays else join_splits(arrays, notes)
    raise ValueError("it is empty")


def location(text: str) -> str:
    """The path in a text, which has `hf:` before it where a data set of Hugging Face is to be there.

    Raises:
        UserError: There is none behind `hf:`.
    """
    path = text.removeprefix(hugging_face.PREFIX)
    if path == text:
        return text
    folder = Path(path).expanduser()
    if not any(re.search(f"(?:^|/){hugging_face.PATTERN}", name) for name in files_below(folder)):
        fault = f"'{path}' is no folder with a data set of Hugging Face (got no state.json or *.parquet in it)"
        raise UserError(f"{fault}; keep one with datasets.load_dataset(NAME).save_to_disk(FOLDER), and give hf:FOLDER.")
    return str(folder)


def files_below(folder: Path) -> list[str]:
    """The paths of the files in a folder and those below it, in order; hidden ones are left out."""
    names = [name for name in glob("**", root_dir=folder, recursive=True) if (folder / name).is_file()]
    return sorted(names, key=lambda name: name.split("/"))


def unpack_archive(path: Path, folder: Path) -> Path:
    """The empty folder, with the content of a zip or tar; no file leads out of it.

    Raises:
        UserError: Its images are too large.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            sizes = [_image_bytes(member.filename, member.file_size) for member in archive.infolist()]
            check_size(sum(sizes), path)
            archive.extractall(folder)
    else:
        with tarfile.open(path) as archive:
            sizes = [_image_bytes(member.name, member.size) for member in archive]
            check_size(sum(sizes), path)
            archive.extractall(folder, filter="data")
            archive.fileobj.read(1 << 30)  # the checksum of a compressed archive stands at its end
    return folder


def _image_bytes(name: str, size: int) -> int:
    """Bytes of the images in a file of an archive; LEAF's JSON has five characters or more, as `0.0, `, for each."""
    return size // 5 if name.endswith(".json") else size
