"""Speed of the engine against a plain PyTorch loop, both measured in the same run, and how a result is shown and kept.

Both sides run under the same threads and precision settings; the engine, as in a run, by operations that give the same
bits each time, the plain loop by PyTorch's default ones. Each has one round to warm up; then a round of the engine
and one of the plain loop take turns, so that a noisy machine hits both. The ratio is the median over these pairs of
plain seconds over engine seconds: above 1 the engine is faster.

A lower bound, called "floor" in files, is the time that the arithmetic or the traffic takes at this machine's own peak
rates, the larger of the two. Arithmetic: the FLOPs of the plain loop's round over those of the fastest of several
matrix products and of the network's own convolutions in the same precision, done by each thread alone. Memory: the
bytes of parameters, gradients and momentum, each read and written once in every step of every client, over those of a
large copy. The evaluation's is the arithmetic of its forward passes. A lower bound above the measured time is a
measurement that has failed, most likely because other programs took the cores while the peak rates were measured.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedcli.bench.rounds import (
    FIRST_ROUND,
    SHAPE,
    WORKLOADS,
    EngineRounds,
    PlainRounds,
    Workload,
    load_images,
    seconds_of,
)
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
TABLES = (  # columns of the cells of a result, each table in the width of a terminal
    ("Workload", "Engine", "Round", "Plain loop", "Ratio", "Samples/s"),
    ("Workload", "Bound", "Not training", "Evaluation", "Its bound", "Peak MiB", "Images"),
)
MACHINE = (
    "{method} on {device} ({hardware}), threads: {threads}, torch {torch}, {precision}; times in seconds, median of "
    "{repeats} rounds (least-largest)"
)
MATMUL_SIDES = {"cpu": (2048, 1024, 512), "cuda": (8192, 4096)}
COPY_BYTES = 2**28  # beyond any cache
TRIES, LASTING = 4, 0.15  # tries of each rate, of which the fastest counts; seconds of a try, at least


@flushed_denormals()
def measure(
    workload: Workload, setup: Setup, repeats: int, progress: Callable[[str], Any] = lambda text: None
) -> dict[str, Any]:
    """Measures one workload by pairs of rounds of its run, see `prepare`; `progress` is told what is being done.

    Returns:
        The result, by `COLUMNS`. `engine` is `Engine.mode`; spreads are [least, largest]. `peak_bytes` is that of the
        engine's joint steps, its images included: on CUDA what PyTorch holds, on a CPU what the process does (where the
        system cannot set the process's peak back, the largest so far). `evaluation_seconds` is a pass over the test
        images by the engine, for every model that a round has changed. `data_seconds_share` is what a round spends
        outside of local training: drawing the batches and aggregation.
    """
    dataset, images = load_images(workload, setup.run.seed)
    engine = EngineRounds(setup, dataset)
    fed, device = engine.fed, setup.device
    with machine_settings(fed):  # what a run would set, for both sides, as are denormal numbers
        peak = engine.warm_up(FIRST_ROUND)
        plain = PlainRounds(workload, dataset, fed)
        plain.round(fed.cohort(FIRST_ROUND).client_ids)
        assert plain.parameters == fed.sizes.parameters, "the two sides train different networks"
        rows = []
        for number in range(FIRST_ROUND + 1, FIRST_ROUND + 1 + repeats):
            progress(f"{workload.name}: pair {number - FIRST_ROUND} of {repeats}")
            ours, training = seconds_of(partial(engine.round, number), device), fed.seconds["train"]
            plains = seconds_of(partial(plain.round, fed.cohort(number).client_ids), device)
            rows.append((ours, ours - training, plains, plains / ours, seconds_of(engine.evaluate, device)))
        progress(f"{workload.name}: peak rates")
        dtype = torch.bfloat16 if setup.run.precision == "bf16" else fed.dtype
        flops = peak_flops(device, dtype, plain.convolutions(dtype))
        arithmetic = workload.samples * plain.flops_per_sample() / flops
        # Parameter, gradient and momentum, each read and written.
        memory = workload.steps * 2 * 3 * plain.parameters * fed.dtype.itemsize / peak_bandwidth(device)
        test_flops = engine.models_tested * len(fed.test_labels) * plain.flops_per_sample(train=False)
    seconds, rest, plain_seconds, ratios, tests = zip(*rows, strict=True)
    pace, bound, machine = median(seconds), max(arithmetic, memory), environment(device)
    return {  # in the order of COLUMNS
        "workload": workload.name, "engine": fed.engine.mode, "device": str(device), "method": setup.method.name,
        "seconds_per_round": pace, "seconds_spread": [min(seconds), max(seconds)],
        "plain_seconds_per_round": median(plain_seconds), "plain_spread": [min(plain_seconds), max(plain_seconds)],
        "ratio": median(ratios), "samples_per_second": workload.samples / pace, "floor_seconds": bound,
        "floor_share": bound / pace, "arithmetic_floor_seconds": arithmetic, "memory_floor_seconds": memory,
        "peak_bytes": peak, "evaluation_seconds": median(tests), "evaluation_floor_seconds": test_flops / flops,
        "data_seconds_share": median(rest) / pace, "images": images, "torch": machine["versions"]["torch"],
        "threads": machine["hardware"]["threads"], "hardware": machine["hardware"]["name"],
        **{name: getattr(setup.run, name) for name in ("precision", *SHAPE)}, "repeats": repeats,
        "seed": setup.run.seed,
    }  # fmt: skip


@flushed_denormals()
def measure_run(setup: Setup, repeats: int, progress: Callable[[str], Any] = lambda text: None) -> dict[str, Any]:
    """Times rounds of a protocol's own run end to end, its last ones, in which all of a method's terms have begun.

    Returns:
        `seconds_per_round` (the median, testing included) and `seconds_spread`, of these `evaluation_seconds`,
        `whole_seconds` of all rounds, `peak_bytes` of a round before testing, and what was run.
    """
    run, name = setup.run, setup.method.name
    cifar = Workload(name, run.dataset, 3, 32, 1, run.train_examples or 50_000, 1, 1, 1, run.backbone)
    dataset, images = load_images(cifar, run.seed)
    engine, first = EngineRounds(setup, dataset), max(run.rounds - repeats - 1, 0)
    whole, tests = [], []
    with machine_settings(engine.fed):
        peak = engine.warm_up(first)
        for number in range(first + 1, first + 1 + repeats):
            progress(f"{name}: round {number + 1}")
            seconds = seconds_of(partial(engine.round, number), setup.device)
            tests.append(seconds_of(engine.evaluate, setup.device))
            whole.append(seconds + tests[-1])
    return {
        "method": name, "protocol": setup.protocol.name,
        **{key: getattr(run, key) for key in ("dataset", "rounds", "backbone", "precision", *SHAPE, "seed")},
        "images": images, "engine": engine.fed.engine.mode, "device": str(setup.device), "repeats": repeats,
        "seconds_per_round": median(whole), "seconds_spread": [min(whole), max(whole)],
        "evaluation_seconds": median(tests), "whole_seconds": run.rounds * median(whole), "peak_bytes": peak,
    }  # fmt: skip


def describe_run(result: dict[str, Any]) -> str:
    """Says in a sentence what `measure_run` has measured."""
    return (
        "{method} under {protocol} on {dataset} ({images} images), {backbone}, {precision}, {engine} on {device}: "
        f"{short(result['seconds_per_round'])} seconds a round ({short(result['seconds_spread'])}), "
        f"{short(result['evaluation_seconds'])} of them testing; all {{rounds}} rounds take "
        f"{short(result['whole_seconds'] / 60)} minutes. Peak {short(result['peak_bytes'] / 2**20)} MiB."
    ).format(**result)


def peak_flops(device: torch.device, dtype: torch.dtype, layers: Iterable[Callable[[], Any]]) -> float:
    """Measures the FLOPs a second of a device at best: in matrix products, and in layers of a network."""
    works = list(layers)
    for side in MATMUL_SIDES[device.type]:
        works.append(partial(torch.matmul, *torch.randn(2, side, side, device=device).to(dtype)))
    rates = []
    for work in works:
        with FlopCounterMode(display=False) as counter:
            work()
        rates.append(counter.get_total_flops() * times_per_second(work, device))
    return max(rates)


def peak_bandwidth(device: torch.device) -> float:
    """Measures the bytes a second that a device reads and writes at best."""
    source = torch.zeros(COPY_BYTES // 4, device=device)
    return 2 * COPY_BYTES * times_per_second(partial(torch.empty_like(source).copy_, source), device)


def times_per_second(work: Callable[[], Any], device: torch.device) -> float:
    """Returns how many times a second some work is done at best, by all threads, each alone."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1

    @torch.no_grad()
    def repeat(times: int) -> None:
        for _ in range(times):
            work()

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # On CUDA in this thread, where it has been set up.
        repeat_all = (lambda times: list(pool.map(repeat, [times] * threads))) if device.type == "cpu" else repeat
        times = math.ceil(LASTING / min(seconds_of(partial(repeat_all, 1), device) for _ in range(2)))
        seconds = min(seconds_of(partial(repeat_all, times), device) for _ in range(TRIES))
    torch.set_num_threads(threads)
    return threads * times / seconds


def result_file(path: Path, device: torch.device) -> Path:
    """The path as it is; of a folder, the file in it that is named after the device and the version of PyTorch."""
    if not path.is_dir():
        return path
    hardware = environment(device)["hardware"]
    name = hardware["name"] if device.type == "cuda" else f"cpu {hardware['cores']} cores"
    words = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return path / f"{words}-torch{torch.__version__.split('+')[0]}.csv"


def append_csv(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Appends results to a CSV file, with `COLUMNS` as its first line where it is new; a spread is a JSON list.

    Raises:
        UserError: If the file holds something else.
    """
    first, _, _ = path.read_text(encoding="utf-8", errors="replace").partition("\n") if path.is_file() else ("", "", "")
    if first not in ("", ",".join(COLUMNS)):
        raise UserError(
            f"'{path}' does not hold results of this command (got '{first[:40]}' as its first line); "
            f"choose a new file or one that --csv wrote."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerows([] if first else [COLUMNS])
        rows.writerows(
            [json.dumps(cell) if isinstance(cell, list) else cell for cell in row.values()] for row in results
        )


def cells(result: dict[str, Any]) -> dict[str, str]:
    """A result as the cells of `TABLES`, times in seconds."""

    def bound(part: str, seconds: str) -> str:
        share = result[part] / result[seconds]
        return f"{short(result[part])} ({f'{share:.0%}' if share <= 1 else 'failed: too high'})"

    workload = WORKLOADS.get(result["workload"])
    return {
        "Workload": f"{workload.name} {workload.words}" if workload else result["workload"],
        "Engine": result["engine"],
        "Round": f"{short(result['seconds_per_round'])} ({short(result['seconds_spread'])})",
        "Plain loop": f"{short(result['plain_seconds_per_round'])} ({short(result['plain_spread'])})",
        "Ratio": f"{short(result['ratio'])}x",
        "Samples/s": short(result["samples_per_second"]),
        "Bound": bound("floor_seconds", "seconds_per_round"),
        "Not training": f"{short(100 * result['data_seconds_share'])} %",
        "Evaluation": short(result["evaluation_seconds"]),
        "Its bound": bound("evaluation_floor_seconds", "evaluation_seconds"),
        "Peak MiB": short(result["peak_bytes"] / 2**20),
        "Images": result["images"],
    }


def short(number: float | list[float]) -> str:
    """A number with three digits or, from 100 on, without a fraction; a spread as two of them."""
    if isinstance(number, list):
        return "-".join(map(short, number))
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
