"""The tables that `fedcli bench` prints: the cells of a row by their titles, and the lines below."""

from collections.abc import Iterable, Sequence

import torch

from fedcli.bench.joint_step import StepCount
from fedcli.bench.timings import Timing

TITLES = {  # of what is timed, in their order, and what those mean that are not plain
    "Workload": "",
    "Method": "",
    "Mode": "",
    "Threads": "",
    "Engine": "seconds of a round by fedcli",
    "Plain loop": "seconds of a round by a plain PyTorch loop",
    "Ratio": "of the plain loop's seconds to the engine's, the median over pairs of rounds",
    "Estimate": "seconds at the machine's rate for one large matrix product or copy, and its share of the engine's",
    "Test": "seconds of the test after a round",
    "Whole run": "estimate of the seconds of all rounds with their tests, from those timed",
    "MiB": "the most memory until the engine has warmed up",
    "Images": "",
}


def format_timing(timing: Timing) -> dict[str, str]:
    """Returns the cells of what was timed, by their titles."""
    median = format_number(timing.round_seconds.median)
    minimum = format_number(timing.round_seconds.minimum)
    maximum = format_number(timing.round_seconds.maximum)
    row = {
        "Workload": timing.workload,
        "Method": timing.method,
        "Mode": timing.mode,
        "Threads": str(timing.threads),
        "Engine": f"{median} ({minimum}-{maximum})",
        "Test": format_number(timing.test_seconds),
        "MiB": format_number(timing.peak_bytes / 2**20),
        "Images": timing.images,
    }
    if timing.plain is not None:
        row["Plain loop"] = format_number(timing.plain.round_seconds.median)
        row["Ratio"] = f"{format_number(timing.plain.ratio)}x"
        row["Estimate"] = f"{format_number(timing.plain.estimate.seconds)} ({timing.estimate_share:.0%})"
    if timing.whole_seconds is not None:
        row["Whole run"] = format_number(timing.whole_seconds)
    return row


def find_titles(rows: Sequence[dict[str, str]]) -> list[str]:
    """Returns the titles of all rows in the order of `TITLES`."""
    return [title for title in TITLES if any(title in row for row in rows)]


def format_conditions(timings: Sequence[Timing]) -> str:
    """Returns the line below the table: the machine, the precisions of the rows, and how many rounds each is of."""
    first = timings[0]
    precisions = dict.fromkeys(timing.config.precision for timing in timings)
    rounds = "one round" if first.repeats == 1 else f"medians of {first.repeats} rounds (least-largest)"
    return f"{first.device} ({first.hardware}), torch {torch.__version__}, {', '.join(precisions)}; {rounds}"


def explain_titles(titles: Iterable[str]) -> str:
    """Returns the last line below the table: what its titles mean."""
    return "; ".join(f"{title}: {TITLES[title]}" for title in titles if TITLES[title])


def format_count(step: StepCount) -> dict[str, str]:
    """Returns the cells of a counted step by their titles; the modelled time is left out where there is none."""
    row = {
        "Workload": step.workload,
        "Mode": step.mode,
        "Kernels": str(step.kernels),
        "GB": f"{step.gigabytes:.2f}",
        "GFLOP": f"{step.gflop:.1f}",
    }
    if step.modelled_seconds is not None:
        row["Modelled ms"] = f"{1e3 * step.modelled_seconds:.2f}"
    return row


def format_number(number: float) -> str:
    """Formats a number with three digits or, from 100 on, without a fraction."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
