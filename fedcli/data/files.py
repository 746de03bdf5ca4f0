"""Arrays of images in the one form that every reader returns, their order, and files that are written whole.

By name: `x_train`, `x_test` uint8 `[N, H, W, channels]`, `y_train`, `y_test` int64 `[N]`, `class_names`; with several
domains `domain_train`, `domain_test` int64 `[N]`, `domain_names`; with known writers `writer_train`, `writer_test`
int64 `[N]`. In canonical order also `place_train`, `place_test` int64 `[N]`: where each image stood before.
"""

import hashlib
import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedcli.errors import UserError

Arrays = dict[str, np.ndarray]
PARTS = ("train", "test")
KINDS = ("x", "y", "domain", "writer", "place")  # of arrays with an entry for each example
NAMES = {"y": "class_names", "domain": "domain_names"}  # what labels and domains count
LIMIT = 4 << 30  # bytes that a set may unpack to; a few megabytes of an archive can hold a thousand times as much
NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]{1,100}")  # of a class
WORDS = {
    "x": "x", "image": "x", "images": "x", "imgs": "x", "data": "x", "y": "y", "label": "y", "labels": "y",
    "target": "y", "targets": "y", "domain": "domain", "domains": "domain", "writer": "writer", "writers": "writer",
}  # fmt: skip
PART = "(train|test|val)(?:ing|id|idation)?"  # of a set, as arrays and folders name it
_KEY = re.compile(f"(?:{PART}_?)?(.*?)(?:_?{PART})?", re.DOTALL)  # of an array in an .npz file
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
        temporary.touch(exist_ok=False)
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
        text = f"'{path}' cannot be read ({one_line(error)}); it must be {form}; get it or write it again."
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


_NPZ = "a whole .npz file, as numpy.savez writes it"


def read_npz(path: Path) -> Arrays:
    """The arrays of an `.npz` file, as they are.

    Raises:
        UserError: It is damaged, holds objects, or is too large.
    """
    with reading(path, _NPZ):
        with zipfile.ZipFile(path) as archive:  # NumPy would read what is no archive whole, however large
            check_size(sum(member.file_size for member in archive.infolist()), path)
        with np.load(path, allow_pickle=False) as file:
            return dict(file)


def npz_facts(path: Path) -> tuple[int, int, int, tuple[int, int, int], str]:
    """Numbers of training images, test images and classes, `(channels, H, W)`, and the source, without the pixels.

    Raises:
        UserError: The file, written from arrays in their one form, is damaged.
    """
    with reading(path, _NPZ), np.load(path, allow_pickle=False) as file:
        with file.zip.open("x_train.npy") as member:
            np.lib.format.read_magic(member)
            num_train, height, width, channels = np.lib.format.read_array_header_1_0(member)[0]
        source = str(file.get("source", ""))
        return num_train, len(file["y_test"]), len(file["class_names"]), (channels, height, width), source


def in_form(arrays: Arrays, path: Path, notes: list[str]) -> Arrays:
    """The arrays, of a reader or an `.npz` file at `path`, in their one form; adds to the notes what was changed.

    Arrays may be called by `WORDS`, with a part before or after the word; `val` stands for `test` where there is none,
    and without parts a fixed fifth of each class and domain is the test part. A second axis of 1 or 3 is the channels'
    where the last one is not; rows of pixels are grey squares. Pixels in [0, 1] or in [-1, 1] are stretched to 0 to
    255, those in [0, 255] rounded. Black borders make images square. Labels may be in a column or one-hot; from 1 they
    count from 0. Numbers name what has no names.

    Raises:
        UserError: Names the array that is missing or not as it should be.
    """
    named: dict[tuple[str, str], np.ndarray] = {}  # by kind and part
    for key, values in arrays.items():
        before, word, after = _KEY.fullmatch(key.lower()).groups(default="")
        if word in WORDS and not (before and after):
            named.setdefault((WORDS[word], before or after), values)
    parts = choose_parts({part for _, part in named}, notes)
    kinds = [kind for kind in KINDS if kind in {"x", "y", *(kind for kind, _ in named)}]
    columns: Arrays = {}
    for kind in kinds:
        missing = ["_".join(filter(None, (kind, part))) for part in parts if (kind, part) not in named]
        if missing:
            rule = "x_train, y_train, x_test and y_test are needed, and domains or writers of both parts or none"
            raise UserError(f"'{path}' has no {missing[0]} (got {', '.join(arrays) or 'nothing'}); {rule}; add it.")
        several = [named[kind, part] for part in parts]
        lengths = [named["x", part].shape[:1] for part in parts]
        alike = len({(values.shape[1:], kind == "x" and values.dtype == np.uint8) for values in several}) == 1
        if not alike or [values.shape[:1] for values in several] != lengths or not all(map(sum, lengths)):
            raise _unusable(kind, several, path)
        columns[kind] = np.concatenate(several)
    test = np.repeat([False, True][: len(parts)], [length for (length,) in lengths])
    columns["x"], y = _bytes(columns["x"], path, notes), columns["y"]
    if y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "buif" and (np.sort(y)[:, -2:] == [0, 1]).all():
        y = y.argmax(1)
        notes.append("the labels were one-hot")
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    columns["y"] = y.astype(np.int64) if y.dtype.kind == "f" and (y == np.rint(y)).all() else y
    for kind in kinds[1:]:
        if columns[kind].dtype.kind not in "iu" or columns[kind].ndim != 1:
            raise _unusable(kind, [columns[kind]], path)
        columns[kind] = columns[kind].astype(np.int64)
    if parts == [""]:
        test = _a_fifth(columns)
        notes.append("a fixed fifth of each class is kept to test on")
        if not test.any():
            raise UserError(
                f"'{path}' has too few images to test on a fifth of each class (got {len(test)}); add some."
            )
    height, width = columns["x"].shape[1:3]
    if height != width:
        top, left = max(width - height, 0), max(height - width, 0)
        borders = [(0, 0), (top // 2, top - top // 2), (left // 2, left - left // 2), (0, 0)]
        columns["x"] = np.pad(columns["x"], borders)
        notes.append(f"black borders made the images {max(height, width)} x {max(height, width)}")
    names: Arrays = {}
    for kind, key in NAMES.items():
        if kind in columns:
            lowest, highest = int(columns[kind].min()), int(columns[kind].max())
            if kind == "y" and lowest == 1 and (key not in arrays or highest == arrays[key].size):
                columns[kind], lowest, highest = columns[kind] - 1, 0, highest - 1
                notes.append("the labels counted from 1")
            texts = arrays.get(key, np.arange(min(highest + 1, (~test).sum())))  # a wild label makes no million names
            if lowest < 0 or highest >= texts.size:
                fault = f"{kind}_train or {kind}_test in '{path}' is out of range (got {lowest} to {highest})"
                raise UserError(f"{fault}; it must be from 0 to {texts.size - 1}, the numbers of {key} or images.")
            names[key] = np.atleast_1d(texts).astype(str)
            for name, count in Counter(names[key].tolist()).items():
                if count > 1 or not NAME.fullmatch(name):
                    fault = f"{key} in '{path}' has a name twice, or one that cannot be shown (got {name[:40]!a})"
                    raise UserError(f"{fault}; a name has 1 to 100 characters on one line; rename it.")
    return divided(test, **columns) | names


def choose_parts(parts: set[str], notes: list[str]) -> list[str]:
    """The parts to train and to test on, of those that there are; an empty name alone where nothing names parts."""
    taken = [""] if parts == {""} else ["train", "val" if "val" in parts and "test" not in parts else "test"]
    if parts - set(taken):
        notes.append(f"left out: {', '.join(sorted(parts - set(taken))) or 'what is in no part'}")
    return taken


def _unusable(kind: str, several: list[np.ndarray], path: Path) -> UserError:
    """An error, to be raised by the caller, for arrays of a kind, one for each part, that are not as they should be."""
    texts = " and ".join(f"{values.dtype} of shape {values.shape}" for values in several)
    rule = "images N x H x W, N x H x W x 1 or N x H x W x 3, alike in both parts, uint8 or all of numbers"
    rule = rule if kind == "x" else "whole numbers, one for each image"
    return UserError(f"{kind}_train or {kind}_test in '{path}' is invalid (got {texts}); it must be {rule}.")


def _bytes(images: np.ndarray, path: Path, notes: list[str]) -> np.ndarray:
    """The images as uint8 `[N, H, W, channels]`; adds to the notes what was changed."""
    shape, side = images.shape, math.isqrt(images.shape[-1])
    if len(shape) == 2 and side and shape[1] == side**2:
        images = images.reshape(-1, side, side)
        notes.append(f"rows of {shape[1]} pixels became images of {side} x {side}")
    if len(shape) == 4 and shape[1] in (1, 3) and shape[3] not in (1, 3):
        images = np.moveaxis(images, 1, 3)
        notes.append("the images' channels came first")
    images = images[..., None] if images.ndim == 3 else images
    if not images.size or images.dtype.kind not in "buif" or images.shape[3:] not in ((1,), (3,)):
        raise _unusable("x", [images], path)
    if images.dtype == np.uint8:
        return images
    low, high = float(images.min()), float(images.max())  # NaN where there is one
    if not (low >= 0 and high <= 255) and not (low >= -1 and high <= 1):
        fault = f"the pixels in '{path}' have an unknown range (got {low:g} to {high:g})"
        raise UserError(f"{fault}; use 0 to 255, 0 to 1 or -1 to 1; undo normalisation.")
    shift, scale = (1, 127.5) if low < 0 else (0, 255) if high <= 1 else (0, 1)
    notes.append(f"pixels from {low:g} to {high:g} became 8 bits, times {scale:g}")
    return np.rint((images + shift) * scale).astype(np.uint8)


def _a_fifth(columns: Arrays) -> np.ndarray:
    """Whether each image is in the test part: a random fifth of each class and domain, whatever their order."""
    x, y, domain = columns["x"], columns["y"], columns.get("domain", np.zeros_like(columns["y"]))
    order, cells, test = canonical_order(x, y, domain), y * (domain.max() + 1) + domain, np.zeros(len(y), bool)
    for cell in np.unique(cells):
        members = order[cells[order] == cell]
        test[members[: round(len(members) / 5)]] = True
    return test


def divided(test: np.ndarray, **columns: np.ndarray) -> Arrays:
    """The arrays of examples, in columns `[N]` by kind, of which `test`, bool `[N]`, are the test part."""
    parts = {"train": ~test, "test": test}
    return {f"{kind}_{part}": values[chosen] for part, chosen in parts.items() for kind, values in columns.items()}


def canonical(arrays: Arrays) -> Arrays:
    """The arrays with each part in order of label, hash of the pixels `[H, W, channels]`, domain and writer.

    Where nothing tells the place of an image, it is that in the arrays.
    """
    result = {f"place_{part}": np.arange(len(arrays[f"y_{part}"])) for part in PARTS} | arrays
    for part in PARTS:
        columns = {kind: result[f"{kind}_{part}"] for kind in KINDS if f"{kind}_{part}" in result}
        order = canonical_order(*(columns[kind] for kind in KINDS[:4] if kind in columns))
        result |= {f"{kind}_{part}": values[order] for kind, values in columns.items()}
    return result


def canonical_order(images: np.ndarray, labels: np.ndarray, *groups: np.ndarray) -> np.ndarray:
    """Positions `[N]` of images `[N, H, W, channels]` by label, hash of the pixels and groups, `[N]`."""
    pixels = np.ascontiguousarray(images).reshape(len(images), -1)
    hashes = b"".join(hashlib.blake2b(image, digest_size=8).digest() for image in pixels)
    return np.lexsort([*groups[::-1], np.frombuffer(hashes, ">u8"), labels])  # the last key is the first that counts
