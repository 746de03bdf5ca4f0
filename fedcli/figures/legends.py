"""Where the names of lines stand in a figure: beside, inside or below its panels, or at the ends of the lines."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from fedcli.figures.text import count_lines, measure_length, measure_room, wrap

BESIDE_END = 7  # points from the end of a line to its name, beside the ring that may be there
# Bands, rings, crosses and dotted lines, the last one of each kind, by the words that explain it.
Symbols = dict[str, Artist]


class LegendRows(NamedTuple):
    """Lines of text of the longest legend beside a panel, and of the legend below all panels."""

    beside: int
    below: int


def draw_legends(figure: Figure, lines_of_panels: list[list[Line2D]], symbols: Symbols, place: str) -> LegendRows:
    """Draws the names of the lines; those that stand at their ends come from `name_ends`.

    The symbols beside the lines are explained below the panels where the names stand at the right. In a figure for a
    paper that belongs into the caption.

    Args:
        figure: The figure, whose panels have no legend.
        lines_of_panels: The lines of each panel, in the order of their names.
        symbols: What is drawn beside them.
        place: Where the names stand, one of `options.LEGENDS`.
    """
    if place == "right":
        beside = _draw_beside(figure, lines_of_panels)
        below = _explain_below(figure, symbols)
        return LegendRows(beside=beside, below=below)
    if place == "below":
        return LegendRows(beside=0, below=_draw_below(figure, lines_of_panels))
    if place == "inside":
        for axes, lines in zip(figure.axes, lines_of_panels, strict=True):
            _draw_inside(axes, lines)
    return LegendRows(beside=0, below=0)


def _draw_inside(axes: Axes, lines: list[Line2D]) -> None:
    """Draws the names of a panel's lines on a pale ground, since many lie on some line wherever they stand."""
    legend = axes.legend(
        handles=lines,
        loc="best",
        handlelength=3,
        frameon=True,
        framealpha=0.75,
        edgecolor="none",
        fancybox=False,
    )
    legend.set_in_layout(False)  # else a panel that is lower than its legend would shrink further


def _draw_beside(figure: Figure, lines_of_panels: list[list[Line2D]]) -> int:
    """Draws the names of each panel's lines at its right; returns the lines of text of the longest legend."""
    longest = 0
    for axes, lines in zip(figure.axes, lines_of_panels, strict=True):
        legend = axes.legend(handles=lines, loc="upper left", bbox_to_anchor=(1, 1.03), handlelength=3)
        _wrap_names(legend, figure.bbox.width / 2)
        longest = max(longest, sum(map(count_lines, legend.get_texts())))
    return longest


def _explain_below(figure: Figure, symbols: Symbols) -> int:
    """Draws the words for the symbols, in grey, below all panels; returns their lines of text."""
    legend = figure.legend(symbols.values(), symbols, loc="outside lower left", handlelength=3.4)
    _wrap_names(legend, measure_room(figure))
    for symbol in legend.legend_handles:
        if symbol is not None:
            symbol.set(color="black", alpha=0.4)
    return sum(map(count_lines, legend.get_texts()))


def _draw_below(figure: Figure, lines_of_panels: list[list[Line2D]]) -> int:
    """Draws the names of all panels' lines below them, in as many columns as fit; returns its lines of text."""
    line_of_name = {str(line.get_label()): line for line in chain.from_iterable(lines_of_panels)}
    for num_columns in range(len(line_of_name), 0, -1):
        legend = figure.legend(
            line_of_name.values(), line_of_name, loc="outside lower center", handlelength=3, columnspacing=1,
            labelspacing=0.3, ncols=num_columns,
        )  # fmt: skip
        if num_columns == 1 or legend.get_window_extent().width <= measure_room(figure):
            break
        legend.remove()
    _wrap_names(legend, measure_room(figure))
    line_counts = [count_lines(text) for text in legend.get_texts()]
    columns = np.array_split(line_counts, num_columns)  # as a legend divides them
    return max(int(column.sum()) for column in columns)


def _wrap_names(legend: Legend, room: float) -> None:
    """Divides the names of a legend of one column into lines, so that it takes at most a width in pixels."""
    texts = legend.get_texts()
    if not texts:
        return
    beside_names = legend.get_window_extent().width - max(map(measure_length, texts))
    for text in texts:
        wrap(text, room - beside_names)


def widen_legend(axes: Axes) -> None:
    """Gives a legend that is higher than its panel more columns, as long as the panel is wide enough for them."""
    panel = axes.get_window_extent()
    legend: Any = axes.get_legend()
    for num_columns in range(2, len(legend.get_texts()) + 1):
        if legend.get_window_extent().height <= panel.height:
            return
        legend.set_ncols(num_columns)
        if legend.get_window_extent().width > panel.width:
            legend.set_ncols(num_columns - 1)
            return


def name_ends(figure: Figure, axes: Axes, ends: Mapping[Line2D, tuple[float, float]]) -> list[Annotation]:
    """Writes the name of each line at the point where it ends; `spread_names` then moves them apart."""
    names = []
    for line, end in ends.items():
        name = axes.annotate(
            str(line.get_label()),
            end,
            xytext=(BESIDE_END, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            annotation_clip=False,
        )
        wrap(name, figure.bbox.width / 2)
        names.append(name)
    return names


def spread_names(figure: Figure, axes: Axes, names: list[Annotation]) -> None:
    """Moves names at the ends of lines up and down, until they are apart from each other by a line of text."""
    if not names:
        return
    from sklearn.isotonic import isotonic_regression  # late: it takes a second, and few figures need it

    figure.draw_without_rendering()  # settles the height of the panel, of which the distances are shares
    height = 72 * axes.get_window_extent().height / figure.dpi  # points
    bottom, top = axes.get_ylim()
    names.sort(key=_end_of_line)
    ends = np.array([height * (_end_of_line(name) - bottom) / (top - bottom) for name in names])
    sizes = [1.25 * float(name.get_fontsize()) * count_lines(name) for name in names]
    below = np.cumsum([0.0, *sizes[:-1]])  # what the names under each one take
    # The nearest heights, in the sense of least squares, at which each name stands above the one before.
    heights = isotonic_regression(ends - below, y_max=max(height - below[-1], 0.0)) + below
    for name, shift in zip(names, heights - ends, strict=True):
        name.set_position((BESIDE_END, shift))


def _end_of_line(name: Annotation) -> float:
    """The value at which the line of a name ends."""
    _, y = name.xy
    return y
