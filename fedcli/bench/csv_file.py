"""The file that `fedcli bench --csv` appends its results to, a row each."""

import csv
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedcli.errors import UserError, first_line
from fedcli.files import write_atomically

RENAMED_COLUMNS = {  # today's names, by those that earlier versions wrote
    "engine": "mode",
    "way": "mode",
    "samples_per_second": "examples_per_second",
    "data_seconds_share": "around_training_share",
    "evaluation_seconds": "test_seconds",
    "floor_seconds": "estimate_seconds",
    "bound_seconds": "estimate_seconds",
    "floor_share": "estimate_share",
    "bound_share": "estimate_share",
    "arithmetic_floor_seconds": "arithmetic_estimate_seconds",
    "arithmetic_bound_seconds": "arithmetic_estimate_seconds",
    "memory_floor_seconds": "memory_estimate_seconds",
    "memory_bound_seconds": "memory_estimate_seconds",
    "evaluation_floor_seconds": "test_estimate_seconds",
    "evaluation_bound_seconds": "test_estimate_seconds",
}


class CSVContent(NamedTuple):
    """What a CSV file holds."""

    columns: list[str]  # by their names today, in the order of the file
    rows: Sequence[Mapping[str, Any]]  # by column; one that lacks a column has an empty cell there


def prepare_csv(path: Path) -> None:
    """Makes the folder of a file to append to; refuses what `append_csv` could not append to."""
    if path.exists():
        if not path.is_file():
            raise UserError(f"'{path}' is not a file; choose a new file or one that --csv wrote.")
        _read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"'{path}' cannot be written; choose a file in a folder that you may write to.")


def append_csv(path: Path, result: Mapping[str, Any]) -> None:
    """Appends a result to a CSV file, whose first line has the names of the columns; a spread is a JSON list.

    Columns that the file lacks are added behind its own, and those that were renamed have their new names afterwards.
    Its texts stay as they are. Several processes may append to one file.
    """

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows([*content.rows, result])

    with _locked_folder(path.resolve().parent):
        content = _read(path) if path.exists() else CSVContent(columns=[], rows=[])
        columns = list(dict.fromkeys([*content.columns, *result]))
        write_atomically(path, write)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Waits until no other process is in such a `with` block for the folder; the file itself is replaced inside."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system may have no locks, or none of folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> CSVContent:
    """Reads a CSV file, also one with the mark at its beginning that spreadsheets write.

    Raises:
        UserError: It does not hold results of `fedcli bench`, or is broken.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            header = list(reader.fieldnames or [])
            if header and header[0] != "workload":
                raise UserError(
                    f"'{path}' does not hold results of this command; choose a new file or one that --csv wrote."
                )
            rows = list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise _unreadable(path, first_line(error)) from error
    columns: dict[str, str] = {}  # what the file calls each of them
    for text in header:
        column = RENAMED_COLUMNS.get(text, text)
        if column in columns:
            raise _unreadable(path, f"it has the column '{column}' twice, as '{columns[column]}' and as '{text}'")
        columns[column] = text
    renamed_rows = []
    for row in rows:
        if reader.restkey in row:
            raise _unreadable(path, "its rows have more fields than its first line")
        renamed_rows.append({column: row[text] for column, text in columns.items()})
    return CSVContent(list(columns), renamed_rows)


def _unreadable(path: Path, fault: str) -> UserError:
    """Returns an error, to be raised by the caller, for a file that cannot be appended to."""
    return UserError(f"'{path}' cannot be read ({fault}); choose a new file.")
