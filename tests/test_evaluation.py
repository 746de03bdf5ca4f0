"""Evaluation by the protocol: test images, own parts, domains; personal models."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score

from fedcli import toy
from fedcli.core import client_states, evaluation
from fedcli.core.parts import Parts
from fedcli.core.trees import tree_map
from fedcli.registry import find_method
from fedcli.results import record_numbers
from fedcli.runs.prepare import make_federation
from tests import laws

LOCAL = find_method("local")
FEDAVG = find_method("fedavg")


def with_evaluation(tested_on, method=LOCAL, data=None, parts=None, rounds=1, **run):
    """Setup, federation and state after some rounds, under the toy protocol with another evaluation."""
    data = toy.toy_dataset() if data is None else data
    parts = toy.toy_parts() if parts is None else parts
    setup, _ = toy.federation(method, data=data, parts=parts, **run)
    protocol = replace(setup.protocol, evaluation=tested_on)
    local_test = 0.4 if tested_on == "clients" else 0.0
    setup = replace(setup, protocol=protocol, config=replace(setup.config, local_test=local_test))
    fed = make_federation(setup, data, Parts(parts))
    return setup, fed, toy.simulate(setup, fed, rounds)


def accuracy(fed, model, x, y):
    with torch.no_grad():
        logits = fed.network(*model, fed.transform(x), train=False).logits
    return (logits.argmax(1) == y).double().mean().item()


def domain_dataset():
    data = toy.toy_dataset(num_train=34)
    domains = torch.tensor([0] * 13 + [1] * 7 + [2] * 14)
    return replace(data, domain_train=domains, domain_test=torch.arange(20) % 3, domain_names=("ink", "paint", "photo"))


@pytest.mark.parametrize(("k", "expected"), [(1, [True, False, False]), (2, [True, True, False]), (5, [True] * 3)])
def test_a_label_is_among_the_k_highest_scores(k, expected):
    scores = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert evaluation.top_k(scores, torch.tensor([0, 2, 1]), k).tolist() == expected


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_class_without_a_score_is_none_of_the_highest(k):
    lowest = -torch.inf
    scores = torch.tensor([[lowest, lowest, 1.0], [lowest, lowest, 1.0], [lowest, lowest, lowest]])
    assert evaluation.top_k(scores, torch.tensor([0, 2, 0]), k).tolist() == [False, True, False]


def test_nearness_is_minus_the_squared_distance_and_absent_classes_are_far():
    prototypes = torch.tensor([[1.0, 0.0], [4.0, 6.0], [1.0, 2.0]])
    has_class = torch.tensor([True, True, False])
    near = evaluation.nearness(torch.tensor([[1.0, 2.0]]), prototypes, has_class)
    assert near.tolist() == [[-4.0, -25.0, -torch.inf]]


def test_personal_models_are_each_tested_on_the_test_images():
    setup, fed, state = with_evaluation("server", cohort_size=2)
    result = evaluation.evaluate(fed, setup.method, state)
    assert set(state.clients) < set(range(4))  # the others are tested as they begin
    models = [state.clients.get(client, fed.initial_model()) for client in range(4)]
    accuracies = [accuracy(fed, model, fed.test_images, fed.test_labels) for model in models]
    assert result["test_accuracy"] == pytest.approx(np.mean(accuracies))
    assert result["clients"] == pytest.approx(
        {"mean": np.mean(accuracies), "std": np.std(accuracies), "worst": min(accuracies)}
    )
    assert result["client_accuracy"] == pytest.approx(dict(zip("0123", accuracies, strict=True)))


class OwnParts(NamedTuple):
    """What an evaluation gives where clients hold examples out, and the accuracy of each client on its own."""

    result: dict[str, Any]
    sizes: list[int]
    accuracies: list[float]


def evaluate_own_parts(tested_on, method, validation=0.0):
    setup, fed, state = with_evaluation(tested_on, method, validation=validation)
    parts = fed.testing if tested_on == "clients" else fed.validation
    accuracies = []
    for client, part in enumerate(parts):
        assert sorted([*fed.training[client], *part]) == toy.toy_parts()[client].tolist()
        model = state.clients[client] if method is LOCAL else (state.params, state.buffers)
        accuracies.append(accuracy(fed, model, fed.engine.images[part], fed.engine.labels[part]))
    result = evaluation.evaluate(fed, setup.method, state)
    return OwnParts(result, [len(part) for part in parts], accuracies)


def assert_accuracies_are_those_of_own_parts(measured):
    spread = {
        "mean": np.mean(measured.accuracies),
        "std": np.std(measured.accuracies),
        "worst": min(measured.accuracies),
    }
    assert list(measured.result["client_accuracy"].values()) == pytest.approx(measured.accuracies)
    assert measured.result["clients"] == pytest.approx(spread)


@pytest.mark.parametrize("method", [LOCAL, FEDAVG], ids=lambda method: method.name)
def test_own_test_parts_are_pooled_over_the_clients_and_each_counts_by_itself(method):
    measured = evaluate_own_parts("clients", method)
    assert measured.sizes == [5, 2, 4, 1]
    assert measured.result["test_accuracy"] == pytest.approx(np.average(measured.accuracies, weights=measured.sizes))
    assert_accuracies_are_those_of_own_parts(measured)


@pytest.mark.parametrize("method", [LOCAL, FEDAVG], ids=lambda method: method.name)
def test_validation_parts_are_pooled_over_the_clients(method):
    measured = evaluate_own_parts("server", method, validation=0.3)
    assert measured.sizes == [3, 2, 3, 1]
    assert measured.result["validation_accuracy"] == pytest.approx(
        np.average(measured.accuracies, weights=measured.sizes)
    )


def test_accuracies_of_clients_under_a_global_model_are_those_of_their_validation_parts():
    """Personal models are tested on the test images instead."""
    assert_accuracies_are_those_of_own_parts(evaluate_own_parts("server", FEDAVG, validation=0.3))


def test_the_cut_into_training_and_test_depends_on_the_partition_seed_only():
    def deal_test_parts(seed, partition_seed):
        _, fed, _ = with_evaluation("clients", rounds=0, seed=seed, partition_seed=partition_seed)
        return [part.tolist() for part in fed.testing]

    examples = deal_test_parts(seed=0, partition_seed=0)
    assert deal_test_parts(seed=1, partition_seed=0) == examples
    assert deal_test_parts(seed=0, partition_seed=7) != examples


def test_domains_are_measured_inside_and_outside():
    data = domain_dataset()
    parts = [np.arange(13), np.arange(13, 20), np.arange(20, 30), np.arange(30, 34)]
    setup, fed, state = with_evaluation("domains", data=data, parts=parts)
    assert fed.domain_of.tolist() == [0, 1, 2, 2]

    matrix = np.zeros((4, 3))  # accuracy of each client in each domain
    for client, domain in np.ndindex(4, 3):
        is_of_domain = fed.test_domains == domain
        model = state.clients[client]
        matrix[client, domain] = accuracy(fed, model, fed.test_images[is_of_domain], fed.test_labels[is_of_domain])

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
    domain_of_client = fed.domain_of[client]
    domain = fed.test_domains[image]
    if domain_of_client == domain:
        return 0.0
    clients_of_domain = (fed.domain_of == domain_of_client).sum()
    other_domains = 2
    images_of_domain = int((fed.test_domains == domain).sum())
    return 1 / (clients_of_domain * other_domains * images_of_domain)


@pytest.mark.parametrize(
    ("tested_on", "method"),
    [
        ("server", "fedavg"),
        ("server", "local"),
        ("clients", "fedavg"),
        ("clients", "local"),
        ("domains", "fedavg"),
        ("domains", "local"),
    ],
)
def test_counts_of_classes_give_the_headline_and_the_scores_of_scikit_learn(tested_on, method):
    is_by_domain = tested_on == "domains"
    data = {"data": domain_dataset(), "parts": OWN_DOMAINS} if is_by_domain else {}
    setup, fed, state = with_evaluation(tested_on, find_method(method), per_class=True, **data)

    result = evaluation.evaluate(fed, setup.method, state)
    counts = result["per_class"]
    assert sum(counts["right"]) / sum(counts["actual"]) == pytest.approx(result["test_accuracy"])

    true = []
    predicted = []
    weights = []
    has_one_model = tested_on == "server" and method == "fedavg"
    tested_clients = [0] if has_one_model else range(4)
    for client in tested_clients:
        network, *model = evaluation.model_to_test(fed, setup.method, state, client)
        index = fed.testing[client] if tested_on == "clients" else None
        _, logits, labels = fed.predict(*model, index, network)
        true += labels.tolist()
        predicted += logits.argmax(1).tolist()
        for image in range(len(labels)):
            weights.append(weight_under_domains(fed, client, image) if is_by_domain else 1.0)
    expected = np.bincount(predicted, weights, 3)
    if is_by_domain:
        expected *= 20 / 3  # the weights of three domains sum to 3, the counts to the 20 test images
    assert counts["predicted"] == pytest.approx(expected)

    f1 = f1_score(true, predicted, average="macro", sample_weight=weights)
    assert record_numbers.macro_f1(counts) == pytest.approx(f1)

    balanced = balanced_accuracy_score(true, predicted, sample_weight=weights)
    assert record_numbers.balanced_accuracy(counts) == pytest.approx(balanced)


def test_counts_of_classes_are_by_the_rule_of_the_headline():
    setup, fed, state = with_evaluation("server", find_method("fedproto"), per_class=True, cohort_size=2)
    result = evaluation.evaluate(fed, setup.method, state)
    counts = result["per_class"]
    assert sum(counts["right"]) / sum(counts["actual"]) == pytest.approx(result["test_accuracy"])
    assert result["test_accuracy"] != result["classifier_accuracy"]
    _, other, _ = with_evaluation("server", find_method("fedproto"), cohort_size=2)
    assert "per_class" not in evaluation.evaluate(other, setup.method, state)


# Models that have not changed


def count_predictions(fed, monkeypatch):
    """The numbers of images that models are run on from now on."""
    predict = fed.predict
    counts = []

    def counting(*arguments, **options):
        outputs = predict(*arguments, **options)
        _, _, labels = outputs
        counts.append(len(labels))
        return outputs

    monkeypatch.setattr(fed, "predict", counting)
    return counts


@pytest.mark.parametrize(("tested_on", "method"), [("server", "local"), ("clients", "local"), ("clients", "fedproto")])
def test_only_changed_models_are_run_again(tested_on, method, monkeypatch):
    setup, fed, state = with_evaluation(tested_on, find_method(method), cohort_size=2, validation=0.2)
    _, other, _ = with_evaluation(
        tested_on, find_method(method), cohort_size=2, validation=0.2
    )  # which remembers nothing
    tests = [fed.test_labels] * 4 if tested_on == "server" else fed.testing
    counts = count_predictions(fed, monkeypatch)

    def assert_run(clients):
        """These clients' models alone are run, and the accuracies are those of a federation that remembers nothing."""
        counts.clear()  # what the round itself asks
        fresh = evaluation.evaluate(other, setup.method, tree_map(torch.Tensor.clone, state))
        assert evaluation.evaluate(fed, setup.method, state) == fresh
        expected = []
        for client in clients:
            expected += [len(tests[client]), len(fed.validation[client])]
        assert sorted(counts) == sorted(size for size in expected if size)

    assert_run(range(4))
    assert_run([])

    for number in (1, 2):
        state, _ = laws.method_round(setup, fed, state, fed.cohort(number))
        assert_run(fed.cohort(number).client_ids)


@pytest.mark.parametrize("change", ["in place", "replaced", "clients"])
def test_a_model_that_changes_in_any_way_is_run_again(change, monkeypatch):
    setup, fed, state = with_evaluation("clients", data=toy.toy_dataset(num_train=34))
    _, other, _ = with_evaluation("clients", data=toy.toy_dataset(num_train=34))
    before = evaluation.evaluate(fed, setup.method, state)
    counts = count_predictions(fed, monkeypatch)

    first_client = state.clients[0]
    second_client = state.clients[1]
    bias = second_client.params["head.bias"]
    if change == "in place":
        bias[0] += 100
    elif change == "replaced":
        state.clients[1] = second_client._replace(params={**second_client.params, "head.bias": bias.flip(0)})
    else:
        state.clients[0] = second_client
        state.clients[1] = first_client

    changed = evaluation.evaluate(other, setup.method, tree_map(torch.Tensor.clone, state))
    assert evaluation.evaluate(fed, setup.method, state) == changed
    assert len(counts) == (2 if change == "clients" else 1)
    if change != "replaced":
        assert changed != before


@pytest.mark.parametrize("tested_on", ["server", "clients"])
def test_a_global_model_that_has_not_changed_is_not_run_again(tested_on, monkeypatch):
    setup, fed, state = with_evaluation(tested_on, FEDAVG, validation=0.2)
    before = evaluation.evaluate(fed, setup.method, state)
    counts = count_predictions(fed, monkeypatch)
    assert evaluation.evaluate(fed, setup.method, state) == before
    assert counts == []


def test_a_state_that_is_in_no_memory_is_read_once_for_each_of_its_tests(monkeypatch, tmp_path):
    setup, fed, state = with_evaluation("server")
    before = evaluation.evaluate(fed, setup.method, state)
    store = client_states.Store(0, fed.device, [type(state.clients[0])])
    store.keep_files_in(tmp_path)
    state = state._replace(clients=store.keep({}, dict(state.clients), 0))
    load_tree = client_states.load_tree
    files = []

    def counting(file, *arguments, **options):
        files.append(file)
        return load_tree(file, *arguments, **options)

    monkeypatch.setattr(client_states, "load_tree", counting)
    for _ in range(2):
        files.clear()
        assert evaluation.evaluate(fed, setup.method, state) == before
        assert len(files) == fed.num_clients
