"""Speed of the engine against a plain PyTorch loop, both measured in the same run, and how a result is shown and kept.

Both sides run under the same threads and precision settings; the engine, as in a run, by operations that give the same
bits each time, the plain loop by PyTorch's default ones. Each has one round to warm up; then a round of the engine
and one of the plain loop take turns, so that a noisy machine hits both. The ratio is the median over these pairs of
plain seconds over engine seconds: above 1 the engine is faster.

A lower bound, called "floor" in files, is the time that the arithmetic or the traffic takes at this machine's own peak
rates, the larger of the two. Arithmetic: the FLOPs of the plain loop's round over those of the fastest of several
matrix products in the same precision, done by each thread alone. Memory: the bytes of parameters, gradients and
momentum, each read and written once in every step of every client, over those of a large copy. The evaluation's is the
arithmetic of its forward passes. A lower bound above the measured time is a measurement that has failed, most likely
because other programs took the cores while the peak rates were measured.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fedcli.bench.rounds import FIRST_ROUND, SHAPE, EngineRounds, PlainRounds, Workload, load_images, seconds_of
from fedcli.errors import UserError
from fedcli.runs.config import Setup
from fedcli.runs.prepare import flushed_denormals, machine_settings
from fedcli.runs.records import environment

COLUMNS = ("Workload", "Engine", "Round", "Plain loop", "Ratio", "Bound", "Testing", "Peak MiB", "Images")
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
        What was run and what it took; spreads are [least, largest]. `peak_bytes` is that of the engine's joint steps,
        its images included: on CUDA what PyTorch holds, on a CPU what the process does (where the system cannot set the
        process's peak back, the largest so far). `evaluation_seconds` is a pass over the test images by the engine, at
        least for every model that a round has changed, of which its lower bound is. `data_seconds_share` is what a
        round spends outside of local training: drawing the batches and aggregation.
    """
    dataset, images = load_images(workload, setup.run.seed)
    engine = EngineRounds(setup, dataset)
    fed, device, method = engine.fed, setup.device, setup.method
    rows = []
    with machine_settings(fed):  # what a run would set, for both sides, as are denormal numbers
        peak = engine.warm_up(FIRST_ROUND)
        plain = PlainRounds(workload, dataset, fed)
        plain.round(fed.cohort(FIRST_ROUND).client_ids)
        assert plain.parameters == fed.sizes.parameters, "the two sides train different networks"
        for number in range(FIRST_ROUND + 1, FIRST_ROUND + 1 + repeats):
            progress(f"{workload.name}: pair {number - FIRST_ROUND} of {repeats}")
            seconds = engine.round(number)
            rows.append({**seconds, "plain": seconds_of(partial(plain.round, fed.cohort(number).client_ids), device)})
        progress(f"{workload.name}: peak rates")
        flops = peak_flops(device, torch.bfloat16 if setup.run.precision == "bf16" else fed.dtype)
        arithmetic = workload.samples * plain.flops_per_sample() / flops
        # Parameter, gradient and momentum, each read and written.
        memory = workload.steps * 2 * 3 * plain.parameters * fed.dtype.itemsize / peak_bandwidth(device)
        models = 1 if method.personal is None else workload.cohort_size
        test_flops = models * len(fed.test_labels) * plain.flops_per_sample(train=False)
    rounds, bound, machine = pd.DataFrame(rows), max(arithmetic, memory), environment(device)
    rest = rounds["data"] + rounds["aggregate"]
    whole = rounds["train"] + rest
    pace = whole.median()
    return {  # in the order of the columns of a CSV file
        "workload": workload.name, "engine": fed.engine.mode, "device": str(device), "method": method.name,
        "seconds_per_round": pace, "seconds_spread": [*whole.agg(["min", "max"])],
        "plain_seconds_per_round": rounds["plain"].median(), "plain_spread": [*rounds["plain"].agg(["min", "max"])],
        "ratio": (rounds["plain"] / whole).median(), "samples_per_second": workload.samples / pace,
        "floor_seconds": bound, "floor_share": bound / pace, "arithmetic_floor_seconds": arithmetic,
        "memory_floor_seconds": memory, "peak_bytes": peak, "evaluation_seconds": rounds["evaluate"].median(),
        "evaluation_floor_seconds": test_flops / flops, "data_seconds_share": rest.median() / pace,
        "images": images, "torch": machine["versions"]["torch"], "threads": machine["hardware"]["threads"],
        "hardware": machine["hardware"]["name"], **{name: getattr(setup.run, name) for name in ("precision", *SHAPE)},
        "repeats": repeats, "seed": setup.run.seed,
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
    engine, first, rows = EngineRounds(setup, dataset), max(run.rounds - repeats - 1, 0), []
    with machine_settings(engine.fed):
        peak = engine.warm_up(first)
        for number in range(first + 1, first + 1 + repeats):
            progress(f"{name}: round {number + 1}")
            rows.append(engine.round(number))
    rounds = pd.DataFrame(rows)
    whole = rounds.sum(axis=1)
    return {
        "method": name, "protocol": setup.protocol.name,
        **{key: getattr(run, key) for key in ("dataset", "rounds", "backbone", "precision", *SHAPE, "seed")},
        "images": images, "engine": engine.fed.engine.mode, "device": str(setup.device), "repeats": repeats,
        "seconds_per_round": whole.median(), "seconds_spread": [*whole.agg(["min", "max"])],
        "evaluation_seconds": rounds["evaluate"].median(), "whole_seconds": run.rounds * whole.median(),
        "peak_bytes": peak,
    }  # fmt: skip


def describe_run(result: dict[str, Any]) -> str:
    """Says in a sentence what `measure_run` has measured."""
    return (
        "{method} under {protocol} on {dataset} ({images} images), {backbone}, {precision}, {engine} on {device}: "
        f"{short(result['seconds_per_round'])} seconds a round ({short(result['seconds_spread'])}), "
        f"{short(result['evaluation_seconds'])} of them testing; all {{rounds}} rounds take "
        f"{short(result['whole_seconds'] / 60)} minutes. Peak {short(result['peak_bytes'] / 2**20)} MiB."
    ).format(**result)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measures the FLOPs a second of a device at best, in products of square matrices."""
    rates = []
    for side in MATMUL_SIDES[device.type]:
        factors = torch.randn(2, side, side, device=device).to(dtype)
        rates.append(2 * side**3 * times_per_second(partial(torch.matmul, *factors), device))
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


def check_csv(path: Path) -> None:
    """Refuses to append to a file that holds something else than results."""
    first = path.open(encoding="utf-8", errors="replace").readline() if path.exists() else ""
    if not f"{first}workload,".startswith("workload,"):
        raise UserError(
            f"'{path}' does not hold results of this command (got '{first[:40].strip()}' as its first line); "
            f"choose a new file or one that --csv wrote."
        )
    path.parent.mkdir(parents=True, exist_ok=True)


def append_csv(path: Path, result: dict[str, Any]) -> None:
    """Appends a result to a CSV file, whose first line has the names of the columns; a spread is a JSON list."""
    pd.DataFrame([result]).to_csv(path, mode="a", header=not path.exists(), index=False)


def cells(result: dict[str, Any]) -> list[str]:
    """A result as the cells of `COLUMNS`, times in seconds."""
    share = result["floor_share"]
    return [
        result["workload"], result["engine"],
        f"{short(result['seconds_per_round'])} ({short(result['seconds_spread'])})",
        short(result["plain_seconds_per_round"]), f"{short(result['ratio'])}x",
        f"{short(result['floor_seconds'])} ({f'{share:.0%}' if share <= 1 else 'failed: too high'})",
        short(result["evaluation_seconds"]), short(result["peak_bytes"] / 2**20), result["images"],
    ]  # fmt: skip


def short(number: float | list[float]) -> str:
    """A number with three digits or, from 100 on, without a fraction; a spread as two of them."""
    if isinstance(number, list):
        return "-".join(map(short, number))
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
