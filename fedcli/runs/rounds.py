"""The rounds of a run: each is trained, tested, recorded, checkpointed and shown."""

import dataclasses
import math
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedcli.core import drift, evaluation
from fedcli.core.client_states import find_stored_states, refuse_non_finite
from fedcli.core.clients import Model
from fedcli.core.federation import Cohort, Federation
from fedcli.declarations import Method, Post
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.isolation import unchanged
from fedcli.runs import autotune, run_folder
from fedcli.runs.identity import identity_of
from fedcli.runs.lock import FolderLost
from fedcli.runs.machine import load_of_last_minute
from fedcli.runs.method_calls import NO_MISTAKES, no_changes_in_place, no_global_draws, refuse_other_kind
from fedcli.runs.record import summarise
from fedcli.runs.resolve import Setup
from fedcli.runs.run_folder import Saver
from fedcli.runs.schema import Record, RoundEntry
from fedcli.runs.signals import OutOfTime, time_left
from fedcli.runs.workers import worker_group
from fedcli.userfiles import is_user_module, user_files


class Listener:
    """What a run reports to a display or a logger (`fedcli run --log`, which needs only the methods that it uses)."""

    def start(self, record: Record, folder: Path, samples_per_round: int, first_round: int) -> None:
        """The run is about to train its first round, or the first one after it was resumed."""

    def samples(self, count: int) -> None:
        """A local step has processed `count` samples."""

    def note(self, text: str) -> None:
        """The user has to know something of the engine; the record has it too."""

    def round(self, entry: RoundEntry) -> None:
        """A round has ended; `entry` is what the record says of it."""

    def finish(self, record: Record) -> None:
        """The run has ended; `record["status"]` says how."""

    def skip(self, record: Record, folder: Path) -> None:
        """The run had ended before, and nothing of it is run."""


def run_rounds(
    setup: Setup,
    fed: Federation,
    record: Record,
    state: Any,
    folder: Path,
    listener: Listener,
    until: int | None = None,
) -> Any:
    """Runs the rounds that the record lacks, and returns the state after the last.

    With `until`, a run that has more rounds is interrupted after so many.

    Raises:
        OutOfTime: Before a round that would pass the time limit.
    """
    num_rounds = setup.config.rounds
    _refuse_different_workers(record, setup.method)
    _record_start(record, setup, fed)
    assert fed.store is not None  # `prepare` has given it one
    run_folder.prepare_folder(folder, fed.store)
    saver = run_folder.saver_of_this_worker(folder, setup, record, state)
    saver.write_record(record)  # also what a resumed run says of its code, before a checkpoint has rounds of it
    loop = RoundLoop(setup, fed, record, state, saver, listener)
    try:
        loop.show_start(folder)
        while loop.num_complete < num_rounds:
            loop.do_next_round()
            if loop.num_complete == until:
                break
            if loop.num_complete < num_rounds and loop.is_late():
                raise OutOfTime
        if loop.num_complete < num_rounds:
            loop.interrupt()
        else:
            loop.finish()
    except FolderLost as error:
        record |= {"status": "failed", "error": str(error)}
        loop.stop_saving()
        raise
    except KeyboardInterrupt:
        loop.interrupt()
        raise
    except Exception as error:
        record |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        loop.write_end()
    return loop.state


def _record_start(record: Record, setup: Setup, fed: Federation) -> None:
    """Records that the run begins or goes on, and how busy the machine is then."""
    rounds = record["rounds"]
    record["engine"]["processes"] = fed.engine.runner.processes.count
    record |= {"status": "running", "summary": summarise(rounds, setup.selection)}
    load = load_of_last_minute()
    record.setdefault("load", []).append({"round": len(rounds), "start": load, "end": load})


class RoundLoop:
    """The rounds of a run while they go on.

    Attributes:
        state: The method's, after the last round.
        num_complete: Number of rounds that are in both state and record.
    """

    def __init__(self, setup: Setup, fed: Federation, record: Record, state: Any, saver: Saver, listener: Listener):
        """Begins with the state after the rounds that the record has."""
        self.state = state
        self.num_complete = len(record["rounds"])
        self._setup = setup
        self._fed = fed
        self._record = record
        self._saver = saver
        self._listener = listener
        self._files = [*user_files(record)]
        self._is_shown = False
        self._round_ended = time.perf_counter()  # when the last round ended
        self._round_seconds = 0.0  # the time that the last round took

    def show_start(self, folder: Path) -> None:
        """Shows that the run begins or goes on, and from here on how many samples it has trained on."""
        config = self._setup.config
        num_images = sum(map(len, self._fed.training))
        samples = config.cohort_size * config.local_epochs * num_images // config.num_clients
        self._listener.start(self._record, folder, samples, self.num_complete)
        self._is_shown = True
        processes = self._fed.engine.runner.processes

        def on_samples(count: int) -> None:
            self._listener.samples(count * worker_group().world_size * processes.active)  # the others do as much

        self._fed.engine.runner.listen(on_samples)
        self._round_ended = time.perf_counter()

    def do_next_round(self) -> None:
        """Trains, tests, records, checkpoints and shows a round."""
        record = self._record
        method = self._setup.method
        config = self._setup.config
        with method.blamed(*NO_MISTAKES), unchanged(self._files):
            cohort = self._fed.cohort(self.num_complete)
            result = one_round(self._setup, self._fed, self.state, cohort)
            if self.num_complete == 0 and is_user_module(method.module):  # law 7 holds packaged methods to it
                refuse_other_kind(method, result.state, self.state, self._fed)
        record["rounds"].append(result.entry)
        self.state = result.state
        now = time.perf_counter()
        self._round_seconds = now - self._round_ended
        _record_notes(record, self._fed, self._listener)
        _record_round(record, self._setup, self._fed, self._round_seconds)
        is_last = len(record["rounds"]) == config.rounds
        if is_last and method.personal is None and not config.keep_states:
            self.state = _states_of_next_cohort(self.state, self._fed)
        self._saver.after_round(record, self.state, now)
        self.num_complete = len(record["rounds"])
        self._listener.round(result.entry)
        self._round_ended = now

    def is_late(self) -> bool:
        """Returns whether less time is left than the last round took; the first worker decides for all."""
        return worker_group().from_first(lambda: time_left() < self._round_seconds)

    def finish(self) -> None:
        """Takes the step after the last round, and records what the run has ended with."""
        record = self._record
        self._saver.after_last_round(record, self.state)
        if self._setup.post is not None:
            with unchanged(self._files):
                record["post"] = _apply_post(self._setup.post, self._setup, self._fed, self.state)
        self._saver.refuse_lost_folder()
        record["status"] = "finished"

    def interrupt(self) -> None:
        """Records that the run was interrupted, and writes a checkpoint, unless there is one or it was in a round."""
        self._record["status"] = "interrupted"
        is_between_rounds = self.num_complete == len(self._record["rounds"])
        if is_between_rounds:
            self._saver.after_interruption(self._record, self.state)

    def stop_saving(self) -> None:
        """Writes nothing from here on, since what is in the place of a lost folder may be another run's."""
        self._saver = Saver()

    def write_end(self) -> None:
        """Writes and shows how the run has ended."""
        try:
            self._saver.end(self._record)
        finally:
            if self._is_shown:
                self._listener.finish(self._record)


def _refuse_different_workers(record: Record, method: Method) -> None:
    """Refuses workers that differ in data, partition, options, code or versions."""
    worker_group().refuse_differences({
        "the fingerprint of the data": record["dataset_fingerprint"],
        "the fingerprint of the partition": record["partition"]["fingerprint"],
        "the configuration": identity_of(record),
        "the method's file": method.file_hash,
        "the version of fedcli": version("fedcli"),
        "the version of PyTorch": torch.__version__,
    })  # fmt: skip


def _record_notes(record: Record, fed: Federation, listener: Listener) -> None:
    """Takes what the engine had to say in the last round into the record, and shows it."""
    round_index = record["rounds"][-1]["round"]
    for text in fed.engine.notes:
        record["engine"]["notes"].append({"round": round_index, "text": text})
        listener.note(text)
    fed.engine.notes.clear()


def _record_round(record: Record, setup: Setup, fed: Federation, seconds: float) -> None:
    """Brings the record up to date with its last round, which took so many seconds."""
    rounds = record["rounds"]
    buffer_floats = max(fed.traffic.down["buffers"], fed.traffic.up["buffers"])  # of batch normalisation, one way
    record["engine"]["clients_per_chunk"] = fed.engine.clients_per_chunk
    record["engine"]["processes"] = fed.engine.runner.processes.count
    record["load"][-1]["end"] = load_of_last_minute()
    record |= {  # at once, since an interruption may come at any time
        "cost": {
            "floats_down": rounds[-1]["floats_down"],
            "floats_up": rounds[-1]["floats_up"],
            "memory_floats": _memory_floats(setup.method, fed),
            "buffer_floats": round(buffer_floats / setup.config.cohort_size),
        },
        "summary": summarise(rounds, setup.selection),
        "seconds_total": record["seconds_total"] + seconds,
        "peak_bytes": max(record["peak_bytes"], autotune.peak_memory(fed.device)),
    }
    _drop_client_accuracies(record, setup.config.per_client_every)


def _memory_floats(method: Method, fed: Federation) -> int:
    """Returns the floats that a client holds between its rounds, as its method declares them, as a whole number."""
    with method.blamed(*NO_MISTAKES):
        return round(float(method.client_memory(fed.sizes)))


def _drop_client_accuracies(record: Record, interval: int) -> None:
    """Keeps accuracies of single clients in the last and the selected round, and in those that were asked for."""
    for earlier in record["rounds"][:-1]:
        is_asked_for = interval and (earlier["round"] + 1) % interval == 0
        is_selected = earlier["round"] == record["summary"]["selected_round"]
        if not is_selected and not is_asked_for:
            earlier.pop("client_accuracy", None)


def _states_of_next_cohort(state: Any, fed: Federation) -> Any:
    """Leaves out the states of clients that would not take part in the round after the last one."""
    stored = find_stored_states(state)
    if not stored:  # of a user's method it may be a dict or a plain tuple
        return state
    following = fed.cohort(fed.config.rounds).client_ids.tolist()
    return state._replace(**{name: states.select(following) for name, states in stored.items()})


class RoundResult(NamedTuple):
    """What a round gives."""

    state: Any  # the method's, after it
    entry: RoundEntry  # what the record says of it


def one_round(setup: Setup, fed: Federation, state: Any, cohort: Cohort) -> RoundResult:
    """Runs and tests one round."""
    config = setup.config
    is_last = cohort.round + 1 == config.rounds
    fed.start_round(keep_sent_models=config.drift_every > 0)
    start = time.perf_counter()
    refusing_draws = no_global_draws(f"run_round of '{setup.method.name}'", fed.device, f" in round {cohort.round + 1}")
    with refusing_draws, no_changes_in_place(setup.method, state, cohort.round):
        returned = setup.method.run_round(state, cohort, fed, setup.method_config)
    new_state, terms = _state_and_terms(returned, setup.method)
    refuse_non_finite(new_state, cohort.round)
    mean_terms = _mean_terms(terms, cohort)
    if fed.device.type == "cuda":
        torch.cuda.synchronize(fed.device)
    seconds = time.perf_counter() - start - sum(fed.seconds.values())
    tested = evaluation.NO_RESULTS
    if fed.is_tested(cohort.round):
        tested = evaluation.evaluate(fed, setup.method, new_state)
    entry = {
        "round": cohort.round,
        **tested,
        "terms": mean_terms,
        "floats_down": _floats_of_a_client(fed.traffic.down, setup.config.cohort_size),
        "floats_up": _floats_of_a_client(fed.traffic.up, setup.config.cohort_size),
        "seconds": {**fed.seconds, "aggregate": seconds},
    }
    if config.drift_every and (is_last or (cohort.round + 1) % config.drift_every == 0):
        entry["drift"] = drift.measure_drift(fed, cohort)
    _refuse_non_finite_numbers(entry, cohort.round)
    return RoundResult(new_state, entry)


def _state_and_terms(returned: Any, method: Method) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns the two that a method's `run_round` has returned; refuses anything else."""
    is_pair = type(returned) is tuple and len(returned) == 2
    if not is_pair or not isinstance(returned[1], dict):
        raise UserError(
            f"run_round of '{method.name}' returns no state and terms (got {type(returned).__name__}); end it "
            "with 'return state, terms', the terms a dict of tensors [K], or {}."
        )
    state, terms = returned
    return state, terms


def _floats_of_a_client(sent: dict[str, int], num_clients: int) -> int:
    """Returns the floats that one of so many clients is sent, or sends, as a mean and without buffers."""
    return round(sent["params"] / num_clients) + round(sent["other"] / num_clients)


def _mean_terms(terms: dict[str, torch.Tensor], cohort: Cohort) -> dict[str, float]:
    """Returns each term's mean over the clients, by their examples.

    Raises:
        NonFiniteLoss: One is infinite or NaN, also where the method has made it itself.
    """
    means = {}
    for name, values in terms.items():
        if not isinstance(values, torch.Tensor) or values.shape not in (cohort.weights.shape, ()):
            got = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
            raise UserError(
                f"the term '{name}' must have one value for each client of the cohort, [{len(cohort.weights)}] (got "
                f"{got}); reshape it in run_round."
            )
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


def _refuse_other_shapes(post: Post, returned: Model, given: Model) -> None:
    """Refuses a model from a step after the last round that lacks a tensor, or has one more or of another shape."""
    expected = _shapes_of(given)
    got = _shapes_of(returned)
    for name in expected | got:
        if got.get(name) != expected.get(name):
            raise UserError(
                f"the step '{post.name}' returns another model than it was given (got {got.get(name, 'no tensor')} for "
                f"'{name}', which has {expected.get(name, 'no place')}); return all its parameters and buffers."
            )


def _shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in {**model.params, **model.buffers}.items()}


def _apply_post(post: Post, setup: Setup, fed: Federation, state: Any) -> dict[str, Any]:
    """Applies the step after the last round to the global model and tests its classifier; the state stays."""
    start = time.perf_counter()
    model_before = Model(*setup.method.model(state))
    with post.blamed(*NO_MISTAKES), no_global_draws(f"the step '{post.name}'", fed.device):
        params, buffers, floats_up = post.apply(*model_before, fed, setup.post_config)
        floats_up = round(float(floats_up))
        _refuse_other_shapes(post, Model(params, buffers), model_before)
    refuse_non_finite((params, buffers), setup.config.rounds - 1)
    changed = dataclasses.replace(setup.method, model=lambda state: (params, buffers), prototypes=None)
    return {
        "name": post.name,
        "hash": post.file_hash,
        **evaluation.evaluate(fed, changed, state),
        "floats_up": floats_up,
        "seconds": time.perf_counter() - start,
    }
