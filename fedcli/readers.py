"""Images of the user's own: an `.npz` file or an image folder.

Every reader returns the arrays of the `.npz` form by name: `x_train`, `x_test` uint8 `[N, H, W, channels]`, `y_train`,
`y_test` int64 `[N]`, `class_names`, and with several domains `domain_train`, `domain_test` int64 `[N]`, `domain_names`.
"""

import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from fedcli.errors import UserError

Arrays = dict[str, np.ndarray]
PARTS = ("train", "test")


def read_npz(path: Path) -> Arrays:
    """The arrays of an `.npz` file.

    Args:
        path: File with `x_train`, `y_train`, `x_test`, `y_test` and perhaps `class_names`, `domain_train`,
            `domain_test`, `domain_names`.

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
    domains = {"domain_train", "domain_test", "domain_names"} & set(arrays)
    if domains and not {"domain_train", "domain_test"} <= domains:
        raise UserError(
            f"'{path}' tells the domains of a part only (got {', '.join(sorted(domains))}); domain_train and "
            "domain_test belong together; give both or none."
        )
    return result | (_indices(arrays, "domain", "domain_names", lengths, path) if domains else {})


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
        key, values = f"{kind}_{part}", arrays[f"{kind}_{part}"]
        if values.shape != (lengths[part],) or not np.issubdtype(values.dtype, np.integer):
            shape = " x ".join(map(str, values.shape)) or "()"
            raise UserError(
                f"{key} in '{path}' is not usable (got {values.dtype} of shape {shape}); it must be {lengths[part]} "
                f"whole numbers, one for each image of x_{part}; convert it."
            )
        result[key] = values.astype(np.int64)
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


def read_folder(path: Path) -> Arrays:
    """The arrays of `train/<class>/*` and `test/<class>/*`, or of both in a folder for each domain.

    Labels and domains follow the sorted names. Grey images become coloured where there are coloured ones as well.

    Args:
        path: The folder that holds `train` and `test`, or the domains.

    Raises:
        UserError: A folder is missing or empty, a file is no image, or the images differ in size.
    """
    single = any((path / part).is_dir() for part in PARTS)
    domains = [""] if single else _folders(path)
    absent = [path / d / part for d in domains or [""] for part in PARTS if not (path / d / part).is_dir()]
    if absent:
        raise UserError(
            f"there is no folder '{absent[0]}'; an image folder holds train/<class>/ and test/<class>/, or both inside "
            "a folder for each domain; arrange the images so."
        )
    classes = _folders(path / domains[0] / "train")
    result: Arrays = {"class_names": np.array(classes, dtype=str)}
    files: list[Path] = []
    for part in PARTS:
        counts = np.zeros((len(domains), len(classes)), np.int64)
        for d, domain in enumerate(domains):
            listed = _class_files(path / domain / part, classes)
            counts[d] = [len(one_class) for one_class in listed]
            files += [file for one_class in listed for file in one_class]
        result[f"domain_{part}"], result[f"y_{part}"] = (
            np.repeat(index.ravel(), counts.ravel()) for index in np.indices(counts.shape)
        )
    result["x_train"], result["x_test"] = np.split(_pixels(files), [len(result["y_train"])])
    if single:
        del result["domain_train"], result["domain_test"]
    else:
        result["domain_names"] = np.array(domains)
    return checked(result, path)


def _listed(folder: Path) -> list[Path]:
    """What is in a folder, by name, without hidden files, which file managers leave behind."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _folders(folder: Path) -> list[str]:
    return [entry.name for entry in _listed(folder) if entry.is_dir()]


def _class_files(folder: Path, classes: list[str]) -> list[list[Path]]:
    """The files of each class; refuses a part with other classes and a class without files."""
    own = _folders(folder)
    if own != classes or not classes:
        odd = sorted(set(own) ^ set(classes))
        raise UserError(
            f"'{folder}' has not the class folders it needs (got {len(own)}{', not alike: ' + odd[0] if odd else ''}); "
            "train and test of every domain must have the same ones; add or rename them."
        )
    listed = [_listed(folder / name) for name in classes]
    for name, files in zip(classes, listed, strict=True):
        if not files:
            raise UserError(f"the folder '{folder / name}' is empty; it must hold images; add some, or remove it.")
    return listed


def _pixels(files: list[Path]) -> np.ndarray:
    """The images `[N, H, W, channels]` of files that all must have one size."""
    images = []
    for file in files:
        images.append(_image(file))
        if images[-1].shape[:2] != images[0].shape[:2]:
            (height, width), (h, w) = images[0].shape[:2], images[-1].shape[:2]
            raise UserError(
                f"'{file}' has another size than '{files[0]}' (got {h} x {w} pixels; {height} x {width}); all images "
                "must have one size; resize it."
            )
    channels = max(image.shape[2] for image in images)
    stacked = np.empty((len(images), *images[0].shape[:2], channels), np.uint8)
    for place, image in zip(stacked, images, strict=True):
        place[...] = image  # a grey image is broadcast to all channels
    return stacked


def _image(file: Path) -> np.ndarray:
    """One image `[H, W, 1 or 3]`."""
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}")  # more than 8 bits a pixel
            pixels = np.array(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except Exception as error:  # Pillow's formats have about ten kinds of them for a damaged file
        raise UserError(
            f"'{file}' is not a usable image ({one_line(error)}); class folders hold only images of 8 bits a channel; "
            "replace or remove it."
        ) from error
    return pixels if pixels.ndim == 3 else pixels[..., None]
