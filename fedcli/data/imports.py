"""How data sets come into the cache: imported from a user's files, or downloaded and then imported."""

import hashlib
import os
import re
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from fedcli.core.partition_files import lists_of_clients
from fedcli.data import datasets, file_formats, official
from fedcli.data.archives import files_below
from fedcli.data.cache import cache_file, is_in_cache, is_name, write_to_cache
from fedcli.data.catalog import DOWNLOADS, KNOWN, MADE
from fedcli.data.conversion import convert
from fedcli.data.dataset import from_arrays
from fedcli.data.dataset_info import DatasetInfo
from fedcli.data.image_arrays import NPZ_CONTENT, SPLITS, Arrays, canonical_arrays
from fedcli.data.resizing import resize_rows
from fedcli.errors import UserError, unknown
from fedcli.reading import check_size, reading
from fedcli.userfiles import names_user_file
from fedcli.vision import torchvision


class Imported(NamedTuple):
    """What an import has made."""

    file: Path  # of the cache
    notes: list[str]  # what the user is told: what was changed or left out


def import_path(name: str, path: Path, size: int | None = None) -> Imported:
    """Imports a data set into the cache; one of that name is replaced.

    Args:
        name: A known name, whose shape and classes the images must have, or a new one of a-z, 0-9 and -.
        path: File, folder or archive in one of `file_formats.FILE_FORMATS`; `hf:FOLDER` for one of Hugging Face.
        size: Height and width in pixels that its images are resized to.

    Raises:
        UserError: The name is not possible, or the files are missing, damaged, of another set or edited meanwhile.
    """
    if name in MADE:
        raise UserError(f"the name '{name}' is reserved: {datasets.ways_to_get(name)}; choose another name.")
    if not is_name(name):
        raise UserError(f"the name '{name}' is invalid; use only a-z, 0-9 and -.")
    path = Path(file_formats.location(str(path)))
    if not os.path.lexists(path):
        raise UserError(f"there is nothing at '{path}' to import; give the path of a file or a folder.")
    notes: list[str] = []
    with _refuse_edits(path):
        arrays = _read_arrays(name, path, size, notes)
    return Imported(write_to_cache(name, arrays), notes)


def _read_arrays(name: str, path: Path, size: int | None, notes: list[str]) -> Arrays:
    """Returns the arrays that the cache is to have of a set, see `import_path`; adds notes for the user."""
    info = KNOWN.get(name)
    expected = NPZ_CONTENT if path.suffix == ".npz" else file_formats.ACCEPTED
    with reading(path, expected):
        columns = file_formats.read(path, info, size, notes)
        if "client" in columns and info:
            raise UserError(f"the name '{name}' is not possible for PFLlib's division '{path}'; choose {name}-pfllib.")
        columns = convert(columns, notes)
        if size:
            num_images, *_, channels = columns["x"].shape
            check_size(num_images * size**2 * channels, path)
            columns["x"] = resize_rows(columns["x"], size)
        if info:
            columns = official.with_official_names(name, columns)
    arrays = canonical_arrays(columns)
    if info:
        official.refuse_other_images(from_arrays(name, arrays))
    else:
        if "client" in columns:  # in the same file, so that no others' lists can stand beside the images
            arrays |= lists_of_clients(columns["client"], columns["test"])
            flag = shlex.quote(f"file:{cache_file(name)}")
            num_clients = columns["client"].max() + 1
            notes.append(f"its clients, tested on their own parts: --partition {flag} --num-clients {num_clients}")
        arrays["source"] = np.array("; ".join([str(path.resolve()), *notes]))
    return arrays


@contextmanager
def _refuse_edits(path: Path) -> Iterator[None]:
    """Refuses files that change while they are read inside: what is read is then neither the old set nor the new one.

    Raises:
        UserError: Names a file that has come, gone or been written.
    """
    before = _sizes_and_times(path)
    yield
    changes = before.items() ^ _sizes_and_times(path).items()
    if changes:
        changed = path / min(name for name, _ in changes)
        raise UserError(f"'{changed}' has changed while '{path}' was read; start again when all of it is there.")


class _SizeAndTime(NamedTuple):
    """What changes when a file is written."""

    size: int
    modified: int  # nanoseconds


def _sizes_and_times(path: Path) -> dict[str, _SizeAndTime]:
    """Returns the size and time of each of the `_files_at` a path."""
    found = {}
    for name in _files_at(path):
        with suppress(FileNotFoundError):  # it has just gone
            status = os.stat(path / name)
            found[name] = _SizeAndTime(status.st_size, status.st_mtime_ns)
    return found


def _files_at(path: Path) -> list[str]:
    """Returns the files in a folder, by their paths in it, or of a file `""`; links to nothing are left out."""
    names = files_below(path) if path.is_dir() else [""]
    return [name for name in names if (path / name).is_file()]


def import_if_path(text: str) -> str:
    """The name of a data set that is given by its name or by a path; the set at a path is imported, unless it has been.

    That of a path is made of its last part and a hash of the content, so that other content is another set.

    Raises:
        UserError: What lies at the path cannot be imported.
    """
    text = file_formats.location(text)
    name = datasets.find_name(text)
    if names_user_file(name) or name in datasets.names() or not os.path.exists(text):
        return name
    path = Path(text)
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"'{text}' is no file (got a pipe or a device); copy what it gives into a file.")
    stem = re.sub("[^a-z0-9]+", "-", path.resolve().stem.lower()).strip("-") or "data"
    with _refuse_edits(path):
        name = f"{stem}-{_hash_of_content(path)[:12]}"
        if is_in_cache(name):
            return name
        arrays = _read_arrays(name, path, size=None, notes=[])
    write_to_cache(name, arrays)
    return name


def _hash_of_content(path: Path) -> str:
    """The hexadecimal SHA-256 of a file, or of the files in a folder with their paths; links to nothing have none."""
    digest = hashlib.sha256()
    for file in _files_at(path):
        with (path / file).open("rb") as content:
            digest.update(os.fsencode(file) + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def download(name: str) -> Path:
    """The cache file of a data set, which is downloaded by torchvision, with its MD5 compared, unless it is there.

    Raises:
        UserError: The set cannot be downloaded, or the download fails.
    """
    info = KNOWN.get(name)
    if info is None or not info.is_download:
        remedy = datasets.ways_to_get(name) if name in KNOWN else f"these can be downloaded: {', '.join(DOWNLOADS)}"
        raise unknown("data set to download", name, DOWNLOADS, f"{remedy}.")
    if is_in_cache(name):
        return cache_file(name)
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)  # seconds without a byte before a download is given up
    with TemporaryDirectory(prefix="fedcli-") as folder:
        try:
            _download_official(info, folder)
        except (OSError, RuntimeError, HTTPException) as error:
            fault = f"'{name}' could not be downloaded ({' '.join(str(error).split())})"
            raise UserError(f"{fault}; bring the official files and run 'fedcli data import {name} PATH'.") from error
        finally:
            socket.setdefaulttimeout(timeout_before)
        return import_path(name, Path(folder)).file


def _download_official(info: DatasetInfo, folder: str) -> None:
    """Downloads the official files of a set: an archive, or what torchvision's class asks for."""
    sets = torchvision().datasets
    if info.archive is not None:
        address, md5 = info.archive
        sets.utils.download_and_extract_archive(address, folder, md5=md5, remove_finished=True)
        return
    assert info.torchvision_class is not None  # `download` has refused others
    download_split = getattr(sets, info.torchvision_class)
    for split in SPLITS:
        choice: dict[str, Any] = {"train": split == "train"}
        if info.torchvision_class == "SVHN":
            choice = {"split": split}
        if info.emnist_split is not None:
            choice["split"] = info.emnist_split
        download_split(folder, download=True, **choice)
