"""Figures of what the models of finished runs give for images, see `quality`; of several seeds the first is shown."""

from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

from fedcli.errors import UserError
from fedcli.figures.plots import LINE_COLOURS, setting_name, title_words, write_title
from fedcli.figures.quality import OF_CLIENTS, add_correlations, finished_runs, pair_cosines, read_outputs
from fedcli.results.tables import group

# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Further classes are not drawn.
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
CLIENT_MARKERS = ("o", "s", "^", "v", "<", ">", "D", "P", "X", "*")  # further clients are not kept
PERPLEXITY = 30
ACROSS, SIDE = 5, 1.7  # of t-SNE: panels in a row, inches of a panel
CLIENTS_SIDE, BINS = 2.5, 40  # of the clients' features
MATRICES_ACROSS, MATRIX_SIDE = 3, 2.5
NUMBERED = 10  # classes; of more, numbers and names would overlap


def one_a_setting(paths: Iterable[Path]) -> tuple[list[dict], str]:
    """Of the finished runs under `paths` the first seed of each setting, and what all have in common, as a title.

    Returns:
        The records with their `folder` and their `name` in a figure, and the title.

    Raises:
        UserError: If there is no finished run, or they are of several data sets.
    """
    records = finished_runs(paths)
    names = sorted({record["dataset"] for record in records})
    if len(names) > 1:
        raise UserError(f"a figure shows the classes of one data set (got {', '.join(names)}); draw each alone.")
    shown = [{**member.records[0], "name": setting_name(member)} for member in group(records)]
    seeds = " or ".join(sorted({str(record["seed"]) for record in shown}))
    return shown, title_words(records, f"seed {seeds}")


def _heading(run: dict, *more: str) -> str:
    """The lines over a panel: the name of its run, with the client whose own model was measured, and others."""
    client = run["quality"].get("client")
    name = run["name"] if client is None else f"{run['name']}, client\N{NO-BREAK SPACE}{client}"
    return "\n".join([fill(name, 28), *more])


def _numbers(quality: dict[str, float], prefix: str = "") -> str:
    return f"NMI {quality[prefix + 'nmi']:.2f}, silhouette {quality[prefix + 'silhouette']:.2f}"


def _panels(count: int, across: int, side: float, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, in rows of as many as stand `across`; `side` is that of a panel in inches."""
    across = min(count, across)
    down = ceil(count / across)
    figure = Figure(figsize=(side * max(across, 2), (side + 0.8) * down + 0.5), layout="constrained")
    write_title(figure, title)
    return figure, [figure.add_subplot(down, across, place) for place in range(1, count + 1)]


def embedding_chart(paths: Iterable[Path]) -> Figure:
    """Draws features in the plane by t-SNE, a panel a setting. Of more than ten classes the first ten are drawn.

    Raises:
        UserError: As `one_a_setting`, or if their features have not been kept.
    """
    shown, title = one_a_setting(paths)
    figure, all_axes = _panels(len(shown), ACROSS, SIDE, title)
    for axes, run in zip(all_axes, shown, strict=True):
        kept = read_outputs(run["folder"], run)
        axes.set_title(_heading(run, _numbers(run["quality"])))
        _scatter(axes, kept["features"], kept["labels"])
    _add_legend(figure, shown[0]["class_names"])
    return figure


def clients_chart(paths: Iterable[Path]) -> Figure:
    """Draws the features of the clients' models of a round, a column a setting.

    Above they stand in the plane by t-SNE, colours for classes and markers for clients; below are the histograms of the
    cosine between two of them, of one class or of two. Of more than ten classes or clients the first ten are drawn.

    Raises:
        UserError: As `one_a_setting`, or if their clients' features have not been kept.
    """
    shown, title = one_a_setting(paths)
    figure = Figure(figsize=(CLIENTS_SIDE * len(shown) + 0.8, 2 * CLIENTS_SIDE), layout="constrained")
    upper, lower = figure.subplots(2, len(shown), squeeze=False, height_ratios=(1.4, 1))
    for above, below, run in zip(upper, lower, shown, strict=True):
        kept = read_outputs(run["folder"], run, OF_CLIENTS)
        features = kept["features"].astype(float)
        _scatter(above, features, kept["labels"], kept["clients"])
        numbers = _numbers(run["quality"], OF_CLIENTS)
        above.set_title(_heading(run, numbers, f"{len(np.unique(kept['clients']))} clients, a marker each"))
        cosines, same = pair_cosines(features, kept["labels"])
        bins = np.linspace(min(0, cosines.min()), 1, BINS)
        for name, values, colour in (
            ("of one class", cosines[same], LINE_COLOURS[0]),
            ("of two classes", cosines[~same], LINE_COLOURS[1]),
        ):
            shares = np.full(len(values), 100 / max(len(values), 1))  # of the pairs, in percent
            below.hist(values, bins, weights=shares, histtype="stepfilled", alpha=0.4, color=colour, label=name)
        below.set(xlabel="Cosine similarity")
        below.sharey(lower[0])
    lower[0].set_ylabel("Pairs of features (%)")
    lower[-1].legend(loc="upper left")
    write_title(figure, title)
    _add_legend(figure, shown[0]["class_names"])
    return figure


def embed(features: np.ndarray) -> np.ndarray:
    """t-SNE of features `[n, D]` in two dimensions `[n, 2]`."""
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)


def _scatter(axes: Axes, features: np.ndarray, labels: np.ndarray, clients: np.ndarray | None = None) -> None:
    """Draws features `[n, D]` in the plane, a colour a class and, where there are `clients` [n], a marker a client."""
    visible = labels < len(CLASS_COLOURS)
    size = 4 if clients is None else 12  # of which markers can be told apart
    points, colours = embed(features[visible]), np.array(CLASS_COLOURS)[labels[visible]]
    clients = np.zeros(len(points), int) if clients is None else clients[visible]
    order = np.random.default_rng(0).permutation(len(points))  # so that no class lies above all others
    for client, marker in zip(np.unique(clients), CLIENT_MARKERS, strict=False):
        rows = order[clients[order] == client]
        axes.scatter(*points[rows].T, c=colours[rows], marker=marker, s=size, linewidths=0, rasterized=True)
    axes.set(xticks=[], yticks=[], box_aspect=1)
    axes.spines[:].set_visible(True)


def _add_legend(figure: Figure, class_names: Sequence[str]) -> None:
    """Adds the legend of the classes that are drawn."""
    dots = []
    for name, colour in zip(class_names, CLASS_COLOURS, strict=False):
        dots.append(Line2D([], [], linestyle="none", marker="o", markersize=4, color=colour, label=name))
    width = 0.4 + 0.065 * max(len(dot.get_label()) for dot in dots)  # inches of an entry
    columns = max(1, min(len(dots), int(figure.get_figwidth() / width)))
    figure.legend(handles=dots, loc="outside lower center", ncols=columns, columnspacing=1, handletextpad=0.2)


def confusion_chart(paths: Iterable[Path]) -> Figure:
    """Draws what the test images of each class are taken for, in percent of the class, a panel a setting.

    Raises:
        UserError: As `one_a_setting`, or if their outputs have not been kept.
    """
    shown, title = one_a_setting(paths)
    class_names = shown[0]["class_names"]
    few = len(class_names) <= NUMBERED
    figure, all_axes = _panels(len(shown), MATRICES_ACROSS, MATRIX_SIDE + 0.5, title)
    for axes, run in zip(all_axes, shown, strict=True):
        kept = read_outputs(run["folder"], run)
        labels, predicted = kept["labels"], kept["predicted"]
        shares = 100 * confusion_matrix(labels, predicted, labels=range(len(class_names)), normalize="true")
        display = ConfusionMatrixDisplay(shares, display_labels=class_names).plot(
            ax=axes, cmap="Blues", colorbar=False, include_values=few, values_format=".0f",
            im_kw={"vmin": 0, "vmax": 100}, text_kw={"fontsize": 5.5}, xticks_rotation="vertical",
        )  # fmt: skip
        right = f"{100 * (labels == predicted).mean():.1f} % of {len(labels):,} images right"
        axes.set(title=_heading(run, right), xlabel="taken for", ylabel="class")
        if not few:
            axes.set(xticks=[], yticks=[])
    figure.colorbar(display.im_, ax=all_axes, label="% of the class", shrink=0.8, pad=0.02)
    return figure


def correlation_chart(paths: Iterable[Path], files: Sequence[str] = ()) -> Figure:
    """Draws the cross-correlation of the clients' logits with their mean, a row a setting.

    On the left they are of public images, on the right of the clients' own training images. Where all records have
    their matrices these are drawn, and no checkpoint is needed.

    Args:
        paths: See `one_a_setting`.
        files: The user's files that the runs need, see `resume`.

    Raises:
        UserError: As `one_a_setting` and `add_correlations`.
    """
    shown, title = one_a_setting(paths)
    kept = [run.get("correlation") for run in shown]
    if not all(kept):
        kept = add_correlations([run["folder"] for run in shown], files)
    figure = Figure(figsize=(2 * MATRIX_SIDE + 1.2, len(shown) * (MATRIX_SIDE + 0.3) + 0.8), layout="constrained")
    panels = figure.subplots(len(shown), 2, squeeze=False, sharex=True, sharey=True)
    for pair, run, matrices in zip(panels, shown, kept, strict=True):
        for axes, kind in zip(pair, ("public", "private"), strict=True):
            matrix = np.array(matrices[kind])
            same = np.eye(len(matrix), dtype=bool)
            image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            numbers = f"diagonal {matrix[same].mean():.2f}, others {matrix[~same].mean():.2f}"
            axes.set(title=f"{kind.capitalize()} images\n{numbers}", xlabel="Class of the mean")
            axes.locator_params(integer=True)
        pair[0].set_ylabel(f"{fill(run['name'], 28)}\n\nClass of a client")
    figure.colorbar(image, ax=panels, label="Cross-correlation of logits", shrink=min(1, 1.5 / len(shown)), aspect=25)
    write_title(figure, title)
    return figure
