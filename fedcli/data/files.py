"""Arrays of images in the one form that every reader returns, their order, and `.npz` files of them.

By name: `x_train`, `x_test` uint8 `[N, H, W, channels]`, `y_train`, `y_test` int64 `[N]`, `class_names`; with several
domains `domain_train`, `domain_test` int64 `[N]`, `domain_names`; with known writers `writer_train`, `writer_test`
int64 `[N]`.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedcli.errors import UserError

Arrays = dict[str, np.ndarray]
PARTS = ("train", "test")
KINDS = ("x", "y", "domain", "writer")  # of arrays with an entry for each example


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file so that a reader, or a run killed in between, sees the old or the new one, never a part.

    Args:
        path: The file.
        write: Given a path in the same folder, writes there.
    """
    temporary = path.with_name(f".{path.name}.partial")
    write(temporary)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def read_npz(path: Path) -> Arrays:
    """The arrays of an `.npz` file.

    Args:
        path: File with `x_train`, `y_train`, `x_test`, `y_test` and perhaps `class_names`, `domain_train`,
            `domain_test`, `domain_names`, `writer_train`, `writer_test`.

    Raises:
        UserError: It is damaged, or an array is missing or not as it should be.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(f"'{path}' is not a whole .npz file; it must be what numpy.savez writes; write it again.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except Exception as error:  # zipfile, zlib and numpy have about ten kinds of them for a damaged file
        raise UserError(f"'{path}' cannot be read ({one_line(error)}); it is damaged; get it again.") from error
    return checked(arrays, path)


def npz_sizes(path: Path) -> tuple[int, int, int, tuple[int, int, int]]:
    """Numbers of training images, test images and classes, and `(channels, H, W)`, without reading the pixels.

    Args:
        path: A file written from the arrays of a reader of this module.

    Raises:
        UserError: It is damaged.
    """
    try:
        shapes = {}
        with zipfile.ZipFile(path) as file:
            for part in PARTS:
                with file.open(f"x_{part}.npy") as member:
                    np.lib.format.read_magic(member)
                    shapes[part] = np.lib.format.read_array_header_1_0(member)[0]
        with np.load(path, allow_pickle=False) as file:
            num_classes = len(file["class_names"])
        num_train, height, width, channels = shapes["train"]
    except Exception as error:  # as in `read_npz`
        raise UserError(f"'{path}' cannot be read ({one_line(error)}); it is damaged; import the set again.") from error
    return num_train, shapes["test"][0], num_classes, (channels, height, width)


def one_line(error: Exception) -> str:
    """The first line of an error's text, since a refusal has one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
    result = {f"x_{part}": _images(arrays, f"x_{part}", path) for part in PARTS}
    shapes = [result[f"x_{part}"].shape[1:] for part in PARTS]
    if shapes[0] != shapes[1] or shapes[0][0] != shapes[0][1]:
        sizes = " and ".join(" x ".join(map(str, shape)) for shape in shapes)
        raise UserError(
            f"the images in '{path}' are not usable (got {sizes} for train and test); they must be square and of one "
            "size; resize them."
        )
    lengths = {part: len(result[f"x_{part}"]) for part in PARTS}
    result |= _indices(arrays, "y", "class_names", lengths, path)
    if _both_parts(arrays, "domain", path):
        result |= _indices(arrays, "domain", "domain_names", lengths, path)
    if _both_parts(arrays, "writer", path):
        result |= {f"writer_{part}": _whole_numbers(arrays, f"writer_{part}", lengths[part], path) for part in PARTS}
    return result


def canonical(arrays: Arrays) -> Arrays:
    """The arrays with each part in order of label, hash of the pixels `[H, W, channels]`, domain and writer."""
    result = dict(arrays)
    for part in PARTS:
        also = [arrays[f"{kind}_{part}"] for kind in ("domain", "writer") if f"{kind}_{part}" in arrays]
        order = canonical_order(arrays[f"x_{part}"], arrays[f"y_{part}"], *also)
        for kind in KINDS:
            if f"{kind}_{part}" in arrays:
                result[f"{kind}_{part}"] = arrays[f"{kind}_{part}"][order]
    return result


def canonical_order(images: np.ndarray, labels: np.ndarray, *also: np.ndarray) -> np.ndarray:
    """Positions `[N]` of images `[N, H, W, channels]` by label, hash of the pixels and what else is given, `[N]`."""
    pixels = np.ascontiguousarray(images).reshape(len(images), -1)
    hashes = b"".join(hashlib.blake2b(image, digest_size=8).digest() for image in pixels)
    return np.lexsort([*also[::-1], np.frombuffer(hashes, ">u8"), labels])  # the last key is the first that counts


def _both_parts(arrays: Arrays, kind: str, path: Path) -> bool:
    """Whether the arrays tell the domains or writers of both parts; refused where they do of one."""
    given = [key for key in arrays if key.startswith(f"{kind}_")]
    if given and not {f"{kind}_train", f"{kind}_test"} <= set(given):
        raise UserError(
            f"'{path}' tells the {kind}s of a part only (got {', '.join(sorted(given))}); {kind}_train and "
            f"{kind}_test belong together; give both or none."
        )
    return bool(given)


def _images(arrays: Arrays, key: str, path: Path) -> np.ndarray:
    """Images as `[N, H, W, channels]`."""
    images = arrays[key]
    fits = images.dtype == np.uint8 and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)))
    if not fits or images.size == 0:
        shape = " x ".join(map(str, images.shape))
        raise UserError(
            f"{key} in '{path}' is not usable (got {images.dtype} of shape {shape}); it must be uint8 images, "
            "N x H x W, N x H x W x 1 or N x H x W x 3; convert it."
        )
    return images if images.ndim == 4 else images[..., None]


def _indices(arrays: Arrays, kind: str, names_key: str, lengths: dict[str, int], path: Path) -> Arrays:
    """The labels (kind `y`) or domains of both parts as int64, and the names of what they count."""
    result = {}
    for part in PARTS:
        result[f"{kind}_{part}"] = _whole_numbers(arrays, f"{kind}_{part}", lengths[part], path)
    lowest, highest = (int(f([f(values) for values in result.values()])) for f in (min, max))
    names = arrays.get(names_key)
    # Without names, a wild label would make up millions of classes.
    limit = lengths["train"] if names is None else len(np.atleast_1d(names))
    if lowest < 0 or highest >= limit:
        source = "the number of training images" if names is None else f"the length of {names_key}"
        raise UserError(
            f"{kind}_train or {kind}_test in '{path}' is out of range (got {lowest} to {highest}); they must be from 0 "
            f"to {limit - 1}, below {source}; number them from 0."
        )
    result[names_key] = (np.arange(highest + 1) if names is None else np.atleast_1d(names)).astype(str)
    if len(np.unique(result[names_key])) < len(result[names_key]):
        raise UserError(f"{names_key} in '{path}' has a name twice; every class and domain needs its own; rename one.")
    return result


def _whole_numbers(arrays: Arrays, key: str, length: int, path: Path) -> np.ndarray:
    """One whole number for each image of a part, as int64."""
    values = arrays[key]
    if values.shape != (length,) or not np.issubdtype(values.dtype, np.integer):
        shape = " x ".join(map(str, values.shape)) or "()"
        raise UserError(
            f"{key} in '{path}' is not usable (got {values.dtype} of shape {shape}); it must be {length} "
            f"whole numbers, one for each image of x_{key.partition('_')[2]}; convert it."
        )
    return values.astype(np.int64)
