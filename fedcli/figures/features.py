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
from fedcli.figures.plots import LINE_COLOURS, write_title
from fedcli.figures.quality import Shown, keep_arrays, kept_arrays, kept_outputs, one_a_setting, separation
from fedcli.registry import find_method
from fedcli.runs.drift import EXAMPLES, SEED, Recording, local_features
from fedcli.runs.lock import locked
from fedcli.runs.prepare import machine_settings
from fedcli.runs.records import read_record, write_record
from fedcli.runs.run import open_run
from fedcli.runs.trust import trust_files

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


class Points(NamedTuple):
    """Features of test images, each by the model of one client."""

    features: np.ndarray  # [n, D]
    labels: np.ndarray  # [n]
    clients: np.ndarray  # [n], ids


def embedding_chart(paths: Iterable[Path]) -> Figure:
    """Draws the features of finished runs in the plane, a panel or a row for those that differ in more than the seed.

    Of several seeds the first is drawn, and of more than ten classes the first ten.

    Args:
        paths: Run folders, or folders that hold run folders.

    Raises:
        UserError: If the runs are of several data sets, or their features have not been kept.
    """
    shown, title = one_a_setting(paths)
    rows = [_domains(run) for run in shown]
    across = max(len(row) for row in rows)
    by_domain = across > 1
    if not by_domain:  # one panel a setting: as many in a row as a page is wide
        panels = [row[0] for row in rows]
        across = min(len(panels), ACROSS)
        rows = [panels[start : start + across] for start in range(0, len(panels), across)]
    figure = Figure(figsize=(SIDE * max(across, 2), len(rows) * (SIDE + 0.4) + 0.5), layout="constrained")
    for number, row in enumerate(rows):
        for place, (name, features, labels, quality) in enumerate(row):
            axes = figure.add_subplot(len(rows), across, number * across + place + 1)
            _scatter(axes, features, labels)
            axes.set_title(f"{fill(name, TITLE)}\n{_numbers(quality)}")
            if by_domain and place == 0:
                axes.set_ylabel(fill(kept_outputs(shown[number])[0], TITLE))
    _finish(figure, title, shown[0].record["class_names"])
    return figure


def _domains(run: Shown) -> list[tuple[str, np.ndarray, np.ndarray, dict[str, float]]]:
    """The panels of one run, each as title, features, labels and quality; one a domain, the client's own first."""
    label, kept = kept_outputs(run)
    quality = run.record["quality"]
    if "domains" not in quality:
        return [(label, kept["features"], kept["labels"], quality)]
    names, own = list(quality["domains"]), quality["domain"]
    panels = []
    for name in (own, *(other for other in names if other != own)):
        rows = kept["domains"] == names.index(name)
        panels.append((f"{own} → {name}", kept["features"][rows], kept["labels"][rows], quality["domains"][name]))
    return panels


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


def _scatter(axes: Axes, features: np.ndarray, labels: np.ndarray, clients: np.ndarray | None = None) -> None:
    """Draws features `[n, D]` in the plane, a colour a class and, where there are `clients` [n], a marker a client."""
    shown = labels < len(CLASS_COLOURS)
    points, labels = embed(features[shown]), labels[shown]
    size = 4 if clients is None else 12  # of which markers can be told apart
    clients = np.zeros(len(labels), int) if clients is None else clients[shown]
    order = np.random.default_rng(0).permutation(len(labels))  # so that no class lies above all others
    colours = np.array(CLASS_COLOURS)[labels]
    for place, client in enumerate(np.unique(clients)):
        rows = order[clients[order] == client]
        marker = CLIENT_MARKERS[place % len(CLIENT_MARKERS)]
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


# The clients' own models


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
    figure = Figure(figsize=(CLIENTS_SIDE * len(runs) + 0.8, 2 * CLIENTS_SIDE), layout="constrained")
    upper, lower = figure.subplots(2, len(runs), squeeze=False, height_ratios=(1.4, 1))
    for above, below, run in zip(upper, lower, runs, strict=True):
        kept = kept_arrays(run, CLIENTS, "clients_", "fedcli quality --clients")
        features = kept["features"].astype(float)
        _scatter(above, features, kept["labels"], kept["clients"])
        quality = {name: run.record["quality"][f"clients_{name}"] for name in ("nmi", "silhouette")}
        clients = len(np.unique(kept["clients"]))
        above.set_title(f"{run.label}\n{_numbers(quality)}\n{clients} clients, a marker each")
        cosines, same = pair_cosines(features, kept["labels"])
        pairs = {"of one class": cosines[same], "of two classes": cosines[~same]}
        for (name, values), colour in zip(pairs.items(), LINE_COLOURS, strict=False):
            shares = np.full(len(values), 100 / max(len(values), 1))  # of the pairs, in percent
            bins = np.linspace(min(0, cosines.min()), 1, BINS)
            below.hist(values, bins, weights=shares, histtype="stepfilled", alpha=0.4, color=colour, label=name)
        below.set(xlabel="Cosine similarity")
        below.sharey(lower[0])
    lower[0].set_ylabel("Pairs of features (%)")
    lower[-1].legend(loc="upper left")
    _finish(figure, title, runs[0].record["class_names"])
    return figure


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
    features = points.features.astype(float)
    cosines, same = pair_cosines(features, points.labels)
    measured = {
        **separation(features, points.labels), "examples": len(points.labels),
        "cosine_same": float(np.median(cosines[same])), "cosine_other": float(np.median(cosines[~same])),
    }  # fmt: skip
    with locked(folder):
        measured["features_sha256"] = keep_arrays(folder / CLIENTS, points._asdict())
        measured = {f"clients_{name}": value for name, value in measured.items()}
        record = read_record(folder)
        write_record(folder, {**record, "quality": {**record.get("quality", {}), **measured}})
    return measured


def one_more_round(folder: Path, method: Sequence[str] = ()) -> Points:
    """The features of the clients' models after the round that would follow a run's last one; nothing is written.

    Args:
        folder: Of the run.
        method: The user's files that the run needs, see `resume`.

    Raises:
        UserError: If the run has no global model or cannot be opened again.
    """
    record = trust_files(read_record(folder), method)
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
    visible = torch.stack([_holds(fed, client, labels, domains) for client in cohort.client_ids[: len(features)]])
    client, image = visible.nonzero(as_tuple=True)
    kept = np.sort(generator(SEED, "points").permutation(len(client))[:POINTS])
    client, image = client[kept], image[kept]
    return Points(features[client, image].numpy(), labels[image].numpy(), cohort.client_ids[client.numpy()])


def _holds(fed: Recording, client: int, labels: Tensor, domains: Tensor) -> Tensor:
    """Whether a client has training examples of the class and, in all its data, of the domain of images; `[n]`."""
    classes = torch.bincount(fed.engine.labels.cpu()[fed.training[client]], minlength=fed.num_classes)
    counts = torch.as_tensor(fed.domain_counts[client])
    return (classes[labels] > 0) & (counts[domains] > 0)


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
