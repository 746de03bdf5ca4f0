"""How well features separate the classes, in numbers."""

from typing import NamedTuple

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score, silhouette_score
from sklearn.metrics.pairwise import cosine_similarity

from fedcli.errors import UserError
from fedcli.measure.sampling import SEED


def separation(features: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Measures how well features `[n, D]` separate the classes `labels` `[n]`.

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


class PairCosines(NamedTuple):
    """The cosine similarities of all pairs of features, an entry a pair.

    Attributes:
        cosines: `[n (n - 1) / 2]`; 0 with a zero vector.
        is_same_class: Whether the two are features of one class, bool.
    """

    cosines: np.ndarray
    is_same_class: np.ndarray


def pair_cosines(features: np.ndarray, labels: np.ndarray) -> PairCosines:
    """Compares each two of the features `[n, D]`, whose classes are `labels` `[n]`."""
    pairs = np.triu_indices(len(labels), 1)
    is_same_class = labels[:, None] == labels
    return PairCosines(cosine_similarity(features)[pairs], is_same_class[pairs])
