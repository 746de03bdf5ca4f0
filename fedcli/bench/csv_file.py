"""The file that `fedcli bench --csv` appends its results to, a row each."""

import os
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

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


def prepare_csv(path: Path) -> None:
    """Makes the folder of a file to append to; refuses what `append_csv` could not append to."""
    if path.exists() and not path.is_file():
        raise UserError(f"'{path}' is not a file; choose a new file or one that --csv wrote.")
    if _has_content(path):
        if not path.read_bytes().startswith(b"workload,"):
            raise UserError(
                f"'{path}' does not hold results of this command; choose a new file or one that --csv wrote."
            )
        fault = _find_fault(path)
        if fault:
            raise UserError(f"'{path}' cannot be read ({fault}); choose a new file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"'{path}' cannot be written; choose a file in a folder that you may write to.")


def append_csv(path: Path, result: dict[str, Any]) -> None:
    """Appends a result to a CSV file, whose first line has the names of the columns; a spread is a JSON list.

    Columns that the file lacks are added behind its own, and those that were renamed have their new names afterwards.
    Its texts stay as they are.
    """
    content = pd.DataFrame([result]).to_csv(index=False)
    if _has_content(path):
        earlier = _read(path).rename(columns=RENAMED_COLUMNS)
        latest = _read(StringIO(content))
        content = pd.concat([earlier, latest]).to_csv(index=False)
    write_atomically(path, lambda temporary: temporary.write_text(content, encoding="utf-8"))


def _find_fault(path: Path) -> str | None:
    """Returns why results could not be appended to a CSV file, or None if they can."""
    try:
        earlier = _read(path).rename(columns=RENAMED_COLUMNS)
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        return first_line(error)
    if not isinstance(earlier.index, pd.RangeIndex):  # pandas takes the first fields for labels of the rows then
        return "its rows have more fields than its first line"
    if not earlier.columns.is_unique:
        return "it has a column twice, by its name today and by an earlier one"
    return None


def _read(source: Path | StringIO) -> pd.DataFrame:
    return pd.read_csv(source, dtype=str, keep_default_na=False)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
