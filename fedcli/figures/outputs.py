"""Figures of what the models of finished runs give for images, see `quality`; of several seeds the first is shown."""

from collections.abc import Sequence
from math import ceil
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE
from sklearn.metrics import ConfusionMatrixDisplay

from fedcli.errors import UserError
from fedcli.figures.plots import setting_name, title_words, write_title
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
SIDE = 2.5  # inches of a panel
ACROSS = 3  # panels in a row
NUMBERED = 10  # classes; of more, numbers and names would overlap


def _panels(records: list[dict], rows: int = 1) -> tuple[Figure, list[tuple[dict, np.ndarray]]]:
    """A figure with a column of so many panels for each setting, of which `ACROSS` stand side by side.

    Returns:
        The figure; and of the finished runs the first seed of each setting, with its `name` in figures, and its axes.

    Raises:
        UserError: If there is no finished run, or they are of several data sets.
    """
    finished = finished_runs(records)
    datasets = sorted({record["dataset"] for record in finished})
    if len(datasets) > 1:
        raise UserError(f"a figure shows the classes of one data set (got {', '.join(datasets)}); use --dataset.")
    shown = [{**member.records[0], "name": fill(setting_name(member), 28)} for member in group(finished)]
    across, down = min(len(shown), ACROSS), rows * ceil(len(shown) / ACROSS)
    figure = Figure((SIDE * max(across, 2) + 1.2, (SIDE + 0.7) * down + 0.4), layout="constrained")
    write_title(figure, title_words(shown, "seed " + " or ".join(sorted({str(run["seed"]) for run in shown}))))
    columns = figure.subplots(down, across, squeeze=False).reshape(-1, rows, across).swapaxes(1, 2).reshape(-1, rows)
    for empty in columns[len(shown) :].flat:
        empty.remove()
    return figure, list(zip(shown, columns, strict=False))


def _measured(run: dict, prefix: str = "") -> str:
    """The lines over a panel: the name of a run, with the client whose own model was measured, and the numbers."""
    quality = run["quality"]
    client = "" if prefix or "client" not in quality else f", client\N{NO-BREAK SPACE}{quality['client']}"
    return f"{run['name']}{client}\nNMI {quality[prefix + 'nmi']:.2f}, silhouette {quality[prefix + 'silhouette']:.2f}"


def embedding_chart(records: list[dict]) -> Figure:
    """Draws features in the plane by t-SNE, a panel a setting. Of more than ten classes the first ten are drawn.

    Raises:
        UserError: As `_panels`, or if their features have not been kept.
    """
    figure, panels = _panels(records)
    for run, (axes,) in panels:
        kept = read_outputs(run["folder"], run)
        axes.set_title(_measured(run))
        _scatter(axes, kept["features"], kept["labels"])
    _add_legend(figure, run["class_names"])
    return figure


def clients_chart(records: list[dict]) -> Figure:
    """Draws the features of the clients' models of a round, a column a setting.

    Above they stand in the plane by t-SNE, colours for classes and markers for clients; below are the histograms of the
    cosine between two of them, of one class or of two. Of more than ten classes or clients the first ten are drawn.

    Raises:
        UserError: As `_panels`, or if their clients' features have not been kept.
    """
    figure, panels = _panels(records, 2)
    for run, (above, below) in panels:
        kept = read_outputs(run["folder"], run, OF_CLIENTS)
        features = kept["features"].astype(float)
        _scatter(above, features, kept["labels"], kept["clients"])
        above.set_title(f"{_measured(run, OF_CLIENTS)}\n{len(np.unique(kept['clients']))} clients, a marker each")
        cosines, same = pair_cosines(features, kept["labels"])
        bins, look = np.linspace(min(0, cosines.min()), 1, 40), {"histtype": "stepfilled", "alpha": 0.4}
        for values, label in ((cosines[same], "of one class"), (cosines[~same], "of two classes")):
            below.hist(values, bins, weights=np.full(len(values), 100 / max(len(values), 1)), label=label, **look)
        below.set(xlabel="Cosine similarity", ylabel="Pairs of features (%)")
        below.legend(loc="upper left")
    _add_legend(figure, run["class_names"])
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
    signs = []
    for name, colour in zip(class_names, CLASS_COLOURS, strict=False):
        signs.append(Line2D([], [], linestyle="none", marker="o", markersize=4, color=colour, label=name))
    figure.legend(handles=signs, loc="outside right upper")


def confusion_chart(records: list[dict]) -> Figure:
    """Draws what the test images of each class are taken for, in percent of the class, a panel a setting.

    Raises:
        UserError: As `_panels`, or if their outputs have not been kept.
    """
    figure, panels = _panels(records)
    for run, (axes,) in panels:
        kept, names = read_outputs(run["folder"], run), run["class_names"]
        labels, predicted, few = kept["labels"], kept["predicted"], len(names) <= NUMBERED
        ConfusionMatrixDisplay.from_predictions(
            labels, predicted, labels=range(len(names)), display_labels=names, normalize="true", ax=axes,
            cmap="Blues", colorbar=not few, include_values=few, values_format=".0%", im_kw={"vmin": 0, "vmax": 1},
            text_kw={"fontsize": 5}, xticks_rotation="vertical",
        )  # fmt: skip
        right = f"{100 * (labels == predicted).mean():.1f} % of {len(labels):,} images right"
        axes.set(title=f"{run['name']}\n{right}", xlabel="taken for", ylabel="class")
        if not few:
            axes.set(xticks=[], yticks=[])
    return figure


def correlation_chart(records: list[dict], files: Sequence[str] = ()) -> Figure:
    """Draws the cross-correlation of the clients' logits with their mean, a column a setting.

    Above they are of public images, those of the first run that has any, below of the clients' own training images.

    Args:
        records: See `_panels`.
        files: The user's files that the runs need, see `resume`.

    Raises:
        UserError: As `_panels`; or if no run has public images, or one has no personal models, no checkpoint or
            another one's.
    """
    figure, panels = _panels(records, 2)
    lenders = [run["folder"] for run, _ in panels if run["config"].get("public_dataset")]
    if not lenders:
        raise UserError(f"no run has public images (got {len(panels)} without); add a run of a method that uses them.")
    public = public_sample(open_run(lenders[0], files).fed)
    for run, pair in panels:
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
            title = f"{run['name']}\n{kind} images, {numbers}"
            axes.set(title=title, xlabel="Class of the mean", ylabel="Class of a client")
            axes.locator_params(integer=True)
    figure.colorbar(image, ax=figure.axes, label="Cross-correlation of logits", shrink=0.6)
    return figure
