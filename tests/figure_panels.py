"""Reads what a figure shows."""

from typing import NamedTuple

from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D


class Panel(NamedTuple):
    """The curves of a panel, their bands, and the words of its legend."""

    lines: list[Line2D]
    bands: list[PolyCollection]
    legend: list[str]  # the names of lines, then those of signs


def first_panel(figure):
    """Returns the first panel of a figure, without the lines that mark a chosen round or a printed number."""
    axes = figure.axes[0]
    lines = [line for line in axes.lines if line.get_gid() not in ("chosen", "printed")]
    bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
    words = []
    for legend in (axes.get_legend(), *figure.legends):
        for text in legend.get_texts():
            words.append(text.get_text().replace("\n", " ").replace("\xa0", " "))
    return Panel(lines, bands, words)
