"""Go on with the open claims in the order of `open_runs.OPEN_CELLS`, on the device at hand, as long as there is time.

    python results/evidence/evidence.py --time 9m --carry OUT                # on a machine that is lent for minutes
    python results/evidence/evidence.py --time 9m --from OUT --carry NEXT    # on the next one

README.md beside this file says how code and data come to such a machine, and what to do with what comes back.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import archive
import deadline
import open_runs
import torch
import transfer
import typer
from rich.console import Console

from fedcli.cli.plan_display import TableDisplay
from fedcli.errors import UserError
from fedcli.results.jobs import execute
from fedcli.results.plans import Plan
from fedcli.runs.signals import OutOfTime, time_left

JOBS_ON_CUDA = 4  # not measured yet


def run_in_time(plan: Plan, jobs: int) -> None:
    """Runs what may start until the time is over."""
    display = TableDisplay([Console(highlight=False)], plan)
    with display.bar, suppress(OutOfTime):
        if time_left() > 0:
            execute(plan, display, jobs)


def measure_features(runs: Sequence[open_runs.ClaimRun]) -> None:
    """Measures the features of what has finished, where a claim is about them."""
    folders = [run.folder for run in open_runs.with_new_records(runs) if run.lacks_quality]
    if folders:
        subprocess.run([sys.executable, "-m", "fedcli", "quality", *folders], check=False)


def print_open_runs(runs: Sequence[open_runs.ClaimRun]) -> None:
    """Says which data sets are missing, and which runs have not ended."""
    for text in Plan(open_runs.RUNS, tuple(runs)).missing_data.values():
        print(text)
    to_do = [run for run in runs if run.needs_running]
    for run in to_do:
        mebibytes = transfer.nbytes_to_carry(run) / transfer.MIB
        done = f"{run.rounds_done} of {run.setup.config.rounds} rounds, {mebibytes:,.0f} MiB to carry"
        print(f"open: {run.label}, seed {run.setup.config.seed}: {done}")
    print(f"{len(runs) - len(to_do)} of {len(runs)} runs have ended; 'fedcli claims' says what they decide")


def main(
    time: str | None = None, jobs: int = 0, precision: str = "float32", carry: Path | None = None,
    origin: Annotated[Path | None, typer.Option("--from")] = None, tiny: bool = False,
) -> None:  # fmt: skip
    """Unpacks, runs, measures and packs, and says what is left.

    Of the precisions, claims count float32 alone; `--tiny` tries it on the CPU with small runs alone.
    """
    try:
        if time is not None:
            deadline.start_time_limit(time)
        if origin:
            archive.unpack(origin)
        runs = open_runs.planned_runs(precision, tiny)
    except (UserError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    plan_class = transfer.CarriedPlan if carry else Plan
    plan = plan_class(open_runs.RUNS, tuple(runs))
    uses_cuda = torch.cuda.is_available() and not tiny
    default_jobs = JOBS_ON_CUDA if uses_cuda else 1
    with deadline.late_runs_interrupted():
        try:
            run_in_time(plan, jobs or default_jobs)
            measure_features(runs)
        except (KeyboardInterrupt, UserError) as error:
            print(error)
    runs = open_runs.with_new_records(runs)
    if carry:
        archive.pack(runs, carry)
    print_open_runs(runs)


if __name__ == "__main__":
    typer.run(main)
