"""Reads the files that the publishers of known data sets offer."""

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedcli.data.image_arrays import Arrays, Columns, join_splits
from fedcli.data.source import Source
from fedcli.reading import check_size, reading
from fedcli.vision import torchvision


def read_official(read_file: Callable[[Path, re.Match, str], Arrays], source: Source) -> Columns:
    """The columns of the arrays that `read_file` returns for each file and its split; of EMNIST, for those of the set.

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
    return join_splits(arrays, source.notes)


def read_idx(file: Path, match: re.Match, split: str) -> Arrays:
    """Returns a file of MNIST, or of EMNIST, where images are transposed and letters count from 1."""
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
    """Returns a file of USPS: labels from 1 and 256 values in [-1, 1], rounded down as by torchvision."""
    from sklearn.datasets import load_svmlight_file  # late: it takes two seconds

    values, labels = load_svmlight_file(file, n_features=256, dtype=np.float32)
    pixels = (values.toarray() + 1) / 2 * 255
    return {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels - 1}


def read_matlab(file: Path, match: re.Match, split: str) -> Arrays:
    """Returns a file of SVHN or SynthDigits: `X` `[H, W, 3, N]` and `y` `[N, 1]`, where 10 stands for 0."""
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
