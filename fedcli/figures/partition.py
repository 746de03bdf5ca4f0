"""A partition as a picture: how many examples of each class each client holds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedcli.errors import UserError
from fedcli.figures.plots import CHART_WIDTH, write_title

COUNTS_MAP = "viridis_r"  # its palest colour differs from white, which stands for no example
NAMED = 26  # classes; of more, names would overlap


def partition_figure(class_counts: np.ndarray, class_names: Sequence[str], title: str) -> Figure:
    """Draws how many examples of each class each client holds, a column a client, white where there is none.

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
    rows = min(counts.shape[1], NAMED)
    figure = Figure(figsize=(CHART_WIDTH, 1.1 + 0.16 * rows), layout="constrained")
    axes = figure.add_subplot(xlabel="Client", ylabel="Class")
    shown = np.ma.masked_equal(counts.T, 0)
    image = axes.imshow(shown, cmap=COUNTS_MAP, vmin=0, aspect="auto", interpolation="nearest")
    axes.locator_params(integer=True)
    if counts.shape[1] <= NAMED:
        axes.set_yticks(range(counts.shape[1]), class_names)
    figure.colorbar(image, label="Examples")
    write_title(figure, title)
    return figure
