"""Features of test images in the plane by t-SNE, of the global model or of the clients' own."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE

from fedcli.errors import UserError
from fedcli.figures.grid import Grid, describe_model, make_grid
from fedcli.measure.feature_files import CLIENT_FEATURES, MODEL_FEATURES
from fedcli.measure.sampling import SEED
from fedcli.measure.separation import pair_cosines
from fedcli.runs.schema import Record

# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Other classes are not drawn.
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
MARKERS = "os^v<>DPX*"  # of clients, as many as are measured


def features_chart(records: list[Record]) -> Figure:
    """Draws features of the first ten classes in the plane by t-SNE, a panel a setting and a colour a class.

    Raises:
        UserError: As `make_grid` and `embed`, or if the features have not been kept.
    """
    grid = make_grid(records)
    for column in grid.columns:
        run = column.run
        outputs = MODEL_FEATURES.read(run["folder"], run)
        quality = run["quality"]
        numbers = _describe_separation(quality["nmi"], quality["silhouette"])
        (axes,) = column.panels
        axes.set_title(f"{column.name}, {describe_model(run)}\n{numbers}")
        labels = outputs["labels"]
        one_model = np.zeros_like(labels)
        _draw_features(axes, outputs["features"].astype(float), labels, one_model, size=4)
    _draw_class_legend(grid)
    return grid.figure


def clients_chart(records: list[Record]) -> Figure:
    """Draws features as `features_chart`, but by the clients' own models, with a marker for each client.

    Below them are histograms of the cosines of two features.

    Raises:
        UserError: As `make_grid` and `embed`, or if the features have not been kept.
    """
    grid = make_grid(records, rows=2)
    for column in grid.columns:
        run = column.run
        outputs = CLIENT_FEATURES.read(run["folder"], run)
        features = outputs["features"].astype(float)
        labels = outputs["labels"]
        clients = outputs["clients"]
        quality = run["quality"]
        numbers = _describe_separation(quality["clients_nmi"], quality["clients_silhouette"])
        above, below = column.panels
        above.set_title(f"{column.name}\n{len(np.unique(clients))} clients, a marker each\n{numbers}")
        _draw_features(above, features, labels, clients, size=12)
        _draw_cosines(below, features, labels)
    _draw_class_legend(grid)
    return grid.figure


def _describe_separation(nmi: float, silhouette: float) -> str:
    """Describes how well features separate the classes."""
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
    for place, client in enumerate(np.unique(client_of_point)):
        is_own = client_of_point == client
        x, y = points[is_own].T
        axes.scatter(x, y, s=size, c=colours[is_own], marker=MARKERS[place], linewidths=0, rasterized=True)


def _draw_class_legend(grid: Grid) -> None:
    """Names the colours of the classes, which are the same in all columns."""
    (first, *_) = grid.columns
    dots = []
    for name, colour in zip(first.run["class_names"], CLASS_COLOURS, strict=False):
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
    """Embeds features `[n, D]` in two dimensions `[n, 2]` by t-SNE.

    Raises:
        UserError: If there are fewer than two features, or fewer than two images.
    """
    if min(features.shape) < 2:  # it begins with their two principal components
        num_images, width = features.shape
        raise UserError(
            f"t-SNE needs two features of two images or more (got {width} of {num_images}); leave such runs out, or "
            "draw another --kind."
        )
    perplexity = min(30, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(features)
