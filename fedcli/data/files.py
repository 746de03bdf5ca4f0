"""Files that are written whole, and images as arrays: the one form that every reader returns, and their order.

Columns have an entry for each image, by kind: `x` uint8 `[N, H, W, channels]`, `y` int64 `[N]`, `test` bool `[N]` and,
where these are known, `domain` and `writer` int64 `[N]`. `class_names` and `domain_names` are what labels and domains
count. The cache has them by kind and part, `x_train`, `x_test` and so on, each part in canonical order; there
`place_train`, `place_test` int64 `[N]` tell where each image stood before.
"""

import hashlib
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedcli.errors import UserError

Arrays = dict[str, np.ndarray]
PARTS = ("train", "test")
KINDS = ("x", "y", "domain", "writer", "place")  # of what the cache has for each image
NAMES = {"y": "class_names", "domain": "domain_names"}  # what labels and domains count
LIMIT = 4 << 30  # bytes that a set may unpack to; a few megabytes of an archive can hold a thousand times as much
LONGEST = 100  # characters in the name of a class
WORDS = {
    "x": "x", "image": "x", "images": "x", "imgs": "x", "data": "x", "y": "y", "label": "y", "labels": "y",
    "target": "y", "targets": "y", "domain": "domain", "domains": "domain", "writer": "writer", "writers": "writer",
    "place": "place",
}  # fmt: skip
PART = "(train|test|val)(?:ing|id|idation)?"  # of a set, as arrays and folders name it
_KEY = re.compile(f"(?:{PART}_?)?(.*?)(?:_?{PART})?", re.DOTALL)  # of an array in an .npz file
NPZ = "a whole .npz file, as numpy.savez writes it"
ARRAYS = (
    "arrays x_train, y_train, x_test and y_test, or x and y: images N x H x W, N x H x W x 1 or N x H x W x 3, "
    "all images of one size, with a whole number or a class name for each as its label"
)
_TEMPORARY = re.compile(r"\..+\.(\d+)\.partial", re.DOTALL)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file so that a reader, or a run killed in between, sees the old or the new one, never a part.

    `write` is given a path in the same folder; what it has written goes again if it fails. A link to a file stays a
    link, and what is no file, as `/dev/stdout`, is written as it is.

    Raises:
        OSError: If the disk does not take it, with the name of the file.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        write(path)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.unlink(missing_ok=True)  # somebody may have put a link to another file there
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Whether a file is what `write_atomically` began to write in a process that is dead, or in an earlier one of the
    same number, as containers have them; a process asks before it writes there itself.
    """
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    try:
        os.kill(int(match[1]), 0)
    except (OSError, OverflowError) as error:
        return not isinstance(error, PermissionError)  # which says that it lives, under another user
    return int(match[1]) == os.getpid()


def remove_leftovers(folder: Path) -> None:
    """Removes what dead processes have left in a folder."""
    for file in filter(is_leftover, folder.glob(".*.partial")):
        file.unlink(missing_ok=True)


def one_line(error: Exception) -> str:
    """The first line of an error's text, since a refusal has one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@contextmanager
def reading(path: object, form: str) -> Iterator[None]:
    """Makes one refusal of whatever is raised while a file is read; libraries have about ten kinds of errors each.

    Raises:
        UserError: Says what was raised, and of which form the file must be.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = f"'{path}' cannot be read ({one_line(error)}); it must be {form}; correct it, or get it again."
        raise UserError(text) from error


def check_size(count: int, path: object) -> None:
    """Refuses a set that takes more than `LIMIT` bytes, or so many GiB as FEDCLI_MAX_GIB allows.

    Raises:
        UserError: If `count` bytes of `path`, unpacked, are too many.
    """
    allowed = os.environ.get("FEDCLI_MAX_GIB", "")
    if count > max(LIMIT, int(allowed) << 30 if allowed.isdecimal() else 0):
        remedy = f"leave images out, resize them, or set FEDCLI_MAX_GIB={-(-count >> 30)} to allow it"
        raise UserError(f"'{path}' unpacks to more than {LIMIT >> 30} GiB (got {count:,} bytes); {remedy}.")


def read_npz(path: Path) -> Arrays:
    """The arrays of an `.npz` file, as they are.

    Raises:
        UserError: It is damaged, holds objects, or is too large.
    """
    with reading(path, NPZ):
        with zipfile.ZipFile(path) as archive:  # NumPy would read what is no archive whole, however large
            check_size(sum(member.file_size for member in archive.infolist()), path)
        with np.load(path, allow_pickle=False) as file:
            return dict(file)


# Here a ValueError says what is wrong with arrays; `reading`, around it, adds where they are and what they must be.


def join_parts(arrays: Arrays, notes: list[str]) -> Arrays:
    """Columns of arrays that are called by `WORDS`, with a part before or after the word, and what these count.

    `val` stands for `test` where there is none; there is no column `test` where nothing names a part. Adds to the notes
    what was left out.
    """
    named: dict[str, Arrays] = {"x": {}, "y": {}}  # by kind and part
    for key, values in arrays.items():
        before, word, after = _KEY.fullmatch(key.lower()).groups(default="")
        if word in WORDS:
            named.setdefault(WORDS[word], {}).setdefault(before or after, values)
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
    if len({named["x"][part].dtype == np.uint8 for part in parts}) > 1:
        raise ValueError("the images of one part are uint8 and those of the other are not")
    if parts != [""]:
        columns["test"] = np.repeat([False, True], [len(named["x"][part]) for part in parts])
    return columns


def choose_parts(parts: set[str], notes: list[str]) -> list[str]:
    """The parts to train and to test on, of those that there are; an empty name alone where nothing names parts."""
    taken = [""] if parts == {""} else ["train", "val" if "val" in parts and "test" not in parts else "test"]
    if parts - set(taken):
        notes.append(f"left out: {', '.join(sorted(parts - set(taken))) or 'what is in no part'}")
    return taken


def in_form(columns: Arrays, notes: list[str]) -> Arrays:
    """The columns, of a reader or of `join_parts`, in their one form; adds to the notes what was changed.

    Without a column `test` a fixed fifth of each class and domain is the test part. A second axis of 1 or 3 is the
    channels' where the last one is not; rows of pixels are grey squares. Pixels in [0, 1] or in [-1, 1] are stretched
    to 0 to 255, those in [0, 255] rounded. Black borders make images square. Labels may be in a column or one-hot;
    from 1 they count from 0; texts are the class names and are numbered in their order. Numbers name what has no names.
    """
    x, y = _bytes(columns["x"], notes), columns["y"]
    if y.ndim == 2 and y.shape[1] > 1 and (np.sort(y)[:, -2:] == [0, 1]).all():
        y = y.argmax(1)
        notes.append("the labels were one-hot")
    columns = columns | {"x": x, "y": y[:, 0] if y.shape[1:] == (1,) else y}
    if y.dtype.kind in "US":
        columns["class_names"], columns["y"] = np.unique(columns["y"].astype(str), return_inverse=True)
        notes.append("the labels were class names")
    for kind in {"y", "domain", "writer", "place"} & columns.keys():
        values = columns[kind]
        if values.ndim != 1 or (np.rint(values) != values).any():
            raise ValueError(f"{kind}_train or {kind}_test is of type {values.dtype} and shape {values.shape}")
        columns[kind] = values.astype(np.int64)
    if "test" not in columns:
        columns["test"] = _a_fifth(columns)
        notes.append("a fixed fifth of each class is kept to test on")
    test, (height, width) = columns["test"], x.shape[1:3]
    num_train = len(x) - test.sum()
    if not 0 < num_train < len(x):
        raise ValueError(f"{num_train} images are to train and {len(x) - num_train} to test on, too few")
    if height != width:
        top, left = max(width - height, 0), max(height - width, 0)
        columns["x"] = np.pad(x, [(0, 0), (top // 2, top - top // 2), (left // 2, left - left // 2), (0, 0)])
        notes.append(f"black borders made the images {max(height, width)} x {max(height, width)}")
    y = columns["y"]
    if y.min() == 1 and y.max() == np.size(columns.get("class_names", range(y.max()))):
        columns["y"] = y - 1
        notes.append("the labels counted from 1")
    for kind, key in [(kind, key) for kind, key in NAMES.items() if kind in columns]:
        numbers = columns[kind]
        texts = np.atleast_1d(columns.get(key, np.arange(min(numbers.max() + 1, num_train)))).astype(str)
        if numbers.min() < 0 or numbers.max() >= len(texts):
            fault = f"{kind}_train or {kind}_test counts from {numbers.min()} to {numbers.max()}"
            raise ValueError(f"{fault}, and {key} or the training images from 0 to {len(texts) - 1}")
        is_short = [text.isprintable() and 0 < len(text) <= LONGEST for text in texts]
        if len(set(texts)) < len(texts) or not all(is_short):
            raise ValueError(f"{key} has a name twice, or one that is not 1 to {LONGEST} characters on one line")
        columns[key] = texts
    untrained = columns["class_names"][np.setdiff1d(columns["y"][test], columns["y"][~test])]
    if len(untrained):
        notes.append(f"without training images: {', '.join(untrained[:5])}")
    return columns


def _bytes(images: np.ndarray, notes: list[str]) -> np.ndarray:
    """The images as uint8 `[N, H, W, channels]`; adds to the notes what was changed."""
    shape, side = images.shape, math.isqrt(images.shape[-1])
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
    low, high = float(images.min()), float(images.max())  # NaN where there is one
    if not (low >= 0 and high <= 255) and not (low >= -1 and high <= 1):
        raise ValueError(f"pixels from {low:g} to {high:g} are not in 0 to 255, 0 to 1 or -1 to 1: undo normalisation")
    shift, scale = (1, 127.5) if low < 0 else (0, 255) if high <= 1 else (0, 1)
    notes.append(f"pixels x from {low:g} to {high:g} became 8 bits, (x + {shift}) * {scale:g}")
    return np.rint((images + shift) * scale).astype(np.uint8)


def _a_fifth(columns: Arrays) -> np.ndarray:
    """Whether each image is in the test part: a random fifth of each class and domain, whatever their order."""
    y, domain = columns["y"], columns.get("domain", np.zeros_like(columns["y"]))
    order, cells = canonical_order(columns["x"], y, domain), y * (domain.max() + 1) + domain
    test = np.zeros(len(y), bool)
    for cell in np.unique(cells):
        members = order[cells[order] == cell]
        test[members[: round(len(members) / 5)]] = True
    return test


def canonical(columns: Arrays) -> Arrays:
    """What the cache has of columns: each part in order of label, hash of the pixels, domain and writer.

    Where nothing tells the place of an image, it is that in its part.
    """
    test, arrays = columns["test"], {key: columns[key] for key in NAMES.values() if key in columns}
    columns = {"place": np.where(test, test.cumsum(), (~test).cumsum()) - 1} | columns
    kinds = [kind for kind in KINDS if kind in columns]
    order = canonical_order(*(columns[kind] for kind in kinds if kind != "place"))
    for part, rows in zip(PARTS, (order[~test[order]], order[test[order]]), strict=True):
        arrays |= {f"{kind}_{part}": columns[kind][rows] for kind in kinds}
    return arrays


def canonical_order(images: np.ndarray, labels: np.ndarray, *groups: np.ndarray) -> np.ndarray:
    """Positions `[N]` of images `[N, H, W, channels]` by label, hash of the pixels and groups, `[N]`."""
    pixels = np.ascontiguousarray(images).reshape(len(images), -1)
    hashes = b"".join(hashlib.blake2b(image, digest_size=8).digest() for image in pixels)
    return np.lexsort([*groups[::-1], np.frombuffer(hashes, ">u8"), labels])  # the last key is the first that counts
