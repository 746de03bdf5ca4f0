"""Features of test images in the plane, by t-SNE: of one model a run, or of the own models of a round's clients.

`tsne` draws what `fedcli.figures.quality` has kept: a panel a setting, or, of a client's own model and test images of
several domains, a row a setting with a panel a domain, the client's own first.

`clients` shows what the clients' own models make of the same test images, and how alike these features are. No state
keeps the models of a round's clients, so `add_clients_quality` runs one more round from the last checkpoint of a
finished run, and keeps these features beside its record. The model of a client is shown with images of the classes (and
domains, where there are any) that the client holds.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE
from torch import Tensor

from fedcli.core.batches import generator
from fedcli.core.federation import Cohort
from fedcli.errors import UserError
from fedcli.figures.plots import LINE_COLOURS, STYLE, chart
from fedcli.figures.quality import Shown, keep_arrays, kept_arrays, kept_outputs, one_a_setting, separation
from fedcli.registry import find_method
from fedcli.runs.consent import with_own_files
from fedcli.runs.drift import EXAMPLES, SEED, Recording, local_features
from fedcli.runs.owner import owned
from fedcli.runs.prepare import machine_settings
from fedcli.runs.records import read_record, write_record
from fedcli.runs.run import open_run

# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Further classes are not drawn.
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
CLIENT_MARKERS = ("o", "s", "^", "v", "<", ">", "D", "P", "X", "*")  # further clients are not shown
CLIENTS = "clients.npz"
PERPLEXITY = 30
ACROSS = 5  # panels in a row where each is a setting
SIDE, CLIENTS_SIDE = 1.7, 2.5  # inches, width and height of a panel of `tsne`, and of `clients`
TITLE = 28  # characters that a panel is wide
POINTS = 800  # at most in a panel of clients, so that their markers can be told apart
BINS = 40


class Scatter(NamedTuple):
    """One setting's features in the plane."""

    title: str
    points: np.ndarray  # [n, 2]
    labels: np.ndarray  # [n]
    row: str = ""  # the setting, in the first of several panels


class Points(NamedTuple):
    """Features of test images, each by the model of one client."""

    features: np.ndarray  # [n, D]
    labels: np.ndarray  # [n]
    clients: np.ndarray  # [n], ids


class ClientScatter(NamedTuple):
    """One setting's features in the plane, and the cosines of their pairs."""

    title: str
    points: np.ndarray  # [n, 2]
    labels: np.ndarray  # [n]
    clients: np.ndarray  # [n], ids
    positive: np.ndarray  # cosines of pairs of one class
    negative: np.ndarray  # cosines of pairs of two classes


@chart("tsne", "features of test images by t-SNE, a panel a setting, after 'fedcli quality'", "folders")
def embedding_chart(paths: Iterable[Path]) -> Figure:
    """Draws the features of finished runs in the plane, a panel or a row for those that differ in more than the seed.

    Of several seeds the first is drawn, and of more than ten classes the first ten.

    Args:
        paths: Run folders, or folders that hold run folders.

    Raises:
        UserError: If the runs are of several data sets, or their features have not been kept.
    """
    shown, title = one_a_setting(paths)
    rows = [_row(run) for run in shown]
    columns = max(map(len, rows))
    if columns == 1:  # one panel a setting: as many in a row as a page is wide
        columns, every = min(len(rows), ACROSS), [panel for row in rows for panel in row]
        rows = [every[start : start + columns] for start in range(0, len(every), columns)]
    panels = [panel for row in rows for panel in (*row, *[None] * (columns - len(row)))]
    return embedding_figure(panels, shown[0].record["class_names"], title, columns)


def _row(run: Shown) -> list[Scatter]:
    """The panels of one run."""
    label, kept = kept_outputs(run)
    quality = run.record["quality"]
    if "domains" not in quality:
        return [_scatter(label, kept["features"], kept["labels"], quality)]
    names, own = list(quality["domains"]), quality["domain"]
    row = []
    for name in (own, *(other for other in names if other != own)):
        shown = kept["domains"] == names.index(name)
        about = quality["domains"][name]
        row.append(_scatter(f"{own} → {name}", kept["features"][shown], kept["labels"][shown], about))
    return [row[0]._replace(row=label), *row[1:]]


def _scatter(title: str, features: np.ndarray, labels: np.ndarray, quality: dict[str, float]) -> Scatter:
    """The panel of some features."""
    shown = labels < len(CLASS_COLOURS)
    return Scatter(f"{fill(title, TITLE)}\n{_numbers(quality)}", embed(features[shown]), labels[shown])


def _numbers(quality: dict[str, float]) -> str:
    return f"NMI {quality['nmi']:.2f}, silhouette {quality['silhouette']:.2f}"


def embed(features: np.ndarray) -> np.ndarray:
    """t-SNE in two dimensions.

    Args:
        features: `[n, D]`.

    Returns:
        `[n, 2]`.
    """
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)


def embedding_figure(panels: Sequence[Scatter | None], class_names: Sequence[str], title: str, columns: int) -> Figure:
    """The figure of panels in rows of so many `columns`; None stays empty."""
    rows = len(panels) // columns
    figure = Figure(figsize=(SIDE * max(columns, 2), rows * (SIDE + 0.4) + 0.5), layout="constrained")
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        if panel is None:
            axes.set_axis_off()
            continue
        order = np.random.default_rng(0).permutation(len(panel.labels))  # so that no class lies above all others
        colours = np.array(CLASS_COLOURS)[panel.labels[order]]
        axes.scatter(*panel.points[order].T, c=colours, s=3, linewidths=0, rasterized=True)
        axes.set(title=panel.title, ylabel=fill(panel.row, TITLE), xticks=[], yticks=[])
        axes.set_box_aspect(1)
        axes.spines[:].set_visible(True)
    _headline(figure, title, class_names)
    handles = _class_dots(filter(None, panels), class_names)
    label_width = 0.4 + 0.065 * max(len(dot.get_label()) for dot in handles)  # inches
    side_by_side = max(1, min(len(handles), int(figure.get_figwidth() / label_width)))
    figure.legend(handles=handles, loc="outside lower center", ncols=side_by_side, columnspacing=1, handletextpad=0.2)
    return figure


def _headline(figure: Figure, title: str, class_names: Sequence[str]) -> None:
    """The title over all panels, which says where classes are not drawn."""
    left_out = len(class_names) - len(CLASS_COLOURS)
    note = f"; the first {len(CLASS_COLOURS)} of {len(class_names)} classes" if left_out > 0 else ""
    figure.suptitle(title + note, fontsize=STYLE["axes.titlesize"])


def _class_dots(panels: Iterable[Scatter | ClientScatter], class_names: Sequence[str]) -> list[Line2D]:
    """The entries of a legend for the classes that there are."""
    present = sorted({int(label) for panel in panels for label in np.unique(panel.labels)})
    return [_dot("o", CLASS_COLOURS[label], class_names[label]) for label in present]


def _dot(marker: str, colour: str, label: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker=marker, markeredgewidth=0, color=colour, label=label)


# The clients' own models


@chart("clients", "features of the clients' own models, after 'fedcli quality --clients'", "folders")
def clients_chart(paths: Iterable[Path]) -> Figure:
    """Draws the features of the clients' models of finished runs, a column for those that differ in more than the seed.

    Above they stand in the plane by t-SNE, colours for classes and markers for clients; below are the histograms of the
    cosine between two of them, of one class or of two. Of several seeds the first is drawn, of more than ten classes
    the first ten, of more than ten clients a round too.

    Args:
        paths: Run folders, or folders that hold run folders.

    Raises:
        UserError: If the runs are of several data sets, or their clients' features have not been kept.
    """
    runs, title = one_a_setting(paths)
    panels = []
    for run in runs:
        kept = kept_arrays(run, CLIENTS, "clients_", "fedcli quality --clients")
        points = Points(kept["features"].astype(float), kept["labels"], kept["clients"])
        quality = {name: run.record["quality"][f"clients_{name}"] for name in ("nmi", "silhouette")}
        panels.append(client_scatter(f"{run.label}\n{_numbers(quality)}", points))
    return clients_figure(panels, runs[0].record["class_names"], title)


def add_clients_quality(folder: Path, method: Sequence[str] = ()) -> dict[str, float]:
    """Measures the features of the clients' models after one more round, keeps them, and writes the numbers down.

    Args:
        folder: Of the run.
        method: The user's files that the run needs, see `resume`.

    Returns:
        What its record gets: `clients_nmi` and `clients_silhouette`, of the `clients_examples` features of all clients
        together; the median cosines of two features of one class, `clients_cosine_same`, and of two classes,
        `clients_cosine_other`; and `clients_features_sha256`, of the file.

    Raises:
        UserError: As `one_more_round` and `separation`.
    """
    points = one_more_round(folder, method)
    points = points._replace(features=points.features.astype(np.float16))  # as they are kept
    cosines, same = pair_cosines(points.features.astype(float), points.labels)
    measured = {
        **separation(points.features.astype(float), points.labels), "examples": len(points.labels),
        "cosine_same": float(np.median(cosines[same])), "cosine_other": float(np.median(cosines[~same])),
    }  # fmt: skip
    with owned(folder):
        measured["features_sha256"] = keep_arrays(folder / CLIENTS, points._asdict())
        found = {f"clients_{name}": value for name, value in measured.items()}
        record = read_record(folder)
        write_record(folder, {**record, "quality": {**record.get("quality", {}), **found}})
    return found


def one_more_round(folder: Path, method: Sequence[str] = ()) -> Points:
    """The features of the clients' models after the round that would follow a run's last one; nothing is written.

    Args:
        folder: Of the run.
        method: The user's files that the run needs, see `resume`.

    Raises:
        UserError: If the run has no global model or cannot be opened again.
    """
    record = with_own_files(read_record(folder), method, "the same command with")
    chosen = find_method(record["method_source"])
    if chosen.personal is not None:
        raise UserError(f"'{chosen.name}' has no global model that drifts apart (got {folder}); leave the run out.")
    run = open_run(folder, method, drift_every=1)
    fed, cohort = run.fed, run.fed.cohort(len(record["rounds"]))
    with machine_settings(fed):
        chosen.run_round(run.state, cohort, fed, run.setup.options)
        if fed.trained is None:
            raise UserError(f"the clients of '{chosen.name}' send no whole model (got {folder}); leave the run out.")
        return client_points(fed, cohort)


def client_points(fed: Recording, cohort: Cohort) -> Points:
    """What the models of the round's clients give for some test images, as far as it is shown."""
    candidates = np.flatnonzero(fed.test_labels.cpu().numpy() < len(CLASS_COLOURS))
    index = np.sort(generator(SEED, "images").permutation(candidates)[:EXAMPLES])
    features = local_features(fed, cohort, index).double().cpu()[: len(CLIENT_MARKERS)]  # [K, n, D]
    labels = fed.test_labels.cpu()[index]
    domains = torch.zeros_like(labels) if fed.test_domains is None else fed.test_domains.cpu()[index]
    visible = torch.stack([_known(fed, client, labels, domains) for client in cohort.client_ids[: len(features)]])
    client, image = visible.nonzero(as_tuple=True)
    kept = np.sort(generator(SEED, "points").permutation(len(client))[:POINTS])
    client, image = client[kept], image[kept]
    return Points(features[client, image].numpy(), labels[image].numpy(), cohort.client_ids[client.numpy()])


def _known(fed: Recording, client: int, labels: Tensor, domains: Tensor) -> Tensor:
    """Whether a client has training examples of the class and, in all its data, of the domain of images; `[n]`."""
    classes = torch.bincount(fed.engine.labels.cpu()[fed.training[client]], minlength=fed.num_classes)
    counts = torch.as_tensor(fed.domain_counts[client])
    return (classes[labels] > 0) & (counts[domains] > 0)


def client_scatter(title: str, points: Points) -> ClientScatter:
    """The column of one run."""
    cosines, same = pair_cosines(points.features, points.labels)
    return ClientScatter(title, embed(points.features), points.labels, points.clients, cosines[same], cosines[~same])


def pair_cosines(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine of each two features, and whether they are of one class.

    Args:
        features: `[n, D]`; a zero vector has the cosine 0 with all.
        labels: `[n]`.

    Returns:
        Both `[n (n - 1) / 2]`.
    """
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    directions = features / np.where(lengths > 0, lengths, 1)
    pairs = np.triu_indices(len(labels), 1)
    return (directions @ directions.T)[pairs], (labels[:, None] == labels)[pairs]


def clients_figure(panels: Sequence[ClientScatter], class_names: Sequence[str], title: str) -> Figure:
    """The figure with a column for each setting: the plane above, the cosines below."""
    ids = sorted({int(client) for panel in panels for client in np.unique(panel.clients)})
    markers = {client: CLIENT_MARKERS[place % len(CLIENT_MARKERS)] for place, client in enumerate(ids)}
    figure = Figure(figsize=(CLIENTS_SIDE * len(panels) + 1.2, 2 * CLIENTS_SIDE), layout="constrained")
    upper, lower = figure.subplots(2, len(panels), squeeze=False, sharey="row", height_ratios=(1.4, 1))
    for above, below, one in zip(upper, lower, panels, strict=True):
        _draw_points(above, one, markers)
        _draw_histograms(below, one)
    lower[0].set(ylabel="Pairs (%)", ylim=(0, None))
    _headline(figure, title, class_names)
    _legend(figure, panels, markers, class_names)
    return figure


def _draw_points(axes: Axes, panel: ClientScatter, markers: dict[int, str]) -> None:
    """The features in the plane, scaled to the panel."""
    low, high = panel.points.min(0), panel.points.max(0)
    scaled = (panel.points - low) / np.where(high > low, high - low, 1)
    order = np.random.default_rng(0).permutation(len(scaled))  # so that no client and no class lies above all others
    colours = np.array(CLASS_COLOURS)[panel.labels]
    for client in np.unique(panel.clients):
        own = order[panel.clients[order] == client]
        axes.scatter(*scaled[own].T, c=colours[own], marker=markers[client], s=12, linewidths=0, rasterized=True)
    axes.set(title=panel.title, xticks=[], yticks=[], xlim=(-0.04, 1.04), ylim=(-0.04, 1.04))
    axes.set_box_aspect(1)
    axes.spines[:].set_visible(True)


def _draw_histograms(axes: Axes, panel: ClientScatter) -> None:
    """Shares of the pairs of one class, and of those of two, by cosine."""
    edges = np.linspace(min(0, panel.positive.min(initial=0), panel.negative.min(initial=0)), 1, BINS + 1)
    kinds = {"of one class": panel.positive, "of two classes": panel.negative}
    for (name, cosines), colour, line in zip(kinds.items(), LINE_COLOURS, ("-", "--"), strict=False):
        counts, _ = np.histogram(cosines.clip(max=1), edges)
        shares = 100 * counts / max(len(cosines), 1)
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.25)
        axes.stairs(shares, edges, color=colour, linestyle=line, label=name)
    axes.set(xlabel="Cosine similarity", xlim=(edges[0], 1))


def _legend(
    figure: Figure, panels: Sequence[ClientScatter], markers: dict[int, str], class_names: Sequence[str]
) -> None:
    """What the colours, the markers and the lines stand for, beside the panels in one column."""
    handles, titles = [], []
    for title, own in {
        "Class": _class_dots(panels, class_names),
        "Client": [_dot(marker, "#555555", str(client)) for client, marker in markers.items()],
        "Two features": figure.axes[-1].get_legend_handles_labels()[0],
    }.items():
        titles.append(len(handles))
        handles += [_dot("", "none", title), *own]
    legend = figure.legend(handles=handles, loc="outside right upper", handletextpad=0.4)
    for place in titles:
        legend.get_texts()[place].set_fontweight("bold")
