"""The tables that `fedcli bench` prints: the cells of a row by their titles, and the line below."""

import torch

from fedcli.bench.joint_step import StepCount
from fedcli.bench.speed import Timing


def format_timing(timing: Timing) -> dict[str, str]:
    """Returns the cells of what was timed, in seconds; what was not measured is left out."""
    least, largest = timing.seconds_spread
    row = {
        "Workload": timing.workload,
        "Method": timing.method,
        "Engine": timing.way,
        "Round": f"{format_number(timing.seconds_per_round)} ({format_number(least)}-{format_number(largest)})",
    }
    comparison = timing.comparison
    if comparison is not None:
        share = f"{comparison.bound_share:.0%}"
        if comparison.bound_share > 1:
            share = "failed: too high"
        row["Plain"] = format_number(comparison.plain_seconds_per_round)
        row["Ratio"] = f"{format_number(comparison.ratio)}x"
        row["Bound"] = f"{format_number(comparison.bounds.bound_seconds)} ({share})"
    row["Test"] = format_number(timing.evaluation_seconds)
    if timing.whole_seconds is not None:
        row["Whole run"] = format_number(timing.whole_seconds)
    row["MiB"] = format_number(timing.peak_bytes / 2**20)
    row["Images"] = timing.images
    return row


def format_machine(timing: Timing) -> str:
    """Returns the line below the table: the machine, and what the titles mean."""
    return (
        f"{timing.device} ({timing.hardware}), threads: {timing.threads}, torch {torch.__version__}, "
        f"{timing.config.precision}; seconds, median of {timing.repeats} rounds (least-largest); "
        "Plain: of a plain PyTorch loop, Test: of the test images"
    )


def format_count(step: StepCount) -> dict[str, str]:
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


def format_number(number: float) -> str:
    """Formats a number with three digits or, from 100 on, without a fraction."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
