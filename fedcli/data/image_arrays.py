"""Images as arrays: the columns that every reader returns, the arrays that the cache keeps, and their order.

Columns have an entry for each image of a set, by name: `x` uint8 `[N, H, W, channels]`, `y` int64 `[N]`, `test` bool
`[N]` and, where known, `domain` and `writer` int64 `[N]`. `class_names` and `domain_names` name the labels and the
domains. The cache has arrays, the columns of each split, `x_train`, `x_test` and so on, each split in canonical order,
with `place_train`, `place_test` int64 `[N]`, where each image stood in the files.
"""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedcli.data.reading import check_size, reading

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
    """The arrays of an `.npz` file, as they are.

    Raises:
        UserError: It is damaged, holds objects, or is too large.
    """
    with reading(path, NPZ_FILE), np.load(path, allow_pickle=False) as file:
        check_size(sum(member.file_size for member in file.zip.infolist()), path)
        return dict(file)


# A ValueError below says what is wrong; `reading`, around it, adds in which file and what that must be.


def join_splits(arrays: Arrays, notes: list[str]) -> Columns:
    """The columns of arrays that are called by `COLUMN_OF_WORD`, with a split before or after the word.

    There is no column `test` where nothing names a split. Adds to the notes what was left out.
    """
    by_column: dict[str, Arrays] = {"x": {}, "y": {}}  # then by split
    for key, values in arrays.items():
        match = _ARRAY_NAME.fullmatch(key.lower())
        assert match is not None  # the expression takes any text
        split_before, word, split_after = match.groups(default="")
        if word in COLUMN_OF_WORD:
            by_split = by_column.setdefault(COLUMN_OF_WORD[word], {})
            by_split.setdefault(split_before or split_after, values)
    splits = choose_splits(set().union(*by_column.values()), notes)
    columns = {name: arrays[name] for name in NAMES_OF.values() if name in arrays}
    for column, by_split in by_column.items():
        for split in splits:
            name = f"{column}_{split}".rstrip("_")
            if split not in by_split:
                raise ValueError(f"it has no array {name} (its arrays: {', '.join(arrays) or 'none'})")
            num_images = len(by_column["x"][split])
            if len(by_split[split]) != num_images:
                raise ValueError(f"{name} has {len(by_split[split])} entries for {num_images} images")
        columns[column] = np.concatenate([by_split[split] for split in splits])
    images = [by_column["x"][split] for split in splits]
    if len({array.dtype == np.uint8 for array in images}) > 1:  # numbers in [0, 1] would not be seen below
        raise ValueError("the images of one part are uint8 and those of the other are not")
    if splits != [""]:
        columns["test"] = np.repeat([False, True], [len(array) for array in images])
    return columns


def choose_splits(named: set[str], notes: list[str]) -> list[str]:
    """The splits to train and to test on, `val` for a missing `test`; `""` alone where none is named."""
    if named == {""}:
        return [""]
    chosen = ["train", "test"]
    if "val" in named and "test" not in named:
        chosen = ["train", "val"]
    others = named - set(chosen)
    if others:
        notes.append(f"left out: {', '.join(sorted(others)) or 'what is in no part'}")
    return chosen


def join_rows(sets: Sequence[Columns]) -> Columns:
    """The columns of several sets of images, one below the other; all have those of the first."""
    joined = {}
    (first, *_) = sets
    for name in first:
        joined[name] = np.concatenate([columns[name] for columns in sets])
    return joined


def convert(columns: Columns, notes: list[str]) -> Columns:
    """The columns of a reader or of `join_splits` as this file's head has them; adds to the notes what was changed.

    Without a column `test` a fixed fifth of each class and domain becomes the test split. Channels may come first; rows
    of pixels are grey squares. Pixels in [0, 1] or [-1, 1] are stretched to 0 to 255. Black borders make images square.
    Labels may be in a column, one-hot, class names, count from 1, or leave numbers out.
    """
    x = _as_uint8(columns["x"], notes)
    first_image = x[0]
    if all(np.array_equal(image, first_image) for image in x):
        raise ValueError(f"all of its {len(x)} images are alike")
    columns = columns | {"x": x} | _labels(columns["y"])
    for name in sorted({"y", "domain", "writer", "place"} & columns.keys()):
        columns[name] = _whole_numbers(name, columns[name])
    if "test" not in columns:
        columns["test"] = _fifth_of_each(columns)
        notes.append("a fixed fifth of each class is kept to test on")
    num_train = len(x) - columns["test"].sum()
    if not 0 < num_train < len(x):
        raise ValueError(f"{num_train} images are to train and {len(x) - num_train} to test on, too few")
    columns["x"] = _squared(x, notes)
    y = columns["y"]
    if y.min() == 1 and y.max() == np.size(columns.get("class_names", np.unique(y))):
        columns["y"] = y - 1
        notes.append("the labels counted from 1")
    for name in sorted(NAMES_OF.keys() & columns.keys()):
        columns |= _numbered(name, columns, num_train, notes)
    trained = columns["y"][~columns["test"]]
    untrained = np.delete(columns["class_names"], np.unique(trained))
    if len(untrained):
        notes.append(f"without training images: {', '.join(untrained[:5])}{_and_more(len(untrained) - 5)}")
    return columns


def _labels(y: np.ndarray) -> Columns:
    """The labels as `y` `[N]`, of a column of them or of one-hot rows too, and `class_names` where they are names."""
    is_one_hot = y.ndim == 2 and y.shape[1] > 1 and (np.sort(y)[:, -2:] == [0, 1]).all()
    if is_one_hot:
        y = y.argmax(1)
    elif y.shape[1:] == (1,):
        y = y[:, 0]
    if y.dtype.kind not in "US":
        return {"y": y}
    class_names, numbers = np.unique(y.astype(str), return_inverse=True)
    return {"y": numbers, "class_names": class_names}


def _whole_numbers(name: str, values: np.ndarray) -> np.ndarray:
    """A column as int64 `[N]`; anything else than whole numbers is refused."""
    if values.ndim != 1 or (np.rint(values) != values).any():
        raise ValueError(f"{name}_train or {name}_test is of type {values.dtype} and shape {values.shape}")
    return values.astype(np.int64)


def _fifth_of_each(columns: Columns) -> np.ndarray:
    """Whether each image is of the fixed fifth of its class and domain."""
    domain = columns.get("domain", np.zeros(len(columns["x"]), np.int64))
    strata = columns["y"] * (domain.max() + 1) + domain
    return first_of_each(canonical_order(columns["x"], strata), strata)


def _squared(images: np.ndarray, notes: list[str]) -> np.ndarray:
    """The images with black borders that make them square; adds to the notes that there are some."""
    height, width = images.shape[1:3]
    if height == width:
        return images
    side = max(height, width)
    above = (side - height) // 2
    left = (side - width) // 2
    notes.append(f"black borders made the images {side} x {side}")
    return np.pad(images, [(0, 0), (above, side - height - above), (left, side - width - left), (0, 0)])


def _numbered(column: str, columns: Columns, num_train: int, notes: list[str]) -> Columns:
    """The numbers of a column of `NAMES_OF`, from 0, and a name for each; numbers that nothing has are left out.

    Raises:
        ValueError: Numbers and names do not fit, or a name cannot be shown.
    """
    numbers = columns[column]
    key = NAMES_OF[column]
    used = np.unique(numbers)
    most = num_train  # numbers that are no classes, as years, are large
    if key in columns:
        most = len(columns[key].ravel())
    least = used.min()
    greatest = used.max()
    if least < 0 or greatest >= most:
        fault = f"{column}_train or {column}_test counts from {least} to {greatest}"
        raise ValueError(f"{fault}, {key} or the training images from 0 to {most - 1}")
    if key in columns:
        names = columns[key].ravel().astype(str)
    else:
        names = used.astype(str)
        numbers = np.searchsorted(used, numbers)
        if len(used) <= greatest:
            shown = f"{', '.join(names[:5])}{_and_more(len(used) - 5)}"
            noun = "classes" if column == "y" else "domains"
            notes.append(f"{len(used)} {noun}, whose numbers are {shown}")
    is_repeated = len(np.unique(names)) < len(names)
    if is_repeated or not all(name.isprintable() for name in names):
        raise ValueError(f"{key} has a name twice, or one of several lines")
    return {column: numbers, key: names}


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _as_uint8(images: np.ndarray, notes: list[str]) -> np.ndarray:
    """The images as uint8 `[N, H, W, channels]`; adds to the notes what was changed."""
    shape = images.shape
    side = math.isqrt(shape[-1])
    if len(shape) == 2 and side**2 == shape[1]:
        images = images.reshape(-1, side, side)
        notes.append(f"rows of {shape[1]} pixels became images of {side} x {side}")
    if len(shape) == 4 and shape[1] in (1, 3) and shape[3] not in (1, 3):
        images = np.moveaxis(images, 1, 3)
        notes.append("the images' channels came first")
    if images.ndim == 3:
        images = images[..., None]
    if not images.size or images.shape[3:] not in ((1,), (3,)):
        raise ValueError(f"the images are of type {images.dtype} and shape {shape}")
    if images.dtype == np.uint8:
        return images
    low = float(images.min())  # NaN where there is one
    high = float(images.max())
    if not (low >= 0 and high <= 255) and not (low >= -1 and high <= 1):
        raise ValueError(f"pixels from {low:g} to {high:g} are not in 0 to 255, 0 to 1 or -1 to 1: undo normalisation")
    shift = 0
    scale = 1.0
    if low < 0:
        shift = 1
        scale = 127.5
    elif high <= 1:
        scale = 255.0
    notes.append(f"pixels x from {low:g} to {high:g} became 8 bits, (x + {shift}) * {scale:g}")
    return np.rint((images + shift) * scale).astype(np.uint8)


def first_of_each(
    order: np.ndarray, strata: np.ndarray, count: Callable[[int], int] = lambda size: round(size / 5)
) -> np.ndarray:
    """Whether each example is among the first `count(size)` of its stratum, in an order that sorts the strata."""
    _, sizes = np.unique(strata, return_counts=True)
    first = np.empty(len(order), bool)
    first[order] = np.concatenate([np.arange(size) < count(size) for size in sizes])
    return first


def canonical_arrays(columns: Columns) -> Arrays:
    """The arrays of the cache: each split in order of label, hash of the pixels, domain and writer.

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
