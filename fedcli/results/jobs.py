"""Running what a plan of a paper's table, or of a grid, lacks: one run after the other, or several at once."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from fedcli.registry import own_paths
from fedcli.results.grids import GridPlan
from fedcli.results.reproduce import PlannedRun, TablePlan
from fedcli.runs import run as runs
from fedcli.runs.config import flags_of
from fedcli.runs.owner import owned
from fedcli.runs.records import RECORD, read_record

POLL = 0.5  # seconds between two looks at the runs of other processes
PROGRAM = """
from runpy import run_module
from fedcli.runs.signals import end_with_parent
end_with_parent()
run_module("fedcli", run_name="__main__", alter_sys=True)
"""


class Watch:
    """What the running of a table reports; this one keeps silent."""

    def begin(self, run: PlannedRun) -> None:
        """The run is about to start or to go on."""

    def advance(self, run: PlannedRun, rounds: float) -> None:
        """So many of its rounds are done."""

    def end(self, run: PlannedRun, record: dict[str, Any] | None, error: str) -> None:
        """The run has finished, or has failed with `error`; there may be no record then."""


def execute(plan: TablePlan | GridPlan, watch: Watch, jobs: int = 1) -> dict[Path, str]:
    """Runs what is to do, and goes on past a run that fails.

    Args:
        plan: The table, or the grid.
        watch: Told how it goes on.
        jobs: Runs at once; each of several is a process of its own.

    Returns:
        The errors of the runs that failed, by their folders.

    Raises:
        UserError: Another process runs what is in the plan's folder.
    """
    with owned(plan.folder):
        return _one_by_one(plan.to_run, watch) if jobs == 1 else _side_by_side(plan.to_run, watch, jobs)


class _Relay(runs.Listener):
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
            if run.record is None:
                record = runs.run(run.method, out=run.folder, progress=_Relay(run, watch), **run.given).record
            else:
                record = runs.resume(run.folder, method=_own_files(run), progress=_Relay(run, watch)).record
        except Exception as raised:  # whatever it is, the other runs go on
            error = errors[run.folder] = (str(raised).splitlines() or [type(raised).__name__])[0]
        watch.end(run, record, error)
    return errors


def _side_by_side(todo: Sequence[PlannedRun], watch: Watch, jobs: int) -> dict[Path, str]:
    """Runs in processes of their own, so many at once; what interrupts this one interrupts them all."""
    waiting, errors = list(todo)[::-1], {}
    active: dict[Path, tuple[PlannedRun, subprocess.Popen, IO[str]]] = {}
    with ExitStack() as outputs:
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    run, output = waiting.pop(), outputs.enter_context(tempfile.TemporaryFile("w+"))
                    watch.begin(run)
                    active[run.folder] = run, _launch(run, jobs, output), output
                time.sleep(POLL)
                for folder, (run, process, output) in list(active.items()):
                    ended = process.poll() is not None
                    record = read_record(folder) if (folder / RECORD).is_file() else None
                    watch.advance(run, len(record["rounds"]) if record else 0)
                    if ended:
                        del active[folder]
                        if process.returncode:
                            errors[folder] = _last_line(output)
                        watch.end(run, record, errors.get(folder, ""))
        finally:
            for _, process, _ in active.values():
                process.send_signal(signal.SIGTERM)  # a shell script's background processes ignore SIGINT
            for _, process, _ in active.values():
                process.wait()
    return errors


def _launch(run: PlannedRun, jobs: int, output: IO[str]) -> subprocess.Popen:
    """The process of a run, which shares the cores with the others; what it says of errors goes to `output`."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, *_arguments(run)],
        env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,  # see `end_with_parent`
        stdout=subprocess.DEVNULL,
        stderr=output,
        start_new_session=True,  # Ctrl-C comes from here, once
    )


def _arguments(run: PlannedRun) -> list[str]:
    """What to give to `fedcli` for the run."""
    if run.record is not None:
        return ["resume", str(run.folder), *(f"--method={path}" for path in _own_files(run))]
    return ["run", run.method, *flags_of(run.given), "--out", str(run.folder)]


def _own_files(run: PlannedRun) -> list[str]:
    """The user's files that the plan, not a record, names for the run."""
    return own_paths([run.method, *run.setup.values().values()])


def _last_line(output: IO[str]) -> str:
    output.seek(0)
    lines = output.read().strip().splitlines() or ["it ended without a word"]
    return lines[-1].removeprefix("error: ")
