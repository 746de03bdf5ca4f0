"""The tables that `fedcli bench` prints: the cells of a row by their titles, and the lines below."""

from collections.abc import Iterable

import torch

from fedcli.bench.joint_step import StepCount
from fedcli.bench.timings import Timing

MEANINGS = {  # of the titles of what is timed, where it is not plain
    "Engine": "seconds of a round by fedcli",
    "Plain loop": "seconds of a round by a plain PyTorch loop",
    "Ratio": "of the plain loop's seconds to the engine's, the median over pairs of rounds",
    "Estimate": "seconds at the machine's rate for one large matrix product or copy, and its share of the engine's",
    "Test": "seconds of the test after a round",
    "Whole run": "seconds of all rounds with their tests",
    "MiB": "the most memory until the engine has warmed up",
}


def format_timing(timing: Timing) -> dict[str, str]:
    """Returns the cells of what was timed, in seconds; what was not measured is left out."""
    least, largest = timing.seconds_spread
    row = {
        "Workload": timing.workload,
        "Method": timing.method,
        "Way": timing.mode,
        "Threads": str(timing.threads),
        "Engine": f"{format_number(timing.seconds_per_round)} ({format_number(least)}-{format_number(largest)})",
    }
    comparison = timing.comparison
    if comparison is not None:
        row["Plain loop"] = format_number(comparison.plain_seconds_per_round)
        row["Ratio"] = f"{format_number(comparison.ratio)}x"
        row["Estimate"] = f"{format_number(comparison.estimate.seconds)} ({comparison.estimate_share:.0%})"
    row["Test"] = format_number(timing.evaluation_seconds)
    if timing.whole_seconds is not None:
        row["Whole run"] = format_number(timing.whole_seconds)
    row["MiB"] = format_number(timing.peak_bytes / 2**20)
    row["Images"] = timing.images
    return row


def format_conditions(timing: Timing) -> str:
    """Returns the line below the table: the machine, and what the rows have in common with this one."""
    return (
        f"{timing.device} ({timing.hardware}), torch {torch.__version__}, {timing.config.precision}; "
        f"medians of {timing.repeats} rounds (least-largest)"
    )


def explain_titles(titles: Iterable[str]) -> str:
    """Returns the last line below the table: what its titles mean."""
    return "; ".join(f"{title}: {MEANINGS[title]}" for title in titles if title in MEANINGS)


def format_count(step: StepCount) -> dict[str, str]:
    """Returns the cells of a counted step; the modelled time is left out where there is none."""
    counts = step.counts
    row = {
        "Workload": step.workload,
        "Way": step.mode,
        "Kernels": str(counts.kernels.total()),
        "GB": f"{counts.bytes.total() / 1e9:.2f}",
        "GFLOP": f"{counts.flops.total() / 1e9:.1f}",
    }
    if step.modelled_seconds is not None:
        row["Modelled ms"] = f"{1e3 * step.modelled_seconds:.2f}"
    return row


def format_number(number: float) -> str:
    """Formats a number with three digits or, from 100 on, without a fraction."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
