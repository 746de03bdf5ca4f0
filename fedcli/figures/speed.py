"""Measured seconds a round: of the engine and a plain loop, and over numbers of workers."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fedcli.figures.plots import BAND, CHART_WIDTH, DASHES, LINE_COLOURS, look

SIDES = (  # the label, and the keys of median and spread
    ("engine", "seconds_per_round", "seconds_spread"),
    ("plain loop", "plain_seconds_per_round", "plain_spread"),
)


def scaling_rows(file: Path) -> list[dict]:
    """Of the CSV that `fedcli bench --csv` has written, the rows of the figure; of a workload measured twice the last.

    Args:
        file: The CSV.
    """
    with file.open(encoding="utf-8", newline="") as lines:
        rows = {row["workload"]: row for row in csv.DictReader(lines) if " K=" in row.get("workload", "")}
    numbers = ("cohort_size", "batch_size", *(name for _, *names in SIDES for name in names))
    return [{**row, **{name: json.loads(row[name]) for name in numbers}} for row in rows.values()]


def scaling_figure(rows: Sequence[dict]) -> Figure:
    """Draws seconds a round of the engine and of the plain loop, over clients per round and over batch sizes.

    A line is the median, its band from least to largest.

    Args:
        rows: Results of `fedcli bench` that differ in the clients per round or in the batch size.
    """
    figure = Figure(figsize=(CHART_WIDTH, 2.8), layout="constrained")
    panels = (("cohort_size", "Clients per round", "batch_size"), ("batch_size", "Batch size", "cohort_size"))
    for axes, (varied, label, other) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        usual = mode(row[other] for row in rows)  # the value it has where it is not varied itself
        shown = sorted((row for row in rows if row[other] == usual), key=lambda row: row[varied])
        values = [row[varied] for row in shown]
        for index, (side, seconds, spread) in enumerate(SIDES):
            low, high = np.array([row[spread] for row in shown]).T
            axes.fill_between(values, low, high, color=LINE_COLOURS[index], **BAND)
            axes.plot(values, [row[seconds] for row in shown], label=side, **look(index))
        _finish(axes, values, label, f"{other.replace('_', ' ')} {usual}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    same = rows[0]
    figure.suptitle(f"{same['method']}, {same['device']}, {same['precision']}, local epochs: {same['local_epochs']}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=3.4)
    return figure


def divided_figure(rows: Sequence[Any], model: Mapping[str, Sequence[Any]]) -> Figure:
    """Draws seconds a round over numbers of workers, a panel a workload: measured points and the modelled line.

    Args:
        rows: Measurements by `fedcli bench --workers`; those of workers with one thread are drawn.
        model: Of each workload, by name, modelled rounds.
    """
    rows = [row for row in rows if row.threads == 1]
    figure = Figure(figsize=(CHART_WIDTH, 2.6), layout="constrained")
    for axes, (name, line) in zip(figure.subplots(1, len(model), squeeze=False)[0], model.items(), strict=True):
        dots = [row for row in rows if row.workload == name]
        counts = [row.workers for row in line]
        for index, part in enumerate(("seconds", "compute", "gather", "server")):
            label = "round, modelled" if part == "seconds" else part
            style = {"color": LINE_COLOURS[index], "linestyle": DASHES[index], "linewidth": 1.4 if index == 0 else 0.9}
            axes.plot(counts, [getattr(row, part) or np.nan for row in line], label=label, **style)
        measured = [row.workers for row in dots], [row.seconds for row in dots]
        axes.plot(*measured, "o", label="round, measured", color=LINE_COLOURS[0], markersize=4)
        _finish(axes, counts[::2], "Workers", name)  # all do not fit beside each other
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, handlelength=2.4)
    return figure


def _finish(axes: Axes, ticks: Sequence[int], label: str, title: str) -> None:
    """Both scales of a panel, with these ticks across; the first panel of a row says what stands upward."""
    axes.set(xscale="log", yscale="log", xlabel=label, title=title)
    axes.set_xticks(ticks, map(str, ticks))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(axis="y")
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("Seconds a round")
