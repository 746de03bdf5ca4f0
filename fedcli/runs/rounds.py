"""The rounds of a run: each is trained, tested, recorded, checkpointed and shown."""

import dataclasses
import math
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedcli.core import drift, evaluation
from fedcli.core.client_states import STATES, refuse_non_finite, stored
from fedcli.core.federation import Cohort, Federation, NonFiniteLoss
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.files import refuse_lost
from fedcli.isolation import unchanged
from fedcli.runs import autotune
from fedcli.runs.checkpoints import clear, clear_finished, is_due
from fedcli.runs.identity import identity
from fedcli.runs.lock import FolderLost, watch
from fedcli.runs.models import BestModels, all_params
from fedcli.runs.record import params_hash, summarise, write_record
from fedcli.runs.resolve import Setup
from fedcli.runs.signals import OutOfTime, time_left
from fedcli.runs.workers import current
from fedcli.userfiles import user_files

NOT_BLAMED = NonFiniteLoss, torch.OutOfMemoryError, OSError  # no mistakes in the user's file that raises them


class Listener:
    """What a run reports to a display or a logger (`fedcli run --log`, which needs only the methods that it uses)."""

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """The run is about to train its first round, or the first one after it was resumed."""

    def samples(self, count: int) -> None:
        """A local step has processed `count` samples."""

    def note(self, text: str) -> None:
        """The user has to know something of the engine; the record has it too."""

    def round(self, entry: dict[str, Any]) -> None:
        """A round has ended; `entry` is what the record says of it."""

    def finish(self, record: dict[str, Any]) -> None:
        """The run has ended; `record["status"]` says how."""

    def skip(self, record: dict[str, Any], folder: Path) -> None:
        """The run had ended before, and nothing of it is run."""


def run_rounds(
    setup: Setup, fed: Federation, record: dict, state: Any, folder: Path, progress: Listener, until: int | None = None
) -> Any:
    """Runs the rounds that the record lacks, or those up to `until`, and returns the state after the last."""
    config = setup.run
    method = setup.method
    rounds = record["rounds"]
    writes = current().number == 0
    _refuse_different_workers(record, method)
    record |= {"status": "running", "summary": summarise(rounds, setup.selection)}
    load = os.getloadavg()[0]
    record.setdefault("load", []).append({"round": len(rounds), "start": load, "end": load})
    current().first(lambda: clear(folder, at_rest=True))  # before another worker writes there
    if not writes:
        watch(folder)
    fed.store.folder = folder / (STATES if writes else f"{STATES}-{current().number}")
    if writes:  # also what a resumed run says of its code and machine, before a checkpoint has rounds of them
        write_record(folder, record)
    samples = config.cohort_size * config.local_epochs * sum(map(len, fed.training)) // config.num_clients
    progress.start(record, folder, samples, len(rounds))
    fed.engine.on_samples = lambda count: progress.samples(count * current().count)
    saves = Saves(folder, setup, record, state)
    files = [*user_files(record)]
    complete = len(rounds)  # number of rounds that are in both state and record
    ended = time.perf_counter()  # of the last round
    try:
        for number in range(len(rounds), config.rounds):
            with method.blamed(*NOT_BLAMED), unchanged(files):
                after, entry = one_round(setup, fed, state, fed.cohort(number))
            rounds.append(entry)
            state = after
            now = time.perf_counter()
            _record_notes(record, fed, progress)
            _record_round(record, setup, fed, now - ended)
            if number + 1 == config.rounds and method.personal is None and not config.keep_states:
                state = _states_of_next_cohort(state, fed)
            if writes:
                saves.after_round(record, state, now)
            complete = len(rounds)
            progress.round(entry)
            is_late = current().gather(time_left() < now - ended)[0]  # the first worker decides for all
            ended = now
            if complete < config.rounds and (is_late or complete == until):
                raise OutOfTime
        if writes:  # not the others, whose files are soon removed
            record["summary"]["params_sha256"] = params_hash(all_params(method, state, config.num_clients))
        if setup.post is not None:
            with unchanged(files):
                record["post"] = _after_the_last_round(setup, fed, state)
        if writes:
            refuse_lost(folder)
        record["status"] = "finished"
    except FolderLost as error:
        record |= {"status": "failed", "error": str(error)}
        writes = False  # what is in its place may be another run's
        raise
    except KeyboardInterrupt:
        record["status"] = "interrupted"
        if writes and saves.num_rounds < complete == len(rounds):
            saves.write(record, state)
        raise
    except Exception as error:
        record |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        try:
            if writes:
                write_record(folder, record)
            if writes and record["status"] == "finished":
                clear_finished(folder, record)
        finally:
            progress.finish(record)
    return state


def _refuse_different_workers(record: dict, method: Method) -> None:
    """Refuses workers that differ in data, partition, options, code or versions."""
    current().refuse_differences({
        "the fingerprint of the data": record["dataset_fingerprint"],
        "the fingerprint of the partition": record["partition"]["fingerprint"],
        "the configuration": identity(record),
        "the method's file": method.file_hash,
        "the version of fedcli": version("fedcli"),
        "the version of PyTorch": torch.__version__,
    })  # fmt: skip


def _record_notes(record: dict, fed: Federation, progress: Listener) -> None:
    """Takes what the engine had to say in the last round into the record, and shows it."""
    number = record["rounds"][-1]["round"]
    for text in fed.engine.notes:
        record["engine"]["notes"].append({"round": number, "text": text})
        progress.note(text)
    fed.engine.notes.clear()


def _record_round(record: dict, setup: Setup, fed: Federation, seconds: float) -> None:
    """Brings the record up to date with its last round, which took so many seconds."""
    rounds = record["rounds"]
    buffer_floats = max(fed.sent_down["buffers"], fed.sent_up["buffers"])  # of batch normalisation, one way
    record["engine"]["clients_per_chunk"] = fed.engine.clients_per_chunk
    record["load"][-1]["end"] = os.getloadavg()[0]
    record |= {  # at once, since an interruption may come at any time
        "cost": {
            "floats_down": rounds[-1]["floats_down"],
            "floats_up": rounds[-1]["floats_up"],
            "memory_floats": setup.method.client_memory(fed.sizes),
            "buffer_floats": round(buffer_floats / setup.run.cohort_size),
        },
        "summary": summarise(rounds, setup.selection),
        "seconds_total": record["seconds_total"] + seconds,
        "peak_bytes": max(record["peak_bytes"], autotune.peak_memory(fed.device)),
    }
    for earlier in rounds[:-1]:  # of single clients only the last and the selected round are kept
        if earlier["round"] != record["summary"]["selected_round"]:
            earlier.pop("client_accuracy", None)


def _states_of_next_cohort(state: Any, fed: Federation) -> Any:
    """Leaves out the states of clients that would not take part in the round after the last one."""
    following = fed.cohort(fed.config.rounds).client_ids.tolist()
    return state._replace(**{name: kept.only(following) for name, kept in stored(state).items()})


class Saves:
    """When a run is saved: its best models, its checkpoints and its record.

    Attributes:
        num_rounds: Of the last checkpoint.
    """

    def __init__(self, folder: Path, setup: Setup, record: dict, state: Any):
        """Begins with the state from which the rounds go on."""
        self.num_rounds = len(record["rounds"])
        self._folder = folder
        self._config = setup.run
        self._best = BestModels(folder, setup.method)
        self._best.see(record, state)
        self._ended = time.perf_counter()  # of the last checkpoint, which took so many seconds
        self._seconds = 0.0

    def after_round(self, record: dict, state: Any, now: float) -> None:
        """Writes a checkpoint and the record if they are due after the last round, which ended `now`."""
        number = len(record["rounds"]) - 1
        self._best.see(record, state)
        every = self._config.checkpoint_every
        if is_due(number, every, self._config.rounds, self._seconds, now - self._ended):
            self.write(record, state)
            self._ended = time.perf_counter()
            self._seconds = self._ended - now
            write_record(self._folder, record)

    def write(self, record: dict, state: Any) -> None:
        """Writes a checkpoint of the last round."""
        self._best.write_checkpoint(record, state)
        self.num_rounds = len(record["rounds"])


def one_round(setup: Setup, fed: Federation, state: Any, cohort: Cohort) -> tuple[Any, dict[str, Any]]:
    """Runs and tests one round; returns the state after it, and what the record says of it."""
    config = setup.run
    is_last = cohort.round + 1 == setup.run.rounds
    fed.start_round()
    start = time.perf_counter()
    drawn = _generator_states(fed.device)
    outcome = setup.method.run_round(state, cohort, fed, setup.options)
    if type(outcome) is not tuple or len(outcome) != 2 or not isinstance(outcome[1], dict):
        raise UserError(
            f"run_round of '{setup.method.name}' returns no state and terms (got {type(outcome).__name__}); end it "
            "with 'return state, terms', the terms a dict of tensors [K], or {}."
        )
    unchanged = map(torch.equal, drawn, _generator_states(fed.device))
    if not all(unchanged):  # a run that is resumed would draw something else
        raise UserError(
            f"run_round of '{setup.method.name}' draws from PyTorch's global generator in round {cohort.round + 1}; "
            "use fed.generator(...) on the server; a client must not draw."
        )
    after, terms = outcome
    refuse_non_finite(after, cohort.round)
    means = _means(terms, cohort)
    if fed.device.type == "cuda":
        torch.cuda.synchronize(fed.device)
    seconds = time.perf_counter() - start - sum(fed.seconds.values())
    down, up = ([sent["params"], sent["other"]] for sent in (fed.sent_down, fed.sent_up))
    entry = {
        "round": cohort.round,
        **(evaluation.evaluate(fed, setup.method, after) if fed.is_tested(cohort.round) else evaluation.NOTHING),
        "terms": means,
        # Means over the clients, without buffers.
        "floats_down": sum(round(floats / config.cohort_size) for floats in down),
        "floats_up": sum(round(floats / config.cohort_size) for floats in up),
        "seconds": {**fed.seconds, "aggregate": seconds},
    }
    if config.drift_every and (is_last or (cohort.round + 1) % config.drift_every == 0):
        entry["drift"] = drift.measure_drift(fed, cohort)
    _refuse_non_finite_numbers(entry, cohort.round)
    return after, entry


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    """Returns the states of PyTorch's global generators from which a round on a device could draw."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _means(terms: dict[str, torch.Tensor], cohort: Cohort) -> dict[str, float]:
    """Returns each term's mean over the clients, by their examples.

    Raises:
        NonFiniteLoss: One is infinite or NaN, also where the method has made it itself.
    """
    means = {}
    for name, values in terms.items():
        means[name] = (values.double() * cohort.weights.double()).sum().item()
        if not math.isfinite(means[name]):
            raise NonFiniteLoss(
                f"the term '{name}' is not finite in round {cohort.round + 1}; a smaller --lr may help."
            )
    return means


def _refuse_non_finite_numbers(entry: Any, round: int, name: str = "") -> None:
    """Raises NonFiniteLoss if a number of what a record says of a round is not finite, since JSON has none."""
    if isinstance(entry, dict):
        for key, value in entry.items():
            _refuse_non_finite_numbers(value, round, f"{name}.{key}".lstrip("."))
    elif isinstance(entry, float) and not math.isfinite(entry):
        raise NonFiniteLoss(f"'{name}' is not finite in round {round + 1}; try a smaller --lr.")


def _after_the_last_round(setup: Setup, fed: Federation, state: Any) -> dict[str, Any]:
    """Applies the step after the last round to the global model and tests its classifier; the state stays."""
    start = time.perf_counter()
    post = setup.post
    with post.blamed(*NOT_BLAMED):
        *model, floats_up = post.apply(*setup.method.model(state), fed, setup.post_options)
    refuse_non_finite(tuple(model), setup.run.rounds - 1)
    changed = dataclasses.replace(setup.method, model=lambda state: tuple(model), prototypes=None)
    return {
        "name": post.name, "hash": post.file_hash, **evaluation.evaluate(fed, changed, state),
        "floats_up": floats_up, "seconds": time.perf_counter() - start,
    }  # fmt: skip
