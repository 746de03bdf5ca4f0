"""What the clients' own models make of the same test images: their features in the plane, and how alike these are.

No state keeps the models of a round's clients, so one more round is run from the last checkpoint of a finished run.
The model of a client is shown with images of the classes (and domains, where there are any) that the client holds.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from fedcli.core.batches import generator
from fedcli.core.federation import Cohort
from fedcli.errors import UserError
from fedcli.figures.features import COLOURS, embed
from fedcli.figures.plots import COLOURS as LINES
from fedcli.figures.plots import STYLE, save
from fedcli.figures.quality import measure, one_a_setting
from fedcli.registry import find_method
from fedcli.runs.drift import EXAMPLES, SEED, Recording, local_features
from fedcli.runs.records import CHECKPOINT, read_record
from fedcli.runs.run import machine_settings, read_checkpoint, restore

MARKERS = ("o", "s", "^", "v", "<", ">", "D", "P", "X", "*")  # of clients; further ones are not shown
POINTS = 800  # at most in a panel, so that their markers can be told apart
BINS = 40
PANEL = 2.5  # inches, width and height


class Points(NamedTuple):
    """Features of test images, each by the model of one client."""

    features: np.ndarray  # [n, D]
    labels: np.ndarray  # [n]
    clients: np.ndarray  # [n], ids


class Panel(NamedTuple):
    """One setting's features in the plane, and the cosines of their pairs."""

    title: str
    points: np.ndarray  # [n, 2]
    labels: np.ndarray  # [n]
    clients: np.ndarray  # [n], ids
    positive: np.ndarray  # cosines of pairs of one class
    negative: np.ndarray  # cosines of pairs of two classes


def clients_chart(paths: Iterable[Path], out: Path) -> list[Path]:
    """Draws the features of the clients' models of finished runs, a column for those that differ in more than the seed.

    Above they stand in the plane by t-SNE, colours for classes and markers for clients; below are the histograms of the
    cosine between two of them, of one class or of two. Of several seeds the first is drawn, of more than ten classes
    the first ten, of more than ten clients a round too.

    Args:
        paths: Run folders, or folders that hold run folders.
        out: Where to write, without suffix.

    Returns:
        The two files, PNG and PDF.

    Raises:
        UserError: If the runs are of several data sets, or one has no global model, no checkpoint or another method
            file than now.
    """
    runs, title = one_a_setting(paths)
    panels = [panel(run.label, one_more_round(run.folder)) for run in runs]
    with matplotlib.rc_context(STYLE):
        return save(clients_figure(panels, runs[0].record["class_names"], title), out)


def one_more_round(folder: Path) -> Points:
    """The features of the clients' models after the round that would follow a run's last one; nothing is written.

    Raises:
        UserError: If the run has no global model, no checkpoint or another method file than now.
    """
    record = read_record(folder)
    method = find_method(record["method_source"])
    if method.personal is not None:
        raise UserError(f"'{method.name}' has no global model that drifts apart (got {folder}); leave the run out.")
    if not (folder / CHECKPOINT).is_file():
        raise UserError(f"there is no checkpoint in '{folder}' (got no {CHECKPOINT}); run the experiment again.")
    if not record["method_hash"].endswith(method.file_hash):
        raise UserError(
            f"the file of '{method.name}' has changed since the run '{folder}' (hash {method.file_hash}, was "
            f"{record['method_hash']}); run the experiment again."
        )
    setup, fed = restore({**record, "config": {**record["config"], "drift_every": 1}}, method)
    with machine_settings(fed):
        state, known = read_checkpoint(folder, setup, fed)
        cohort = fed.cohort(len(known["rounds"]))
        method.run_round(state, cohort, fed, setup.options)
        if fed.trained is None:
            raise UserError(f"the clients of '{method.name}' send no whole model (got {folder}); leave the run out.")
        return shown(fed, cohort)


def shown(fed: Recording, cohort: Cohort) -> Points:
    """What the models of the round's clients give for some test images, as far as it is shown."""
    candidates = np.flatnonzero(fed.test_labels.cpu().numpy() < len(COLOURS))
    index = np.sort(generator(SEED, "images").permutation(candidates)[:EXAMPLES])
    features = local_features(fed, cohort, index).double().cpu()[: len(MARKERS)]  # [K, n, D]
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


def panel(title: str, points: Points) -> Panel:
    """The column of one run; NMI and silhouette are those of all clients' features together."""
    cosines, same = pair_cosines(points.features, points.labels)
    plane = embed(points.features)
    quality = measure(points.features, points.labels)
    title = f"{title}\nNMI {quality['nmi']:.2f}, silhouette {quality['silhouette']:.2f}"
    return Panel(title, plane, points.labels, points.clients, cosines[same], cosines[~same])


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


def clients_figure(panels: Sequence[Panel], class_names: Sequence[str], title: str) -> Figure:
    """The figure of `clients_chart`, to be drawn under `STYLE`."""
    ids = sorted({int(client) for panel in panels for client in np.unique(panel.clients)})
    markers = {client: MARKERS[place % len(MARKERS)] for place, client in enumerate(ids)}
    figure = Figure(figsize=(PANEL * len(panels) + 1.2, 2 * PANEL), layout="constrained")
    upper, lower = figure.subplots(2, len(panels), squeeze=False, sharey="row", height_ratios=(1.4, 1))
    for above, below, one in zip(upper, lower, panels, strict=True):
        _draw_points(above, one, markers)
        _draw_histograms(below, one)
    lower[0].set(ylabel="Pairs (%)", ylim=(0, None))
    left_out = len(class_names) - len(COLOURS)
    note = f"; the first {len(COLOURS)} of {len(class_names)} classes" if left_out > 0 else ""
    figure.suptitle(title + note, fontsize=STYLE["axes.titlesize"])
    _legend(figure, panels, markers, class_names)
    return figure


def _draw_points(axes: Axes, panel: Panel, markers: dict[int, str]) -> None:
    """The features in the plane, scaled to the panel."""
    low, high = panel.points.min(0), panel.points.max(0)
    scaled = (panel.points - low) / np.where(high > low, high - low, 1)
    order = np.random.default_rng(0).permutation(len(scaled))  # so that no client and no class lies above all others
    colours = np.array(COLOURS)[panel.labels]
    for client in np.unique(panel.clients):
        own = order[panel.clients[order] == client]
        axes.scatter(*scaled[own].T, c=colours[own], marker=markers[client], s=12, linewidths=0, rasterized=True)
    axes.set(title=panel.title, xticks=[], yticks=[], xlim=(-0.04, 1.04), ylim=(-0.04, 1.04))
    axes.set_box_aspect(1)
    axes.spines[:].set_visible(True)


def _draw_histograms(axes: Axes, panel: Panel) -> None:
    """Shares of the pairs of one class, and of those of two, by cosine."""
    edges = np.linspace(min(0, panel.positive.min(initial=0), panel.negative.min(initial=0)), 1, BINS + 1)
    kinds = {"of one class": panel.positive, "of two classes": panel.negative}
    for (name, cosines), colour, line in zip(kinds.items(), LINES, ("-", "--"), strict=False):
        counts, _ = np.histogram(cosines.clip(max=1), edges)
        shares = 100 * counts / max(len(cosines), 1)
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.25)
        axes.stairs(shares, edges, color=colour, linestyle=line, label=name)
    axes.set(xlabel="Cosine similarity", xlim=(edges[0], 1))


def _legend(figure: Figure, panels: Sequence[Panel], markers: dict[int, str], class_names: Sequence[str]) -> None:
    """What the colours, the markers and the lines stand for, beside the panels in one column."""
    classes = sorted({int(label) for panel in panels for label in np.unique(panel.labels)})
    handles, titles = [], []
    for title, own in {
        "Class": [_dot("o", COLOURS[label], class_names[label]) for label in classes],
        "Client": [_dot(marker, "#555555", str(client)) for client, marker in markers.items()],
        "Two features": figure.axes[-1].get_legend_handles_labels()[0],
    }.items():
        titles.append(len(handles))
        handles += [_dot("", "none", title), *own]
    legend = figure.legend(handles=handles, loc="outside right upper", handletextpad=0.4)
    for place in titles:
        legend.get_texts()[place].set_fontweight("bold")


def _dot(marker: str, colour: str, label: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker=marker, markeredgewidth=0, color=colour, label=label)
