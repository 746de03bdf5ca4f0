"""Runs that are where a new call writes: the folder that holds them is renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from fedcli.errors import UserError
from fedcli.run_files import RECORD
from fedcli.runs.lock import locked
from fedcli.runs.record import read_record


@contextmanager
def old_runs_renamed(folder: Path) -> Iterator[None]:
    """Renames the folder of a run, or of the runs of one call, unless a process runs in it; leaves other folders.

    Where what happens inside fails before it has written into the folder, as a call does that is refused, the old one
    gets its name back.

    Raises:
        UserError: If the working folder is the old one or in it, since a relative path would go with it.
    """
    folder = Path(os.path.abspath(folder))  # has a name, unlike "." and ".."
    renamed = _rename(folder)
    try:
        yield
    except BaseException:
        if renamed is not None and not folder.exists():
            renamed.rename(folder)
        raise


def _rename(folder: Path) -> Path | None:
    """Puts a free number behind the name of a folder of runs, and returns the new path; None where it holds others."""
    runs: list[Path] = []
    for depth in ("", "*/", "*/*/", "*/*/*/"):  # in those of a method, of an option's value, of a seed
        runs += [file.parent for file in folder.glob(depth + RECORD)]
    for run in runs:
        with locked(run):
            pass
    if not runs or not all(_is_of_a_call(run, folder) for run in runs):
        return None
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(
            f"--exist-ok cannot rename the working folder or one that holds it (got --out '{folder}'); start from "
            "another folder, or choose another with --out."
        )
    names = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
    new_folder = next(name for name in names if not name.exists())
    folder.rename(new_folder)
    return new_folder


def _is_of_a_call(run: Path, folder: Path) -> bool:
    """Tells whether a run lies below a folder as `run` places several: in `<method>/<option>=<value>/seed-<seed>`."""
    method = read_record(run)["method"]
    parts = run.relative_to(folder).parts
    return all(part == method or "=" in part or part.startswith("seed-") for part in parts)
