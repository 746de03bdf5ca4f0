"""Running planned runs, of a table or a grid: one after the other, several at once here, or on a Ray cluster."""

import importlib.util
import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedcli.core.federation import NonFiniteLoss
from fedcli.errors import UserError
from fedcli.results.frame import ENDED, state_of
from fedcli.results.plans import Plan, PlannedRun
from fedcli.runs import rounds
from fedcli.runs import run as runs
from fedcli.runs.config import MAY_BE_FILES
from fedcli.runs.lock import InUse, locked
from fedcli.runs.models import remove_models
from fedcli.runs.records import RECORD, read_record
from fedcli.runs.signals import OutOfTime, end_with_parent, interrupt_on_signals, time_left
from fedcli.userfiles import absolute, own_paths

POLL = 0.5  # seconds between two looks at the runs of other processes
RETRIES = 20  # of a run whose node or process dies
GRACE = 30.0  # seconds in which interrupted runs are to end, and the process of a lost node
PASSED_ON = ("FEDCLI_DATA",)  # environment variables that a run on another machine needs too
Start = Callable[..., futures.Future]  # starts `task` in another process, given what it takes


class Watch:
    """What the running of a table reports; this one keeps silent."""

    def begin(self, run: PlannedRun) -> None:
        """The run is about to start or to go on."""

    def advance(self, run: PlannedRun, rounds: float) -> None:
        """So many of its rounds are done."""

    def end(self, run: PlannedRun, record: dict[str, Any] | None, error: str) -> None:
        """The run has finished, or has failed with `error`; there may be no record then."""


class Cluster(NamedTuple):
    """Where Ray runs what it is given."""

    address: str | None  # None for the cluster that Ray finds, or a new one on this machine
    cpus: float = 1.0  # of a node, for each run
    gpus: float = 0.0


def find_cluster(on: str, cpus: float | None = None, gpus: float | None = None) -> Cluster:
    """Reads `--on` and what a run takes.

    Raises:
        UserError: If it is not Ray's, or Ray is not installed.
    """
    name, _, address = on.partition(":")
    if name != "ray":
        raise UserError(f"--on must be ray or ray:ADDRESS (got '{on}'); write --on ray.")
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray needs Ray (got no module 'ray'); pip install 'fedcli[ray]' brings it.")
    for flag, value in (("--cpus-per-run", cpus), ("--gpus-per-run", gpus)):
        if value is not None and (value < 0 or (value > 1 and value != int(value))):
            raise UserError(f"{flag} must be a part of one or a whole number (got {value:g}); write 0.25, 1 or 2.")
    return Cluster(address or None, 1.0 if cpus is None else cpus, gpus or 0.0)


def execute(
    plan: Plan, watch: Watch, jobs: int = 1, cluster: Cluster | None = None, records_only: bool = False
) -> dict[Path, str]:
    """Runs what is to do, and goes on past a run that fails.

    Args:
        plan: The table, or the grid.
        watch: Told how it goes on.
        jobs: Runs at once; each of several is a process of its own.
        cluster: Where they run instead.
        records_only: Keep no models of a run that has ended.

    Returns:
        The errors of the runs that failed, by their folders.

    Raises:
        UserError: Another process runs what is in the plan's folder.
    """
    with locked(plan.folder):
        if cluster is None and jobs == 1:
            return _one_by_one(plan.to_run, watch, records_only)
        with _processes(jobs) if cluster is None else _tasks(cluster) as start:
            return _follow(plan.to_run, watch, start, jobs if cluster is None else math.inf, records_only)


class _Relay(rounds.Listener):
    """Passes on to a `Watch` how a run in this process goes on."""

    def __init__(self, run: PlannedRun, watch: Watch):
        self.run, self.watch, self.done, self.part = run, watch, 0, 0

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        self.expected, self.done = max(samples_per_round, 1), first_round
        self.watch.advance(self.run, first_round)

    def samples(self, count: int) -> None:
        self.part += count
        self.watch.advance(self.run, self.done + min(self.part / self.expected, 1))

    def round(self, entry: dict[str, Any]) -> None:
        self.done, self.part = entry["round"] + 1, 0
        self.watch.advance(self.run, self.done)


def _one_by_one(todo: Sequence[PlannedRun], watch: Watch, records_only: bool) -> dict[Path, str]:
    errors = {}
    for run in todo:
        watch.begin(run)
        record, error = None, ""
        try:
            record = make(*_given(run), records_only, _Relay(run, watch))
        except Exception as raised:  # whatever it is, the other runs go on
            error = errors[run.folder] = _first_line(raised)
        watch.end(run, record, error)
    return errors


def make(
    method: str,
    folder: Path,
    given: dict[str, Any],
    files: list[str] | None,
    records_only: bool,
    progress: rounds.Listener | None = None,
) -> dict[str, Any]:
    """Makes a planned run in this process and returns its record.

    Args:
        method: Its name, or the path of its file.
        folder: Where it begins, or goes on.
        given: The options to begin it with.
        files: The user's that it needs to go on; None where it begins.
        records_only: Keep no models of it once it has ended.
        progress: Told how it goes on.

    Raises:
        UserError: If it cannot start or go on.
        NonFiniteLoss: If it diverges.
    """
    try:
        if files is not None:
            return runs.resume(folder, method=files, progress=progress).record
        return runs.run(method, out=folder, continue_=True, progress=progress, **given).record
    finally:
        if records_only and (folder / RECORD).is_file() and state_of(read_record(folder)) in ENDED:
            remove_models(folder)


def _given(run: PlannedRun) -> tuple[str, Path, dict[str, Any], list[str] | None]:
    """What `make` is given of a run, with paths that hold on any node."""
    given = {name: absolute(value) if name in MAY_BE_FILES else value for name, value in run.given.items()}
    goes_on = runs.read_begun(run.folder) is not None
    files = own_paths([run.method, *run.setup.values().values()]) if goes_on else None
    return absolute(run.method), run.folder.resolve(), given, files and [absolute(file) for file in files]


def _follow(
    todo: Sequence[PlannedRun], watch: Watch, start: Start, at_once: float, records_only: bool
) -> dict[Path, str]:
    """Starts runs in other processes, so many at once, and follows them by their records."""
    waiting, active, begun, errors = list(todo)[::-1], {}, set(), {}
    changes = {run.folder: _last_change(run.folder) for run in todo}
    while waiting or active:
        while waiting and len(active) < at_once:
            run = waiting.pop()
            active[start(*_given(run), records_only)] = run
        futures.wait(active, POLL, futures.FIRST_COMPLETED)
        if time_left() <= 0:
            raise OutOfTime
        for future, run in list(active.items()):
            change, ended = _last_change(run.folder), future.done()
            news = ended or change != changes[run.folder]
            changes[run.folder] = change
            if run.folder not in begun and (news or at_once < math.inf):  # a cluster starts them when a node is free
                begun.add(run.folder)
                watch.begin(run)
            if news:
                record = read_record(run.folder) if change else None
                watch.advance(run, len(record["rounds"]) if record else 0)
            if ended:
                del active[future]
                error = _first_line(future.exception()) if future.exception() else future.result()
                if error:
                    errors[run.folder] = error
                watch.end(run, record, error)
    return errors


@contextmanager
def _processes(jobs: int) -> Iterator[Start]:
    """Starts runs in processes of this machine, each with the next CUDA device; in the end interrupts those left."""
    others = multiprocessing.active_children()
    slots: list[futures.Future | None] = [None] * jobs

    def start(*given: Any) -> futures.Future:
        slot = next(slot for slot, future in enumerate(slots) if future is None or future.done())
        # An executor for each run, since the death of a process breaks its executor.
        executor = futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin_process, (jobs,))
        slots[slot] = executor.submit(task, device_of(slot), *given)
        executor.shutdown(wait=False)
        return slots[slot]

    try:
        yield start
    finally:
        for process in set(multiprocessing.active_children()).difference(others):
            process.terminate()  # a shell script's background processes ignore SIGINT
        futures.wait(filter(None, slots))


def _begin_process(jobs: int) -> None:
    """Begins a process that shares the cores with others, says nothing, and ends with the process that started it."""
    os.setsid()  # Ctrl-C comes from there, once
    end_with_parent()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


@contextmanager
def _tasks(cluster: Cluster) -> Iterator[Start]:
    """Starts runs as tasks of Ray, in folders that all nodes share; a task whose node dies is put again."""
    import ray

    begins_here = not ray.is_initialized()
    if begins_here:
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own in its place
    takes = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus}
    on_a_node = ray.remote(task).options(**takes, max_retries=RETRIES, scheduling_strategy="SPREAD")
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    references = []

    def start(*given: Any) -> futures.Future:
        references.append(on_a_node.remote(environment, *given))
        return references[-1].future()

    try:
        yield start
    finally:
        for reference in references:
            ray.cancel(reference)
        if references:
            ray.wait(references, num_returns=len(references), timeout=GRACE)
        if begins_here:
            ray.shutdown()


def task(environment: dict[str, str], *given: Any) -> str:
    """A run as another process makes it, from the beginning or from where it was lost; returns what was wrong."""
    os.environ.update(environment)
    interrupt_on_signals()
    end = time.monotonic() + GRACE
    while True:
        try:
            make(*given)
            return ""
        except InUse as error:  # by its process on the node that was lost, which has begun it or is about to end
            if time.monotonic() > end:
                return str(error)
            time.sleep(POLL)
        except KeyboardInterrupt:
            return "interrupted; the same command goes on."
        except Exception as error:
            return _first_line(error)


def _first_line(error: Exception) -> str:
    """What is wrong, in a line; it begins with the kind of an error that does not say so itself."""
    kind = type(error).__name__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines and isinstance(error, UserError | NonFiniteLoss) else ": ".join([kind, *lines[:1]])


def _last_change(folder: Path) -> int:
    """When the record in a folder was written last; 0 where there is none."""
    try:
        return (folder / RECORD).stat().st_mtime_ns
    except OSError:
        return 0


def device_of(slot: int) -> dict[str, str]:
    """The environment in which the runs of a slot have one CUDA device, each slot the next; empty without any."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = seen.split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if seen else {}
