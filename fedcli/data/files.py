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


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file so that a reader, or a run killed in between, sees the old or the new one, never a part.

    Args:
        path: The file; a link to one stays a link, and what is no file, as `/dev/stdout`, is written as it is.
        write: Given a path in the same folder, writes there. What it has written goes again if it fails.

    Raises:
        OSError: If the disk does not take it, with the name of the file, whatever `write` made of that.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        write(path)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.unlink(missing_ok=True)  # somebody may have put a link to another file there
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o666))
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        reason = error
        if isinstance(error, Exception) and not isinstance(error, OSError):
            reason = _refusal_of_disk(temporary)
        temporary.unlink(missing_ok=True)
        if not isinstance(reason, OSError):
            raise
        raise OSError(reason.errno, reason.strerror, str(path)) from error


def _refusal_of_disk(file: Path) -> OSError | None:
    """Why the disk takes no more of a file; None where it does. A library's own error does not tell, as PyTorch's."""
    try:
        with file.open("ab") as end:
            end.write(bytes(1 << 16))
            end.flush()
            os.fsync(end.fileno())
    except OSError as error:
        return error
    return None


_TEMPORARY = re.compile(r"\..+\.(\d+)\.partial", re.DOTALL)


def is_leftover(path: Path) -> bool:
    """Whether a file is what `write_atomically` began to write in a process that is dead, or in an earlier one of the
    same number, as containers have them; a process asks before it writes there itself.
    """
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    process = int(match[1])
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it lives, under another user
        return False
    return process == os.getpid()


def remove_leftovers(folder: Path) -> None:
    """Removes what dead processes have left in a folder."""
    for file in folder.glob(".*.partial"):
        if is_leftover(file):
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

    Args:
        path: A file written from arrays in their one form.

    Raises:
        UserError: It is damaged.
    """
    with reading(path, _NPZ), np.load(path, allow_pickle=False) as file:
        with file.zip.open("x_train.npy") as member:
            np.lib.format.read_magic(member)
            num_train, height, width, channels = np.lib.format.read_array_header_1_0(member)[0]
        return num_train, len(file["y_test"]), len(file["class_names"]), (channels, height, width)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as `28 x 28 x 1`."""
    return " x ".join(map(str, shape)) or "()"


def converted(arrays: Arrays, path: Path) -> tuple[Arrays, list[str]]:
    """Arrays with images as uint8 `[N, H, W, channels]`, square, and labels from 0, and what was changed for that.

    A second axis of 1 or 3 is the channels' where the last one is not. Pixels in [0, 1] or in [-1, 1] are stretched to
    0 to 255, those in [0, 255] rounded; the range is that of both parts together. Black borders make images square, and
    those of both parts alike. Labels that count from 1 count from 0. What is in no known form stays as it is.

    Args:
        arrays: In any form that an `.npz` file may have.
        path: Where they come from, for the refusal.

    Raises:
        UserError: Pixels are in no such range.
    """
    images, labels = ([arrays.get(f"{kind}_{part}", np.empty(0)) for part in PARTS] for kind in "xy")
    if not all(values.size and values.dtype.kind in "buif" for values in (*images, *labels)):
        return arrays, []
    notes = []
    if all(pixels.ndim == 4 and pixels.shape[1] in (1, 3) and pixels.shape[3] not in (1, 3) for pixels in images):
        images = [np.moveaxis(pixels, 1, 3) for pixels in images]
        notes.append("the images' channels came first")
    if all(pixels.dtype != np.uint8 for pixels in images):
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
    side = max(length for pixels in images for length in pixels.shape[1:3] or (0,))
    fit = all(pixels.ndim > 2 and pixels.shape[3:] in ((), (1,), (3,)) for pixels in images)
    if fit and any(pixels.shape[1:3] != (side, side) for pixels in images):
        padded = [np.zeros((len(pixels), side, side, *pixels.shape[3:]), pixels.dtype) for pixels in images]
        for canvas, pixels in zip(padded, images, strict=True):
            height, width = pixels.shape[1:3]
            top, left = (side - height) // 2, (side - width) // 2
            canvas[:, top : top + height, left : left + width] = pixels
        images = padded
        notes.append(f"black borders made the images {side} x {side}")
    highest, names = max(values.max() for values in labels), arrays.get("class_names")
    if min(values.min() for values in labels) == 1 and (names is None or highest == np.size(names)):
        labels = [values - 1 for values in labels]
        notes.append("the labels counted from 1")
    return arrays | dict(zip(("x_train", "x_test", "y_train", "y_test"), (*images, *labels), strict=True)), notes


def checked(arrays: Arrays, path: Path) -> Arrays:
    """The arrays in their one form: images with a channel axis, int64 labels, names of classes and domains.

    Args:
        arrays: In any form that an `.npz` file may have.
        path: Where they come from, for the refusal.

    Raises:
        UserError: Names the array that is missing or not as it should be.
    """
    pairs = [[f"{kind}_{part}" for part in PARTS] for kind in KINDS]
    needed = [key for pair in pairs if pair[0][0] in "xy" or any(key in arrays for key in pair) for key in pair]
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise UserError(
            f"'{path}' has no {missing[0]} (got {', '.join(arrays) or 'nothing'}); x_train, y_train, x_test and y_test "
            "are needed, and domains or writers are told of both parts; add it."
        )
    result: Arrays = {}
    for key in needed:
        values, images = arrays[key], result.get(f"x_{key.partition('_')[2]}")
        if images is None:
            rule = "uint8 images, N x H x H, N x H x H x 1 or N x H x H x 3, of one size in both parts"
            values = values[..., None] if values.ndim == 3 else values
            size = result.get("x_train", values).shape[1:]
            fits = values.dtype == np.uint8 and values.size > 0 and values.ndim == 4 and values.shape[1:] == size
            fits = fits and size[0] == size[1] and size[2] in (1, 3)
        else:
            rule = f"{len(images)} whole numbers, one for each image"
            fits = np.issubdtype(values.dtype, np.integer) and values.shape == images.shape[:1]
        if not fits:
            raise UserError(
                f"{key} in '{path}' is not usable (got {values.dtype} of shape {shape_text(values.shape)}); it must be "
                f"{rule}; convert it."
            )
        result[key] = values if images is None else values.astype(np.int64)
    for kind, name in NAMES.items():
        if f"{kind}_train" in result:
            result[name] = _checked_names(arrays.get(name), kind, result, path)
    return result


def _checked_names(names: np.ndarray | None, kind: str, arrays: Arrays, path: Path) -> np.ndarray:
    """The names of what labels (kind `y`) or domains count, numbers where there are none; refuses wild ones."""
    values = np.concatenate([arrays[f"{kind}_{part}"] for part in PARTS])
    lowest, highest = int(values.min()), int(values.max())
    # Without names, a wild label would make up millions of classes.
    limit = len(arrays["x_train"]) if names is None else names.size
    if lowest < 0 or highest >= limit:
        source = "the number of training images" if names is None else f"the length of {NAMES[kind]}"
        raise UserError(
            f"{kind}_train or {kind}_test in '{path}' is out of range (got {lowest} to {highest}); they must be from 0 "
            f"to {limit - 1}, below {source}; number them from 0."
        )
    if kind == "y" and names is None and lowest == 1:
        raise UserError(
            f"the labels in '{path}' count from 1 (got {lowest} to {highest}); they must count from 0; number them "
            "anew, or give class_names if class 0 has no image."
        )
    texts = (np.arange(highest + 1) if names is None else np.atleast_1d(names)).astype(str)
    for name, count in Counter(texts.tolist()).items():
        if count > 1 or not NAME.fullmatch(name):
            raise UserError(
                f"{NAMES[kind]} in '{path}' has a name twice, or one that cannot be shown (got {name[:40]!a}); a name "
                "has 1 to 100 characters on one line; rename it."
            )
    return texts


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
