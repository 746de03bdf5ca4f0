"""How a run begins: its set-up and folder, and the record from which it may go on."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedcli import userfiles
from fedcli.core.federation import Federation
from fedcli.declarations import flag_of
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.registry import find_method
from fedcli.run_files import CHECKPOINT, LOCK, RECORD
from fedcli.runs import autotune
from fedcli.runs.identity import NOT_SETTINGS, differences, planned_settings, settings_of
from fedcli.runs.lock import InUse, is_held, leftovers
from fedcli.runs.machine import flushed_denormals, machine_settings
from fedcli.runs.method_calls import initial_state
from fedcli.runs.options import RunConfig, filled_up
from fedcli.runs.origins import GivenOptions, Kind
from fedcli.runs.prepare import prepare, refuse_lost_classes
from fedcli.runs.record import has_ended, new_record, read_record
from fedcli.runs.resolve import Setup, refuse_without_effect, resolve
from fedcli.runs.resume import LONGER, resume
from fedcli.runs.rounds import Listener, run_rounds
from fedcli.runs.run_folder import locked_for_all_workers
from fedcli.runs.saved_run import SavedRun
from fedcli.runs.schema import Record
from fedcli.runs.sources import read_tuned
from fedcli.runs.workers import launched, worker_group


def run_method(
    method: str, given: GivenOptions, *, out: str | Path | None = None, seeds: Iterable[int] | None = None,
    continue_: bool | None = None, progress: Listener | None = None,
) -> SavedRun | list[SavedRun]:  # fmt: skip
    """Runs a method, and returns the run, or a list of runs with `seeds`; the arguments are those of `fedcli.run`.

    With `continue_`, a run that has ended is skipped, and its `state` is None; one that has finished a round is
    resumed, and the rest start.

    Raises:
        UserError: A run cannot start; nothing is written then.
        NonFiniteLoss: A loss becomes infinite or NaN; the record says so. It is raised after the runs of all seeds.
    """
    if continue_ and out is None:
        raise UserError("--continue needs a folder (got no --out); name it with --out.")
    planned = resolve_runs(method, given, out=out, seeds=seeds)
    method_source = userfiles.make_absolute(method) if userfiles.names_user_file(method) else find_method(method).name
    records: list[Record | None] = [None] * len(planned)
    if continue_:
        records = worker_group().from_first(lambda: [record_to_continue(run.setup, run.folder) for run in planned])
    else:
        for run in planned:
            worker_group().from_first(partial(refuse_existing, run.folder))
    runs: list[SavedRun] = []
    errors: list[NonFiniteLoss] = []
    for run, record in zip(planned, records, strict=True):
        try:
            if record is None:
                runs.append(begin(run.setup, run.folder, method_source, progress))
            else:
                files = userfiles.user_paths([method_source, *run.setup.all_options().values()])
                runs.append(resume(run.folder, files=files, progress=progress, skip_ended=True))
        except NonFiniteLoss as error:  # another seed may not diverge
            errors.append(error)
    if errors:
        raise errors[0]
    return runs[0] if seeds is None else runs


class ResolvedRun(NamedTuple):
    """A run that can start, and where."""

    setup: Setup
    folder: Path


def resolve_runs(
    method: str, given: GivenOptions, *, out: str | Path | None = None, seeds: Iterable[int] | None = None
) -> list[ResolvedRun]:
    """Returns the runs of `run_method`.

    Raises:
        UserError: One cannot start, as far as shows without its data and folder.
    """
    declared_method = find_method(method)
    options = {name: value for name, value in given.values.items() if value is not None}
    sources = dict(given.sources)
    if given.tuned is not None:
        tuning = read_tuned(given.tuned, declared_method, options.keys())
        sources |= dict.fromkeys(tuning.options.keys() - options.keys(), tuning.source)
        options = {**tuning.options, **options}
    if seeds is not None and "seed" in options:
        raise UserError(f"--seed {options['seed']} was given with --seeds; leave one of the two out.")
    if out is None and launched():
        raise UserError("the workers of a launcher need one folder for all (got no --out); name it with --out.")
    checked_seeds = None if seeds is None else check_seeds(seeds)
    setup = resolve(declared_method, options, sources=sources)
    refuse_without_effect(setup)
    folder = Path(out or new_folder(setup))
    if checked_seeds is None:
        return [ResolvedRun(setup, folder)]
    return [ResolvedRun(setup.with_seed(seed), folder / f"seed-{seed}") for seed in checked_seeds]


def check_seeds(seeds: Iterable[Any]) -> list[int]:
    """Returns the seeds of several runs as a list; refuses what is not distinct whole numbers from 0."""
    listed = list(seeds)
    are_seeds = all(type(seed) is int and seed >= 0 for seed in listed)
    if not listed or not are_seeds or len(set(listed)) < len(listed):
        raise UserError(
            f"--seeds must be distinct whole numbers from 0 (got '{','.join(map(str, listed))}'); write --seeds 0,1,2 "
            "or 0-2."
        )
    return listed


@flushed_denormals()
def begin(
    setup: Setup, folder: Path, method_source: str, listener: Listener | None = None, until: int | None = None
) -> SavedRun:
    """Prepares a run, makes its folder and runs it; `until` interrupts it after so many rounds.

    The `method_source` is its method's name, or the path of the method's file.
    """
    files_of_setup = userfiles.user_paths([method_source, setup.config.partition])
    hashes_of_setup = {path: userfiles.imported_hash(path) for path in files_of_setup}
    dataset, parts, fed = prepare(setup)
    refuse_lost_classes(setup, dataset, parts)
    with machine_settings(fed):
        reason = _choose_chunking(fed)
        record = new_record(setup, dataset, parts, fed, method_source, reason)
        _refuse_two_versions(hashes_of_setup, record)
        state = initial_state(setup, fed, record["user_files"])
        with locked_for_all_workers(folder):
            # Another process may have begun in it meanwhile.
            worker_group().from_first(lambda: refuse_existing(folder))
            state = run_rounds(setup, fed, record, state, folder, listener or Listener(), until)
    return SavedRun(record, state, folder, tuple(userfiles.user_files(record)))


def _refuse_two_versions(hashes_of_setup: Mapping[str, str], record: Record) -> None:
    """Refuses a file of the set-up that has been edited and imported anew since, as it is the network's file too."""
    for path, hash_of_setup in hashes_of_setup.items():
        if record["user_files"][path] != hash_of_setup:
            raise UserError(f"the file '{path}' has changed since the run was set up; start again.")


def _choose_chunking(fed: Federation) -> str | None:
    """Chooses how clients train together, as the first worker does; returns the reason, see `autotune`."""
    own_reason = autotune.autotune(fed)
    chunking, reason = worker_group().from_first(lambda: (fed.engine.chunking, own_reason))
    fed.engine.use_chunking(chunking)
    return reason


def record_to_continue(setup: Setup, folder: Path) -> Record | None:
    """Returns the record from which a run goes on with `--continue`; None where it begins.

    Raises:
        InUse: Another process has locked the folder of a run that begins, and may be about to write a record.
        UserError: The folder holds another run or something else.
    """
    record = read_begun(folder)
    if record is None:
        refuse_existing(folder)
        return None
    _refuse_other_run(record, setup, folder)
    return record


def refuse_existing(folder: Path) -> None:
    """Refuses a folder for a new run that holds something which the run would overwrite.

    Raises:
        InUse: Another process has locked it, and may be about to write a record; or this one has, and what it holds
            came since the run was prepared.
        UserError: It holds a run or something else.
    """
    if (folder / RECORD).is_file():
        is_taken = read_begun(folder) is not None
        remedy = "go on with --continue, or choose another"
    else:  # only what a killed process has left behind may be there
        is_taken = bool({*folder.glob("*")} - {folder / LOCK, *leftovers(folder)})
        remedy = "choose another"
    if is_taken:
        error_type = InUse if is_held(folder) else UserError
        raise error_type(f"the output folder '{folder}' exists; an existing one is never overwritten; {remedy}.")


def _refuse_other_run(record: Record, setup: Setup, folder: Path) -> None:
    """Refuses to go on with a run in a folder by a set-up that asks for another one."""
    recorded = settings_of(record)
    asked = planned_settings(setup)
    asked["code"] = recorded.get("code")  # `resume` says what to do about another one
    # What the user has given and changes no result counts too, since it would not be done.
    recorded_options = filled_up(record["config"], RunConfig)
    for name in NOT_SETTINGS:
        if name == "seed" or setup.origins[name].kind is Kind.USER:
            recorded[name] = recorded_options[name]
            asked[name] = getattr(setup.config, name)
    differing = differences(asked, recorded)
    if differing:
        name, (value, was) = next(iter(differing.items()))
        flag = name if name in ("method", "selection") else flag_of(name)
        is_longer = name == "rounds" and value > was
        remedy = LONGER if is_longer else "choose another --out"
        raise UserError(f"'{folder}' holds a run with another {flag} (got {value}, was {was}); {remedy}.")


def read_begun(folder: Path) -> Record | None:
    """Returns the record of a run that has ended or finished a round; None where a new run loses nothing."""
    if not (folder / RECORD).is_file():
        return None
    record = read_record(folder)
    has_begun = record["rounds"] or (folder / CHECKPOINT).is_file() or has_ended(record)
    return record if has_begun else None


def new_folder(setup: Setup) -> Path:
    """Returns a folder named after the time, to the microsecond, the method and the data set."""
    name = f"{setup.method.name}-{userfiles.short_name(setup.dataset)}"
    return Path("runs", f"{datetime.now():%Y%m%d-%H%M%S-%f}-{name}")
