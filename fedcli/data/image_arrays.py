"""Images as arrays: the columns that every reader returns, the arrays that the cache keeps, and their order.

Columns have an entry for each image of a set, by name: `x` uint8 `[N, H, W, channels]`, `y` int64 `[N]`, `test` bool
`[N]` and, where known, `domain` and `writer` int64 `[N]`. `class_names` and `domain_names` name the labels and the
domains. The cache has arrays, the columns of each split, `x_train`, `x_test` and so on, each split in canonical order,
with `place_train`, `place_test` int64 `[N]`, where each image stood in the files.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcli.core.partition_files import LIST_NAME
from fedcli.reading import check_size, reading

Columns = dict[str, np.ndarray]  # by name, of all images
Arrays = dict[str, np.ndarray]  # by name and split
SPLITS = ("train", "test")
COLUMNS = ("x", "y", "domain", "writer", "place")  # that the cache has of each split
NAMES_OF = {"y": "class_names", "domain": "domain_names"}  # what the numbers of a column are called
COLUMN_OF_WORD = {  # what the arrays of a user's file may be called
    "x": "x", "image": "x", "images": "x", "imgs": "x", "data": "x", "y": "y", "label": "y", "labels": "y",
    "target": "y", "targets": "y", "domain": "domain", "domains": "domain", "writer": "writer", "writers": "writer",
    "place": "place",
}  # fmt: skip
SPLIT = "(train|test|val)(?:ing|id|idation)?"  # a regular expression of how arrays and folders call a split
_ARRAY_NAME = re.compile(f"(?:{SPLIT}_?)?(.*?)(?:_?{SPLIT})?", re.DOTALL)
# What files must be, in words.
NPZ_FILE = "a whole .npz file, as numpy.savez writes it"
NPZ_CONTENT = (
    "arrays x_train, y_train, x_test, y_test (or x, y): images N x H x W, N x H x W x 1 or N x H x W x 3 of one size, "
    "and a whole number or class name for each"
)


def read_npz(path: Path) -> Arrays:
    """Returns the arrays of an `.npz` file, as they are.

    Raises:
        UserError: It is damaged, holds objects, or is too large.
    """
    with reading(path, NPZ_FILE), np.load(path, allow_pickle=False) as file:
        check_size(sum(member.file_size for member in file.zip.infolist()), path)
        return dict(file)


# A ValueError below says what is wrong; `reading`, around it, adds in which file and what that must be.


def join_splits(arrays: Arrays, notes: list[str]) -> Columns:
    """Returns the columns of arrays that are called by `COLUMN_OF_WORD`, with a split before or after the word.

    There is no column `test` where nothing names a split. Adds to the notes what was left out.
    """
    columns, by_column = _sort_by_meaning(arrays, notes)
    splits = choose_splits(set().union(*by_column.values()), notes)
    for column, by_split in by_column.items():
        for split in splits:
            name = f"{column}_{split}".rstrip("_")
            if split not in by_split:
                raise ValueError(f"it has no array {name} (its arrays: {some_of(list(arrays)) or 'none'})")
            num_images = len(by_column["x"][split])
            if len(by_split[split]) != num_images:
                raise ValueError(f"{name} has {len(by_split[split])} entries for {num_images} images")
        columns[column] = np.concatenate([by_split[split] for split in splits])
    images = [by_column["x"][split] for split in splits]
    _refuse_two_scales(images)
    are_names = [are_texts(by_column["y"][split]) for split in splits]
    if any(are_names) and not all(are_names):
        raise ValueError("the labels of one part are names and those of the other are not")
    if splits != [""]:
        columns["test"] = np.repeat([False, True], [len(array) for array in images])
    return columns


def _refuse_two_scales(images: Sequence[np.ndarray]) -> None:
    """Refuses splits whose pixels are on different scales; of both together nobody would see it."""
    is_uint8 = [array.dtype == np.uint8 for array in images]
    if any(is_uint8) and not all(is_uint8):
        raise ValueError("the images of one part are uint8 and those of the other are not")
    largest = [array.max(initial=0) for array in images]
    if not all(is_uint8) and min(largest) <= 1 < max(largest):
        raise ValueError(f"the pixels of one part reach {min(largest):g} and those of the other {max(largest):g}")


def are_texts(values: np.ndarray) -> bool:
    """Whether an array holds texts alone; NumPy makes texts of numbers that are joined with some."""
    return values.dtype.kind in "UST" or (values.dtype == object and all(isinstance(value, str) for value in values))


class _ArraysByMeaning(NamedTuple):
    """The arrays of a file by what they hold."""

    names: Columns  # `class_names` and `domain_names`, where there are some
    by_column: dict[str, Arrays]  # the others, by column and then by split


def _sort_by_meaning(arrays: Arrays, notes: list[str]) -> _ArraysByMeaning:
    """Finds out by their names what arrays hold; adds to the notes those whose names say nothing."""
    names: Columns = {}
    by_column: dict[str, Arrays] = {"x": {}, "y": {}}
    others = []
    for key, values in arrays.items():
        match = _ARRAY_NAME.fullmatch(key.lower())
        assert match is not None  # the expression takes any text
        split_before, word, split_after = match.groups(default="")
        if key.lower() in NAMES_OF.values():
            _add_once(names, key.lower(), key, values)
        elif word in COLUMN_OF_WORD:
            by_split = by_column.setdefault(COLUMN_OF_WORD[word], {})
            _add_once(by_split, split_before or split_after, key, values)
        elif key != "source":  # which a file of the cache has
            others.append(key)
    if len(names.get("domain_names", ())) and "domain" not in by_column:
        raise ValueError("it has domain_names, but no array domain_train, domain_test or domain")
    lists = [key for key in others if LIST_NAME.fullmatch(key)]
    unknown = [key for key in others if key not in lists]
    if lists:
        use = "which '--partition file:PATH' takes from an .npz"
        notes.append(f"left out: the lists of clients {some_of(lists)}, {use}")
    if unknown:
        notes.append(f"left out: the arrays {some_of(unknown)}")
    return _ArraysByMeaning(names, by_column)


def some_of(names: Sequence[str]) -> str:
    """Returns the first five of some names for a message, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


def _add_once(arrays: Arrays, name: str, key: str, values: np.ndarray) -> None:
    """Adds an array, which its file calls `key`, under a name; refuses another one that is there already."""
    if name in arrays and not np.array_equal(arrays[name], values):
        raise ValueError(f"it has '{key}' and another array of the same meaning: leave one out")
    arrays[name] = values


def choose_splits(named: set[str], notes: list[str]) -> list[str]:
    """Returns the splits to train and to test on, `val` for a missing `test`; `""` alone where none is named."""
    if named == {""}:
        return [""]
    chosen = ["train", "test"]
    if "val" in named and "test" not in named:
        chosen = ["train", "val"]
    others = named - set(chosen)
    if others:
        words = [split or "what is in no part" for split in sorted(others)]
        notes.append(f"left out: {', '.join(words)}")
    return chosen


def join_rows(sets: Sequence[Columns]) -> Columns:
    """Returns the columns of several sets of images, one below the other; all have those of the first."""
    joined = {}
    for name in sets[0]:
        joined[name] = np.concatenate([columns[name] for columns in sets])
    return joined


def first_of_each(
    order: np.ndarray, strata: np.ndarray, count: Callable[[int], int] = lambda size: round(size / 5)
) -> np.ndarray:
    """Whether each example is among the first `count(size)` of its stratum, in an order that sorts the strata."""
    _, sizes = np.unique(strata, return_counts=True)
    first = np.empty(len(order), bool)
    first[order] = np.concatenate([np.arange(size) < count(size) for size in sizes])
    return first


def canonical_arrays(columns: Columns) -> Arrays:
    """Returns the arrays of the cache: each split in order of label, hash of the pixels, domain and writer.

    An image's place, unless a column has it, is its position in its split.
    """
    is_test = columns["test"]
    count_in_split = np.where(is_test, is_test.cumsum(), (~is_test).cumsum())
    columns = {"place": count_in_split - 1} | columns
    names = [name for name in COLUMNS if name in columns]
    order = canonical_order(*[columns[name] for name in names if name != "place"])
    rows_of_train = order[~is_test[order]]
    rows_of_test = order[is_test[order]]
    arrays = {key: columns[key] for key in NAMES_OF.values() if key in columns}
    arrays |= {f"{name}_train": columns[name][rows_of_train] for name in names}
    arrays |= {f"{name}_test": columns[name][rows_of_test] for name in names}
    return arrays


def canonical_order(images: np.ndarray, labels: np.ndarray, *groups: np.ndarray) -> np.ndarray:
    """Positions `[N]` of images `[N, H, W, channels]` by label, hash of the pixels and groups, `[N]`."""
    pixels = np.ascontiguousarray(images).reshape(len(images), -1)
    hashes = b"".join(hashlib.blake2b(image.data, digest_size=8).digest() for image in pixels)
    return np.lexsort([*groups[::-1], np.frombuffer(hashes, ">u8"), labels])  # the last key is the first that counts
