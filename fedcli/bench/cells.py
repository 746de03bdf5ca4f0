"""The tables that `fedcli bench` prints: the cells of a row by their titles, and the line below."""

import torch

from fedcli.bench.joint_step import StepCount
from fedcli.bench.speed import Timing


def timing_cells(timing: Timing) -> dict[str, str]:
    """Returns the cells of what was timed, in seconds; what was not measured is left out."""
    least, largest = timing.seconds_spread
    row = {
        "Workload": timing.workload,
        "Method": timing.method,
        "Engine": timing.way,
        "Round": f"{short(timing.seconds_per_round)} ({short(least)}-{short(largest)})",
    }
    comparison = timing.comparison
    if comparison is not None:
        share = f"{comparison.bound_share:.0%}"
        if comparison.bound_share > 1:
            share = "failed: too high"
        row["Plain"] = short(comparison.plain_seconds_per_round)
        row["Ratio"] = f"{short(comparison.ratio)}x"
        row["Bound"] = f"{short(comparison.bounds.bound_seconds)} ({share})"
    row["Test"] = short(timing.evaluation_seconds)
    if timing.whole_seconds is not None:
        row["Whole run"] = short(timing.whole_seconds)
    row["MiB"] = short(timing.peak_bytes / 2**20)
    row["Images"] = timing.images
    return row


def machine_text(timing: Timing) -> str:
    """Returns the line below the table: the machine, and what the titles mean."""
    return (
        f"{timing.device} ({timing.hardware}), threads: {timing.threads}, torch {torch.__version__}, "
        f"{timing.config.precision}; seconds, median of {timing.repeats} rounds (least-largest); "
        "Plain: of a plain PyTorch loop, Test: of the test images"
    )


def count_cells(step: StepCount) -> dict[str, str]:
    """Returns the cells of a counted step."""
    counts = step.counts
    return {
        "Workload": step.workload,
        "Way": step.way,
        "Kernels": str(counts.kernels.total()),
        "GB": f"{counts.bytes.total() / 1e9:.2f}",
        "GFLOP": f"{counts.flops.total() / 1e9:.1f}",
        "Modelled ms": f"{1e3 * counts.seconds:.2f}",
    }


def short(number: float) -> str:
    """Formats a number with three digits or, from 100 on, without a fraction."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
