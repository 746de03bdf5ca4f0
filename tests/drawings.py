"""What a figure shows."""

from typing import NamedTuple

from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D


class Drawn(NamedTuple):
    """What the first panel of a figure has."""

    lines: list[Line2D]
    bands: list[PolyCollection]
    legend: list[str]  # names of lines, and then the signs


def drawn(figure):
    """What the first panel of a figure has, but for marks."""
    panel, *_ = figure.axes
    lines = [line for line in panel.lines if line.get_gid() not in ("chosen", "printed")]
    bands = [item for item in panel.collections if isinstance(item, PolyCollection)]
    texts = panel.get_legend().get_texts()
    for legend in figure.legends:
        texts = [*texts, *legend.get_texts()]
    return Drawn(lines, bands, [text.get_text().replace("\n", " ").replace("\xa0", " ") for text in texts])
