"""Figures of what the models of finished runs give for images, see `quality`; of several seeds the first is shown.

`tsne` draws features in the plane, a panel a setting, or, of a client's own model and test images of several domains, a
row a setting with a panel a domain, the client's own first. `clients` shows what the clients' own models make of the
same images, and how alike these features are. `confusion` draws what images are taken for, and `correlation` how alike
the clients' logits are, classes by classes.
"""

from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from sklearn.manifold import TSNE
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

from fedcli.errors import UserError
from fedcli.figures.plots import LINE_COLOURS, setting_name, title_words, write_title
from fedcli.figures.quality import CLIENTS_FEATURES, FEATURES, add_correlations, find_runs, pair_cosines
from fedcli.results.tables import group
from fedcli.runs.records import read_record

# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Further classes are not drawn.
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
CLIENT_MARKERS = ("o", "s", "^", "v", "<", ">", "D", "P", "X", "*")  # further clients are not kept
PERPLEXITY = 30
ACROSS, SIDE, TITLE = 5, 1.7, 28  # of t-SNE: panels in a row, inches of a panel, and characters above it
CLIENTS_SIDE, BINS = 2.5, 40  # of the clients' features
MATRICES_ACROSS, MATRIX_SIDE, MATRIX_TITLE = 3, 2.5, 38
NUMBERED = 10  # classes; of more, numbers and names would overlap


class Shown(NamedTuple):
    """The run that stands in a figure for all that differ from it only in the seed."""

    label: str
    record: dict[str, Any]
    folder: Path

    @property
    def full_label(self) -> str:
        """The label with the client whose own model was measured."""
        quality = self.record["quality"]
        return self.label + (f", client\N{NO-BREAK SPACE}{quality['client']}" if "client" in quality else "")


def one_a_setting(paths: Iterable[Path]) -> tuple[list[Shown], str]:
    """Of the finished runs under `paths` the first seed of each setting, and what all have in common, as a title.

    The seed stands in the title, or where it is not the same for all in the labels.

    Args:
        paths: Run folders, or folders that hold run folders.

    Raises:
        UserError: If there is no finished run, or they are of several data sets.
    """
    records = [{**read_record(folder), "folder": folder} for folder in find_runs(paths)[0]]
    names = sorted({record["dataset"] for record in records})
    if len(names) > 1:
        raise UserError(f"the classes of a figure are those of one data set (got {', '.join(names)}); draw each alone.")
    firsts = [(setting_name(member), member.records[0]) for member in group(records)]
    seeds = {record["seed"] for _, record in firsts}
    if len(seeds) > 1:
        firsts = [(f"{label}, seed {record['seed']}", record) for label, record in firsts]
    title = title_words(records, *(f"seed {seed}" for seed in seeds if len(seeds) == 1))
    return [Shown(label, record, record["folder"]) for label, record in firsts], title


# Features in the plane


def embedding_chart(paths: Iterable[Path]) -> Figure:
    """Draws the features of finished runs in the plane, a panel or a row for those that differ in more than the seed.

    Of more than ten classes the first ten are drawn.

    Raises:
        UserError: As `one_a_setting`, or if their features have not been kept.
    """
    shown, title = one_a_setting(paths)
    by_domain = max(len(run.record.get("quality", {}).get("domains", ())) for run in shown)
    across = by_domain or min(len(shown), ACROSS)  # without domains as many in a row as a page is wide
    down = len(shown) if by_domain else ceil(len(shown) / ACROSS)
    figure = Figure(figsize=(SIDE * max(across, 2), down * (SIDE + 0.4) + 0.5), layout="constrained")
    for number, run in enumerate(shown):
        kept, quality = FEATURES.read(run.folder, run.record), run.record["quality"]
        panels = [(run.full_label, np.full(len(kept["labels"]), True), quality)]  # name, which images, and numbers
        if "domains" in quality:
            own, names = quality["domain"], list(quality["domains"])
            names.sort(key=lambda name: name != own)
            of_domain = {name: kept["domains"] == place for place, name in enumerate(quality["domains"])}
            panels = [(f"{own} → {name}", of_domain[name], quality["domains"][name]) for name in names]
        first = number * (by_domain or 1) + 1
        for place, (name, images, numbers) in enumerate(panels, first):
            axes = figure.add_subplot(down, across, place)
            _scatter(axes, kept["features"][images], kept["labels"][images])
            axes.set_title(f"{fill(name, TITLE)}\n{_numbers(numbers)}")
            if by_domain and place == first:
                axes.set_ylabel(fill(run.full_label, TITLE))
    _finish(figure, title, shown[0].record["class_names"])
    return figure


def clients_chart(paths: Iterable[Path]) -> Figure:
    """Draws the features of the clients' models of finished runs, a column for those that differ in more than the seed.

    Above they stand in the plane by t-SNE, colours for classes and markers for clients; below are the histograms of the
    cosine between two of them, of one class or of two. Of more than ten classes the first ten are drawn, of more than
    ten clients a round too.

    Raises:
        UserError: As `one_a_setting`, or if their clients' features have not been kept.
    """
    shown, title = one_a_setting(paths)
    figure = Figure(figsize=(CLIENTS_SIDE * len(shown) + 0.8, 2 * CLIENTS_SIDE), layout="constrained")
    upper, lower = figure.subplots(2, len(shown), squeeze=False, height_ratios=(1.4, 1))
    for above, below, run in zip(upper, lower, shown, strict=True):
        kept = CLIENTS_FEATURES.read(run.folder, run.record)
        features = kept["features"].astype(float)
        _scatter(above, features, kept["labels"], kept["clients"])
        numbers = _numbers(run.record["quality"], CLIENTS_FEATURES.prefix)
        above.set_title(f"{run.label}\n{numbers}\n{len(np.unique(kept['clients']))} clients, a marker each")
        cosines, same = pair_cosines(features, kept["labels"])
        bins = np.linspace(min(0, cosines.min()), 1, BINS)
        pairs = {"of one class": cosines[same], "of two classes": cosines[~same]}
        for (name, values), colour in zip(pairs.items(), LINE_COLOURS, strict=False):
            shares = np.full(len(values), 100 / max(len(values), 1))  # of the pairs, in percent
            below.hist(values, bins, weights=shares, histtype="stepfilled", alpha=0.4, color=colour, label=name)
        below.set(xlabel="Cosine similarity")
        below.sharey(lower[0])
    lower[0].set_ylabel("Pairs of features (%)")
    lower[-1].legend(loc="upper left")
    _finish(figure, title, shown[0].record["class_names"])
    return figure


def _numbers(quality: dict[str, float], prefix: str = "") -> str:
    return f"NMI {quality[prefix + 'nmi']:.2f}, silhouette {quality[prefix + 'silhouette']:.2f}"


def embed(features: np.ndarray) -> np.ndarray:
    """t-SNE of features `[n, D]` in two dimensions `[n, 2]`."""
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)


def _scatter(axes: Axes, features: np.ndarray, labels: np.ndarray, clients: np.ndarray | None = None) -> None:
    """Draws features `[n, D]` in the plane, a colour a class and, where there are `clients` [n], a marker a client."""
    visible = labels < len(CLASS_COLOURS)
    points, labels = embed(features[visible]), labels[visible]
    size = 4 if clients is None else 12  # of which markers can be told apart
    clients = np.zeros(len(labels), int) if clients is None else clients[visible]
    order = np.random.default_rng(0).permutation(len(labels))  # so that no class lies above all others
    colours = np.array(CLASS_COLOURS)[labels]
    for client, marker in zip(np.unique(clients), CLIENT_MARKERS, strict=False):
        rows = order[clients[order] == client]
        axes.scatter(*points[rows].T, c=colours[rows], marker=marker, s=size, linewidths=0, rasterized=True)
    axes.set(xticks=[], yticks=[])
    axes.set_box_aspect(1)
    axes.spines[:].set_visible(True)


def _finish(figure: Figure, title: str, class_names: Sequence[str]) -> None:
    """Writes the title, which says where classes are not drawn, and the legend of the classes."""
    if len(class_names) > len(CLASS_COLOURS):
        title += f"; the first {len(CLASS_COLOURS)} of {len(class_names)} classes"
    write_title(figure, title)
    dots = []
    for name, colour in zip(class_names, CLASS_COLOURS, strict=False):
        dots.append(Line2D([], [], linestyle="none", marker="o", markersize=4, color=colour, label=name))
    width = 0.4 + 0.065 * max(len(dot.get_label()) for dot in dots)  # inches of an entry
    columns = max(1, min(len(dots), int(figure.get_figwidth() / width)))
    figure.legend(handles=dots, loc="outside lower center", ncols=columns, columnspacing=1, handletextpad=0.2)


# Matrices of classes by classes


def confusion_chart(paths: Iterable[Path]) -> Figure:
    """Draws what finished runs take the test images of each class for, a panel for those that differ beside the seed.

    A cell is a share of its row in percent.

    Raises:
        UserError: As `one_a_setting`, or if their outputs have not been kept.
    """
    shown, title = one_a_setting(paths)
    class_names = shown[0].record["class_names"]
    numbered = len(class_names) <= NUMBERED
    columns = min(len(shown), MATRICES_ACROSS)
    rows = ceil(len(shown) / columns)
    figure = Figure(figsize=(MATRIX_SIDE * columns + 0.9, (MATRIX_SIDE + 1) * rows), layout="constrained")
    for number, run in enumerate(shown):
        kept = FEATURES.read(run.folder, run.record)
        labels, predicted = kept["labels"], kept["predicted"]
        axes = figure.add_subplot(rows, columns, number + 1)
        shares = 100 * confusion_matrix(labels, predicted, labels=range(len(class_names)), normalize="true")
        display = ConfusionMatrixDisplay(shares, display_labels=class_names).plot(
            ax=axes, cmap="Blues", colorbar=False, include_values=numbered, values_format=".0f",
            im_kw={"vmin": 0, "vmax": 100}, text_kw={"fontsize": 5.5}, xticks_rotation="vertical",
        )  # fmt: skip
        right = f"{100 * (labels == predicted).mean():.1f} % of {len(labels):,} images right"
        axes.set(title=f"{fill(run.full_label, MATRIX_TITLE)}\n{right}", xlabel="taken for")
        axes.set_ylabel("" if number % columns else "class" if numbered else f"{len(class_names)} classes")
        if number % columns or not numbered:
            axes.set_yticks([])
        if not numbered:
            axes.set_xticks([])
    figure.colorbar(display.im_, ax=figure.axes, label="% of the class", shrink=0.8 / rows, pad=0.02)
    write_title(figure, title)
    return figure


def correlation_chart(paths: Iterable[Path], files: Sequence[str] = ()) -> Figure:
    """Draws the cross-correlation of the clients' logits with their mean, a row for runs that differ beyond the seed.

    On the left they are of public images, on the right of the clients' own training images. Where all records have
    their matrices these are drawn, and no checkpoint is needed.

    Args:
        paths: See `one_a_setting`.
        files: The user's files that the runs need, see `resume`.

    Raises:
        UserError: As `one_a_setting` and `add_correlations`.
    """
    shown, title = one_a_setting(paths)
    kept = [run.record.get("correlation") for run in shown]
    if not all(kept):
        kept = add_correlations([run.folder for run in shown], files)
    figure = Figure(figsize=(2 * MATRIX_SIDE + 1.2, len(shown) * (MATRIX_SIDE + 0.3) + 0.8), layout="constrained")
    panels = figure.subplots(len(shown), 2, squeeze=False, sharex=True, sharey=True)
    for pair, run, matrices in zip(panels, shown, kept, strict=True):
        for axes, key in zip(pair, ("public", "private"), strict=True):
            matrix = np.array(matrices[key])
            same = np.eye(len(matrix), dtype=bool)
            image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            numbers = f"diagonal {matrix[same].mean():.2f}, others {matrix[~same].mean():.2f}"
            axes.set(title=f"{key.capitalize()} images\n{numbers}", xlabel="Class of the mean")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        pair[0].set_ylabel(f"{fill(run.label, MATRIX_TITLE)}\n\nClass of a client")
    figure.colorbar(image, ax=panels, label="Cross-correlation of logits", shrink=min(1, 1.5 / len(shown)), aspect=25)
    write_title(figure, title)
    return figure
