"""Speed of the engine against a plain PyTorch loop, both measured in the same run, and how a result is shown and kept.

Both sides run under the same threads and precision settings; the engine, as in a run, by operations that give the same
bits each time, the plain loop by PyTorch's default ones. Each has one round to warm up; then a round of the engine
and one of the plain loop take turns, so that a noisy machine hits both. The ratio is the median over these pairs of
plain seconds over engine seconds: above 1 the engine is faster.

The share of the floor that is reached is floor over measured time. The evaluation's floor is the arithmetic of its
forward passes. A floor above the measured time is a measurement that has failed, most likely because other programs
took the cores while the ceilings were measured; it is printed as such.
"""

import csv
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedcli.bench.floors import ceilings
from fedcli.bench.rounds import (
    FIRST_ROUND,
    SHAPE,
    WORKLOADS,
    Case,
    EngineRounds,
    PlainRounds,
    Workload,
    load_images,
    seconds_of,
)
from fedcli.core.autotune import autotune, peak_memory
from fedcli.errors import UserError
from fedcli.runs.config import Setup
from fedcli.runs.prepare import flushed_denormals, machine_settings
from fedcli.runs.records import environment

COLUMNS = (
    "workload", "engine", "device", "method", "seconds_per_round", "seconds_spread", "plain_seconds_per_round",
    "plain_spread", "ratio", "samples_per_second", "floor_seconds", "floor_share", "arithmetic_floor_seconds",
    "memory_floor_seconds", "peak_bytes", "evaluation_seconds", "evaluation_floor_seconds", "data_seconds_share",
    "images", "torch", "threads", "hardware", "precision", *SHAPE, "repeats", "seed",
)  # fmt: skip
TABLES = (  # column: cell, of a result; each table in the width of a terminal, times in seconds
    {
        "Workload": "{workload}{words}",
        "Engine": "{engine}",
        "Round": "{seconds_per_round} ({seconds_spread})",
        "Plain loop": "{plain_seconds_per_round} ({plain_spread})",
        "Ratio": "{ratio}x",
        "Samples/s": "{samples_per_second}",
    },
    {
        "Workload": "{workload}{words}",
        "Floor": "{floor_seconds} ({reached})",
        "Not training": "{data_percent} %",
        "Evaluation": "{evaluation_seconds}",
        "Its floor": "{evaluation_floor_seconds} ({evaluation_reached})",
        "Peak MiB": "{peak_mebibytes}",
        "Images": "{images}",
    },
)
MACHINE = (
    "{method} on {device} ({hardware}), threads: {threads}, torch {torch}, {precision}; times in seconds, median of "
    "{repeats} rounds (least-largest)"
)


@flushed_denormals()
def measure(case: Case, progress: Callable[[str], Any] = lambda text: None) -> dict[str, Any]:
    """Measures one workload.

    Args:
        case: What to measure.
        progress: Told what is being done.

    Returns:
        The result, by `COLUMNS`. `engine` is `Engine.mode`; spreads are [least, largest]. `peak_bytes` is that of the
        engine's joint steps, its images included: on CUDA what PyTorch holds, on a CPU what the process does (where the
        system cannot set the process's peak back, the largest so far). `evaluation_seconds` is a pass over the test
        images by the engine, for every model that a round has changed. `data_seconds_share` is what a round spends
        outside of local training: drawing the batches, aggregation, and the drawing of the partition, which is counted
        whole though a run does it once.
    """
    workload, setup, repeats = case
    dataset, images = load_images(workload, setup.run.seed)
    _reset_peak(setup.device)
    engine = EngineRounds(setup, dataset)
    with machine_settings(engine.fed):  # what a run would set, for both sides, as are denormal numbers
        autotune(engine.fed)
        progress(f"{workload.name}: warming up")
        engine.round(FIRST_ROUND)
        measured = {"images": images, "peak_bytes": peak_memory(setup.device)}
        engine.evaluate()
        plain = PlainRounds(workload, dataset, engine.fed)
        plain.round(engine.fed.cohort(FIRST_ROUND).client_ids)
        assert plain.parameters == engine.fed.sizes.parameters, "the two sides train different networks"
        measured |= _time_pairs(case, engine, plain, progress)
        progress(f"{workload.name}: ceilings")
        limits = ceilings(setup.device, setup.run.precision, plain.convolutions())
        arithmetic = workload.samples * plain.flops_per_sample() / limits.flops
        # Parameter, gradient and momentum, each read and written.
        touched = 2 * 3 * plain.parameters * engine.fed.dtype.itemsize
        memory = workload.steps * touched / limits.bandwidth
        tested = engine.models_tested * len(engine.fed.test_labels)
    floor, machine = max(arithmetic, memory), environment(setup.device)
    measured |= {
        "workload": workload.name, "engine": engine.fed.engine.mode, "device": str(setup.device),
        "method": setup.method.name, "floor_seconds": floor, "floor_share": floor / measured["seconds_per_round"],
        "arithmetic_floor_seconds": arithmetic, "memory_floor_seconds": memory,
        "evaluation_floor_seconds": tested * plain.flops_per_sample(train=False) / limits.flops,
        "torch": machine["versions"]["torch"], "threads": machine["hardware"]["threads"],
        "hardware": machine["hardware"]["name"], "repeats": repeats,
        **{name: getattr(setup.run, name) for name in ("precision", *SHAPE, "seed")},
    }  # fmt: skip
    return {name: measured[name] for name in COLUMNS}


@flushed_denormals()
def measure_run(setup: Setup, repeats: int, progress: Callable[[str], Any] = lambda text: None) -> dict[str, Any]:
    """Times rounds of a protocol's own run end to end, its last ones, in which all of a method's terms have begun.

    Args:
        setup: The run, see `prepare_run`.
        repeats: Rounds that are timed, after one to warm up.
        progress: Told what is being done.

    Returns:
        `seconds_per_round` (the median, testing included) and `seconds_spread`, of these `evaluation_seconds`,
        `whole_seconds` of all rounds, `peak_bytes` of a round before testing, and what was run.
    """
    run, name = setup.run, setup.method.name
    cifar = Workload(name, run.dataset, 3, 32, 1, run.train_examples or 50_000, 1, 1, 1, run.backbone)
    dataset, images = load_images(cifar, run.seed)
    _reset_peak(setup.device)
    engine = EngineRounds(setup, dataset)
    rounds, tests, peaks = [], [], []
    with machine_settings(engine.fed):
        autotune(engine.fed)
        first = max(run.rounds - repeats - 1, 0)
        for number in range(first, first + repeats + 1):
            progress(f"{name}: round {number + 1}")
            rounds.append(seconds_of(partial(engine.round, number), setup.device))
            peaks.append(peak_memory(setup.device))
            tests.append(seconds_of(engine.evaluate, setup.device))
    whole = [a + b for a, b in zip(rounds[1:], tests[1:], strict=True)]
    about = {key: getattr(run, key) for key in ("dataset", "rounds", "backbone", "precision", *SHAPE, "seed")}
    return {
        "method": name, "protocol": setup.protocol.name, **about, "images": images, "engine": engine.fed.engine.mode,
        "device": str(setup.device), "repeats": repeats, "seconds_per_round": median(whole),
        "seconds_spread": [min(whole), max(whole)], "evaluation_seconds": median(tests[1:]),
        "whole_seconds": run.rounds * median(whole), "peak_bytes": peaks[0],
    }  # fmt: skip


def describe_run(result: dict[str, Any]) -> str:
    """Says in a sentence what `measure_run` has measured."""
    least, largest = map(short, result["seconds_spread"])
    return (
        "{method} under {protocol} on {dataset} ({images} images), {backbone}, {precision}, {engine} on {device}: "
        f"{short(result['seconds_per_round'])} seconds a round ({least}-{largest}), "
        f"{short(result['evaluation_seconds'])} of them testing; all {{rounds}} rounds take "
        f"{short(result['whole_seconds'] / 60)} minutes. Peak {short(result['peak_bytes'] / 2**20)} MiB."
    ).format(**result)


def _time_pairs(case: Case, engine: EngineRounds, plain: PlainRounds, progress: Callable[[str], Any]) -> dict[str, Any]:
    """What the seconds of the rounds say, engine and plain loop taking turns."""
    own, server, other, tests = [], [], [], []
    workload, repeats = case.workload, case.repeats
    for number in range(FIRST_ROUND + 1, FIRST_ROUND + 1 + repeats):
        progress(f"{workload.name}: pair {number - FIRST_ROUND} of {repeats}")
        clients = engine.fed.cohort(number).client_ids
        own.append(seconds_of(partial(engine.round, number), engine.fed.device))
        server.append(own[-1] - engine.fed.seconds["train"])
        other.append(seconds_of(partial(plain.round, clients), engine.fed.device))
        tests.append(seconds_of(engine.evaluate, engine.fed.device))
    return {
        "seconds_per_round": median(own),
        "seconds_spread": [min(own), max(own)],
        "plain_seconds_per_round": median(other),
        "plain_spread": [min(other), max(other)],
        "ratio": median(b / a for a, b in zip(own, other, strict=True)),
        "samples_per_second": workload.samples / median(own),
        "evaluation_seconds": median(tests),
        "data_seconds_share": (engine.partition_seconds + median(server)) / (engine.partition_seconds + median(own)),
    }


def _reset_peak(device: torch.device) -> None:
    """Sets the peak memory back to what is used now, on Linux that of the process too."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def result_file(path: Path, device: torch.device, ending: str) -> Path:
    """The path as it is; of a folder, the file in it that is named after the device and the version of PyTorch."""
    if not path.is_dir():
        return path
    about = environment(device)["hardware"]
    name = about["name"] if device.type == "cuda" else f"cpu {about['cores']} cores"
    words = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return path / f"{words}-torch{torch.__version__.split('+')[0]}{ending}"


def append_csv(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Appends results to a CSV file, with `COLUMNS` as its first line where it is new; a spread is a JSON list.

    Raises:
        UserError: If the file holds something else.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    if lines and lines[0] != ",".join(COLUMNS):
        raise UserError(
            f"'{path}' does not hold results of this command (got '{lines[0][:40]}' as its first line); "
            f"choose a new file or one that --csv wrote."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not lines:
            writer.writerow(COLUMNS)
        for result in results:
            writer.writerow(json.dumps(cell) if isinstance(cell, list) else cell for cell in result.values())


def table_row(result: dict[str, Any], cells: dict[str, str]) -> list[str]:
    """A result as the cells of one of `TABLES`."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "-".join(map(text, value))
        return short(value) if isinstance(value, float) else str(value)

    def reached(floor: str, time: str) -> str:
        share = result[floor] / result[time]
        return f"{share:.0%}" if share <= 1 else "failed: too high"

    words = f" {WORKLOADS[result['workload']].words}" if result["workload"] in WORKLOADS else ""
    more = {
        "words": words.rstrip(),
        "data_percent": text(100 * result["data_seconds_share"]),
        "peak_mebibytes": text(result["peak_bytes"] / 2**20),
        "reached": reached("floor_seconds", "seconds_per_round"),
        "evaluation_reached": reached("evaluation_floor_seconds", "evaluation_seconds"),
    }
    shown = {name: text(value) for name, value in result.items()}
    return [cell.format(**shown, **more) for cell in cells.values()]


def short(number: float) -> str:
    """A number with three digits or, from 100 on, without a fraction."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
