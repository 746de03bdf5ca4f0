"""Evaluation by the protocol: test images, own parts, domains; personal models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score

from fedcli.core import evaluation
from fedcli.core.trees import tree_map
from fedcli.registry import find_method
from fedcli.results import metrics
from fedcli.runs.prepare import make_federation
from tests import laws

LOCAL, FEDAVG = find_method("local"), find_method("fedavg")


def with_evaluation(how, method=LOCAL, data=None, parts=None, rounds=1, **run):
    """Setup, federation and state after some rounds, under the toy protocol with another evaluation."""
    setup, _ = laws.federation(method, data=data, parts=parts, **run)
    share = 0.4 if how == "clients" else 0.0
    setup = replace(setup, protocol=replace(setup.protocol, evaluation=how), run=replace(setup.run, local_test=share))
    fed = make_federation(setup, data or laws.toy_dataset(), laws.toy_parts() if parts is None else parts)
    return setup, fed, laws.simulate(setup, fed, rounds)


def accuracy(fed, model, x, y):
    with torch.no_grad():
        logits = fed.network(*model, fed.transform(x), train=False).logits
    return (logits.argmax(1) == y).double().mean().item()


def domain_dataset():
    data = laws.toy_dataset(num_train=34)
    domains = torch.tensor([0] * 13 + [1] * 7 + [2] * 14)
    return replace(data, domain_train=domains, domain_test=torch.arange(20) % 3, domain_names=("ink", "paint", "photo"))


@pytest.mark.parametrize(("k", "expected"), [(1, [True, False, False]), (2, [True, True, False]), (5, [True] * 3)])
def test_top_k(k, expected):
    scores = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert evaluation.top_k(scores, torch.tensor([0, 2, 1]), k).tolist() == expected


def test_nearness_is_minus_the_squared_distance_and_absent_classes_are_far():
    prototypes, has_class = torch.tensor([[1.0, 0.0], [4.0, 6.0], [1.0, 2.0]]), torch.tensor([True, True, False])
    near = evaluation.nearness(torch.tensor([[1.0, 2.0]]), prototypes, has_class)
    assert near.tolist() == [[-4.0, -25.0, -torch.inf]]


def test_personal_models_are_each_tested_on_the_test_images():
    setup, fed, state = with_evaluation("server", cohort_size=2)
    result = evaluation.evaluate(fed, setup.method, state)
    assert set(state.clients) < set(range(4))  # the others are tested as they begin
    models = [state.clients.get(client, fed.initial_model()) for client in range(4)]
    own = [accuracy(fed, model, fed.test_images, fed.test_labels) for model in models]
    assert result["test_accuracy"] == pytest.approx(np.mean(own))
    assert result["clients"] == pytest.approx({"mean": np.mean(own), "std": np.std(own), "worst": min(own)})
    assert result["client_accuracy"] == pytest.approx(dict(zip("0123", own, strict=True)))


@pytest.mark.parametrize("method", [LOCAL, FEDAVG], ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("how", "share", "name", "sizes"),
    [("clients", 0.0, "test_accuracy", [5, 2, 4, 1]), ("server", 0.3, "validation_accuracy", [3, 2, 3, 1])],
)
def test_own_parts_are_pooled_over_the_clients(how, share, name, sizes, method):
    setup, fed, state = with_evaluation(how, method, validation=share)
    parts, own = fed.testing if how == "clients" else fed.validation, []
    assert [len(part) for part in parts] == sizes
    for client, part in enumerate(parts):
        assert sorted([*fed.training[client], *part]) == laws.toy_parts()[client].tolist()
        model = state.clients[client] if method is LOCAL else (state.params, state.buffers)
        own.append(accuracy(fed, model, fed.engine.images[part], fed.engine.labels[part]))
    result = evaluation.evaluate(fed, setup.method, state)
    assert result[name] == pytest.approx(np.average(own, weights=sizes))
    if how == "clients" or method is FEDAVG:  # else these are of the clients' own models on the test images
        assert list(result["client_accuracy"].values()) == pytest.approx(own)
        assert result["clients"] == pytest.approx({"mean": np.mean(own), "std": np.std(own), "worst": min(own)})


def test_the_cut_into_training_and_test_depends_on_the_partition_seed_only():
    tests = []
    for seeds in ({"seed": 0}, {"seed": 1}, {"partition_seed": 7}):
        _, fed, _ = with_evaluation("clients", rounds=0, **{"partition_seed": 0, **seeds})
        tests.append([part.tolist() for part in fed.testing])
    assert tests[0] == tests[1] != tests[2]


def test_domains_are_measured_inside_and_outside():
    data, parts = domain_dataset(), [np.arange(13), np.arange(13, 20), np.arange(20, 30), np.arange(30, 34)]
    setup, fed, state = with_evaluation("domains", data=data, parts=parts)
    assert fed.domain_of.tolist() == [0, 1, 2, 2]
    tests = [fed.test_domains == d for d in range(3)]
    matrix = [[accuracy(fed, state.clients[c], fed.test_images[test], fed.test_labels[test]) for test in tests]
              for c in range(4)]  # fmt: skip
    matrix = np.array(matrix)
    result = evaluation.evaluate(fed, setup.method, state)
    intra = {"ink": matrix[0, 0], "paint": matrix[1, 1], "photo": matrix[2:, 2].mean()}
    inter = {"ink": matrix[0, 1:].mean(), "paint": matrix[1, [0, 2]].mean(), "photo": matrix[2:, :2].mean()}
    assert result["intra"] == pytest.approx(intra)
    assert result["inter"] == pytest.approx(inter)
    assert result["test_accuracy"] == pytest.approx(np.mean(list(inter.values())))
    assert result["domains"] == pytest.approx(dict(zip(data.domain_names, matrix.mean(0), strict=True)))


# Counts of the classes

OWN_DOMAINS = [np.arange(13), np.arange(13, 20), np.arange(20, 30), np.arange(30, 34)]  # two clients have the third


def weight_under_domains(fed, client, image):
    """What a prediction counts in the headline: a mean over domains, their clients, other domains, their images."""
    own, domain = fed.domain_of[client], fed.test_domains[image]
    if own == domain:
        return 0.0
    return 1 / ((fed.domain_of == own).sum() * 2 * int((fed.test_domains == domain).sum()))


@pytest.mark.parametrize(
    ("how", "method"),
    [("server", "fedavg"), ("server", "local"), ("clients", "fedavg"), ("clients", "local"), ("domains", "local")],
)
def test_counts_of_classes_give_the_headline_and_the_scores_of_scikit_learn(how, method):
    by_domain = {"data": domain_dataset(), "parts": OWN_DOMAINS} if how == "domains" else {}
    setup, fed, state = with_evaluation(how, find_method(method), per_class=True, **by_domain)
    result = evaluation.evaluate(fed, setup.method, state)
    counts = result["per_class"]
    assert sum(counts["right"]) / sum(counts["actual"]) == pytest.approx(result["test_accuracy"])
    true, predicted, weights = [], [], []
    owners = [0] if (how, method) == ("server", "fedavg") else range(4)
    for client in owners:
        network, *model = evaluation.model_of(fed, setup.method, state, client)
        index = fed.testing[client] if how == "clients" else None
        _, logits, labels = fed.predict(*model, index, network)
        true += labels.tolist()
        predicted += logits.argmax(1).tolist()
        of_domains = [weight_under_domains(fed, client, image) for image in range(len(labels))] if by_domain else []
        weights += of_domains or [1.0] * len(labels)
    assert counts["predicted"] == pytest.approx(np.bincount(predicted, weights, 3) * 20 / 3 if by_domain else
                                                np.bincount(predicted, minlength=3))  # fmt: skip
    f1 = f1_score(true, predicted, average="macro", sample_weight=weights)
    assert metrics.macro_f1(counts) == pytest.approx(f1)
    balanced = balanced_accuracy_score(true, predicted, sample_weight=weights)
    assert metrics.balanced_accuracy(counts) == pytest.approx(balanced)


def test_counts_of_classes_are_by_the_rule_of_the_headline():
    setup, fed, state = with_evaluation("server", find_method("fedproto"), per_class=True, cohort_size=2)
    result = evaluation.evaluate(fed, setup.method, state)
    counts = result["per_class"]
    assert sum(counts["right"]) / sum(counts["actual"]) == pytest.approx(result["test_accuracy"])
    assert result["test_accuracy"] != result["classifier_accuracy"]
    _, other, _ = with_evaluation("server", find_method("fedproto"), cohort_size=2)
    assert "per_class" not in evaluation.evaluate(other, setup.method, state)


# Models that have not changed


def counted(fed, monkeypatch):
    """The numbers of images that models are run on from now on."""
    predict, runs = fed.predict, []

    def counting(*given, **how):
        found = predict(*given, **how)
        runs.append(len(found[2]))
        return found

    monkeypatch.setattr(fed, "predict", counting)
    return runs


@pytest.mark.parametrize(("how", "method"), [("server", "local"), ("clients", "local"), ("clients", "fedproto")])
def test_only_changed_models_are_run_again(how, method, monkeypatch):
    setup, fed, state = with_evaluation(how, find_method(method), cohort_size=2, validation=0.2)
    other = with_evaluation(how, find_method(method), cohort_size=2, validation=0.2)[1]  # which remembers nothing
    tests, runs = [fed.test_labels] * 4 if how == "server" else fed.testing, counted(fed, monkeypatch)

    def assert_run(clients):
        """These clients' models alone are run, and the accuracies are those of a federation that remembers nothing."""
        runs.clear()  # what the round itself asks
        fresh = evaluation.evaluate(other, setup.method, tree_map(torch.Tensor.clone, state))
        assert evaluation.evaluate(fed, setup.method, state) == fresh
        sizes = [len(part[client]) for client in clients for part in (tests, fed.validation)]
        assert sorted(runs) == sorted(size for size in sizes if size)

    assert_run(range(4))
    assert_run([])
    for number in (1, 2):
        state = setup.method.run_round(state, fed.cohort(number), fed, setup.options)[0]
        assert_run(fed.cohort(number).client_ids)


@pytest.mark.parametrize("change", ["in place", "replaced", "clients"])
def test_a_model_that_changes_in_any_way_is_run_again(change, monkeypatch):
    setup, fed, state = with_evaluation("clients", data=laws.toy_dataset(num_train=34))
    first = evaluation.evaluate(fed, setup.method, state)
    runs = counted(fed, monkeypatch)
    other = with_evaluation("clients", data=laws.toy_dataset(num_train=34))[1]
    params, _ = state.clients[1]
    if change == "in place":
        params["head.bias"].add_(torch.tensor([100.0, *[0.0] * (len(params["head.bias"]) - 1)]))
    elif change == "replaced":
        state.clients[1] = state.clients[1]._replace(params={**params, "head.bias": params["head.bias"].flip(0)})
    else:
        state.clients[0], state.clients[1] = state.clients[1], state.clients[0]
    changed = evaluation.evaluate(other, setup.method, tree_map(torch.Tensor.clone, state))
    assert evaluation.evaluate(fed, setup.method, state) == changed
    assert len(runs) == (2 if change == "clients" else 1)
    assert change == "replaced" or changed != first
