"""Files that are written whole or not at all."""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

# What `write_atomically` has not finished: the number of a process, then eight digits by chance, since two containers
# that share a folder may have processes of one number, then the file. Older versions had no such digits.
PARTIAL = re.compile(r"\.\d+(-[0-9a-f]{8})?\.partial\..+", re.DOTALL)
# Called with each path that is about to be written or removed; one raises where the path is in a folder that this
# process has locked and lost, see fedcli/runs/lock.py.
guards: list[Callable[[Path], None]] = []


def refuse_lost(path: Path) -> None:
    """Refuses to change what is at a path in a folder that this process has locked and lost.

    Raises:
        UserError: Says where the folder is now.
    """
    for guard in guards:
        guard(path)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that a reader, also after a kill, sees the old or the new one, never a part.

    `write` is given a path in the same folder. A link stays a link, and a device such as `/dev/stdout` is written
    directly.

    Raises:
        OSError: It cannot be written; the error names the file.
        UserError: It is in a folder that this process has locked and lost.
    """
    refuse_lost(path)
    path = path.resolve()
    if path.exists() and not path.is_file():
        write(path)
        return
    temporary = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.partial.{path.name}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # A library's own error may have no number, and says what is wrong in its message alone.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Removes a file, if it is there.

    Raises:
        UserError: It is in a folder that this process has locked and lost.
    """
    refuse_lost(path)
    path.unlink(missing_ok=True)


def partials(folder: Path) -> list[Path]:
    """Returns the files in a folder that `write_atomically` has not finished, or not yet."""
    return [file for file in folder.glob(".*") if PARTIAL.fullmatch(file.name) and file.is_file()]
