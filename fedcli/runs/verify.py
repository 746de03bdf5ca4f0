"""Running a record again, and comparing what comes out with it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedcli.core.engine import WAYS
from fedcli.core.federation import NonFiniteLoss
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs.config import recorded_options, resolve, without_effect
from fedcli.runs.records import WHERE, read_record
from fedcli.runs.rounds import Listener
from fedcli.runs.run import Run, has_ended, load, new_folder, remove_unused, run
from fedcli.runs.trust import trust_files

WITHIN = 0.02  # of accuracy: how far another machine or version may take a point of a curve
SURROUNDINGS = (*WHERE, "numerics", "method_hash")  # what the bits of a run depend on


class Enough(KeyboardInterrupt):
    """The rounds that are to be compared are done; the repetition ends as one that was interrupted."""


class Until:
    """A listener that ends a run after its first rounds, and passes on what it is told, as if there were no others."""

    def __init__(self, rounds: int, listener: Listener):
        self.rounds, self.listener = rounds, listener

    def __getattr__(self, name: str) -> Any:
        return getattr(self.listener, name)

    def start(self, record: dict[str, Any], *arguments: Any) -> None:
        """See `Listener`."""
        self.listener.start({**record, "config": {**record["config"], "rounds": self.rounds}}, *arguments)

    def round(self, entry: dict[str, Any]) -> None:
        """See `Listener`."""
        self.listener.round(entry)
        if entry["round"] + 1 == self.rounds:
            raise Enough


class Verdict(NamedTuple):
    """What a record and its repetition have in common."""

    text: str  # "same bits", "same to the last digit" of some rounds, "same within x", or what differs
    same: bool  # False for the last of them
    again: Run  # the repetition


def verify(
    path: str | Path,
    *,
    out: str | Path | None = None,
    method: Sequence[str | Path] = (),
    device: str | None = None,
    rounds: int | None = None,
    progress: Listener | None = None,
) -> Verdict:
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

    Raises:
        UserError: If there is no such run, it has not ended or has not these rounds, or it cannot run here.
    """
    record = read_record(Path(path))
    if not has_ended(record):
        raise UserError(
            f"the run '{path}' has not finished (it is {record['status']}); only one that has finished or diverged can "
            "be compared."
        )
    if rounds not in (None, len(record["rounds"])):
        record = _beginning(record, rounds)
        progress = Until(rounds, progress or Listener())
    record = trust_files(record, method)
    chosen = find_method(record["method_source"])
    options = recorded_options(record["config"], chosen)
    if device is not None:
        options["device"] = device
    setup = resolve(chosen, options, need_data=False)
    for name in without_effect(setup, options):
        del options[name]
    engine = record["engine"]
    way = "" if engine.get("way", WAYS[0]) == WAYS[0] else f"{engine['way']}:"
    options["clients_per_chunk"] = f"{way}{engine['clients_per_chunk']}"
    folder = Path(out or new_folder(setup))
    try:
        again = run(record["method_source"], out=folder, progress=progress, **options)
    except (NonFiniteLoss, Enough) as end:
        again = load(folder)
        if isinstance(end, Enough) and out is None:
            shutil.rmtree(folder)  # not a run that anybody wants to go on, as `resume` would with all below `runs`
    finally:
        if out is None:
            remove_unused(folder)
    return Verdict(*compare(record, again.record), again)


def _beginning(record: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The record as it would be had the run been interrupted after some rounds, fewer than it has."""
    done = len(record["rounds"])
    if not 1 <= rounds < done:
        raise UserError(f"--rounds must be from 1 to the {done} that the run has (got {rounds}); choose one of these.")
    tested = [row["round"] + 1 for row in record["rounds"] if row["test_accuracy"] is not None]
    first = min(tested, default=done)
    if rounds < first:
        raise UserError(f"the run has no accuracy before round {first} (got --rounds {rounds}); give {first} or more.")
    moved = [move for move in record.get("moved", ()) if move["round"] < rounds]
    beginning = {"rounds": record["rounds"][:rounds], "summary": {}, "moved": moved, "status": "interrupted"}
    return {name: value for name, value in {**record, **beginning}.items() if name != "error"}


def compare(record: dict[str, Any], again: dict[str, Any]) -> tuple[str, bool]:
    """Compares two records of the same options, both finished, diverged, or interrupted after the same round.

    Returns:
        The text and the answer of a `Verdict`.
    """
    for name, before, now in (
        ("data set", record["dataset_fingerprint"], again["dataset_fingerprint"]),
        ("partition", record["partition"]["fingerprint"], again["partition"]["fingerprint"]),
    ):
        if before != now:
            return f"another {name}: fingerprint {now}, was {before}", False
    changes = []
    for name in SURROUNDINGS:
        before, now = record.get(name), again.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            parts = [part for part in {**before, **now} if before.get(part) != now.get(part)]
            changes += [f"{name}: {', '.join(parts)}"] if parts else []
        elif before != now:
            changes.append(name)
    for move in record.get("moved", ()):
        changes += [f"{name} in round {move['round'] + 1}" for name in WHERE if name in move]
    other = f" (other {'; '.join(changes)})" if changes else ""
    end, new_end = record.get("error", record["status"]), again.get("error", again["status"])
    if end != new_end:
        return f"another end: {new_end}; was: {end}{other}", False
    distance, number = _distance(record["rounds"], again["rounds"])
    points = f"{100 * distance:.2f} points of accuracy"
    kind, result, new_result = "the parameters", *(run["summary"].get("params_sha256") for run in (record, again))
    if result is None and new_result is None:
        kind = "the terms of the objective"
        result, new_result = ([row["terms"] for row in run["rounds"]] for run in (record, again))
    done = len(record["rounds"])
    beginning = f" in the first {done} of {record['config']['rounds']} rounds" if end == "interrupted" else ""
    if result == new_result and distance == 0:
        until = f" until both diverge in round {done + 1}" if "error" in record else ""
        return f"same to the last digit{beginning}" if beginning else f"same bits{until}", True
    if not changes:
        difference = f"the curve by {points} in round {number}" if distance else f"{kind}, and not the curve"
        return f"another result on the same machine and version: {difference}", False
    if distance > WITHIN:
        return f"another curve: by {points} in round {number}{other}", False
    return f"same within {points}{beginning}{other}", True


def _distance(rounds: list[dict[str, Any]], again: list[dict[str, Any]]) -> tuple[float, int]:
    """The largest difference of two curves' accuracies, 1 where one has none, and its round, counted from 1."""
    if len(rounds) != len(again):
        return 1.0, min(len(rounds), len(again)) + 1
    largest, number = 0.0, 0
    for before, now in zip(rounds, again, strict=True):
        for name in ("test_accuracy", "validation_accuracy"):
            pair = before[name], now[name]
            difference = float(pair[0] is not pair[1]) if None in pair else abs(pair[0] - pair[1])
            if difference > largest:
                largest, number = difference, before["round"] + 1
    return largest, number
