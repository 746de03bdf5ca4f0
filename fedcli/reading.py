"""What every reader of files shares: one refusal for whatever goes wrong, and a limit on sizes."""

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fedcli.errors import UserError, first_line

MAX_GIB = 4  # that a set may unpack to; a few megabytes of an archive can hold a thousand times as much


@contextmanager
def reading(path: object, expected: str) -> Iterator[None]:
    """Turns whatever is raised while a file is read into one refusal; libraries raise about ten kinds of errors.

    Raises:
        UserError: Names the error, and what the file must be, `expected`.
    """
    with suppress(OSError, ValueError):  # it is not there, or has no such name
        mode = os.stat(str(path)).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # to read one might never end
            raise UserError(f"'{path}' is no file (got a pipe or a device); copy what it gives into a file.")
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"'{path}' cannot be read ({first_line(error)}); it must be {expected}.") from error


def check_size(count: int, path: object) -> None:
    """Refuses a set of more than `MAX_GIB`, or than the number in FEDCLI_MAX_GIB.

    Raises:
        UserError: If `count` bytes of `path`, unpacked, are too many.
    """
    limit_text = os.environ.get("FEDCLI_MAX_GIB") or MAX_GIB
    try:
        limit = float(limit_text)
    except ValueError as error:
        raise UserError(f"'FEDCLI_MAX_GIB' cannot be read ({first_line(error)}); it must be a number.") from error
    if not count <= limit * 2**30:  # also where the limit is NaN
        needed = math.ceil(count / 2**30)
        raise UserError(f"'{path}' has {count:,} bytes, more than {limit:g} GiB; set FEDCLI_MAX_GIB={needed}.")
