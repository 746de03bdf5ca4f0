"""Taking a run up again: to go on with it, or to use what it had after its last round."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedcli import userfiles
from fedcli.core import partition
from fedcli.core.engine import Chunking
from fedcli.core.federation import Federation
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.run_files import CHECKPOINT, RECORD
from fedcli.runs.checkpoints import clear_finished, read_checkpoint
from fedcli.runs.chunking import spell_chunking
from fedcli.runs.identity import current_code_differences, current_numerics
from fedcli.runs.machine import flushed_denormals, machine_settings, note_move
from fedcli.runs.models import all_params
from fedcli.runs.options import recorded_options
from fedcli.runs.origins import TYPED, recorded_origins
from fedcli.runs.prepare import prepare
from fedcli.runs.record import frozen_parts, has_ended, params_hash, read_record
from fedcli.runs.resolve import Setup, resolve
from fedcli.runs.rounds import Listener, run_rounds
from fedcli.runs.run_folder import locked_for_all_workers
from fedcli.runs.saved_run import SavedRun
from fedcli.runs.schema import Record
from fedcli.runs.workers import launched, worker_group

LONGER = "a run cannot be lengthened; train anew with 'fedcli run --from RUN --rounds N --out NEW'"


def find_runs(path: Path, skip_ended: bool = False) -> list[Path]:
    """Returns the folders of the runs in a folder, at any depth; the folder itself if it is a run or holds none.

    Those that have ended are left out if asked, and of several workers always, which share one run.
    """
    folders = sorted(file.parent for file in path.rglob(RECORD))
    if not folders or path in folders:
        return [path]
    if not (skip_ended or launched()):
        return folders
    unfinished = []
    for folder in folders:
        try:
            if not has_ended(read_record(folder)):
                unfinished.append(folder)
        except UserError:  # a damaged record is left to `resume`, which says so
            unfinished.append(folder)
    return unfinished


@flushed_denormals()
def resume(
    path: str | Path, *, files: str | Path | Sequence[str | Path] = (), changed_method: bool = False,
    progress: Listener | None = None, skip_ended: bool = False,
) -> SavedRun:  # fmt: skip
    """Resumes a run that was killed or interrupted from its last checkpoint.

    Args:
        path: Folder of the run.
        files: The user's files that the run needs, also moved; a path in a record is imported only if it is named
            here, and has the recorded hash.
        changed_method: Go on although one of them has changed.
        progress: Told how the run goes on.
        skip_ended: Return a run that has ended.

    Raises:
        UserError: There is no such run, it has finished, its folder is in use, or code, data or partition have changed.
    """
    folder = Path(path)
    listener = progress or Listener()
    read_record(folder)  # refuses what is no run, and makes no folder
    with locked_for_all_workers(folder):
        record = worker_group().from_first(lambda: read_record(folder))
        if skip_ended and has_ended(record):
            if record["status"] == "finished":  # a kill after the last record has left something
                worker_group().from_first(lambda: clear_finished(folder, record))
            listener.skip(record, folder)
            return load(folder, files)
        if record["status"] == "finished":
            raise UserError(f"the run '{folder}' has finished all of its {len(record['rounds'])} rounds; {LONGER}.")
        files_before = record["user_files"]
        record, setup, fed = restore(record, files, changed_method)
        changes = _entries_of_changed_code(record, setup.method, files_before)
        with machine_settings(fed):
            checkpoint = read_checkpoint(folder, record, setup, fed)
            record |= checkpoint.record_part
            num_rounds = len(record["rounds"])
            if num_rounds > 0:
                record["changed"] += [{"round": num_rounds, **change} for change in changes]
                if not userfiles.is_hash_of(record["method_hash"], setup.method.file):
                    record["method_hash"] = userfiles.add_hash(record["method_hash"], setup.method.file_hash)
            else:
                record |= _code_of_the_first_round(record, setup.method)
            record["resumed"].append(num_rounds)
            record.pop("error", None)
            fed.engine.notes.extend(note_move(record, fed.device))
            state = run_rounds(setup, fed, record, checkpoint.state, folder, listener)
    return SavedRun(record, state, folder, tuple(userfiles.user_files(record)))


def _entries_of_changed_code(record: Record, method: Method, files_before: dict[str, str]) -> list[dict[str, Any]]:
    """What a record will say of code that is not as in the rounds that it has; before, its files had `files_before`."""
    changes = []
    differing = current_code_differences(record, method)
    if "numerics" in differing:
        changes.append({"what": "the arithmetic of fedcli", "numerics": differing["numerics"].value})
    if "hash" in differing:
        changes.append({"what": "its method"})
    hashes_before = {userfiles.last_hash(hashes) for hashes in files_before.values()}
    for path, hashes in record["user_files"].items():
        is_of_method = Path(path) == Path(method.file)
        if not is_of_method and userfiles.last_hash(hashes) not in hashes_before:
            changes.append({"what": f"its file {Path(path).name}"})
    return changes


def _code_of_the_first_round(record: Record, method: Method) -> dict[str, Any]:
    """Returns what a record says of the code where no round has been computed yet: the code is as it is now."""
    files = {path: userfiles.imported_hash(path) for path in record["user_files"]}
    numerics = current_numerics(record, method)
    return {"method_hash": method.file_hash, "numerics": numerics, "user_files": files, "changed": []}


def recorded_setup(record: Record, method: Method, **overrides: Any) -> Setup:
    """Returns the set-up of a run from its record, with its last chunk size and other `overrides` of options."""
    engine = record["engine"]
    chunking = Chunking(engine["way"], engine["clients_per_chunk"])
    overrides = {"clients_per_chunk": spell_chunking(chunking), **overrides}
    setup = resolve(method, {**recorded_options(record["config"], method), **overrides})
    origins = {**recorded_origins(record["origin"]), **dict.fromkeys(overrides, TYPED)}
    return replace(setup, origins=origins, selection=record["summary"]["selection"])


class Restored(NamedTuple):
    """A run that can go on, or be looked into."""

    record: Record  # with the user's files as they are now
    setup: Setup
    fed: Federation


def restore(record: Record, files: str | Path | Sequence[str | Path], changed_method: bool = False) -> Restored:
    """Returns what a run needs to go on.

    The arguments are those of `resume`.

    Raises:
        UserError: Code, data or partition have changed.
    """
    record = userfiles.trust_files(record, files, changed_method)
    method = find_method(record["method_source"])
    if record["status"] != "finished" and not changed_method:  # a finished run's last model is known by its hash
        _refuse_other_code(record, method)
    setup = recorded_setup(record, method)
    dataset, parts, fed = prepare(setup)
    _refuse_other("data set", record["dataset_fingerprint"], dataset.fingerprint)
    _refuse_other("partition", record["partition"]["fingerprint"], partition.fingerprint(parts))
    _refuse_other("frozen part of the network", record["model"].get("frozen", []), frozen_parts(fed))
    record["engine"]["workers"] = worker_group().world_size
    return Restored(record, setup, fed)


def _refuse_other_code(record: Record, method: Method) -> None:
    """Refuses code that is not that of a run's last rounds; says the first of the differences."""
    differing = current_code_differences(record, method)
    if differing:
        name, (now, was) = next(iter(differing.items()))
        raise UserError(
            f"the code of '{method.name}' has changed since the run began (got {name} {now}, was {was}); resume with "
            "--changed-method, or start a new run."
        )


def _refuse_other(part: str, was: Any, now: Any) -> None:
    """Refuses a part of a run, known by its fingerprint, that is not what it was."""
    if now != was:
        raise UserError(f"the {part} has changed since the run began (fingerprint {now}, was {was}); restore it.")


def load(path: str | Path, files: str | Path | Sequence[str | Path] = ()) -> SavedRun:
    """Returns a run from its folder or record, its models by `SavedRun.model`; `files` are as for `resume`."""
    path = Path(path)
    files = [files] if isinstance(files, str | Path) else files
    return SavedRun(read_record(path), None, path if path.is_dir() else path.parent, files)


class OpenRun(NamedTuple):
    """A finished run with all that it had after its last round."""

    record: Record
    setup: Setup
    fed: Federation
    state: Any  # the method's server state after the last round


def open_run(folder: Path, files: Sequence[str] = ()) -> OpenRun:
    """Opens a finished run without writing, by its folder and the arguments of `restore`.

    Raises:
        UserError: It has not finished, code, data or partition have changed, or its last model is not there.
    """
    record = read_record(folder)
    if record["status"] != "finished":
        raise UserError(f"the run '{folder}' has not finished (it is {record['status']}); 'fedcli resume' goes on.")
    restored = restore(record, files)
    record = restored.record
    expected = record["summary"].get("params_sha256")
    if not (folder / CHECKPOINT).is_file():
        raise _lacking_last_model(folder, "no checkpoint", expected)
    state = read_checkpoint(folder, record, restored.setup, restored.fed).state
    params_sha256 = params_hash(all_params(restored.setup.method, state, restored.fed.num_clients))
    if params_sha256 != expected:
        raise _lacking_last_model(folder, params_sha256, expected)
    return OpenRun(record, restored.setup, restored.fed, state)


def _lacking_last_model(folder: Path, got: str, expected: str | None) -> UserError:
    """Returns an error, to be raised by the caller, for the folder of a finished run whose last model is not there."""
    return UserError(f"'{folder}' does not hold the run's last model (got {got}, was {expected}); run it again.")
