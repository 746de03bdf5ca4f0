"""A run from beginning to end: its folder, record and checkpoints, and how it is taken up again."""

import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from fedcli.core import autotune, evaluation, partition
from fedcli.core.batches import Transform
from fedcli.core.engine import WAYS
from fedcli.core.evaluation import NOTHING
from fedcli.core.federation import Cohort, Federation, count_parameters
from fedcli.core.trees import from_plain, to_plain
from fedcli.data import datasets
from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.registry import DataSetting, Method, PublicSetting, find_method
from fedcli.runs import drift
from fedcli.runs.config import Setup, resolve
from fedcli.runs.records import (
    CHECKPOINT,
    SCHEMA,
    environment,
    params_hash,
    read_record,
    summarise,
    write_record,
)

SMALL_NETWORK = 100_000  # parameters


class Progress:
    """What a run reports while it goes on; this one keeps silent."""

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


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    record: dict[str, Any]
    state: Any  # the method's server state after the last round
    path: Path


def run(
    method: str,
    *,
    out: str | Path | None = None,
    seeds: Iterable[int] | None = None,
    progress: Progress | None = None,
    **given: Any,
) -> Run | list[Run]:
    """Runs a method and returns its record, state and folder.

    Args:
        method: Name of a method, or path of a method file.
        out: Folder of the run, which must not exist; `runs/<time>-<method>-<dataset>` where not given.
        seeds: Several runs, one after the other, in the folders `seed-<seed>` of `out`; none of these may exist.
        progress: Told how the run goes on.
        **given: Any option of the command line, with underscores; None counts as not given.

    Returns:
        The run, or the list of runs where `seeds` is given.

    Raises:
        UserError: If a run cannot start; nothing is written then.
        NonFiniteLoss: If a loss becomes infinite or NaN; the record says so.
    """
    chosen = find_method(method)
    source = method if method == chosen.name else str(Path(method).resolve())
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(given.get("clients_per_chunk"), int):
        given["clients_per_chunk"] = str(given["clients_per_chunk"])
    if seeds is None:
        setup = resolve(chosen, given)
        return _begin(setup, _free_folder(out or _new_name(setup)), source, progress)
    if "seed" in given:
        raise UserError(f"--seed {given['seed']} was given with --seeds; one of the two is allowed, leave one out.")
    setups = [resolve(chosen, {**given, "seed": seed}) for seed in check_seeds(seeds)]
    parent = Path(out or _new_name(setups[0]))
    folders = [_free_folder(parent / f"seed-{setup.run.seed}") for setup in setups]
    for setup in setups[1:]:
        prepare(setup)  # refused now rather than after the first run; the first is checked as it begins
    return [_begin(setup, folder, source, progress) for setup, folder in zip(setups, folders, strict=True)]


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


def _begin(setup: Setup, folder: Path, source: str, progress: Progress | None) -> Run:
    """Prepares a run, makes its folder and runs it."""
    dataset, parts, fed = prepare(setup, progress)
    with machine_settings(fed):
        record = _new_record(setup, dataset, parts, fed, source)
        state = setup.method.init(fed, setup.options)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"the output folder '{folder}' cannot be made ({error.strerror}); choose another with --out."
            ) from error
        write_record(folder, record)
        return _go_on(setup, fed, record, state, folder, progress or Progress())


def resume(path: str | Path, *, changed_method: bool = False, progress: Progress | None = None) -> Run:
    """Takes up a run that was killed or interrupted, from its last checkpoint.

    Args:
        path: Folder of the run.
        changed_method: Go on although the method's file is not the one the run began with.
        progress: Told how the run goes on.

    Raises:
        UserError: If there is no such run, it has finished, or its method, data or partition are not the same.
    """
    folder = Path(path)
    record = read_record(folder)
    if record["status"] == "finished":
        raise UserError(f"the run '{folder}' has finished (all {record['config']['rounds']} rounds); start a new one.")
    method = find_method(record["method_source"])
    if method.file_hash != record["method_hash"] and not changed_method:
        raise UserError(
            f"the file of '{method.name}' has changed since the run began (hash {method.file_hash}, was "
            f"{record['method_hash']}); go on with --changed-method, or start a new run."
        )
    setup, fed = restore(record, method, progress)
    if method.file_hash != record["method_hash"]:
        record["method_hash"] = f"{record['method_hash']}, then {method.file_hash}"
    with machine_settings(fed):
        state, known = read_checkpoint(folder, setup, fed)
        record.update(known)
        record["resumed"].append(len(record["rounds"]))
        record.pop("error", None)
        return _go_on(setup, fed, record, state, folder, progress or Progress())


def restore(record: dict[str, Any], method: Method, progress: Progress | None = None) -> tuple[Setup, Federation]:
    """The set-up and the federation of a run, from its record.

    Raises:
        UserError: If the data or the partition are not the same any more.
    """
    setup = resolve(method, {name: value for name, value in record["config"].items() if value is not None})
    setup = dataclasses.replace(setup, origin=record["origin"], selection=record["summary"]["selection"])
    dataset, parts, fed = prepare(setup, progress)
    _refuse_other_data(record, dataset, parts)
    about = record["engine"] = {"way": WAYS[0], "notes": [], **record["engine"]}
    fed.engine.clients_per_chunk, fed.engine.way = about["clients_per_chunk"], about["way"]
    return setup, fed


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


def prepare(setup: Setup, progress: Progress | None = None) -> tuple[datasets.Dataset, list, Federation]:
    """Loads the data, draws the partition and builds the federation of a run.

    Returns:
        The data set, each client's examples, and the federation.
    """
    config = setup.run
    dataset = datasets.load(config.dataset)
    if config.local_test:
        dataset = datasets.merge(dataset)
    if config.train_examples is not None:
        dataset = datasets.take(dataset, config.train_examples, config.partition_seed)
    skews = dataset.domain_train, dataset.writer_train
    parts = setup.partition.scaled(dataset.share)(dataset.y_train, config.num_clients, config.partition_seed, *skews)
    public = None
    if config.public_dataset is not None:
        public = datasets.public_images(config.public_dataset, dataset, config.public_examples, config.partition_seed)
    on_samples = progress.samples if progress else lambda count: None
    kind = drift.Recording if config.drift_every else Federation
    return dataset, parts, federation(setup, dataset, parts, public, on_samples, kind)


def federation(
    setup: Setup,
    dataset: datasets.Dataset,
    parts: list,
    public: datasets.Dataset | None = None,
    on_samples: Callable[[int], None] = lambda count: None,
    kind: type[Federation] = Federation,
) -> Federation:
    """The federation of a run: data normalised and augmented as its protocol says, tested as it says.

    Args:
        setup: The run.
        dataset: Its data set.
        parts: Positions of each client's examples.
        public: The public images, where the method uses some.
        on_samples: Told how many samples a local step has processed.
        kind: Class of what is made.
    """
    dtype = torch.float64 if setup.run.precision == "float64" else torch.float32

    def transform(images: datasets.Dataset, about: DataSetting | PublicSetting | None) -> Transform:
        mean, std = (about.mean, about.std) if about else datasets.channel_statistics(images)
        return Transform(tuple(mean), tuple(std), about.augmentation if about else "none", dtype)

    shared = {}
    if public is not None:
        about = setup.protocol.public.get(setup.run.public_dataset)
        shared = {"public_images": public.x_train, "public_transform": transform(public, about)}
    return kind(
        setup.run, dataset, parts, setup.device, transform(dataset, setup.setting), **shared,
        evaluation=setup.protocol.evaluation, top_k=setup.setting.top_k if setup.setting else 1, on_samples=on_samples,
    )  # fmt: skip


def _free_folder(out: str | Path) -> Path:
    folder = Path(out)
    if folder.exists():
        raise UserError(f"the output folder '{folder}' exists; an existing one is never overwritten, choose another.")
    return folder


def _new_name(setup: Setup) -> Path:
    """A folder that does not exist, named after the time, the method and the data set."""
    name = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{setup.method.name}-{setup.run.dataset}"
    tries = [name, *(Path(f"{name}-{count}") for count in range(2, 1000))]
    return next(folder for folder in tries if not folder.exists())


def _new_record(setup: Setup, dataset: datasets.Dataset, parts: list, fed: Federation, source: str) -> dict[str, Any]:
    config = setup.run
    chosen = autotune.settle(fed)  # why so many clients train together; None where it was given or is the CPU's rule
    counts = partition.describe(parts, dataset.y_train, dataset.num_classes)
    networks = dict(zip(fed.backbones, map(count_parameters, fed.networks), strict=True))
    buffers = max(sum(value.numel() for value in network.module.buffers()) for network in fed.networks)
    return {
        "schema": SCHEMA,
        "status": "running",
        "method": setup.method.name,
        "method_source": source,
        "method_hash": setup.method.file_hash,
        "protocol": setup.protocol.name,
        "dataset": config.dataset,
        "dataset_fingerprint": dataset.fingerprint,
        "reduced": dataset.reduced,
        "seed": config.seed,
        "command": shlex.join(["fedcli", *sys.argv[1:]]) if Path(sys.argv[0]).name == "fedcli" else "fedcli.run",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": setup.values(),
        "origin": setup.origin,
        "evaluation": setup.protocol.evaluation,
        "normalisation": {"mean": fed.transform.mean, "std": fed.transform.std},
        "augmentation": fed.transform.augmentation,
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
        },
        "engine": {
            "clients_per_chunk": fed.engine.clients_per_chunk,
            "way": fed.engine.way,
            "chosen": chosen,
            "device": str(fed.device),
            "precision": config.precision,
            "notes": [],
        },
        "cost": None,
        "resumed": [],
        **environment(fed.device),
        "rounds": [],
        "summary": summarise([], setup.selection),
        "seconds_total": 0.0,
        "peak_bytes": 0,
    }


def all_params(method: Method, state: Any) -> dict[str, Tensor]:
    """The parameters of the global model, or of all clients' own models with their ids before the names."""
    if method.personal is None:
        return method.model(state)[0]
    own = sorted(method.personal(state).items())
    return {f"{client:09}.{name}": value for client, (params, _) in own for name, value in params.items()}


def _refuse_other_data(record: dict[str, Any], dataset: datasets.Dataset, parts: list) -> None:
    for what, then, now in (
        ("data set", record["dataset_fingerprint"], dataset.fingerprint),
        ("partition", record["partition"]["fingerprint"], partition.fingerprint(parts)),
    ):
        if then != now:
            raise UserError(
                f"the {what} is not the one the run began with (fingerprint {now}, was {then}); import it again."
            )


def _go_on(setup: Setup, fed: Federation, record: dict, state: Any, folder: Path, progress: Progress) -> Run:
    """The round loop, from the first round that the record does not have."""
    config, rounds = setup.run, record["rounds"]
    record["status"] = "running"
    start, before = time.perf_counter(), record["seconds_total"]
    samples = config.cohort_size * config.local_epochs * sum(map(len, fed.training)) // config.num_clients
    progress.start(record, folder, samples, len(rounds))
    try:
        for number in range(len(rounds), config.rounds):
            state, entry = one_round(setup, fed, state, fed.cohort(number))
            rounds.append(entry)
            _take_notes(fed, record["engine"], number, progress)
            record["cost"] = _cost(setup, fed)
            record["summary"] = summarise(rounds, setup.selection)
            record["seconds_total"] = before + time.perf_counter() - start
            record["peak_bytes"] = max(record["peak_bytes"], autotune.peak_memory(fed.device))
            if _due(number, config.checkpoint_every, config.rounds):
                _write_checkpoint(folder, record, state)
                write_record(folder, record)
            progress.round(entry)
        record["summary"] = summarise(rounds, setup.selection)
        record["summary"]["params_sha256"] = params_hash(all_params(setup.method, state))
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
        write_record(folder, record)
        progress.finish(record)
    return Run(record, state, folder)


def _after_the_last_round(setup: Setup, fed: Federation, state: Any) -> dict[str, Any]:
    """Applies the step after the last round to the global model and evaluates its classifier; the state stays."""
    start = time.perf_counter()
    *model, floats_up = setup.post.apply(*setup.method.model(state), fed, setup.post_options)
    changed = dataclasses.replace(setup.method, model=lambda state: tuple(model), prototypes=None)
    result = evaluation.evaluate(fed, changed, state)
    seconds = time.perf_counter() - start
    about = {"name": setup.post.name, "hash": setup.post.file_hash}
    return {**about, **result, "floats_up": floats_up, "seconds": seconds}


def _take_notes(fed: Federation, about: dict[str, Any], number: int, progress: Progress) -> None:
    """Puts what the engine has to say after a round into the record, and shows it."""
    for text in fed.engine.notes:
        about["notes"].append({"round": number, "text": text})
        progress.note(text)
    fed.engine.notes.clear()
    about["clients_per_chunk"] = fed.engine.clients_per_chunk


_IN_CHECKPOINT = ("rounds", "cost", "seconds_total", "peak_bytes")  # what a round adds to the record


def _write_checkpoint(folder: Path, record: dict[str, Any], state: Any) -> None:
    """Writes the state and all that the record knows by then: either file may be the older one after a kill."""
    saved = {"state": to_plain(state), "record": {key: record[key] for key in _IN_CHECKPOINT}}
    write_atomically(folder / CHECKPOINT, lambda path: torch.save(saved, path))


def read_checkpoint(folder: Path, setup: Setup, fed: Federation) -> tuple[Any, dict[str, Any]]:
    """The state to go on from and what the record says up to it; the initial ones where there is no checkpoint."""
    if not (folder / CHECKPOINT).is_file():
        return setup.method.init(fed, setup.options), {"rounds": [], "cost": None}
    try:
        saved = torch.load(folder / CHECKPOINT, weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise UserError(
            f"the checkpoint '{folder / CHECKPOINT}' is damaged ({str(error).splitlines()[0]}); delete it to resume "
            f"from the first round, or start a new run."
        ) from error
    types = {kind.__name__: kind for kind in setup.method.state_types}
    return from_plain(saved["state"], types, fed.device), saved["record"]


def one_round(setup: Setup, fed: Federation, state: Any, cohort: Cohort) -> tuple[Any, dict[str, Any]]:
    """Runs and evaluates one round.

    Returns:
        The state after it, and what the record says of it.
    """
    config = setup.run
    fed.start_round()
    start = time.perf_counter()
    state, terms = setup.method.run_round(state, cohort, fed, setup.options)
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
        entry["drift"] = drift.measure(fed, cohort)
    return state, entry


def _due(round: int, every: int, rounds: int) -> bool:
    """Whether something is done after this round that is done after every so many, and after the last."""
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
