"""The tables that `fedcli bench` prints: the cells of a row by their titles, and the line below."""

from typing import Any

MACHINE = (
    "{device} ({hardware}), threads: {threads}, torch {torch}, {precision}; seconds, median of {repeats} rounds (least-"
    "largest); Plain: of a plain PyTorch loop, Test: of the test images"
)


def timing_cells(result: dict[str, Any]) -> dict[str, str]:
    """Returns the cells of a measured run, see `measure.measure`, in seconds; what was not measured is left out."""
    spread = "-".join(map(short, result["seconds_spread"]))
    row = {
        "Workload": result["workload"],
        "Method": result["method"],
        "Engine": result["engine"],
        "Round": f"{short(result['seconds_per_round'])} ({spread})",
    }
    if "ratio" in result:
        share = f"{result['floor_share']:.0%}"
        if result["floor_share"] > 1:
            share = "failed: too high"
        row["Plain"] = short(result["plain_seconds_per_round"])
        row["Ratio"] = f"{short(result['ratio'])}x"
        row["Bound"] = f"{short(result['floor_seconds'])} ({share})"
    row["Test"] = short(result["evaluation_seconds"])
    if "whole_seconds" in result:
        row["Whole run"] = short(result["whole_seconds"])
    row["MiB"] = short(result["peak_bytes"] / 2**20)
    row["Images"] = result["images"]
    return row


def count_cells(result: dict[str, Any]) -> dict[str, str]:
    """Returns the cells of a counted step, see `count.count_step`."""
    return {
        "Workload": result["workload"],
        "Way": result["way"],
        "Kernels": str(result["kernels"]),
        "GB": f"{result['gigabytes']:.2f}",
        "GFLOP": f"{result['gflop']:.1f}",
        "Modelled ms": f"{result['milliseconds']:.2f}",
    }


def short(number: float) -> str:
    """Formats a number with three digits or, from 100 on, without a fraction."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
