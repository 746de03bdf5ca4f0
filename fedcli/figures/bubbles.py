"""Partitions as bubbles: how many examples of each class each client holds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection
from matplotlib.figure import Figure

from fedcli.errors import UserError
from fedcli.figures.plots import CHART_WIDTH, LINE_COLOURS

CELL = 0.3  # inches, the largest side of a cell
BUBBLE = 0.1  # inches, the least diameter of the largest bubble; in narrow columns bubbles may overlap
LABEL_HEIGHT = 0.13  # inches that a line of labels takes
LABEL_WIDTH = 0.24  # inches that a label of up to three characters takes; longer ones stand upright
STEPS = [factor * 10**power for power in range(12) for factor in (1, 2, 5)]  # of examples in the key, and of labels


def partition_figure(class_counts: np.ndarray, class_names: Sequence[str], title: str) -> Figure:
    """Draws how many examples of each class each client holds; the area of a bubble is the number of examples.

    The longer of clients and classes runs across.

    Args:
        class_counts: `[K, C]` examples per client and class.
        class_names: C names.
        title: Title of the chart.

    Raises:
        UserError: If there is no example.
    """
    counts = np.asarray(class_counts)
    if counts.size == 0 or counts.max() <= 0:
        raise UserError(f"the partition holds no example (got counts {list(counts.shape)}); give each client some.")
    clients = [str(client) for client in range(counts.shape[0])]
    sides = [("Client", clients), ("Class", list(class_names))]
    if counts.shape[1] > counts.shape[0]:
        sides.reverse()
        counts = counts.T
    return _bubbles(counts, sides, title)


def _bubbles(counts: np.ndarray, sides: list[tuple[str, list[str]]], title: str) -> Figure:
    """A grid of bubbles.

    Args:
        counts: `[X, Y]` numbers of examples, X across.
        sides: Of X and of Y: what it is, and the labels.
        title: Title of the chart.
    """
    columns, rows = counts.shape
    width = min(CHART_WIDTH / columns, CELL)
    height = max(width, min(LABEL_HEIGHT, CHART_WIDTH / rows))  # inches, room for a line of labels where it goes
    figure = Figure(figsize=(columns * width, rows * height))
    axes = figure.add_axes((0, 0, 1, 1))  # labels stand outside; the file is cut to what is drawn
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(-0.5, rows - 0.5), title=title)
    axes.spines[:].set_visible(True)
    (across, x_labels), (up, y_labels) = sides
    upright = max(map(len, x_labels)) > 3
    step = _label_step(LABEL_HEIGHT if upright else LABEL_WIDTH, width)
    axes.set_xticks(range(0, columns, step), x_labels[::step], rotation=90 if upright else 0)
    step = _label_step(LABEL_HEIGHT, height)
    axes.set_yticks(range(0, rows, step), y_labels[::step])
    axes.set(xlabel=across, ylabel=up)
    axes.grid(True)
    filled = np.argwhere(counts > 0)
    largest = min(max(0.94 * width, BUBBLE), 0.94 * height) / width  # in columns
    areas = counts / counts.max() * largest**2
    _circles(axes, filled, areas[tuple(filled.T)])
    sizes = _key_sizes(counts.max())
    _size_key(axes, sizes, np.array(sizes) / counts.max() * largest**2, width, height)
    return figure


def _circles(axes: Axes, centres: np.ndarray, areas: np.ndarray) -> None:
    """Circles at `centres` [n, 2] with squared diameters `areas` [n] in columns; the small lie on the large."""
    order = np.argsort(-areas, kind="stable")
    diameters = np.sqrt(areas[order])
    circles = EllipseCollection(
        diameters, diameters, np.zeros(len(areas)), units="x", offsets=centres[order],
        offset_transform=axes.transData, color=LINE_COLOURS[0], linewidth=0, alpha=0.85,
        clip_on=False, zorder=3,
    )  # fmt: skip
    axes.add_collection(circles)


def _size_key(axes: Axes, sizes: list[int], areas: np.ndarray, width: float, height: float) -> None:
    """Bubbles with their numbers of examples to the right of the grid, whose cells are `width` x `height` inches."""
    left, top = axes.get_xlim()[1] + 0.1 / width, axes.get_ylim()[1]
    line = 1.1 * max(np.sqrt(areas.max()) * width, LABEL_HEIGHT) / height  # in rows
    centres = np.array([(left + np.sqrt(areas.max()) / 2, top - (0.5 + place) * line) for place in (1, 2, 3)])
    centres = centres[: len(sizes)]
    _circles(axes, centres, areas)
    axes.text(left, top - 0.5 * line, "Examples", va="center")
    for (across, up), size in zip(centres, sizes, strict=True):
        axes.text(across + np.sqrt(areas.max()) / 2 + 0.06 / width, up, f"{size:,}", va="center_baseline")


def _key_sizes(largest: int) -> list[int]:
    """Up to three round numbers of examples, the first the largest of the form 1, 2 or 5 times a power of ten."""
    return [step for step in STEPS if step <= largest][::-2][:3]


def _label_step(needed: float, cell: float) -> int:
    """Every how many cells a label stands so that each has `needed` inches: 1, 2, 5, 10, ..."""
    return next(step for step in STEPS if step * cell >= needed)
