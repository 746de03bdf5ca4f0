"""Files that are written whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

PARTIAL = ".[0-9]*.partial.*"  # what `write_atomically` has not finished


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file so that a reader, also after a kill, sees the old or the new one, never a part.

    `write` is given a path in the same folder. A link stays a link, and a device such as `/dev/stdout` is written
    directly.

    Raises:
        OSError: It cannot be written; the error names the file.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        write(path)
        return
    temporary = path.with_name(f".{os.getpid()}.partial.{path.name}")
    try:
        temporary.unlink(missing_ok=True)  # somebody may have put a link to another file there
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
