"""The features that the models of a round's clients give for test images.

The clients' models are not kept, so the round that would follow a run's last one is run for them.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedcli.core import drift
from fedcli.core.federation import Cohort, Federation
from fedcli.errors import UserError
from fedcli.measure.sampling import sample
from fedcli.runs.machine import machine_settings
from fedcli.runs.resume import open_run

# As many as a reader of a figure can tell apart, which shows what is measured.
MAX_CLASSES = 10
MAX_CLIENTS = 10
MAX_FEATURES = 800


def features_after_one_more_round(folder: Path, files: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Returns `features_of_clients` after the round that would follow a finished run's last one; nothing is written.

    Args:
        folder: Of the run.
        files: The user's files that the run needs, see `resume`.

    Raises:
        UserError: If the clients send no whole model, or the run cannot be opened.
    """
    run = open_run(folder, files)
    fed = run.fed
    method = run.setup.method
    cohort = fed.cohort(len(run.record["rounds"]))
    fed.start_round(keep_sent_models=True)
    with machine_settings(fed):
        method.run_round(run.state, cohort, fed, run.setup.method_config)
        if fed.exchanged.trained is None:
            raise UserError(f"the clients of '{method.name}' send no whole model (got {folder}); leave it out.")
        return features_of_clients(fed, cohort)


def features_of_clients(fed: Federation, cohort: Cohort) -> dict[str, np.ndarray]:
    """Takes features of test images by the models that clients have sent, of classes and domains that the client has.

    Of many classes, clients and features the first ones are taken, or some of them by chance.

    Args:
        fed: A federation whose clients have sent whole models in this round.
        cohort: These clients.

    Returns:
        `features` `[n, D]`, each by the model of one client, `labels` `[n]` and the ids of the `clients` `[n]`.
    """
    first_clients = fed.cohort_of(cohort.round, cohort.client_ids[:MAX_CLIENTS])
    test_labels = fed.test_labels.cpu().numpy()
    of_first_classes = np.flatnonzero(test_labels < MAX_CLASSES)
    chosen_images = np.sort(sample(len(of_first_classes), drift.EXAMPLES, "images"))
    images = of_first_classes[chosen_images]  # positions in the test set
    pairs = np.argwhere(_is_of_client(fed, first_clients, images))  # of a client and an image
    chosen_pairs = np.sort(sample(len(pairs), MAX_FEATURES, "points"))
    client, image = pairs[chosen_pairs].T
    features = drift.local_features(fed, cohort, images).double().cpu().numpy()  # [K, images, D], of the whole cohort
    return {
        "features": features[client, image],
        "labels": test_labels[images[image]],
        "clients": first_clients.client_ids[client],
    }


def _is_of_client(fed: Federation, cohort: Cohort, images: np.ndarray) -> np.ndarray:
    """Whether clients have training examples of the class and of the domain of test images, `[K, images]`."""
    labels = fed.test_labels.cpu().numpy()[images]
    domains = np.zeros_like(labels)
    if fed.test_domains is not None:
        domains = fed.test_domains.cpu().numpy()[images]
    class_counts = fed.class_counts(cohort).cpu().numpy()  # [K, C]
    domain_counts = fed.domain_counts[cohort.client_ids]  # [K, domains]
    has_class = class_counts[:, labels] > 0
    has_domain = domain_counts[:, domains] > 0
    return has_class & has_domain
