"""All trials, each a seeded program that says how often it tried to break something, and what broke."""

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.programs import SMALL, start
from tests.torture import damage, hostile, kills, lines
from tests.torture.forks import call, fork

RECORDS = sorted((Path(__file__).parents[2] / "results" / "records").rglob("record.json"))
SECONDS = 30  # until a fuzzed command is interrupted
INTERRUPTED = """
import os, runpy, signal, sys

class Finder:
    left = int(sys.argv.pop(1))

    def find_spec(self, *about):
        Finder.left -= 1
        if Finder.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

import fedcli.__main__
sys.meta_path.insert(0, Finder())
sys.argv[0] = "fedcli"
fedcli.__main__.main()
"""


class Result(NamedTuple):
    """What became of a trial."""

    tried: int
    faults: list[str]


def kill(count: int, first: int = 0) -> Result:
    """Kills at random moments, in chains of about 25, over all of `kills.METHODS`."""
    faults, hits = [], 0
    each = -(-count // len(kills.METHODS))
    for method in kills.METHODS:
        with TemporaryDirectory() as folder:
            hit, fault = kills.chain(method, Path(folder), each, first)
        hits += hit
        faults += [f"{method}: {fault}"] if fault else []
    return Result(hits, faults)


def kill_workers(count: int, first: int = 0) -> Result:
    """Kills one of two workers at random moments, over all of `kills.METHODS`."""
    faults, hits = [], 0
    for trial in range(first, first + count):
        method = kills.METHODS[trial % len(kills.METHODS)]
        with TemporaryDirectory() as folder:
            hit, fault = kills.kill_worker(method, Path(folder), trial)
        hits += hit
        faults += [f"{trial}, {method}: {fault}"] if fault else []
    return Result(hits, faults)


def flip(count: int, first: int = 0) -> Result:
    """Flipped bits, cut files and files of another run, over all files of seven kinds of runs."""
    faults = []
    with TemporaryDirectory() as place:
        root = Path(place)
        made = {kind: damage.make(kind, root / str(number)) for number, kind in enumerate(damage.KINDS)}
        for trial in range(first, first + count):
            draw, number = random.Random(trial), trial % len(made)
            kind, source = list(made)[number], root / str(number)
            folder = shutil.copytree(source / "run", root / "spoilt")
            what = damage.spoil(folder, source / "other", draw)

            def resumed(folder=folder, end=made[kind], what=what) -> None:
                if fault := damage.fault(folder, end, what):
                    raise SystemExit(fault)

            end = fork(resumed)
            faults += [f"{trial}, {kind}, {what}: {end.err.strip()[-200:]}"] if end.code else []
            shutil.rmtree(folder)
    return Result(count, faults)


def fuzz(count: int, first: int = 0) -> Result:
    """Fuzzed command lines."""
    faults = []
    with TemporaryDirectory() as place:
        run = Path(place, "a", "run")
        call(Path(place), "run", "fedavg", *SMALL, "--out", run)

        @seed(first)
        @settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(lines.lines)
        def one(line: list[str]) -> None:
            folder = Path(place, "b")
            folder.mkdir()
            lines.prepare(folder)
            shutil.copytree(run, folder / "run")
            end = call(folder, *line, seconds=SECONDS)
            if end.fault:
                faults.append(f"{[text[:60] for text in line]}: {end.fault[:200]}")
            shutil.rmtree(folder)

        one()
    return Result(count, faults)


def read_records(count: int, first: int = 0) -> Result:
    """Records with something wild in them, looked at by every command that reads them."""
    faults = []
    for trial in range(first, first + count):
        with TemporaryDirectory() as place:
            draw = random.Random(trial)
            what = hostile.spoil_record(draw.choice(RECORDS), Path(place, "r"), draw)
            command = [text.format("r") for text in hostile.LOOKS[trial % len(hostile.LOOKS)]]
            end = call(Path(place), *command)
            faults += [f"{trial}, {what}, {command}: {end.fault[:200]}"] if end.fault else []
    return Result(count, faults)


def read_archives(count: int, first: int = 0) -> Result:
    """Archives, folders and images that hang, burst or lead astray."""
    faults = []
    for trial in range(first, first + count):
        with TemporaryDirectory() as place:
            kind = hostile.ARCHIVES[trial % len(hostile.ARCHIVES)]
            name, path = hostile.archive(Path(place), kind, random.Random(trial))
            end = call(Path(place), "data", "import", name, path)
            if not end.code and not end.fault:
                end = call(Path(place), "data", "show", name)
            faults += [f"{trial}, {kind}: {end.fault[:200]}"] if end.fault else []
    return Result(count, faults)


def interrupt(count: int, first: int = 0) -> Result:
    """Control-C at the so-many-th import of a program."""
    faults = []
    for trial in range(first, first + count):
        moment = random.Random(trial).randint(1, 1500)
        with TemporaryDirectory() as place:
            command = ("run", "fedavg", *SMALL, "--out", "run")
            program = start(place, moment, *command, program=("-c", INTERRUPTED))
            _, said = program.communicate()
        if program.returncode != 128 + signal.SIGINT or not said.splitlines()[-1].startswith("interrupted"):
            faults.append(f"at import {moment}: exit code {program.returncode}, {said.strip()[-200:]}")
        elif "Traceback" in said:
            faults.append(f"at import {moment}: a traceback")
    return Result(count, faults)


TRIALS: dict[str, tuple[Callable[..., Result], int]] = {  # each with how often in an hour
    "kills at random moments, over 12 methods": (kill, 300),
    "one of two workers killed": (kill_workers, 12),
    "flipped bits, cut and exchanged files of seven kinds of runs": (flip, 500),
    "fuzzed command lines": (fuzz, 1000),
    "hostile records": (read_records, 260),
    "hostile archives, folders and images": (read_archives, 63),
    "Control-C while modules are imported": (interrupt, 20),
}
