"""FedProto: rounds against a plain loop of training, prototypes of the last cohort, and what is sent."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.registry import find_method
from fedcli.runs.rounds import one_round
from tests import laws
from tests.reference import load, optimizer_of

FEDPROTO = find_method("fedproto")


def slow_round(fed, setup, number, models, prototypes):
    """One round of all clients by plain torch; returns their models and the new prototypes by class."""
    sent, after = {c: [] for c in range(fed.num_classes)}, {}
    for client in range(fed.num_clients):
        module = load(copy.deepcopy(fed.network.module), *models.get(client, fed.initial_model())).train()
        optimizer = optimizer_of(module, setup.run, setup.run.lr)
        found = {c: [] for c in sent}
        for epoch in range(setup.run.local_epochs):
            found = {c: [] for c in sent} if setup.options.gathered_epochs == "last" else found
            plan = fed.plan(fed.cohort_of(number, [client]), range(epoch, epoch + 1))
            for t in range(int(plan.steps[0])):
                x, y = fed.engine.gather(plan.index[t, 0, : plan.size[t, 0]])
                features, logits = module(x)
                pulled = [F.mse_loss(f, prototypes[c]) if c in prototypes else 0.0 * f.sum()
                          for f, c in zip(features, y.tolist(), strict=True)]  # fmt: skip
                loss = F.cross_entropy(logits, y) + setup.options.prototype_weight * torch.stack(pulled).mean()
                for feature, label in zip(features.detach(), y.tolist(), strict=True):
                    found[label].append(feature)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        after[client] = {name: value.detach() for name, value in module.named_parameters()}, {}
        for label, rows in found.items():
            if rows:
                sent[label].append(torch.stack(rows).mean(0))
    return after, {label: torch.stack(rows).mean(0) for label, rows in sent.items() if rows}


@pytest.mark.parametrize(("epochs", "gathered"), [(1, "last"), (2, "last"), (1, "all"), (3, "all")])
def test_three_rounds_are_those_of_a_plain_loop(epochs, gathered):
    parts = [np.array([0, 3, 1, 6, 4, 9]), np.array([7, 10, 13, 16, 19]), np.array([12, 15]), np.array([18, 22])]
    run = {"parts": parts, "local_epochs": epochs, "momentum": 0.0}  # momentum would begin anew in every epoch's plan
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


def test_gathering_over_all_epochs_agrees_with_the_reference_too():
    laws.law_4_chunking_is_invisible(FEDPROTO, overrides={"gathered_epochs": "all"})
    laws.law_5_order_is_invisible(FEDPROTO, overrides={"gathered_epochs": "all"})
    states = [
        laws.simulate(*laws.federation(FEDPROTO, {"gathered_epochs": which}), 1).prototypes for which in ("all", "last")
    ]
    assert laws.distance(*states) > 1e-6  # two epochs


def test_the_first_round_is_local_and_the_second_is_not():
    ours, local = laws.federation(FEDPROTO), laws.federation("local")
    laws.assert_agree(laws.simulate(*ours, 1).clients, laws.simulate(*local, 1).clients, "the first round")
    assert laws.distance(laws.simulate(*ours, 2).clients, laws.simulate(*local, 2).clients) > 1e-6


def test_a_class_that_the_last_cohort_lacks_has_no_prototype():
    parts = [np.array([0, 3, 6]), np.array([1, 4, 7]), np.array([9, 12]), np.array([2, 5])]
    setup, fed = laws.federation(FEDPROTO, parts=parts, cohort_size=2)
    assert laws.simulate(setup, fed, 1, [[0, 1]]).has_prototype.tolist() == [True, True, False]
    state = laws.simulate(setup, fed, 2, [[0, 1], [2, 3]])
    assert state.has_prototype.tolist() == [True, False, True]


def test_terms_costs_and_the_headline_of_a_round():
    parts = [np.array([0, 3, 6, 9, 12, 1, 4]), np.array([2, 5]), np.array([7, 8]), np.array([], int)]
    setup, fed = laws.federation(FEDPROTO, parts=parts)
    state, entry = one_round(setup, fed, laws.simulate(setup, fed, 1), fed.cohort(1))
    assert set(entry["terms"]) == {"cross_entropy", "prototype"}
    width = fed.feature_dim
    assert fed.sent_down == {"params": 0, "buffers": 0, "other": 4 * 3 * width}
    assert fed.sent_up == {"params": 0, "buffers": 0, "other": 5 * width}  # two classes, one, two, none
    assert setup.method.client_memory(fed.sizes) == fed.sizes.parameters + 2 * 3 * width
    near, by_classifier = [], []
    for own in state.clients.values():
        features, logits, labels = fed.predict(*own, None)
        near.append((torch.cdist(features, state.prototypes).argmin(1) == labels).double().mean().item())
        by_classifier.append((logits.argmax(1) == labels).double().mean().item())
    assert entry["test_accuracy"] == pytest.approx(np.mean(near))
    assert entry["classifier_accuracy"] == pytest.approx(np.mean(by_classifier))
