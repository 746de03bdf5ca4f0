"""The files in folders and archives."""

import tarfile
import zipfile
from glob import glob
from pathlib import Path

from fedcli.reading import check_size


def files_below(folder: Path) -> list[str]:
    """Returns the paths of the files in a folder and those below it, in order; hidden ones are left out.

    Links to what is not there are among them, so that whoever reads them says so.
    """
    names = []
    for name in glob("**", root_dir=folder, recursive=True):
        path = folder / name
        if path.is_file() or (path.is_symlink() and not path.exists()):
            names.append(name)
    return sorted(names, key=lambda name: name.split("/"))


def unpack_archive(path: Path, folder: Path) -> Path:
    """Returns the empty folder, with the content of a zip or tar; no file leads out of it.

    Raises:
        UserError: Its images are too large.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            sizes = [_image_bytes(member.filename, member.file_size) for member in archive.infolist()]
            check_size(sum(sizes), path)
            archive.extractall(folder)
    else:
        with tarfile.open(path) as archive:
            sizes = [_image_bytes(member.name, member.size) for member in archive]
            check_size(sum(sizes), path)
            archive.extractall(folder, filter="data")
            archive.fileobj.read(1 << 30)  # the checksum of a compressed archive stands at its end
    return folder


def _image_bytes(name: str, size: int) -> int:
    """Bytes of the images in a file of an archive; LEAF's JSON has five characters or more, as `0.0, `, for each."""
    return size // 5 if name.endswith(".json") else size
