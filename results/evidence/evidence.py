"""Go on with the open claims in the order of WORK, on the device at hand, as long as there is time.

    python results/evidence/evidence.py --time 9m --carry OUT                # on a machine that is lent for minutes
    python results/evidence/evidence.py --time 9m --from OUT --carry NEXT    # on the next one

README.md beside this file says how code and data come to such a machine, and what to do with what comes back.
"""

import argparse
import math
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedcli.cli.common import limit_time
from fedcli.data import datasets
from fedcli.declarations import Table
from fedcli.errors import UserError
from fedcli.registry import find_table
from fedcli.results import jobs
from fedcli.results.costs import cost_of, paces
from fedcli.results.frame import read_runs
from fedcli.results.plans import HOME, Plan, PlannedRun, plan, wanted
from fedcli.runs.checkpoints import CHECKPOINT, STATES
from fedcli.runs.models import bytes_kept
from fedcli.runs.records import RECORD, environment
from fedcli.runs.run import read_begun
from fedcli.runs.signals import OutOfTime, interrupt_on_signals, set_time_limit, time_left

MIB = 2**20
PART = 16 * MIB  # bytes of a file of the archive
ARCHIVE, CARRIED = 62 * MIB, 60 * MIB  # bytes of the archive, and of the checkpoints in it, at most
RESERVE = 45  # seconds of --time for last checkpoints, `fedcli quality` and the archive
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


def planned_runs() -> list[PlannedRun]:
    """Returns the runs of WORK that the committed records lack, in its order, each once."""
    runs = {}
    for work in WORK:
        table = plan(table_of(work), seeds=work.seeds, only=work.only)
        for run in sorted(table.runs, key=lambda run: run.setup.run.seed):
            run.label = f"{work.decides}: {work.table} {run.label}, seed {run.setup.run.seed}"
            if run.folder.is_relative_to(HOME):  # of several tables that share a run the first has its folder
                runs.setdefault((run.folder.parent.name, run.folder.name), run)
    return [*runs.values()]


def table_of(work: Work) -> Table:
    """Returns the paper's table, its cells with the options that stand in place of theirs."""
    table, cells = find_table(work.table), []
    if not work.instead:
        return table
    for cell in table.cells:
        options = wanted(cell).setup.values()  # all of them, since another protocol would set its own
        options = {name: value for name, value in options.items() if value is not None and not name.endswith("seed")}
        cells.append(replace(cell, settings={**options, **work.instead}))
    return replace(table, cells=tuple(cells))


def refreshed(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Returns the runs with the records that they have now."""
    return [replace(run, record=read_begun(run.folder)) for run in runs]


def lacks_quality(run: PlannedRun) -> bool:
    """Returns whether `fedcli quality` has to follow the run, as a claim is about its features."""
    return any(metric.after_the_run for metric in run.metrics) and "quality" not in (run.record or {})


def files_of(run: PlannedRun) -> list[Path]:
    """Returns what a run goes on from, beside its record; the model of the best round so far is not needed for that."""
    return [*run.folder.glob(CHECKPOINT), *run.folder.glob(f"{STATES}/*")]


def nbytes_of(run: PlannedRun) -> int:
    """Returns the bytes of these files; before there are any, of the models that the server and the clients keep."""
    if files := files_of(run):
        return sum(file.stat().st_size for file in files)
    images, method = datasets.describe(run.setup.run.dataset), run.setup.method
    models = bytes_kept(replace(run.setup, selection="last"), *images["shape"][:2], images["classes"])
    keeps_states = method.personal is None and len(method.state_types) > 1
    return models * (1 + keeps_states * run.setup.run.num_clients)


def obstacle(run: PlannedRun, room: float) -> str:
    """Says why a run may not start: no data, or neither room in the archive nor time to finish; empty if it may."""
    if not all(map(datasets.present, run.setup.data_sets)):
        return "its data set is not on this machine"
    if nbytes_of(run) <= room:
        return ""
    hardware = environment(run.setup.device)["hardware"]
    timed = paces(read_runs([HOME]), disturbed=True)  # of the same network, precision and device
    (seconds,) = cost_of([run], timed, (hardware["device"], hardware["name"]))["seconds"]  # NaN where none was timed
    if seconds < time_left():
        return ""
    return f"{nbytes_of(run) / MIB:,.0f} MiB cannot be carried, and it is not known to finish in the time left"


def choose(runs: Sequence[PlannedRun], at_once: int, carry: bool) -> list[PlannedRun]:
    """Returns the first so many runs that may go on together, those that have begun before the others."""
    room, chosen = CARRIED if carry else math.inf, []
    for run in sorted(runs, key=lambda run: run.record is None):
        if len(chosen) < at_once and not obstacle(run, room):
            chosen.append(run)
            room -= nbytes_of(run) if nbytes_of(run) <= room else 0
    return chosen


def work_through(runs: list[PlannedRun], at_once: int, carry: bool) -> None:
    """Makes so many runs at once, then the next, until none may start or the time is over."""
    waiting = [run for run in runs if run.to_do]
    while time_left() > 0 and (chosen := choose(waiting, at_once, carry)):
        for run in chosen:
            print(f"next: {run.label} in {run.folder}", flush=True)
        for folder, error in jobs.execute(Plan(HOME, tuple(chosen)), jobs.Watch(), at_once).items():
            print(f"failed: {folder}: {error}")
        waiting = [run for run in waiting if run not in chosen]  # one that has failed does not start again


def pack(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Writes all records, and what open runs need as far as there is room, as parts of an archive in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("evidence.tgz.*"):
        old.unlink()
    begun = [run for run in runs if run.record]
    files = [run.folder / RECORD for run in begun]
    room = ARCHIVE - sum(file.stat().st_size for file in files) / 3  # compressed they take less
    for run in [run for run in begun if run.to_do or lacks_quality(run)]:
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
    parser.add_argument("--carry", type=Path, help="folder for an archive of records and checkpoints")
    parser.add_argument("--from", dest="origin", help="folder with such an archive, to go on from")
    options = parser.parse_args(arguments)
    carry, at_once = options.carry is not None, options.jobs or (JOBS_ON_CUDA if torch.cuda.is_available() else 1)
    try:
        limit_time(options.time)
        set_time_limit(time_left() - RESERVE)
        if options.origin:  # what is here already may be newer, and stays
            unpack = f"cat {shlex.quote(options.origin)}/evidence.tgz.* | tar -xz --skip-old-files"
            subprocess.run(unpack, shell=True, check=True)
        runs = planned_runs()
    except (UserError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    interrupt_on_signals()
    try:
        with suppress(OutOfTime):
            work_through(runs, at_once, carry)
        folders = [run.folder for run in refreshed(runs) if run.state == "finished" and lacks_quality(run)]
        if folders:
            subprocess.run([sys.executable, "-m", "fedcli", "quality", *folders], check=False)
    except KeyboardInterrupt as error:
        print(error)
    runs = refreshed(runs)
    if carry:
        pack(runs, options.carry)
    first_open = {run.label.split(": ")[0]: run for run in reversed(runs) if run.to_do}
    for run in reversed(first_open.values()):
        print(f"open: {run.label}: {obstacle(run, CARRIED if carry else math.inf) or 'goes on next time'}")
    ended = [run for run in runs if not run.to_do]
    print(f"{len(ended)} of {len(runs)} runs have ended; 'fedcli claims' says what they decide")


if __name__ == "__main__":
    main()
