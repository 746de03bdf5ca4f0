"""The file that `fedcli bench --csv` appends its results to, a row each."""

from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from fedcli.errors import UserError
from fedcli.files import write_atomically


def prepare_csv(path: Path) -> None:
    """Makes the folder of a file to append to; refuses a file that holds something else than results."""
    if path.exists() and not path.read_bytes().startswith(b"workload,"):
        raise UserError(f"'{path}' does not hold results of this command; choose a new file or one that --csv wrote.")
    path.parent.mkdir(parents=True, exist_ok=True)


def append_csv(path: Path, result: dict[str, Any]) -> None:
    """Appends a result to a CSV file, whose first line has the names of the columns; a spread is a JSON list.

    Columns that the file lacks are added behind its own. Its texts stay as they are. Columns that earlier versions
    called floors are called bounds.
    """
    content = pd.DataFrame([result]).to_csv(index=False)
    if path.exists():
        earlier = pd.read_csv(path, dtype=str, keep_default_na=False)
        earlier = earlier.rename(columns=lambda column: column.replace("floor", "bound"))
        latest = pd.read_csv(StringIO(content), dtype=str, keep_default_na=False)
        content = pd.concat([earlier, latest]).to_csv(index=False)
    write_atomically(path, lambda temporary: temporary.write_text(content, encoding="utf-8"))
