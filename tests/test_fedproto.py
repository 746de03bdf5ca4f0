"""FedProto: rounds against a plain loop of training, prototypes of the last cohort, and what is sent."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.registry import find_method
from tests import laws
from tests.reference import means_by_class, train_plainly

FEDPROTO = find_method("fedproto")


def slow_round(fed, setup, number, models, prototypes):
    """One round of all clients by plain torch; returns their models and the new prototypes by class."""
    sent, after = {c: [] for c in range(fed.num_classes)}, {}
    for client in range(fed.num_clients):
        seen = []  # features and label of every example of every epoch

        def objective(module, features, logits, y, seen=seen):
            pulled = []
            for feature, label in zip(features, y.tolist(), strict=True):
                pulled.append(F.mse_loss(feature, prototypes[label]) if label in prototypes else 0.0 * feature.sum())
                seen.append((label, feature.detach()))
            return F.cross_entropy(logits, y) + setup.options.prototype_weight * torch.stack(pulled).mean()

        after[client] = train_plainly(fed, number, client, models.get(client, fed.initial_model()), objective), {}
        gathered = seen if setup.options.gathered_epochs == "all" else seen[-len(fed.training[client]) :]
        found = {c: [feature for label, feature in gathered if label == c] for c in sent}
        for label, mean in means_by_class(found).items():
            sent[label].append(mean)
    return after, means_by_class(sent)


@pytest.mark.parametrize(("epochs", "gathered"), [(1, "last"), (2, "last"), (1, "all"), (3, "all")])
def test_three_rounds_are_those_of_a_plain_loop(epochs, gathered):
    parts = [np.array([0, 3, 1, 6, 4, 9]), np.array([7, 10, 13, 16, 19]), np.array([12, 15]), np.array([18, 22])]
    run = {"parts": parts, "local_epochs": epochs}
    setup, fed = laws.federation(FEDPROTO, {"prototype_weight": 3.0, "gathered_epochs": gathered}, **run)
    state, models, prototypes = setup.method.init(fed, setup.options), {}, {}
    for number in range(3):
        models, prototypes = slow_round(fed, setup, number, models, prototypes)
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        assert state.has_prototype.tolist() == [True, True, False]  # nobody has class 2
        for label, prototype in prototypes.items():
            torch.testing.assert_close(state.prototypes[label], prototype, rtol=1e-9, atol=1e-12)
        for client, model in models.items():
            laws.assert_agree(tuple(state.clients[client]), model, f"client {client} in round {number}")
