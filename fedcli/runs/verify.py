"""Running a record again, and comparing the results."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcli.errors import NonFiniteLoss, UserError
from fedcli.registry import find_method
from fedcli.run_files import FILES_OF_A_RUN
from fedcli.runs.begin import begin, new_folder
from fedcli.runs.checkpoints import remove_files
from fedcli.runs.machine import ENVIRONMENT_KEYS
from fedcli.runs.record import has_ended, read_record
from fedcli.runs.resume import recorded_setup
from fedcli.runs.rounds import Listener
from fedcli.runs.schema import Record, tested_rounds
from fedcli.userfiles import trust_files

ACCURACY_TOLERANCE = 0.02  # how far another machine or version may take the accuracy of a round
SURROUNDINGS = (*ENVIRONMENT_KEYS, "numerics", "method_hash")  # what the bits of a run depend on


class Comparison(NamedTuple):
    """What a repetition says of a run."""

    # "same bits" of the last parameters; "same to the last digit" of the terms, where these alone are compared; "same
    # within x"; or what differs.
    text: str
    is_same: bool


def verify(
    path: str | Path, *, out: str | Path | None = None, files: Sequence[str | Path] = (), device: str | None = None,
    rounds: int | None = None, progress: Listener | None = None,
) -> Comparison:  # fmt: skip
    """Runs a run again that has finished or diverged, and compares data, curve, end and parameters.

    Of its first rounds alone, and of a run that has diverged, the terms of the objective are compared in place of the
    last parameters.

    Args:
        path: Its folder or its record.
        out: Folder of the repetition, see `run`.
        files: The user's files that the run needs, see `resume`.
        device: In place of the record's.
        rounds: Number of its rounds to repeat; the repetition is then interrupted, and kept only in a named `out`.
        progress: Told how it goes on.

    Raises:
        UserError: If there is no such run, it has not ended or has not these rounds, or it cannot run here.
    """
    record = read_record(Path(path))
    if not has_ended(record):
        raise UserError(f"the run '{path}' has not finished (it is {record['status']}); resume it, or name another.")
    last = len(record["rounds"])
    if rounds is not None and rounds != last:
        tested = tested_rounds(record["rounds"])
        first = tested[0]["round"] + 1 if tested else 1
        if not first <= rounds <= last:
            raise UserError(f"--rounds must be from {first}, the first that was tested, to {last} (got {rounds}).")
    record = trust_files(record, files)
    overrides = {"device": device} if device else {}
    setup = recorded_setup(record, find_method(record["method_source"]), **overrides)
    folder = Path(out or new_folder(setup))
    try:
        repetition = begin(setup, folder, record["method_source"], progress, until=rounds).record
    except NonFiniteLoss:
        repetition = read_record(folder)
    if repetition["status"] == "interrupted" and out is None:
        remove_files(folder, FILES_OF_A_RUN)  # else `resume runs` would go on with it
        with suppress(OSError):  # somebody has put something there
            folder.rmdir()
    return compare_records(record, repetition, rounds)


def compare_records(record: Record, repetition: Record, num_rounds: int | None = None) -> Comparison:
    """Compares two records of the same options, both finished or diverged.

    With a number of rounds, fewer than were planned, the repetition was interrupted after so many.
    """
    if num_rounds is not None and num_rounds < record["config"]["rounds"]:
        record = _interrupted_after(num_rounds, record)
    rounds = record["rounds"]
    changes = [name for name in SURROUNDINGS if record.get(name) != repetition.get(name)]
    moves = [move["round"] for move in record["moved"] if move["round"] < len(rounds)]
    changes += [f"machine from round {index + 1} on" for index in moves]
    remark = f" (other {', '.join(changes)})" if changes else ""
    was = _results(record)
    now = _results(repetition)
    for name, fact in was.facts.items():
        if now.facts[name] != fact:
            return Comparison(f"another {name}: {now.facts[name]}, was {fact}{remark}", False)
    distances = abs(was.curve - now.curve)  # NaN where a round was not tested
    distance = np.nan_to_num(distances).max(initial=0.0)
    points = f"{100 * distance:.2f} points of accuracy"
    has_same_end = was.params_sha256 == now.params_sha256 and was.terms == now.terms
    if has_same_end and distance == 0:
        return Comparison("same bits" if was.params_sha256 else "same to the last digit", True)
    if not changes:
        return Comparison(f"another result on the same machine and version: curves within {points}", False)
    if distance > ACCURACY_TOLERANCE:
        return Comparison(f"another curve: by {points}{remark}", False)
    return Comparison(f"same within {points}{remark}", True)


class _Results(NamedTuple):
    """What is compared of a run."""

    facts: dict[str, Any]  # what must be equal before curves are compared, by the words for it
    curve: np.ndarray  # test and validation accuracy of each round, [rounds, 2]
    params_sha256: str | None  # of the last parameters; None of a run that was interrupted or has diverged
    terms: list[dict[str, float]]  # of each round, where there are no last parameters; else empty


def _interrupted_after(num_rounds: int, record: Record) -> Record:
    """Returns the record as if the run had been interrupted after so many rounds, so that it has no last parameters."""
    return {
        **record,
        "status": "interrupted",
        "error": "",
        "rounds": record["rounds"][:num_rounds],
        "summary": {**record["summary"], "params_sha256": None},
    }


def _results(record: Record) -> _Results:
    """Returns what is compared of a run."""
    rounds = record["rounds"]
    params_sha256 = record["summary"].get("params_sha256")
    terms = [] if params_sha256 else [entry["terms"] for entry in rounds]
    facts = {
        "data set": record["dataset_fingerprint"],
        "partition": record["partition"]["fingerprint"],
        "end": record.get("error") or record["status"],
        "number of rounds": len(rounds),
    }
    curve = np.array([(entry["test_accuracy"], entry["validation_accuracy"]) for entry in rounds], float)
    return _Results(facts, curve, params_sha256, terms)
