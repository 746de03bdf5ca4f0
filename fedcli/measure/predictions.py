"""What the models of a finished run make of its images: predictions, the confusion matrix, and accuracies by class."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor

from fedcli.core.federation import Federation
from fedcli.declarations import Method
from fedcli.errors import UserError, unknown
from fedcli.runs.resume import restore
from fedcli.runs.saved_run import Classifier, SavedRun

PARTS = ("train", "validation", "test")
BATCH = 500  # images that go through a model together


class Images(NamedTuple):
    """Images of a run, as its models take them.

    Attributes:
        images: `[N, channels, H, W]`, floats from 0 to 1.
        labels: `[N]`, from 0.
    """

    images: Tensor
    labels: Tensor


def images_of(run: SavedRun, part: str = "test", client: int | None = None) -> Images:
    """Returns the images that a run trains on, validates on or is tested on.

    Args:
        run: The run.
        part: One of `PARTS`.
        client: Whose images; of all clients in turn if None. The common test images belong to no client.

    Raises:
        UserError: If there is no such part or client, or the run's data or files have changed.
    """
    if part not in PARTS:
        raise unknown("part of the data", part, PARTS, f"there are {', '.join(PARTS)}.")
    restored = restore(run.record, run.files)
    fed = restored.fed
    _refuse_no_client(fed, client)
    has_own_tests = restored.setup.protocol.evaluation == "clients"
    if part == "test" and not has_own_tests:
        if client is not None:
            raise UserError(f"the test images belong to no client (got client {client}); leave it out.")
        return _as_floats(fed.test_images, fed.test_labels)
    positions = {"train": fed.training, "validation": fed.validation, "test": fed.testing}[part]
    return _images_at(fed, np.concatenate(positions) if client is None else positions[client])


def predictions(model: Classifier, images: Tensor) -> Tensor:
    """Returns the most probable class of each image `[N]`.

    Args:
        model: A model of a run.
        images: As `Images.images`.
    """
    with torch.no_grad():
        return torch.cat([model(batch).argmax(1) for batch in images.split(BATCH)])


def confusion(run: SavedRun, client: int | None = None, round: str = "selected") -> np.ndarray:
    """Counts what the test images of each class are taken for, `[C, C]`, the true class by the predicted one.

    The models are those that the headline is measured by. Where each client has a model or test images of its own, the
    counts of all clients are added up.

    Args:
        run: A finished run.
        client: Count for this client alone.
        round: "selected", the headline's, or "last".

    Raises:
        UserError: If the run has no such model or client, or its data or files have changed.
    """
    restored = restore(run.record, run.files)
    method = restored.setup.method
    _refuse_no_client(restored.fed, client)

    @lru_cache(1)  # one at a time, for all tests of the global one
    def load_model(owner: int | None) -> Classifier:
        return run.model(owner, round, prototypes=run.classifies_by_prototypes)

    classes = range(len(restored.record["class_names"]))
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    for test_set in _test_sets(restored.fed, method, client):
        predicted = predictions(load_model(test_set.owner), test_set.images)
        counts += confusion_matrix(test_set.labels.numpy(), predicted.numpy(), labels=classes)
    return counts


def per_class(counts: np.ndarray, class_names: list[str]) -> pd.DataFrame:
    """Returns what a confusion matrix says of each class, a row a class.

    Args:
        counts: `[C, C]`, see `confusion`.
        class_names: Their names.

    Returns:
        The columns `images`; `accuracy`, the share of the class's images that are right (its recall), `precision`, the
        share of the images taken for it that are of it, and `f1`, their harmonic mean, in percent; NaN without images.
    """
    correct = np.diag(counts).astype(float)
    images = counts.sum(1)
    predicted = counts.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        accuracy = 100 * correct / images
        precision = 100 * correct / predicted
        f1 = 100 * 2 * correct / (images + predicted)
    return pd.DataFrame(
        {"images": images, "accuracy": accuracy, "precision": precision, "f1": f1},
        index=pd.Index(class_names, name="class"),
    )


def _refuse_no_client(fed: Federation, client: int | None) -> None:
    if client is not None and client not in range(fed.num_clients):
        raise UserError(f"there is no client {client}; the run has the clients 0 to {fed.num_clients - 1}.")


class _TestSet(NamedTuple):
    """Images on which a model is tested for the headline."""

    owner: int | None  # whose model it is, None for the global one
    images: Tensor  # as `Images.images`
    labels: Tensor


def _test_sets(fed: Federation, method: Method, client: int | None) -> Iterator[_TestSet]:
    """The test sets of the headline, or those of one client among them."""
    is_personal = method.personal is not None
    clients = range(fed.num_clients) if client is None else [client]
    if fed.evaluation == "clients":
        for owner in clients:
            if len(fed.testing[owner]):
                yield _TestSet(owner if is_personal else None, *_images_at(fed, fed.testing[owner]))
        return
    if client is not None and not is_personal:
        raise UserError(f"'{method.name}' has one model for all (got client {client}); leave the client out.")
    images = _as_floats(fed.test_images, fed.test_labels)
    if not is_personal:
        yield _TestSet(None, *images)
        return
    for owner in clients:
        yield _TestSet(owner, *images)


def _images_at(fed: Federation, positions: np.ndarray) -> Images:
    """The training images at some positions."""
    index = torch.as_tensor(positions, device=fed.device)
    return _as_floats(fed.engine.images[index], fed.engine.labels[index])


def _as_floats(images: Tensor, labels: Tensor) -> Images:
    return Images(images.cpu().float() / 255, labels.cpu())
