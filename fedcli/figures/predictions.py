"""What models make of images: confusions of classes, and correlations of the clients' logits."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from sklearn.metrics import ConfusionMatrixDisplay

from fedcli.errors import UserError
from fedcli.figures.grid import describe_model, make_grid
from fedcli.measure.correlation import correlations, public_sample
from fedcli.measure.feature_files import MODEL_FEATURES
from fedcli.runs.machine import machine_settings
from fedcli.runs.resume import open_run
from fedcli.runs.schema import Record

NUMBERS_SHARE = 5 / 8  # of the size of other text, so that the numbers of ten classes stand apart


def confusion_chart(records: list[Record]) -> Figure:
    """Draws what the common test images of each class are taken for, in percent of the class, a panel a setting.

    Raises:
        UserError: As `make_grid`, or if the outputs have not been kept.
    """
    grid = make_grid(records)
    for column in grid.columns:
        run = column.run
        outputs = MODEL_FEATURES.read(run["folder"], run)
        names = run["class_names"]
        labels = outputs["labels"]
        predicted = outputs["predicted"]
        size_of_numbers = NUMBERS_SHARE * matplotlib.rcParams["font.size"]
        has_few_classes = len(names) <= 10  # numbers and names of more classes would overlap
        (axes,) = column.panels
        ConfusionMatrixDisplay.from_predictions(
            labels, predicted, labels=range(len(names)), display_labels=names, normalize="true", ax=axes, cmap="Blues",
            colorbar=not has_few_classes, include_values=has_few_classes, values_format=".0%",
            im_kw={"vmin": 0, "vmax": 1}, text_kw={"fontsize": size_of_numbers}, xticks_rotation="vertical",
        )  # fmt: skip
        # A client may also have test images of its own, which are not these.
        tested = "common test images" if "client" in run["quality"] else "images"
        right = f"{100 * (labels == predicted).mean():.1f} % of {len(labels):,} {tested} right"
        axes.set(title=f"{column.name}, {describe_model(run)}\n{right}", xlabel="taken for", ylabel="class")
        if not has_few_classes:
            axes.set(xticks=[], yticks=[])
    return grid.figure


def correlation_chart(records: list[Record], files: Sequence[str] = ()) -> Figure:
    """Draws the cross-correlation of the clients' logits with their mean, a column a setting.

    Above on public images, those of the first run that has any, below on the clients' own training images.

    Args:
        records: See `make_grid`.
        files: The user's files that the runs need, see `resume`.

    Raises:
        UserError: As `make_grid`; if no run has public images; or if one lacks personal models or its checkpoint.
    """
    grid = make_grid(records, rows=2)
    runs = [column.run for column in grid.columns]
    with_public_images = [run for run in runs if run["config"].get("public_dataset")]
    if not with_public_images:
        raise UserError(f"no run has public images (got {len(runs)} without); add a run of a method that uses them.")
    (first, *_) = with_public_images
    public = public_sample(open_run(first["folder"], files).fed)
    images = []
    for column in grid.columns:
        folder = column.run["folder"]
        opened = open_run(folder, files)
        fed = opened.fed
        method = opened.setup.method
        if method.personal is None:
            raise UserError(f"'{method.name}' has no personal models (got {folder}); leave the run out.")
        with machine_settings(fed):
            matrices = correlations(fed, method, opened.state, public)
        above, below = column.panels
        images.append(_draw_correlation(above, matrices["public"], f"{column.name}\npublic images"))
        images.append(_draw_correlation(below, matrices["private"], f"{column.name}\nprivate images"))
    grid.figure.colorbar(images[0], ax=grid.figure.axes, label="Cross-correlation of logits", shrink=0.6)
    return grid.figure


def _draw_correlation(axes: Axes, matrix: np.ndarray, title: str) -> AxesImage:
    """Draws a cross-correlation `[C, C]`, with the means of its diagonal and of the rest in the title."""
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    is_diagonal = np.eye(len(matrix), dtype=bool)
    numbers = f"diagonal {matrix[is_diagonal].mean():.2f}, others {matrix[~is_diagonal].mean():.2f}"
    axes.set(title=f"{title}, {numbers}", xlabel="Class of the mean", ylabel="Class of a client")
    axes.locator_params(integer=True)
    return image
