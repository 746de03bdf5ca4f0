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
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from fedcli.cli.common import limit_time
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
from fedcli.runs.record import RECORD
from fedcli.runs.resolve import resolve
from fedcli.runs.signals import OutOfTime, interrupt_on_signals, set_time_limit, time_left

RUNS = Path("runs/evidence")
MIB = 2**20
PART = 16 * MIB  # bytes of a file of the archive
ARCHIVE, CARRIED = 62 * MIB, 60 * MIB  # bytes of the archive, and of the checkpoints in it, at most
RESERVE = 45  # seconds of --time for last checkpoints, `fedcli quality` and the archive
GRACE = 15  # seconds after which a round that did not end in time is interrupted
JOBS_ON_CUDA = 4  # not measured yet
MEASURED = "fedfm:V"  # the table whose cells `fedcli quality` measures
SEPARATION = "fedfm:fedavg fedfm:features fedfm:silhouette"
# What is decided, by the beginnings of claims, or learnt; then cells, as `fedcli table TABLE --only ... --seeds ...`.
WORK = (
    (SEPARATION, "fedfm:V", ("FedFM", "NMI"), (0,)),
    (SEPARATION, "fedfm:V", ("FedAvg", "NMI"), (0,)),
    ("fedsa:cross-silo", "fedsa:1", ("FedSA", "FedProto", "cross-silo Cifar10"), (0, 1, 2)),
    ("fedsa:cifar100", "fedsa:1", ("FedSA", "FedTGP", "cross-device Cifar100"), (0, 1, 2)),
    ("fedsa:margin", "fedsa:4", ("EMA+R+ER+MCL+CC", "EMA+R+ER+CC"), (0, 1, 2)),
    (SEPARATION, "fedfm:V", ("FedFM", "FedAvg", "NMI"), (1, 2)),
    ("fedfm:second-best", "fedfm:V", ("SCAFFOLD", "NMI"), (0, 1, 2)),
    ("fedcme:more-skew", "fedcme:II",
        ("FedAvg", "FedCME(0.01)", "CIFAR10 alpha=0.1 K=80", "CIFAR10 alpha=0.5 K=80"), (0, 1, 2)),
    ("fedcme:sooner", "fedcme:III", ("FedCME(0.01)", "FedAvg", "FedRS(0.5)", "K=80,M=30", "K=50,M=20"), (0, 1, 2)),
    ("FedFA's Table 2", "fedfa:2", ("CIFAR-10 ",), (2021, 2022, 2023)),
    ("fccl:other-domains", "fccl:8", ("FCCL+", "FCCL", "BASE", "Digits inter AVG"), (0, 1, 2)),
    ("FedFM's Table III", "fedfm:III", ("CIFAR-10 NIID-1", "CIFAR-10 NIID-2"), (0, 1, 2)),
)  # fmt: skip
INSTEAD = {"fccl:8": {"protocol": "fccl:digit-domains", "dataset": "digits-real-4"}}  # in place of a table's options
TINY = {
    "dataset": "digits", "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "rounds": 3, "local_epochs": 1,
    "batch_size": 8, "device": "cpu",
}  # fmt: skip


def planned_runs(precision: str, tiny: bool) -> list[PlannedRun]:
    """Returns the runs of WORK that the committed records lack, each once; if `tiny`, a small one of each work."""
    runs: dict[Path, PlannedRun] = {}
    home = RUNS / (f"tiny-{precision}" if tiny else precision)
    other = {**({} if precision == "float32" else {"precision": precision}), **(TINY if tiny else {})}
    for decides, table, only, seeds in WORK:
        planned, instead = plan_table(find_table(table), seeds=seeds, only=only).runs, INSTEAD.get(table, {})
        for run in sorted(planned, key=lambda run: run.setup.run.seed)[: 1 if tiny else None]:
            if run.to_do or other or instead:
                # Under another protocol none of the options may come from the cell's.
                given = {**(run.setup.values() if instead else run.given), **other, **instead}
                setup = resolve(find_method(run.method), given, need_data=False)
                folder = home / run.folder.parent.name / run.folder.name
                label = f"{decides}: {table} {run.label}"
                runs.setdefault(folder, replace(run, label=label, given=given, setup=setup, folder=folder))
    refresh(runs.values())
    return list(runs.values())


def refresh(runs: Iterable[PlannedRun]) -> None:
    """Gives runs the records that they have now."""
    for run in runs:
        run.record = read_begun(run.folder)


def lacks_quality(run: PlannedRun) -> bool:
    """Whether a claim is about the features of a finished run, which `fedcli quality` has not measured."""
    return MEASURED in run.label and run.state == "finished" and "quality" not in run.record


def files_of(run: PlannedRun) -> list[Path]:
    """What a run goes on from, beside its record; the model of the best round so far is not needed for that."""
    return [*run.folder.glob(CHECKPOINT), *run.folder.glob(f"{STATES}/*")]


def nbytes_of(run: PlannedRun) -> int:
    """Bytes of these files; before there are any, of a model for the server and for each client that keeps one."""
    if files := files_of(run):
        return sum(file.stat().st_size for file in files)
    images, config = datasets.describe(run.setup.run.dataset), run.setup.run
    with torch.device("meta"):
        network = backbones.build(config.backbone.split(",")[0], *images["shape"][:2], images["classes"], seed=0)
    models = 1 + config.num_clients * (len(run.setup.method.state_types) > 1)
    return models * sum(value.nbytes for value in network.state_dict().values())


class CarriedPlan(Plan):
    """Runs of which none starts that can neither be carried to the next machine nor end in time."""

    def may_start(self, run: PlannedRun, active: Collection[PlannedRun]) -> bool:
        """Whether a run fits into the archive beside those that have begun, or ends in time, as runs like it tell."""
        refresh(self.runs)
        begun = [each for each in self.runs if each is not run and each.to_do and (each.record or each in active)]
        sizes = [nbytes_of(each) for each in begun]
        can_be_carried = nbytes_of(run) + sum(size for size in sizes if size <= CARRIED) <= CARRIED
        return can_be_carried or estimate(Plan(RUNS, (run,)))["seconds"].item() < time_left()


def pack(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Writes all records, and what open runs need as far as there is room, as parts of an archive in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("evidence.tgz.*"):
        old.unlink()
    files = [run.folder / RECORD for run in runs if run.record]
    room = ARCHIVE - sum(file.stat().st_size for file in files) / 3  # compressed they take less
    for run in [run for run in runs if run.record and (run.to_do or lacks_quality(run))]:
        if nbytes_of(run) < room:
            files += files_of(run)
            room -= nbytes_of(run)
        else:
            print(f"left behind: {run.label}, seed {run.setup.run.seed}: {nbytes_of(run) / MIB:,.0f} MiB")
    command = f"tar -cz -T - | split -b {PART} -d -a 1 - {shlex.quote(str(folder))}/evidence.tgz."
    subprocess.run(command, shell=True, check=True, text=True, input="\n".join(map(str, files)))


def main(
    time: str | None = None, jobs: int = 0, precision: str = "float32", carry: Path | None = None,
    origin: Annotated[Path | None, typer.Option("--from")] = None, tiny: bool = False,
) -> None:  # fmt: skip
    """Unpacks, runs, measures and packs, and says what is left.

    Of the precisions, claims count float32 alone; `--tiny` tries it on the CPU with a small run of each work.
    """
    try:
        limit_time(time)
        if origin:  # what is here already may be newer, and stays
            unpack = f"cat {shlex.quote(str(origin))}/evidence.tgz.* | tar -xz --skip-old-files"
            subprocess.run(unpack, shell=True, check=True)
        runs = planned_runs(precision, tiny)
    except (UserError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    set_time_limit(time_left() - RESERVE)
    planned = (CarriedPlan if carry else Plan)(RUNS, tuple(runs))
    display = TableDisplay([Console(highlight=False)], planned)
    interrupt_on_signals()
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
    signal.alarm(math.ceil(max(1, time_left() + GRACE)) if time else 0)
    try:
        with display.bar, suppress(OutOfTime):
            if time_left() > 0:
                execute(planned, display, jobs or (JOBS_ON_CUDA if torch.cuda.is_available() and not tiny else 1))
        refresh(runs)
        if folders := [run.folder for run in runs if lacks_quality(run)]:
            subprocess.run([sys.executable, "-m", "fedcli", "quality", *folders], check=False)
    except (KeyboardInterrupt, UserError) as error:
        print(error)
    signal.alarm(0)
    refresh(runs)
    if carry:
        pack(runs, carry)
    for text in planned.missing_data.values():
        print(text)
    for run in [run for run in runs if run.to_do]:
        done = f"{run.rounds_done} of {run.setup.run.rounds} rounds, {nbytes_of(run) / MIB:,.0f} MiB to carry"
        print(f"open: {run.label}, seed {run.setup.run.seed}: {done}")
    print(f"{sum(not run.to_do for run in runs)} of {len(runs)} runs have ended; 'fedcli claims' says what they decide")


if __name__ == "__main__":
    typer.run(main)
