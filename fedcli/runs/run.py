"""A run from beginning to end: its folder, how it begins in it, and how it is taken up again."""

import dataclasses
import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedcli.core import autotune, partition
from fedcli.core.engine import WAYS
from fedcli.core.federation import Federation, NonFiniteLoss
from fedcli.data import datasets
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs.checkpoints import CHECKPOINT, clear, clear_finished, read_checkpoint
from fedcli.runs.config import Setup, recorded_fields, recorded_options, recorded_value, refuse_without_effect, resolve
from fedcli.runs.consent import THEN, own_files, with_own_files
from fedcli.runs.models import Classifier, all_params, find_model
from fedcli.runs.owner import LOCK, InUse, is_free, owned
from fedcli.runs.prepare import check, flushed_denormals, machine_settings, new_record, prepare, refuse_empty_parts
from fedcli.runs.records import (
    RECORD,
    identity,
    note_move,
    numerics,
    numerics_of,
    outdated,
    params_hash,
    read_record,
    write_record,
)
from fedcli.runs.rounds import Listener, first_state, go_on
from fedcli.runs.workers import current, launched
from fedcli.userfiles import absolute, is_from_file, own_paths, replace_paths, short_name, user_files


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    record: dict[str, Any]
    state: Any  # the method's server state after the last round; None for a run that had ended before
    path: Path
    files: Sequence[str | Path] = ()  # the user's, for its method or for parts

    def model(self, client: int | None = None, round: str = "selected", *, prototypes: bool = False) -> Classifier:
        """The trained model: a `torch.nn.Module` in evaluation mode on the CPU, which normalises its images itself.

        It takes float images `[N, channels, H, W]` in 0 to 1 and returns logits `[N, C]`. It is the model before a step
        of `--post`.

        Args:
            client: Whose model, for methods with personal models; the initial one if it has never taken part.
            round: "selected", which the headline is from, or "last".
            prototypes: For methods that classify by the nearest prototype: return minus the squared distances to
                the prototypes in place of the classifier's logits, as the headline is measured.

        Raises:
            UserError: If the run has not finished, or has no such model.
        """
        return find_model(self.path, self.record, client, round, prototypes, self.files)


def run(
    method: str,
    *,
    out: str | Path | None = None,
    seeds: Iterable[int] | None = None,
    tuned: str | Path | None = None,
    continue_: bool | None = None,
    sources: Mapping[str, str] | None = None,
    progress: Listener | None = None,
    **given: Any,
) -> Run | list[Run]:
    """Runs a method and returns its record, state and folder.

    Args:
        method: Name of a method, or path of a method file.
        out: Folder of the run, which must not exist; `runs/<time>-<method>-<dataset>` where not given.
        seeds: Several runs, one after the other, in the folders `seed-<seed>` of `out`; none of these may exist.
        tuned: What `fedcli tune` has written: its folder or `tuned.json`; options given here go before those in it.
        continue_: Go on with what is in `out` already, by the same call: skip a run that has ended, resume one that has
            begun, start the rest. The `state` of a skipped run is None.
        sources: Where given options come from that were not typed, by name, for the record's `origin`.
        progress: Told how the run goes on.
        **given: Any option of the command line, with underscores; None counts as not given.

    Returns:
        The run, or the list of runs where `seeds` is given.

    Raises:
        UserError: If a run cannot start; nothing is written then.
        NonFiniteLoss: If a loss becomes infinite or NaN; the record says so.
    """
    if continue_ and out is None:
        raise UserError("--continue goes on in a folder (got no --out); name it with --out.")
    setups, folders = plan(method, out=out, seeds=seeds, tuned=tuned, sources=sources, **given)
    source = absolute(method) if is_from_file(method) else find_method(method).name
    try:
        records = current().first(lambda: find_begun(setups, folders, continue_ or current().restarted))
        for setup in setups[1:]:
            check(setup)  # refused now rather than after the first run; the first is checked as it begins
        done = [
            _begin(setup, folder, source, progress) if record is None else _continue(folder, setup, source, progress)
            for setup, folder, record in zip(setups, folders, records, strict=True)
        ]
    finally:
        if out is None:
            remove_unused(folders[0] if seeds is None else folders[0].parent)
    return done[0] if seeds is None else done


def plan(
    method: str,
    *,
    out: str | Path | None = None,
    seeds: Iterable[int] | None = None,
    tuned: str | Path | None = None,
    sources: Mapping[str, str] | None = None,
    **given: Any,
) -> tuple[list[Setup], list[Path]]:
    """The runs that `run` makes of what it is given, and their folders.

    Raises:
        UserError: If one of them cannot start, as far as that shows without its data and its folder.
    """
    chosen = find_method(method)
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("checkpoint_every") == "auto":
        del given["checkpoint_every"]
    if isinstance(given.get("clients_per_chunk"), int):
        given["clients_per_chunk"] = str(given["clients_per_chunk"])
    origin = {name: source for name, source in (sources or {}).items() if name in given}
    if tuned is not None:
        options, source_of = read_tuned(tuned, chosen)
        origin |= {name: source_of for name in options if name not in given}
        given = {**options, **given}

    def resolved(values: Mapping[str, Any]) -> Setup:
        setup = resolve(chosen, values)
        refuse_without_effect(setup, {name: value for name, value in values.items() if name not in origin})
        return dataclasses.replace(setup, origin={**setup.origin, **origin})

    if seeds is not None and "seed" in given:
        raise UserError(f"--seed {given['seed']} was given with --seeds; one of the two is allowed, leave one out.")
    if out is None and launched():
        raise UserError("workers go on in their folder when they are started again (got no --out); name it with --out.")
    each = [given] if seeds is None else [{**given, "seed": seed} for seed in check_seeds(seeds)]
    setups = [resolved(values) for values in each]
    parent = Path(out or new_folder(setups[0]))
    folders = [parent] if seeds is None else [parent / f"seed-{setup.run.seed}" for setup in setups]
    return setups, folders


def find_begun(setups: Sequence[Setup], folders: Sequence[Path], going_on: bool) -> list[dict[str, Any] | None]:
    """The records of runs that have begun in their folders; None of the others, whose folders must be free.

    Args:
        setups: Of the runs.
        folders: Theirs.
        going_on: Whether one may have begun.

    Raises:
        UserError: If a folder holds something else.
    """
    pairs = list(zip(setups, folders, strict=True))
    records = [begun(setup, folder) if going_on else None for setup, folder in pairs]
    for folder, record in zip(folders, records, strict=True):
        if record is None:
            free_folder(folder)
    return records


def load(path: str | Path, method: str | Path | Sequence[str | Path] = ()) -> Run:
    """A run from its folder: its record, and its models by `Run.model`.

    Args:
        path: The folder, or `record.json` in it.
        method: The user's files that the run needs, see `resume`.

    Raises:
        UserError: If there is no run.
    """
    files, record = [method] if isinstance(method, str | Path) else method, read_record(Path(path))
    return Run(record, None, Path(path) if Path(path).is_dir() else Path(path).parent, tuple(files))


def begun(setup: Setup, folder: Path) -> dict[str, Any] | None:
    """The record of a run that has begun in a folder; None for a folder without one.

    Raises:
        UserError: If it is a run of another method or with another option.
    """
    if not (folder / RECORD).is_file():
        return None
    record, fields = read_record(folder), recorded_fields(setup.method, setup.run.post)
    pairs = {"method": (record["method"], setup.method.name)}
    pairs |= {name: (recorded_value(record["config"], fields[name]), now) for name, now in setup.values().items()}
    then = {path: known.rsplit(THEN, 1)[-1] for path, known in own_files(record).items() if known}
    for name, (before, now) in pairs.items():
        own = user_files([now])  # a file that was only moved is the same
        if before != now and replace_paths(before, then) != replace_paths(now, own):
            flag = name if name == "method" else "--" + name.replace("_", "-")
            raise UserError(
                f"the folder '{folder}' holds a run with another {flag} (got {now}, was {before}); give the same "
                "options, or choose another folder with --out."
            )
    return record


def has_ended(record: dict[str, Any]) -> bool:
    """True for a run that has finished, or has diverged and would again."""
    return record["status"] == "finished" or record.get("error", "").startswith(NonFiniteLoss.__name__)


def _continue(folder: Path, setup: Setup, source: str, progress: Listener | None) -> Run:
    """Skips a run that has ended, and resumes another."""
    with _owned_by_first(folder):  # which clears what a kill after the last record has left
        record = current().first(lambda: read_record(folder))  # its process may have ended it meanwhile
        if not has_ended(record):
            return _resume(folder, record, own_paths([source, *setup.values().values()]), False, progress)
        if record["status"] == "finished" and current().number == 0:
            clear_finished(folder)
        (progress or Listener()).skip(record, folder)
    return Run(record, None, folder, tuple(own_files(record)))


def read_tuned(path: str | Path, method: Method) -> tuple[dict[str, Any], str]:
    """The options that `fedcli tune` has chosen for a method, and where they come from, in words.

    Args:
        path: The folder of its trials, or `tuned.json` in it.
        method: Whose options they must be.

    Raises:
        UserError: If there is no such file, or it is of another method.
    """
    file = Path(path) / "tuned.json" if Path(path).is_dir() else Path(path)
    try:
        if not file.is_file():  # as a pipe, which would never end
            raise FileNotFoundError(f"no file '{file}'")
        about = json.loads(file.read_text())
        name, options, seed = about["method"], dict(about["options"]), about["seed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--tuned {path} cannot be read ({error}); give a folder that 'fedcli tune' wrote.") from error
    if name != method.name:
        raise UserError(f"--tuned {path} has options of '{name}' (got '{method.name}'); tune this method first.")
    return options, f"tuned by validation accuracy, seed {seed}"


def check_seeds(seeds: Iterable[Any]) -> list[int]:
    """Return the seeds of several runs as a list.

    Raises:
        UserError: If they are not distinct whole numbers from 0.
    """
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds) or any(type(seed) is not int or seed < 0 for seed in seeds):
        text = ",".join(map(str, seeds))
        raise UserError(f"--seeds must be distinct whole numbers from 0 (got '{text}'); write --seeds 0,1,2.")
    return seeds


@flushed_denormals()
def _begin(setup: Setup, folder: Path, source: str, progress: Listener | None) -> Run:
    """Prepares a run, makes its folder and runs it."""
    dataset, parts, fed = prepare(setup, progress)
    refuse_empty_parts(setup, fed.testing, fed.validation)
    with machine_settings(fed):
        engine, chosen = fed.engine, autotune.autotune(fed)
        engine.way, engine.clients_per_chunk, chosen = current().first(
            lambda: (engine.way, engine.clients_per_chunk, chosen)
        )
        record = new_record(setup, dataset, parts, fed, source, chosen)
        current().refuse_differences(_same_everywhere(setup, record), setup.device)
        state = first_state(setup, fed)
        with _owned_by_first(folder):
            if current().number == 0:
                free_folder(folder)  # another process may have begun in it meanwhile
                write_record(folder, record)
            fed.store.open(folder, identity(record), current().number)
            state = go_on(setup, fed, record, state, folder, progress or Listener())
    return Run(record, state, folder, tuple(own_files(record)))


@contextmanager
def _owned_by_first(folder: Path) -> Iterator[None]:
    """Owns a folder where this is the first worker, which writes what there is to write."""
    with owned(folder) if current().number == 0 else nullcontext():
        yield


def _same_everywhere(setup: Setup, record: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for all workers of a run, by what is said of it."""
    return {
        "the fingerprint of the data": record["dataset_fingerprint"],
        "the fingerprint of the partition": record["partition"]["fingerprint"],
        "the configuration": identity(record),
        "the method's file": setup.method.file_hash,
        "the version of fedcli": version("fedcli"),
        "the version of PyTorch": torch.__version__,
    }


def find_unfinished(path: Path) -> list[Path]:
    """The folders of the runs to resume: `path` itself if it is a run, else those below it that have not ended.

    Raises:
        UserError: If there is none.
    """
    if not path.is_dir() or (path / RECORD).is_file():
        return [path]
    below = sorted(file.parent for file in path.rglob(RECORD))
    found = [folder for folder in below if not _reads_as_ended(folder)]
    if not found:
        raise UserError(
            f"there is no record at '{path / RECORD}', and no unfinished run below (got {len(below)} that have ended); "
            "give the folder of a run, or of several."
        )
    return found


def _reads_as_ended(folder: Path) -> bool:
    """Whether a run needs no resuming; one whose record is damaged is left to `resume`, which says so."""
    try:
        return has_ended(read_record(folder))
    except UserError:
        return False


def resume(
    path: str | Path,
    *,
    method: str | Path | Sequence[str | Path] = (),
    changed_method: bool = False,
    progress: Listener | None = None,
) -> Run:
    """Takes up a run that was killed or interrupted, from its last checkpoint.

    Args:
        path: Folder of the run.
        method: The user's files that the run needs, for its method or for parts; a path in a record is imported only if
            it is named here, and has the recorded hash. A file may have been moved.
        changed_method: Go on although one of them is not as it was when the run began.
        progress: Told how the run goes on.

    Raises:
        UserError: If there is no such run, it has finished, its folder is in use, or its method, data or partition are
            not the same.
    """
    folder, named = Path(path), [method] if isinstance(method, str | Path) else method
    read_record(folder)  # refuses what is no run, and makes no folder
    with _owned_by_first(folder):
        record = current().first(lambda: read_record(folder))
        if current().restarted and has_ended(record):
            return Run(record, None, folder, tuple(own_files(record)))
        return _resume(folder, record, named, changed_method, progress)


@flushed_denormals()
def _resume(
    folder: Path, record: dict[str, Any], named: Sequence[str | Path], changed_method: bool, progress: Listener | None
) -> Run:
    """Takes up the run of a folder that this process owns."""
    if record["status"] == "finished":
        raise UserError(f"the run '{folder}' has finished (all {record['config']['rounds']} rounds); start a new one.")
    record = with_own_files(record, named, shlex.join(["fedcli", "resume", str(folder)]), changed_method)
    method = find_method(record["method_source"])
    other_file = not record["method_hash"].endswith(method.file_hash)
    if (other_file or outdated(record, method)) and not changed_method:
        raise UserError(
            f"the code of '{method.name}' has changed since the run began ({_versions(record, method)}); "
            f"go on with --changed-method, or start a new run."
        )
    setup, fed = restore(record, method, progress)
    if other_file:
        record["method_hash"] = f"{record['method_hash']}{THEN}{method.file_hash}"
    with machine_settings(fed):
        state, known, note = read_checkpoint(folder, record, setup, fed)
        record.update(known)
        record["resumed"].append(len(record["rounds"]))
        if moved := note_move(record, fed.device):
            fed.engine.notes.append(moved)
        record.pop("error", None)
        current().refuse_differences(_same_everywhere(setup, record), setup.device)
        if note is not None and current().number == 0:
            fed.engine.notes.append(note)
            (folder / CHECKPOINT).unlink()  # the next one would take the place of the one before it, which is whole
        current().first(lambda: clear(folder))  # before another worker writes there
        fed.store.open(folder, identity(record), current().number)
        state = go_on(setup, fed, record, state, folder, progress or Listener())
    return Run(record, state, folder, tuple(own_files(record)))


def _versions(record: dict[str, Any], method: Method) -> str:
    """What tells a record's code from that of now: the hash of the method's file and the numerics."""
    then, now = numerics_of(record), numerics(method, record["model"])
    numbers = "".join(f"; numerics of the {part} {now[part]}, was {then[part]}" for part in now if now != then)
    return f"hash {method.file_hash}, was {record['method_hash']}{numbers}"


def restore(record: dict[str, Any], method: Method, progress: Listener | None = None) -> tuple[Setup, Federation]:
    """The set-up and the federation of a run, from its record.

    Raises:
        UserError: If the data or the partition are not the same any more.
    """
    setup = resolve(method, recorded_options(record["config"], method))
    setup = dataclasses.replace(setup, origin=record["origin"], selection=record["summary"]["selection"])
    dataset, parts, fed = prepare(setup, progress)
    _refuse_other_data(record, dataset, parts)
    about = record["engine"] = {"way": WAYS[0], "notes": [], **record["engine"]}
    most = fed.config.cohort_size
    if fed.config.clients_per_chunk == "auto":
        most = -(-most // current().count)  # so that none is idle
    fed.engine.clients_per_chunk, fed.engine.way = min(about["clients_per_chunk"], most), about["way"]
    about["workers"] = current().count
    return setup, fed


@dataclass(frozen=True)
class OpenRun:
    """A finished run, opened again with all that it had after its last round."""

    folder: Path
    record: dict[str, Any]
    method: Method
    setup: Setup
    fed: Federation
    state: Any  # the method's server state after the last round


def open_run(folder: Path, method: Sequence[str] = (), **instead: Any) -> OpenRun:
    """Opens a finished run, to look at its last model or to go on from it; nothing is written.

    Args:
        folder: Of the run, with its last checkpoint.
        method: The user's files that the run needs, see `resume`.
        **instead: Options in place of the run's own, as `drift_every=1`.

    Raises:
        UserError: If the run has not finished, its method, data or partition are not the same any more, or its
            checkpoint is missing or holds another model than the last one.
    """
    record = read_record(folder)
    if record["status"] != "finished":
        raise UserError(f"the run '{folder}' has not finished (it is {record['status']}); 'fedcli resume' goes on.")
    record = with_own_files(record, method, "the same command with")
    method = find_method(record["method_source"])
    if outdated(record, method):
        raise UserError(
            f"the code of '{method.name}' has changed since the run '{folder}' ({_versions(record, method)}); "
            f"run the experiment again."
        )
    setup, fed = restore({**record, "config": {**record["config"], **instead}}, method)
    wanted, found = record["summary"].get("params_sha256"), "no checkpoint"
    if (folder / CHECKPOINT).is_file():
        state = read_checkpoint(folder, record, setup, fed, newest_only=True).state
        found = params_hash(all_params(method, state, fed.num_clients))
    if found != wanted:
        raise UserError(
            f"the checkpoint of '{folder}' is missing or does not hold the run's last model (got {found}, was "
            f"{wanted}); run the experiment again."
        )
    return OpenRun(folder, record, method, setup, fed, state)


def free_folder(out: str | Path) -> Path:
    """The folder of a run that begins, which must be free.

    Raises:
        InUse: Somebody has a lock there, and may be about to write a record.
        UserError: There is something else.
    """
    folder = Path(out)
    if not is_free(folder):
        kind = InUse if (folder / LOCK).exists() else UserError
        raise kind(f"the output folder '{folder}' exists; an existing one is never overwritten, choose another.")
    return folder


def new_folder(setup: Setup) -> Path:
    """Makes a folder named after the time, the method and the data set; two processes never get the same."""
    name = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{setup.method.name}-{short_name(setup.run.dataset)}"
    for folder in (name, *(Path(f"{name}-{count}") for count in range(2, 1000))):
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"the output folder '{folder}' cannot be made ({error.strerror}); choose another with --out."
            ) from error
    raise UserError(f"there are too many runs of this second (got 1000 like '{name}'); name a folder with --out.")


def remove_unused(folder: Path) -> None:
    """Removes what `new_folder` has made if no run has begun in it."""
    for empty in (folder, folder.parent):
        with suppress(OSError):
            empty.rmdir()


def _refuse_other_data(record: dict[str, Any], dataset: datasets.Dataset, parts: list) -> None:
    for what, then, now in (
        ("data set", record["dataset_fingerprint"], dataset.fingerprint),
        ("partition", record["partition"]["fingerprint"], partition.fingerprint(parts)),
    ):
        if then != now:
            raise UserError(
                f"the {what} is not the one the run began with (fingerprint {now}, was {then}); import it again."
            )
