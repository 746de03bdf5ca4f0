"""What a figure lacks, room or glyphs: how it is found, and a warning in words that names a remedy."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcli.errors import printable
from fedcli.figures.text import MARGIN

LEAST_SHARE = 0.15  # of a side of the figure that a panel must have


class NoRoom(UserWarning):
    """The names leave a figure no room for its lines."""

    text = (
        "the names leave the figure no room for its lines; choose a larger --size, a smaller --font-size, shorter "
        "--labels, or another --legend."
    )


def warn_of_no_room(figure: Figure) -> None:
    """Warns of a figure whose texts leave it, or leave its panels less than `LEAST_SHARE` of a side."""
    figure.draw_without_rendering()
    if _is_cut(figure) or _has_small_panels(figure) or any(map(_has_high_legend, figure.axes)):
        warnings.warn(NoRoom.text, NoRoom, stacklevel=3)


def _is_cut(figure: Figure) -> bool:
    """Whether something is drawn beyond the sides of the figure."""
    drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    leaves_left_or_below = drawn.x0 < -MARGIN or drawn.y0 < -MARGIN
    leaves_right_or_above = drawn.x1 > width + MARGIN or drawn.y1 > height + MARGIN
    return leaves_left_or_below or leaves_right_or_above


def _has_small_panels(figure: Figure) -> bool:
    """Whether panels, which stand one below the other, have less than their share of the figure."""
    panels = [axes.get_window_extent() for axes in figure.axes]
    narrowest = min(panel.width for panel in panels)
    lowest = min(panel.height for panel in panels) * len(panels)
    return narrowest < LEAST_SHARE * figure.bbox.width or lowest < LEAST_SHARE * figure.bbox.height


def _has_high_legend(axes: Axes) -> bool:
    """Whether a panel is lower than the legend inside it."""
    legend = axes.get_legend()
    if legend is None or legend.get_in_layout():
        return False
    return legend.get_window_extent().height > axes.get_window_extent().height


@contextmanager
def warnings_in_words(worded: Callable[[str], str] = str) -> Iterator[None]:
    """Turns matplotlib's warnings of what a figure lacks, glyphs or room, into one each, which names a remedy.

    Args:
        worded: Writes a warning for its reader, as `fedcli.keywords.keywords_for_flags` does in Python.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    font_of_glyph = {}
    lacks_room = False
    for warning in caught:
        text = str(warning.message)
        if issubclass(warning.category, NoRoom) or text.startswith("constrained_layout not applied"):
            lacks_room = True
            continue
        missing = re.match(r"Glyph (?P<code>\d+) .* missing from font\(s\) (?P<font>.*?)\.?$", text)
        if missing is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        else:
            font_of_glyph[chr(int(missing["code"]))] = missing["font"]
    if lacks_room:
        warnings.warn(worded(NoRoom.text), stacklevel=3)
    if font_of_glyph:
        fonts = ", ".join(dict.fromkeys(font_of_glyph.values()))
        text = (
            f"the font {fonts} has no '{printable(''.join(font_of_glyph))}', which the figure shows as boxes; choose "
            "another font by font.family in a --style file."
        )
        warnings.warn(worded(text), stacklevel=3)
