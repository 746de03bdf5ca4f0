"""Data sets by their names: built in, made of others, from the cache, or a user's own.

A set is in canonical order, by label and then by a hash of the pixels, so that a seed gives the same partition
whichever file the images came from.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fedcli.core.draws import generator
from fedcli.data import official
from fedcli.data.cache import cache_file, is_in_cache, names_in_cache
from fedcli.data.catalog import DOWNLOADS, KNOWN, MADE
from fedcli.data.conversion import convert
from fedcli.data.dataset import Dataset, from_arrays
from fedcli.data.dataset_info import DatasetInfo
from fedcli.data.image_arrays import (
    NPZ_CONTENT,
    NPZ_FILE,
    Arrays,
    Columns,
    canonical_arrays,
    join_splits,
    read_npz,
)
from fedcli.data.resizing import resize
from fedcli.errors import UserError, unknown
from fedcli.reading import reading
from fedcli.registry import in_declared_case
from fedcli.userfiles import file_hash, find_user_function, names_user_file, short_name


def names() -> list[str]:
    """All names: built in, known, and imported under a name of their own."""
    return list(dict.fromkeys([*KNOWN, *names_in_cache()]))


def find_name(text: str) -> str:
    """Returns the name that a text stands for, in any case of its letters; a text that is none stays as it is."""
    return text if names_user_file(text) else in_declared_case(text, names())


def refuse_unavailable(name: str) -> None:
    """Refuses what `load` would refuse, without reading the images.

    Raises:
        UserError: The name is unknown, or the images are not on this machine.
    """
    if names_user_file(name):
        find_user_function(name, "data set")
    elif name not in names():
        raise unknown("data set", name, names(), f"see 'fedcli data list' and 'data import'; no file is at '{name}'.")
    elif not is_present(name):
        fault = f"the data set '{name}' is not on this machine (got no '{cache_file(name)}')"
        raise UserError(f"{fault}; {ways_to_get(name)}.")


def is_present(name: str) -> bool:
    """Whether a set can be loaded; its file is not read."""
    if names_user_file(name) or is_in_cache(name):
        return True
    return name in MADE and all(is_present(need) for need in MADE[name])


def is_open_to_all(name: str) -> bool:
    """Whether anybody can get a data set by a command."""
    if names_user_file(name) or name in DOWNLOADS:
        return True
    return name in MADE and all(is_open_to_all(need) for need in MADE[name])


def ways_to_get(name: str) -> str:
    """Returns how a known data set can be had."""
    info = KNOWN[name]
    if name in DOWNLOADS:
        return f"run 'fedcli data download {name}', or without a network 'fedcli data import {name} PATH'"
    if info.needs:
        missing = [need for need in info.needs if not is_present(need)] or info.needs
        return f"it is made from {', '.join(info.needs)}: bring {', '.join(missing)}"
    if info.to_import:
        return f"bring {info.to_import} and run 'fedcli data import {name} PATH'"
    return "it is built in"


def load(name: str) -> Dataset:
    """Returns the data set of a name or of `./file.py:NAME`; never from a network.

    Raises:
        UserError: The name is unknown, or the images are not on this machine or damaged.
    """
    refuse_unavailable(name)
    if names_user_file(name):
        return _load_from_user(name, file_hash(find_user_function(name, "data set").path))
    with reading(cache_file(name), "as 'fedcli data import' wrote it"):
        dataset = from_arrays(name, _load_arrays(name))
    if official.is_official(name):
        official.refuse_other_images(dataset)
    return dataset


def _load_arrays(name: str) -> Arrays:
    """Returns the arrays that the cache has of a set, or would have of one that is built in or made."""
    if is_in_cache(name):
        return read_npz(cache_file(name))
    info = KNOWN[name]
    assert info.make is not None  # `refuse_unavailable` has refused what is neither in the cache nor made

    def load_source(need: str) -> Columns:
        return join_splits(_load_source_arrays(need), [])

    columns = info.make(load_source)
    from_catalog = {"class_names": np.array(info.class_names), "domain_names": np.array(info.domain_names)}
    return canonical_arrays(from_catalog | columns)


def _load_source_arrays(name: str) -> Arrays:
    """Returns the arrays of a set that another one is made from."""
    arrays = _load_arrays(name)
    if official.is_official(name):
        official.refuse_other_images(from_arrays(name, arrays))
    return arrays


@lru_cache(maxsize=2)
def _load_from_user(text: str, digest: str) -> Dataset:
    """Returns the data set that a user's function returns, checked like an `.npz` file."""
    arrays = find_user_function(text, "data set")()
    with reading(text, f"a function that returns a dict of {NPZ_CONTENT}"):
        arrays = {key: np.asarray(value) for key, value in arrays.items()}
        notes: list[str] = []
        columns = convert(join_splits(arrays, notes), notes)
    source = np.array("; ".join([text, *notes]))
    return from_arrays(short_name(text), canonical_arrays(columns) | {"source": source})


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
    drawn = generator(seed, "public").permutation(len(public.x_train))[:count]
    images = public.x_train[np.sort(drawn)]
    if images.shape[1] > private.channels:
        red, green, blue = images.split(1, dim=1)
        images = (0.299 * red + 0.587 * green + 0.114 * blue).round().to(torch.uint8)
    images = resize(images, private.image_size).expand(-1, private.channels, -1, -1)
    return replace(public, x_train=images, y_train=public.y_train[: len(images)])


def describe(name: str) -> dict[str, Any]:
    """Returns what a data set is, without loading it.

    Returns:
        `name`; `kind` (built-in, download, import, made, imported or your own); `present`; `train`, `test`, `classes`
        (numbers, None where absent files would tell); `shape` (channels, H, W); `note`, what it is made from.

    Raises:
        UserError: The name is unknown, or its cache file is damaged.
    """
    info = KNOWN.get(name)
    if info is None:
        refuse_unavailable(name)
    kind = _kind_of(info)
    note = ""
    sizes: dict[str, Any]
    if names_user_file(name):
        kind = "your own"
        dataset = load(name)
        note = dataset.source
        sizes = _sizes_in_memory(dataset)
    elif is_in_cache(name):
        with reading(cache_file(name), NPZ_FILE), np.load(cache_file(name), allow_pickle=False) as file:
            sizes = _sizes_in_file(file)
            note = str(file.get("source", ""))
    else:
        assert info is not None  # `refuse_unavailable` has refused what is neither known nor in the cache
        sizes = info.sizes
        note = ", ".join(info.needs)
    return {"name": name, "kind": kind, "present": is_present(name), **sizes, "note": note}


def _kind_of(info: DatasetInfo | None) -> str:
    """Returns how a set comes to be there, in a word."""
    if info is None:
        return "imported"
    if info.is_download:
        return "download"
    if not info.make:
        return "import"
    return "made" if info.needs else "built-in"


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
    if num_train is None or num_test is None:
        return None
    return num_train + num_test


def num_images_of_record(dataset: str | None, local_test: float | None = None) -> int | None:
    """See `num_images`; None without a data set, and for one of a user's file, which is not run for a record."""
    if dataset is None or names_user_file(dataset):
        return None
    return num_images(dataset, local_test)
