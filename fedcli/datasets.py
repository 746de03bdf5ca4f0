"""Named data sets as uint8 tensors: built in, downloaded or imported, and kept in one cache file each.

A set is in canonical order, by label and then by a hash of the pixels, so that a seed gives the same partition
whichever file the images came from. The cache files are in the `.npz` form of `fedcli.readers`.
"""

import hashlib
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import official, readers
from fedcli.batches import generator
from fedcli.errors import UserError, unknown
from fedcli.records import write_atomically

# Training images, test images, classes, (channels, H, W).
BUILT_IN = {"digits": (1438, 359, 10, (1, 8, 8)), "digit-domains": (5752, 1436, 10, (3, 16, 16))}


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory, in canonical order."""

    name: str
    x_train: Tensor  # uint8 [N, channels, H, W]
    y_train: Tensor  # int64 [N]
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...]
    domain_train: Tensor | None = None  # int64 [N], where there are several domains
    domain_test: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    reduced: bool = False  # whether training images were left out

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.class_names)

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return self.x_train.shape[1]

    @property
    def image_size(self) -> int:
        """Height and width in pixels."""
        return self.x_train.shape[2]

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of a SHA-256 over pixels, labels and domains of both parts."""
        digest = hashlib.sha256()
        parts = (self.x_train, self.y_train, self.domain_train), (self.x_test, self.y_test, self.domain_test)
        for tensor in (tensor for part in parts for tensor in part if tensor is not None):
            array = tensor.numpy().reshape(-1)
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False))
        return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where the data sets are kept: `$FEDCLI_DATA`, or `~/.cache/fedcli`."""
    return Path(os.environ.get("FEDCLI_DATA") or "~/.cache/fedcli").expanduser()


def names() -> list[str]:
    """All names: built in, to be downloaded, and imported under a name of their own."""
    imported = sorted(path.stem for path in cache_folder().glob("*.npz") if _is_name(path.stem))
    return list(dict.fromkeys([*BUILT_IN, *official.KNOWN, *imported]))


def available(name: str) -> None:
    """Refuses what `load` would refuse, without reading the images.

    Raises:
        UserError: The name is unknown, or the images are not on this machine.
    """
    if name not in names():
        remedy = "'fedcli data list' shows all, and 'fedcli data import NAME PATH' adds one."
        raise unknown("data set", name, names(), remedy)
    if name not in BUILT_IN and not _cache_file(name).is_file():
        raise UserError(
            f"the data set '{name}' is not on this machine (got no '{_cache_file(name)}'); run 'fedcli data download "
            f"{name}', or without a network 'fedcli data import {name} PATH'."
        )


def load(name: str) -> Dataset:
    """The named data set, built or from the cache; never from a network.

    Raises:
        UserError: The name is unknown, or the images are not on this machine or damaged.
    """
    available(name)
    return _built(name) if name in BUILT_IN else _dataset(name, readers.read_npz(_cache_file(name)))


def download(name: str, progress: official.Progress | None = None) -> Path:
    """The cache file of a data set, which is downloaded unless it is there.

    Args:
        name: One of those that can be downloaded.
        progress: Called with file name, bytes so far and bytes in all (None where the site does not say).

    Raises:
        UserError: The name is not one of those, or the download fails.
    """
    if name in BUILT_IN:
        raise UserError(f"the data set '{name}' is built in (got a download of it); use it as it is.")
    if name not in official.KNOWN:
        remedy = f"these can be downloaded: {', '.join(official.KNOWN)}."
        raise unknown("data set to download", name, official.KNOWN, remedy)
    return _cache_file(name) if _cache_file(name).is_file() else _keep(name, official.download(name, progress))


def import_path(name: str, path: Path) -> Path:
    """The cache file into which a data set was taken from files of the user's; one of that name is replaced.

    Args:
        name: A known name, whose shape and classes the images must have, or a new one of a-z, 0-9 and -.
        path: `.npz` file; folder `train/<class>/*` and `test/<class>/*`, or both inside `<domain>/`; or the archive
            or folder of files that the set's site gives.

    Raises:
        UserError: The name cannot be given, or the files are missing, damaged or not what the name stands for.
    """
    path = Path(path)
    if name in BUILT_IN or not _is_name(name):
        what = "is built in" if name in BUILT_IN else "is not possible"
        raise UserError(f"the name '{name}' {what}; an imported set is called by a-z, 0-9 and -; choose another name.")
    if not path.exists():
        raise UserError(f"there is nothing at '{path}'; give an .npz file, an image folder or the official archive.")
    return _keep(name, _read(name, path))


def describe(name: str) -> dict[str, Any]:
    """What is known of a data set without loading it.

    Returns:
        `name`; `kind`, which is built-in, download or imported; `present`; and `train`, `test` and `classes` (numbers)
        and `shape` (channels, H, W).

    Raises:
        UserError: The name is unknown, or its cache file is damaged.
    """
    present = name in BUILT_IN or (name in names() and _cache_file(name).is_file())
    if not present and name not in official.KNOWN:
        available(name)
    kind = "built-in" if name in BUILT_IN else "download" if name in official.KNOWN else "imported"
    if name in BUILT_IN:
        sizes = BUILT_IN[name]
    elif present:
        sizes = readers.npz_sizes(_cache_file(name))
    else:
        sizes = official.KNOWN[name].sizes
    return {"name": name, "kind": kind, "present": present} | dict(
        zip(("train", "test", "classes", "shape"), sizes, strict=True)
    )


def take(dataset: Dataset, num_train: int, seed: int) -> Dataset:
    """A part of the training images, stratified by class and then by domain; the test images stay.

    Every class keeps its share of the images and at least one; inside a class the domains keep their shares. With the
    same seed, a smaller part is contained in a larger one.

    Args:
        dataset: Of N training images and C classes.
        num_train: How many to keep, from C to N.
        seed: Of the choice.

    Returns:
        The part, in canonical order, with `reduced` set.

    Raises:
        UserError: There are fewer images, or more classes.
    """
    labels, count = dataset.y_train.numpy(), len(dataset.y_train)
    if not dataset.num_classes <= num_train <= count:
        raise UserError(
            f"--train-examples {num_train} does not fit the data set '{dataset.name}' (got {count} training images of "
            f"{dataset.num_classes} classes); use {dataset.num_classes} to {count}."
        )
    order = generator(seed, "take").permutation(count)
    if dataset.domain_train is not None:
        order = _interleave(order, labels * len(dataset.domain_names) + dataset.domain_train.numpy())
    kept = torch.from_numpy(np.sort(_interleave(order, labels)[:num_train]))
    domain = None if dataset.domain_train is None else dataset.domain_train[kept]
    return replace(
        dataset, x_train=dataset.x_train[kept], y_train=dataset.y_train[kept], domain_train=domain, reduced=True
    )


def merge(dataset: Dataset) -> Dataset:
    """The set with its test images among the training images, in canonical order of each part, training part first."""
    domains = dataset.domain_train, dataset.domain_test
    return replace(
        dataset,
        x_train=torch.cat([dataset.x_train, dataset.x_test]),
        y_train=torch.cat([dataset.y_train, dataset.y_test]),
        domain_train=None if domains[0] is None else torch.cat(domains),
    )


def public_images(name: str, private: Dataset, count: int | None, seed: int) -> Dataset:
    """The training images of a set as public ones, in the shape of the private images.

    They are resized (bilinear, antialiased) to the private images' size; where the private ones have three channels,
    grey is repeated. Nothing reads their labels.

    Args:
        name: A data set that is present.
        private: Whose shape they get.
        count: How many are drawn, without replacement; all where None.
        seed: Of the draw.

    Raises:
        UserError: If there are fewer than `count`, or they are colour and the private ones grey.
    """
    found = load(name)
    images = found.x_train
    if count is not None and count > len(images):
        raise UserError(f"--public-examples {count} is more than '{name}' has; use {len(images)} or fewer.")
    if count is not None:
        images = images[torch.as_tensor(np.sort(generator(seed, "public").permutation(len(images))[:count]))]
    if images.shape[1] > private.channels:
        raise UserError(f"the public images '{name}' are colour and '{private.name}' is grey; choose a grey set.")
    size = private.image_size
    if images.shape[2] != size:
        smooth = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True, align_corners=False)
        images = smooth.round().clamp(0, 255).to(torch.uint8)
    return replace(found, x_train=images.expand(-1, private.channels, -1, -1), y_train=found.y_train[: len(images)])


def channel_statistics(dataset: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of the training images in [0, 1].

    The deviation of a channel of one value is given as 1, since images are divided by it.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(dataset.channels):
        counts = torch.bincount(dataset.x_train[:, channel].flatten(), minlength=256)
        share = counts / counts.sum().double()
        mean.append((share * values).sum().item())
        std.append((share * (values - mean[-1]) ** 2).sum().sqrt().item() or 1.0)
    return tuple(mean), tuple(std)


def _interleave(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """`order` rearranged so that every beginning of it holds each group in proportion, the first of each at once.

    Args:
        order: Positions `[N]`.
        groups: Group of each position, `[N]`; inside a group the order stays.
    """
    mine = groups[order]
    sizes = np.bincount(mine)
    by_group = np.argsort(mine, kind="stable")
    rank = np.empty(len(order))
    rank[by_group] = np.arange(len(order)) - (sizes.cumsum() - sizes)[mine[by_group]]
    return order[np.argsort(rank / sizes[mine], kind="stable")]


def _is_name(name: str) -> bool:
    return re.fullmatch("[a-z0-9][a-z0-9-]*", name) is not None


def _cache_file(name: str) -> Path:
    return cache_folder() / f"{name}.npz"


def _read(name: str, path: Path) -> readers.Arrays:
    """The arrays of whatever is at a path; with a known name in their official form."""
    known = name in official.KNOWN
    if path.suffix == ".npz":
        arrays = readers.read_npz(path)
    elif known and official.holds(name, path):
        arrays = official.read(name, path)
    elif path.is_dir():
        arrays = readers.read_folder(path)
    else:
        raise UserError(
            f"'{path}' is not an .npz file, nor has '{name}' an official archive; give an .npz file or image folder; "
            f"the names with an archive are {', '.join(official.KNOWN)}."
        )
    return official.official_form(name, arrays, path) if known else arrays


def _keep(name: str, arrays: readers.Arrays) -> Path:
    """Writes the arrays to the cache in canonical order and returns the file."""
    path = _cache_file(name)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # numpy would append .npz to a path
            np.savez(file, **_canonical(arrays))

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)
    except OSError as error:
        raise UserError(
            f"the data set '{name}' cannot be kept in '{path.parent}' ({error.strerror}); that folder must be writable "
            "and have room; set FEDCLI_DATA to another one."
        ) from error
    return path


def _canonical(arrays: readers.Arrays) -> readers.Arrays:
    """The arrays with each part in order of label, hash of the pixels `[H, W, channels]` and domain."""
    result = dict(arrays)
    for part in readers.PARTS:
        images = np.ascontiguousarray(arrays[f"x_{part}"]).reshape(len(arrays[f"x_{part}"]), -1)
        hashes = b"".join(hashlib.blake2b(image, digest_size=8).digest() for image in images)
        keys = [arrays[f"y_{part}"], np.frombuffer(hashes, ">u8")]
        if f"domain_{part}" in arrays:
            keys.append(arrays[f"domain_{part}"])
        order = np.lexsort(keys[::-1])  # the last key is the first that counts
        for kind in ("x", "y", "domain"):
            if f"{kind}_{part}" in arrays:
                result[f"{kind}_{part}"] = arrays[f"{kind}_{part}"][order]
    return result


@lru_cache(maxsize=len(BUILT_IN))
def _built(name: str) -> Dataset:
    from fedcli import builtin  # late: it needs scikit-learn and matplotlib

    return _dataset(name, _canonical(builtin.BUILDERS[name]()))


def _dataset(name: str, arrays: readers.Arrays) -> Dataset:
    """The data set of arrays that are in canonical order."""
    tensors = {}
    for key, values in arrays.items():
        if key.startswith("x_"):
            tensors[key] = torch.from_numpy(np.ascontiguousarray(np.moveaxis(values, 3, 1)))
        elif key.endswith("names"):
            tensors[key] = tuple(values.tolist())
        else:
            tensors[key] = torch.from_numpy(values)
    return Dataset(name, **tensors)
