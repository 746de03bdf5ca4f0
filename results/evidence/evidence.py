"""Go on with the open claims in the order of WORK, on the device at hand, as long as there is time.

    python results/evidence/evidence.py --time 9m --carry OUT                # on a machine that is lent for minutes
    python results/evidence/evidence.py --time 9m --from OUT --carry NEXT    # on the next one

README.md beside this file says how code and data come to such a machine, and what to do with what comes back.
"""

import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console

from fedcli.cli.options import limit_time
from fedcli.cli.plan_display import TableDisplay
from fedcli.core import backbones
from fedcli.core.client_states import STATES
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.registry import find_method, find_table
from fedcli.results.durations import estimate
from fedcli.results.jobs import execute
from fedcli.results.plans import Plan, PlannedRun, plan_table
from fedcli.runs.begin import read_begun
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.identity import draft, settings_of
from fedcli.runs.record import RECORD
from fedcli.runs.resolve import resolve
from fedcli.runs.signals import OutOfTime, interrupt_on_signals, set_time_limit, time_left

AnyRun = TypeVar("AnyRun", bound=PlannedRun)
RUNS = Path("runs/evidence")
MIB = 2**20
PART = 16 * MIB  # bytes of a file of the archive
ARCHIVE = 62 * MIB  # bytes of the archive at most
CARRIED = 60 * MIB  # bytes of the checkpoints in it at most
RESERVE = 45  # seconds of --time for last checkpoints, `fedcli quality` and the archive
GRACE = 15  # seconds after which a round that did not end in time is interrupted
JOBS_ON_CUDA = 4  # not measured yet
MEASURED = "fedfm:V"  # the table whose cells `fedcli quality` measures
SEPARATION = "fedfm:fedavg fedfm:features fedfm:silhouette"


@dataclass(frozen=True)
class Work:
    """Cells to run, as `fedcli table TABLE --only ... --seeds ...`."""

    decides: str  # the beginnings of claims, or what is learnt
    table: str
    only: tuple[str, ...]
    seeds: tuple[int, ...]


WORK = (
    Work(SEPARATION, "fedfm:V", only=("FedFM", "NMI"), seeds=(0,)),
    Work(SEPARATION, "fedfm:V", only=("FedAvg", "NMI"), seeds=(0,)),
    Work("fedsa:cross-silo", "fedsa:1", only=("FedSA", "FedProto", "cross-silo Cifar10"), seeds=(0, 1, 2)),
    Work("fedsa:cifar100", "fedsa:1", only=("FedSA", "FedTGP", "cross-device Cifar100"), seeds=(0, 1, 2)),
    Work("fedsa:margin", "fedsa:4", only=("EMA+R+ER+MCL+CC", "EMA+R+ER+CC"), seeds=(0, 1, 2)),
    Work(SEPARATION, "fedfm:V", only=("FedFM", "FedAvg", "NMI"), seeds=(1, 2)),
    Work("fedfm:second-best", "fedfm:V", only=("SCAFFOLD", "NMI"), seeds=(0, 1, 2)),
    Work("fedcme:more-skew", "fedcme:II",
         only=("FedAvg", "FedCME(0.01)", "CIFAR10 alpha=0.1 K=80", "CIFAR10 alpha=0.5 K=80"), seeds=(0, 1, 2)),
    Work("fedcme:sooner", "fedcme:III",
         only=("FedCME(0.01)", "FedAvg", "FedRS(0.5)", "K=80,M=30", "K=50,M=20"), seeds=(0, 1, 2)),
    Work("FedFA's Table 2", "fedfa:2", only=("CIFAR-10 ",), seeds=(2021, 2022, 2023)),
    Work("fccl:other-domains", "fccl:8", only=("FCCL+", "FCCL", "BASE", "Digits inter AVG"), seeds=(0, 1, 2)),
    Work("FedFM's Table III", "fedfm:III", only=("CIFAR-10 NIID-1", "CIFAR-10 NIID-2"), seeds=(0, 1, 2)),
)  # fmt: skip
INSTEAD = {"fccl:8": {"protocol": "fccl:digit-domains", "dataset": "digits-real-4"}}  # in place of a table's options
TINY = {
    "dataset": "digits", "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "rounds": 3, "local_epochs": 1,
    "batch_size": 8, "device": "cpu",
}  # fmt: skip


@dataclass(frozen=True)
class OpenRun(PlannedRun):
    """A run of WORK, with the table for which it is done first."""

    table: str = field(kw_only=True)


def planned_runs(precision: str, tiny: bool) -> list[OpenRun]:
    """Returns the runs of WORK that the committed records lack, each once; if `tiny`, a small one of each work."""
    home = RUNS / precision
    changes: dict[str, Any] = {}
    if precision != "float32":
        changes["precision"] = precision
    if tiny:
        home = RUNS / f"tiny-{precision}"
        changes |= TINY
    runs: dict[Path, OpenRun] = {}
    for work in WORK:
        planned = plan_table(find_table(work.table), seeds=work.seeds, only=work.only).runs
        by_seed = sorted(planned, key=lambda run: run.setup.config.seed)
        if tiny:
            by_seed = by_seed[:1]
        for run in by_seed:
            is_changed = bool(changes) or work.table in INSTEAD  # then no committed record stands for it
            if run.to_do or is_changed:
                to_run = open_run(run, work, changes, home)
                runs.setdefault(to_run.folder, to_run)
    return refreshed(runs.values())


def open_run(run: PlannedRun, work: Work, changes: Mapping[str, Any], home: Path) -> OpenRun:
    """Returns a run of a table as it is done here: with other options, in a folder below `home`."""
    options = {**run.options, **changes}
    if work.table in INSTEAD:
        # Under another protocol none of the options may come from the cell's.
        options = {**run.setup.all_options(), **changes, **INSTEAD[work.table]}
    setup = resolve(find_method(run.method), options, need_data=False)
    return OpenRun(
        label=f"{work.decides}: {work.table} {run.label}",
        method=run.method,
        options=options,
        setup=setup,
        settings=settings_of(draft(setup)),
        folder=home / run.folder.parent.name / run.folder.name,
        varied=run.varied,
        table=work.table,
    )


def refreshed(runs: Iterable[AnyRun]) -> list[AnyRun]:
    """Returns runs with the records that they have now."""
    return [replace(run, record=read_begun(run.folder)) for run in runs]


def lacks_quality(run: OpenRun) -> bool:
    """Whether a claim is about the features of a finished run, which `fedcli quality` has not measured."""
    return run.table == MEASURED and run.state == "finished" and "quality" not in run.record


def files_of(run: PlannedRun) -> list[Path]:
    """What a run goes on from, beside its record; the model of the best round so far is not needed for that."""
    return [*run.folder.glob(CHECKPOINT), *run.folder.glob(f"{STATES}/*")]


def nbytes_of(run: PlannedRun) -> int:
    """Bytes of these files; before there are any, of a model for the server and for each client that keeps one."""
    files = files_of(run)
    if files:
        return sum(file.stat().st_size for file in files)
    num_models = 1
    if len(run.setup.method.state_types) > 1:  # a client keeps one too
        num_models += run.setup.config.num_clients
    return num_models * nbytes_of_model(run)


def nbytes_of_model(run: PlannedRun) -> int:
    """Bytes of a model of a run, by the first of its networks."""
    config = run.setup.config
    images = datasets.describe(config.dataset)
    channels, height, _ = images["shape"]
    backbone, *_ = config.backbone.split(",")
    with torch.device("meta"):
        network = backbones.build(backbone, channels, height, images["classes"], seed=0)
    return sum(value.nbytes for value in network.state_dict().values())


class CarriedPlan(Plan):
    """Runs of which none starts that can neither be carried to the next machine nor end in time."""

    def may_start(self, run: PlannedRun, active: Collection[PlannedRun]) -> bool:
        """Whether a run fits into the archive beside those that have begun, or ends in time, as runs like it tell."""
        active_folders = {other.folder for other in active}
        nbytes = nbytes_of(run)
        for other in refreshed(self.runs):
            has_begun = other.record or other.folder in active_folders
            if other.folder == run.folder or not has_begun or not other.to_do:
                continue
            nbytes_of_other = nbytes_of(other)
            if nbytes_of_other <= CARRIED:  # else it is left behind
                nbytes += nbytes_of_other
        if nbytes <= CARRIED:
            return True
        seconds = estimate(Plan(RUNS, (run,)))["seconds"].item()
        return seconds < time_left()


def pack(runs: Sequence[OpenRun], folder: Path) -> None:
    """Writes all records, and what open runs need as far as there is room, as parts of an archive in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("evidence.tgz.*"):
        old.unlink()
    begun = [run for run in runs if run.record]
    files = [run.folder / RECORD for run in begun]
    room = ARCHIVE - sum(file.stat().st_size for file in files) / 3  # compressed they take less
    for run in begun:
        goes_on = run.to_do or lacks_quality(run)
        if not goes_on:
            continue
        nbytes = nbytes_of(run)
        if nbytes < room:
            files += files_of(run)
            room -= nbytes
        else:
            print(f"left behind: {run.label}, seed {run.setup.config.seed}: {nbytes / MIB:,.0f} MiB")
    command = f"tar -cz -T - | split -b {PART} -d -a 1 - {shlex.quote(str(folder))}/evidence.tgz."
    subprocess.run(command, shell=True, check=True, text=True, input="\n".join(map(str, files)))


def unpack(folder: Path) -> None:
    """Takes what another machine has packed; what is here already may be newer, and stays."""
    command = f"cat {shlex.quote(str(folder))}/evidence.tgz.* | tar -xz --skip-old-files"
    subprocess.run(command, shell=True, check=True)


def run_and_measure(plan: Plan, runs: Sequence[OpenRun], jobs: int) -> None:
    """Runs what may start until the time is over, then measures the features of what has finished."""
    display = TableDisplay([Console(highlight=False)], plan)
    with display.bar, suppress(OutOfTime):
        if time_left() > 0:
            execute(plan, display, jobs)
    folders = [run.folder for run in refreshed(runs) if lacks_quality(run)]
    if folders:
        subprocess.run([sys.executable, "-m", "fedcli", "quality", *folders], check=False)


def print_open(runs: Sequence[OpenRun]) -> None:
    """Says which runs have not ended."""
    to_do = [run for run in runs if run.to_do]
    for run in to_do:
        done = f"{run.rounds_done} of {run.setup.config.rounds} rounds, {nbytes_of(run) / MIB:,.0f} MiB to carry"
        print(f"open: {run.label}, seed {run.setup.config.seed}: {done}")
    print(f"{len(runs) - len(to_do)} of {len(runs)} runs have ended; 'fedcli claims' says what they decide")


def main(
    time: str | None = None, jobs: int = 0, precision: str = "float32", carry: Path | None = None,
    origin: Annotated[Path | None, typer.Option("--from")] = None, tiny: bool = False,
) -> None:  # fmt: skip
    """Unpacks, runs, measures and packs, and says what is left.

    Of the precisions, claims count float32 alone; `--tiny` tries it on the CPU with a small run of each work.
    """
    try:
        limit_time(time)
        if origin:
            unpack(origin)
        runs = planned_runs(precision, tiny)
    except (UserError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    set_time_limit(time_left() - RESERVE)
    plan_class = CarriedPlan if carry else Plan
    plan = plan_class(RUNS, tuple(runs))
    if not jobs:
        jobs = JOBS_ON_CUDA if torch.cuda.is_available() and not tiny else 1
    interrupt_on_signals()
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
    if time:
        seconds = max(1, time_left() + GRACE)
        signal.alarm(math.ceil(seconds))
    try:
        run_and_measure(plan, runs, jobs)
    except (KeyboardInterrupt, UserError) as error:
        print(error)
    signal.alarm(0)
    runs = refreshed(runs)
    if carry:
        pack(runs, carry)
    for text in Plan(RUNS, tuple(runs)).missing_data.values():
        print(text)
    print_open(runs)


if __name__ == "__main__":
    typer.run(main)
