"""The texts of figures, divided into lines by the room that there is for them."""

from textwrap import fill

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

MARGIN = 0.04  # inches between a text and the side of the figure


def count_characters(inches: float) -> int:
    """Counts the characters of a text that fit into a width, in the current font size."""
    return max(int(120 * inches / matplotlib.rcParams["font.size"]), 1)


def write_title(figure: Figure, title: str) -> None:
    """Writes the title over a figure, in lines as wide as the figure."""
    on_one_line = fill(title, max(len(title), 1))  # whatever white space it has
    wrap(figure.suptitle(on_one_line), measure_room(figure))


def wrap(text: Text, room: float) -> None:
    """Divides the lines of a text further until it takes at most a length in pixels, as it is drawn."""
    lines = text.get_text().split("\n")
    for width in range(max(map(len, lines)), 0, -1):
        if measure_length(text) <= room:
            return
        text.set_text("\n".join(fill(line, width) for line in lines))


def measure_length(text: Text) -> float:
    """Measures the pixels that a text takes in the direction of its lines."""
    extent = text.get_window_extent()
    return extent.height if text.get_rotation() == 90 else extent.width


def count_lines(text: Text) -> int:
    """Counts the lines of a text."""
    return text.get_text().count("\n") + 1


def measure_room(figure: Figure) -> float:
    """Measures the pixels of the width of a figure between its margins."""
    return figure.bbox.width - 2 * MARGIN * figure.dpi


def wrap_headings(figure: Figure) -> None:
    """Divides titles and labels of panels into lines that do not leave the figure; they stand over a panel's middle."""
    figure.draw_without_rendering()  # settles where the panels are
    margin = MARGIN * figure.dpi
    for axes in figure.axes:
        panel = axes.get_window_extent()
        middle = (panel.x0 + panel.x1) / 2
        to_side = min(middle, figure.bbox.width - middle)
        for text in (axes.title, axes.xaxis.label):
            wrap(text, 2 * (to_side - margin))
        middle = (panel.y0 + panel.y1) / 2
        to_side = min(middle, figure.bbox.height - middle)
        wrap(axes.yaxis.label, 2 * (to_side - margin))
