"""Running planned runs: one after the other, several at once here, or on a Ray cluster.

One loop starts them, follows those in other processes by their records, and keeps the errors.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fedcli.arguments import convert_jobs
from fedcli.errors import NonFiniteLoss, UserError, first_line
from fedcli.results.plans import Plan, PlannedRun
from fedcli.run_files import CHECKPOINT, PREVIOUS, SELECTED
from fedcli.runs import begin, resume
from fedcli.runs.checkpoints import remove_files
from fedcli.runs.cores import allowed_cores
from fedcli.runs.lock import InUse, locked
from fedcli.runs.loggers import Loggers
from fedcli.runs.origins import GivenOptions
from fedcli.runs.record import has_ended, read_record
from fedcli.runs.rounds import Listener
from fedcli.runs.schema import Record, RoundEntry
from fedcli.runs.signals import OutOfTime, end_with_parent, interrupt_on_signals, time_left
from fedcli.userfiles import make_absolute, user_paths

POLL_SECONDS = 1.0  # between two looks at the records of other processes
LOCK_POLLS = 30  # of a run's folder, in which the process of a lost node is to end
CANCEL_SECONDS = 30.0  # in which interrupted tasks of Ray are to end
RETRIES = 20  # of a run whose node dies
Start = Callable[[PlannedRun], futures.Future]  # starts a run, whose result is its error, empty for none


class PlanListener:
    """A listener that is told how a plan goes on; this one keeps silent."""

    def begin(self, run: PlannedRun) -> None:
        """Is called when a run starts or goes on, but not of runs on a cluster."""

    def advance(self, run: PlannedRun, rounds: int) -> None:
        """Is called when a run has done `rounds` rounds."""

    def note(self, run: PlannedRun, text: str) -> None:
        """Is called with what the user has to know of a run."""

    def end(self, run: PlannedRun, record: Record | None, error: str) -> None:
        """Is called when a run has finished, or has failed with `error` and perhaps without a record."""


class RayCluster(NamedTuple):
    """A Ray cluster that runs a plan.

    Attributes:
        address: The address of the cluster; None for any that is there, or a new one on this machine.
        num_cpus: The number of CPUs that each run takes.
        num_gpus: The number of GPUs that each run takes.
    """

    address: str | None
    num_cpus: float
    num_gpus: float


def execute(
    plan: Plan, listener: PlanListener, jobs: int = 1, cluster: RayCluster | None = None, *,
    loggers: Any = None, records_only: bool = False,
) -> dict[Path, str]:  # fmt: skip
    """Runs the runs of a plan that need running, and goes on past a run that fails.

    Args:
        plan: The plan.
        listener: The listener that is told how the plan goes on.
        jobs: The number of runs at once; if there are several, each is a process of its own.
        cluster: The Ray cluster that runs them instead; None to run them on this machine.
        loggers: The loggers of each run in this process, as `fedcli.runs.loggers.Loggers` takes them.
        records_only: Whether to keep no models of a run that has ended.

    Returns:
        The errors of failed runs, by their folders.

    Raises:
        UserError: If the number of runs at once is none.
        InUse: If another process uses the plan's folder.
        OutOfTime: If the time limit was reached.
    """
    jobs = convert_jobs(jobs)
    at_once = jobs if cluster is None else len(plan.runs)  # of which Ray begins one whenever a node is free
    lock = locked(plan.folder) if len(plan.runs) > 1 else nullcontext()  # a single run locks its own folder
    with lock, _starting_runs(listener, jobs, cluster, loggers) as start:
        execution = _Execution(plan, listener, start, at_once)
        while True:
            execution.start_runs()
            if not execution.active:
                return execution.errors
            ended = futures.wait(execution.active, POLL_SECONDS, futures.FIRST_COMPLETED).done
            execution.follow(ended, records_only=records_only)
            goes_on = execution.waiting or execution.active
            if goes_on and time_left() <= 0:
                raise OutOfTime


class _Execution:
    """A plan while its runs go on.

    Attributes:
        waiting: The runs that have not started.
        active: The runs that go on, by their futures.
        errors: The errors of the runs that have failed, by their folders.
    """

    def __init__(self, plan: Plan, listener: PlanListener, start: Start, at_once: int):
        """Prepares the execution of a plan.

        Args:
            plan: The plan.
            listener: The listener that is told how the plan goes on.
            start: Starts a run.
            at_once: The number of runs that may go on at once.
        """
        self.waiting = plan.startable_runs
        self.active: dict[futures.Future, PlannedRun] = {}
        self.errors: dict[Path, str] = {}
        self._plan = plan
        self._listener = listener
        self._start = start
        self._at_once = at_once

    def start_runs(self) -> None:
        """Starts as many of the waiting runs as may go on beside the active ones."""
        for run in [*self.waiting]:
            if len(self.active) < self._at_once and self._plan.may_start(run, self.active.values()):
                self.waiting.remove(run)
                self.active[self._start(run)] = run

    def follow(self, ended: set[futures.Future], *, records_only: bool) -> None:
        """Tells the listener how far the active runs are, and removes those that have ended."""
        for future, run in list(self.active.items()):
            record = _read_record_so_far(run.folder)
            if future not in ended:
                self._listener.advance(run, len(record["rounds"]) if record else 0)
                continue
            del self.active[future]
            exception = future.exception()
            error = future.result() if exception is None else _describe_error(exception)
            if error:
                self.errors[run.folder] = error
            if records_only and record and has_ended(record):
                remove_files(run.folder, [CHECKPOINT, PREVIOUS, SELECTED])
            self._listener.end(run, record, error)


@contextmanager
def _starting_runs(listener: PlanListener, jobs: int, cluster: RayCluster | None, loggers: Any) -> Iterator[Start]:
    """Yields the function that starts a run where it is to be trained; for the arguments see `execute`.

    The listener is not told when Ray begins a run, since nobody tells this process.
    """
    if cluster is not None:
        with _starting_ray_tasks(cluster) as start:
            yield start
    elif jobs > 1:
        with _starting_processes(jobs) as start:
            yield _announce_begin(listener, start)
    else:
        yield _announce_begin(listener, partial(_run_here, listener, loggers))


def _announce_begin(listener: PlanListener, start: Start) -> Start:
    """Returns a function that tells the listener that a run begins, and then starts it by `start`."""

    def begin_and_start(run: PlannedRun) -> futures.Future:
        listener.begin(run)
        return start(run)

    return begin_and_start


def _read_record_so_far(folder: Path) -> Record | None:
    """Reads the record of a run that may go on.

    Returns:
        The record; None if there is none yet, or if it is damaged, as the error of the run says.
    """
    try:
        return read_record(folder)
    except UserError:
        return None


def _run_here(listener: PlanListener, loggers: Any, run: PlannedRun) -> futures.Future:
    """Runs a run in this process; returns a completed future."""
    progress = Loggers(_RunReporter(listener, run), loggers)
    future: futures.Future = futures.Future()
    future.set_result(run_task({}, _make_task(run), progress))
    return future


class _RunReporter(Listener):
    """Tells the listener of a plan how a run in this process goes on."""

    def __init__(self, listener: PlanListener, run: PlannedRun):
        """Takes the listener of the plan, and the run."""
        self.listener = listener
        self.run = run

    def round(self, entry: RoundEntry) -> None:
        """Tells how many rounds are done."""
        self.listener.advance(self.run, entry["round"] + 1)

    def note(self, text: str) -> None:
        """Passes on what the user has to know."""
        self.listener.note(self.run, text)


class Task(NamedTuple):
    """A run as another process is told of it, with paths that hold on any node.

    Attributes:
        method_source: The name of the method, or the path of its file.
        folder: The folder of the run.
        given: The options of the run.
    """

    method_source: str
    folder: Path
    given: GivenOptions


def _make_task(run: PlannedRun) -> Task:
    given = run.given
    values = {name: make_absolute(value) for name, value in given.values.items()}
    tuned = None if given.tuned is None else os.path.abspath(given.tuned)
    given = replace(given, values=values, tuned=tuned)
    return Task(make_absolute(run.method_source), run.folder.resolve(), given)


def run_task(environment: dict[str, str], task: Task, progress: Listener | None = None) -> str:
    """Starts or resumes a run in this process.

    Args:
        environment: Environment variables to set before.
        task: The run.
        progress: The listener of the run; None for none.

    Returns:
        The error of the run in a line; empty if it has finished.
    """
    os.environ.update(environment)
    polls_left = LOCK_POLLS
    while True:
        try:
            _start_or_resume(task, progress)
            return ""
        except InUse as error:  # by its process on a lost node, which is about to end
            polls_left -= 1
            if polls_left == 0:
                return _describe_error(error)
            time.sleep(POLL_SECONDS)
        except Exception as error:  # the other runs go on; another process may not know its class
            return _describe_error(error)


def _start_or_resume(task: Task, progress: Listener | None) -> None:
    """Starts a run, or goes on with it where it has begun, perhaps by hand and with more than a table needs."""
    if begin.read_begun(task.folder) is None:
        begin.run_method(task.method_source, task.given, out=task.folder, continue_=True, progress=progress)
        return
    [resolved] = begin.resolve_runs(task.method_source, task.given, out=task.folder)
    files = user_paths([task.method_source, *resolved.setup.all_options().values()])
    resume.resume(task.folder, files=files, progress=progress, skip_ended=True)


def _describe_error(error: BaseException) -> str:
    """Describes an error in a line, which begins with the error's type unless the message says all."""
    if isinstance(error, UserError | NonFiniteLoss):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def _starting_processes(jobs: int) -> Iterator[Start]:
    """Yields the function that starts a run in a process with the next CUDA device; in the end interrupts the rest."""
    slots: dict[int, futures.Future] = {}
    started: set[multiprocessing.process.BaseProcess] = set()

    def start(run: PlannedRun) -> futures.Future:
        free_slots = [slot for slot in range(jobs) if slot not in slots or slots[slot].done()]
        slot = free_slots[0]
        # An executor for each run, since the death of a process breaks its executor.
        executor = futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin_process, (jobs,))
        other_processes = {*multiprocessing.active_children()}  # also those that the user's program has
        with _without_main():
            slots[slot] = executor.submit(run_task, choose_device(slot), _make_task(run))
        started.update({*multiprocessing.active_children()} - other_processes)
        executor.shutdown(wait=False)
        return slots[slot]

    try:
        yield start
    finally:
        for process in started.intersection(multiprocessing.active_children()):
            process.terminate()  # background processes of a shell script ignore SIGINT
        futures.wait(slots.values())
        for process in started:
            # It ends when its executor says so, which this process could no longer do while it ends itself.
            process.join()


@contextmanager
def _without_main() -> Iterator[None]:
    """Keeps a process that is started from importing the user's script, which would start all runs again.

    A run needs nothing of the script; only one with `if __name__ == "__main__"` around its calls would bear it.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _begin_process(jobs: int) -> None:
    """Begins a silent process with its share of the cores, which ends with the process that started it."""
    os.setsid()  # Ctrl-C comes from there, once
    interrupt_on_signals()
    end_with_parent()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    # Python takes PyTorch apart for half a second, for which the next run or the table would wait.
    atexit.register(os._exit, 0)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, allowed_cores() // jobs))


def choose_device(slot: int) -> dict[str, str]:
    """Chooses the CUDA device of a slot's runs: each slot has the next one.

    Returns:
        The environment variables that choose it; empty if there are no CUDA devices.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if not devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]}


@contextmanager
def _starting_ray_tasks(cluster: RayCluster) -> Iterator[Start]:
    """Yields the function that starts a run as a task of Ray, in a folder that all nodes share.

    A task whose node dies starts again.
    """
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, handler)  # which Ray has replaced
    remote_task = ray.remote(run_task).options(
        num_cpus=cluster.num_cpus, num_gpus=cluster.num_gpus, max_retries=RETRIES, scheduling_strategy="SPREAD"
    )
    environment = {name: value for name, value in os.environ.items() if name == "FEDCLI_DATA"}
    references = []

    def start(run: PlannedRun) -> futures.Future:
        references.append(remote_task.remote(environment, _make_task(run)))
        return references[-1].future()

    try:
        yield start
    finally:
        for reference in references:
            ray.cancel(reference)
        ray.wait(references, num_returns=len(references), timeout=CANCEL_SECONDS)
        ray.shutdown()
