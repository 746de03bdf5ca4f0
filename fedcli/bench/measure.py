"""Speed of the engine against a plain PyTorch loop, both measured in the same run, and how a result is shown and kept.

Both sides run under the same threads and precision; the engine, as in a run, by operations that give the same bits each
time, the plain loop by PyTorch's default ones. After a round each to warm up they take turns, so that a noisy machine
hits both. The ratio is the median over these pairs of plain seconds over engine seconds: above 1 the engine is faster.

A lower bound, called "floor" in files, is the time that the arithmetic or the memory traffic takes at this machine's
own peak rates, the larger of the two. Arithmetic: the FLOPs of the plain loop's round over those of a large matrix
product in the same precision, done by each thread alone. Memory: the bytes of parameters, gradients and momentum, each
read and written once in every step of every client, over those of a large copy. A bound above the measured time has
failed, most likely because other programs took the cores meanwhile.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fedcli.bench.rounds import PlainRounds
from fedcli.core.engine import Engine
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.runs.autotune import autotune, peak_memory
from fedcli.runs.config import Setup
from fedcli.runs.prepare import flushed_denormals, machine_settings, prepare
from fedcli.runs.records import environment
from fedcli.runs.rounds import one_round

MACHINE = (
    "{device} ({hardware}), threads: {threads}, torch {torch}, {precision}; seconds, median of {repeats} rounds (least-"
    "largest); Plain: of a plain PyTorch loop, Test: of the test images"
)
OPTIONS = ("precision", "cohort_size", "local_epochs", "batch_size", "seed")  # of a run: what a result says
RANDOM_IMAGES = Path(__file__).with_name("random_images.py")  # a function for each data set of a workload
MATMUL_SIDE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = 2**28  # beyond any cache
TRIES = 10  # of each rate, of which the fastest counts


@flushed_denormals()
def measure(name: str, setup: Setup, repeats: int, progress: Callable[[str], Any], with_plain: bool) -> dict[str, Any]:
    """Times the last rounds of a run, in which all of a method's terms have begun.

    Args:
        name: Of the workload, or of the protocol.
        setup: Of the run; see `prepare_workload`.
        repeats: Rounds to time.
        progress: Told what is being done.
        with_plain: Whether a round of the plain loop follows each round of the engine.

    Returns:
        What was run and what it took; spreads are [least, largest]. `peak_bytes` is of the engine's first round: on
        CUDA what PyTorch holds, on a CPU what the process does (where the system cannot reset that, the largest so
        far). `evaluation_seconds` is a pass over the test images, for every model that a round has changed.
        `data_seconds_share` is what a round spends on drawing batches and on aggregation. Without the plain loop there
        are no bounds, but `whole_seconds`: of all rounds, testing included.
    """
    run, device, images = setup.run, setup.device, "real"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    if not datasets.present(run.dataset):
        images, setup = "random", replace(setup, run=replace(run, dataset=f"{RANDOM_IMAGES}:{run.dataset}"))
    dataset, _, fed = prepare(setup)
    first, rows = max(run.rounds - repeats - 1, 0), []
    with machine_settings(fed):  # what a run would set, for both sides, as are denormal numbers
        autotune(fed)
        state, _ = one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort(first))
        peak = peak_memory(device)
        if with_plain:
            plain = PlainRounds(fed, dataset)
            plain.round(fed.cohort(first).client_ids)
        for number in range(first + 1, first + 1 + repeats):
            progress(f"{name}: round {number - first} of {repeats}")
            cohort = fed.cohort(number)
            state, entry = one_round(setup, fed, state, cohort)
            rows.append(entry["seconds"])
            if with_plain:
                rows[-1]["plain"] = seconds_of(partial(plain.round, cohort.client_ids), device)
        rounds = pd.DataFrame(rows)
        rest = rounds["data"] + rounds["aggregate"]
        whole = rounds["train"] + rest
        pace, hardware = whole.median(), environment(device)["hardware"]
        examples = len(dataset.y_train) // run.num_clients
        passes = run.cohort_size * run.local_epochs  # in a round, over a client's examples
        result = {
            "workload": name, "engine": fed.engine.mode, "device": str(device), "method": setup.method.name,
            "seconds_per_round": pace, "seconds_spread": [*whole.agg(["min", "max"])],
            "samples_per_second": passes * examples / pace, "peak_bytes": peak,
            "evaluation_seconds": rounds["evaluate"].median(), "data_seconds_share": rest.median() / pace,
            "images": images, "torch": torch.__version__, "threads": hardware["threads"],
            "hardware": hardware["name"], **{name: getattr(run, name) for name in OPTIONS}, "repeats": repeats,
        }  # fmt: skip
        if not with_plain:
            return result | {"whole_seconds": run.rounds * (whole + rounds["evaluate"]).median()}
        progress(f"{name}: peak rates")
        flops = peak_flops(fed.engine, torch.bfloat16 if run.precision == "bf16" else fed.dtype)
        arithmetic = passes * examples * plain.flops_per_sample() / flops
        steps = passes * math.ceil(examples / run.batch_size)
        # Parameter, gradient and momentum, each read and written.
        memory = steps * 2 * 3 * fed.sizes.parameters * fed.dtype.itemsize / peak_bandwidth(fed.engine)
        return result | {
            "plain_seconds_per_round": rounds["plain"].median(),
            "plain_spread": [*rounds["plain"].agg(["min", "max"])], "ratio": (rounds["plain"] / whole).median(),
            "floor_seconds": max(arithmetic, memory), "floor_share": max(arithmetic, memory) / pace,
            "arithmetic_floor_seconds": arithmetic, "memory_floor_seconds": memory,
        }  # fmt: skip


def peak_flops(engine: Engine, dtype: torch.dtype) -> float:
    """Measures the FLOPs a second of the engine's device at best, in a product of square matrices."""
    side = MATMUL_SIDE[engine.images.device.type]
    factors = torch.randn(2, side, side, device=engine.images.device).to(dtype)
    return 2 * side**3 * times_per_second(partial(torch.matmul, *factors), engine)


def peak_bandwidth(engine: Engine) -> float:
    """Measures the bytes a second that the engine's device reads and writes at best."""
    source = torch.zeros(COPY_BYTES // 4, device=engine.images.device)
    return 2 * COPY_BYTES * times_per_second(partial(torch.empty_like(source).copy_, source), engine)


def times_per_second(work: Callable[[], Any], engine: Engine) -> float:
    """Returns how many times a second some work is done at best, on a CPU by all threads, each alone."""
    device = engine.images.device

    def rate(_: int) -> float:
        return 1 / min(seconds_of(work, device) for _ in range(TRIES))

    return sum(engine.side_by_side(rate, range(torch.get_num_threads() if device.type == "cpu" else 1)))


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Returns the time of some work, until the device has done it."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def check_csv(path: Path) -> None:
    """Refuses to append to a file that holds something else than results."""
    if path.exists() and not path.read_bytes().startswith(b"workload,"):
        raise UserError(f"'{path}' does not hold results of this command; choose a new file or one that --csv wrote.")
    path.parent.mkdir(parents=True, exist_ok=True)


def append_csv(path: Path, result: dict[str, Any]) -> None:
    """Appends a result to a CSV file, whose first line has the names of the columns; a spread is a JSON list."""
    columns = pd.read_csv(path, nrows=0).columns if path.exists() else None
    pd.DataFrame([result]).reindex(columns=columns).to_csv(path, mode="a", header=columns is None, index=False)


def cells(result: dict[str, Any]) -> dict[str, str]:
    """Returns cells of a table by their titles, times in seconds; what was not measured is left out."""
    spread = "-".join(map(short, result["seconds_spread"]))
    row = {
        "Workload": result["workload"], "Method": result["method"], "Engine": result["engine"],
        "Round": f"{short(result['seconds_per_round'])} ({spread})",
    }  # fmt: skip
    if "ratio" in result:
        share = f"{result['floor_share']:.0%}" if result["floor_share"] <= 1 else "failed: too high"
        row |= {"Plain": short(result["plain_seconds_per_round"]), "Ratio": f"{short(result['ratio'])}x"}
        row["Bound"] = f"{short(result['floor_seconds'])} ({share})"
    row["Test"] = short(result["evaluation_seconds"])
    if "whole_seconds" in result:
        row["Whole run"] = short(result["whole_seconds"])
    return row | {"MiB": short(result["peak_bytes"] / 2**20), "Images": result["images"]}


def short(number: float) -> str:
    """Formats a number with three digits or, from 100 on, without a fraction."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
