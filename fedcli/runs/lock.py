"""The lock of a folder of runs, in which one process at a time writes; it dies with the process."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedcli.errors import UserError
from fedcli.files import PARTIAL

LOCK = ".lock"


def leftovers(folder: Path) -> list[Path]:
    """What a killed process has not finished writing in a folder, also one of an older version."""
    return [*folder.glob(PARTIAL), *folder.glob(".*.[0-9]*.partial")]


class InUse(UserError):
    """Another process writes in the folder, or is about to."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes and locks a folder, and clears what a killed process was writing there.

    The lock is the kernel's: the file that is left after a kill locks nothing. A file system without locks has none.

    Raises:
        InUse: If another process has locked the folder.
        UserError: If it cannot be made.
    """
    # A soft lock would outlive a kill, and keep a job that is queued again from its own folder.
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise InUse(f"the folder '{folder}' is in use by another process; wait for it, or choose another.") from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # of a file system without locks
            raise UserError(f"'{folder}' cannot be made ({error.strerror}); choose another with --out.") from error
    try:
        for file in leftovers(folder) if lock.is_locked else ():  # else they may be of a process that lives
            file.unlink(missing_ok=True)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # before the lock goes: afterwards it may be another one's
        lock.release()
