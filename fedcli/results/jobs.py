"""Running planned runs, of a table or a grid: one after the other, several at once here, or on a Ray cluster."""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from fedcli.core.federation import NonFiniteLoss
from fedcli.errors import UserError
from fedcli.results.grids import GridPlan
from fedcli.results.reproduce import ENDED, PlannedRun, TablePlan, state_of
from fedcli.runs import rounds
from fedcli.runs import run as runs
from fedcli.runs.config import MAY_BE_FILES
from fedcli.runs.models import remove_models
from fedcli.runs.owner import InUse, owned
from fedcli.runs.records import RECORD, read_record
from fedcli.runs.signals import OutOfTime, end_with_parent, exit_code, interrupt_on_signals, time_left
from fedcli.userfiles import absolute, own_paths

POLL = 0.5  # seconds between two looks at the runs of other processes
RETRIES = 20  # of a run whose node or process dies
GRACE = 30.0  # seconds in which interrupted runs are to end, and the process of a lost node
PASSED_ON = ("FEDCLI_DATA",)  # environment variables that a run on another machine needs too
PROGRAM = "from fedcli.results.jobs import process; process()"


class Watch:
    """What the running of a table reports; this one keeps silent."""

    def begin(self, run: PlannedRun) -> None:
        """The run is about to start or to go on."""

    def advance(self, run: PlannedRun, rounds: float) -> None:
        """So many of its rounds are done."""

    def end(self, run: PlannedRun, record: dict[str, Any] | None, error: str) -> None:
        """The run has finished, or has failed with `error`; there may be no record then."""


class _RecordsOnly(Watch):
    """Passes on what it is told, and removes the models of a run that has ended."""

    def __init__(self, watch: Watch):
        self.begin, self.advance, self._end = watch.begin, watch.advance, watch.end

    def end(self, run: PlannedRun, record: dict[str, Any] | None, error: str) -> None:
        if (run.folder / RECORD).is_file() and state_of(read_record(run.folder)) in ENDED:
            remove_models(run.folder)
        self._end(run, record, error)


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
    plan: TablePlan | GridPlan, watch: Watch, jobs: int = 1, cluster: Cluster | None = None, records_only: bool = False
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
    watch = _RecordsOnly(watch) if records_only else watch
    with owned(plan.folder):
        if cluster is not None:
            return on_cluster(plan.to_run, watch, cluster)
        return _one_by_one(plan.to_run, watch) if jobs == 1 else _side_by_side(plan.to_run, watch, jobs)


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


def _one_by_one(todo: Sequence[PlannedRun], watch: Watch) -> dict[Path, str]:
    errors = {}
    for run in todo:
        watch.begin(run)
        record, error = None, ""
        try:
            record = make(**_about(run), progress=_Relay(run, watch))
        except Exception as raised:  # whatever it is, the other runs go on
            error = errors[run.folder] = _first_line(raised)
        watch.end(run, record, error)
    return errors


def make(
    method: str, folder: str, given: dict[str, Any], files: list[str] | None, progress: rounds.Listener | None = None
) -> dict[str, Any]:
    """Makes a planned run in this process and returns its record.

    Args:
        method: Its name, or the path of its file.
        folder: Where it begins, or goes on.
        given: The options to begin it with.
        files: The user's that it needs to go on; None where it begins.
        progress: Told how it goes on.

    Raises:
        UserError: If it cannot start or go on.
        NonFiniteLoss: If it diverges.
    """
    if files is None:
        return runs.run(method, out=folder, progress=progress, **given).record
    return runs.resume(folder, method=files, progress=progress).record


def process() -> None:
    """Makes the run that this program was started for; what went wrong is its last line."""
    interrupt_on_signals()
    end_with_parent()
    try:
        make(**json.loads(sys.argv[1]))
    except KeyboardInterrupt as error:
        sys.stderr.write("interrupted; the same command goes on.\n")
        sys.exit(exit_code(error))
    except Exception as error:
        sys.exit(_first_line(error))


def _about(run: PlannedRun) -> dict[str, Any]:
    """What `make` needs to know of a run."""
    goes_on = runs.read_begun(run.folder) is not None
    files = own_paths([run.method, *run.setup.values().values()]) if goes_on else None
    return {"method": run.method, "folder": str(run.folder), "given": run.given, "files": files}


def _side_by_side(todo: Sequence[PlannedRun], watch: Watch, jobs: int) -> dict[Path, str]:
    """Runs in processes of their own, so many at once; what interrupts this one interrupts them all."""
    waiting, errors, slots = list(todo)[::-1], {}, list(range(jobs))
    active: dict[Path, tuple[PlannedRun, subprocess.Popen, IO[str], int]] = {}
    with ExitStack() as outputs:
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    run, output = waiting.pop(), outputs.enter_context(tempfile.TemporaryFile("w+"))
                    watch.begin(run)
                    slot = slots.pop(0)
                    active[run.folder] = run, _launch(run, jobs, output, device_of(slot)), output, slot
                time.sleep(POLL)
                if time_left() <= 0:
                    raise OutOfTime
                for folder, (run, process, output, slot) in list(active.items()):
                    ended = process.poll() is not None
                    record = read_record(folder) if (folder / RECORD).is_file() else None
                    watch.advance(run, len(record["rounds"]) if record else 0)
                    if ended:
                        del active[folder]
                        slots.append(slot)
                        if process.returncode:
                            errors[folder] = _last_line(output)
                        watch.end(run, record, errors.get(folder, ""))
        finally:
            for _, process, *_ in active.values():
                process.send_signal(signal.SIGTERM)  # a shell script's background processes ignore SIGINT
            for _, process, *_ in active.values():
                process.wait()
    return errors


def on_cluster(todo: Sequence[PlannedRun], watch: Watch, cluster: Cluster) -> dict[Path, str]:
    """Runs as tasks of Ray, each in its folder on storage that all nodes share; a task whose node dies is put again.

    Args:
        todo: The runs.
        watch: Told how they go on, by their records.
        cluster: Where, and what each takes of a node.

    Returns:
        The errors of the runs that failed, by their folders.
    """
    import ray

    begins_here = not ray.is_initialized()
    if begins_here:
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own in its place
    takes = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus}
    on_a_node = ray.remote(task).options(**takes, max_retries=RETRIES, scheduling_strategy="SPREAD")
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    waiting, errors, begun = {}, {}, {}
    try:
        for run in todo:
            given = {name: absolute(value) if name in MAY_BE_FILES else value for name, value in run.given.items()}
            waiting[on_a_node.remote(absolute(run.method), str(run.folder.resolve()), given, passed_on)] = run
        changes = {run.folder: _last_change(run.folder) for run in todo}
        while waiting:
            ended, _ = ray.wait(list(waiting), timeout=POLL)
            if time_left() <= 0:
                raise OutOfTime
            for reference, run in list(waiting.items()):
                changed = _last_change(run.folder)
                if reference not in ended and changed == changes[run.folder]:
                    continue
                changes[run.folder] = changed
                if run.folder not in begun:
                    begun[run.folder] = watch.begin(run)
                record = read_record(run.folder) if changed else None
                watch.advance(run, len(record["rounds"]) if record else 0)
                if reference in ended:
                    del waiting[reference]
                    if error := _error(reference):
                        errors[run.folder] = error
                    watch.end(run, record, error)
    finally:
        for reference in waiting:
            ray.cancel(reference)
        if waiting:
            ray.wait(list(waiting), num_returns=len(waiting), timeout=GRACE)
        if begins_here:
            ray.shutdown()
    return errors


def task(method: str, folder: str, given: dict[str, Any], environment: dict[str, str]) -> str:
    """A run as a node of a cluster makes it, from the beginning or from where it was lost; returns what was wrong."""
    os.environ.update(environment)
    end = time.monotonic() + GRACE
    while True:
        try:
            runs.run(method, out=folder, continue_=True, **given)
            return ""
        except InUse as error:  # by its process on the node that was lost, which has begun it or is about to end
            if time.monotonic() > end:
                return str(error)
            time.sleep(POLL)
        except Exception as error:
            return _first_line(error)


def _error(reference: Any) -> str:
    """What was wrong with a task that has ended."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:  # its process has died too often
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


def _launch(run: PlannedRun, jobs: int, output: IO[str], device: dict[str, str]) -> subprocess.Popen:
    """The process of a run, which shares the cores with the others; what it says of errors goes to `output`."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, json.dumps(_about(run))],
        env={"OMP_NUM_THREADS": threads, **os.environ, **device, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,  # see `end_with_parent`
        stdout=subprocess.DEVNULL,
        stderr=output,
        start_new_session=True,  # Ctrl-C comes from here, once
    )


def _last_line(output: IO[str]) -> str:
    output.seek(0)
    return (output.read().strip().splitlines() or ["it ended without a word"])[-1]
