"""Which files a record may have imported: those that the user names, unchanged."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcli.errors import UserError
from fedcli.userfiles.hashes import add_hash, file_hash, is_hash_of
from fedcli.userfiles.paths import replace_paths, user_paths


def user_files(record: dict[str, Any]) -> dict[str, str]:
    """Returns the user's files that a record needs, with their hashes; "" for one that the record's list lacks."""
    # Resolved again, since a recorded folder may be a link now.
    hashes = {os.path.realpath(path): recorded for path, recorded in record["user_files"].items()}
    needed = user_paths([record["method_source"], *record["config"].values()])
    return {path: hashes.get(path, "") for path in needed}


def trust_files(
    record: dict[str, Any], named: str | Path | Sequence[str | Path], allow_changed: bool = False
) -> dict[str, Any]:
    """Returns a run's record with the paths of the user's files now; imports none.

    Args:
        record: Of a run.
        named: The files that the user names; a moved one is known by its hash, or by its name where `allow_changed`.
        allow_changed: Accept a file with another hash.

    Raises:
        UserError: A file is not named, is not there, or has changed.
    """
    named_paths = [named] if isinstance(named, str | Path) else named
    named_files = user_paths(map(str, named_paths))
    for file in named_files:
        if not Path(file).is_file():
            raise UserError(f"there is no file '{file}' (got it as --method); give the path where it is now.")
    recorded = user_files(record)
    new_paths = {}
    new_hashes = {}
    for path, old_hash in recorded.items():
        new_path = _find_moved(path, old_hash, named_files, recorded)
        if new_path is None:
            raise _refusal_of_unnamed(path, recorded)
        new_paths[path] = new_path
        new_hashes[new_path] = _hash_to_record(old_hash, new_path, allow_changed)
    return {
        **record,
        "method_source": replace_paths(record["method_source"], new_paths),
        "config": {name: replace_paths(value, new_paths) for name, value in record["config"].items()},
        "user_files": new_hashes,
    }


def _refusal_of_unnamed(path: str, recorded: Mapping[str, str]) -> UserError:
    """Returns an error, to be raised by the caller, for one of the recorded files that the user does not name."""
    fault = f"the run needs your code in '{path}' (hash {recorded[path] or 'unknown'}), run only if you name it"
    if not Path(path).is_file():
        return UserError(f"{fault}; it is no longer there, so add --method with the path where it is now.")
    flags = " ".join(f"--method {shlex.quote(other)}" for other in recorded)
    return UserError(f"{fault}; add {flags}.")


def _hash_to_record(old_hash: str, file: str, allow_changed: bool) -> str:
    """Returns the recorded hash of a file, with that of now behind it if it has changed and may.

    Raises:
        UserError: It has changed and may not.
    """
    if is_hash_of(old_hash, file):
        return old_hash
    if not allow_changed:
        raise UserError(
            f"the file '{file}' or one that it imports has changed since the run began (hash {file_hash(file)}, "
            f"was {old_hash or 'unknown'}); put it back, resume with --changed-method, or run anew."
        )
    return add_hash(old_hash, file_hash(file))


def _find_moved(path: str, old_hash: str, files: Sequence[str], recorded: Mapping[str, str]) -> str | None:
    """The one of some files that is a recorded one now: by its hash, else its path, else its name; None without any.

    Another recorded file is not taken for it, even if both are equal: each may read what lies beside it.

    Raises:
        UserError: Several files have its name, and no hash says which of them it is.
    """
    candidates = [file for file in files if file == path or file not in recorded]
    unchanged = [file for file in candidates if is_hash_of(old_hash, file)]
    if path in unchanged:
        return path
    if unchanged:
        return unchanged[0]
    if path in candidates:
        return path
    namesakes = [file for file in candidates if Path(file).name == Path(path).name]
    if len(namesakes) > 1:
        raise UserError(
            f"'{path}' has moved and changed, and several files have its name (got {', '.join(namesakes)}); name only "
            "the one that it is now."
        )
    return namesakes[0] if namesakes else None
