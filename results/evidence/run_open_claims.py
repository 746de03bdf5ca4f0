"""Goes on with the runs of open claims in the order of `open_runs.CELLS_TO_RUN`, on this machine, while there is time.

    python results/evidence/run_open_claims.py --time 9m --carry OUT              # on a machine lent for minutes
    python results/evidence/run_open_claims.py --time 9m --from OUT --carry NEXT  # on the next one

README.md beside this file says how code and data come to such a machine, and what to do with what comes back.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import archive
import carried_plan
import deadline
import open_runs
import torch
import typer
from rich.console import Console

from fedcli.cli.plan_display import TableDisplay
from fedcli.errors import UserError
from fedcli.results.jobs import execute
from fedcli.results.plans import Plan, PlannedRun, read_new_records
from fedcli.runs.schema import Record
from fedcli.runs.signals import OutOfTime, time_left

JOBS_ON_CUDA = 4  # not measured yet


def main(
    time_limit: Annotated[str | None, typer.Option("--time")] = None,
    jobs: Annotated[int | None, typer.Option(min=1)] = None,
    precision: str = "float32",
    archive_folder: Annotated[Path | None, typer.Option("--carry", file_okay=False)] = None,
    earlier_archive: Annotated[Path | None, typer.Option("--from")] = None,
    tiny: bool = False,
) -> None:
    """Unpacks, runs, measures and packs, and says what is left.

    Of the precisions, claims count float32 alone; `--tiny` tries it on the CPU with small runs alone.
    """
    try:
        if archive_folder is not None:
            archive_folder.mkdir(parents=True, exist_ok=True)  # before the runs, which take hours
        if time_limit is not None:
            deadline.start_time_limit(time_limit)
        if earlier_archive is not None:
            archive.unpack(earlier_archive)
        runs = open_runs.plan_tiny_runs(precision) if tiny else open_runs.plan_open_runs(precision)
    except (UserError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    if jobs is None:
        jobs = default_jobs(tiny)
    plan_class = Plan if archive_folder is None else carried_plan.CarriedPlan
    plan = plan_class(open_runs.RUNS, tuple(runs))
    display = CountingDisplay([Console(highlight=False)], plan)
    faults = run_and_measure(plan, display, jobs)
    runs = read_new_records(runs)
    if archive_folder is not None:
        archive.pack(runs, archive_folder)
    print_open_runs(runs)
    if precision == "float32":
        print("'fedcli claims' says what they decide")
    if faults:
        sys.exit("\n".join(faults))


def default_jobs(tiny: bool) -> int:
    """Returns how many runs go on at once where `--jobs` does not say it."""
    uses_cuda = torch.cuda.is_available() and not tiny
    return JOBS_ON_CUDA if uses_cuda else 1


class CountingDisplay(TableDisplay):
    """Shows runs, and counts those that have failed; `execute` loses their errors if the time is over."""

    def __init__(self, consoles: Sequence[Console], plan: Plan):
        """Makes the display; see `TableDisplay`."""
        super().__init__(consoles, plan)
        self.num_failed = 0

    def end(self, run: PlannedRun, record: Record | None, error: str) -> None:
        """Prints how a run has ended, and counts it if it has failed."""
        super().end(run, record, error)
        if error:
            self.num_failed += 1


def run_and_measure(plan: Plan, display: CountingDisplay, jobs: int) -> list[str]:
    """Runs what may start until the time is over, measures what has finished, and returns what has gone wrong."""
    faults = []
    num_unmeasured = 0
    try:
        with deadline.late_runs_interrupted():
            run_in_time(plan, display, jobs)
        num_unmeasured = measure_features(plan.runs)
    except KeyboardInterrupt as interruption:
        print(interruption)
    except UserError as error:
        faults.append(f"error: {error}")
    if display.num_failed:
        faults.append(f"{display.num_failed} failed")
    if num_unmeasured:
        faults.append(f"the features of {num_unmeasured} could not be measured")
    return faults


def run_in_time(plan: Plan, display: TableDisplay, jobs: int) -> None:
    """Runs what may start until the time is over."""
    with display.bar, suppress(OutOfTime):
        if time_left() > 0:
            execute(plan, display, jobs)


def measure_features(runs: Sequence[open_runs.OpenRun]) -> int:
    """Measures the features of runs that have finished and that a claim about features needs, while there is time.

    Returns:
        The number of runs whose features `fedcli quality` has refused to measure, and has said why.
    """
    num_refused = 0
    for run in read_new_records(runs):
        if not run.lacks_quality:
            continue
        command = [sys.executable, "-m", "fedcli", "quality", run.folder]
        try:
            ended = subprocess.run(command, check=False, timeout=deadline.seconds_to_measure())
        except subprocess.TimeoutExpired:
            print("'fedcli quality' has not ended in time; the next session measures the features")
            break
        if ended.returncode != 0:
            num_refused += 1
    return num_refused


def print_open_runs(runs: Sequence[open_runs.OpenRun]) -> None:
    """Prints which data sets are missing, and which runs have not ended."""
    for text in Plan(open_runs.RUNS, tuple(runs)).missing_data.values():
        print(text)
    unended = [run for run in runs if run.needs_running]
    for run in unended:
        mebibytes = archive.nbytes_to_resume(run) / archive.MIB
        done = f"{run.rounds_done} of {run.setup.config.rounds} rounds, {mebibytes:,.0f} MiB to carry"
        print(f"open: {run.title}, seed {run.setup.config.seed}: {done}")
    print(f"{len(runs) - len(unended)} of {len(runs)} runs have ended")


if __name__ == "__main__":
    typer.run(main)
