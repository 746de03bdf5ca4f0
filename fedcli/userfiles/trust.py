"""Which files a record may have imported: those that the user names, unchanged."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcli.errors import UserError
from fedcli.userfiles.hashes import add_hash, file_hash, is_hash_of
from fedcli.userfiles.paths import replace_paths, user_paths


def user_files(record: dict[str, Any]) -> dict[str, str]:
    """The user's files that a record needs, with their hashes; "" for one that the record's list lacks."""
    # Resolved again, since a recorded folder may be a link now.
    hashes = {os.path.realpath(path): recorded for path, recorded in record["user_files"].items()}
    needed = user_paths([record["method_source"], *record["config"].values()])
    return {path: hashes.get(path, "") for path in needed}


def trust_files(
    record: dict[str, Any], named: str | Path | Sequence[str | Path], changed: bool = False
) -> dict[str, Any]:
    """A run's record with the paths of the user's files now; imports none.

    Args:
        record: Of a run.
        named: The files that the user names; a moved one is known by its hash, or by its name where `changed`.
        changed: Accept a file with another hash.

    Raises:
        UserError: A file is not named, is not there, or has changed.
    """
    recorded = user_files(record)
    named_paths = [named] if isinstance(named, str | Path) else named
    named_files = user_paths(map(str, named_paths))
    for file in named_files:
        if not Path(file).is_file():
            raise UserError(f"there is no file '{file}' (got it as --method); give the path where it is now.")
    paths = {}
    files = {}
    for path, old_hash in recorded.items():
        file = _find_moved(path, old_hash, named_files)
        if file is None:
            fault = f"the run needs your code in '{path}' (hash {old_hash or 'unknown'}), run only if you name it"
            if not Path(path).is_file():
                raise UserError(f"{fault}; it is no longer there, so add --method with the path where it is now.")
            flags = " ".join(f"--method {shlex.quote(other)}" for other in recorded)
            raise UserError(f"{fault}; add {flags}.")
        paths[path] = file
        is_same = is_hash_of(old_hash, file)
        if not is_same and not changed:
            raise UserError(
                f"the file '{file}' or one that it imports has changed since the run began (hash {file_hash(file)}, "
                f"was {old_hash or 'unknown'}); put it back, resume with --changed-method, or run anew."
            )
        files[file] = old_hash if is_same else add_hash(old_hash, file_hash(file))
    return {
        **record,
        "method_source": replace_paths(record["method_source"], paths),
        "config": {name: replace_paths(value, paths) for name, value in record["config"].items()},
        "user_files": files,
    }


def _find_moved(path: str, old_hash: str, files: Sequence[str]) -> str | None:
    """The first of some files that is at a path or has its hash, else the first of its name; None without any."""
    for file in files:
        if file == path or is_hash_of(old_hash, file):
            return file
    for file in files:
        if Path(file).name == Path(path).name:
            return file
    return None
