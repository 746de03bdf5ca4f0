"""Data sets as uint8 tensors: built in, made of others, downloaded or imported into a cache file, or a user's own.

A set is in canonical order, by label and then by a hash of the pixels, so that a seed gives the same partition
whichever file the images came from. A cache file is an `.npz` of what `files.canonical` returns.
"""

import hashlib
import os
import re
import shlex
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from glob import glob
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli.core.batches import generator
from fedcli.data import files, forms, splits
from fedcli.data.catalog import (
    BUILT_IN,
    DOWNLOADS,
    KNOWN,
    MADE,
    DatasetInfo,
    difference_from_official,
    known_form,
    resize,
    resize_rows,
)
from fedcli.errors import UserError, unknown
from fedcli.files import partials, write_atomically
from fedcli.registry import spelt
from fedcli.userfiles import file_hash, from_file, is_from_file, short_name
from fedcli.vision import torchvision

DAY = 86_400  # seconds, longer than it takes to write a file
_NAME = re.compile("[a-z0-9][a-z0-9-]*")  # of an imported set


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory, in canonical order."""

    name: str
    x_train: Tensor  # uint8 [N, channels, H, W]
    y_train: Tensor  # int64 [N]
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...]
    domain_train: Tensor | None = None  # int64 [N]
    domain_test: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    writer_train: Tensor | None = None  # int64 [N], who wrote or drew each example
    writer_test: Tensor | None = None
    place_train: Tensor | None = None  # int64 [N], position in the files; None in old cache files
    place_test: Tensor | None = None
    share: float = 1.0  # of the training images that are kept
    source: str = ""  # of a user's own: where it was imported from, and what was changed

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

    def columns(self, part: str) -> dict[str, Tensor]:
        """The values of each example of a part, by `files.KINDS`."""
        values = {kind: getattr(self, f"{kind}_{part}") for kind in files.KINDS}
        return {kind: tensor for kind, tensor in values.items() if tensor is not None}

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a SHA-256 over pixels, labels, domains and writers of both parts."""
        digest = hashlib.sha256()
        for kind, tensor in [*self.columns("train").items(), *self.columns("test").items()]:
            if kind != "place":
                digest.update(tensor.numpy().reshape(-1).data)
        return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where the data sets are kept: `$FEDCLI_DATA`, or `~/.cache/fedcli`."""
    # `expanduser` leaves ~ where a user has no home, as in a container.
    return Path(os.path.expanduser(os.environ.get("FEDCLI_DATA") or "~/.cache/fedcli"))


def names() -> list[str]:
    """All names: built in, known, and imported under a name of their own."""
    folder = cache_folder()
    files_there = [file for file in sorted(glob("*.npz", root_dir=folder)) if (folder / file).is_file()]
    imported = filter(_NAME.fullmatch, [os.path.splitext(file)[0] for file in files_there])
    return list(dict.fromkeys([*KNOWN, *imported]))


def is_name(text: str) -> bool:
    """Whether a text can be the name of a data set, here or elsewhere."""
    return _NAME.fullmatch(text) is not None


def find_name(text: str) -> str:
    """The name that a text stands for, in any case of its letters; a text that is none stays as it is."""
    return text if is_from_file(text) else spelt(text, names())


def available(name: str) -> None:
    """Refuses what `load` would refuse, without reading the images.

    Raises:
        UserError: The name is unknown, or the images are not on this machine.
    """
    if is_from_file(name):
        from_file(name, "data set")
    elif name not in names():
        raise unknown("data set", name, names(), f"see 'fedcli data list' and 'data import'; no file is at '{name}'.")
    elif not present(name):
        raise UserError(f"the data set '{name}' is not on this machine (got no '{_cache_file(name)}'); {_ways(name)}.")


def present(name: str) -> bool:
    """Whether a set can be loaded; its file is not read."""
    return is_from_file(name) or _is_in_cache(name) or (name in MADE and all(map(present, MADE[name])))


def open_to_all(name: str) -> bool:
    """Whether anybody can get a data set by a command."""
    return name in DOWNLOADS or is_from_file(name) or (name in MADE and all(map(open_to_all, MADE[name])))


def load(name: str) -> Dataset:
    """The data set of a name or of `./file.py:NAME`; never from a network.

    Raises:
        UserError: The name is unknown, or the images are not on this machine or damaged.
    """
    available(name)
    if is_from_file(name):
        return _from_user(name, file_hash(from_file(name, "data set").path))
    with files.reading(_cache_file(name), "as 'fedcli data import' wrote it"):
        dataset = _dataset(name, _arrays(name))
    if is_official(name):
        refuse_other_images(dataset)
    return dataset


def is_official(name: str) -> bool:
    """Whether a name stands for images that its publishers have made, and not for some that are made here."""
    return name in KNOWN and name not in MADE


def refuse_other_images(dataset: Dataset) -> None:
    """Refuses a set with a known name that is not the official one, since its runs would stand in papers' tables.

    Raises:
        UserError: Its fingerprint is another one or, where only they are known, its numbers of images.
    """
    num_classes = dataset.num_classes
    train_counts = dataset.y_train.bincount(minlength=num_classes)
    test_counts = dataset.y_test.bincount(minlength=num_classes)
    domain_counts = torch.zeros(0)
    if dataset.domain_train is not None and dataset.domain_test is not None:
        domains = torch.cat([dataset.domain_train, dataset.domain_test])
        domain_counts = domains.bincount(minlength=len(dataset.domain_names))
    facts = {
        "fingerprint": dataset.fingerprint,
        "train": len(dataset.y_train),
        "test": len(dataset.y_test),
        "train_counts": tuple(train_counts.tolist()),
        "test_counts": tuple(test_counts.tolist()),
        "domain_counts": tuple(domain_counts.tolist()),
    }
    difference = difference_from_official(dataset.name, facts)
    if difference:
        raise UserError(
            f"these are not the images of '{dataset.name}' (got {difference}); import them under a name of their own, "
            f"such as my-{dataset.name}, and leave '{dataset.name}' to the official ones."
        )


def download(name: str) -> Path:
    """The cache file of a data set, which is downloaded by torchvision, with its MD5 compared, unless it is there.

    Raises:
        UserError: The set cannot be downloaded, or the download fails.
    """
    info = KNOWN.get(name)
    if info is None or not info.is_download:
        remedy = _ways(name) if name in KNOWN else f"these can be downloaded: {', '.join(DOWNLOADS)}"
        raise unknown("data set to download", name, DOWNLOADS, f"{remedy}.")
    if _is_in_cache(name):
        return _cache_file(name)
    socket.setdefaulttimeout(30)  # seconds without a byte before a download is given up
    with TemporaryDirectory(prefix="fedcli-") as folder:
        try:
            _download_official(info, folder)
        except (OSError, RuntimeError, HTTPException) as error:
            fault = f"'{name}' could not be downloaded ({' '.join(str(error).split())})"
            raise UserError(f"{fault}; bring the official files and run 'fedcli data import {name} PATH'.") from error
        finally:
            socket.setdefaulttimeout(None)
        return import_path(name, Path(folder)).file


def _download_official(info: DatasetInfo, folder: str) -> None:
    """Downloads the official files of a set: an archive, or what torchvision's class asks for."""
    sets = torchvision().datasets
    if info.archive is not None:
        address, md5 = info.archive
        sets.utils.download_and_extract_archive(address, folder, md5=md5, remove_finished=True)
        return
    assert info.torchvision_class is not None  # `download` has refused others
    download_part = getattr(sets, info.torchvision_class)
    for part in files.PARTS:
        choice: dict[str, Any] = {"train": part == "train"}
        if info.torchvision_class == "SVHN":
            choice = {"split": part}
        if info.split:
            choice["split"] = info.split
        download_part(folder, download=True, **choice)


class Imported(NamedTuple):
    """What an import has made."""

    file: Path  # of the cache
    notes: list[str]  # what the user is told: what was changed or left out


def import_path(name: str, path: Path, size: int | None = None) -> Imported:
    """Imports a data set into the cache; one of that name is replaced.

    Args:
        name: A known name, whose shape and classes the images must have, or a new one of a-z, 0-9 and -.
        path: File, folder or archive in one of `forms.FORMS`; `hf:FOLDER` for one of Hugging Face.
        size: Height and width in pixels that its images are resized to.

    Raises:
        UserError: The name is not possible, or the files are missing, damaged or of another set.
    """
    info = KNOWN.get(name)
    notes: list[str] = []
    if name in MADE:
        raise UserError(f"the name '{name}' is reserved: {_ways(name)}; choose another name.")
    if not _NAME.fullmatch(name):
        raise UserError(f"the name '{name}' is invalid; use only a-z, 0-9 and -.")
    path = Path(forms.location(str(path)))
    if not os.path.lexists(path):
        raise UserError(f"there is nothing at '{path}' to import; give the path of a file or a folder.")
    form = files.ARRAYS if path.suffix == ".npz" else forms.FORM
    with files.reading(path, form):
        columns = forms.read(path, info, size, notes)
        if "client" in columns and info:
            raise UserError(f"the name '{name}' is not possible for PFLlib's division '{path}'; choose {name}-pfllib.")
        columns = files.in_form(columns, notes)
        if size:
            num_images, *_, channels = columns["x"].shape
            files.check_size(num_images * size**2 * channels, path)
            columns["x"] = resize_rows(columns["x"], size)
        if info:
            columns = known_form(name, columns)
    arrays = files.canonical(columns)
    if info:
        refuse_other_images(_dataset(name, arrays))
    else:
        if "client" in columns:  # in the same file, so that no others' lists can stand beside the images
            arrays |= splits.lists_of(columns["client"], columns["test"])
            flag = shlex.quote(f"file:{_cache_file(name)}")
            num_clients = columns["client"].max() + 1
            notes.append(f"its clients, tested on their own parts: --partition {flag} --num-clients {num_clients}")
        arrays["source"] = np.array("; ".join([str(path.resolve()), *notes]))
    _write_cache(_cache_file(name), arrays)
    _cache_file(name).with_suffix(".split.npz").unlink(missing_ok=True)  # where earlier versions kept the lists
    return Imported(_cache_file(name), notes)


def import_if_path(text: str) -> str:
    """The name of a data set that is given by its name or by a path; the set at a path is imported, unless it has been.

    That of a path is made of its last part and a hash of the content, so that other content is another set.

    Raises:
        UserError: What lies at the path cannot be imported.
    """
    text = forms.location(text)
    name = find_name(text)
    if is_from_file(name) or name in names() or not os.path.exists(text):
        return name
    path = Path(text)
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"'{text}' is no file (got a pipe or a device); copy what it gives into a file.")
    stem = re.sub("[^a-z0-9]+", "-", path.resolve().stem.lower()).strip("-") or "data"
    name = f"{stem}-{_hash_of_content(path)[:12]}"
    if not _is_in_cache(name):
        import_path(name, path)
    return name


def _hash_of_content(path: Path) -> str:
    """The hexadecimal SHA-256 of a file, or of the files in a folder with their paths."""
    files_inside = [""] if path.is_file() else forms.files_below(path)
    digest = hashlib.sha256()
    for file in files_inside:
        with (path / file).open("rb") as content:
            digest.update(os.fsencode(file) + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _kind_of(info: DatasetInfo | None) -> str:
    """How a set comes to be there, in a word."""
    if info is None:
        return "imported"
    if info.is_download:
        return "download"
    if not info.make:
        return "import"
    return "made" if info.needs else "built-in"


def describe(name: str) -> dict[str, Any]:
    """What a data set is, without loading it.

    Returns:
        `name`; `kind` (built-in, download, import, made, imported or your own); `present`; `train`, `test`, `classes`
        (numbers, None where absent files would tell); `shape` (channels, H, W); `note`, what it is made from.

    Raises:
        UserError: The name is unknown, or its cache file is damaged.
    """
    info = KNOWN.get(name)
    if info is None:
        available(name)
    kind = _kind_of(info)
    note = ""
    sizes: dict[str, Any]
    if is_from_file(name):
        kind = "your own"
        sizes = _sizes_in_memory(load(name))
    elif _is_in_cache(name):
        with files.reading(_cache_file(name), files.NPZ), np.load(_cache_file(name), allow_pickle=False) as file:
            sizes = _sizes_in_file(file)
            note = str(file.get("source", ""))
    else:
        assert info is not None  # `available` has refused what is neither known nor in the cache
        sizes = info.sizes
        note = ", ".join(info.needs)
    return {"name": name, "kind": kind, "present": present(name), **sizes, "note": note}


def _sizes_in_memory(dataset: Dataset) -> dict[str, Any]:
    """See `DatasetInfo.sizes`."""
    shape = tuple(dataset.x_train.shape[1:])
    return {
        "train": len(dataset.y_train), "test": len(dataset.y_test), "classes": dataset.num_classes, "shape": shape,
    }  # fmt: skip


def _sizes_in_file(file: Any) -> dict[str, Any]:
    """See `DatasetInfo.sizes`; of the pixels in a cache file, from `np.load`, the header alone is read."""
    with file.zip.open("x_train.npy") as pixels:
        np.lib.format.read_magic(pixels)
        shape, _, _ = np.lib.format.read_array_header_1_0(pixels)
    num_train, height, width, channels = shape
    return {
        "train": num_train, "test": len(file["y_test"]), "classes": len(file["class_names"]),
        "shape": (channels, height, width),
    }  # fmt: skip


def num_images(dataset: str, local_test: float | None = None) -> int | None:
    """Images of a data set that clients have, with `local_test` also the test images; None where files must tell."""
    try:
        described = describe(dataset)
    except UserError:
        return None
    num_train = described["train"]
    num_test = described["test"] if local_test else 0
    return None if None in (num_train, num_test) else num_train + num_test


def take(dataset: Dataset, num_train: int, seed: int) -> Dataset:
    """A part of the training images, stratified by class and then by domain; the test images stay.

    Every class keeps at least one image. With the same seed, a smaller part is contained in a larger one.

    Raises:
        UserError: There are fewer images than `num_train`, or more classes.
    """
    labels = dataset.y_train.numpy()
    count = len(labels)
    least = dataset.num_classes
    if not least <= num_train <= count:
        raise UserError(f"--train-examples {num_train} does not fit '{dataset.name}'; use {least} to {count}.")
    domains = 0 if dataset.domain_train is None else dataset.domain_train.numpy()
    cells = labels * max(len(dataset.domain_names), 1) + domains
    order = _interleave(generator(seed, "take").permutation(count), cells)
    positions = torch.from_numpy(np.sort(_interleave(order, labels)[:num_train]))
    taken: dict[str, Any] = {f"{kind}_train": values[positions] for kind, values in dataset.columns("train").items()}
    return replace(dataset, share=dataset.share * num_train / count, **taken)


def merge(dataset: Dataset) -> Dataset:
    """The set with its test images behind the training images."""
    train = dataset.columns("train")
    test = dataset.columns("test")
    if "place" in test:
        test["place"] = len(dataset.y_train) + test["place"]
    merged: dict[str, Any] = {f"{kind}_train": torch.cat([train[kind], test[kind]]) for kind in train}
    return replace(dataset, **merged)


def public_images(name: str, private: Dataset, count: int | None, seed: int) -> Dataset:
    """Training images of a set as public ones, in the size and with the channels of the private images.

    Grey is repeated in three channels; colour becomes its luminance (ITU-R BT.601). `count` images are drawn by the
    seed, all where it is None. Nothing reads their labels.

    Raises:
        UserError: If there are fewer than `count`.
    """
    public = load(name)
    if (count or 0) > len(public.x_train):
        raise UserError(f"--public-examples {count} is more than '{name}' has; use {len(public.x_train)} or fewer.")
    images = public.x_train[np.sort(generator(seed, "public").permutation(len(public.x_train))[:count])]
    if images.shape[1] > private.channels:
        red, green, blue = images.split(1, dim=1)
        images = (0.299 * red + 0.587 * green + 0.114 * blue).round().to(torch.uint8)
    images = resize(images, private.image_size)
    return replace(public, x_train=images.expand(-1, private.channels, -1, -1), y_train=public.y_train[: len(images)])


def channel_statistics(dataset: Dataset) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of the training images in [0, 1]; 1 for a deviation of 0."""
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(pixels.flatten(), minlength=256) for pixels in dataset.x_train.unbind(1)])
    shares = counts / counts.sum(1, keepdim=True).double()  # [channels, 256]
    mean = (shares * values).sum(1, keepdim=True)
    deviation = (shares * (values - mean) ** 2).sum(1).sqrt()
    return tuple(mean.flatten().tolist()), tuple(value or 1.0 for value in deviation.tolist())


def _interleave(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Positions `[N]` rearranged so that every beginning holds each of the groups, `[N]`, in proportion."""
    ordered = groups[order]
    sizes = np.bincount(ordered)
    rank = np.argsort(np.argsort(ordered, kind="stable")) - (sizes.cumsum() - sizes)[ordered]
    return order[np.argsort(rank / sizes[ordered], kind="stable")]


def _cache_file(name: str) -> Path:
    return cache_folder() / f"{name}.npz"


def _is_in_cache(name: str) -> bool:
    """Whether a set comes from the cache."""
    return name not in BUILT_IN and os.path.isfile(_cache_file(name))  # also False where it may not be looked for


def _ways(name: str) -> str:
    """How a known data set can be had."""
    info = KNOWN[name]
    if name in DOWNLOADS:
        return f"run 'fedcli data download {name}', or without a network 'fedcli data import {name} PATH'"
    if info.needs:
        missing = [need for need in info.needs if not present(need)] or info.needs
        return f"it is made from {', '.join(info.needs)}: bring {', '.join(missing)}"
    if info.to_import:
        return f"bring {info.to_import} and run 'fedcli data import {name} PATH'"
    return "it is built in"


def _arrays(name: str) -> files.Arrays:
    """The arrays that the cache has of a set, or would have of one that is built in or made."""
    if _is_in_cache(name):
        return files.read_npz(_cache_file(name))
    info = KNOWN[name]
    assert info.make is not None  # `available` has refused what is neither in the cache nor made

    def load_source(need: str) -> files.Arrays:
        return files.join_parts(_source_arrays(need), [])

    columns = info.make(name, load_source)
    texts = {"class_names": np.array(info.class_names), "domain_names": np.array(info.domain_names)}
    return files.canonical(texts | columns)


def _source_arrays(name: str) -> files.Arrays:
    """The arrays of a set that another one is made from."""
    arrays = _arrays(name)
    if is_official(name):
        refuse_other_images(_dataset(name, arrays))
    return arrays


def _write_cache(path: Path, arrays: files.Arrays) -> None:
    """Writes arrays to a file of the cache."""
    if path.parts[0] == "~":
        raise UserError(f"the data set cannot be kept as '{path}' (got no home folder); set FEDCLI_DATA to a folder.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in partials(path.parent):
            with suppress(FileNotFoundError):  # another process has just ended it
                if time.time() - file.stat().st_mtime > DAY:  # which left it when it was killed
                    file.unlink()
        named: dict[str, Any] = dict(arrays)  # no array has the name of an option of NumPy's
        write_atomically(path, lambda temporary: np.savez(temporary, **named))
    except OSError as error:
        fault = f"the data set cannot be kept as '{path}' ({error.strerror})"
        raise UserError(f"{fault}; set FEDCLI_DATA to another folder.") from error


@lru_cache(maxsize=2)
def _from_user(text: str, digest: str) -> Dataset:
    """The data set that a user's function returns, checked like an `.npz` file."""
    arrays = from_file(text, "data set")()
    with files.reading(text, f"a function that returns a dict of {files.ARRAYS}"):
        arrays = {key: np.asarray(value) for key, value in arrays.items()}
        columns = files.in_form(files.join_parts(arrays, []), [])
    return _dataset(short_name(text), files.canonical(columns) | {"source": np.array(text)})


def _dataset(name: str, arrays: files.Arrays) -> Dataset:
    """The data set of arrays that are in canonical order."""
    tensors = {key: torch.from_numpy(values) for key, values in arrays.items() if key.endswith(files.PARTS)}
    for part in files.PARTS:
        tensors[f"x_{part}"] = tensors[f"x_{part}"].permute(0, 3, 1, 2).contiguous()
    domain_names = arrays.get("domain_names", np.empty(0, str))
    return Dataset(
        name, x_train=tensors["x_train"], y_train=tensors["y_train"], x_test=tensors["x_test"],
        y_test=tensors["y_test"], class_names=tuple(arrays["class_names"].tolist()),
        domain_train=tensors.get("domain_train"), domain_test=tensors.get("domain_test"),
        domain_names=tuple(domain_names.tolist()), writer_train=tensors.get("writer_train"),
        writer_test=tensors.get("writer_test"), place_train=tensors.get("place_train"),
        place_test=tensors.get("place_test"), source=str(arrays.get("source", "")),
    )  # fmt: skip
