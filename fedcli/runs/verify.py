"""Running a record again, and comparing the results."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedcli.core.federation import NonFiniteLoss
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs.begin import begin, new_folder
from fedcli.runs.checkpoints import clear
from fedcli.runs.lock import FILES_OF_A_RUN
from fedcli.runs.machine import ENVIRONMENT_KEYS
from fedcli.runs.record import has_ended, read_record
from fedcli.runs.resume import recorded_setup
from fedcli.runs.rounds import Listener
from fedcli.runs.signals import OutOfTime
from fedcli.userfiles import trust_files

ACCURACY_TOLERANCE = 0.02  # how far another machine or version may take the accuracy of a round
SURROUNDINGS = (*ENVIRONMENT_KEYS, "numerics", "method_hash")  # what the bits of a run depend on


def verify(
    path: str | Path, *, out: str | Path | None = None, method: Sequence[str | Path] = (), device: str | None = None,
    rounds: int | None = None, progress: Listener | None = None,
) -> tuple[str, bool]:  # fmt: skip
    """Runs a run again that has finished or diverged, and compares data, curve, end and parameters.

    Of its first rounds alone the terms of the objective are compared in place of the last parameters.

    Args:
        path: Its folder or its record.
        out: Folder of the repetition, see `run`.
        method: The user's files that the run needs, see `resume`.
        device: In place of the record's.
        rounds: Number of its rounds to repeat; the repetition is then interrupted, and kept only in a named `out`.
        progress: Told how it goes on.

    Returns:
        See `compare_records`.

    Raises:
        UserError: If there is no such run, it has not ended or has not these rounds, or it cannot run here.
    """
    record = read_record(Path(path))
    if not has_ended(record):
        raise UserError(f"the run '{path}' has not finished (it is {record['status']}); resume it, or name another.")
    last = len(record["rounds"])
    if rounds not in (None, last):
        first = next((row["round"] + 1 for row in record["rounds"] if row["test_accuracy"] is not None), 1)
        if not first <= rounds <= last:
            raise UserError(f"--rounds must be from {first}, the first that was tested, to {last} (got {rounds}).")
        record |= {
            "rounds": record["rounds"][:rounds], "status": "interrupted", "error": "",
            "summary": {"selection": record["summary"]["selection"]},
        }  # fmt: skip
    record = trust_files(record, method)
    setup = recorded_setup(record, find_method(record["method_source"]), **({"device": device} if device else {}))
    folder = Path(out or new_folder(setup))
    try:
        again = begin(setup, folder, record["method_source"], progress, until=rounds).record
    except (NonFiniteLoss, OutOfTime):
        again = read_record(folder)
        if again["status"] == "interrupted" and out is None:
            clear(folder, *FILES_OF_A_RUN, at_rest=True)  # else `resume runs` would go on with it
            with suppress(OSError):  # somebody has put something there
                folder.rmdir()
    return compare_records(record, again)


def compare_records(record: dict[str, Any], again: dict[str, Any]) -> tuple[str, bool]:
    """Compares two records of the same options, both finished, diverged, or interrupted after the same round.

    Returns:
        "same bits", "same to the last digit" of some rounds, "same within x", or what differs; False for the last.
    """
    changes = [name for name in SURROUNDINGS if record.get(name) != again.get(name)]
    moves = [move["round"] for move in record["moved"] if move["round"] < len(record["rounds"])]
    changes += [f"machine from round {round + 1} on" for round in moves]
    other = f" (other {', '.join(changes)})" if changes else ""
    now = _facts(again)
    for name, was in _facts(record).items():
        if now[name] != was:
            return f"another {name}: {now[name]}, was {was}{other}", False
    curves = []
    results = []
    for run in (record, again):
        curves.append(np.array([(row["test_accuracy"], row["validation_accuracy"]) for row in run["rounds"]], float))
        results.append(run["summary"].get("params_sha256") or [row["terms"] for row in run["rounds"]])
    distance = np.nan_to_num(abs(curves[0] - curves[1])).max(initial=0.0)  # NaN where a round was not tested
    points = f"{100 * distance:.2f} points of accuracy"
    if results[0] == results[1] and distance == 0:
        return "same to the last digit" if record["status"] == "interrupted" else "same bits", True
    if not changes:
        return f"another result on the same machine and version: curves within {points}", False
    if distance > ACCURACY_TOLERANCE:
        return f"another curve: by {points}{other}", False
    return f"same within {points}{other}", True


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    """What must be equal in two runs before their curves are compared, by the words for it."""
    return {
        "data set": record["dataset_fingerprint"],
        "partition": record["partition"]["fingerprint"],
        "end": record.get("error") or record["status"],
        "number of rounds": len(record["rounds"]),
    }
