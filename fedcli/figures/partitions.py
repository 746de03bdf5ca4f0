"""The chart of a partition: which client has how many examples of which class."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedcli.figures.text import write_title

MOST_NAMES = 26  # of classes; those of more would overlap


def partition_chart(class_counts: np.ndarray, class_names: Sequence[str], title: str) -> Figure:
    """Draws the numbers of examples per client and class, `class_counts` `[K, C]`, a column a client; white for 0."""
    num_classes = len(class_names)
    figure = Figure((5.8, 1.1 + 0.16 * min(num_classes, MOST_NAMES)), layout="constrained")
    axes = figure.add_subplot(xlabel="Client", ylabel="Class")
    shown = np.ma.masked_equal(class_counts.T, 0)  # white, which the palest colour of the map is not
    image = axes.imshow(shown, cmap="viridis_r", vmin=0, aspect="auto", interpolation="nearest")
    axes.locator_params(integer=True)
    if num_classes <= MOST_NAMES:
        axes.set_yticks(range(num_classes), class_names)
    figure.colorbar(image, label="Examples")
    write_title(figure, title)
    return figure
