"""FedFM's equations against slow loops and hand numbers, its schedule, its variants, its costs and its tables."""

import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.core import partition
from fedcli.core.clients import Client
from fedcli.core.trees import select, stack
from fedcli.declarations import Sizes
from fedcli.papers import fedfm
from fedcli.papers.baselines import fedavg
from fedcli.papers.fedfm import aggregate_anchors, contrastive_guiding, l2_guiding, plain_l2_guiding
from fedcli.registry import find_method, find_protocol
from fedcli.results.comparison import reported
from fedcli.runs.config import resolve
from tests import laws

FEDFM = find_method("fedfm")


def example(seed=0, samples=7, num_classes=4, width=5):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, width, dtype=torch.float64, generator=draw)
    anchors = 3 * torch.randn(num_classes, width, dtype=torch.float64, generator=draw)
    return features, torch.randint(0, num_classes, (samples,), generator=draw), anchors


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_contrastive_guiding_is_the_cross_entropy_of_cosines(temperature):
    features, labels, anchors = example()
    scores = F.cosine_similarity(features[:, None], anchors, dim=-1) / temperature
    expected = F.cross_entropy(scores, labels)
    torch.testing.assert_close(contrastive_guiding(features, labels, anchors, temperature), expected)


def test_l2_guiding_is_of_unit_vectors_over_the_width_and_of_plain_ones_as_eq_3_prints_it():
    features, labels, anchors = example()
    normalised = F.mse_loss(F.normalize(features), F.normalize(anchors)[labels])
    torch.testing.assert_close(l2_guiding(features, labels, anchors), normalised)
    printed = (features - anchors[labels]).square().sum(1).mean()
    torch.testing.assert_close(plain_l2_guiding(features, labels, anchors), printed)


@pytest.mark.parametrize("guiding", [lambda *a, **k: contrastive_guiding(*a, 0.1, **k), l2_guiding, plain_l2_guiding])
class TestGuiding:
    def test_masked_samples_do_not_count(self, guiding):
        features, labels, anchors = example()
        mask = torch.tensor([True, False, True, True, False, True, True])
        kept = guiding(features[mask], labels[mask], anchors)
        padded = torch.where(mask[:, None], features, torch.nan).requires_grad_()
        masked = guiding(padded, labels, anchors, mask=mask)
        torch.testing.assert_close(masked, kept)
        masked.backward()
        assert torch.isfinite(padded.grad[mask]).all()

    def test_a_class_without_anchor_is_left_out(self, guiding):
        features, labels, anchors = example()
        labels[:] = torch.tensor([0, 1, 3, 2, 0, 3, 1])
        has_class = torch.tensor([True, True, False, True])
        keep = labels != 2
        renumbered = torch.where(labels == 3, 2, labels)
        expected = guiding(features[keep], renumbered[keep], anchors[has_class])
        anchors[2] = 0
        torch.testing.assert_close(guiding(features, labels, anchors, has_class=has_class), expected)
        none = torch.zeros(4, dtype=torch.bool)
        assert guiding(features, labels, anchors, has_class=none) == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("length", [0.0, 1e-20, 1e-8])
    def test_a_feature_without_direction_has_a_bounded_gradient(self, guiding, dtype, length):
        features, labels, anchors = (value.to(dtype) if value.is_floating_point() else value for value in example())
        features[2] = length
        features.requires_grad_()
        guiding(features, labels, anchors).backward()
        assert torch.isfinite(features.grad).all()
        assert features.grad.abs().max() < 100
        assert features.grad[[0, 1, 3]].abs().max() > 0

    def test_gradient_is_the_difference_quotient(self, guiding):
        features, labels, anchors = example()
        assert torch.autograd.gradcheck(lambda f: guiding(f, labels, anchors), features.requires_grad_())


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [  # a client without the class counts for nothing, or for the previous anchor
        ("weighted", [[2.5, 4.0], [7.0, 7.0], [4.0, 0.0]]),
        ("uniform", [[2.0, 3.0], [7.0, 7.0], [5.5, 3.5]]),
    ],
)
def test_anchors_by_hand(weighting, expected):
    means = torch.tensor([[[1.0, 1.0], [9.0, 9.0], [4.0, 0.0]], [[3.0, 5.0], [9.0, 9.0], [torch.nan, torch.nan]]])
    counts = torch.tensor([[1, 0, 2], [3, 0, 0]])
    assert aggregate_anchors(means, counts, torch.full((3, 2), 7.0), weighting).tolist() == expected


def class_means(fed, models):
    """Means of the features of each class, in evaluation mode, over the training parts of clients with these models."""
    found = [fed.predict(*model, fed.training[client]) for client, model in models.items()]
    features, _, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return torch.stack([features[labels == label].mean(0) for label in range(fed.num_classes)])


def test_weighted_anchors_are_the_class_means_of_all_training_parts_by_the_received_model():
    run = {"data": laws.toy_dataset(num_train=16, channels=3), "parts": laws.toy_parts((6, 5, 3, 2)), "validation": 0.2}
    setup, fed = laws.federation(FEDFM, backbone=laws.NORMED, local_epochs=1, **run)
    assert sum(map(len, fed.training)) == 14  # two are held out
    state = setup.method.init(fed, setup.options)
    after, _ = setup.method.run_round(state, fed.cohort(0), fed, setup.options)
    torch.testing.assert_close(after.anchors, class_means(fed, dict.fromkeys(range(4), (state.params, state.buffers))))
    assert after.has_anchor.all()


def test_rounds_before_start_round_are_fedavg_and_that_round_is_not():
    options = {"start_round": 2, "match_weight": 1.0}
    ours, base = laws.federation(FEDFM, options), laws.federation("fedavg")
    for rounds in (1, 2):
        laws.assert_agree(laws.simulate(*ours, rounds).params, laws.simulate(*base, rounds).params, "before T_s")
    assert laws.distance(laws.simulate(*ours, 3).params, laws.simulate(*base, 3).params) > 1e-6


@pytest.mark.parametrize(
    ("protocol", "dataset", "classes", "counts"),
    [
        ("fedfm:niid-2", "cifar10", 10, {300: 9, 2300: 1}),
        ("fedfm:niid-2", "cinic10", 10, {500: 9, 4500: 1}),
        ("fedfm:niid-2", "cifar100", 100, {30: 90, 230: 10}),
        ("fedfm:niid-3", "cifar10", 10, {0: 3, 714: 7}),
    ],
)
def test_partitions_of_the_protocols_have_the_papers_sizes(protocol, dataset, classes, counts):
    chosen = find_protocol(protocol, FEDFM)
    flag = {**chosen.settings, **chosen.datasets[dataset].settings}["partition"]
    images = {"cinic10": 90_000}.get(dataset, 50_000)
    labels = np.repeat(np.arange(classes), images // classes)
    parts = partition.from_flag(flag)(labels, 10, 0)
    for row in partition.count_classes(parts, labels, classes):
        sizes, times = np.unique(row, return_counts=True)
        assert dict(zip(sizes.tolist(), times.tolist(), strict=True)) == counts


def test_the_papers_values_are_the_defaults(monkeypatch):
    monkeypatch.setattr("fedcli.data.datasets.available", lambda name: None)
    setup = resolve(FEDFM, {"dataset": "cifar10"})
    assert setup.protocol.name == "fedfm:niid-1"
    assert setup.options == FEDFM.config(50.0, 0.1, 20, "contrastive", "weighted")
    run = setup.run
    assert (run.rounds, run.local_epochs, run.batch_size, run.lr, run.momentum) == (100, 10, 64, 0.01, 0.9)
    assert (run.weight_decay, run.validation, run.drop_last, run.backbone) == (1e-5, 0.2, True, "resnet18")
    assert (run.num_clients, run.cohort_size, setup.selection) == (10, 10, "best-validation")


# FedFM-Lite

LITE = find_method("fedfm-lite")
TERMS_ON = {"start_round": 0, "match_weight": 1.0}


def lite(interval, options=None, **run):
    return laws.federation(LITE, {**TERMS_ON, "model_interval": interval, **(options or {})}, **run)


def rounds_of(setup, fed, cohorts):
    """The states after each round, the initial one first, and the rounds' terms."""
    states, terms = [setup.method.init(fed, setup.options)], []
    for number, clients in enumerate(cohorts):
        state, found = setup.method.run_round(states[-1], fed.cohort_of(number, clients), fed, setup.options)
        states.append(state)
        terms.append(found)
    return states, terms


EVERYONE = [0, 1, 2, 3]


def test_lite_exchanges_models_after_every_interval_and_after_the_last_round():
    setup, fed = lite(2, rounds=5)
    states, _ = rounds_of(setup, fed, [EVERYONE] * 5)
    changed = [laws.distance(after.params, before.params) > 0 for before, after in pairwise(states)]
    assert changed == [False, True, False, True, True]
    weights = fed.cohort(0).weights
    for number in (2, 4, 5):
        kept = states[number].clients
        mean = {name: sum(w * kept[k].params[name] for k, w in enumerate(weights)) for name in states[0].params}
        laws.assert_agree(states[number].params, mean, f"the model after round {number - 1}")


def test_a_client_that_is_new_since_the_last_exchange_begins_with_the_global_model():
    setup, fed = lite(2, {"match_weight": 0.0}, cohort_size=2, rounds=9)
    states, _ = rounds_of(setup, fed, [[0, 1], [1, 2], [0, 3], [0, 1]])
    assert [sorted(state.clients) for state in states] == [[], [0, 1], [0, 1, 2], [0, 3], [0, 1, 3]]

    def trained(number, clients, start):
        cohort = fed.cohort_of(number, clients)
        return fed.train(fed.broadcast(*start, cohort), cohort, fedavg.make_local_loss(fed.network))[0].params

    for number, client, state in ((1, 2, states[1]), (2, 0, states[2]), (3, 1, states[3])):
        expected = select(trained(number, [client], (state.params, state.buffers)), 0)
        laws.assert_agree(states[number + 1].clients[client].params, expected, f"client {client} in round {number}")
    second = [states[2].clients[client].params for client in (1, 2)]  # the exchange's own clients: 7 and 10 examples
    mean = {name: (7 * one + 10 * second[1][name]) / 17 for name, one in second[0].items()}
    laws.assert_agree(states[2].params, mean, "the model of the exchange")


def test_lite_anchors_are_class_means_by_the_trained_local_models():
    setup, fed = lite(2)
    states, terms = rounds_of(setup, fed, [EVERYONE] * 2)
    for state in states[1:]:
        torch.testing.assert_close(state.anchors, class_means(fed, state.clients))
    assert terms[0]["matching"].tolist() == [0] * 4  # no class has an anchor before the first hand-shake
    assert (terms[1]["matching"] > 0).all()


def test_between_exchanges_a_client_goes_on_from_its_own_model_with_a_new_optimizer_and_the_last_anchors():
    run = {"data": laws.toy_dataset(num_train=12, channels=3), "parts": laws.toy_parts((3, 2, 4, 3))}
    setup, fed = lite(3, backbone=laws.NORMED, local_epochs=1, **run)
    (_, first, second), _ = rounds_of(setup, fed, [EVERYONE] * 2)
    own = stack([first.clients[k] for k in EVERYONE])
    context = fedfm.Context(first.anchors, first.has_anchor, torch.tensor(1.0, dtype=fed.dtype))
    local_loss = fedfm.make_local_loss(fed.network, setup.options)
    trained, _ = fed.train(Client(*own, optimizer={}), fed.cohort_of(1, EVERYONE), local_loss, context)
    after = stack([second.clients[k] for k in EVERYONE])
    laws.assert_agree(tuple(after), (trained.params, trained.buffers), "round 1")


def test_lite_matches_from_start_round_on_and_with_an_interval_of_1_is_not_fedfm():
    late, off = lite(1, {"start_round": 2}), lite(1, {"match_weight": 0.0})
    laws.assert_agree(laws.simulate(*late, 2).params, laws.simulate(*off, 2).params, "before T_s")
    assert laws.distance(laws.simulate(*late, 3).params, laws.simulate(*off, 3).params) > 1e-6
    ours, fedfms = laws.simulate(*lite(1), 2).params, laws.simulate(*laws.federation(FEDFM, TERMS_ON), 2).params
    assert laws.distance(ours, fedfms) > 1e-6


# Feature matching as an add-on

ADD_ONS = {"fedprox-fm": {"proximal_weight": 0.0}, "moon-fm": {"contrastive_weight": 0.0}}


@pytest.mark.parametrize("name", ADD_ONS)
def test_an_add_on_without_the_other_method_is_fedfm(name):
    ours = laws.simulate(*laws.federation(name, {**TERMS_ON, **ADD_ONS[name]}), 3)
    fedfms = laws.simulate(*laws.federation(FEDFM, TERMS_ON), 3)
    for part in ("params", "anchors", "has_anchor"):
        laws.assert_agree(getattr(ours, part), getattr(fedfms, part), part)


def test_fednova_with_matching_is_fedfm_where_clients_take_equally_many_steps():
    run = {"parts": laws.toy_parts((4, 4, 4, 4))}
    ours = laws.simulate(*laws.federation("fednova-fm", TERMS_ON, **run), 2)
    laws.assert_agree(ours.params, laws.simulate(*laws.federation(FEDFM, TERMS_ON, **run), 2).params, "equal steps")
    unequal = [laws.simulate(*laws.federation(name, TERMS_ON), 2).params for name in ("fednova-fm", "fedfm")]
    assert laws.distance(*unequal) > 1e-6


# The costs of Tables III, IV and VI

SIZES = {"CIFAR-10": Sizes(11_181_642, 10, 512), "CIFAR-100": Sizes(23_705_252, 100, 2048)}


def printed(table, row, column):
    rows = reported()["FedFM"][table]["rows"]
    return next(entry["mean"] for entry in rows if (entry["method"], entry["column"]) == (row, column))


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedProx", "SCAFFOLD", "FedDyn", "FedNova", "MOON", "FedFM"])
def test_the_floats_that_the_tables_print(name):
    """The paper multiplies the models' 11,182 thousand and 23.7 million, and with FedFM's anchors 23.9 million."""
    method = find_method(name.lower())
    sent = {}
    for data, sizes in SIZES.items():
        fed = SimpleNamespace(sizes=sizes, num_classes=sizes.num_classes, feature_dim=sizes.feature_dim)
        _, sent[data] = method.costs(None, SimpleNamespace(client_ids=[0]), fed, method.config())
        memory = method.client_memory(sizes)
        assert abs(memory / 1000 - printed("Table III", name, f"{data} memory_1e3_floats")) < 2
    assert abs(sent["CIFAR-10"] / 1000 - printed("Table IV", name, "bandwidth_1e3_floats")) < 1
    for clients in (20, 30, 50, 100):  # 100 rounds
        total = printed("Table VI", name, f"K={clients} bandwidth_1e8_floats")
        assert total == pytest.approx(100 * clients * sent["CIFAR-100"] / 1e8, rel=6e-4)


@pytest.mark.parametrize("protocol", fedfm.PROTOCOLS, ids=lambda protocol: protocol.name)
def test_fedavgm_is_damped_under_the_papers_protocols(protocol):
    if protocol.name in ("fedfm:motivation", "fedfm:digits"):  # it is not compared there; not from the paper
        return
    method = find_method("fedavgm")
    for dataset in protocol.datasets:
        options = resolve(method, {"protocol": protocol.name, "dataset": dataset}, need_data=False).options
        assert options.server_lr == pytest.approx(1 - options.server_momentum)


def test_the_card_has_all_readings_that_the_code_names():
    numbered = {int(number) for number in re.findall(r"(?m)^    (\d+)\. ", fedfm.__doc__)}
    named = re.findall(r"Readings? (\d+)", Path(fedfm.__file__).read_text())
    assert numbered == set(range(1, 18)) >= set(map(int, named))


def test_the_means_of_plain_features_minimise_eq_3_and_not_its_normalised_form():
    """What Lemma 2 needs, on two clients and three classes."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(2, 6, 4, dtype=torch.float64, generator=draw) * torch.tensor([1.0, 9.0])[:, None, None]
    labels = torch.tensor([[0, 1, 2, 0, 1, 1], [2, 1, 0, 0, 2, 2]])
    means = torch.stack([torch.stack([own[of == c].mean(0) for c in range(3)])
                         for own, of in zip(features, labels, strict=True)])  # fmt: skip
    counts = torch.stack([torch.bincount(of, minlength=3) for of in labels])
    anchors = aggregate_anchors(means, counts, torch.zeros(3, 4).double()).requires_grad_()

    def slope(guiding):
        losses = [guiding(own, of, anchors) for own, of in zip(features, labels, strict=True)]
        return torch.autograd.grad(sum(losses) / 2, anchors)[0].abs().max()

    assert slope(fedfm.plain_l2_guiding) < 1e-12
    assert slope(l2_guiding) > 1e-3
