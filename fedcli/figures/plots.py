"""How every figure looks and is written, and the kinds of them that `fedcli plot` knows.

A function that returns a figure becomes a kind of `fedcli plot` by `@chart`; `write` draws it in `STYLE` and saves it,
as PNG and PDF; the same input gives the same bytes.

Figures are made without pyplot, so no global state is touched and no window system is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.userfiles import FromFile

STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # fonts as text that can be edited and searched
}
# Okabe and Ito's colours, which colour-blind readers tell apart; their yellow is too pale for lines on white.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# As many as colours, each with more gaps than those before it: drawn after them it hides none.
DASHES = (
    "-", (0, (5, 1.5)), (0, (4, 1.2, 1, 1.2)), (0, (3, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (1.2, 1.2)), (0, (1.2, 3)),
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
BAND = {"alpha": 0.18, "linewidth": 0}  # around a line, in its colour
CHART_WIDTH = 5.8  # inches, the largest width of a chart that goes across a page
FRAME = {"bbox_inches": "tight", "pad_inches": 0.04}


@dataclass(frozen=True)
class Chart:
    """A kind of figure of runs, `fedcli plot --kind NAME`.

    Attributes:
        draw: From the runs to the figure.
        help: What it shows, one line.
        needs: What `draw` takes: the "records" of the runs; or, where a figure needs more of them, the "folders" given;
            or the folders and the user's files that their "models" need.
    """

    draw: Callable[..., Figure]
    help: str
    needs: str = "records"


CHARTS: dict[str, Chart] = {}


def chart(name: str, help: str, needs: str = "records") -> Callable[[Callable[..., Figure]], Callable[..., Figure]]:
    """Registers the function below it as a kind of figure; the arguments are those of `Chart`."""

    def register(draw: Callable[..., Figure]) -> Callable[..., Figure]:
        CHARTS[name] = Chart(draw, help, needs)
        return draw

    return register


def look(index: int) -> dict[str, Any]:
    """How the line of that number looks."""
    dashes = index + index // len(LINE_COLOURS)  # others when the colours come round again
    return {
        "color": LINE_COLOURS[index % len(LINE_COLOURS)], "linestyle": DASHES[dashes % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)], "markeredgecolor": "white", "markeredgewidth": 0.4,
    }  # fmt: skip


def write(out: Path, draw: Callable[..., Figure], *given: Any) -> list[Path]:
    """Draws a figure in the style of all figures and writes it, without dates, so that equal figures are equal files.

    Args:
        out: Where to write, with or without suffix: `.pdf` and `.svg` alone, else PNG and PDF.
        draw: A function of this package or of a user that returns the figure.
        *given: What it is given.

    Returns:
        The files.

    Raises:
        UserError: If the suffix is of another kind of image.
    """
    undated = {
        ".png": {"Software": None}, ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        ".svg": {"Date": None, "Creator": None},
    }  # fmt: skip
    if out.suffix not in undated and out.suffix[1:] in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"a figure is written as .png, .pdf or .svg (got '{out}'); choose one of them with --out.")
    stem = out.with_suffix("") if out.suffix in undated else out  # "dirichlet:0.5" has no suffix
    suffixes = (out.suffix,) if out.suffix in (".pdf", ".svg") else (".png", ".pdf")
    files = [stem.with_name(stem.name + suffix) for suffix in suffixes]
    parse = isinstance(draw, FromFile)  # a name of ours may have a dollar sign
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "fedcli", "text.parse_math": parse}):
        figure = draw(*given)
        stem.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            about = {"format": file.suffix[1:], "metadata": undated[file.suffix]}
            write_atomically(file, lambda path, about=about: figure.savefig(path, **about, **FRAME))
    return files
