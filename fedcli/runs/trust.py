"""Whose code is trusted: a path in a record is imported only if the user names the file, unchanged."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcli.errors import UserError
from fedcli.userfiles import THEN, file_hash, is_hash_of, own_paths, replace_paths


def trust_files(
    record: dict[str, Any],
    named: str | Path | Sequence[str | Path],
    command: str = "the same command with",
    changed: bool = False,
) -> dict[str, Any]:
    """The record with its paths of the user's files as they are now; none of them has been imported.

    Args:
        record: Of a run.
        named: The files that the user names; one that was moved is known by its hash, or by its name where `changed`.
        command: What the user has typed, for the refusal.
        changed: Accept a file with another hash.
    """
    recorded, now = user_files(record), own_paths(map(str, [named] if isinstance(named, str | Path) else named))
    paths, files = {}, {}
    for path, hashes in recorded.items():
        same = [file for file in now if file == path or is_hash_of(hashes, file)]
        same += [file for file in now if Path(file).name == Path(path).name]
        if not same:
            needed = " ".join(f"--method {shlex.quote(file)}" for file in recorded)
            code = f"code of yours in '{path}' (hash {hashes or 'unknown'})"
            raise UserError(f"the record has {code}, run only if you name it; '{command} {needed}' does.")
        file = paths[path] = same[0]
        files[file] = hashes or file_hash(file)
        if not is_hash_of(files[file], file):
            if not changed:
                change = f"has changed since the run began (hash {file_hash(file)}, was {hashes})"
                raise UserError(f"the file '{file}' {change}; go on with --changed-method, or start a new run.")
            files[file] += THEN + file_hash(file)
    config = {key: replace_paths(value, paths) for key, value in record["config"].items()}
    source = replace_paths(record["method_source"], paths)
    return {**record, "method_source": source, "config": config, "user_files": files}


def user_files(record: dict[str, Any]) -> dict[str, str]:
    """The user's files that a record needs, each with its hash, which is empty where an older record has none."""
    hashes = dict.fromkeys(own_paths([record["method_source"]]), record["method_hash"]) | record.get("user_files", {})
    return {path: hashes.get(path, "") for path in own_paths([record["method_source"], *record["config"].values()])}
