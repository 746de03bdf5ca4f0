"""How well the features of test images separate the classes, by the models of finished runs.

`add_quality` takes the global model whose accuracy is the headline, or a client's own one. `add_clients_quality` takes
the models of a round's clients; as their states are not kept, it runs one more round from the last checkpoint. Both
write numbers into the record and features beside it.
"""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score, silhouette_score
from sklearn.metrics.pairwise import cosine_similarity

from fedcli.core import drift
from fedcli.core.draws import generator
from fedcli.core.evaluation import FullModel, model_of
from fedcli.core.federation import Cohort, Federation
from fedcli.errors import UserError
from fedcli.files import write_atomically
from fedcli.runs.lock import locked
from fedcli.runs.machine import machine_settings
from fedcli.runs.models import check_client, check_round, read_models
from fedcli.runs.record import update_part
from fedcli.runs.resume import OpenRun, open_run
from fedcli.runs.schema import Record

EXAMPLES = 2000  # test images at most: the silhouette takes all pairs of them
SEED = 0  # of the choice of images, K-means and t-SNE: all runs are measured on the same images
# As many classes, clients and points as a panel can tell apart.
SHOWN_CLASSES = 10
SHOWN_CLIENTS = 10
SHOWN_POINTS = 800


class Outputs(NamedTuple):
    """What is kept of the outputs of some models, and what of them is in the record."""

    file: str  # of the features, beside the record
    prefix: str  # of the names in the record's `quality`
    command: str  # that writes both


OF_THE_MODEL = Outputs("features.npz", "", "fedcli quality")  # the global one, or one client's
OF_CLIENTS = Outputs("clients.npz", "clients_", "fedcli quality --clients")


def write_outputs(folder: Path, outputs: Outputs, arrays: dict[str, np.ndarray], measured: dict[str, Any]) -> dict:
    """Writes arrays beside a record, and into it what is measured of them; returns what is in the record.

    Args:
        folder: Of the run.
        outputs: Where both are written.
        arrays: `features` `[n, D]`, `labels` `[n]`, and others.
        measured: Values by name; the number of examples and the hash of the file are added.
    """
    content = _packed(arrays)
    values: dict[str, Any] = {
        **measured,
        "examples": len(arrays["labels"]),
        "features_sha256": hashlib.sha256(content).hexdigest(),
    }
    written = {outputs.prefix + name: value for name, value in values.items()}
    with locked(folder):
        write_atomically(folder / outputs.file, lambda path: path.write_bytes(content))
        update_part(folder, "quality", written)
    return written


def _packed(arrays: dict[str, np.ndarray]) -> bytes:
    """The content of an `.npz` file of arrays."""
    file = io.BytesIO()
    by_name: dict[str, Any] = dict(arrays)  # no array has the name of an option of NumPy's
    np.savez_compressed(file, **by_name)
    return file.getvalue()


def read_outputs(folder: Path, record: Record, outputs: Outputs = OF_THE_MODEL) -> dict[str, np.ndarray]:
    """The arrays beside a record; refuses a file that is missing or is not the one that the record names."""
    file = folder / outputs.file
    content = file.read_bytes() if file.is_file() else b""
    expected = record.get("quality", {}).get(f"{outputs.prefix}features_sha256")
    if hashlib.sha256(content).hexdigest() != expected:
        raise UserError(
            f"{file.name} of '{folder}' is missing or is not what its record names; run '{outputs.command} {folder}' "
            "first."
        )
    return dict(np.load(io.BytesIO(content)))


def add_quality(
    folder: Path, client: int | None = None, files: Sequence[str] = (), round: str = "selected"
) -> dict[str, Any]:
    """Measures the model of a finished run, see `separation`; writes features and numbers.

    Args:
        folder: Of the run.
        client: Whose own model is measured; None for the global model.
        round: "selected", whose accuracy is the headline, or "last".
        files: The user's files that the run needs, see `resume`; so below.

    Returns:
        `nmi`, `silhouette`, `client` if there is one, the `round` of the model, from 0, the number of `examples`, and
        `features_sha256` of the file.

    Raises:
        UserError: If the run has no such model, no test images, or not its checkpoint.
    """
    run = open_run(folder, files)
    fed = run.fed
    method = run.setup.method
    check_client(method, fed.num_clients, client)
    check_round(round)
    if len(fed.test_labels) == 0:
        raise UserError(f"the protocol {run.record['protocol']} has no common test images (got {folder}).")
    sample = generator(SEED, "quality").permutation(len(fed.test_labels))[:EXAMPLES]
    number = run.record["summary"]["selected_round"]
    if round == "last":
        number = len(run.record["rounds"]) - 1
    with machine_settings(fed):
        model = _model_after(run, folder, client, number)
        features, logits, labels = fed.predict(model.params, model.buffers, np.sort(sample), model.network, test=True)
    assert features is not None  # `predict` returns them unless told not to
    arrays = {
        "features": features.numpy().astype(float),
        "labels": labels.numpy(),
        "predicted": logits.numpy().argmax(1),
    }
    measured = {**separation(arrays["features"], arrays["labels"]), "round": number}
    if client is not None:
        measured["client"] = client
    return write_outputs(folder, OF_THE_MODEL, arrays, measured)


def _model_after(run: OpenRun, folder: Path, client: int | None, number: int) -> FullModel:
    """The global model, or a client's own, after a round of a finished run: the selected or the last one."""
    method = run.setup.method
    last = model_of(run.fed, method, run.state, client or 0)  # any client has the global one
    if number == len(run.record["rounds"]) - 1:
        return last
    of_round = read_models(folder, run.record, method, number)
    tensors = of_round.shared if client is None else of_round.personal.get(client)
    if tensors is None:  # the client has not taken part yet
        tensors = run.fed.initial_model(last.network)
    return FullModel(last.network, *tensors)


def separation(features: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """How well features `[n, D]` separate the classes `labels` `[n]`.

    Returns:
        `nmi`, 0 to 1: normalized mutual information of the classes and as many K-means clusters. `silhouette`, -1 to 1:
        the distance to the own class compared with that to the nearest other one.

    Raises:
        UserError: If there are too few classes or images.
    """
    classes = len(np.unique(labels))
    images = len(labels)
    if not 2 <= classes < images:
        raise UserError(f"only two classes or more, with more images, are compared (got {classes} and {images}).")
    clusters = KMeans(classes, n_init=10, random_state=SEED).fit_predict(features)
    nmi = normalized_mutual_info_score(labels, clusters)
    silhouette = silhouette_score(features, labels)
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
    labels = arrays["labels"]
    arrays["features"] = arrays["features"].astype(np.float16)
    features = arrays["features"].astype(float)  # those that are kept
    cosines, is_same_class = pair_cosines(features, labels)
    measured = {
        **separation(features, labels),
        "cosine_same": float(np.median(cosines[is_same_class])),
        "cosine_other": float(np.median(cosines[~is_same_class])),
    }
    return write_outputs(folder, OF_CLIENTS, arrays, measured)


def one_more_round(folder: Path, files: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """What `client_points` gives after the round that would follow a run's last one; nothing is written.

    Raises:
        UserError: If the clients send no whole model, or the run cannot be opened.
    """
    run = open_run(folder, files)
    fed = run.fed
    method = run.setup.method
    cohort = run.fed.cohort(len(run.record["rounds"]))
    fed.start_round(keep_sent_models=True)
    with machine_settings(fed):
        method.run_round(run.state, cohort, fed, run.setup.method_config)
        if fed.trained is None:
            raise UserError(f"the clients of '{method.name}' send no whole model (got {folder}); leave it out.")
        return client_points(fed, cohort)


def client_points(fed: Federation, cohort: Cohort) -> dict[str, np.ndarray]:
    """What the clients' models give for test images of their classes and domains.

    Returns:
        `features` `[n, D]`, each by the model of one client, `labels` `[n]` and the ids of the `clients` `[n]`.
    """
    test_labels = fed.test_labels.cpu().numpy()
    candidates = np.flatnonzero(test_labels < SHOWN_CLASSES)
    index = np.sort(generator(SEED, "images").permutation(candidates)[: drift.EXAMPLES])
    labels = test_labels[index]
    domains = np.zeros_like(labels)
    if fed.test_domains is not None:
        domains = fed.test_domains.cpu().numpy()[index]
    clients = cohort.client_ids[:SHOWN_CLIENTS]
    features = drift.local_features(fed, cohort, index).double().cpu().numpy()[:SHOWN_CLIENTS]  # [K, n, D]
    class_counts = fed.class_counts(cohort).cpu().numpy()[:SHOWN_CLIENTS]  # [K, C]
    has_class = class_counts[:, labels] > 0  # [K, n]
    has_domain = fed.domain_counts[clients][:, domains] > 0
    client, image = np.nonzero(has_class & has_domain)
    points = np.sort(generator(SEED, "points").permutation(len(client))[:SHOWN_POINTS])
    client = client[points]
    image = image[points]
    return {"features": features[client, image], "labels": labels[image], "clients": clients[client]}


class PairCosines(NamedTuple):
    """What each two features have in common."""

    cosines: np.ndarray  # 0 with a zero vector
    is_same_class: np.ndarray  # bool


def pair_cosines(features: np.ndarray, labels: np.ndarray) -> PairCosines:
    """Compares each two features of `[n, D]`."""
    pairs = np.triu_indices(len(labels), 1)
    is_same_class = labels[:, None] == labels
    return PairCosines(cosine_similarity(features)[pairs], is_same_class[pairs])
