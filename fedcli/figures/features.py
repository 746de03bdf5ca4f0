"""Figures of what models make of images: features by t-SNE, confusions, and correlations of logits.

Of several seeds a figure shows the first.
"""

from collections.abc import Sequence
from math import ceil
from textwrap import fill
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE
from sklearn.metrics import ConfusionMatrixDisplay

from fedcli.errors import UserError
from fedcli.figures.plots import setting_name, title_words, write_title
from fedcli.measure.correlation import correlations, public_sample
from fedcli.measure.quality import OF_CLIENTS, SEED, pair_cosines, read_outputs
from fedcli.results.frame import finished_runs
from fedcli.results.tables import group
from fedcli.runs.machine import machine_settings
from fedcli.runs.resume import open_run

# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Other classes are not drawn.
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
SIDE = 2.5  # inches of a panel
ACROSS = 3  # panels in a row
MARKERS = "os^v<>DPX*"  # of clients


class _Column(NamedTuple):
    """The panels of a setting, one below the other."""

    run: dict  # its first finished one
    name: str  # of the setting, in lines
    panels: np.ndarray  # of axes


class _Grid(NamedTuple):
    """A figure of such columns."""

    figure: Figure
    columns: list[_Column]


def _grid(records: list[dict], rows: int = 1) -> _Grid:
    """A figure with a column of `rows` panels for each setting, of which `ACROSS` stand side by side.

    Raises:
        UserError: If there is no finished run, or they are of several data sets.
    """
    finished = finished_runs(records)
    datasets = sorted({record["dataset"] for record in finished})
    if len(datasets) > 1:
        raise UserError(f"a figure shows the classes of one data set (got {', '.join(datasets)}); use --dataset.")
    settings = group(finished)
    across = min(len(settings), ACROSS)
    down = ceil(len(settings) / ACROSS)  # columns that stand below each other
    width = SIDE * max(across, 2) + 1.2
    height = (SIDE + 0.7) * rows * down + 0.4
    figure = Figure((width, height), layout="constrained")
    runs = [setting.records[0] for setting in settings]
    seeds = sorted({str(run["seed"]) for run in runs})
    write_title(figure, title_words(runs, "seed " + " or ".join(seeds)))
    panels = figure.subplots(rows * down, across, squeeze=False)
    columns = []
    for number, setting in enumerate(settings):
        top = rows * (number // across)
        name = fill(setting_name(setting), 28)
        columns.append(_Column(setting.records[0], name, panels[top : top + rows, number % across]))
    for empty in panels[-rows:, len(settings) - across * (down - 1) :].flat:
        empty.remove()
    return _Grid(figure, columns)


def features_chart(records: list[dict]) -> Figure:
    """Draws features of the first ten classes in the plane by t-SNE, a panel a setting and a colour a class.

    Raises:
        UserError: As `_grid`, or if the features have not been kept.
    """
    grid = _grid(records)
    for column in grid.columns:
        run = column.run
        outputs = read_outputs(run["folder"], run)
        quality = run["quality"]
        model = model_words(run)
        if "client" in quality:
            model = f"client\N{NO-BREAK SPACE}{quality['client']}, {model}"
        numbers = _separation_words(quality["nmi"], quality["silhouette"])
        (axes,) = column.panels
        axes.set_title(f"{column.name}, {model}\n{numbers}")
        labels = outputs["labels"]
        one_model = np.zeros_like(labels)
        _draw_features(axes, outputs["features"].astype(float), labels, one_model, size=4)
    _draw_class_legend(grid)
    return grid.figure


def clients_chart(records: list[dict]) -> Figure:
    """Draws features as `features_chart`, but by the clients' own models, with a marker for each client.

    Below them are histograms of the cosines of two features.

    Raises:
        UserError: As `_grid`, or if the features have not been kept.
    """
    grid = _grid(records, rows=2)
    for column in grid.columns:
        run = column.run
        outputs = read_outputs(run["folder"], run, OF_CLIENTS)
        features = outputs["features"].astype(float)
        labels = outputs["labels"]
        clients = outputs["clients"]
        quality = run["quality"]
        numbers = _separation_words(quality[f"{OF_CLIENTS}nmi"], quality[f"{OF_CLIENTS}silhouette"])
        above, below = column.panels
        above.set_title(f"{column.name}\n{len(np.unique(clients))} clients, a marker each\n{numbers}")
        _draw_features(above, features, labels, clients, size=12)
        _draw_cosines(below, features, labels)
    _draw_class_legend(grid)
    return grid.figure


def _separation_words(nmi: float, silhouette: float) -> str:
    """How well features separate the classes."""
    return f"NMI {nmi:.2f}, silhouette {silhouette:.2f}"


def _draw_features(axes: Axes, features: np.ndarray, labels: np.ndarray, clients: np.ndarray, size: float) -> None:
    """Draws features `[n, D]` by t-SNE: a colour for each of the first classes, a marker for each of the clients."""
    axes.set(xticks=[], yticks=[], box_aspect=1)
    axes.spines[:].set_visible(True)
    drawn = np.flatnonzero(labels < len(CLASS_COLOURS))
    drawn = np.random.default_rng(0).permutation(drawn)  # else the last class would lie on top
    points = embed(features[drawn])
    colours = np.array(CLASS_COLOURS)[labels[drawn]]
    client_of_point = clients[drawn]
    for client, marker in zip(np.unique(client_of_point), MARKERS, strict=False):
        is_own = client_of_point == client
        x, y = points[is_own].T
        axes.scatter(x, y, s=size, c=colours[is_own], marker=marker, linewidths=0, rasterized=True)


def _draw_class_legend(grid: _Grid) -> None:
    """Names the colours of the classes, which are the same in all columns."""
    class_names = grid.columns[0].run["class_names"]
    dots = []
    for name, colour in zip(class_names, CLASS_COLOURS, strict=False):
        dots.append(Line2D([], [], color=colour, label=name, linestyle="none", marker="o", markersize=4))
    grid.figure.legend(handles=dots, loc="outside right center")


def _draw_cosines(axes: Axes, features: np.ndarray, labels: np.ndarray) -> None:
    """Draws histograms of the cosines of two features of one class, and of two classes, each in percent."""
    cosines, is_same_class = pair_cosines(features, labels)
    bins = np.linspace(min(0, cosines.min()), 1, 40).tolist()
    pairs = (cosines[is_same_class], cosines[~is_same_class])
    percent = [np.full(len(values), 100 / max(len(values), 1)) for values in pairs]
    names = ("of one class", "of two classes")
    axes.hist(pairs, bins, weights=percent, histtype="stepfilled", alpha=0.4, label=names)
    axes.set(xlabel="Cosine similarity", ylabel="Pairs of features (%)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, columnspacing=1)  # bars may reach the top


def embed(features: np.ndarray) -> np.ndarray:
    """t-SNE of features `[n, D]` in two dimensions `[n, 2]`."""
    perplexity = min(30, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(features)


def model_words(run: dict) -> str:
    """Which model the outputs of a run are of: "model of round 7 of 20"; older records are of the last round."""
    num_rounds = len(run["rounds"])
    number = run["quality"].get("round", num_rounds - 1)
    return f"model of round {number + 1} of {num_rounds}"


def confusion_chart(records: list[dict]) -> Figure:
    """Draws what the test images of each class are taken for, in percent of the class, a panel a setting.

    Raises:
        UserError: As `_grid`, or if the outputs have not been kept.
    """
    grid = _grid(records)
    for column in grid.columns:
        run = column.run
        outputs = read_outputs(run["folder"], run)
        names = run["class_names"]
        labels = outputs["labels"]
        predicted = outputs["predicted"]
        has_few_classes = len(names) <= 10  # numbers and names of more classes would overlap
        (axes,) = column.panels
        ConfusionMatrixDisplay.from_predictions(
            labels, predicted, labels=range(len(names)), display_labels=names, normalize="true", ax=axes, cmap="Blues",
            colorbar=not has_few_classes, include_values=has_few_classes, values_format=".0%",
            im_kw={"vmin": 0, "vmax": 1}, text_kw={"fontsize": 5}, xticks_rotation="vertical",
        )  # fmt: skip
        right = f"{100 * (labels == predicted).mean():.1f} % of {len(labels):,} images right"
        axes.set(title=f"{column.name}, {model_words(run)}\n{right}", xlabel="taken for", ylabel="class")
        if not has_few_classes:
            axes.set(xticks=[], yticks=[])
    return grid.figure


def correlation_chart(records: list[dict], files: Sequence[str] = ()) -> Figure:
    """Draws the cross-correlation of the clients' logits with their mean, a column a setting.

    Above on public images, those of the first run that has any, below on the clients' own training images.

    Args:
        records: See `_grid`.
        files: The user's files that the runs need, see `resume`.

    Raises:
        UserError: As `_grid`; if no run has public images; or if a run has no personal models or not its checkpoint.
    """
    grid = _grid(records, rows=2)
    runs = [column.run for column in grid.columns]
    with_public_images = [run for run in runs if run["config"].get("public_dataset")]
    if not with_public_images:
        raise UserError(f"no run has public images (got {len(runs)} without); add a run of a method that uses them.")
    public = public_sample(open_run(with_public_images[0]["folder"], files).fed)
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
        image = _draw_correlation(above, matrices["public"], f"{column.name}\npublic images")
        _draw_correlation(below, matrices["private"], f"{column.name}\nprivate images")
    grid.figure.colorbar(image, ax=grid.figure.axes, label="Cross-correlation of logits", shrink=0.6)
    return grid.figure


def _draw_correlation(axes: Axes, matrix: np.ndarray, title: str) -> AxesImage:
    """Draws a cross-correlation `[C, C]`, with the means of its diagonal and of the rest in the title."""
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    is_diagonal = np.eye(len(matrix), dtype=bool)
    numbers = f"diagonal {matrix[is_diagonal].mean():.2f}, others {matrix[~is_diagonal].mean():.2f}"
    axes.set(title=f"{title}, {numbers}", xlabel="Class of the mean", ylabel="Class of a client")
    axes.locator_params(integer=True)
    return image
