"""Arrays of images in the one form that every reader returns, their order, and files that are written whole.

By name: `x_train`, `x_test` uint8 `[N, H, W, channels]`, `y_train`, `y_test` int64 `[N]`, `class_names`; with several
domains `domain_train`, `domain_test` int64 `[N]`, `domain_names`; with known writers `writer_train`, `writer_test`
int64 `[N]`. In canonical order also `place_train`, `place_test` int64 `[N]`: where each image stood before.
"""

import hashlib
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
_TEMPORARY = re.compile(r"\..+\.(\d+)\.partial", re.DOTALL)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file so that a reader, or a run killed in between, sees the old or the new one, never a part.

    Args:
        path: The file; a link to one stays a link, and what is no file, as `/dev/stdout`, is written as it is.
        write: Given a path in the same folder, writes there. What it has written goes again if it fails.

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
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def is_leftover(path: Path) -> bool:
    """Whether a file is what `write_atomically` began to write in a process that is dead, or in an earlier one of the
    same number, as containers have them; a process asks before it writes there itself.
    """
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it lives, under another user
        return False
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

    Args:
        path: The file, for the refusal.
        form: What the file must be.

    Raises:
        UserError: Says what was raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = f"'{path}' cannot be read ({one_line(error)}); it must be {form}; get it or write it again."
        raise UserError(text) from error


def check_size(count: int, path: object) -> None:
    """Refuses a set that takes more than `LIMIT` bytes.

    Raises:
        UserError: If `count` bytes of `path` are too many.
    """
    if count > LIMIT:
        raise UserError(
            f"'{path}' unpacks to more than {LIMIT >> 30} GiB (got {count:,} bytes); leave images out, or resize them."
        )


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


def npz_sizes(path: Path) -> tuple[int, int, int, tuple[int, int, int]]:
    """Numbers of training images, test images and classes, and `(channels, H, W)`, without reading the pixels.

    Raises:
        UserError: The file, written from arrays in their one form, is damaged.
    """
    with reading(path, _NPZ), np.load(path, allow_pickle=False) as file:
        with file.zip.open("x_train.npy") as member:
            np.lib.format.read_magic(member)
            num_train, height, width, channels = np.lib.format.read_array_header_1_0(member)[0]
        return num_train, len(file["y_test"]), len(file["class_names"]), (channels, height, width)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as `28 x 28 x 1`."""
    return " x ".join(map(str, shape)) or "()"


def in_form(arrays: Arrays, path: Path) -> tuple[Arrays, list[str]]:
    """The arrays in their one form, and what was changed for that.

    A second axis of 1 or 3 is the channels' where the last one is not. Pixels in [0, 1] or in [-1, 1] are stretched to
    0 to 255, those in [0, 255] rounded; the range is that of both parts together. Black borders make images square, and
    those of both parts alike. Labels that count from 1 count from 0. Numbers name what has no names.

    Args:
        arrays: In any form that an `.npz` file may have; those of other names are left out.
        path: Where they come from, for the refusal.

    Raises:
        UserError: Names the array that is missing or not as it should be.
    """
    kinds = [kind for kind in KINDS if kind in "xy" or arrays.keys() & {f"{kind}_train", f"{kind}_test"}]
    columns: dict[str, list[np.ndarray]] = {}  # the arrays of both parts
    for kind in kinds:
        missing = [key for key in (f"{kind}_train", f"{kind}_test") if key not in arrays]
        if missing:
            raise UserError(
                f"'{path}' has no {missing[0]} (got {', '.join(arrays) or 'nothing'}); x_train, y_train, x_test and "
                "y_test are needed, and domains or writers are told of both parts; add it."
            )
        columns[kind] = [arrays[f"{kind}_{part}"] for part in PARTS]
    notes: list[str] = []
    columns["x"] = _uint8_squares(columns["x"], path, notes)
    result: Arrays = {}
    for kind in kinds[1:]:
        for part, values, images in zip(PARTS, columns[kind], columns["x"], strict=True):
            if values.dtype.kind not in "iu" or values.shape != (len(images),):
                raise _unusable(kind, part, values, f"{len(images)} whole numbers, one for each image", path)
        if kind in NAMES:
            names = arrays.get(NAMES[kind])
            lowest = min(int(values.min()) for values in columns[kind])
            highest = max(int(values.max()) for values in columns[kind])
            if kind == "y" and lowest == 1 and (names is None or highest == names.size):
                columns[kind], lowest, highest = [values - 1 for values in columns[kind]], 0, highest - 1
                notes.append("the labels counted from 1")
            # Without names, a wild label would make up millions of classes.
            limit = len(columns["x"][0]) if names is None else names.size
            if lowest < 0 or highest >= limit:
                source = "the number of training images" if names is None else f"the length of {NAMES[kind]}"
                raise UserError(
                    f"{kind}_train or {kind}_test in '{path}' is out of range (got {lowest} to {highest}); they must "
                    f"be from 0 to {limit - 1}, below {source}; number them from 0."
                )
            result[NAMES[kind]] = (np.arange(highest + 1) if names is None else np.atleast_1d(names)).astype(str)
            for name, count in Counter(result[NAMES[kind]].tolist()).items():
                if count > 1 or not NAME.fullmatch(name):
                    raise UserError(
                        f"{NAMES[kind]} in '{path}' has a name twice, or one that cannot be shown (got {name[:40]!a}); "
                        "a name has 1 to 100 characters on one line; rename it."
                    )
        columns[kind] = [values.astype(np.int64) for values in columns[kind]]
    for kind, pair in columns.items():
        result |= {f"{kind}_{part}": values for part, values in zip(PARTS, pair, strict=True)}
    return result, notes


def _unusable(kind: str, part: str, values: np.ndarray, rule: str, path: Path) -> UserError:
    """An error, to be raised by the caller, for an array that is not as it should be."""
    return UserError(
        f"{kind}_{part} in '{path}' is not usable (got {values.dtype} of shape {shape_text(values.shape)}); it must be "
        f"{rule}; convert it."
    )


def _uint8_squares(images: list[np.ndarray], path: Path, notes: list[str]) -> list[np.ndarray]:
    """The images of both parts as `in_form` has them; adds to the notes what was changed."""
    if all(pixels.ndim == 4 and pixels.shape[1] in (1, 3) and pixels.shape[3] not in (1, 3) for pixels in images):
        images = [np.moveaxis(pixels, 1, 3) for pixels in images]
        notes.append("the images' channels came first")
    images = [pixels[..., None] if pixels.ndim == 3 else pixels for pixels in images]
    in_bytes, channels = images[0].dtype == np.uint8, images[0].shape[3:]
    for part, pixels in zip(PARTS, images, strict=True):
        numbers = pixels.size and pixels.dtype.kind in "buif" and (pixels.dtype == np.uint8) == in_bytes
        if not numbers or channels not in ((1,), (3,)) or pixels.shape[3:] != channels:
            rule = "images N x H x W, N x H x W x 1 or N x H x W x 3, alike in both parts, uint8 or all of numbers"
            raise _unusable("x", part, pixels, rule, path)
    if not in_bytes:
        low = float(np.min([pixels.min() for pixels in images]))  # NaN where there is one
        high = float(np.max([pixels.max() for pixels in images]))
        if not (low >= 0 and high <= 255) and not (low >= -1 and high <= 1):
            raise UserError(
                f"the pixels in '{path}' are in no known range (got {low:g} to {high:g}); 0 to 255, 0 to 1 and -1 to 1 "
                "are; undo their normalisation."
            )
        shift, scale = (1, 127.5) if low < 0 else (0, 255) if high <= 1 else (0, 1)
        images = [np.rint((pixels + shift) * scale).astype(np.uint8) for pixels in images]
        notes.append(f"pixels from {low:g} to {high:g} became 8 bits, times {scale:g}")
    side = max(max(pixels.shape[1:3]) for pixels in images)
    if any(pixels.shape[1:3] != (side, side) for pixels in images):
        for number, pixels in enumerate(images):
            gaps = [(side - length) // 2 for length in pixels.shape[1:3]]
            borders = [(gap, side - length - gap) for gap, length in zip(gaps, pixels.shape[1:3], strict=True)]
            images[number] = np.pad(pixels, [(0, 0), *borders, (0, 0)])
        notes.append(f"black borders made the images {side} x {side}")
    return images


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
