"""Images as arrays: the form that every reader returns, and their order.

Columns have an entry for each image, by kind: `x` uint8 `[N, H, W, channels]`, `y` int64 `[N]`, `test` bool `[N]` and,
where known, `domain` and `writer` int64 `[N]`. `class_names` and `domain_names` name the labels and the domains. The
cache has them by kind and part, `x_train`, `x_test` and so on, each part in canonical order, and with
`place_train`, `place_test` int64 `[N]`, where each image stood in the files.
"""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedcli.data.reading import check_size, reading

Arrays = dict[str, np.ndarray]
PARTS = ("train", "test")
KINDS = ("x", "y", "domain", "writer", "place")  # of what the cache has for each image
NAMES = {"y": "class_names", "domain": "domain_names"}
WORDS = {
    "x": "x", "image": "x", "images": "x", "imgs": "x", "data": "x", "y": "y", "label": "y", "labels": "y",
    "target": "y", "targets": "y", "domain": "domain", "domains": "domain", "writer": "writer", "writers": "writer",
    "place": "place",
}  # fmt: skip
PART = "(train|test|val)(?:ing|id|idation)?"  # of a set, as arrays and folders name it
_KEY = re.compile(f"(?:{PART}_?)?(.*?)(?:_?{PART})?", re.DOTALL)  # of an array in an .npz file
NPZ = "a whole .npz file, as numpy.savez writes it"
ARRAYS = (
    "arrays x_train, y_train, x_test, y_test (or x, y): images N x H x W, N x H x W x 1 or N x H x W x 3 of one size, "
    "and a whole number or class name for each"
)


def read_npz(path: Path) -> Arrays:
    """The arrays of an `.npz` file, as they are.

    Raises:
        UserError: It is damaged, holds objects, or is too large.
    """
    with reading(path, NPZ), np.load(path, allow_pickle=False) as file:
        check_size(sum(member.file_size for member in file.zip.infolist()), path)
        return dict(file)


# A ValueError below says what is wrong; `reading`, around it, adds in which file and what that must be.


def join_parts(arrays: Arrays, notes: list[str]) -> Arrays:
    """Columns of arrays that are called by `WORDS`, with a part before or after the word.

    There is no column `test` where nothing names a part. Adds to the notes what was left out.
    """
    named: dict[str, Arrays] = {"x": {}, "y": {}}  # by kind and part
    for key, values in arrays.items():
        match = _KEY.fullmatch(key.lower())
        assert match is not None  # the expression takes any text
        part_before, word, part_after = match.groups(default="")
        if word in WORDS:
            by_part = named.setdefault(WORDS[word], {})
            by_part.setdefault(part_before or part_after, values)
    parts = choose_parts(set().union(*named.values()), notes)
    columns = {key: arrays[key] for key in NAMES.values() if key in arrays}
    for kind, by_part in named.items():
        for part in parts:
            name = f"{kind}_{part}".rstrip("_")
            if part not in by_part:
                raise ValueError(f"it has no array {name} (its arrays: {', '.join(arrays) or 'none'})")
            if len(by_part[part]) != len(named["x"][part]):
                raise ValueError(f"{name} has {len(by_part[part])} entries for {len(named['x'][part])} images")
        columns[kind] = np.concatenate([by_part[part] for part in parts])
    images = [named["x"][part] for part in parts]
    if len({array.dtype == np.uint8 for array in images}) > 1:  # numbers in [0, 1] would not be seen below
        raise ValueError("the images of one part are uint8 and those of the other are not")
    if parts != [""]:
        columns["test"] = np.repeat([False, True], [len(array) for array in images])
    return columns


def choose_parts(parts: set[str], notes: list[str]) -> list[str]:
    """The parts to train and to test on, `val` for a missing `test`; `""` alone where no part is named."""
    if parts == {""}:
        return [""]
    chosen = ["train", "test"]
    if "val" in parts and "test" not in parts:
        chosen = ["train", "val"]
    others = parts - set(chosen)
    if others:
        notes.append(f"left out: {', '.join(sorted(others)) or 'what is in no part'}")
    return chosen


def join_rows(sets: Sequence[Arrays]) -> Arrays:
    """The columns of several sets of images, one below the other; all have those of the first."""
    joined = {}
    (first, *_) = sets
    for kind in first:
        joined[kind] = np.concatenate([columns[kind] for columns in sets])
    return joined


def in_form(columns: Arrays, notes: list[str]) -> Arrays:
    """The columns of a reader or of `join_parts` in their one form; adds to the notes what was changed.

    Without a column `test` a fixed fifth of each class and domain is the test part. Channels may come first; rows of
    pixels are grey squares. Pixels in [0, 1] or [-1, 1] are stretched to 0 to 255. Black borders make images square.
    Labels may be in a column, one-hot, class names, count from 1, or leave numbers out.
    """
    x = _bytes(columns["x"], notes)
    first_image = x[0]
    if all(np.array_equal(image, first_image) for image in x):
        raise ValueError(f"all of its {len(x)} images are alike")
    columns = columns | {"x": x} | _labels(columns["y"])
    for kind in sorted({"y", "domain", "writer", "place"} & columns.keys()):
        columns[kind] = _whole_numbers(kind, columns[kind])
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
    for kind in sorted(NAMES.keys() & columns.keys()):
        columns |= _named(kind, columns, num_train, notes)
    trained = columns["y"][~columns["test"]]
    untrained = np.delete(columns["class_names"], np.unique(trained))
    if len(untrained):
        notes.append(f"without training images: {', '.join(untrained[:5])}{_and_more(len(untrained) - 5)}")
    return columns


def _labels(y: np.ndarray) -> Arrays:
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


def _whole_numbers(kind: str, values: np.ndarray) -> np.ndarray:
    """A column of a kind as int64 `[N]`; anything else than whole numbers is refused."""
    if values.ndim != 1 or (np.rint(values) != values).any():
        raise ValueError(f"{kind}_train or {kind}_test is of type {values.dtype} and shape {values.shape}")
    return values.astype(np.int64)


def _fifth_of_each(columns: Arrays) -> np.ndarray:
    """Whether each image is of the fixed fifth of its class and domain."""
    domain = columns.get("domain", np.zeros(len(columns["x"]), np.int64))
    cells = columns["y"] * (domain.max() + 1) + domain
    return first_of_each(canonical_order(columns["x"], cells), cells)


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


def _named(kind: str, columns: Arrays, num_train: int, notes: list[str]) -> Arrays:
    """The numbers of a kind of `NAMES`, from 0, and a name for each; numbers that nothing has are left out.

    Raises:
        ValueError: Numbers and names do not fit, or a name cannot be shown.
    """
    numbers = columns[kind]
    key = NAMES[kind]
    used = np.unique(numbers)
    # Numbers that are no classes, as years, are large.
    most = len(columns[key].ravel()) if key in columns else num_train
    least = used.min()
    greatest = used.max()
    if least < 0 or greatest >= most:
        fault = f"{kind}_train or {kind}_test counts from {least} to {greatest}"
        raise ValueError(f"{fault}, {key} or the training images from 0 to {most - 1}")
    if key not in columns:
        texts = used.astype(str)
        numbers = np.searchsorted(used, numbers)
        if len(used) <= greatest:
            shown = f"{', '.join(texts[:5])}{_and_more(len(used) - 5)}"
            notes.append(f"{len(used)} {'classes' if kind == 'y' else 'domains'}, whose numbers are {shown}")
    else:
        texts = columns[key].ravel().astype(str)
    if len(np.unique(texts)) < len(texts) or not all(text.isprintable() for text in texts):
        raise ValueError(f"{key} has a name twice, or one of several lines")
    return {kind: numbers, key: texts}


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _bytes(images: np.ndarray, notes: list[str]) -> np.ndarray:
    """The images as uint8 `[N, H, W, channels]`; adds to the notes what was changed."""
    shape = images.shape
    side = math.isqrt(shape[-1])
    if len(shape) == 2 and side**2 == shape[1]:
        images = images.reshape(-1, side, side)
        notes.append(f"rows of {shape[1]} pixels became images of {side} x {side}")
    if len(shape) == 4 and shape[1] in (1, 3) and shape[3] not in (1, 3):
        images = np.moveaxis(images, 1, 3)
        notes.append("the images' channels came first")
    images = images[..., None] if images.ndim == 3 else images
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
    order: np.ndarray, cells: np.ndarray, count: Callable[[int], int] = lambda size: round(size / 5)
) -> np.ndarray:
    """Whether each example is among the first `count(size)` of its cell, in an order that sorts the cells."""
    _, sizes = np.unique(cells, return_counts=True)
    first = np.empty(len(order), bool)
    first[order] = np.concatenate([np.arange(size) < count(size) for size in sizes])
    return first


def canonical(columns: Arrays) -> Arrays:
    """The arrays of the cache: each part in order of label, hash of the pixels, domain and writer.

    An image's place, unless a column has it, is its position in its part.
    """
    is_test = columns["test"]
    count_in_part = np.where(is_test, is_test.cumsum(), (~is_test).cumsum())
    columns = {"place": count_in_part - 1} | columns
    kinds = [kind for kind in KINDS if kind in columns]
    order = canonical_order(*[columns[kind] for kind in kinds if kind != "place"])
    arrays = {key: columns[key] for key in NAMES.values() if key in columns}
    rows_of_train = order[~is_test[order]]
    rows_of_test = order[is_test[order]]
    arrays |= {f"{kind}_train": columns[kind][rows_of_train] for kind in kinds}
    arrays |= {f"{kind}_test": columns[kind][rows_of_test] for kind in kinds}
    return arrays


def canonical_order(images: np.ndarray, labels: np.ndarray, *groups: np.ndarray) -> np.ndarray:
    """Positions `[N]` of images `[N, H, W, channels]` by label, hash of the pixels and groups, `[N]`."""
    pixels = np.ascontiguousarray(images).reshape(len(images), -1)
    hashes = b"".join(hashlib.blake2b(image.data, digest_size=8).digest() for image in pixels)
    return np.lexsort([*groups[::-1], np.frombuffer(hashes, ">u8"), labels])  # the last key is the first that counts
