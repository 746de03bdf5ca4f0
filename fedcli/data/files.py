"""Arrays of images in the one form that every reader returns, their order, and readers of `.npz` files and folders.

By name: `x_train`, `x_test` uint8 `[N, H, W, channels]`, `y_train`, `y_test` int64 `[N]`, `class_names`; with several
domains `domain_train`, `domain_test` int64 `[N]`, `domain_names`; with known writers `writer_train`, `writer_test`
int64 `[N]`. In canonical order also `place_train`, `place_test` int64 `[N]`: where each image stood before.
"""

import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from fedcli.errors import UserError

Arrays = dict[str, np.ndarray]
_OR_CONVERT = "or use 'fedcli data import ... --convert'"
PARTS = ("train", "test")
KINDS = ("x", "y", "domain", "writer", "place")  # of arrays with an entry for each example
NAMES = {"y": "class_names", "domain": "domain_names"}  # what labels and domains count
LIMIT = 4 << 30  # bytes that a set may unpack to; a few megabytes of an archive can hold a thousand times as much
PIXELS = 1 << 25  # of an image in a file
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
    except Exception as error:
        reason = error if isinstance(error, OSError) else _refusal_of_disk(temporary)
        temporary.unlink(missing_ok=True)
        if reason is None:
            raise
        raise OSError(reason.errno, reason.strerror, str(path)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


class Room:
    """Counts the bytes that a set takes while it is read, and refuses it beyond `LIMIT`.

    Args:
        path: Where it comes from, for the refusal.
    """

    def __init__(self, path: Path):
        self._path, self._left = path, LIMIT

    def take(self, count: int) -> None:
        """Takes so many bytes.

        Raises:
            UserError: If there is no room for them.
        """
        self._left -= count
        if self._left < 0:
            raise UserError(
                f"'{self._path}' unpacks to more than {LIMIT >> 30} GiB (got {count:,} bytes more); a set may have so "
                "much in all; leave images out, or make them smaller."
            )


def read_npz(path: Path, convert: bool = False) -> Arrays:
    """The arrays of an `.npz` file.

    Args:
        path: File with `x_train`, `y_train`, `x_test`, `y_test` and perhaps `class_names`, `domain_train`,
            `domain_test`, `domain_names`, `writer_train`, `writer_test`, `place_train`, `place_test`.
        convert: Bring the arrays into form first, see `converted`.

    Raises:
        UserError: It is damaged, or an array is missing or not as it should be.
    """
    try:
        room = Room(path)
        with zipfile.ZipFile(path) as archive:  # NumPy would read what is no archive whole, however large
            for member in archive.infolist():
                room.take(member.file_size)  # no more than that is unpacked
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib and numpy have about ten kinds of them for a damaged file
        raise UserError(
            f"'{path}' is damaged or not a whole .npz file ({one_line(error)}); it must be what numpy.savez writes; "
            "write or get it again."
        ) from error
    return checked(converted(arrays, path) if convert else arrays, path)


def npz_sizes(path: Path) -> tuple[int, int, int, tuple[int, int, int]]:
    """Numbers of training images, test images and classes, and `(channels, H, W)`, without reading the pixels.

    Args:
        path: A file written from the arrays of a reader of this module.

    Raises:
        UserError: It is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            num_classes, num_test = len(file["class_names"]), len(file["y_test"])
            with file.zip.open("x_train.npy") as member:
                np.lib.format.read_magic(member)
                num_train, height, width, channels = np.lib.format.read_array_header_1_0(member)[0]
    except Exception as error:  # as in `read_npz`
        raise UserError(f"'{path}' cannot be read ({one_line(error)}); it is damaged; import the set again.") from error
    return num_train, num_test, num_classes, (channels, height, width)


def one_line(error: Exception) -> str:
    """The first line of an error's text, since a refusal has one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def checked(arrays: Arrays, path: Path) -> Arrays:
    """The arrays in their one form: images with a channel axis, int64 labels, names of classes and domains.

    Args:
        arrays: In any form that an `.npz` file may have.
        path: Where they come from, for the refusal.

    Raises:
        UserError: Names the array that is missing or not as it should be.
    """
    missing = [f"{kind}_{part}" for part in PARTS for kind in "xy" if f"{kind}_{part}" not in arrays]
    if missing:
        raise UserError(
            f"'{path}' has no {missing[0]} (got {', '.join(arrays) or 'nothing'}); x_train, y_train, x_test and y_test "
            "are needed; add it."
        )
    result: Arrays = {}
    for part in PARTS:
        images = arrays[f"x_{part}"]
        fits = images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))
        if images.dtype != np.uint8 or not fits or images.size == 0:
            raise UserError(
                f"x_{part} in '{path}' is not usable (got {images.dtype} of shape {shape_text(images.shape)}); it must "
                f"be uint8 images, N x H x W, N x H x W x 1 or N x H x W x 3; convert it, {_OR_CONVERT}."
            )
        result[f"x_{part}"] = images if images.ndim == 4 else images[..., None]
    train, test = (result[f"x_{part}"].shape[1:] for part in PARTS)
    if train != test or train[0] != train[1]:
        raise UserError(
            f"the images in '{path}' are not usable (got {shape_text(train)} and {shape_text(test)} for train and "
            f"test); they must be square and of one size; resize them, {_OR_CONVERT} to pad them."
        )
    for kind in KINDS[1:]:
        present = sorted(key for key in arrays if key.startswith(f"{kind}_"))
        if not present:
            continue
        if not {f"{kind}_train", f"{kind}_test"} <= set(present):
            raise UserError(
                f"'{path}' tells the {kind}s of a part only (got {', '.join(present)}); {kind}_train and {kind}_test "
                "belong together; give both or none."
            )
        for part in PARTS:
            values, length = arrays[f"{kind}_{part}"], len(result[f"x_{part}"])
            if values.shape != (length,) or not np.issubdtype(values.dtype, np.integer):
                raise UserError(
                    f"{kind}_{part} in '{path}' is not usable (got {values.dtype} of shape "
                    f"{shape_text(values.shape)}); it must be {length} whole numbers, one for each image of x_{part}; "
                    "convert it."
                )
            result[f"{kind}_{part}"] = values.astype(np.int64)
        if kind in NAMES:
            result[NAMES[kind]] = _names(arrays.get(NAMES[kind]), kind, result, path)
    return result


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as `28 x 28 x 1`."""
    return " x ".join(map(str, shape)) or "()"


def _names(names: np.ndarray | None, kind: str, arrays: Arrays, path: Path) -> np.ndarray:
    """The names of what labels (kind `y`) or domains count, numbers where there are none; refuses wild ones."""
    key = NAMES[kind]
    values = np.concatenate([arrays[f"{kind}_{part}"] for part in PARTS])
    lowest, highest = int(values.min()), int(values.max())
    # Without names, a wild label would make up millions of classes.
    limit = len(arrays["x_train"]) if names is None else names.size
    if lowest < 0 or highest >= limit:
        source = "the number of training images" if names is None else f"the length of {key}"
        raise UserError(
            f"{kind}_train or {kind}_test in '{path}' is out of range (got {lowest} to {highest}); they must be from 0 "
            f"to {limit - 1}, below {source}; number them from 0, {_OR_CONVERT} where they count from 1."
        )
    if kind == "y" and names is None and lowest == 1:
        raise UserError(
            f"the labels in '{path}' count from 1 (got {lowest} to {highest}); they must count from 0; number them "
            f"anew, {_OR_CONVERT}, or give class_names if class 0 has no image."
        )
    texts = (np.arange(highest + 1) if names is None else np.atleast_1d(names)).astype(str)
    for name in texts.tolist():
        if not NAME.fullmatch(name):
            raise UserError(
                f"{key} in '{path}' has a name that cannot be shown (got {name[:40]!a}); a name has 1 to 100 "
                "characters on one line; rename it."
            )
    if len(np.unique(texts)) < len(texts):
        raise UserError(f"{key} in '{path}' has a name twice; every class and domain needs its own; rename one.")
    return texts


def converted(arrays: Arrays, path: Path) -> Arrays:
    """Images as uint8 `[N, H, W, channels]`, square; labels from 0.

    Pixels in [0, 1] or in [-1, 1] are stretched to 0 to 255, those in [0, 255] rounded; the range is that of both
    parts together. A second axis of 1 or 3 is the channels' where the last one is not. Black borders make images
    square, and those of both parts alike. Labels that count from 1 count from 0.

    Args:
        arrays: In any form that an `.npz` file may have; what is in no known form stays as it is.
        path: Where they come from, for the refusal.

    Raises:
        UserError: Pixels are in no such range.
    """
    arrays, images, labels = dict(arrays), [f"x_{part}" for part in PARTS], [f"y_{part}" for part in PARTS]
    if not all(key in arrays and arrays[key].size for key in (*images, *labels)):
        return arrays
    for key in images:
        shape = arrays[key].shape
        if len(shape) == 4 and shape[1] in (1, 3) and shape[3] not in (1, 3):
            arrays[key] = np.moveaxis(arrays[key], 1, 3)
    if any(arrays[key].dtype != np.uint8 for key in images):
        low = float(np.min([arrays[key].min() for key in images]))  # NaN where there is one
        high = float(np.max([arrays[key].max() for key in images]))
        if not (low >= 0 and high <= 255) and not (low >= -1 and high <= 1):
            raise UserError(
                f"the pixels in '{path}' cannot be converted (got {low:g} to {high:g}); they must be in 0 to 255, 0 "
                "to 1 or -1 to 1; undo their normalisation."
            )
        shift, scale = (1, 127.5) if low < 0 else (0, 255) if high <= 1 else (0, 1)
        for key in images:
            arrays[key] = np.rint((arrays[key] + shift) * scale).astype(np.uint8)
    if all(arrays[key].ndim in (3, 4) for key in images):
        side = max(max(arrays[key].shape[1:3]) for key in images)
        for key in images:
            borders = [(0, 0)] * arrays[key].ndim
            for axis in (1, 2):
                missing = side - arrays[key].shape[axis]
                borders[axis] = missing // 2, missing - missing // 2
            arrays[key] = np.pad(arrays[key], borders)
    if min(arrays[key].min() for key in labels) == 1:
        for key in labels:
            arrays[key] = arrays[key] - 1
    return arrays


def canonical(arrays: Arrays) -> Arrays:
    """The arrays with each part in order of label, hash of the pixels `[H, W, channels]`, domain and writer.

    Where nothing tells the place of an image, it is that in the arrays.
    """
    result = {f"place_{part}": np.arange(len(arrays[f"y_{part}"])) for part in PARTS} | arrays
    for part in PARTS:
        also = [arrays[f"{kind}_{part}"] for kind in ("domain", "writer") if f"{kind}_{part}" in arrays]
        order = canonical_order(arrays[f"x_{part}"], arrays[f"y_{part}"], *also)
        for kind in KINDS:
            if f"{kind}_{part}" in result:
                result[f"{kind}_{part}"] = result[f"{kind}_{part}"][order]
    return result


def canonical_order(images: np.ndarray, labels: np.ndarray, *also: np.ndarray) -> np.ndarray:
    """Positions `[N]` of images `[N, H, W, channels]` by label, hash of the pixels and what else is given, `[N]`."""
    pixels = np.ascontiguousarray(images).reshape(len(images), -1)
    hashes = b"".join(hashlib.blake2b(image, digest_size=8).digest() for image in pixels)
    return np.lexsort([*also[::-1], np.frombuffer(hashes, ">u8"), labels])  # the last key is the first that counts


# Folders and files of images


def read_folder(path: Path, size: int | None = None, convert: bool = False) -> Arrays:
    """The arrays of an image folder.

    It holds `train/<class>/*` and `test/<class>/*`; or both in a folder for each domain; or `<domain>/<class>/*`, of
    which a fixed fifth of each class and domain becomes the test part; these classes may lie inside a single folder
    `images`. Labels and domains follow the sorted names. Grey images become coloured where there are coloured ones.

    Args:
        path: The folder that holds `train` and `test`, or the domains.
        size: Height and width to which all images are resized; where None they must have one size.
        convert: Pad images that are not square, see `converted`.

    Raises:
        UserError: A folder is missing or empty, a file is no image, or the images differ in size.
    """
    domains = [] if any((path / part).is_dir() for part in PARTS) else _subfolders(path)
    roots = [path / domain for domain in domains] or [path]
    missing = [root / part for root in roots for part in PARTS if not (root / part).is_dir()]
    inner = [root / "images" if _subfolders(root) == ["images"] else root for root in roots]
    undivided = bool(domains) and len(missing) == 2 * len(roots) and any(map(_subfolders, inner))
    if missing and not undivided:
        raise UserError(
            f"there is no folder '{missing[0]}'; an image folder holds train/<class>/ and test/<class>/, or both "
            "inside a folder for each domain, or <domain>/<class>/; arrange the images so."
        )
    by_part = {"": inner} if undivided else {part: [root / part for root in roots] for part in PARTS}
    classes = _subfolders(next(iter(by_part.values()))[0])
    files: list[Path] = []
    rows = []  # label, number of the domain and whether it is to test on, of each file
    for part, folders in by_part.items():
        for number, folder in enumerate(folders):
            class_folders = _subfolders(folder)
            if class_folders != classes or not classes:
                odd = [f", not alike: {name}" for name in sorted(set(class_folders) ^ set(classes))[:1]]
                raise UserError(
                    f"'{folder}' has not the class folders it needs (got {len(class_folders)}{''.join(odd)}); train "
                    "and test of every domain must have the same ones; add or rename them."
                )
            for label, name in enumerate(classes):
                images = _entries(folder / name)
                if not images:
                    raise UserError(
                        f"the folder '{folder / name}' is empty; it must hold images; add some, or remove it."
                    )
                files += images
                rows += [(label, number, part == "test")] * len(images)
    room = Room(path)
    images = stacked([decoded(file, str(file), size, room) for file in files], files)
    labels, domain, test = np.array(rows).T
    test = _fifth(images, labels, domain) if undivided else test.astype(bool)
    arrays: Arrays = {"class_names": np.array(classes, dtype=str)}
    if domains:
        arrays["domain_names"] = np.array(domains)
    for part, chosen in (("train", ~test), ("test", test)):
        arrays |= {f"x_{part}": images[chosen], f"y_{part}": labels[chosen]}
        if domains:
            arrays[f"domain_{part}"] = domain[chosen]
    return checked(converted(arrays, path) if convert else arrays, path)


def _fifth(images: np.ndarray, labels: np.ndarray, domain: np.ndarray) -> np.ndarray:
    """Marks the first fifth of each class and domain by the hash of the pixels, bool `[N]`.

    It is random but does not depend on names and order of files and folders.
    """
    order = canonical_order(images, labels, domain)
    groups = labels * (domain.max() + 1) + domain
    test = np.zeros(len(labels), bool)
    for group in np.unique(groups):
        members = order[groups[order] == group]
        test[members[: round(len(members) / 5)]] = True
    return test


def _entries(folder: Path) -> list[Path]:
    """Files and folders in a folder, by name, without hidden ones, which file managers leave behind."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _subfolders(folder: Path) -> list[str]:
    return [entry.name for entry in _entries(folder) if entry.is_dir()]


def stacked(images: Sequence[np.ndarray], names: Sequence[object]) -> np.ndarray:
    """One array `[N, H, W, channels]` of images that all must have one size.

    Args:
        images: Each `[H, W, 1 or 3]`; a grey one gets three channels where there are coloured ones.
        names: Of their files, for the refusal.

    Raises:
        UserError: They differ in size.
    """
    height, width = images[0].shape[:2]
    channels = max(image.shape[2] for image in images)
    result = np.empty((len(images), height, width, channels), np.uint8)
    for i, image in enumerate(images):
        if image.shape[:2] != (height, width):
            raise UserError(
                f"'{names[i]}' has another size than '{names[0]}' (got {image.shape[0]} x {image.shape[1]} pixels; "
                f"{height} x {width}); all images must have one size; resize it."
            )
        result[i] = image  # a grey image is broadcast to all channels
    return result


def decoded(file: Path | IO[bytes], name: str, size: int | None = None, room: Room | None = None) -> np.ndarray:
    """One image `[H, W, 1 or 3]` of a file; bilinear at `size` x `size` where that is given; `room` counts it.

    Raises:
        UserError: The file, which the refusal calls `name`, is not an image of 8 bits a channel, or too large.
    """
    try:
        if isinstance(file, Path) and not file.is_file():
            raise ValueError("no file")  # as a pipe, which would never end
        with Image.open(file) as image:
            if image.width * image.height > PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}")  # more than 8 bits a pixel
            whole = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            pixels = np.array(whole.resize((size, size), Image.Resampling.BILINEAR) if size else whole)
    except Exception as error:  # Pillow's formats have about ten kinds of them for a damaged file
        raise UserError(
            f"'{name}' is not a usable image ({one_line(error)}); class folders hold only images of 8 bits a channel "
            f"and at most {PIXELS >> 20} million pixels; "
            "replace or remove it."
        ) from error
    if room is not None:
        room.take(pixels.nbytes)
    return pixels if pixels.ndim == 3 else pixels[..., None]
