"""What the models of finished runs give for images, measured after the run, and figures of it.

`add_quality` measures how well the features of test images keep the classes apart, by the global model of the last
round or by one client's own model; `add_clients_quality` by the models of a round's clients, of which no state is kept:
it runs one more round from the last checkpoint. Both write what they find into the record, and what figures need
beside it. `correlations` measures how alike the logits of the clients' own models are: all are given the same images,
and each client's logits are correlated with the mean of all.

Of several seeds a figure shows the first.
"""

import hashlib
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

from fedcli.core.batches import generator
from fedcli.core.evaluation import models
from fedcli.core.federation import Cohort, Federation
from fedcli.core.trees import tree_map
from fedcli.data.files import write_atomically
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.figures.plots import setting_name, title_words, write_title
from fedcli.results.tables import group
from fedcli.runs.drift import EXAMPLES as DRIFT_EXAMPLES
from fedcli.runs.drift import local_features
from fedcli.runs.lock import locked
from fedcli.runs.models import check_client
from fedcli.runs.prepare import machine_settings
from fedcli.runs.records import read_record, write_record
from fedcli.runs.run import open_run

EXAMPLES = 2000  # test images at most: the silhouette takes all pairs of them
CORRELATED = 500  # public images at most, and of each client's own
SEED = 0  # of the choice of images, of K-means and of t-SNE, so that all runs are measured on the same ones
CLASSES, CLIENTS, POINTS = 10, 10, 800  # as many classes, clients and features of these as a panel can tell apart
OF_CLIENTS = "clients_"  # before the keys of a record's `quality` that are of the models of a round's clients
FILES = {"": "features.npz", OF_CLIENTS: "clients.npz"}  # beside the record, by that prefix
# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Further classes are not drawn.
CLASS_COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
CLIENT_MARKERS = ("o", "s", "^", "v", "<", ">", "D", "P", "X", "*")  # of `CLIENTS`
PERPLEXITY = 30
SIDE = 2.5  # inches of a panel
ACROSS = 3  # panels in a row
NUMBERED = 10  # classes; of more, numbers and names would overlap


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
    """Writes features with their labels beside a record, and into it what was measured of them; returns that."""
    file, separated = folder / FILES[prefix], separation(arrays["features"].astype(float), arrays["labels"])

    def write(temporary: Path) -> None:
        with temporary.open("wb") as content:  # NumPy would append .npz to a path
            np.savez_compressed(content, **arrays)

    with locked(folder):
        write_atomically(file, write)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        sizes = {"examples": len(arrays["labels"]), "features_sha256": digest}
        measured = {prefix + name: value for name, value in {**separated, **measured, **sizes}.items()}
        record = read_record(folder)
        write_record(folder, {**record, "quality": {**record.get("quality", {}), **measured}})
    return measured


def read_outputs(folder: Path, record: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays beside a record; refused are files that are missing or are not what the record names."""
    file, expected = folder / FILES[prefix], record.get("quality", {}).get(f"{prefix}features_sha256")
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "no file"
    if digest != expected:
        raise UserError(
            f"{file.name} of '{folder}' is missing or is not what its record names (got {digest}, was {expected}); run "
            f"'fedcli quality{' --clients' if prefix else ''} {folder}' first."
        )
    with np.load(file) as arrays:
        return dict(arrays)


def add_quality(folder: Path, client: int | None = None, files: Sequence[str] = ()) -> dict[str, Any]:
    """Measures a finished run, keeps the features beside its record, and writes the numbers into the record.

    Args:
        folder: Of the run, with its last checkpoint.
        client: Whose own model is measured; None for the global model.
        files: The user's files that the run needs, see `resume`; so below.

    Returns:
        `nmi`, `silhouette`, the number of `examples`, and `features_sha256`, of the file; of a client's own model also
        the `client`.

    Raises:
        UserError: If the run has no such model or no test images, or its checkpoint is missing or another one's.
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
    """How well features `[n, D]` keep the classes `labels` [n] apart.

    Returns:
        `nmi`, 0 to 1: normalized mutual information of the classes with as many K-means clusters. `silhouette`, -1 to
        1: an image's distance to its own class compared with that to the nearest other one.

    Raises:
        UserError: If there are too few classes or images.
    """
    classes, images = len(np.unique(labels)), len(labels)
    if not 2 <= classes < images:
        raise UserError(f"only two classes or more, with more images, are compared (got {classes} and {images}).")
    clusters = KMeans(classes, n_init=10, random_state=SEED).fit_predict(features)
    nmi = normalized_mutual_info_score(labels, clusters)
    return {"nmi": float(nmi), "silhouette": float(silhouette_score(features, labels))}


def add_clients_quality(folder: Path, files: Sequence[str] = ()) -> dict[str, float]:
    """Measures the features of the clients' models after one more round, keeps them, and writes the numbers down.

    Returns:
        What its record gets: `clients_nmi` and `clients_silhouette`, of the `clients_examples` features of all clients
        together; the median cosines of two features of one class, `clients_cosine_same`, and of two classes,
        `clients_cosine_other`; and `clients_features_sha256`, of the file.

    Raises:
        UserError: As `one_more_round` and `separation`.
    """
    arrays = one_more_round(folder, files)
    arrays["features"] = arrays["features"].astype(np.float16)
    cosines, same = pair_cosines(arrays["features"].astype(float), arrays["labels"])
    measured = {"cosine_same": float(np.median(cosines[same])), "cosine_other": float(np.median(cosines[~same]))}
    return write_outputs(folder, arrays, measured, OF_CLIENTS)


def one_more_round(folder: Path, files: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """What `client_points` gives after the round that would follow the last one of a run; nothing is written.

    Raises:
        UserError: If the clients send no whole model that drifts apart, or the run cannot be opened again.
    """
    run = open_run(folder, files, drift_every=1)
    fed, method, cohort = run.fed, run.setup.method, run.fed.cohort(len(run.record["rounds"]))
    with machine_settings(fed):
        method.run_round(run.state, cohort, fed, run.setup.options)
        if fed.trained is None:
            raise UserError(f"the clients of '{method.name}' send no whole model (got {folder}); leave it out.")
        return client_points(fed, cohort)


def client_points(fed: Federation, cohort: Cohort) -> dict[str, np.ndarray]:
    """What the models of the round's clients give for some test images of their classes and domains.

    Returns:
        `features` `[n, D]`, each by the model of one client, with `labels` `[n]` and the ids of the `clients` `[n]`.
    """
    test_labels, train_labels = fed.test_labels.cpu().numpy(), fed.engine.labels.cpu().numpy()
    candidates = np.flatnonzero(test_labels < CLASSES)
    index = np.sort(generator(SEED, "images").permutation(candidates)[:DRIFT_EXAMPLES])
    features = local_features(fed, cohort, index).double().cpu().numpy()[:CLIENTS]  # [K, n, D]
    labels = test_labels[index]
    domains = np.zeros_like(labels) if fed.test_domains is None else fed.test_domains.cpu().numpy()[index]
    holds = []
    for client in cohort.client_ids[: len(features)]:
        has_class = np.isin(labels, train_labels[fed.training[client]])
        holds.append(has_class & (np.asarray(fed.domain_counts[client])[domains] > 0))
    client, image = np.nonzero(holds)
    chosen = np.sort(generator(SEED, "points").permutation(len(client))[:POINTS])
    client, image = client[chosen], image[chosen]
    return {"features": features[client, image], "labels": labels[image], "clients": cohort.client_ids[client]}


def pair_cosines(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine of each two features of `[n, D]`, 0 with a zero vector, and whether both are of one class."""
    pairs = np.triu_indices(len(labels), 1)
    return cosine_similarity(features)[pairs], (labels[:, None] == labels)[pairs]


def public_sample(fed: Federation) -> Tensor:
    """Some public images `[n, channels, H, W]`, normalised and not augmented."""
    chosen = generator(SEED, "correlation").permutation(len(fed.public_images))[:CORRELATED]
    return fed.public_transform(fed.public_images[torch.as_tensor(chosen, device=fed.device)])


@torch.no_grad()
def correlations(fed: Federation, method: Method, state: Any, public: Tensor) -> dict[str, np.ndarray]:
    """The clients' mean cross-correlations `[C, C]` on `public` images and on `private` ones, each client's own.

    A client with less than two training images is left out of the private mean.
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
            of_own = logits(fed.transform(fed.engine.images[torch.as_tensor(chosen, device=fed.device)]))
            matrices["private"].append(cross_correlation(of_own[client], of_own.mean(0)))
    if not matrices["private"]:
        raise UserError("no client has two training images (got one or none each); a correlation needs larger clients.")
    return {name: torch.stack(of_clients).mean(0).cpu().numpy() for name, of_clients in matrices.items()}


def cross_correlation(logits: Tensor, mean_logits: Tensor) -> Tensor:
    """Pearson's correlation `[C, C]` of the logits of a client `[n, C]`, the rows, with the mean of all clients.

    It is 0 where one of the two is constant.
    """
    num_classes = logits.shape[1]
    return torch.cat((logits, mean_logits), 1).T.corrcoef()[:num_classes, num_classes:].nan_to_num()


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


def features_chart(records: list[dict], prefix: str = "") -> Figure:
    """Draws features in the plane by t-SNE, a panel a setting, colours for classes; the first ten classes are drawn.

    Those of the clients' models of a round have a marker for each client, and below them the histograms of the cosine
    between two features, of one class or of two.

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
        if prefix:
            name += f"\n{len(np.unique(kept['clients']))} clients, a marker each"
        elif "client" in quality:
            name += f", client\N{NO-BREAK SPACE}{quality['client']}"
        numbers = f"NMI {quality[prefix + 'nmi']:.2f}, silhouette {quality[prefix + 'silhouette']:.2f}"
        above.set(title=f"{name}\n{numbers}", xticks=[], yticks=[], box_aspect=1)
        above.spines[:].set_visible(True)
        visible = np.random.default_rng(0).permutation(np.flatnonzero(labels < len(CLASS_COLOURS)))  # no class on top
        points, colours = embed(features[visible]), np.array(CLASS_COLOURS)[labels[visible]]
        clients = kept.get("clients", np.zeros_like(labels))[visible]
        for client, marker in zip(np.unique(clients), CLIENT_MARKERS, strict=False):
            look = {"marker": marker, "s": 12 if prefix else 4, "linewidths": 0, "rasterized": True}
            above.scatter(*points[clients == client].T, c=colours[clients == client], **look)
        for axes in below:
            cosines, same = pair_cosines(features, labels)
            bins = np.linspace(min(0, cosines.min()), 1, 40)
            for values, label in ((cosines[same], "of one class"), (cosines[~same], "of two classes")):
                percent = np.full(len(values), 100 / max(len(values), 1))
                axes.hist(values, bins, weights=percent, histtype="stepfilled", alpha=0.4, label=label)
            axes.set(xlabel="Cosine similarity", ylabel="Pairs of features (%)")
            axes.legend(loc="upper left")
    signs = []
    for class_name, colour in zip(run["class_names"], CLASS_COLOURS, strict=False):
        signs.append(Line2D([], [], linestyle="none", marker="o", markersize=4, color=colour, label=class_name))
    figure.legend(handles=signs, loc="outside right center")
    return figure


clients_chart = partial(features_chart, prefix=OF_CLIENTS)


def embed(features: np.ndarray) -> np.ndarray:
    """t-SNE of features `[n, D]` in two dimensions `[n, 2]`."""
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(features)


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
