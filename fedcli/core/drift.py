"""How far the models of a round's clients have drifted apart, before the server makes one model of them.

Two numbers: the distance between the features that the clients' models give for the same test images, and how much the
updates of their classifiers point the same way.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedcli.core.draws import generator
from fedcli.core.federation import Federation
from fedcli.core.population import Cohort

EXAMPLES = 500  # test images, at most
AT_ONCE = 100  # images in a forward pass of all clients together


def measure_drift(fed: Federation, cohort: Cohort) -> dict[str, float | None]:
    """Returns both numbers of the models that the round's clients have sent.

    Both are None for a single client and in a round in which clients send no whole models. The second is None too where
    not all clients were sent the model from which they started.
    """
    distance = None
    similarity = None
    trained = fed.exchanged.trained
    received = fed.exchanged.received
    if trained is not None:
        index = np.sort(generator(0, "drift").permutation(len(fed.test_labels))[:EXAMPLES])  # the same for all runs
        distance = feature_distance(local_features(fed, cohort, index))
        if received is not None:
            similarity = classifier_similarity(trained.params["head.weight"], received["head.weight"])
    return {"feature_distance": distance, "classifier_similarity": similarity}


def local_features(fed: Federation, cohort: Cohort, index: np.ndarray) -> Tensor:
    """Returns features `[K, n, D]` of the test images `index` by the models that the clients sent."""
    clients = fed.exchanged.trained
    assert clients is not None  # those that sent whole models
    features = []
    for positions in torch.as_tensor(index, device=fed.device).split(AT_ONCE):
        images = fed.transform(fed.test_images[positions])
        features.append(fed.forward(clients, cohort, images, train=False).features)
    return torch.cat(features, 1)


def feature_distance(features: Tensor) -> float | None:
    """Returns the mean Euclidean distance of two clients' features `[K, n, D]`, over images and pairs; None without."""
    by_image = features.double().transpose(0, 1)  # [n, K, D]
    distances = torch.cdist(by_image, by_image, compute_mode="donot_use_mm_for_euclid_dist")  # [n, K, K]
    pairs = torch.ones_like(distances[0], dtype=torch.bool).triu(1)  # each pair of two clients once
    return distances[:, pairs].mean().item() if pairs.any() else None


def classifier_similarity(trained: Tensor, received: Tensor) -> float | None:
    """Returns the mean cosine between two clients' updates of a class's weights, over classes and pairs of clients.

    From the weights `[K, C, D]` after local training and `[C, D]` before; None where no two clients moved those of a
    class.
    """
    updates = (trained - received).double().transpose(0, 1)  # [C, K, D]
    directions = normalize(updates, dim=-1, eps=1e-300)
    moved = updates.any(-1)
    pairs = (moved[:, :, None] & moved[:, None, :]).triu(1)  # each pair of two clients that have moved once
    return (directions @ directions.mT)[pairs].mean().item() if pairs.any() else None
