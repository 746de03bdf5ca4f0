"""What the models of a finished run make of its images: predictions, the confusion matrix, and accuracies by class."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor

from fedcli.core.federation import Federation
from fedcli.declarations import Method
from fedcli.errors import UserError, unknown
from fedcli.runs.models import Classifier, Run
from fedcli.runs.resume import restore

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


def images_of(run: Run, part: str = "test", client: int | None = None) -> Images:
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
    _, setup, fed = restore(run.record, run.files)
    if client is not None and client not in range(fed.num_clients):
        raise UserError(f"there is no client {client}; the run has the clients 0 to {fed.num_clients - 1}.")
    own_tests = setup.protocol.evaluation == "clients"
    if part == "test" and not own_tests:
        if client is not None:
            raise UserError(f"the test images belong to no client (got client {client}); leave it out.")
        return _as_floats(fed.test_images, fed.test_labels)
    positions = {"train": fed.training, "validation": fed.validation, "test": fed.testing}[part]
    chosen = np.concatenate(positions) if client is None else positions[client]
    return _take(fed, chosen)


def predictions(model: Classifier, images: Tensor) -> Tensor:
    """Returns the most probable class of each image `[N]`.

    Args:
        model: A model of a run.
        images: As `Images.images`.
    """
    with torch.no_grad():
        return torch.cat([model(batch).argmax(1) for batch in images.split(BATCH)])


def confusion(run: Run, round: str = "selected", client: int | None = None) -> np.ndarray:
    """Counts what the test images of each class are taken for, `[C, C]`, the true class by the predicted one.

    The models are those that the headline is measured by. Where each client has a model or test images of its own, the
    counts of all clients are added up.

    Args:
        run: A finished run.
        round: "selected", the headline's, or "last".
        client: Count for this client alone.

    Raises:
        UserError: If the run has no such model, or its data or files have changed.
    """
    record, setup, fed = restore(run.record, run.files)
    method = setup.method
    classes = range(len(record["class_names"]))
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    loaded: dict[int | None, Classifier] = {}
    for owner, tested in _tests(fed, method, client):
        if owner not in loaded:
            loaded = {owner: run.model(owner, round, prototypes=method.prototypes is not None)}
        predicted = predictions(loaded[owner], tested.images)
        counts += confusion_matrix(tested.labels.numpy(), predicted.numpy(), labels=classes)
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
    right = np.diag(counts).astype(float)
    images = counts.sum(1)
    taken = counts.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        accuracy = 100 * right / images
        precision = 100 * right / taken
        f1 = 100 * 2 * right / (images + taken)
    return pd.DataFrame(
        {"images": images, "accuracy": accuracy, "precision": precision, "f1": f1},
        index=pd.Index(class_names, name="class"),
    )


def _tests(fed: Federation, method: Method, client: int | None) -> Iterator[tuple[int | None, Images]]:
    """The tests of the headline: whose model, None for the global one, and the images that it is tested on."""
    is_personal = method.personal is not None
    if fed.evaluation == "clients":
        for owner, positions in enumerate(fed.testing):
            if len(positions) and client in (None, owner):
                yield owner if is_personal else None, _take(fed, positions)
        return
    if client is not None and not is_personal:
        raise UserError(f"'{method.name}' has one model for all (got client {client}); leave the client out.")
    tested = _as_floats(fed.test_images, fed.test_labels)
    if not is_personal:
        yield None, tested
        return
    for owner in range(fed.num_clients):
        if client in (None, owner):
            yield owner, tested


def _take(fed: Federation, positions: np.ndarray) -> Images:
    """The training images at some positions."""
    index = torch.as_tensor(positions, device=fed.device)
    return _as_floats(fed.engine.images[index], fed.engine.labels[index])


def _as_floats(images: Tensor, labels: Tensor) -> Images:
    return Images(images.cpu().float() / 255, labels.cpu())
