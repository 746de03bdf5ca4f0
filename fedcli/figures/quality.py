"""What the models of finished runs give for images, measured after the run.

`add_quality` measures how well the features of test images keep the classes apart, by the global model of the last
round or by one client's own model; `add_clients_quality` by the models of a round's clients, of which no state is kept:
it runs one more round from the last checkpoint. Both write what they find into the record. `correlations` measures how
alike the logits of the clients' own models are: all are given the same images, and each client's logits are correlated
with the mean of all.
"""

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score, silhouette_score
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor

from fedcli.core.batches import generator
from fedcli.core.evaluation import models
from fedcli.core.federation import Cohort, Federation
from fedcli.core.trees import tree_map
from fedcli.data.files import write_atomically
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.runs.drift import EXAMPLES as DRIFT_EXAMPLES
from fedcli.runs.drift import Recording, local_features
from fedcli.runs.lock import locked
from fedcli.runs.prepare import machine_settings
from fedcli.runs.records import file_digest, read_record, write_record
from fedcli.runs.run import open_run

EXAMPLES = 2000  # test images at most: the silhouette takes all pairs of them
CORRELATED = 500  # public images at most, and of each client's own
SEED = 0  # of the choice of images and of K-means, so that all runs are measured on the same ones
CLASSES, CLIENTS, POINTS = 10, 10, 800  # as many classes, clients and features of these as a panel can tell apart
OF_CLIENTS = "clients_"  # before the keys of a record's `quality` that are of the models of a round's clients
FILES = {"": "features.npz", OF_CLIENTS: "clients.npz"}  # beside the record, by that prefix


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
    content, file = io.BytesIO(), folder / FILES[prefix]
    np.savez_compressed(content, **arrays)
    measured = {**separation(arrays["features"].astype(float), arrays["labels"]), **measured}
    with locked(folder):
        write_atomically(file, lambda path: path.write_bytes(content.getvalue()))
        measured |= {"examples": len(arrays["labels"]), "features_sha256": file_digest(file)}
        measured = {prefix + name: value for name, value in measured.items()}
        record = read_record(folder)
        write_record(folder, {**record, "quality": {**record.get("quality", {}), **measured}})
    return measured


def read_outputs(folder: Path, record: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays beside a record; refused are files that are missing or are not what the record names."""
    file, expected = folder / FILES[prefix], record.get("quality", {}).get(f"{prefix}features_sha256")
    digest = file_digest(file) if file.is_file() else "no file"
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
        `nmi`, `silhouette`, the number of `examples` and the `seed` they are of, and `features_sha256`, of the file;
        of a client's own model also the `client`.

    Raises:
        UserError: If the run has no such model or no test images, or its checkpoint is missing or another one's.
    """
    run = open_run(folder, files)
    fed, method = run.fed, run.setup.method
    clients = [None] if method.personal is None else range(fed.num_clients)
    if client not in clients:
        allowed = "one global model" if method.personal is None else f"a model for each client, 0 to {clients[-1]}"
        raise UserError(f"'{method.name}' keeps {allowed} (got --client {client} for {folder}); choose one of these.")
    if len(fed.test_labels) == 0:
        raise UserError(f"the protocol {run.record['protocol']} has no common test images (got {folder}).")
    index = np.sort(generator(SEED, "quality").permutation(len(fed.test_labels))[:EXAMPLES])
    with machine_settings(fed):
        [(_, (network, *model))] = models(fed, method, run.state, [client or 0])
        features, logits, labels = (part.numpy() for part in fed.predict(*model, index, network, test=True))
    arrays = {"features": features.astype(float), "labels": labels, "predicted": logits.argmax(1)}
    return write_outputs(folder, arrays, {"seed": SEED} | ({} if client is None else {"client": client}))


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


def client_points(fed: Recording, cohort: Cohort) -> dict[str, np.ndarray]:
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
