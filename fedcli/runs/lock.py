"""The lock of a folder of runs, in which one process at a time writes; it dies with the process.

A folder may be moved, removed or replaced while a run writes in it. The lock is the file that was locked, and not its
path: before each write, and before a file is removed, the two are compared.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedcli.errors import UserError
from fedcli.files import guards, partials
from fedcli.run_files import LOCK

OLDER_PARTIAL = re.compile(r"\..+\.\d+\.partial", re.DOTALL)  # what an older version wrote
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system without locks


class InUse(UserError):
    """Another process writes in the folder, or is about to."""


class FolderLost(UserError):
    """The folder of a run was moved, removed or replaced while the run wrote in it."""


class LockedFolder:
    """A folder and the lock in it, both open, so that their inodes are given to no other file."""

    def __init__(self, folder: Path, lock: int):
        """Takes the folder and the descriptor of its lock."""
        self.folder = folder.absolute()
        self.lock = lock
        self.opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        self.is_locked = True  # False in a file system without locks

    def is_there(self) -> bool:
        """Whether the lock is still the file at its path."""
        try:
            return os.path.samestat(os.stat(self.folder / LOCK), os.fstat(self.lock))
        except OSError:  # there is none
            return False

    def folder_now(self) -> Path | None:
        """Where the folder is now; None where it is nowhere, or the system does not say."""
        try:
            folder = Path(os.readlink(f"/proc/self/fd/{self.opened}"))
            return folder if os.path.samestat(os.stat(folder), os.fstat(self.opened)) else None
        except OSError:
            return None

    def refuse_lost(self, path: Path) -> None:
        """Refuses to write or remove a file of the folder, if that is no longer the one that is locked.

        Raises:
            FolderLost: Says where the folder is now.
        """
        if not path.absolute().is_relative_to(self.folder) or self.is_there():
            return
        folder = self.folder_now()
        if folder is None:
            remedy = "it was removed, with its checkpoints; run again in another folder"
        elif folder == self.folder.resolve():
            remedy = f"its lock was removed; its last checkpoint is in '{folder}', unless another process writes there"
        else:
            remedy = f"its last checkpoint is in '{folder}' now; go on with 'fedcli resume {folder}'"
        raise FolderLost(f"the folder '{self.folder}' is no longer the one in which this process writes; {remedy}.")

    def close(self) -> None:
        """Lets the lock go."""
        os.close(self.opened)
        os.close(self.lock)


def leftovers(folder: Path) -> list[Path]:
    """Returns what a killed process has not finished writing in a folder, also one of an older version."""
    older = [file for file in folder.glob(".*") if OLDER_PARTIAL.fullmatch(file.name) and file.is_file()]
    return [*partials(folder), *older]


def guard(folder: Path) -> None:
    """Guards the folder of a run that another worker has locked, until this worker ends."""
    guards.append(LockedFolder(folder, os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)).refuse_lost)


@contextmanager
def locked(folder: Path) -> Iterator[LockedFolder]:
    """Makes and locks a folder, and clears what a killed process was writing there.

    The lock is the kernel's: the file that is left after a kill locks nothing. A file system without locks has none.
    New folders into which nothing is written, as by a command that is refused, are removed at the end.

    Raises:
        InUse: If another process has locked the folder.
        UserError: If it cannot be made or written.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = _lock(folder)
    except OSError as error:
        raise UserError(
            f"the folder '{folder}' cannot be made or written ({error.strerror}); choose another."
        ) from error
    guards.append(held.refuse_lost)
    try:
        if held.is_locked:  # else they may be of a process that lives
            for file in leftovers(folder):
                file.unlink(missing_ok=True)
        yield held
    finally:
        guards.remove(held.refuse_lost)
        if held.is_there():
            (folder / LOCK).unlink(missing_ok=True)  # before the lock goes: afterwards it may be another one's
            with suppress(OSError):  # the first that is not empty
                for path in new_folders:
                    path.rmdir()
        held.close()


def is_held(folder: Path) -> bool:
    """Whether a process, perhaps this one, has locked a folder; a file system without locks has the file alone."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # there is none
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _lock(folder: Path) -> LockedFolder:
    """Returns the folder, locked where its file system has locks."""
    held = LockedFolder(folder, os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
    try:
        fcntl.flock(held.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise _in_use(folder) from error
    except OSError as error:
        if error.errno in NO_LOCKS:
            held.is_locked = False
            return held
        held.close()
        raise
    if not held.is_there():  # whoever had it has removed it between both calls
        held.close()
        raise _in_use(folder)
    return held


def _in_use(folder: Path) -> InUse:
    """Returns an error, to be raised by the caller, for a folder that another process has locked."""
    return InUse(f"the folder '{folder}' is in use by another process; wait for it, or choose another.")
