"""Figures of what the models of finished runs give for images, see `quality`; of several seeds the first is shown."""

from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from sklearn.metrics import ConfusionMatrixDisplay

from fedcli.errors import UserError
from fedcli.figures.plots import LINE_COLOURS, setting_name, title_words, write_title
from fedcli.figures.quality import OF_CLIENTS, correlations, finished_runs, pair_cosines, public_sample, read_outputs
from fedcli.results.tables import group
from fedcli.runs.prepare import machine_settings
from fedcli.runs.run import open_run

# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Further classes are not drawn.
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
CLIENT_MARKERS = ("o", "s", "^", "v", "<", ">", "D", "P", "X", "*")  # further clients are not kept
PERPLEXITY = 30
SIDE = 2.5  # inches of a panel, with its titles
ACROSS = 3  # panels in a row
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


def _panels(count: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, in rows of `ACROSS`."""
    across, down = min(count, ACROSS), ceil(count / ACROSS)
    figure = Figure(figsize=(SIDE * max(across, 2) + 0.8, (SIDE + 0.8) * down + 0.5), layout="constrained")
    write_title(figure, title)
    return figure, [figure.add_subplot(down, across, place) for place in range(1, count + 1)]


def embedding_chart(paths: Iterable[Path]) -> Figure:
    """Draws features in the plane by t-SNE, a panel a setting. Of more than ten classes the first ten are drawn.

    Raises:
        UserError: As `one_a_setting`, or if their features have not been kept.
    """
    shown, title = one_a_setting(paths)
    figure, all_axes = _panels(len(shown), title)
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
    figure = Figure(figsize=(SIDE * len(shown) + 0.8, 2 * SIDE), layout="constrained")
    upper, lower = figure.subplots(2, len(shown), squeeze=False, height_ratios=(1.4, 1))
    for above, below, run in zip(upper, lower, shown, strict=True):
        kept = read_outputs(run["folder"], run, OF_CLIENTS)
        features = kept["features"].astype(float)
        _scatter(above, features, kept["labels"], kept["clients"])
        numbers = _numbers(run["quality"], OF_CLIENTS)
        above.set_title(_heading(run, numbers, f"{len(np.unique(kept['clients']))} clients, a marker each"))
        cosines, same = pair_cosines(features, kept["labels"])
        pairs = {"of one class": cosines[same], "of two classes": cosines[~same]}
        percent = [np.full(len(values), 100 / max(len(values), 1)) for values in pairs.values()]
        bins = np.linspace(min(0, cosines.min()), 1, 40)
        look = {"histtype": "stepfilled", "alpha": 0.4, "color": LINE_COLOURS[:2], "label": [*pairs]}
        below.hist([*pairs.values()], bins, weights=percent, **look)
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
    for name, colour in zip(class_names, CLASS_COLOURS, strict=False):
        figure.axes[0].plot([], [], linestyle="none", marker="o", markersize=4, color=colour, label=name)
    columns = max(1, int(figure.get_figwidth() / (0.4 + 0.065 * max(map(len, class_names)))))  # inches of an entry
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def confusion_chart(paths: Iterable[Path]) -> Figure:
    """Draws what the test images of each class are taken for, in percent of the class, a panel a setting.

    Raises:
        UserError: As `one_a_setting`, or if their outputs have not been kept.
    """
    shown, title = one_a_setting(paths)
    class_names = shown[0]["class_names"]
    few = len(class_names) <= NUMBERED
    figure, all_axes = _panels(len(shown), title)
    for axes, run in zip(all_axes, shown, strict=True):
        kept = read_outputs(run["folder"], run)
        labels, predicted = kept["labels"], kept["predicted"]
        display = ConfusionMatrixDisplay.from_predictions(
            labels, predicted, labels=range(len(class_names)), display_labels=class_names, normalize="true", ax=axes,
            cmap="Blues", colorbar=False, include_values=few, values_format=".0%", im_kw={"vmin": 0, "vmax": 1},
            text_kw={"fontsize": 5}, xticks_rotation="vertical",
        )  # fmt: skip
        right = f"{100 * (labels == predicted).mean():.1f} % of {len(labels):,} images right"
        axes.set(title=_heading(run, right), xlabel="taken for", ylabel="class")
        if not few:
            axes.set(xticks=[], yticks=[])
    figure.colorbar(display.im_, ax=all_axes, label="Share of the class", shrink=0.8, pad=0.02)
    return figure


def correlation_chart(paths: Iterable[Path], files: Sequence[str] = ()) -> Figure:
    """Draws the cross-correlation of the clients' logits with their mean, a row a setting.

    On the left they are of public images, those of the first run that has any, on the right of the clients' own
    training images.

    Args:
        paths: See `one_a_setting`.
        files: The user's files that the runs need, see `resume`.

    Raises:
        UserError: As `one_a_setting`; or if no run has public images, or one has no personal models, no checkpoint or
            another one's.
    """
    shown, title = one_a_setting(paths)
    figure = Figure(figsize=(2 * SIDE + 1.2, len(shown) * (SIDE + 0.3) + 0.8), layout="constrained")
    panels = figure.subplots(len(shown), 2, squeeze=False, sharex=True, sharey=True)
    lenders = [run["folder"] for run in shown if run["config"].get("public_dataset")]
    if not lenders:
        raise UserError(f"no run has public images (got {len(shown)} without); add a run of a method that uses them.")
    public = public_sample(open_run(lenders[0], files).fed)
    for pair, run in zip(panels, shown, strict=True):
        opened = open_run(run["folder"], files)
        fed, method = opened.fed, opened.setup.method
        if method.personal is None:
            raise UserError(f"'{method.name}' has no personal models (got {run['folder']}); leave the run out.")
        with machine_settings(fed):
            matrices = correlations(fed, method, opened.state, public)
        for axes, (kind, matrix) in zip(pair, matrices.items(), strict=True):
            same = np.eye(len(matrix), dtype=bool)
            image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            numbers = f"diagonal {matrix[same].mean():.2f}, others {matrix[~same].mean():.2f}"
            axes.set(title=f"{kind.capitalize()} images\n{numbers}", xlabel="Class of the mean")
            axes.locator_params(integer=True)
        pair[0].set_ylabel(f"{fill(run['name'], 28)}\n\nClass of a client")
    figure.colorbar(image, ax=panels, label="Cross-correlation of logits", shrink=min(1, 1.5 / len(shown)), aspect=25)
    write_title(figure, title)
    return figure
