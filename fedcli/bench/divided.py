"""Rounds divided among workers: what they take, a model of what they would take with more, and a page on both.

Each worker has one thread, as a device of its own would be, and beside them one process with all threads is measured.
From what one worker computes, what travels how fast, and what the server does on every worker, the model says what a
round takes at other numbers of workers. Beside the workloads of `rounds` there is `digits`, 8 x 8 grey, 10 clients x
143 images, all in a round, 2 epochs, batch 16, `cnn-small`.
"""

import csv
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedcli.bench.measure import short
from fedcli.bench.rounds import (
    FIRST_ROUND,
    WORKLOADS,
    EngineRounds,
    Workload,
    find_workload,
    load_images,
    prepare,
    seconds_of,
)
from fedcli.core.autotune import autotune
from fedcli.errors import UserError
from fedcli.results.render import github
from fedcli.runs.prepare import flushed_denormals, machine_settings
from fedcli.runs.records import environment
from fedcli.runs.workers import joined, launch

DIVIDED = {**WORKLOADS, "digits": Workload("digits", "digits", 1, 8, 10, 143, 10, 2, 16, "cnn-small")}
SAMPLE = {"w3": 64}  # images a client, one epoch, where a round takes hours; what is computed is scaled up
TURNS = 2  # passes over the numbers of workers, so that a noisy machine hits all of them
MODELLED = (1, 2, 4, 8, 16, 32, 64)  # workers
NUMBERS = ("round", "computing", "gathering", "server", "MiB gathered")


@dataclass(frozen=True)
class Divided:
    """What a round took, medians over rounds; seconds but for the numbers.

    Attributes:
        workload: Its name.
        clients: In a round.
        workers: Processes.
        threads: Of each.
        compute: Local training by the slowest worker, scaled to the whole workload.
        gather: What tensors took to travel.
        server: All else: drawing the batches, and the server's step.
        nbytes: What travelled, of all workers together.
        rounds: How many were measured.
        machine: On which, with which version of PyTorch.
    """

    workload: str
    clients: int
    workers: int
    threads: int
    compute: float
    gather: float
    server: float
    nbytes: float
    rounds: int
    machine: str

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.compute + self.gather + self.server

    @property
    def numbers(self) -> tuple[float, ...]:
        """What tables show, by `NUMBERS`."""
        return self.seconds, self.compute, self.gather, self.server, self.nbytes / 2**20


def measure(
    names: Sequence[str], counts: Sequence[int], progress: Callable[[str], Any], **options: Any
) -> list[Divided]:
    """Measures rounds at numbers of workers with one thread each, and of one process with a thread a core.

    Args:
        names: Of workloads, also `digits`.
        counts: Of workers.
        progress: Told what is being done.
        **options: As for `prepare`.

    Raises:
        UserError: If an option is out of range, or a worker fails.
    """
    for name in names:
        prepare(find_workload(name, DIVIDED), **options)
    cores = os.cpu_count() or 1
    cases = [(name, *how) for name in names for how in dict.fromkeys([(1, cores), *((count, 1) for count in counts)])]
    rounds: dict[tuple, list[list[float]]] = {case: [] for case in cases}
    for turn in range(TURNS):
        for case in cases:
            name, count, threads = case
            progress(f"{name}: {count} workers, {threads} threads each, turn {turn + 1} of {TURNS}")
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rounds"
                if launch(rounds_of_worker, name, threads, options, str(file), count=count, restarts=0):
                    raise KeyboardInterrupt
                rounds[case] += json.loads(file.read_text())
    machine = f"{cores} cores of {environment(torch.device('cpu'))['hardware']['name']}, torch {torch.__version__}"
    return [
        Divided(
            name, find_workload(name, DIVIDED).cohort_size, count, threads, *map(median, zip(*found, strict=True)),
            len(found), machine,
        )
        for (name, count, threads), found in rounds.items()
    ]  # fmt: skip


@flushed_denormals()
def rounds_of_worker(name: str, threads: int, options: dict[str, Any], file: str) -> int:
    """Runs rounds of a workload as one of several workers; the first writes what each took, as `Divided` has it."""
    whole, images = find_workload(name, DIVIDED), SAMPLE.get(name)
    part = whole if images is None else replace(whole, images_per_client=images, local_epochs=1)
    torch.set_num_threads(threads)
    with joined() as group:
        workload, setup, repeats = prepare(part, **options)
        engine, found = EngineRounds(setup, load_images(workload, setup.run.seed)[0]), []
        with machine_settings(engine.fed):
            autotune(engine.fed)
            for number in range(FIRST_ROUND, FIRST_ROUND + 1 + repeats):  # the first warms up
                group.seconds, group.nbytes = 0.0, 0
                seconds = seconds_of(partial(engine.round, number), engine.fed.device)
                training = engine.fed.seconds["train"]
                compute = (training - group.seconds) * whole.samples / part.samples
                found.append([compute, group.seconds, seconds - training, group.nbytes])
        if group.number == 0:
            Path(file).write_text(json.dumps(found[1:]))
    return 0


def modelled(rows: Sequence[Divided], workers: int) -> Divided:
    """What a round of one workload takes at a number of workers, each a device like a thread of this machine.

    A worker trains `ceil(K / W)` of K clients; it receives what the others have trained, `(W - 1) / W` of all, as fast
    as was measured with the fewest workers above one; the server's step is repeated on each.

    Args:
        rows: The workload's measurements, one worker with one thread and some number of workers among them.
        workers: Their number, W.
    """
    one = next(row for row in rows if (row.workers, row.threads) == (1, 1))
    several = min((row for row in rows if row.workers > 1), key=lambda row: row.workers)
    a_share = several.gather / (1 - 1 / several.workers)  # seconds for all bytes
    compute = one.compute * -(-one.clients // workers) / one.clients
    gather = a_share * (1 - 1 / workers)
    return Divided(one.workload, one.clients, workers, 1, compute, gather, one.server, several.nbytes, 0, one.machine)


def by_workload(rows: Sequence[Divided]) -> dict[str, list[Divided]]:
    """The measurements of each workload."""
    names = dict.fromkeys(row.workload for row in rows)
    return {name: [row for row in rows if row.workload == name] for name in names}


def model(rows: Sequence[Divided]) -> dict[str, list[Divided]]:
    """What a round of each measured workload takes at the numbers of workers in `MODELLED`."""
    return {name: [modelled(own, count) for count in MODELLED] for name, own in by_workload(rows).items()}


def read(file: Path) -> list[Divided]:
    """The measurements in the CSV file of a page; none where there is no file.

    Raises:
        UserError: If the file holds something else.
    """
    if not file.is_file():
        return []
    fields = dataclasses.fields(Divided)
    with file.open(newline="", encoding="utf-8") as text:
        lines = csv.reader(text)
        if next(lines, None) != [field.name for field in fields]:
            raise UserError(f"'{file}' does not hold measurements of this command (got another first line); move it.")
        return [Divided(*(field.type(cell) for field, cell in zip(fields, line, strict=True))) for line in lines]


def write(file: Path, rows: Sequence[Divided]) -> list[Divided]:
    """Writes measurements in place of those of the same workloads, and of other machines.

    Returns:
        All that the file has now.
    """
    new = {row.workload for row in rows}
    kept = [row for row in read(file) if row.workload not in new and row.machine == rows[0].machine]
    found = sorted([*kept, *rows], key=lambda row: list(DIVIDED).index(row.workload))
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Divided))
        writer.writerows(map(dataclasses.astuple, found))
    return found


def page(rows: Sequence[Divided]) -> str:
    """A page on rounds divided among workers, in Markdown: measured, modelled, and where more stop paying.

    Args:
        rows: The measurements, of one machine.
    """
    counts = ",".join(str(count) for count in sorted({row.workers for row in rows if row.threads == 1}))
    workloads, cores = by_workload(rows), os.cpu_count()
    measured = []
    for row in rows:
        alone = row.threads == 1 and row.workers <= cores
        said = short(modelled(workloads[row.workload], row.workers).seconds) if alone else ""
        shared = f", sharing {cores} cores" if row.workers > cores else ""
        how = f"{row.workers} x {row.threads}{shared}"
        measured.append((row.workload, how, str(row.rounds), *map(short, row.numbers), said))
    beyond = [
        (name, *(short(row.seconds) for row in found), _end_of_gain(found)) for name, found in model(rows).items()
    ]
    parts = [
        "# One run on several workers",
        f"`fedcli bench {' '.join(workloads)} --workers {counts} --page PATH` measures this and writes the page; what "
        "is measured of one workload takes the place of its numbers in the CSV file beside the page.",
        f"On {rows[0].machine}. Medians in seconds a round; the numbers of workers take turns, {TURNS} times. Of w3 "
        f"one epoch on {SAMPLE['w3']} images a client is measured, and its computing scaled to the whole round.",
        "\n".join(github(("workload", "workers x threads", "rounds", *NUMBERS, "model"), measured)),
        "The model: `ceil(K / W) / K` of what one worker computes, plus gathering, `(W - 1) / W` of the bytes at the "
        "measured bandwidth, plus the server's step, which every worker repeats. It supposes a device for each worker; "
        "those of one machine share its memory and caches.",
        "\n".join(
            github(("seconds with W workers", *(f"W = {count}" for count in MODELLED), "where it stops paying"), beyond)
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _end_of_gain(found: Sequence[Divided]) -> str:
    """From which number of workers on twice as many save less than a tenth, and why."""
    for last, twice in pairwise(found):
        if twice.seconds > 0.9 * last.seconds:
            if last.workers >= last.clients:
                return f"{last.workers}: each of {last.clients} clients has a worker"
            part, what = max((twice.gather, "gathering"), (twice.server, "the server's step"))
            return f"{last.workers}: with {twice.workers}, {what} takes {part / twice.seconds:.0%} of the round"
    return f"not up to {found[-1].workers}"
