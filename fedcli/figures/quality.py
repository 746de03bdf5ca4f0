"""How well the features of a finished run keep the classes apart, written into its record.

The features are those of test images by the global model of the last round, or by one client's own model, which is
measured on each domain's images apart too. Normalized mutual information compares K-means clusters of the features, as
many as there are classes, with the classes; the silhouette compares an image's distance to its own class with that to
the nearest other one.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score, silhouette_score

from fedcli.core.batches import generator
from fedcli.core.evaluation import models
from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.figures.plots import setting_name, title_words
from fedcli.registry import find_method
from fedcli.results.tables import group
from fedcli.runs.lock import locked
from fedcli.runs.prepare import machine_settings
from fedcli.runs.records import RECORD, file_digest, read_record, write_record
from fedcli.runs.run import open_run
from fedcli.runs.trust import trust_files

EXAMPLES = 2000  # test images at most: the silhouette takes all pairs of them
SEED = 0  # of the choice of images and of K-means, so that all runs are measured on the same ones
FEATURES = "features.npz"


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


class Shown(NamedTuple):
    """The run that stands in a figure for all that differ from it only in the seed."""

    label: str
    record: dict[str, Any]
    folder: Path


def one_a_setting(paths: Iterable[Path]) -> tuple[list[Shown], str]:
    """Of the finished runs under `paths` the first seed of each setting, and what all have in common, as a title.

    The seed stands in the title, or where it is not the same for all in the labels.

    Raises:
        UserError: If there is no finished run, or they are of several data sets.
    """
    folders, _ = find_runs(paths)
    records = [read_record(folder) for folder in folders]
    if len(names := sorted({record["dataset"] for record in records})) > 1:
        raise UserError(f"the classes of a figure are those of one data set (got {', '.join(names)}); draw each alone.")
    folder_of = {id(record): folder for record, folder in zip(records, folders, strict=True)}
    members = group(records)
    seeds = {member.records[0]["seed"] for member in members}
    shown = []
    for member in members:
        record = member.records[0]
        label = setting_name(member) + (f", seed {record['seed']}" if len(seeds) > 1 else "")
        shown.append(Shown(label, record, folder_of[id(record)]))
    more = [f"seed {seeds.pop()}"] if len(seeds) == 1 else []
    return shown, title_words(records, *more)


def separation(features: np.ndarray, labels: np.ndarray, seed: int = SEED) -> dict[str, float]:
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


def kept_outputs(run: Shown) -> tuple[str, dict[str, np.ndarray]]:
    """The run's label, with the client whose model it was, and what `add_quality` has kept beside its record.

    Raises:
        UserError: If it has kept nothing, or the file is not the one that its record names.
    """
    kept = kept_arrays(run, FEATURES, "", "fedcli quality")
    quality = run.record["quality"]
    client = f", client\N{NO-BREAK SPACE}{quality['client']}" if "client" in quality else ""
    return run.label + client, kept


def kept_arrays(run: Shown, file: str, prefix: str, command: str) -> dict[str, np.ndarray]:
    """The arrays that were kept beside a record.

    Args:
        run: The run.
        file: Their name.
        prefix: Of the keys of what was measured with them.
        command: What keeps them.

    Raises:
        UserError: If they have not been kept, or are not those that the record names.
    """
    digest, path = run.record.get("quality", {}).get(f"{prefix}features_sha256"), run.folder / file
    if digest is None or not path.is_file():
        raise UserError(f"the outputs of '{run.folder}' have not been kept (got no {file}); run '{command}' first.")
    if digest != (found := file_digest(path)):
        raise UserError(
            f"'{path}' is not what the run's record names: it is damaged, another run's or older (got "
            f"SHA-256 {found[:16]}, was {digest[:16]}); run '{command}' again."
        )
    with np.load(path) as kept:
        return dict(kept)


def keep_arrays(path: Path, arrays: dict[str, np.ndarray]) -> str:
    """Writes arrays beside a record; the digest of their file."""

    def save(part: Path) -> None:
        with part.open("wb") as file:  # given a name, NumPy would add a suffix to it
            np.savez_compressed(file, **arrays)

    write_atomically(path, save)
    return file_digest(path)


def add_quality(folder: Path, client: int | None = None, method: Sequence[str] = ()) -> dict[str, Any]:
    """Measures a finished run, keeps the features beside its record, and writes the numbers into the record.

    Args:
        folder: Of the run, with its last checkpoint.
        client: Whose own model is measured; None for the global model.
        method: The user's files that the run needs, see `resume`.

    Returns:
        `nmi`, `silhouette`, the number of `examples` and the `seed` they are of, and `features_sha256`, of the file.
        Of a client's own model also the `client`, and where there are domains its own `domain` and the two numbers of
        each of the `domains`.

    Raises:
        UserError: If the run has no such model or no test images, or its checkpoint is missing or another one's.
    """
    record = read_record(folder)
    chosen = find_method(trust_files(record, method)["method_source"])
    last = record["config"]["num_clients"] - 1
    if chosen.personal is None and client is not None:
        raise UserError(f"'{chosen.name}' has one global model (got --client {client} for {folder}); leave it out.")
    if chosen.personal is not None and client is None:
        raise UserError(
            f"'{chosen.name}' keeps a model for each client (got {folder}); choose one with --client, 0 to {last}."
        )
    if client is not None and not 0 <= client <= last:
        raise UserError(f"--client {client} is none of the clients of {folder}; 0 to {last} are allowed, choose one.")
    run = open_run(folder, method)
    fed = run.fed
    if len(fed.test_labels) == 0:
        raise UserError(f"the protocol {record['protocol']} has no common test images (got {folder}); choose another.")
    domains = None if client is None or fed.test_domains is None else fed.test_domains.cpu().numpy()
    index = sample(len(fed.test_labels), domains)
    with machine_settings(fed):
        [(_, (network, *model))] = models(fed, chosen, run.state, [client or 0])
        features, logits, labels = (part.numpy() for part in fed.predict(*model, index, network, test=True))
    kept = {"features": features.astype(float), "labels": labels, "predicted": logits.argmax(1)}
    quality = {**separation(kept["features"], labels), "examples": len(index), "seed": SEED}
    quality |= {} if client is None else {"client": client}
    if domains is not None:
        quality |= {"domain": fed.domain_names[fed.domain_of[client]], "domains": {}}
        kept["domains"] = domains[index]
        for number, name in enumerate(fed.domain_names):
            shown = kept["domains"] == number
            quality["domains"][name] = separation(kept["features"][shown], kept["labels"][shown])
    of_clients = {name: value for name, value in record.get("quality", {}).items() if name.startswith("clients_")}
    with locked(folder):
        quality["features_sha256"] = keep_arrays(folder / FEATURES, kept)
        write_record(folder, {**record, "quality": {**of_clients, **quality}})
    return quality


def sample(count: int, domains: np.ndarray | None = None) -> np.ndarray:
    """The test images that are looked at, positions in the test set, ascending.

    Args:
        count: How many there are.
        domains: `[count]`; then equally many of each domain, as far as there are.
    """
    places = [np.arange(count)] if domains is None else [np.flatnonzero(domains == d) for d in np.unique(domains)]
    chosen = [own[generator(SEED, "quality").permutation(len(own))[: EXAMPLES // len(places)]] for own in places]
    return np.sort(np.concatenate(chosen))
