"""The names of the files in a run's folder, and the refusal of an output in the place of one of them."""

import os
import re
from pathlib import Path

from fedcli.errors import UserError

LOCK = ".lock"
RECORD = "record.json"
CHECKPOINT = "checkpoint.safetensors"  # from which a run goes on
PREVIOUS = "checkpoint-before.safetensors"
SELECTED = "selected.safetensors"  # the models of the best round
RESTORE_CHECKPOINT = f"restore it, or delete {CHECKPOINT} to go on from {PREVIOUS}"  # what to do where it is damaged
STATES = "states"  # folder of what clients keep
STATES_FOLDER_OF_WORKER = re.compile(rf"{STATES}-[1-9]\d*")  # the same, of a worker beside the first
FEATURES_FILE = "features.npz"
CLIENT_FEATURES_FILE = "clients.npz"
CURVE_CHART = "curve.png"
PARTITION_CHART = "partition.png"
FILES_OF_A_RUN = (
    LOCK, RECORD, CHECKPOINT, PREVIOUS, SELECTED, FEATURES_FILE, CLIENT_FEATURES_FILE, CURVE_CHART,
    PARTITION_CHART,
)  # fmt: skip
RECORD_BEGINS = b'{\n "schema": '  # whatever its name


def refuse_file_of_a_run(path: Path) -> None:
    """Refuses to put an output into the place of a file of a run, or of a record under another name.

    Raises:
        UserError: Names the run.
    """
    file = Path(os.path.realpath(path))
    parent = file.parent.name
    is_state = parent == STATES or STATES_FOLDER_OF_WORKER.fullmatch(parent) is not None
    folder = file.parent.parent if is_state else file.parent
    has_name_of_run = is_state or file.name in FILES_OF_A_RUN
    is_of_run = has_name_of_run and (folder / RECORD).is_file()
    if is_of_run or _is_record(file):
        raise UserError(f"'{path}' is a file of the run in '{folder}' (got it as an output); choose another name.")


def _is_record(file: Path) -> bool:
    """Whether a file begins as a record does."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(len(RECORD_BEGINS)) == RECORD_BEGINS
