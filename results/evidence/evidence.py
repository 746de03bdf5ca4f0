"""Go on with the open claims in the order of WORK, on the device at hand, as long as there is time.

    python results/evidence/evidence.py --time 9m --carry OUT                # on a machine that is lent for minutes
    python results/evidence/evidence.py --time 9m --from OUT --carry NEXT    # on the next one

README.md beside this file says how code and data come to such a machine, and what to do with what comes back.
"""

import argparse
import atexit
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedcli.cli.common import limit_time
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.registry import find_method, find_table
from fedcli.results.costs import cost_of, paces
from fedcli.results.frame import ENDED, read_runs, state_of
from fedcli.results.plans import plan
from fedcli.runs.checkpoints import CHECKPOINT, STATES
from fedcli.runs.config import Setup, flags_of, resolve
from fedcli.runs.models import bytes_kept
from fedcli.runs.records import RECORD, environment, read_record
from fedcli.runs.settings import differences, draft, settings
from fedcli.runs.signals import interrupt_on_signals, time_left

RUNS = Path("runs/evidence")
MIB = 2**20
PART = 16 * MIB  # bytes of a file of the archive
ARCHIVE, CARRIED = 62 * MIB, 60 * MIB  # bytes of the archive, and of the checkpoints in it, at most
RESERVE = 45  # seconds of --time for the starts of processes, last checkpoints, `fedcli quality` and the archive
TRIAL = 20  # seconds in which a run that can only be carried finished shows how long it takes
GRACE = 15  # seconds after which a run that did not end at its time limit is interrupted
JOBS_ON_CUDA = 4  # not measured yet
MPS = "nvidia-cuda-mps-control"


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


@dataclass(frozen=True)
class Run:
    """A run of WORK."""

    decides: str
    label: str
    given: dict[str, Any]  # its options
    setup: Setup
    folder: Path
    measured: bool  # whether a claim is about its features, so that `fedcli quality` follows

    @property
    def record(self) -> dict[str, Any] | None:
        """Its record; None before it has begun."""
        return read_record(self.folder) if (self.folder / RECORD).is_file() else None

    @property
    def ended(self) -> bool:
        """Whether it has finished or diverged."""
        return self.record is not None and state_of(self.record) in ENDED

    @property
    def unmeasured(self) -> bool:
        """Whether `fedcli quality` is still to follow."""
        return self.measured and self.ended and self.record["status"] == "finished" and "quality" not in self.record

    @property
    def files(self) -> list[Path]:
        """What it goes on from, beside its record; the model of the best round so far is not needed for that."""
        return [*self.folder.glob(CHECKPOINT), *self.folder.glob(f"{STATES}/*")]

    @property
    def rounds_done(self) -> int:
        """Its rounds up to now."""
        return len(self.record["rounds"]) if self.record else 0

    @property
    def nbytes(self) -> int:
        """Bytes of these files; before there are any, those of the models that the server and the clients keep."""
        if self.files:
            return sum(file.stat().st_size for file in self.files)
        about, method = datasets.describe(self.setup.run.dataset), self.setup.method
        models = bytes_kept(replace(self.setup, selection="last"), *about["shape"][:2], about["classes"])
        keeps_states = method.personal is None and len(method.state_types) > 1
        return models * (1 + keeps_states * self.setup.run.num_clients)


def planned_runs(tag: str, more: dict[str, Any], most: int | None) -> list[Run]:
    """The runs of WORK that the committed records do not have, in its order, each once.

    Args:
        tag: Of their folders.
        more: Options of all runs in place of the cells'.
        most: Runs of each work; None for all.
    """
    runs: dict[Path, Run] = {}
    for work in WORK:
        table = plan(find_table(work.table), seeds=work.seeds, only=work.only)
        measured = {run.folder for cell in table.cells if cell.metric.after_the_run for run in cell.runs}
        for run in sorted(table.runs, key=lambda run: run.setup.run.seed)[:most]:
            given = {**run.given, **more}
            if work.instead:  # another protocol, from which none of the cell's options may come
                given = {**run.setup.values(), **more, **work.instead}
            setup = resolve(find_method(run.method), given, need_data=False)
            folder = RUNS / tag / run.folder.parent.name / run.folder.name
            label = f"{work.table} {run.label}, seed {setup.run.seed}"
            if run.to_do or differences(settings(draft(setup)), settings(draft(run.setup))):
                runs.setdefault(folder, Run(work.decides, label, given, setup, folder, run.folder in measured))
    return list(runs.values())


def seconds_needed(run: Run) -> float:
    """The seconds to a run's end, by the rounds here of the same network, precision and device; infinite without."""
    hardware = environment(run.setup.device)["hardware"]
    timed = paces(read_runs([RUNS]), disturbed=True)
    (seconds,) = cost_of([run], timed, (hardware["device"], hardware["name"]))["seconds"]
    return math.inf if math.isnan(seconds) else seconds


def seconds_for(run: Run, runs: Sequence[Run], active: Sequence[Run], left: float, carry: bool) -> tuple[float, str]:
    """How long a run may go on now that so many seconds are left; 0 with a reason where it is not to start."""
    for name in filter(None, (run.setup.run.dataset, run.setup.run.public_dataset)):
        if not datasets.present(name):
            return 0, f"the data set {name} is not on this machine"
    if left <= 0:
        return 0, "there is no time left"
    begun = [other for other in runs if other is not run and not other.ended and (other.record or other in active)]
    room = CARRIED - sum(other.nbytes for other in begun if other.nbytes <= CARRIED)
    if not carry or run.nbytes <= room or (seconds := seconds_needed(run)) < left:
        return left, ""
    if seconds == math.inf and left > 3 * TRIAL:
        return TRIAL, ""
    return 0, f"{run.nbytes / MIB:,.0f} MiB cannot be carried, and it may take {seconds:,.0f} s of {left:,.0f}"


def start(command: Sequence[str], jobs: int) -> subprocess.Popen:
    """Starts `fedcli`, with its share of the cores where several run at once."""
    threads = {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    return subprocess.Popen([sys.executable, "-m", "fedcli", *command], env={**threads, **os.environ})


def work_until(deadline: float, runs: Sequence[Run], jobs: int, carry: bool) -> None:
    """Makes runs, so many at once, until none is left that may start; in the end interrupts those still going."""
    waiting, active = [run for run in runs if not run.ended], {}
    try:
        while time.monotonic() < deadline + GRACE:
            for run in list(waiting):
                running = [other for other, _ in active.values()]
                if len(running) == jobs:
                    break
                seconds, _ = seconds_for(run, runs, running, deadline - time.monotonic(), carry)
                if seconds:
                    waiting.remove(run)
                    command = ["run", run.setup.method.name, *flags_of(run.given), f"--out={run.folder}", "--continue"]
                    limit = [] if seconds == math.inf else [f"--time-limit={math.ceil(seconds)}s"]
                    print(f"{run.decides}: {run.label}: fedcli {' '.join([*command, *limit])}", flush=True)
                    active[start([*command, "--quiet", *limit], jobs)] = run, seconds
            if not active:
                break
            time.sleep(0.2)
            for process in [process for process in active if process.poll() is not None]:
                run, seconds = active.pop(process)
                if seconds == TRIAL and process.returncode == 0 and not run.ended:
                    waiting.insert(0, run)
    finally:
        for process in active:
            process.terminate()
        for process in active:
            process.wait()


def pack(runs: Sequence[Run], folder: Path) -> None:
    """Writes all records, and what open runs need as far as there is room, as parts of an archive in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("evidence.tgz.*"):
        old.unlink()
    begun = [run for run in runs if run.record]
    files = [run.folder / RECORD for run in begun]
    room = ARCHIVE - sum(file.stat().st_size for file in files) / 3  # compressed they take less
    for run in begun:
        if not run.ended or run.unmeasured:
            nbytes = sum(file.stat().st_size for file in run.files)
            print(f"{'carried' if nbytes < room else 'left behind'}: {run.label}, {nbytes / MIB:,.1f} MiB")
            if nbytes < room:
                files += run.files
                room -= nbytes
    command = f"tar -cz -T - | split -b {PART} -d -a 1 - {shlex.quote(str(folder))}/evidence.tgz."
    subprocess.run(command, shell=True, check=True, text=True, input="\n".join(map(str, files)))


def start_mps() -> None:
    """Lets the kernels of several processes run at the same time, if NVIDIA's MPS works here; else they take turns."""
    if shutil.which(MPS) is None or subprocess.run([MPS, "-d"], check=False).returncode != 0:
        return
    end = partial(subprocess.run, [MPS], input=b"quit\n", check=False)
    attempt = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"]
    if subprocess.run(attempt, check=False).returncode == 0:
        atexit.register(end)
    else:
        end()


def main(arguments: Sequence[str] | None = None) -> None:
    """Unpacks, runs, measures and packs, and says what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", help="time for all, as 9m or 2h; no limit where left out")
    parser.add_argument("--jobs", type=int, help=f"runs at once; where left out {JOBS_ON_CUDA} on CUDA, else 1")
    parser.add_argument("--precision", default="float32", help="of all runs; claims count float32 alone")
    parser.add_argument("--carry", type=Path, help="folder for an archive of records and checkpoints")
    parser.add_argument("--from", type=Path, dest="origin", help="folder with such an archive, to go on from")
    parser.add_argument("--tiny", action="store_true", help="try it on the CPU: a run of each work, on built-in digits")
    given = parser.parse_args(arguments)
    carry, on_cuda = given.carry is not None, torch.cuda.is_available() and not given.tiny
    jobs = given.jobs or (JOBS_ON_CUDA if on_cuda else 1)
    more = {"precision": given.precision} if given.precision != "float32" else {}
    try:
        limit_time(given.time)
        deadline = time.monotonic() + time_left() - RESERVE
        if given.origin:  # what is here already may be newer, and stays
            parts = f"{shlex.quote(str(given.origin))}/evidence.tgz.*"
            subprocess.run(f"cat {parts} | tar -xz --skip-old-files", shell=True, check=True)
        tag = f"tiny-{given.precision}" if given.tiny else given.precision
        runs = planned_runs(tag, {**more, **TINY} if given.tiny else more, 1 if given.tiny else None)
    except (UserError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    interrupt_on_signals()
    if on_cuda and jobs > 1:
        start_mps()
    try:
        work_until(deadline, runs, jobs, carry)
        if folders := [str(run.folder) for run in runs if run.unmeasured]:
            start(["quality", *folders], 1).wait()
    except KeyboardInterrupt as error:
        print(error)
    if carry:
        pack(runs, given.carry)
    reasons = {}
    for run in runs:
        if not run.ended and run.decides not in reasons:
            reasons[run.decides] = seconds_for(run, runs, (), deadline - time.monotonic(), carry)[1]
            print(f"open: {run.decides}: {run.label}: {reasons[run.decides] or 'it has failed or was interrupted'}")
    print(f"{sum(run.ended for run in runs)} of {len(runs)} runs have ended; 'fedcli claims' says what they decide")


if __name__ == "__main__":
    main()
