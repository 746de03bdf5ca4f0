"""A run from beginning to end: its folder, record and checkpoints, and how it is taken up again."""

import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcli.core import autotune, evaluation, partition
from fedcli.core.batches import Transform
from fedcli.core.engine import WAYS
from fedcli.core.evaluation import NOTHING
from fedcli.core.federation import Cohort, Federation, NonFiniteLoss, count_parameters, divide
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.registry import (
    DataSetting,
    Method,
    PublicSetting,
    absolute,
    find_method,
    is_from_file,
    own_paths,
    replace_paths,
    short_name,
    user_files,
)
from fedcli.runs import drift
from fedcli.runs.checkpoints import CHECKPOINT, Pace, clear, clear_finished, read_checkpoint, write_checkpoint
from fedcli.runs.config import (
    Setup,
    flags_of,
    given_options,
    parse_size,
    recorded_fields,
    recorded_options,
    recorded_value,
    reductions,
    refuse_without_effect,
    resolve,
)
from fedcli.runs.consent import THEN, own_files, with_own_files
from fedcli.runs.finite import refuse_non_finite
from fedcli.runs.models import Classifier, Selected, all_params, find_model
from fedcli.runs.owner import is_free, owned
from fedcli.runs.records import (
    RECORD,
    SCHEMA,
    Load,
    environment,
    identity,
    numerics,
    numerics_of,
    outdated,
    params_hash,
    read_record,
    summarise,
    write_record,
)
from fedcli.runs.signals import as_interruptions
from fedcli.runs.store import Store, Unkept, trimmed
from fedcli.runs.strict import Strict
from fedcli.runs.workers import current, launched

SMALL_NETWORK = 100_000  # parameters
_NO_MISTAKES = NonFiniteLoss, torch.OutOfMemoryError, Unkept  # not of a user's file in which they are raised


class Listener:
    """What a run reports while it goes on; this one keeps silent.

    A display is one, and so is a logger (`fedcli run --log`), which needs only the methods that it uses.
    """

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """The run in `folder` is about to train its first round."""

    def samples(self, count: int) -> None:
        """A local step has processed `count` samples."""

    def note(self, text: str) -> None:
        """Something has happened to the engine that the user has to know; the record has it too."""

    def round(self, entry: dict[str, Any]) -> None:
        """A round has ended; `entry` is what the record says of it."""

    def finish(self, record: dict[str, Any]) -> None:
        """The run has ended, for whatever reason; `record["status"]` says which."""

    def skip(self, record: dict[str, Any], folder: Path) -> None:
        """The run in `folder` had ended before, and nothing of it is run."""


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
            _begin(setup, folder, source, progress)
            if record is None
            else _continue(record, folder, setup, source, progress)
            for setup, folder, record in zip(setups, folders, records, strict=True)
        ]
    finally:
        if out is None:
            parent = folders[0] if seeds is None else folders[0].parent
            for folder in (parent, parent.parent):  # where no run has begun, they are empty
                with suppress(OSError):
                    folder.rmdir()
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


def _continue(record: dict[str, Any], folder: Path, setup: Setup, source: str, progress: Listener | None) -> Run:
    """Skips a run that has ended, and resumes another."""
    if has_ended(record):
        with _owned_by_first(folder):  # which clears what a kill after the last record has left
            if record["status"] == "finished" and current().number == 0:
                clear_finished(folder)
            (progress or Listener()).skip(record, folder)
        return Run(record, None, folder, tuple(own_files(record)))
    return resume(folder, method=own_paths([source, *setup.values().values()]), progress=progress)


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


def _begin(setup: Setup, folder: Path, source: str, progress: Listener | None) -> Run:
    """Prepares a run, makes its folder and runs it."""
    dataset, parts, fed = prepare(setup, progress)
    _refuse_empty_parts(setup, fed.testing, fed.validation)
    with machine_settings(fed):
        engine, chosen = fed.engine, autotune.autotune(fed)
        engine.way, engine.clients_per_chunk, chosen = current().first(
            lambda: (engine.way, engine.clients_per_chunk, chosen)
        )
        record = _new_record(setup, dataset, parts, fed, source, chosen)
        current().refuse_differences(_same_everywhere(setup, record), setup.device)
        state = _init(setup, fed)
        with _owned_by_first(folder):
            if current().number == 0:
                free_folder(folder)  # another process may have begun in it meanwhile
                write_record(folder, record)
            fed.store.open(folder, identity(record), current().number)
            return _go_on(setup, fed, record, state, folder, progress or Listener())


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
        record.pop("error", None)
        current().refuse_differences(_same_everywhere(setup, record), setup.device)
        if note is not None and current().number == 0:
            fed.engine.notes.append(note)
            (folder / CHECKPOINT).unlink()  # the next one would take the place of the one before it, which is whole
        current().first(lambda: clear(folder))  # before another worker writes there
        fed.store.open(folder, identity(record), current().number)
        return _go_on(setup, fed, record, state, folder, progress or Listener())


def _versions(record: dict[str, Any], method: Method) -> str:
    """What tells a record's code from that of now: the hash of the method's file and the numerics."""
    then, now = numerics_of(record), numerics(method)
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


@contextmanager
def machine_settings(fed: Federation) -> Iterator[None]:
    """PyTorch's process-wide settings as this run needs them; put back afterwards.

    TF32 only where --precision asks for it: PyTorch's own default uses it in convolutions on CUDA. One thread for a
    small network on the CPU, where handing work to several costs more than the work.
    """
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32, torch.get_num_threads()
    matmul.allow_tf32 = convolution.allow_tf32 = fed.config.precision == "tf32"
    if fed.device.type == "cpu" and fed.sizes.parameters < SMALL_NETWORK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before[:2]
        torch.set_num_threads(before[2])


def prepare(setup: Setup, progress: Listener | None = None) -> tuple[datasets.Dataset, list, Federation]:
    """Loads the data, draws the partition and builds the federation of a run.

    Returns:
        The data set, each client's examples, and the federation.
    """
    dataset, parts, public = load_data(setup)
    on_samples = (lambda count: progress.samples(count * current().count)) if progress else lambda count: None
    kind = drift.Recording if setup.run.drift_every else Strict
    memory = setup.run.state_memory and parse_size(setup.run.state_memory)
    store = Store(memory, setup.run.num_clients, setup.device, setup.method.state_types)
    return dataset, parts, federation(setup, dataset, parts, public, on_samples, kind, store)


def check(setup: Setup) -> None:
    """Refuses a run that its data do not allow, without a network and with nothing on the device.

    Raises:
        UserError: If the data cannot be read or divided as asked, or no client has enough of them.
    """
    _, testing, _, validation = divide(load_data(setup)[1], setup.run)
    _refuse_empty_parts(setup, testing, validation)


def _refuse_empty_parts(setup: Setup, testing: list, validation: list) -> None:
    """Refuses a run with nothing to test on, or to choose its best round by; both are each client's positions."""
    config = setup.run
    for needed, parts, what, flag in (
        (config.local_test > 0, testing, "a test part", f"--local-test {config.local_test:g}"),
        (setup.selection == "best-validation", validation, "a validation part", f"--validation {config.validation:g}"),
    ):
        if needed and not any(map(len, parts)):
            raise UserError(
                f"no client has {what} (got {flag} of clients with too few examples); give a larger share, more data "
                "or fewer clients."
            )


def load_data(setup: Setup) -> tuple[datasets.Dataset, list, datasets.Dataset | None]:
    """Loads the data of a run and draws its partition.

    Returns:
        The data set, each client's examples, and the public images where the method uses some.
    """
    config = setup.run
    dataset = datasets.load(config.dataset)
    if config.local_test:
        dataset = datasets.merge(dataset)
    if config.train_examples is not None:
        dataset = datasets.take(dataset, config.train_examples, config.partition_seed)
    skews = dataset.domain_train, dataset.writer_train, dataset.place_train
    parts = setup.partition.scaled(dataset.share)(dataset.y_train, config.num_clients, config.partition_seed, *skews)
    if getattr(parts, "num_test", None) and not config.local_test:
        raise UserError(
            f"the split '{config.partition}' has test lists (got the protocol {config.protocol}, which tests on the "
            "official images); choose a protocol that tests on the clients' own parts, or leave the lists out."
        )
    public = None
    if config.public_dataset is not None:
        public = datasets.public_images(config.public_dataset, dataset, config.public_examples, config.partition_seed)
    return dataset, parts, public


def federation(
    setup: Setup,
    dataset: datasets.Dataset,
    parts: list,
    public: datasets.Dataset | None = None,
    on_samples: Callable[[int], None] = lambda count: None,
    kind: type[Federation] = Federation,
    store: Store | None = None,
) -> Federation:
    """The federation of a run: data normalised and augmented as its protocol says, tested as it says.

    Args:
        setup: The run.
        dataset: Its data set.
        parts: Positions of each client's examples.
        public: The public images, where the method uses some.
        on_samples: Told how many samples a local step has processed.
        kind: Class of what is made.
        store: Keeps what clients remember; all of it stays in memory where None.
    """
    dtype = torch.float64 if setup.run.precision == "float64" else torch.float32

    def transform(images: datasets.Dataset, about: DataSetting | PublicSetting | None) -> Transform:
        mean, std = (about.mean, about.std) if about else datasets.channel_statistics(images)
        return Transform(tuple(mean), tuple(std), about.augmentation if about else "none", dtype)

    shared = {}
    if public is not None:
        about = setup.protocol.public.get(setup.run.public_dataset)
        shared = {"public_images": public.x_train, "public_transform": transform(public, about)}
    fed = kind(
        setup.run, dataset, parts, setup.device, transform(dataset, setup.setting), **shared,
        evaluation=setup.protocol.evaluation, top_k=setup.setting.top_k if setup.setting else 1, on_samples=on_samples,
        store=store,
    )  # fmt: skip
    fed.engine.workers = current()
    return fed


def free_folder(out: str | Path) -> Path:
    """The folder of a run that begins, which must be free."""
    folder = Path(out)
    if not is_free(folder):
        raise UserError(f"the output folder '{folder}' exists; an existing one is never overwritten, choose another.")
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


def _new_record(
    setup: Setup, dataset: datasets.Dataset, parts: list, fed: Federation, source: str, chosen: str | None
) -> dict[str, Any]:
    """What is known of a run before its first round.

    Args:
        setup: The run.
        dataset: Its data set.
        parts: Positions of each client's examples.
        fed: Its federation.
        source: Name of its method, or path of the method's file.
        chosen: Why so many clients train together; None where it was given or is the CPU's rule.
    """
    config = setup.run
    counts = partition.count_classes(parts, dataset.y_train, dataset.num_classes)
    networks = dict(zip(fed.backbones, map(count_parameters, fed.networks), strict=True))
    buffers = max(sum(value.numel() for value in network.module.buffers()) for network in fed.networks)
    return {
        "schema": SCHEMA,
        "status": "running",
        "method": setup.method.name,
        "method_source": source,
        "method_hash": setup.method.file_hash,
        "numerics": numerics(setup.method),
        "user_files": user_files([source, *setup.values().values()]),
        "protocol": setup.protocol.name,
        "dataset": config.dataset,
        "dataset_fingerprint": dataset.fingerprint,
        "reduced": reductions(setup.values(), setup.protocol),
        "seed": config.seed,
        "command": _command(setup, source),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": setup.values(),
        "origin": setup.origin,
        "evaluation": setup.protocol.evaluation,
        "normalisation": {"mean": fed.transform.mean, "std": fed.transform.std},
        "augmentation": fed.transform.augmentation,
        "public": _public(fed),
        "partition": {
            "flag": str(setup.partition.scaled(dataset.share)),
            "seed": config.partition_seed,
            "fingerprint": partition.fingerprint(parts),
            "sizes": [len(part) for part in parts],
            "class_counts": counts.tolist(),
        },
        "class_names": list(dataset.class_names),
        # Of the largest network where there are several; `networks` has the parameters of each.
        "model": {
            "backbone": config.backbone,
            "parameters": fed.sizes.parameters,
            "buffers": buffers,
            "networks": networks,
            "input": [dataset.channels, dataset.image_size, dataset.image_size],
        },
        "engine": {
            "clients_per_chunk": fed.engine.clients_per_chunk,
            "way": fed.engine.way,
            "chosen": chosen,
            "workers": current().count,
            "device": str(fed.device),
            "precision": config.precision,
            "notes": [],
        },
        "cost": None,
        "resumed": [],
        "load": [],  # of the machine, once from the start and once from each round that the run was resumed in
        **environment(fed.device),
        "rounds": [],
        "summary": summarise([], setup.selection),
        "seconds_total": 0.0,
        "peak_bytes": 0,
    }


def _command(setup: Setup, source: str) -> str:
    """What to type to make a run like this in a folder of its own, wherever its options came from."""
    return shlex.join(["fedcli", "run", source, *flags_of(given_options(setup.values(), setup.origin))])


def _public(fed: Federation) -> dict[str, Any] | None:
    """What a record says of the public images; None where there are none."""
    if fed.public_images is None:
        return None
    transform = fed.public_transform
    return {
        "name": fed.config.public_dataset,
        "examples": len(fed.public_images),
        "normalisation": {"mean": transform.mean, "std": transform.std},
        "augmentation": transform.augmentation,
    }


def _refuse_other_data(record: dict[str, Any], dataset: datasets.Dataset, parts: list) -> None:
    for what, then, now in (
        ("data set", record["dataset_fingerprint"], dataset.fingerprint),
        ("partition", record["partition"]["fingerprint"], partition.fingerprint(parts)),
    ):
        if then != now:
            raise UserError(
                f"the {what} is not the one the run began with (fingerprint {now}, was {then}); import it again."
            )


def _init(setup: Setup, fed: Federation) -> Any:
    with setup.method.blamed(*_NO_MISTAKES):
        return setup.method.init(fed, setup.options)


@as_interruptions()
def _go_on(setup: Setup, fed: Federation, record: dict, state: Any, folder: Path, progress: Listener) -> Run:
    """The round loop, from the first round that the record does not have."""
    config, rounds, writes = setup.run, record["rounds"], current().number == 0
    record["status"] = "running"
    start, before, load = time.perf_counter(), record["seconds_total"], Load()
    record.setdefault("load", []).append({"round": len(rounds), **load.so_far()})
    samples = config.cohort_size * config.local_epochs * sum(map(len, fed.training)) // config.num_clients
    progress.start(record, folder, samples, len(rounds))
    pace, selected = Pace(config.checkpoint_every, config.rounds), Selected(folder, setup, fed, record, state)
    try:
        for number in range(len(rounds), config.rounds):
            with setup.method.blamed(*_NO_MISTAKES):
                state, entry = one_round(setup, fed, state, fed.cohort(number))
            rounds.append(entry)
            _take_notes(fed, record["engine"], number, progress)
            record["cost"] = _cost(setup, fed)
            record["summary"] = summarise(rounds, setup.selection)
            record["seconds_total"] = before + time.perf_counter() - start
            record["load"][-1] |= load.so_far()
            record["peak_bytes"] = max(record["peak_bytes"], autotune.peak_memory(fed.device))
            if writes:
                selected.see(record, state)
            if number + 1 == config.rounds and setup.method.personal is None and not config.keep_states:
                state = trimmed(state, fed.cohort(config.rounds).client_ids)
            if writes and pace.due(number):
                pace.timed(_checkpoint, folder, record, state, selected)
                write_record(folder, record)
            progress.round(entry)
        record["summary"] = summarise(rounds, setup.selection)
        if writes:  # not by others, since what they keep is soon removed
            record["summary"]["params_sha256"] = params_hash(all_params(setup.method, state, config.num_clients))
        if setup.post is not None:
            record["post"] = _after_the_last_round(setup, fed, state)
        record["status"] = "finished"
    except KeyboardInterrupt:
        record["status"] = "interrupted"
        raise
    except Exception as error:
        record["status"], record["error"] = "failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        try:
            if writes:
                write_record(folder, record)
            if writes and record["status"] == "finished":
                clear_finished(folder)
        finally:
            progress.finish(record)
    return Run(record, state, folder, tuple(own_files(record)))


def _checkpoint(folder: Path, record: dict[str, Any], state: Any, selected: Selected) -> None:
    """Writes what the run goes on from, and keeps the models of its best round."""
    selected.write(record)
    write_checkpoint(folder, record, state)
    selected.clear(record)


def _after_the_last_round(setup: Setup, fed: Federation, state: Any) -> dict[str, Any]:
    """Applies the step after the last round to the global model and evaluates its classifier; the state stays."""
    start = time.perf_counter()
    with setup.post.blamed(*_NO_MISTAKES):
        *model, floats_up = setup.post.apply(*setup.method.model(state), fed, setup.post_options)
    changed = dataclasses.replace(setup.method, model=lambda state: tuple(model), prototypes=None)
    result = evaluation.evaluate(fed, changed, state)
    seconds = time.perf_counter() - start
    about = {"name": setup.post.name, "hash": setup.post.file_hash}
    return {**about, **result, "floats_up": floats_up, "seconds": seconds}


def _take_notes(fed: Federation, about: dict[str, Any], number: int, progress: Listener) -> None:
    """Puts what the engine has to say after a round into the record, and shows it."""
    for text in fed.engine.notes:
        about["notes"].append({"round": number, "text": text})
        progress.note(text)
    fed.engine.notes.clear()
    about["clients_per_chunk"] = fed.engine.clients_per_chunk


def one_round(setup: Setup, fed: Federation, state: Any, cohort: Cohort) -> tuple[Any, dict[str, Any]]:
    """Runs and evaluates one round.

    Returns:
        The state after it, and what the record says of it.
    """
    config = setup.run
    fed.start_round()
    start = time.perf_counter()
    before = state
    state, terms = setup.method.run_round(before, cohort, fed, setup.options)
    refuse_non_finite(state, before, cohort.round)
    if fed.device.type == "cuda":
        torch.cuda.synchronize(fed.device)
    elapsed = time.perf_counter() - start
    aggregate = elapsed - sum(fed.seconds.values())
    evaluated = _due(cohort.round, config.eval_every, config.rounds)
    result = evaluation.evaluate(fed, setup.method, state) if evaluated else NOTHING
    means = {name: _weighted(values, cohort) for name, values in terms.items()}
    seconds = {**fed.seconds, "aggregate": aggregate}
    entry = {"round": cohort.round, **result, "terms": means, **_sent(fed), "seconds": seconds}
    if config.drift_every and _due(cohort.round, config.drift_every, config.rounds):
        entry["drift"] = drift.measure_drift(fed, cohort)
    return state, entry


def _due(round: int, every: int, rounds: int) -> bool:
    """True every `every` rounds and after the last."""
    return (round + 1) % every == 0 or round + 1 == rounds


def _weighted(values: Tensor, cohort: Cohort) -> float:
    """Mean of a term over the clients of a round, by their numbers of examples."""
    return (values.double() * cohort.weights.double()).sum().item()


def _sent(fed: Federation) -> dict[str, int]:
    """Floats that one client was sent and has sent in the last round, the mean over the round's clients."""
    size = fed.config.cohort_size
    down, up = ({what: round(count / size) for what, count in sent.items()} for sent in (fed.sent_down, fed.sent_up))
    return {"floats_down": down["params"] + down["other"], "floats_up": up["params"] + up["other"]}


def _cost(setup: Setup, fed: Federation) -> dict[str, int]:
    """Floats of one client in the last round; buffers of batch normalisation stand apart."""
    buffers = max(fed.sent_down["buffers"], fed.sent_up["buffers"])  # one way
    return {
        **_sent(fed),
        "memory_floats": setup.method.client_memory(fed.sizes),
        "buffer_floats": round(buffers / setup.run.cohort_size),
    }
