"""Confusion matrices of the test images that `quality` has kept: one panel a setting, in rows of three."""

from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcli.errors import UserError
from fedcli.figures.plots import STYLE, save
from fedcli.figures.quality import FEATURES, one_a_setting

MAP = "Blues"  # one hue from white: the same order in grey print and for colour-blind readers, and little ink
NUMBERED = 10  # classes; of more, numbers and names would overlap
ACROSS = 3  # panels in a row
PANEL = 2.5  # inches, width and height of a matrix
DARK = 71  # percent, from where on white numbers can be read better than black ones
NUMBER = 5.5  # points, the size of the numbers
TITLE = 38  # characters that a panel is wide


class Panel(NamedTuple):
    """One setting's matrix."""

    title: str
    shares: np.ndarray  # [C, C]


def confusion_chart(paths: Iterable[Path], out: Path) -> list[Path]:
    """Draws what finished runs take the test images of each class for, a panel for those that differ beside the seed.

    Of several seeds the first is drawn.

    Args:
        paths: Run folders, or folders that hold run folders.
        out: Where to write, without suffix.

    Returns:
        The two files, PNG and PDF.

    Raises:
        UserError: If the runs are of several data sets, or their outputs have not been kept.
    """
    shown, title = one_a_setting(paths)
    panels = [_panel(*run) for run in shown]
    with matplotlib.rc_context(STYLE):
        return save(confusion_figure(panels, shown[0].record["class_names"], title), out)


def _panel(label: str, record: dict, folder: Path) -> Panel:
    """The panel of one run."""
    if "quality" not in record or not (folder / FEATURES).is_file():
        raise UserError(
            f"the outputs of '{folder}' have not been kept (got no {FEATURES}); run 'fedcli quality' first."
        )
    with np.load(folder / FEATURES) as kept:
        labels, predicted = kept["labels"], kept["predicted"]
    quality = record["quality"]
    label += f", client {quality['client']}" if "client" in quality else ""
    right = 100 * (labels == predicted).mean()
    title = f"{fill(label, TITLE)}\n{right:.1f} % of {len(labels):,} images right"
    return Panel(title, confusion(labels, predicted, len(record["class_names"])))


def confusion(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """How many percent of the images of a class are taken for each class.

    Args:
        labels: Their classes, `[n]`.
        predicted: What they are taken for, `[n]`.
        num_classes: C.

    Returns:
        `[C, C]`, row by true class, each row with the sum 100; NaN for a class without images.
    """
    counts = np.zeros((num_classes, num_classes))
    np.add.at(counts, (labels, predicted), 1)
    sizes = counts.sum(1, keepdims=True)
    return 100 * np.divide(counts, sizes, out=np.full_like(counts, np.nan), where=sizes > 0)


def confusion_figure(panels: Sequence[Panel], class_names: Sequence[str], title: str) -> Figure:
    """The figure of `confusion_chart`, to be drawn under `STYLE`."""
    columns = min(len(panels), ACROSS)
    rows = ceil(len(panels) / columns)
    figure = Figure(figsize=(PANEL * columns + 0.9, (PANEL + 1.3) * rows - 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    numbered = len(class_names) <= NUMBERED
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid.flat, panels, strict=False):
        first = axes in grid[:, 0]
        image = axes.imshow(panel.shares, cmap=MAP, vmin=0, vmax=100)
        axes.set(title=panel.title, xlabel="taken for", xticks=[], yticks=[])
        axes.spines[:].set_visible(True)
        if numbered:
            places = range(len(class_names))
            longest = max(map(len, class_names))
            axes.set_xticks(places, class_names, rotation=90 if longest > 2 else 0)
            axes.set_yticks(places, class_names if first else [""] * len(class_names))
            axes.tick_params(length=0)
            _write_numbers(axes, panel.shares)
        if first:
            axes.set_ylabel("class" if numbered else f"{len(class_names)} classes")
    figure.colorbar(image, ax=grid, label="% of the class", shrink=0.8 / rows, pad=0.02)
    figure.suptitle(title, fontsize=STYLE["axes.titlesize"], fontweight="bold")
    return figure


def _write_numbers(axes: Axes, shares: np.ndarray) -> None:
    """Writes each cell's percentage into it, white where the cell is dark, nothing where it rounds to 0."""
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.5:
            colour = "white" if share > DARK else "black"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=NUMBER, color=colour)
