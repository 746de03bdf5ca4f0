"""How well the models of finished runs separate the classes, written into their records with the features beside them.

`add_quality` measures the global model whose accuracy is the headline, or a client's own one; `add_clients_quality`
measures the models of a round's clients.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedcli.core.evaluation import FullModel, nearness
from fedcli.core.federation import Federation
from fedcli.errors import UserError
from fedcli.measure.client_features import features_after_one_more_round
from fedcli.measure.feature_files import CLIENT_FEATURES, MODEL_FEATURES
from fedcli.measure.sampling import sample
from fedcli.measure.separation import pair_cosines, separation
from fedcli.runs.machine import machine_settings
from fedcli.runs.models import Models, check_client, check_round, read_models, round_index_of
from fedcli.runs.resume import open_run

MAX_IMAGES = 2000  # of the test set: the silhouette takes all pairs of them


def add_quality(
    folder: Path, client: int | None = None, files: Sequence[str] = (), round: str = "selected"
) -> dict[str, Any]:
    """Measures the model of a finished run, see `separation`; writes its features and the numbers.

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
    check_client(run.setup.method, fed.num_clients, client)
    check_round(round)
    if len(fed.test_labels) == 0:
        raise UserError(f"the protocol {run.record['protocol']} has no common test images (got {folder}).")
    round_number = round_index_of(run.record, round)
    with machine_settings(fed):
        of_round = read_models(folder, run.record, run.setup.method, round_number)
        model = _choose_model(fed, of_round, client)
        outputs = _test_outputs(fed, model, of_round.prototypes)
    numbers = {**separation(outputs["features"], outputs["labels"]), "round": round_number}
    if client is not None:
        numbers["client"] = client
    return MODEL_FEATURES.write(folder, outputs, numbers)


def _choose_model(fed: Federation, of_round: Models, client: int | None) -> FullModel:
    """The global model, or a client's own, of those after a round."""
    if client is None:
        network = fed.network
        tensors = of_round.shared
    else:
        network = fed.networks[fed.architecture[client]]
        tensors = of_round.personal.get(client)
    if tensors is None:  # the client has not taken part yet
        tensors = fed.initial_model(network)
    return FullModel(network, *tensors)


def _test_outputs(fed: Federation, model: FullModel, prototypes: tuple[Tensor, Tensor] | None) -> dict[str, np.ndarray]:
    """What a model makes of test images: `features` `[n, D]`, `labels` `[n]` and the `predicted` classes `[n]`.

    Where a method classifies by prototypes, they are predicted so, as for the headline, and not by the head.
    """
    images = np.sort(sample(len(fed.test_labels), MAX_IMAGES, "quality"))
    features, logits, labels = fed.predict(model.params, model.buffers, images, model.network, test=True)
    assert features is not None  # `predict` returns them unless told not to
    scores = logits
    if prototypes is not None:
        points, has_class = prototypes
        scores = nearness(features, points.to(features), has_class)
    return {
        "features": features.numpy().astype(float),
        "labels": labels.numpy(),
        "predicted": scores.numpy().argmax(1),
    }


def add_clients_quality(folder: Path, files: Sequence[str] = ()) -> dict[str, Any]:
    """Measures the features by the clients' models after one more round; writes the features and the numbers.

    Returns:
        What `add_quality` returns, of all clients' features together, and the median cosines of two features of one
        class, `cosine_same`, and of two classes, `cosine_other`. In the record, their names begin with "clients_".

    Raises:
        UserError: As `features_after_one_more_round` and `separation`.
    """
    outputs = features_after_one_more_round(folder, files)
    labels = outputs["labels"]
    outputs["features"] = outputs["features"].astype(np.float16)
    features = outputs["features"].astype(float)  # those that are kept
    cosines, is_same_class = pair_cosines(features, labels)
    numbers = {
        **separation(features, labels),
        "cosine_same": float(np.median(cosines[is_same_class])),
        "cosine_other": float(np.median(cosines[~is_same_class])),
    }
    return CLIENT_FEATURES.write(folder, outputs, numbers)
