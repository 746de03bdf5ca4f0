"""Go on with the open claims in the order of WORK, on the device at hand, as long as there is time.

    python results/evidence/evidence.py --time 9m --carry OUT                # on a machine that is lent for minutes
    python results/evidence/evidence.py --time 9m --from OUT --carry NEXT    # on the next one

README.md beside this file says how code and data come to such a machine, and what to do with what comes back.
"""

import math
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from fedcli.cli.common import limit_time
from fedcli.core import backbones
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.registry import find_method, find_table
from fedcli.results.costs import cost_of, paces
from fedcli.results.frame import read_runs, shipped
from fedcli.results.plans import PlannedRun, plan
from fedcli.runs.checkpoints import CHECKPOINT, STATES
from fedcli.runs.config import flags_of, resolve
from fedcli.runs.records import RECORD, environment
from fedcli.runs.run import read_begun
from fedcli.runs.signals import interrupt_on_signals, time_left

RUNS = Path("runs/evidence")
MIB = 2**20
PART = 16 * MIB  # bytes of a file of the archive
ARCHIVE, CARRIED = 62 * MIB, 60 * MIB  # bytes of the archive, and of the checkpoints in it, at most
RESERVE = 45  # seconds of --time for the starts of processes, last checkpoints, `fedcli quality` and the archive
GRACE = 15  # seconds after which a run that did not end at its time limit is interrupted
JOBS_ON_CUDA = 4  # not measured yet


class Work(NamedTuple):
    """Cells of a paper's table, as `fedcli table TABLE --only ... --seeds ...` names them."""

    decides: str  # claims, of which one on several rows begins with these; or what else is learnt
    table: str
    only: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    instead: dict[str, Any] | None = None  # options in place of the cells'


SEPARATION = "fedfm:fedavg fedfm:features fedfm:silhouette"
OPEN_DIGITS = {"protocol": "fccl:digit-domains", "dataset": "digits-real-4"}
WORK = (
    Work(SEPARATION, "fedfm:V", ("FedFM", "NMI"), (0,)),
    Work(SEPARATION, "fedfm:V", ("FedAvg", "NMI"), (0,)),
    Work("fedsa:cross-silo", "fedsa:1", ("FedSA", "FedProto", "cross-silo Cifar10")),
    Work("fedsa:cifar100", "fedsa:1", ("FedSA", "FedTGP", "cross-device Cifar100")),
    Work("fedsa:margin", "fedsa:4", ("EMA+R+ER+MCL+CC", "EMA+R+ER+CC")),
    Work(SEPARATION, "fedfm:V", ("FedFM", "FedAvg", "NMI"), (1, 2)),
    Work("fedfm:second-best", "fedfm:V", ("SCAFFOLD", "NMI")),
    Work("fedcme:more-skew", "fedcme:II", ("FedAvg", "FedCME(0.01)", *(f"CIFAR10 alpha={a} K=80" for a in (0.1, 0.5)))),
    Work("fedcme:sooner", "fedcme:III", ("FedCME(0.01)", "FedAvg", "FedRS(0.5)", "K=80,M=30", "K=50,M=20")),
    Work("FedFA's Table 2", "fedfa:2", ("CIFAR-10 ",), (2021, 2022, 2023)),
    Work("fccl:other-domains", "fccl:8", ("FCCL+", "FCCL", "BASE", "Digits inter AVG"), instead=OPEN_DIGITS),
    Work("FedFM's Table III", "fedfm:III", ("CIFAR-10 NIID-1", "CIFAR-10 NIID-2")),
)
TINY = {
    "dataset": "digits", "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "rounds": 3, "local_epochs": 1,
    "batch_size": 8, "device": "cpu",
}  # fmt: skip


def planned_runs(tiny: bool) -> list[PlannedRun]:
    """The runs of WORK that the committed records do not have, each once; if `tiny`, a small one of each work."""
    runs, home = {}, RUNS / ("tiny" if tiny else "float32")
    for work in WORK:
        changes = {**(TINY if tiny else {}), **(work.instead or {})}
        table = plan(find_table(work.table), seeds=work.seeds, only=work.only)
        for run in sorted(table.runs, key=lambda run: run.setup.run.seed)[: 1 if tiny else None]:
            # Under another protocol none of the options may come from the cell's.
            given = {**(run.setup.values() if work.instead else run.given), **changes}
            setup = resolve(find_method(run.method), given, need_data=False)
            label = f"{work.decides}: {work.table} {run.label}, seed {setup.run.seed}"
            folder = home / run.folder.parent.name / run.folder.name
            if run.to_do or changes:
                runs.setdefault(folder, replace(run, label=label, given=given, setup=setup, folder=folder))
    read_again(runs.values())
    return [*runs.values()]


def read_again(runs: Iterable[PlannedRun]) -> None:
    """Gives the runs the records that they have now."""
    for run in runs:
        run.record = read_begun(run.folder)


def to_measure(run: PlannedRun) -> bool:
    """Whether a claim is about the features of a run, which `fedcli quality` has not measured yet."""
    return "quality" not in (run.record or {}) and any(metric.after_the_run for metric in run.metrics)


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


def obstacle(
    run: PlannedRun, runs: Sequence[PlannedRun], active: Iterable[PlannedRun], left: float, carry: bool
) -> str:
    """Why a run is not to start now that so many seconds are left; empty where it may."""
    for name in run.setup.data_sets:
        if not datasets.present(name):
            return f"the data set {name} is not on this machine"
    if left <= 0:
        return "there is no time left"
    read_again(runs)
    folders = {other.folder for other in active}
    going_on = [other for other in runs if other.to_do and (other.record or other.folder in folders)]
    sizes = [nbytes_of(other) for other in going_on if other.folder != run.folder]
    if not carry or nbytes_of(run) + sum(size for size in sizes if size <= CARRIED) <= CARRIED:
        return ""
    # It has to end, by what runs of the same network, precision and device have taken.
    hardware = environment(run.setup.device)["hardware"]
    timed = paces(read_runs([RUNS, *shipped()]))
    (seconds,) = cost_of([run], timed, hardware["device"], hardware["name"])["seconds"]
    if seconds < left:
        return ""
    return f"{nbytes_of(run) / MIB:,.0f} MiB cannot be carried, and it may not end in {left:,.0f} s"


def start(command: Sequence[str]) -> subprocess.Popen:
    """Starts `fedcli`."""
    return subprocess.Popen([sys.executable, "-m", "fedcli", *command])


def work_until(deadline: float, runs: Sequence[PlannedRun], jobs: int, carry: bool) -> None:
    """Makes runs, so many at once, until none is left that may start; in the end interrupts those still going."""
    waiting, active = [run for run in runs if run.to_do], {}
    try:
        while time.monotonic() < deadline + GRACE:
            for run in list(waiting):
                left = deadline - time.monotonic()
                if len(active) < jobs and not obstacle(run, runs, [*active.values()], left, carry):
                    waiting.remove(run)
                    command = ["run", run.method, *flags_of(run.given), f"--out={run.folder}", "--continue", "--quiet"]
                    command += [] if left == math.inf else [f"--time-limit={math.ceil(left)}s"]
                    print(f"{run.label}: fedcli {' '.join(command)}", flush=True)
                    active[start(command)] = run
            if not active:
                break
            time.sleep(0.2)
            active = {process: run for process, run in active.items() if process.poll() is None}
    finally:
        for process in active:
            process.terminate()
        for process in active:
            process.wait()


def pack(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Writes all records, and what open runs need as far as there is room, as parts of an archive in a folder."""
    begun = [run for run in runs if run.record]
    files = [run.folder / RECORD for run in begun]
    room = ARCHIVE - sum(file.stat().st_size for file in files) / 3  # compressed they take less
    for run in begun:
        if run.to_do or to_measure(run):
            fits = nbytes_of(run) < room
            print(f"{'carried' if fits else 'left behind'}: {run.label}, {nbytes_of(run) / MIB:,.1f} MiB")
            files += files_of(run) * fits
            room -= nbytes_of(run) * fits
    folder.mkdir(parents=True, exist_ok=True)
    parts = f"{shlex.quote(str(folder))}/evidence.tgz."
    command = f"rm -f {parts}*; tar -cz -T - | split -b {PART} -d -a 1 - {parts}"
    subprocess.run(command, shell=True, check=True, text=True, input="\n".join(map(str, files)))


def main(
    limit: Annotated[str | None, typer.Option("--time", help="Time for all, as 9m or 2h; by default none.")] = None,
    jobs: Annotated[int, typer.Option(help=f"Runs at once; by default {JOBS_ON_CUDA} on CUDA, else 1.")] = 0,
    carry: Annotated[Path | None, typer.Option(help="Folder for an archive of records and checkpoints.")] = None,
    origin: Annotated[str, typer.Option("--from", help="Folder with such an archive, to go on from.")] = "",
    tiny: Annotated[bool, typer.Option("--tiny", help="A run of each work on built-in digits, on the CPU.")] = False,
) -> None:
    """Unpacks, runs, measures and packs, and says what is left."""
    jobs = jobs or (JOBS_ON_CUDA if torch.cuda.is_available() and not tiny else 1)
    try:
        limit_time(limit)
        deadline = time.monotonic() + time_left() - RESERVE
        if origin:  # what is here already may be newer, and stays
            unpack = f"cat {shlex.quote(origin)}/evidence.tgz.* | tar -xz --skip-old-files"
            subprocess.run(unpack, shell=True, check=True)
        runs = planned_runs(tiny)
    except (UserError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    interrupt_on_signals()
    try:
        work_until(deadline, runs, jobs, carry is not None)
        read_again(runs)
        if folders := [str(run.folder) for run in runs if run.state == "finished" and to_measure(run)]:
            start(["quality", *folders]).wait()
    except KeyboardInterrupt as error:
        print(error)
    read_again(runs)
    if carry:
        pack(runs, carry)
    for run in runs:
        if run.to_do:
            reason = obstacle(run, runs, (), deadline - time.monotonic(), carry is not None)
            print(f"open: {run.label}: {reason or 'it has failed or was interrupted'}")
    print(f"{sum(not run.to_do for run in runs)} of {len(runs)} runs have ended; 'fedcli claims' says what they decide")


if __name__ == "__main__":
    typer.run(main)
