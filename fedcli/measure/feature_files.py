"""The files of features beside a record, and how the record names them."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcli.errors import UserError
from fedcli.files import write_atomically
from fedcli.run_files import CLIENT_FEATURES_FILE, FEATURES_FILE
from fedcli.runs.lock import locked
from fedcli.runs.record import read_record, write_record
from fedcli.runs.schema import Record

HASH = "features_sha256"  # the name of a file's hash among what is measured of it
OF_CLIENTS = "clients_"  # the prefix of what is measured of a round's clients


@dataclass(frozen=True, kw_only=True)
class FeatureFile:
    """A file of features in the folder of a run, from which the record's `quality` is measured.

    Attributes:
        name: Its name.
        prefix: What the names of its numbers begin with in the record's `quality`.
        command: The command that writes both.
    """

    name: str
    prefix: str
    command: str

    def write(self, folder: Path, arrays: dict[str, np.ndarray], numbers: dict[str, Any]) -> dict[str, Any]:
        """Writes the file, and into the record what is measured of it, in place of what was measured before.

        Args:
            folder: Of the run.
            arrays: `features` `[n, D]`, `labels` `[n]`, and others.
            numbers: What is measured of them, by name.

        Returns:
            The numbers, with the number of `examples` and `features_sha256`, the hash of the file.
        """
        content = _pack(arrays)
        numbers = {
            **numbers,
            "examples": len(arrays["labels"]),
            HASH: hashlib.sha256(content).hexdigest(),
        }
        with locked(folder):
            write_atomically(folder / self.name, lambda path: path.write_bytes(content))
            record = read_record(folder)
            # Those of the other file stay. Of this one all go, as a global model has no number of a client.
            quality = {name: value for name, value in record.get("quality", {}).items() if not self._has(name)}
            quality |= {self.prefix + name: value for name, value in numbers.items()}
            write_record(folder, {**record, "quality": quality})
        return numbers

    def _has(self, name: str) -> bool:
        """Whether a name in the record's `quality` is of a number of this file."""
        return name.startswith(OF_CLIENTS) == (self.prefix == OF_CLIENTS)

    def read(self, folder: Path, record: Record) -> dict[str, np.ndarray]:
        """Returns the arrays of the file.

        Raises:
            UserError: If the file is missing, or is not the one that the record names.
        """
        file = folder / self.name
        content = file.read_bytes() if file.is_file() else b""
        expected = record.get("quality", {}).get(self.prefix + HASH)
        if hashlib.sha256(content).hexdigest() != expected:
            raise UserError(
                f"{file.name} of '{folder}' is missing or is not what its record names; run '{self.command} {folder}' "
                "first."
            )
        return dict(np.load(io.BytesIO(content)))


# Of the global model, or of one client's own.
MODEL_FEATURES = FeatureFile(name=FEATURES_FILE, prefix="", command="fedcli quality")
# Of the models of a round's clients.
CLIENT_FEATURES = FeatureFile(name=CLIENT_FEATURES_FILE, prefix=OF_CLIENTS, command="fedcli quality --clients")


def _pack(arrays: dict[str, np.ndarray]) -> bytes:
    """The content of an `.npz` file of arrays."""
    file = io.BytesIO()
    by_name: dict[str, Any] = dict(arrays)  # no array has the name of an option of NumPy's
    np.savez_compressed(file, **by_name)
    return file.getvalue()
