"""How well the features of a finished run keep the classes apart, written into its record.

The features are those of test images by the global model of the last round. Normalized mutual information compares
K-means clusters of the features, as many as there are classes, with the classes; the silhouette compares an image's
distance to its own class with that to the nearest other one.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score, silhouette_score

from fedcli.batches import generator
from fedcli.clients import Params
from fedcli.errors import UserError
from fedcli.federation import EVALUATION_BATCH, Federation
from fedcli.records import CHECKPOINT, RECORD, params_hash, read_record, write_atomically, write_record
from fedcli.registry import Method, find_method
from fedcli.runs import machine_settings, read_checkpoint, restore

EXAMPLES = 2000  # test images at most: the silhouette takes all pairs of them
SEED = 0  # of the choice of images and of K-means, so that all runs are measured on the same ones
FEATURES = "features.npz"


class Outputs(NamedTuple):
    """What a model gives for some test images."""

    features: np.ndarray  # [n, D]
    labels: np.ndarray  # [n]
    predicted: np.ndarray  # [n], the classifier's choice


def find_runs(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """The folders of the runs under `paths`: those that have finished, and the others.

    Raises:
        UserError: If one of the paths holds no run, or no run has finished.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        found = sorted(file.parent for file in path.rglob(RECORD)) if path.is_dir() else []
        if not found:
            raise UserError(f"there is no run in '{path}' (got no {RECORD}); give run folders, or folders of these.")
        folders |= {folder.resolve(): folder for folder in found}
    runs = [(folder, read_record(folder)["status"] == "finished") for folder in folders.values()]
    finished = [folder for folder, done in runs if done]
    if not finished:
        raise UserError(f"no run has finished (got {len(runs)} unfinished); 'fedcli resume RUN' takes one up again.")
    return finished, [folder for folder, done in runs if not done]


def measure(features: np.ndarray, labels: np.ndarray, seed: int = SEED) -> dict[str, float]:
    """Normalized mutual information after K-means, 0 to 1, and silhouette of the classes, -1 to 1.

    Args:
        features: `[n, D]`.
        labels: `[n]`, of at least two classes and less than n.
        seed: Of K-means, the best of ten starts.

    Raises:
        UserError: If there are too few classes or images.
    """
    classes = len(np.unique(labels))
    if not 2 <= classes < len(labels):
        raise UserError(
            f"the classes cannot be compared (got {classes} classes in {len(labels)} test images); "
            f"at least two classes and more images than classes are needed."
        )
    clusters = KMeans(classes, n_init=10, random_state=seed).fit_predict(features)
    nmi = normalized_mutual_info_score(labels, clusters)
    return {"nmi": float(nmi), "silhouette": float(silhouette_score(features, labels))}


@torch.no_grad()
def outputs(fed: Federation, params: Params, buffers: Params, index: np.ndarray) -> Outputs:
    """What one model in evaluation mode gives for the test images `index` `[n]`."""
    found = []
    for positions in torch.as_tensor(index, device=fed.device).split(EVALUATION_BATCH):
        features, logits, _ = fed.network(params, buffers, fed.transform(fed.test_images[positions]), train=False)
        found.append((features.double(), fed.test_labels[positions], logits.argmax(1)))
    return Outputs(*(torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True)))


def add_quality(folder: Path) -> dict[str, Any]:
    """Measures a finished run, keeps the features beside its record, and writes the numbers into the record.

    Args:
        folder: Of the run, with its last checkpoint.

    Returns:
        `nmi`, `silhouette`, and the number of `examples` and the `seed` they are of.

    Raises:
        UserError: If the run has no global model or no test images, or its checkpoint is missing or another one's.
    """
    record = read_record(folder)
    method = find_method(record["method_source"])
    if method.personal is not None:
        raise UserError(
            f"'{method.name}' keeps a model for each client (got {folder}); features are compared by a global model."
        )
    setup, fed = restore(record, method)
    count = len(fed.test_labels)
    if count == 0:
        raise UserError(f"the protocol {record['protocol']} has no common test images (got {folder}); choose another.")
    index = np.sort(generator(SEED, "quality").permutation(count)[:EXAMPLES])
    with machine_settings(fed):
        found = outputs(fed, *_final_model(folder, record, method, setup, fed), index)
    quality = {**measure(found.features, found.labels), "examples": len(index), "seed": SEED}
    write_atomically(folder / FEATURES, lambda path: _save(path, found))
    write_record(folder, {**record, "quality": quality})
    return quality


def _final_model(folder: Path, record: dict[str, Any], method: Method, setup: Any, fed: Federation) -> tuple:
    """Parameters and buffers of the last round's model, the one that the record has the hash of."""
    wanted = record["summary"].get("params_sha256")
    if (folder / CHECKPOINT).is_file():
        try:
            params, buffers = method.model(read_checkpoint(folder, setup, fed)[0])
        except (KeyError, TypeError):  # a state of other parts, from before the method's file was changed
            params, buffers = {}, {}
        if params_hash(params) == wanted:
            return params, buffers
    raise UserError(
        f"the checkpoint of '{folder}' is missing or does not hold the run's last model (got none with hash "
        f"{str(wanted)[:12]}); run the experiment again."
    )


def _save(path: Path, found: Outputs) -> None:
    with path.open("wb") as file:  # given a name, NumPy would add a suffix to it
        np.savez_compressed(file, **found._asdict())
