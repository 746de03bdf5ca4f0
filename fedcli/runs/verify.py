"""Running a record again, and comparing what comes out with it."""

import shutil
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from fedcli.core.federation import NonFiniteLoss
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs.records import WHERE, read_record
from fedcli.runs.rounds import Listener
from fedcli.runs.run import begin, has_ended, new_folder, recorded_setup, remove_unused
from fedcli.runs.signals import OutOfTime
from fedcli.userfiles import trust_files

WITHIN = 0.02  # of accuracy: how far another machine or version may take a point of a curve
SURROUNDINGS = (*WHERE, "numerics", "method_hash")  # what the bits of a run depend on


def verify(
    path: str | Path,
    *,
    out: str | Path | None = None,
    method: Sequence[str | Path] = (),
    device: str | None = None,
    rounds: int | None = None,
    progress: Listener | None = None,
) -> tuple[str, bool]:
    """Runs a run again that has finished or diverged, and compares partition, curve, end and parameters.

    Of its first rounds alone there are no last parameters; the terms of the objective are compared instead.

    Args:
        path: Its folder or its record.
        out: Folder of the repetition, see `run`.
        method: The user's files that the run needs, see `resume`.
        device: In place of the record's.
        rounds: So many of its rounds only, planned as before; the repetition is then one that was interrupted, and is
            kept only in an `out` that is named.
        progress: Told how it goes on.

    Returns:
        See `compare`.

    Raises:
        UserError: If there is no such run, it has not ended or has not these rounds, or it cannot run here.
    """
    record = read_record(Path(path))
    if not has_ended(record):
        raise UserError(f"the run '{path}' has not finished (it is {record['status']}); resume it, or name another.")
    if rounds == len(record["rounds"]):
        rounds = None
    if rounds is not None:
        record = _beginning(record, rounds)
    record = trust_files(record, method)
    setup = recorded_setup(record, find_method(record["method_source"]), **({"device": device} if device else {}))
    folder = Path(out or new_folder(setup))
    try:
        again = begin(setup, folder, record["method_source"], progress, until=rounds).record
    except (NonFiniteLoss, OutOfTime):
        again = read_record(folder)
        if again["status"] == "interrupted" and out is None:
            shutil.rmtree(folder)  # not a run that anybody wants to go on, as `resume` would with all below `runs`
    finally:
        if out is None:
            remove_unused(folder)
    return compare(record, again)


def _beginning(record: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The record as it would be had the run been interrupted after some rounds, fewer than it has."""
    tested = [row["round"] + 1 for row in record["rounds"] if row["test_accuracy"] is not None]
    first, last = min(tested, default=1), len(record["rounds"])
    if not first <= rounds <= last:
        raise UserError(f"--rounds must be from {first}, the first that was tested, to {last} (got {rounds}).")
    moved = [move for move in record.get("moved", ()) if move["round"] < rounds]
    summary = {"selection": record["summary"]["selection"]}
    beginning = {"rounds": record["rounds"][:rounds], "summary": summary, "moved": moved}
    return {**record, **beginning, "status": "interrupted", "error": "interrupted"}


def compare(record: dict[str, Any], again: dict[str, Any]) -> tuple[str, bool]:
    """Compares two records of the same options, both finished, diverged, or interrupted after the same round.

    Returns:
        "same bits", "same to the last digit" of some rounds, "same within x", or what differs; False for the last.
    """
    for name, before, now in (
        ("data set", record["dataset_fingerprint"], again["dataset_fingerprint"]),
        ("partition", record["partition"]["fingerprint"], again["partition"]["fingerprint"]),
    ):
        if before != now:
            return f"another {name}: fingerprint {now}, was {before}", False
    changes = [name for name in SURROUNDINGS if record.get(name) != again.get(name)]
    for move in record.get("moved", ()):
        changes += [f"{name} in round {move['round'] + 1}" for name in WHERE if name in move]
    other = f" (other {', '.join(changes)})" if changes else ""
    end, new_end = (run.get("error", run["status"]) for run in (record, again))
    if end != new_end:
        return f"another end: {new_end}; was: {end}{other}", False
    distance, number = _distance(record["rounds"], again["rounds"])
    points, done = f"{100 * distance:.2f} points of accuracy", len(record["rounds"])
    results = [
        run["summary"].get("params_sha256") or [row["terms"] for row in run["rounds"]] for run in (record, again)
    ]
    part = f" in the first {done} of {record['config']['rounds']} rounds" if end == "interrupted" else ""
    if results[0] == results[1] and distance == 0:
        until = f" until both diverge in round {done + 1}" if record["status"] == "failed" else ""
        return f"same to the last digit{part}" if part else f"same bits{until}", True
    if not changes:
        kind = "the parameters" if isinstance(results[0], str) else "the terms of the objective"
        difference = f"the curve by {points} in round {number}" if distance else f"{kind}, and not the curve"
        return f"another result on the same machine and version: {difference}", False
    if distance > WITHIN:
        return f"another curve: by {points} in round {number}{other}", False
    return f"same within {points}{part}{other}", True


def _distance(rounds: list[dict[str, Any]], again: list[dict[str, Any]]) -> tuple[float, int]:
    """The largest difference of two curves' accuracies, 1 where one has none, and its round, counted from 1."""
    curves = []
    for rows in (rounds, again):
        kinds = ("test_accuracy", "validation_accuracy")
        curves.append({(row["round"] + 1, kind): row[kind] for row in rows for kind in kinds if row[kind] is not None})
    differences = {(0, ""): 0.0}  # of two curves without a point
    for point in sorted({**curves[0], **curves[1]}):
        differences[point] = min(abs(curves[0].get(point, inf) - curves[1].get(point, inf)), 1.0)
    largest = max(differences, key=differences.get)
    return differences[largest], largest[0]
