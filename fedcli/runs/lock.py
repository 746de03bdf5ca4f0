"""The lock of a folder of runs: one process at a time writes there; the lock dies with the process."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedcli.data.files import PARTIAL
from fedcli.errors import UserError

LOCK = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system that has none


class InUse(UserError):
    """Another process writes in the folder, or has begun to; what is there may be a run in a moment."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps every other process from the folder, which it makes, and clears what a killed one was writing there.

    The kernel's lock ends with a kill; on a file system without locks nobody is kept away. A locked folder is `InUse`.
    """
    # A mark in place of the lock would outlive a kill, and keep a job that is queued again from its own folder.
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise InUse(f"the folder '{folder}' is in use by another process; wait for it, or choose another.") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(f"'{folder}' cannot be made ({error.strerror}); choose another with --out.") from error
    try:
        for file in folder.glob(PARTIAL):
            file.unlink(missing_ok=True)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # before the lock goes: afterwards it may be another one's
        lock.release()
