"""The file that `fedcli bench --csv` appends its results to, a row each."""

from pathlib import Path
from typing import Any

import pandas as pd

from fedcli.errors import UserError


def check_csv(path: Path) -> None:
    """Refuses to append to a file that holds something else than results."""
    if path.exists() and not path.read_bytes().startswith(b"workload,"):
        raise UserError(f"'{path}' does not hold results of this command; choose a new file or one that --csv wrote.")
    path.parent.mkdir(parents=True, exist_ok=True)


def append_csv(path: Path, result: dict[str, Any]) -> None:
    """Appends a result to a CSV file, whose first line has the names of the columns; a spread is a JSON list."""
    columns = pd.read_csv(path, nrows=0).columns if path.exists() else None
    pd.DataFrame([result]).reindex(columns=columns).to_csv(path, mode="a", header=columns is None, index=False)
