"""Reads files of images into columns: one table of file formats, recognised by the names of the files.

A path is a folder or an archive, which is unpacked first; one more folder around it does not matter. The first format
in `FILE_FORMATS` whose pattern matches a file reads the set.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fedcli.data import hugging_face
from fedcli.data.archives import files_below, unpack_archive
from fedcli.data.dataset_info import DatasetInfo
from fedcli.data.image_arrays import Columns, join_splits, read_npz
from fedcli.data.image_folders import SPLIT_FOLDER, read_pictures
from fedcli.data.leaf import read_leaf
from fedcli.data.official_files import read_cifar, read_idx, read_matlab, read_official, read_usps
from fedcli.data.pfllib import read_pfllib
from fedcli.data.source import Source
from fedcli.errors import UserError


class FileFormat(NamedTuple):
    """How files keep a set of images."""

    pattern: str  # a regular expression of the last part of a path
    read: Callable[[Source], Columns]


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
    """Returns the columns of a file, folder or archive, not yet converted; adds notes for the user.

    `info` is of the known set that the files are to be; `size`, in pixels, is for images of other sets. Call this
    inside `reading`.
    """
    if path.suffix == ".npz" and path.is_file():
        return join_splits(read_npz(path), notes)
    with TemporaryDirectory(prefix="fedcli-") as temporary:
        folder = path if path.is_dir() else unpack_archive(path, Path(temporary))
        names = files_below(folder)
        common = os.path.commonpath([os.path.dirname(name) for name in names] or [""])
        around = re.sub(f"(^|/){SPLIT_FOLDER}(/.*)?$", "", common)  # the folders above those of the splits
        names = [name.removeprefix(f"{around}/") for name in names]
        if info and info.is_resized:
            size = info.image_size
        for file_format in FILE_FORMATS.values():
            pattern = re.compile(f"(?:^|/){file_format.pattern}")
            matches = [match for match in map(pattern.search, names) if match is not None]
            if not matches:
                continue
            source = Source(folder / around, names=names, matches=matches, info=info, size=size, notes=notes)
            return file_format.read(source)
    raise ValueError("it is empty")


def location(text: str) -> str:
    """Returns the path in a text, which has `hf:` before it where a data set of Hugging Face is to be there.

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
