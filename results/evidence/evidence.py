"""Go on with the open claims in the order of WORK, on the device at hand, as long as there is time.

    python results/evidence/evidence.py --time 9m --carry OUT                # on a machine that is lent for minutes
    python results/evidence/evidence.py --time 9m --from OUT --carry NEXT    # on the next one

README.md beside this file says how code and data come to such a machine, and what to do with what comes back.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
from fedcli.runs.settings import differences, draft, settings
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


def planned_runs(precision: str, tiny: bool) -> tuple[list[PlannedRun], set[Path]]:
    """The runs of WORK that the committed records do not have, in its order, each once; a small one of each if `tiny`.

    Returns:
        The runs, and the folders of those whose features a claim is about, so that `fedcli quality` follows.
    """
    runs, measured = {}, set()
    more = {**({} if precision == "float32" else {"precision": precision}), **(TINY if tiny else {})}
    home = RUNS / (f"tiny-{precision}" if tiny else precision)
    for work in WORK:
        table = plan(find_table(work.table), seeds=work.seeds, only=work.only)
        after_the_run = {run.folder for cell in table.cells if cell.metric.after_the_run for run in cell.runs}
        for run in sorted(table.runs, key=lambda run: run.setup.run.seed)[: 1 if tiny else None]:
            # Under another protocol none of the options may come from the cell's.
            given = {**(run.setup.values() if work.instead else run.given), **more, **(work.instead or {})}
            setup = resolve(find_method(run.method), given, need_data=False)
            folder = home / run.folder.parent.name / run.folder.name
            label = f"{work.decides}: {work.table} {run.label}, seed {setup.run.seed}"
            if run.to_do or differences(settings(draft(setup)), settings(draft(run.setup))):
                runs.setdefault(folder, replace(run, label=label, given=given, setup=setup, folder=folder))
                measured |= {folder} if run.folder in after_the_run else set()
    return [refreshed(run) for run in runs.values()], measured


def refreshed(run: PlannedRun) -> PlannedRun:
    """The run with the record that it has now."""
    return replace(run, record=read_begun(run.folder))


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
    run: PlannedRun, runs: Sequence[PlannedRun], active: Sequence[PlannedRun], left: float, carry: bool
) -> str:
    """Why a run is not to start now that so many seconds are left; empty where it may."""
    for name in run.setup.data_sets:
        if not datasets.present(name):
            return f"the data set {name} is not on this machine"
    if left <= 0:
        return "there is no time left"
    going_on = {other.folder for other in active}
    others = [refreshed(other) for other in runs if other.folder != run.folder]
    sizes = [nbytes_of(other) for other in others if other.to_do and (other.record or other.folder in going_on)]
    if not carry or nbytes_of(run) + sum(size for size in sizes if size <= CARRIED) <= CARRIED:
        return ""
    # It has to end, by what runs of the same network, precision and device have taken.
    hardware = environment(run.setup.device)["hardware"]
    timed = paces(read_runs([RUNS, *shipped()]))
    (seconds,) = cost_of([refreshed(run)], timed, hardware["device"], hardware["name"])["seconds"]
    if seconds < left:
        return ""
    return f"{nbytes_of(run) / MIB:,.0f} MiB cannot be carried, and it may not end in {left:,.0f} s"


def start(command: Sequence[str], jobs: int) -> subprocess.Popen:
    """Starts `fedcli`, with its share of the cores where several run at once."""
    threads = {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    return subprocess.Popen([sys.executable, "-m", "fedcli", *command], env={**threads, **os.environ})


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
                    active[start(command, jobs)] = run
            if not active:
                break
            time.sleep(0.2)
            active = {process: run for process, run in active.items() if process.poll() is None}
    finally:
        for process in active:
            process.terminate()
        for process in active:
            process.wait()


def pack(runs: Sequence[PlannedRun], measured: set[Path], folder: Path) -> None:
    """Writes all records, and what open runs need as far as there is room, as parts of an archive in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("evidence.tgz.*"):
        old.unlink()
    begun = [run for run in runs if run.record]
    files = [run.folder / RECORD for run in begun]
    room = ARCHIVE - sum(file.stat().st_size for file in files) / 3  # compressed they take less
    for run in [run for run in begun if run.to_do or (run.folder in measured and "quality" not in run.record)]:
        fits = nbytes_of(run) < room
        print(f"{'carried' if fits else 'left behind'}: {run.label}, {nbytes_of(run) / MIB:,.1f} MiB")
        if fits:
            files += files_of(run)
            room -= nbytes_of(run)
    command = f"tar -cz -T - | split -b {PART} -d -a 1 - {shlex.quote(str(folder))}/evidence.tgz."
    subprocess.run(command, shell=True, check=True, text=True, input="\n".join(map(str, files)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Unpacks, runs, measures and packs, and says what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", help="time for all, as 9m or 2h; no limit where left out")
    parser.add_argument("--jobs", type=int, help=f"runs at once; where left out {JOBS_ON_CUDA} on CUDA, else 1")
    parser.add_argument("--precision", default="float32", help="of all runs; claims count float32 alone")
    parser.add_argument("--carry", type=Path, help="folder for an archive of records and checkpoints")
    parser.add_argument("--from", dest="origin", help="folder with such an archive, to go on from")
    parser.add_argument("--tiny", action="store_true", help="try it on the CPU: a run of each work, on built-in digits")
    given = parser.parse_args(arguments)
    carry, on_cuda = given.carry is not None, torch.cuda.is_available() and not given.tiny
    jobs = given.jobs or (JOBS_ON_CUDA if on_cuda else 1)
    try:
        limit_time(given.time)
        deadline = time.monotonic() + time_left() - RESERVE
        if given.origin:  # what is here already may be newer, and stays
            unpack = f"cat {shlex.quote(given.origin)}/evidence.tgz.* | tar -xz --skip-old-files"
            subprocess.run(unpack, shell=True, check=True)
        runs, measured = planned_runs(given.precision, given.tiny)
    except (UserError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    interrupt_on_signals()
    try:
        work_until(deadline, runs, jobs, carry)
        finished = [run for run in map(refreshed, runs) if run.state == "finished" and "quality" not in run.record]
        if folders := [str(run.folder) for run in finished if run.folder in measured]:
            start(["quality", *folders], 1).wait()
    except KeyboardInterrupt as error:
        print(error)
    runs = [refreshed(run) for run in runs]
    if carry:
        pack(runs, measured, given.carry)
    for run in runs:
        if run.to_do:
            reason = obstacle(run, runs, (), deadline - time.monotonic(), carry)
            print(f"open: {run.label}: {reason or 'it has failed or was interrupted'}")
    print(f"{sum(not run.to_do for run in runs)} of {len(runs)} runs have ended; 'fedcli claims' says what they decide")


if __name__ == "__main__":
    main()
