"""A run from beginning to end: its folder, how it begins in it, and how it is taken up again."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedcli import userfiles
from fedcli.core import partition
from fedcli.core.federation import Federation, NonFiniteLoss
from fedcli.declarations import Method, describe_need, flag_of, is_idle
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs import autotune, config, records
from fedcli.runs.checkpoints import CHECKPOINT, clear_finished, read_checkpoint
from fedcli.runs.config import RunConfig, Setup
from fedcli.runs.lock import LOCK, InUse, leftovers, locked
from fedcli.runs.models import Run, all_params
from fedcli.runs.prepare import flushed_denormals, frozen_parts, machine_settings, new_record, prepare
from fedcli.runs.rounds import NOT_BLAMED, Listener, run_rounds
from fedcli.runs.settings import NOT_SETTINGS, differences, draft, numerics, settings
from fedcli.runs.workers import current, launched

LONGER = "a run cannot be lengthened; train anew with 'fedcli run --from RUN --rounds N --out NEW'"


def run(
    method: str, *, out: str | Path | None = None, seeds: Iterable[int] | None = None, continue_: bool | None = None,
    progress: Listener | None = None, **given: Any,
) -> Run | list[Run]:  # fmt: skip
    """Runs a method, and returns the run, or a list of runs with `seeds`; the arguments are those of `fedcli.run`.

    With `continue_`, a run that has ended is skipped, and its `state` is None; one that has finished a round is
    resumed, and the rest start.

    Raises:
        UserError: A run cannot start; nothing is written then.
        NonFiniteLoss: A loss becomes infinite or NaN; the record says so.
    """
    if continue_ and out is None:
        raise UserError("--continue needs a folder (got no --out); name it with --out.")
    planned = plan(method, out=out, seeds=seeds, **given)
    source = userfiles.absolute(method) if userfiles.is_from_file(method) else find_method(method).name
    begun_before = current().first(lambda: [begun(*run, bool(continue_)) for run in planned])
    done: list[Run] = []
    for (setup, folder), record in zip(planned, begun_before, strict=True):
        if record is None:
            done.append(begin(setup, folder, source, progress))
        else:
            files = userfiles.own_paths([source, *setup.values().values()])
            done.append(resume(folder, method=files, progress=progress, skip_ended=True))
    return done[0] if seeds is None else done


def plan(
    method: str, *, out: str | Path | None = None, seeds: Iterable[int] | None = None, tuned: str | Path | None = None,
    sources: Mapping[str, str] | None = None, **options: Any,
) -> list[tuple[Setup, Path]]:  # fmt: skip
    """The runs of `run`, each with its folder; `sources` says where options come from that were not typed.

    Raises:
        UserError: One cannot start, as far as shows without its data and folder.
    """
    chosen, sources = find_method(method), dict(sources or {})
    options = {  # auto is as if it were not given
        name: value for name, value in options.items()
        if value is not None and (name, value) != ("checkpoint_every", "auto")
    }  # fmt: skip
    if tuned is not None:
        best, source = config.read_tuned(tuned, chosen)
        sources |= dict.fromkeys(best.keys() - options.keys(), source)
        options = {**best, **options}
    if seeds is not None and "seed" in options:
        raise UserError(f"--seed {options['seed']} was given with --seeds; leave one of the two out.")
    if out is None and launched():
        raise UserError("the workers of a launcher need one folder for all (got no --out); name it with --out.")
    different = [{}] if seeds is None else [{"seed": seed} for seed in check_seeds(seeds)]
    setups = [config.resolve(chosen, {**options, **seed}, sources=sources) for seed in different]
    refuse_without_effect(setups[0])
    parent = Path(out or new_folder(setups[0]))
    return [(setup, parent if seeds is None else parent / f"seed-{setup.run.seed}") for setup in setups]


def refuse_without_effect(setup: Setup) -> None:
    """Refuses typed options that have no effect; a protocol, a record and a file may have such."""
    values = setup.values()
    for name, field in config.fields_of(RunConfig, setup.method.config).items():
        is_typed = setup.origin[name] == "command line" and values[name] != field.default
        if is_typed and is_idle(field.metadata, values):
            others = ", ".join(f"{flag_of(other)} {values[other]}" for other in field.metadata["only_with"])
            raise UserError(f"{flag_of(name)} is for {describe_need(field.metadata)} (got {others}); leave it out.")


def load(path: str | Path, method: str | Path | Sequence[str | Path] = ()) -> Run:
    """A run from its folder or record, its models by `Run.model`; `method` is as for `resume`."""
    path = Path(path)
    return Run(records.read_record(path), None, path if path.is_dir() else path.parent, method)


def begun(setup: Setup, folder: Path, going_on: bool) -> dict[str, Any] | None:
    """The record from which a run goes on, if it may; None where it begins.

    Raises:
        InUse: Another process has locked the folder of a run that begins, and may be about to write a record.
        UserError: The folder holds another run or something else.
    """
    record, holds_run = read_begun(folder), (folder / records.RECORD).is_file()
    if record is None or not going_on:
        # Without a record, only what a killed process has left behind may be there.
        strangers = {*folder.glob("*")} - {folder / LOCK, *leftovers(folder)}
        if record or (strangers and not holds_run):
            kind = InUse if (folder / LOCK).exists() else UserError
            remedy = "go on with --continue, or choose another" if holds_run else "choose another"
            raise kind(f"the output folder '{folder}' exists; an existing one is never overwritten; {remedy}.")
        return None
    # What was typed and changes no result counts too, since it would not be done.
    asked = [name for name in NOT_SETTINGS if name == "seed" or setup.origin[name] == "command line"]
    recorded = config.filled_up(record["config"], RunConfig)
    before = settings(record) | {name: recorded[name] for name in asked}
    now = settings(draft(setup)) | {name: getattr(setup.run, name) for name in asked}
    now["code"] = before.get("code")  # `resume` says what to do about another one
    for name, (value, other) in differences(now, before).items():
        flag = name if name in ("method", "selection") else flag_of(name)
        remedy = LONGER if name == "rounds" and value > other else "choose another --out"
        raise UserError(f"'{folder}' holds a run with another {flag} (got {value}, was {other}); {remedy}.")
    return record


def read_begun(folder: Path) -> dict[str, Any] | None:
    """The record of a run that has ended or finished a round; None where a new run loses nothing."""
    if not (folder / records.RECORD).is_file():
        return None
    record = records.read_record(folder)
    return record if record["rounds"] or (folder / CHECKPOINT).is_file() or has_ended(record) else None


def has_ended(record: dict[str, Any]) -> bool:
    """Whether a run has finished, or has diverged and would again."""
    return record["status"] == "finished" or record.get("error", "").startswith(NonFiniteLoss.__name__)


def check_seeds(seeds: Iterable[Any]) -> list[int]:
    """The seeds of several runs as a list; refuses what is not distinct whole numbers from 0."""
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds) or any(type(seed) is not int or seed < 0 for seed in seeds):
        raise UserError(
            f"--seeds must be distinct whole numbers from 0 (got '{','.join(map(str, seeds))}'); write --seeds 0,1,2."
        )
    return seeds


@flushed_denormals()
def begin(setup: Setup, folder: Path, source: str, progress: Listener | None = None, until: int | None = None) -> Run:
    """Prepares a run, makes its folder and runs it; `until` interrupts it after so many rounds.

    The `source` is its method's name, or the path of the method's file.
    """
    dataset, parts, fed = prepare(setup)
    engine = fed.engine
    with machine_settings(fed):
        chosen = autotune.autotune(fed)
        engine.way, engine.clients_per_chunk, chosen = current().first(
            lambda: (engine.way, engine.clients_per_chunk, chosen)
        )
        record = new_record(setup, dataset, parts, fed, source, chosen)
        with setup.method.blamed(*NOT_BLAMED):
            state = setup.method.init(fed, setup.options)
        with locked(folder) if current().number == 0 else nullcontext():
            current().first(lambda: begun(setup, folder, False))  # another process may have begun in it meanwhile
            state = run_rounds(setup, fed, record, state, folder, progress or Listener(), until)
    return Run(record, state, folder, tuple(userfiles.user_files(record)))


def find_runs(path: Path, skip_ended: bool = False) -> list[Path]:
    """The folders of the runs in a folder, at any depth; the folder itself if it is a run or holds none.

    Those that have ended are left out if asked, and of several workers always, which share one run.
    """
    folders = sorted(file.parent for file in path.rglob(records.RECORD))
    if not folders or path in folders:
        return [path]
    for folder in [*folders] if skip_ended or launched() else ():
        with suppress(UserError):  # a damaged record is left to `resume`, which says so
            if has_ended(records.read_record(folder)):
                folders.remove(folder)
    return folders


@flushed_denormals()
def resume(
    path: str | Path, *, method: str | Path | Sequence[str | Path] = (), changed_method: bool = False,
    progress: Listener | None = None, skip_ended: bool = False,
) -> Run:  # fmt: skip
    """Resumes a run that was killed or interrupted from its last checkpoint.

    Args:
        path: Folder of the run.
        method: The user's files that the run needs, also moved; a path in a record is imported only if it is named
            here, and has the recorded hash.
        changed_method: Go on although one of them has changed.
        progress: Told how the run goes on.
        skip_ended: Return a run that has ended.

    Raises:
        UserError: There is no such run, it has finished, its folder is in use, or code, data or partition have changed.
    """
    folder, progress = Path(path), progress or Listener()
    records.read_record(folder)  # refuses what is no run, and makes no folder
    with locked(folder) if current().number == 0 else nullcontext():
        record = current().first(lambda: records.read_record(folder))
        if skip_ended and has_ended(record):
            if record["status"] == "finished":  # a kill after the last record has left something
                current().first(lambda: clear_finished(folder, record))
            progress.skip(record, folder)
            return load(folder, tuple(userfiles.user_files(record)))
        if record["status"] == "finished":
            raise UserError(f"the run '{folder}' has finished all of its {len(record['rounds'])} rounds; {LONGER}.")
        record, setup, fed = restore(record, method, changed_method)
        if not userfiles.is_hash_of(record["method_hash"], setup.method.file):
            record["method_hash"] += userfiles.THEN + setup.method.file_hash
        with machine_settings(fed):
            state, before = read_checkpoint(folder, record, setup, fed)
            record |= before
            record["resumed"].append(len(record["rounds"]))
            record.pop("error", None)
            fed.engine.notes += records.note_move(record, fed.device)
            state = run_rounds(setup, fed, record, state, folder, progress)
    return Run(record, state, folder, tuple(userfiles.user_files(record)))


def recorded_setup(record: dict[str, Any], method: Method, **instead: Any) -> Setup:
    """The set-up of a run from its record, with its last chunk size; `instead` overrides options."""
    chunk = "{way}:{clients_per_chunk}".format(**record["engine"]).removeprefix("stacked:")
    instead = {"clients_per_chunk": chunk, **instead}
    setup = config.resolve(method, {**config.recorded_options(record["config"], method), **instead})
    origin = {**record["origin"], **dict.fromkeys(instead, "command line")}
    return replace(setup, origin=origin, selection=record["summary"]["selection"])


def restore(
    record: dict[str, Any], files: str | Path | Sequence[str | Path], changed_method: bool = False, **instead: Any
) -> tuple[dict[str, Any], Setup, Federation]:
    """A run's record with the user's files as they are now, its set-up and federation.

    The arguments are those of `resume`; `instead` overrides options.

    Raises:
        UserError: Code, data or partition have changed.
    """
    record = userfiles.trust_files(record, files, changed_method)
    method = find_method(record["method_source"])
    if record["status"] != "finished" and not changed_method:  # a finished run's last model is known by its hash
        now = f"numerics {numerics(record, method)}, hash {method.file_hash}"
        before = f"numerics {record['numerics']}, hash {record['method_hash'].rpartition(userfiles.THEN)[2]}"
        if now != before:
            raise UserError(
                f"the code of '{method.name}' has changed since the run began (got {now}; was {before}); resume with "
                "--changed-method, or start a new run."
            )
    setup = recorded_setup(record, method, **instead)
    dataset, parts, fed = prepare(setup)
    for part, then, now in (
        ("data set", record["dataset_fingerprint"], dataset.fingerprint),
        ("partition", record["partition"]["fingerprint"], partition.fingerprint(parts)),
        ("frozen part of the network", record["model"].get("frozen", []), frozen_parts(fed)),
    ):
        if then != now:
            raise UserError(f"the {part} has changed since the run began (fingerprint {now}, was {then}); restore it.")
    record["engine"]["workers"] = current().count
    return record, setup, fed


class OpenRun(NamedTuple):
    """A finished run with all that it had after its last round."""

    record: dict[str, Any]
    setup: Setup
    fed: Federation
    state: Any  # the method's server state after the last round


def open_run(folder: Path, method: Sequence[str] = (), **instead: Any) -> OpenRun:
    """Opens a finished run without writing, by its folder and the arguments of `restore`.

    Raises:
        UserError: It has not finished, code, data or partition have changed, or its last model is not there.
    """
    record = records.read_record(folder)
    if record["status"] != "finished":
        raise UserError(f"the run '{folder}' has not finished (it is {record['status']}); 'fedcli resume' goes on.")
    record, setup, fed = restore(record, method, **instead)
    expected, actual = record["summary"].get("params_sha256"), "no checkpoint"
    if (folder / CHECKPOINT).is_file():
        state, _ = read_checkpoint(folder, record, setup, fed)
        actual = records.params_hash(all_params(setup.method, state, fed.num_clients))
    if actual != expected:
        raise UserError(f"'{folder}' does not hold the run's last model (got {actual}, was {expected}); run it again.")
    return OpenRun(record, setup, fed, state)


def new_folder(setup: Setup) -> Path:
    """A folder named after the time, to the microsecond, the method and the data set."""
    name = f"{setup.method.name}-{userfiles.short_name(setup.run.dataset)}"
    return Path("runs", f"{datetime.now():%Y%m%d-%H%M%S-%f}-{name}")
