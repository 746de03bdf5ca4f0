"""Measures of finished runs' models on images, and figures of them.

`add_quality` measures how well the features of test images separate the classes, by the global model of the last round
or a client's own one. `add_clients_quality` does so by the models of a round's clients; as their states are not kept,
it runs one more round from the last checkpoint. Both write numbers into the record and features beside it.
`correlations` compares the logits of all clients' own models on the same images with their mean.

Of several seeds a figure shows the first.
"""

import hashlib
import io
from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE
from sklearn.metrics import ConfusionMatrixDisplay, normalized_mutual_info_score, silhouette_score
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor

from fedcli.core import drift
from fedcli.core.batches import generator
from fedcli.core.evaluation import models
from fedcli.core.federation import Cohort, Federation
from fedcli.core.trees import tree_map
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.figures.plots import setting_name, title_words, write_title
from fedcli.files import write_atomically
from fedcli.results.tables import group
from fedcli.runs.lock import locked
from fedcli.runs.machine import machine_settings
from fedcli.runs.models import check_client
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resume import open_run

EXAMPLES = 2000  # test images at most: the silhouette takes all pairs of them
CORRELATED = 500  # public images at most, and of each client's own
SEED = 0  # of the choice of images, K-means and t-SNE: all runs are measured on the same images
CLASSES, CLIENTS, POINTS = 10, 10, 800  # as many classes, clients and features of these as a panel can tell apart
OF_CLIENTS = "clients_"  # before the keys in a record's `quality` of the clients' models
FILES = {"": "features.npz", OF_CLIENTS: "clients.npz"}  # beside the record, by that prefix
# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Other classes are not drawn.
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
SIDE = 2.5  # inches of a panel
ACROSS = 3  # panels in a row


def finished_runs(records: list[dict]) -> list[dict]:
    """The finished runs among records.

    Raises:
        UserError: If no run has finished.
    """
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        raise UserError(f"no run has finished (got {len(records)} unfinished); 'fedcli resume RUN' takes one up again.")
    return finished


def write_outputs(folder: Path, arrays: dict[str, np.ndarray], measured: dict[str, Any], prefix: str = "") -> dict:
    """Writes features and labels beside a record, and into it what is measured of them; returns that."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    content, labels = file.getvalue(), arrays["labels"]
    sizes = {"examples": len(labels), "features_sha256": hashlib.sha256(content).hexdigest()}
    values = separation(arrays["features"].astype(float), labels) | measured | sizes
    measured = {prefix + name: value for name, value in values.items()}
    with locked(folder):
        write_atomically(folder / FILES[prefix], lambda path: path.write_bytes(content))
        record = read_record(folder)
        write_record(folder, {**record, "quality": {**record.get("quality", {}), **measured}})
    return measured


def read_outputs(folder: Path, record: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays beside a record; refuses a file that is missing or is not the one that the record names."""
    file = folder / FILES[prefix]
    content = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(content).hexdigest() != record.get("quality", {}).get(f"{prefix}features_sha256"):
        raise UserError(
            f"{file.name} of '{folder}' is missing or is not what its record names; run "
            f"'fedcli quality{' --clients' if prefix else ''} {folder}' first."
        )
    return dict(np.load(io.BytesIO(content)))


def add_quality(folder: Path, client: int | None = None, files: Sequence[str] = ()) -> dict[str, Any]:
    """Measures the last model of a finished run, see `separation`; writes features and numbers.

    Args:
        folder: Of the run.
        client: Whose own model is measured; None for the global model.
        files: The user's files that the run needs, see `resume`; so below.

    Returns:
        `nmi`, `silhouette`, `client` if there is one, the number of `examples`, and `features_sha256` of the file.

    Raises:
        UserError: If the run has no such model, no test images, or not its checkpoint.
    """
    run = open_run(folder, files)
    fed, method = run.fed, run.setup.method
    check_client(method, fed.num_clients, client)
    if len(fed.test_labels) == 0:
        raise UserError(f"the protocol {run.record['protocol']} has no common test images (got {folder}).")
    index = np.sort(generator(SEED, "quality").permutation(len(fed.test_labels))[:EXAMPLES])
    with machine_settings(fed):
        [(_, (network, *model))] = models(fed, method, run.state, [client or 0])
        features, logits, labels = (part.numpy() for part in fed.predict(*model, index, network, test=True))
    arrays = {"features": features.astype(float), "labels": labels, "predicted": logits.argmax(1)}
    return write_outputs(folder, arrays, {} if client is None else {"client": client})


def separation(features: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """How well features `[n, D]` separate the classes `labels` `[n]`.

    Returns:
        `nmi`, 0 to 1: normalized mutual information of the classes and as many K-means clusters. `silhouette`, -1 to 1:
        the distance to the own class compared with that to the nearest other one.

    Raises:
        UserError: If there are too few classes or images.
    """
    classes, images = len(np.unique(labels)), len(labels)
    if not 2 <= classes < images:
        raise UserError(f"only two classes or more, with more images, are compared (got {classes} and {images}).")
    clusters = KMeans(classes, n_init=10, random_state=SEED).fit_predict(features)
    nmi, silhouette = normalized_mutual_info_score(labels, clusters), silhouette_score(features, labels)
    return {"nmi": float(nmi), "silhouette": float(silhouette)}


def add_clients_quality(folder: Path, files: Sequence[str] = ()) -> dict[str, float]:
    """Measures the features by the clients' models after one more round; writes features and numbers.

    Returns:
        What `add_quality` returns, of all clients' features together, and the median cosines of two features of one
        class, `cosine_same`, and of two classes, `cosine_other`; each name begins with "clients_".

    Raises:
        UserError: As `one_more_round` and `separation`.
    """
    arrays = one_more_round(folder, files)
    arrays["features"] = arrays["features"].astype(np.float16)
    cosines, same = pair_cosines(arrays["features"].astype(float), arrays["labels"])
    measured = {"cosine_same": float(np.median(cosines[same])), "cosine_other": float(np.median(cosines[~same]))}
    return write_outputs(folder, arrays, measured, OF_CLIENTS)


def one_more_round(folder: Path, files: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """What `client_points` gives after the round that would follow a run's last one; nothing is written.

    Raises:
        UserError: If the clients send no whole model, or the run cannot be opened.
    """
    run = open_run(folder, files, drift_every=1)
    fed, method, cohort = run.fed, run.setup.method, run.fed.cohort(len(run.record["rounds"]))
    with machine_settings(fed):
        method.run_round(run.state, cohort, fed, run.setup.options)
        if fed.trained is None:
            raise UserError(f"the clients of '{method.name}' send no whole model (got {folder}); leave it out.")
        return client_points(fed, cohort)


def client_points(fed: Federation, cohort: Cohort) -> dict[str, np.ndarray]:
    """What the clients' models give for test images of their classes and domains.

    Returns:
        `features` `[n, D]`, each by the model of one client, `labels` `[n]` and the ids of the `clients` `[n]`.
    """
    test_labels = fed.test_labels.cpu().numpy()
    candidates = np.flatnonzero(test_labels < CLASSES)
    index = np.sort(generator(SEED, "images").permutation(candidates)[: drift.EXAMPLES])
    features = drift.local_features(fed, cohort, index).double().cpu().numpy()[:CLIENTS]  # [K, n, D]
    labels, clients = test_labels[index], cohort.client_ids[:CLIENTS]
    domains = np.zeros_like(labels) if fed.test_domains is None else fed.test_domains.cpu().numpy()[index]
    has_class = fed.class_counts(cohort).cpu().numpy()[:CLIENTS, labels] > 0  # [K, n]
    has_domain = fed.domain_counts[clients][:, domains] > 0
    client, image = np.nonzero(has_class & has_domain)
    chosen = np.sort(generator(SEED, "points").permutation(len(client))[:POINTS])
    client, image = client[chosen], image[chosen]
    return {"features": features[client, image], "labels": labels[image], "clients": clients[client]}


def pair_cosines(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cosine of each two features of `[n, D]`, 0 with a zero vector, and whether both are of one class."""
    pairs = np.triu_indices(len(labels), 1)
    return cosine_similarity(features)[pairs], (labels[:, None] == labels)[pairs]


def public_sample(fed: Federation) -> Tensor:
    """Some public images `[n, channels, H, W]`, normalised and not augmented."""
    chosen = generator(SEED, "correlation").permutation(len(fed.public_images))[:CORRELATED]
    return fed.public_transform(fed.public_images[torch.as_tensor(chosen, device=fed.device)])


@torch.no_grad()
def correlations(fed: Federation, method: Method, state: Any, public: Tensor) -> dict[str, np.ndarray]:
    """The clients' mean cross-correlations `[C, C]` on `public` images and on `private` ones, each client's own.

    The private mean leaves out clients with fewer than two training images.
    """
    clients = []
    for _, (network, *model) in models(fed, method, state, range(fed.num_clients)):
        params, buffers = tree_map(lambda leaf: leaf.to(fed.device), model)  # some may lie on the host
        clients.append(partial(network, params, buffers, train=False))

    def logits(images: Tensor) -> Tensor:
        """Logits `[N, n, C]` of the clients' models in evaluation mode, in double precision."""
        return torch.stack([client(images).logits for client in clients]).double()

    of_public = logits(public.to(fed.device, fed.dtype))
    matrices = {"public": [cross_correlation(of_client, of_public.mean(0)) for of_client in of_public], "private": []}
    for client, part in enumerate(fed.training):
        chosen = part[generator(SEED, client, "correlation").permutation(len(part))[:CORRELATED]]
        if len(chosen) > 1:
            of_own = logits(fed.engine.gather(chosen)[0])
            matrices["private"].append(cross_correlation(of_own[client], of_own.mean(0)))
    if not matrices["private"]:
        raise UserError("no client has two training images (got one or none each); a correlation needs larger clients.")
    return {name: torch.stack(of_clients).mean(0).cpu().numpy() for name, of_clients in matrices.items()}


def cross_correlation(logits: Tensor, mean_logits: Tensor) -> Tensor:
    """Pearson's correlation `[C, C]` of a client's logits `[n, C]`, the rows, with the mean of all clients.

    It is 0 where one of the two is constant.
    """
    num_classes = logits.shape[1]
    return torch.cat((logits, mean_logits), 1).T.corrcoef()[:num_classes, num_classes:].nan_to_num()


def _panels(records: list[dict], rows: int = 1) -> tuple[Figure, list[tuple[dict, np.ndarray]]]:
    """A figure with a column of `rows` panels for each setting, of which `ACROSS` stand side by side.

    Returns:
        The figure; and the first finished run of each setting, with its `name` in figures, and its axes.

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


def features_chart(records: list[dict], prefix: str = "") -> Figure:
    """Draws features of the first ten classes in the plane by t-SNE, a panel a setting and a colour a class.

    Features by clients' models have a marker for each client, and below them histograms of the cosines of two features.

    Args:
        records: The runs.
        prefix: Which of `FILES` is drawn.

    Raises:
        UserError: As `_panels`, or if the features have not been kept.
    """
    figure, panels = _panels(records, 2 if prefix else 1)
    for run, (above, *below) in panels:
        kept, quality, name = read_outputs(run["folder"], run, prefix), run["quality"], run["name"]
        features, labels = kept["features"].astype(float), kept["labels"]
        clients = kept.get("clients", np.zeros_like(labels))
        if prefix:
            name += f"\n{len(np.unique(clients))} clients, a marker each"
        elif "client" in quality:
            name += f", client\N{NO-BREAK SPACE}{quality['client']}"
        numbers = f"NMI {quality[prefix + 'nmi']:.2f}, silhouette {quality[prefix + 'silhouette']:.2f}"
        above.set(title=f"{name}\n{numbers}", xticks=[], yticks=[], box_aspect=1)
        above.spines[:].set_visible(True)
        visible = np.random.default_rng(0).permutation(np.flatnonzero(labels < len(CLASS_COLOURS)))  # no class on top
        points, colours = embed(features[visible]), np.array(CLASS_COLOURS)[labels[visible]]
        for client, marker in zip(np.unique(clients[visible]), "os^v<>DPX*", strict=False):
            chosen = clients[visible] == client
            look = {"marker": marker, "s": 12 if prefix else 4, "linewidths": 0, "rasterized": True}
            above.scatter(*points[chosen].T, c=colours[chosen], **look)
        for axes in below:
            cosines, same = pair_cosines(features, labels)
            bins, pairs = np.linspace(min(0, cosines.min()), 1, 40), (cosines[same], cosines[~same])
            percent = [np.full(len(values), 100 / max(len(values), 1)) for values in pairs]
            names = "of one class", "of two classes"
            axes.hist(pairs, bins, weights=percent, histtype="stepfilled", alpha=0.4, label=names)
            axes.set(xlabel="Cosine similarity", ylabel="Pairs of features (%)")
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, columnspacing=1)  # bars may reach the top
    look = {"linestyle": "none", "marker": "o", "markersize": 4}
    names = zip(run["class_names"], CLASS_COLOURS, strict=False)
    signs = [Line2D([], [], color=colour, label=name, **look) for name, colour in names]
    figure.legend(handles=signs, loc="outside right center")
    return figure


clients_chart = partial(features_chart, prefix=OF_CLIENTS)


def embed(features: np.ndarray) -> np.ndarray:
    """t-SNE of features `[n, D]` in two dimensions `[n, 2]`."""
    perplexity = min(30, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(features)


def confusion_chart(records: list[dict]) -> Figure:
    """Draws what the test images of each class are taken for, in percent of the class, a panel a setting.

    Raises:
        UserError: As `_panels`, or if the outputs have not been kept.
    """
    figure, panels = _panels(records)
    for run, (axes,) in panels:
        kept, names = read_outputs(run["folder"], run), run["class_names"]
        labels, predicted = kept["labels"], kept["predicted"]
        few = len(names) <= 10  # numbers and names of more classes would overlap
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

    Above on public images, those of the first run that has any, below on the clients' own training images.

    Args:
        records: See `_panels`.
        files: The user's files that the runs need, see `resume`.

    Raises:
        UserError: As `_panels`; if no run has public images; or if a run has no personal models or not its checkpoint.
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
