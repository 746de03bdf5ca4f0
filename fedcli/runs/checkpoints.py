"""Checkpoints, from which a run goes on: when they are due, what they hold, and which files they leave in a folder.

A checkpoint is a file with the server's state, see `fedcli.core.tree_files`, which names the files of the clients'
states, see `fedcli.core.client_states`.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedcli.core.client_states import STATE_FILE, write_versions
from fedcli.core.federation import Federation
from fedcli.core.tree_files import SUFFIX, load_tree, read_verified, save_tree
from fedcli.errors import UserError
from fedcli.files import refuse_lost, remove
from fedcli.run_files import CHECKPOINT, PREVIOUS, SELECTED, STATES, STATES_FOLDER_OF_WORKER
from fedcli.runs.identity import identity_of
from fedcli.runs.lock import leftovers
from fedcli.runs.method_calls import initial_state
from fedcli.runs.record import part_before_rounds
from fedcli.runs.resolve import Setup
from fedcli.runs.schema import Record
from fedcli.runs.state_schema import check_content, check_facts
from fedcli.runs.value_checks import Fault

LARGEST_TIME_SHARE = 0.05  # the part of a run that checkpoints may take
LONGEST_INTERVAL = 600.0  # seconds between two of them


def is_due(round_index: int, every: int | None, num_rounds: int, last_took: float, since_last: float) -> bool:
    """Returns whether a round of `num_rounds`, counted from 0, ends with a checkpoint: one in `every`, and the last.

    If `every` is None, they take at most 5 % of the time but come at least every ten minutes. The last one
    took `last_took` seconds, 0 before the first, and ended `since_last` seconds ago.
    """
    if round_index + 1 == num_rounds:
        return True
    if every is not None:
        return (round_index + 1) % every == 0
    return since_last >= min(last_took * (1 / LARGEST_TIME_SHARE - 1), LONGEST_INTERVAL)


def write_checkpoint(folder: Path, record: Record, state: Any) -> None:
    """Writes state and rounds, and keeps the checkpoint before, which may be the only one after a kill."""
    facts = {
        "identity": identity_of(record),
        # What a round adds to the record.
        "record": {key: record[key] for key in part_before_rounds()},
        "states": write_versions(state, folder / STATES),
    }
    refuse_lost(folder)
    if (folder / CHECKPOINT).is_file():
        (folder / CHECKPOINT).replace(folder / PREVIOUS)
    save_tree(folder / CHECKPOINT, state, facts)
    remove_unreferenced_states(folder)


def remove_unreferenced_states(folder: Path) -> None:
    """Removes client states from the folder of a run that no checkpoint there names."""
    names = set()
    for checkpoint in (folder / CHECKPOINT, folder / PREVIOUS):
        with suppress(UserError, Fault):  # there is none, or it is damaged
            facts = read_verified(checkpoint).facts
            check_facts(facts)
            names.update(facts["states"])
    _remove_states(folder / STATES, but_for=names)


def remove_states_of_other_workers(folder: Path) -> None:
    """Removes the client states that workers beside the first keep in the folder of a run, where none is at work."""
    for states in folder.glob(f"{STATES}-*"):
        if STATES_FOLDER_OF_WORKER.fullmatch(states.name):
            _remove_states(states)


def _remove_states(folder: Path, but_for: Collection[str] = ()) -> None:
    """Removes the client states in a folder but for those of some names, and the folder if it is empty then.

    Only what has a name that a run gives is removed.
    """
    states = [file for file in folder.glob(f"*{SUFFIX}") if STATE_FILE.fullmatch(file.name)]
    unnamed = [file for file in states if file.stem not in but_for]
    for file in [*unnamed, *leftovers(folder)]:
        if file.is_file():
            remove(file)
    with suppress(OSError):  # it is not empty, or not there
        folder.rmdir()


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Removes files of a run at which no process is at work, and the client states that no checkpoint names then."""
    for name in names:
        remove(folder / name)
    remove_unreferenced_states(folder)
    remove_states_of_other_workers(folder)


def clear_finished(folder: Path, record: Record) -> None:
    """Removes from a finished run's folder the checkpoint before the last, and models that are not the best."""
    files = [PREVIOUS]
    if record["summary"]["selected_round"] == record["rounds"][-1]["round"]:  # the last checkpoint has its models
        files.append(SELECTED)
    remove_files(folder, files)


class Checkpoint(NamedTuple):
    """Where a run goes on."""

    state: Any  # the method's
    record_part: dict[str, Any]  # what rounds add to the record


def read_checkpoint(folder: Path, record: Record, setup: Setup, fed: Federation) -> Checkpoint:
    """Returns a run's newest checkpoint; the initial state without any.

    Raises:
        UserError: If the checkpoint, or a client's state that it names, is damaged, another run's or of another kind.
    """
    assert fed.store is not None  # `prepare` has given it one
    files = [file for file in (folder / CHECKPOINT, folder / PREVIOUS) if file.is_file()]
    if not files:
        return Checkpoint(initial_state(setup, fed, record["user_files"]), part_before_rounds())
    newest = files[0]
    state, facts = load_tree(newest, fed.store.reopen(folder), fed.device)
    try:
        check_facts(facts)
        if facts["identity"] != identity_of(record):
            raise UserError(f"'{newest}' is of another run; restore it, or delete it to go on from an earlier round.")
        check_content(state, facts, initial_state(setup, fed, record["user_files"]), fed)
    except Fault as fault:
        raise UserError(f"'{newest}' is no checkpoint of this run: {fault}; delete it, or run again.") from None
    return Checkpoint(state, facts["record"])
