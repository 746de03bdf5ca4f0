"""Whose code a record may run: a path in it is imported only if the user names the file, unchanged."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcli.errors import UserError
from fedcli.userfiles import file_hash, own_paths, replace_paths

THEN = ", then "  # between the hashes of a file that was changed while a run rested


def with_own_files(
    record: dict[str, Any], named: Sequence[str | Path], command: str, changed: bool = False
) -> dict[str, Any]:
    """The record with its paths of the user's files as they are now; none of them has been imported.

    Args:
        record: Of a run.
        named: The files that the user names; one that was moved is known by its hash, or by its name where `changed`.
        command: What the user has typed, for the refusal.
        changed: Accept a file with another hash.

    Raises:
        UserError: If the record has a file that is not named, or is not the one the run began with.
    """
    recorded = own_files(record)
    now = {path: file_hash(path) for path in own_paths(map(str, named)) if _exists(path)}
    places, files = {}, {}
    for path, known in recorded.items():
        last = known.rsplit(THEN, 1)[-1]
        found = _find(path, last, now)
        if found is None:
            needed = " ".join(f"--method {shlex.quote(one)}" for one in recorded)
            raise UserError(
                f"the record has code of yours in '{path}' (hash {last or 'unknown'}), which is run only if you name "
                f"the file, at its place of now; '{command} {needed}' does."
            )
        if last and now[found] != last:
            if not changed:
                raise UserError(
                    f"the file '{found}' has changed since the run began (hash {now[found]}, was {known}); go on with "
                    "--changed-method, or start a new run."
                )
            known = f"{known}{THEN}{now[found]}"
        places[path], files[found] = found, known or now[found]
    if not recorded:
        return record
    config = {key: replace_paths(value, places) for key, value in record["config"].items()}
    source = replace_paths(record["method_source"], places)
    return {**record, "method_source": source, "config": config, "user_files": files}


def own_files(record: dict[str, Any]) -> dict[str, str]:
    """The user's files that a record needs, each with its hash, which is empty where an older record has none."""
    known = record.get("user_files", {})
    method = dict.fromkeys(own_paths([record["method_source"]]), record["method_hash"])
    needed = own_paths([record["method_source"], *record["config"].values()])
    return {path: known.get(path, method.get(path, "")) for path in needed}


def _exists(path: str) -> bool:
    """True where the file that the user names is there; refused where it is not."""
    if not Path(path).is_file():
        raise UserError(f"there is no file at '{path}' (got it by --method); give the path of a Python file.")
    return True


def _find(path: str, last: str, now: dict[str, str]) -> str | None:
    """Which of the files that are named stands for a recorded one: by hash, place, or name; None for none."""
    same = [file for file, digest in now.items() if digest == last]
    alike = [file for file in now if Path(file).name == Path(path).name]
    return path if path in same or (path in now and not same) else next(iter([*same, *alike]), None)
