"""Figures of what models make of images: features by t-SNE, confusions, and correlations of logits.

Of several seeds a figure shows the first.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil
from textwrap import fill
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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


class _Column(NamedTuple):
    """The panels of a setting, one below the other."""

    run: dict  # its first finished one, with its `name` in figures
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
    shown = [{**member.records[0], "name": fill(setting_name(member), 28)} for member in group(finished)]
    across = min(len(shown), ACROSS)
    down = rows * ceil(len(shown) / ACROSS)
    figure = Figure((SIDE * max(across, 2) + 1.2, (SIDE + 0.7) * down + 0.4), layout="constrained")
    write_title(figure, title_words(shown, "seed " + " or ".join(sorted({str(run["seed"]) for run in shown}))))
    columns = figure.subplots(down, across, squeeze=False).reshape(-1, rows, across).swapaxes(1, 2).reshape(-1, rows)
    for empty in columns[len(shown) :].flat:
        empty.remove()
    return _Grid(figure, [_Column(run, axes) for run, axes in zip(shown, columns, strict=False)])


def features_chart(records: list[dict], prefix: str = "") -> Figure:
    """Draws features of the first ten classes in the plane by t-SNE, a panel a setting and a colour a class.

    Features by clients' models have a marker for each client, and below them histograms of the cosines of two features.

    Args:
        records: The runs.
        prefix: Which of `FILES` is drawn.

    Raises:
        UserError: As `_grid`, or if the features have not been kept.
    """
    grid = _grid(records, 2 if prefix else 1)
    for run, panels in grid.columns:
        outputs = read_outputs(run["folder"], run, prefix)
        features = outputs["features"].astype(float)
        labels = outputs["labels"]
        clients = outputs.get("clients", np.zeros_like(labels))
        axes = panels[0]
        axes.set(title=_features_title(run, clients, prefix), xticks=[], yticks=[], box_aspect=1)
        axes.spines[:].set_visible(True)
        visible = np.random.default_rng(0).permutation(np.flatnonzero(labels < len(CLASS_COLOURS)))  # no class on top
        points = embed(features[visible])
        colours = np.array(CLASS_COLOURS)[labels[visible]]
        size = 12 if prefix else 4
        for client, marker in zip(np.unique(clients[visible]), "os^v<>DPX*", strict=False):
            chosen = clients[visible] == client
            x, y = points[chosen].T
            axes.scatter(x, y, s=size, c=colours[chosen], marker=marker, linewidths=0, rasterized=True)
        if prefix:
            _draw_cosines(panels[1], features, labels)
    signs = []
    for name, colour in zip(run["class_names"], CLASS_COLOURS, strict=False):
        signs.append(Line2D([], [], color=colour, label=name, linestyle="none", marker="o", markersize=4))
    grid.figure.legend(handles=signs, loc="outside right center")
    return grid.figure


def _features_title(run: dict, clients: np.ndarray, prefix: str) -> str:
    """The setting, whose model the features are by, and how well they separate the classes."""
    quality = run["quality"]
    numbers = f"NMI {quality[prefix + 'nmi']:.2f}, silhouette {quality[prefix + 'silhouette']:.2f}"
    if prefix:
        return f"{run['name']}\n{len(np.unique(clients))} clients, a marker each\n{numbers}"
    client = f", client\N{NO-BREAK SPACE}{quality['client']}" if "client" in quality else ""
    return f"{run['name']}{client}, {model_words(run)}\n{numbers}"


def _draw_cosines(axes: Axes, features: np.ndarray, labels: np.ndarray) -> None:
    """Draws histograms of the cosines of two features of one class, and of two classes, each in percent."""
    cosines, same = pair_cosines(features, labels)
    bins = np.linspace(min(0, cosines.min()), 1, 40).tolist()
    pairs = (cosines[same], cosines[~same])
    percent = [np.full(len(values), 100 / max(len(values), 1)) for values in pairs]
    names = ("of one class", "of two classes")
    axes.hist(pairs, bins, weights=percent, histtype="stepfilled", alpha=0.4, label=names)
    axes.set(xlabel="Cosine similarity", ylabel="Pairs of features (%)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, columnspacing=1)  # bars may reach the top


clients_chart = partial(features_chart, prefix=OF_CLIENTS)


def embed(features: np.ndarray) -> np.ndarray:
    """t-SNE of features `[n, D]` in two dimensions `[n, 2]`."""
    perplexity = min(30, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(features)


def model_words(run: dict) -> str:
    """Which model the outputs of a run are of: "model of round 7 of 20"; older records are of the last round."""
    rounds = len(run["rounds"])
    return f"model of round {run['quality'].get('round', rounds - 1) + 1} of {rounds}"


def confusion_chart(records: list[dict]) -> Figure:
    """Draws what the test images of each class are taken for, in percent of the class, a panel a setting.

    Raises:
        UserError: As `_grid`, or if the outputs have not been kept.
    """
    grid = _grid(records)
    for run, (axes,) in grid.columns:
        outputs = read_outputs(run["folder"], run)
        names = run["class_names"]
        labels = outputs["labels"]
        predicted = outputs["predicted"]
        few = len(names) <= 10  # numbers and names of more classes would overlap
        ConfusionMatrixDisplay.from_predictions(
            labels, predicted, labels=range(len(names)), display_labels=names, normalize="true", ax=axes,
            cmap="Blues", colorbar=not few, include_values=few, values_format=".0%", im_kw={"vmin": 0, "vmax": 1},
            text_kw={"fontsize": 5}, xticks_rotation="vertical",
        )  # fmt: skip
        right = f"{100 * (labels == predicted).mean():.1f} % of {len(labels):,} images right"
        axes.set(title=f"{run['name']}, {model_words(run)}\n{right}", xlabel="taken for", ylabel="class")
        if not few:
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
    grid = _grid(records, 2)
    columns = grid.columns
    lenders = [run["folder"] for run, _ in columns if run["config"].get("public_dataset")]
    if not lenders:
        raise UserError(f"no run has public images (got {len(columns)} without); add a run of a method that uses them.")
    public = public_sample(open_run(lenders[0], files).fed)
    for run, panels in columns:
        opened = open_run(run["folder"], files)
        fed = opened.fed
        method = opened.setup.method
        if method.personal is None:
            raise UserError(f"'{method.name}' has no personal models (got {run['folder']}); leave the run out.")
        with machine_settings(fed):
            matrices = correlations(fed, method, opened.state, public)
        for axes, (kind, matrix) in zip(panels, matrices.items(), strict=True):
            same = np.eye(len(matrix), dtype=bool)
            image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            numbers = f"diagonal {matrix[same].mean():.2f}, others {matrix[~same].mean():.2f}"
            title = f"{run['name']}\n{kind} images, {numbers}"
            axes.set(title=title, xlabel="Class of the mean", ylabel="Class of a client")
            axes.locator_params(integer=True)
    grid.figure.colorbar(image, ax=grid.figure.axes, label="Cross-correlation of logits", shrink=0.6)
    return grid.figure
