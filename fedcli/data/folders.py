"""Image folders and image files, in the form of `fedcli.data.files`."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from fedcli.data.files import PARTS, Arrays, canonical_order, checked, one_line
from fedcli.errors import UserError


def read_folder(path: Path, size: int | None = None) -> Arrays:
    """The arrays of an image folder.

    It holds `train/<class>/*` and `test/<class>/*`; or both in a folder for each domain; or `<domain>/<class>/*`, of
    which a fixed fifth of each class and domain becomes the test part. Labels and domains follow the sorted
    names. Grey images become coloured where there are coloured ones as well.

    Args:
        path: The folder that holds `train` and `test`, or the domains.
        size: Height and width to which all images are resized; where None they must have one size.

    Raises:
        UserError: A folder is missing or empty, a file is no image, or the images differ in size.
    """
    single = any((path / part).is_dir() for part in PARTS)
    domains = [""] if single else _folders(path)
    whole = not any((path / domain / part).is_dir() for domain in domains for part in PARTS)
    if whole and any(_folders(_inner(path / domain)) for domain in domains):
        return _divided(path, domains, size)
    absent = [path / d / part for d in domains or [""] for part in PARTS if not (path / d / part).is_dir()]
    if absent:
        raise UserError(
            f"there is no folder '{absent[0]}'; an image folder holds train/<class>/ and test/<class>/, or both inside "
            "a folder for each domain, or <domain>/<class>/; arrange the images so."
        )
    classes = _folders(path / domains[0] / "train")
    result: Arrays = {"class_names": np.array(classes, dtype=str)}
    files: list[Path] = []
    for part in PARTS:
        own, result[f"domain_{part}"], result[f"y_{part}"] = _listing([path / d / part for d in domains], classes)
        files += own
    images = stacked([decoded(file, str(file), size) for file in files], files)
    result["x_train"], result["x_test"] = np.split(images, [len(result["y_train"])])
    if single:
        del result["domain_train"], result["domain_test"]
    else:
        result["domain_names"] = np.array(domains)
    return checked(result, path)


def _divided(path: Path, domains: list[str], size: int | None) -> Arrays:
    """The arrays of `<domain>/<class>/*`.

    The test part is the first fifth of each class and domain by the hash of the pixels, so it is random but does not
    depend on names and order of files and folders.
    """
    folders = [_inner(path / domain) for domain in domains]
    classes = _folders(folders[0])
    files, domain, labels = _listing(folders, classes)
    images = stacked([decoded(file, str(file), size) for file in files], files)
    order, groups = canonical_order(images, labels, domain), labels * len(domains) + domain
    test = np.zeros(len(files), bool)
    for group in np.unique(groups):
        members = order[groups[order] == group]
        test[members[: round(len(members) / 5)]] = True
    result: Arrays = {"class_names": np.array(classes, dtype=str), "domain_names": np.array(domains)}
    for part, chosen in (("train", ~test), ("test", test)):
        result |= {f"x_{part}": images[chosen], f"y_{part}": labels[chosen], f"domain_{part}": domain[chosen]}
    return checked(result, path)


def _inner(folder: Path) -> Path:
    """The folder of a domain's classes, which may lie inside a single folder `images`."""
    return folder / "images" if _folders(folder) == ["images"] else folder


def _listed(folder: Path) -> list[Path]:
    """What is in a folder, by name, without hidden files, which file managers leave behind."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _folders(folder: Path) -> list[str]:
    return [entry.name for entry in _listed(folder) if entry.is_dir()]


def _listing(folders: Sequence[Path], classes: list[str]) -> tuple[list[Path], np.ndarray, np.ndarray]:
    """The files of the classes in each folder, with the number of the folder and of the class of each file, `[N]`."""
    listed = [_class_files(folder, classes) for folder in folders]
    counts = np.array([[len(files) for files in of_folder] for of_folder in listed])
    numbers, labels = (np.repeat(index.ravel(), counts.ravel()) for index in np.indices(counts.shape))
    return [file for of_folder in listed for files in of_folder for file in files], numbers, labels


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


def stacked(images: Sequence[np.ndarray], names: Sequence[object]) -> np.ndarray:
    """One array `[N, H, W, channels]` of images that all must have one size.

    Args:
        images: Each `[H, W, 1 or 3]`; a grey one gets three channels where there are coloured ones.
        names: Of their files, for the refusal.

    Raises:
        UserError: They differ in size.
    """
    for image, name in zip(images, names, strict=True):
        if image.shape[:2] != images[0].shape[:2]:
            (height, width), (h, w) = images[0].shape[:2], image.shape[:2]
            raise UserError(
                f"'{name}' has another size than '{names[0]}' (got {h} x {w} pixels; {height} x {width}); all images "
                "must have one size; resize it."
            )
    channels = max(image.shape[2] for image in images)
    result = np.empty((len(images), *images[0].shape[:2], channels), np.uint8)
    for place, image in zip(result, images, strict=True):
        place[...] = image  # a grey image is broadcast to all channels
    return result


def decoded(file: Path | IO[bytes], name: str, size: int | None = None) -> np.ndarray:
    """One image `[H, W, 1 or 3]` of a file; bilinear at `size` x `size` where that is given.

    Raises:
        UserError: The file, which the refusal calls `name`, is not an image of 8 bits a channel.
    """
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode}")  # more than 8 bits a pixel
            whole = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            pixels = np.array(whole.resize((size, size), Image.Resampling.BILINEAR) if size else whole)
    except Exception as error:  # Pillow's formats have about ten kinds of them for a damaged file
        raise UserError(
            f"'{name}' is not a usable image ({one_line(error)}); class folders hold only images of 8 bits a channel; "
            "replace or remove it."
        ) from error
    return pixels if pixels.ndim == 3 else pixels[..., None]
