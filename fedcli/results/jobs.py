"""Running planned runs, of a table or a grid: one after the other, several at once here, or on a Ray cluster.

One loop starts them, follows those in other processes by the records that they write, and keeps what was wrong.
"""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedcli.core.federation import NonFiniteLoss
from fedcli.data.files import one_line
from fedcli.errors import UserError
from fedcli.results.plans import Plan, PlannedRun
from fedcli.runs import run as runs
from fedcli.runs.checkpoints import CHECKPOINT, PREVIOUS, SELECTED, clear
from fedcli.runs.lock import InUse, locked
from fedcli.runs.records import read_record
from fedcli.runs.rounds import Listener
from fedcli.runs.signals import OutOfTime, end_with_parent, interrupt_on_signals, time_left
from fedcli.runs.trackers import Loggers
from fedcli.userfiles import absolute, own_paths

POLL_SECONDS = 1.0  # between two looks at the records of other processes
GRACE_SECONDS = 30.0  # in which interrupted runs are to end, and the process of a lost node
RETRIES = 20  # of a run whose node dies
Start = Callable[[PlannedRun], futures.Future]  # starts a run; what was wrong is the result, empty if nothing was


class Watch:
    """What the running of a table reports; this one keeps silent."""

    log: Any = None  # loggers, which hear each run here

    def begin(self, run: PlannedRun) -> None:
        """The run is about to start or to go on; this is not told of runs on a cluster."""

    def advance(self, run: PlannedRun, rounds: int) -> None:
        """So many of its rounds are done."""

    def note(self, run: PlannedRun, text: str) -> None:
        """Something has happened in the run that the user has to know."""

    def end(self, run: PlannedRun, record: dict[str, Any] | None, error: str) -> None:
        """The run has finished, or has failed with `error`; there may be no record then."""


def execute(
    plan: Plan, watch: Watch, jobs: int = 1, cluster: dict | None = None, records_only: bool = False
) -> dict[Path, str]:
    """Runs what is to do, and goes on past a run that fails.

    Args:
        plan: The table, or the grid.
        watch: Told how it goes on.
        jobs: Runs at once; each of several is a process of its own.
        cluster: Where they run instead: the `address` of Ray's, None for the one that it finds, or a new one here; and
            the `num_cpus` and `num_gpus` that each takes.
        records_only: Keep no models of a run that has ended.

    Returns:
        The errors of the runs that failed, by their folders.

    Raises:
        InUse: If another process runs what is in the plan's folder.
    """
    here = _processes(jobs) if jobs > 1 else nullcontext(partial(_run_here, watch))
    starter, at_once = (here, jobs) if cluster is None else (_tasks(**cluster), len(plan.runs))
    errors: dict[Path, str] = {}
    with locked(plan.folder) if len(plan.runs) > 1 else nullcontext(), starter as start:  # a run locks its own folder
        waiting, active = plan.to_run, {}
        while waiting or active:
            while waiting and len(active) < at_once:
                run = waiting.pop(0)
                if cluster is None:  # Ray begins it once a node is free
                    watch.begin(run)
                active[start(run)] = run
            ended, _ = futures.wait(active, POLL_SECONDS, futures.FIRST_COMPLETED)
            for future, run in list(active.items()):
                record = None
                with suppress(UserError):  # there is none yet, or it is damaged, as the run's error says
                    record = read_record(run.folder)
                if future not in ended:
                    watch.advance(run, len(record["rounds"]) if record else 0)
                    continue
                del active[future]
                error = _error_text(future.exception()) if future.exception() else future.result()
                if error:
                    errors[run.folder] = error
                if records_only and record and runs.has_ended(record):
                    clear(run.folder, CHECKPOINT, PREVIOUS, SELECTED, at_rest=True)
                watch.end(run, record, error)
            if (waiting or active) and time_left() <= 0:
                raise OutOfTime
    return errors


def _run_here(watch: Watch, run: PlannedRun) -> futures.Future:
    """Runs it in this process; returns a completed future."""
    progress, future = Listener(), futures.Future()
    progress.round = lambda entry: watch.advance(run, entry["round"] + 1)
    progress.note = partial(watch.note, run)
    future.set_result(task({}, *_arguments(run), progress=Loggers(progress, watch.log)))
    return future


def _arguments(run: PlannedRun) -> tuple[str, Path, dict[str, Any]]:
    """What `task` is given of a run, with paths that hold on any node."""
    options = {name: absolute(value) if isinstance(value, str) else value for name, value in run.given.items()}
    return absolute(run.method), run.folder.resolve(), options


def task(environment: dict, method: str, folder: Path, options: dict, progress: Listener | None = None) -> str:
    """Makes a run in this process, from its beginning or its last checkpoint; returns what was wrong, in a line.

    The variables of `environment` are set first.
    """
    os.environ.update(environment)
    end = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            if runs.read_begun(folder) is None:
                runs.run(method, out=folder, continue_=True, progress=progress, **options)
            else:  # perhaps by hand, with more than a table needs
                [(setup, _)] = runs.plan(method, out=folder, **options)
                files = own_paths([method, *setup.values().values()])
                runs.resume(folder, method=files, progress=progress, skip_ended=True)
            return ""
        except InUse as error:  # by its process on the node that was lost, which has begun it or is about to end
            if time.monotonic() > end:
                return str(error)
            time.sleep(POLL_SECONDS)
        except Exception as error:  # whatever it is, the other runs go on; another process may not know its class
            return _error_text(error)


def _error_text(error: BaseException) -> str:
    """What is wrong, in a line; it begins with the kind of an error that does not say so itself."""
    return str(error) if isinstance(error, UserError | NonFiniteLoss) else f"{type(error).__name__}: {one_line(error)}"


@contextmanager
def _processes(jobs: int) -> Iterator[Start]:
    """Starts runs in processes of this machine, each with the next CUDA device; in the end interrupts those left."""
    slots: dict[int, futures.Future] = {}

    def start(run: PlannedRun) -> futures.Future:
        slot = next(slot for slot in range(jobs) if slot not in slots or slots[slot].done())
        # An executor for each run, since the death of a process breaks its executor.
        executor = futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin_process, (jobs,))
        slots[slot] = executor.submit(task, device_of(slot), *_arguments(run))
        executor.shutdown(wait=False)
        return slots[slot]

    try:
        yield start
    finally:
        for process in multiprocessing.active_children():
            process.terminate()  # a shell script's background processes ignore SIGINT
        futures.wait(slots.values())


def _begin_process(jobs: int) -> None:
    """Begins a process that shares the cores with others, says nothing, and ends with the process that started it."""
    os.setsid()  # Ctrl-C comes from there, once
    interrupt_on_signals()
    end_with_parent()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


def device_of(slot: int) -> dict[str, str]:
    """The environment in which the runs of a slot have one CUDA device, each slot the next; empty without any."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = seen.split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if seen else {}


@contextmanager
def _tasks(address: str | None, **takes: float) -> Iterator[Start]:
    """Starts runs as tasks of Ray, in folders that all nodes share; a task whose node dies is put again."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, handler)  # Ray has put its own in its place
    on_a_node = ray.remote(task).options(**takes, max_retries=RETRIES, scheduling_strategy="SPREAD")
    environment = {name: value for name, value in os.environ.items() if name == "FEDCLI_DATA"}
    references = []

    def start(run: PlannedRun) -> futures.Future:
        references.append(on_a_node.remote(environment, *_arguments(run)))
        return references[-1].future()

    try:
        yield start
    finally:
        for reference in references:
            ray.cancel(reference)
        ray.wait(references, num_returns=len(references), timeout=GRACE_SECONDS)
        ray.shutdown()
