"""The owner of a folder of runs: one process at a time, known by a lock that dies with it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedcli.data.files import is_leftover, remove_leftovers
from fedcli.errors import UserError

LOCK = ".lock"


class InUse(UserError):
    """Another process writes in the folder, or has begun to; what is there may be a run in a moment."""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keeps every other process from the folder, and clears what a killed one was writing there.

    The lock is the kernel's, on a file that is removed at the end; after a kill the file stays, and locks nothing. A
    file system without locks has no owners.

    Args:
        folder: Made where it does not exist.

    Raises:
        InUse: Another process owns the folder.
        UserError: It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _lock(folder)
    except OSError as error:
        raise UserError(
            f"the output folder '{folder}' cannot be made ({error.strerror}); choose another with --out."
        ) from error
    try:
        remove_leftovers(folder)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # before the lock goes: afterwards it may be another one's
        os.close(file)


def is_free(folder: Path) -> bool:
    """Whether a run may begin in a folder: it does not exist, or holds only what a killed process left behind."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(file.name == LOCK or is_leftover(file) for file in folder.iterdir())


def _lock(folder: Path) -> int:
    """The file of the folder's lock, open and locked; it holds the number of this process."""
    while True:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(file, 20).decode(errors="replace").strip()
            os.close(file)
            raise InUse(
                f"the folder '{folder}' is in use (got process {owner or 'unknown'}); one process at a time may write "
                "there; wait for it, or choose another folder."
            ) from error
        except OSError:  # a file system without locks
            return file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(folder / LOCK)):
                os.ftruncate(file, 0)
                with suppress(OSError):  # a full disk; the lock holds without the number
                    os.write(file, str(os.getpid()).encode())
                return file
        os.close(file)  # its owner removed it between the two calls; there is another one now
