"""Reads image files in folders by split, class and domain."""

import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from fedcli.data.image_arrays import SPLIT, Columns, choose_splits
from fedcli.data.pictures import stack_pictures
from fedcli.data.source import Source

SPLIT_FOLDER = f"(?i:(?:mnist_m_)?{SPLIT})"  # a regular expression
_PICTURE = re.compile(f"(?:([^/]+)/)??(?:{SPLIT_FOLDER}/)?(?:([^/]+)/)?([^/]+)")  # <domain>/<split>/<class>/<file>
_CLASS_LIST = re.compile(rf"(?:.*/)?{SPLIT_FOLDER}_(?:labels|annotations)\.txt")  # of a split's images
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")


def read_pictures(source: Source) -> Columns:
    """Image files in folders `train/<class>/*` and `test/<class>/*`, or both inside `<domain>/`.

    Without such folders the images are in no split. Files may lie in one more folder `images`, and a list may tell
    their classes, as in Tiny-ImageNet and MNIST-M. Grey images become coloured where there are coloured ones.

    Raises:
        UserError: Some images cannot be read.
    """
    pictures = _find_pictures(source)
    named_files = [(picture.name, source.folder / picture.name) for picture in pictures]
    pixels = stack_pictures(source, len(pictures), named_files)
    domains = np.array([picture.domain for picture in pictures])
    splits = np.array([picture.split for picture in pictures])
    columns = {"x": pixels, "y": np.array([picture.label for picture in pictures])}
    if any(domains):
        columns["domain_names"], columns["domain"] = np.unique(domains, return_inverse=True)
    if any(splits):
        columns["test"] = splits != "train"
    return columns


class _Picture(NamedTuple):
    """An image file, and what its folders say of it."""

    domain: str  # empty where there are none; so is the split
    split: str
    label: str
    name: str  # its path


def _find_pictures(source: Source) -> list[_Picture]:
    """Returns the image files of a set, each with its class."""
    classes = _read_class_lists(source)
    others = [name for name in source.names if not _CLASS_LIST.fullmatch(name)]
    names = [name for name in others if name.lower().endswith(SUFFIXES)]
    if 0 < len(names) < len(others):
        source.notes.append(f"left out: {len(others) - len(names):,} files that are no images by their suffix")
    pictures = [_read_path(name) for name in _without_those_beside_images(names, source.notes)]
    if classes:
        pictures = _with_listed_classes(pictures, classes)
    elif not any(picture.split and picture.label for picture in pictures):
        pictures = _with_splits_as_classes(pictures, source.notes)
    labelled = [picture for picture in pictures if picture.label]
    if not labelled:
        raise ValueError(f"there are no images in folders, but '{source.names[0]}'")
    if len(labelled) < len(pictures):
        source.notes.append(f"left out: {len(pictures) - len(labelled):,} images in no folder of a class")
    splits = choose_splits({picture.split for picture in labelled}, source.notes)
    chosen = [picture for picture in labelled if picture.split in splits]
    _refuse_mixed_depths(chosen)
    return chosen


def _refuse_mixed_depths(pictures: list[_Picture]) -> None:
    """Refuses a set of which some pictures have a domain: folders within a class would be taken for other classes."""
    deep = [picture.name for picture in pictures if picture.domain]
    others = [picture.name for picture in pictures if not picture.domain]
    if deep and others:
        raise ValueError(f"'{deep[0]}' lies in a domain or in a folder within a class, but '{others[0]}' in none")


def _without_those_beside_images(names: list[str], notes: list[str]) -> list[str]:
    """The names of image files without those beside a folder `images`, which are masks or previews of its images.

    Adds to the notes how many were left out.
    """
    folders_above = {name: PurePosixPath(name).parents for name in names}
    with_images = set()  # the folders that hold a folder `images`
    for folders in folders_above.values():
        for folder in folders:
            if folder.name.lower() == "images":
                with_images.add(folder.parent)
    kept = [name for name in names if "/images/" in f"/{name.lower()}" or with_images.isdisjoint(folders_above[name])]
    if len(kept) < len(names):
        notes.append(f"left out: {len(names) - len(kept):,} images beside a folder 'images'")
    return kept


def _without_images_folder(name: str) -> str:
    """Returns the path of an image without the folders `images`, in any case, that it may lie in."""
    return re.sub("(?<![^/])(?i:images)/", "", name)


def _read_path(name: str) -> _Picture:
    """Returns what the folders of an image file say of it."""
    match = _PICTURE.fullmatch(_without_images_folder(name))
    if match is None:
        raise ValueError(f"'{name}' lies too deep: move or remove it")
    domain, split, label, _ = match.groups(default="")
    return _Picture(domain, split.lower(), label, name)


def _with_listed_classes(pictures: list[_Picture], classes: dict[str, dict[str, str]]) -> list[_Picture]:
    """Returns the pictures, with the classes that the lists of their splits have for their files."""
    labelled = []
    unfit = []  # files that are in a folder or in a list alone
    for picture in pictures:
        file = os.path.basename(picture.name)
        label = picture.label or classes.get(picture.split, {}).pop(file, "")
        if not label and picture.split in classes:
            unfit.append(file)
        labelled.append(picture._replace(label=label))
    for files_without_images in classes.values():
        unfit += files_without_images
    if unfit:
        raise ValueError(f"images and the list of their classes do not fit: '{unfit[0]}' is in one of them")
    return labelled


def _with_splits_as_classes(pictures: list[_Picture], notes: list[str]) -> list[_Picture]:
    """The pictures of a set without splits, in which a folder may be called as one: trains are a class of vehicles.

    Adds to the notes which classes are called so, as these may be images to test on that have no classes.
    """
    if all(picture.split or not picture.label for picture in pictures):
        return pictures  # nothing but `train` and `test`, in which there should be folders of classes
    labelled = []
    named_as_splits = set()
    for picture in pictures:
        if picture.split:
            folder = os.path.dirname(_without_images_folder(picture.name))
            picture = picture._replace(split="", label=os.path.basename(folder))
            named_as_splits.add(picture.label)
        labelled.append(picture)
    if named_as_splits:
        notes.append(f"read as classes, without folders of classes in them: {', '.join(sorted(named_as_splits))}")
    return labelled


def _read_class_lists(source: Source) -> dict[str, dict[str, str]]:
    """Of the splits that have a list of them, the class of each image by its file.

    Raises:
        ValueError: Two lists of a split differ, or a line or two leave it open what the class of a file is.
    """
    classes: dict[str, dict[str, str]] = {}
    for name in source.names:
        match = _CLASS_LIST.fullmatch(name)
        if match is not None:
            text = (source.folder / name).read_text(encoding="utf-8-sig", errors="replace")
            listed = _read_class_list(name, text)
            split = match[1].lower()
            if classes.setdefault(split, listed) != listed:
                raise ValueError(f"'{name}' is a second list of the classes in {split}: put images in folders of them")
    return classes


def _read_class_list(name: str, text: str) -> dict[str, str]:
    """Returns the class of each file in a list: two words of a line, or the first two columns where it has tabs.

    In Tiny-ImageNet's lists a box of four numbers follows.
    """
    classes: dict[str, str] = {}
    for line in filter(str.strip, text.split("\n")):
        has_tabs = "\t" in line
        words = [word.strip() for word in line.split("\t")] if has_tabs else line.split()
        has_box = len(words) == 6 and all(word.isdecimal() for word in words[2:])
        is_clear = len(words) == 2 or has_tabs or has_box
        if not is_clear or not all(words[:2]):
            raise ValueError(f"the line '{line.strip()}' of '{name}' is no file and its class: put a tab between them")
        file, label, *_ = words
        if classes.setdefault(file, label) != label:
            raise ValueError(f"'{name}' has two classes for '{file}'")
    return classes
