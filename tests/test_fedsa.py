"""FedSA, FedTGP and FedGen: equations against plain loops and hand numbers, rounds and servers against plain torch."""

import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli import toy
from fedcli.core.draws import generator
from fedcli.core.trees import tree_map
from fedcli.papers import fedsa
from fedcli.papers.baselines import fedgen, fedtgp
from tests import laws
from tests.plain_loops import Model, means_by_class, train_plainly
from tests.tensors import randn

C, D = 4, 5

# FedSA

LABELS = torch.tensor([0, 1, 2, 2, 0, 2, 1])  # class 3 is absent


def test_regularization_of_the_code_is_a_mean_of_squares():
    features = randn(7, D)
    anchors = randn(C, D, seed=1)
    ours = fedsa.regularization(features, LABELS, anchors, form="code")
    torch.testing.assert_close(ours, F.mse_loss(features, anchors[LABELS]))


def test_no_loss_is_nan_where_a_feature_is_its_anchor():
    anchors = randn(C, D)
    for loss in (
        fedsa.regularization,
        lambda *given: fedsa.regularization(*given, form="code"),
        lambda *given: fedsa.margin_contrastive(*given, margin=2.0),
    ):
        features = anchors[LABELS].clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(features, LABELS, anchors), features)
        assert torch.isfinite(grad).all()
    assert fedsa.regularization(anchors, torch.arange(C), anchors).item() == 0


def test_margins_are_mean_distances_to_the_nearest_anchor_or_over_all_pairs():
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 16.0]]).double()
    far = math.hypot(3, 16)  # the others: 5, 12
    everyone = torch.ones(3, dtype=torch.bool)
    pair = torch.tensor([True, False, True])
    assert fedsa.separation(points, everyone).item() == pytest.approx((5 + 5 + 12) / 3)
    assert fedsa.separation(points, everyone, "pairs").item() == pytest.approx((5 + 12 + far) / 3)
    assert fedtgp.adaptive_margin(points, everyone, 100.0).item() == pytest.approx(12)
    assert fedtgp.adaptive_margin(points, everyone, 100.0, "pairs").item() == pytest.approx(far)

    alone = torch.tensor([False, True, False])
    nobody = ~everyone
    for form in ("nearest", "pairs"):
        assert fedtgp.adaptive_margin(points, everyone, 10.0, form).item() == 10
        assert fedsa.separation(points, pair, form).item() == pytest.approx(far)
        assert fedtgp.adaptive_margin(points, pair, 100.0, form).item() == pytest.approx(far)
        for few in (alone, nobody):
            assert fedsa.separation(points, few, form).item() == 0
            assert fedtgp.adaptive_margin(points, few, 10.0, form).item() == 0


def test_semantic_anchors_are_one_pass_through_the_embedding():
    dim = 512
    draw = np.random.default_rng(3)
    points = torch.from_numpy(draw.standard_normal((C, dim)))
    linear = [nn.Linear(dim, dim).double() for _ in range(2)]  # their biases are torch's own and must not matter
    for layer in linear:
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(draw.uniform(-(dim**-0.5), dim**-0.5, (dim, dim))))
    norms = [nn.BatchNorm1d(dim).double() for _ in range(2)]
    embedding = nn.Sequential(linear[0], norms[0], nn.ReLU(), linear[1], norms[1], nn.ReLU())
    assert sum(value.numel() for value in embedding.parameters()) == 527_360

    anchors = fedsa.semantic_anchors(C, dim, np.random.default_rng(3))
    torch.testing.assert_close(anchors, embedding(points).detach(), rtol=0, atol=1e-9)
    assert not anchors.requires_grad
    torch.testing.assert_close(fedsa.class_anchors(C, dim, np.random.default_rng(3)), points)


def test_global_prototypes_are_means_over_clients_or_examples():
    local = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[3.0, 5.0], [0.0, 0.0]]])
    counts = torch.tensor([[1, 0], [3, 0]])
    assert fedsa.aggregate_prototypes(local, counts).tolist() == [[2, 3], [0, 0]]
    assert fedsa.aggregate_prototypes(local, counts, "examples").tolist() == [[2.5, 4], [0, 0]]


def plain_margin(points):
    """The mean distance of a point from the nearest other one."""
    if len(points) < 2:
        return 0.0
    nearest = []
    for number, point in enumerate(points):
        others = [*points[:number], *points[number + 1 :]]
        nearest.append(min(float((point - other).norm()) for other in others))
    return float(np.mean(nearest))


class Shared(NamedTuple):
    """What all clients of FedSA share."""

    anchors: torch.Tensor  # [C, D]
    prototypes: dict[int, torch.Tensor]  # [D] each, by the classes that the last round's clients have


class PlainFedSAObjective:
    """The local objective of one client by plain torch, which gathers the client's features by their classes."""

    def __init__(self, config, anchors, margin):
        self.config = config
        self.anchors = anchors
        self.margin = margin
        self.gathered = {c: [] for c in range(len(anchors))}

    def __call__(self, module, features, logits, y):
        for feature, label in zip(features.detach(), y.tolist(), strict=True):
            self.gathered[label].append(feature)
        classes = torch.arange(len(self.anchors))
        regularization = sum((features[y == c].mean(0) - self.anchors[c]).norm() for c in y.unique())
        distances = torch.cdist(features, self.anchors) + self.margin * F.one_hot(y, len(classes))
        contrastive = F.cross_entropy(-distances, y)
        calibration = F.cross_entropy(module.head(self.anchors), classes)
        return (
            F.cross_entropy(logits, y)
            + self.config.regularization_weight * regularization
            + self.config.contrastive_weight * contrastive
            + self.config.calibration_weight * calibration
        )


def plain_fedsa_client(fed, setup, round, client, before, anchors):
    """A client's state after a round by plain torch, and its prototypes by class."""
    margin = max(before.margin.item(), plain_margin(list(anchors)))
    objective = PlainFedSAObjective(setup.method_config, anchors, margin)
    params, buffers = train_plainly(fed, round, client, Model(before.params, before.buffers), objective)
    prototypes = means_by_class(objective.gathered)
    own_margin = torch.tensor(plain_margin(list(prototypes.values())))
    return fedsa.ClientState(params, buffers, own_margin), prototypes


def plain_fedsa_round(fed, setup, round, kept, shared):
    """One round of all clients by plain torch; returns what the clients keep and what they share."""
    newcomer = fedsa.ClientState(*fed.initial_model(), margin=torch.tensor(0.0))
    sent = {c: [] for c in range(fed.num_classes)}
    after = {}
    for client in range(fed.num_clients):
        before = kept.get(client, newcomer)
        after[client], own_prototypes = plain_fedsa_client(fed, setup, round, client, before, shared.anchors)
        for c, prototype in own_prototypes.items():
            sent[c].append(prototype)

    prototypes = means_by_class(sent)
    decay = setup.method_config.anchor_decay
    moved = shared.anchors.clone()
    for c, prototype in prototypes.items():
        moved[c] = decay * shared.anchors[c] + (1 - decay) * prototype
    return after, Shared(moved, prototypes)


def fedsa_of_unequal_clients(drop_last):
    """A setup of FedSA and its federation, of which the second and the third client have one class."""
    parts = [np.array([0, 3, 1, 6, 4, 5, 8, 11, 14, 2]), np.array([7, 10, 13, 16, 19]), np.array([9, 12]),
             np.array([15, 18, 21, 24, 22])]  # fmt: skip
    weights = {"regularization_weight": 0.3, "contrastive_weight": 0.5, "calibration_weight": 0.7, "anchor_decay": 0.1}
    return toy.federation("fedsa", weights, parts=parts, drop_last=drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
def test_three_rounds_of_fedsa_are_those_of_a_plain_loop(drop_last):
    setup, fed = fedsa_of_unequal_clients(drop_last)

    def shared_of(state):
        return Shared(state.anchors, {c: state.prototypes[c] for c in range(3) if state.has_class[c]})

    first = laws.initial_state(setup, fed).anchors
    state = laws.assert_rounds_agree(setup, fed, plain_fedsa_round, Shared(first, prototypes={}), shared_of)
    assert state.clients[1].margin == 0
    assert state.clients[2].margin == 0


def test_after_two_rounds_either_margin_of_fedsa_is_the_larger_one_of_some_client():
    second = toy.simulate(*fedsa_of_unequal_clients(drop_last=False), 2)
    assert second.clients[3].margin > plain_margin(list(second.anchors)) > second.clients[0].margin > 0


# FedTGP

NOBODY = np.array([], int)


class PlainServerNetwork(nn.Module):
    """The server's network as a torch module, which gives the global prototypes."""

    def __init__(self, params):
        super().__init__()
        classes, width = params["vectors"].shape
        self.vectors = nn.Parameter(torch.zeros(classes, width))
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.double().load_state_dict(params)

    def forward(self):
        return self.out(self.hidden(self.vectors).relu())


def test_fedtgps_network_is_the_authors():
    params = fedtgp.initial_network(100, 512, np.random.default_rng(0))
    assert sum(value.numel() for value in params.values()) == 576_512
    assert abs(params.pop("vectors").std() - 1) < 0.02
    assert all(0.9 < value.abs().max() * 512**0.5 <= 1 for value in params.values())


def test_fedtgps_server_trains_by_sgd_on_the_cross_entropy_of_distances_with_a_margin():
    draw = np.random.default_rng(0)
    prototypes = torch.from_numpy(draw.standard_normal((11, 3)))
    labels = torch.tensor([0, 1, 3] * 3 + [0, 1])
    params = fedtgp.initial_network(C, 3, draw)
    order = [draw.permutation(11) for _ in range(3)]
    network = PlainServerNetwork(params)
    torch.testing.assert_close(fedtgp.global_prototypes(params), network().detach())

    optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
    for epoch in order:
        for index in (epoch[:4], epoch[4:8], epoch[8:]):
            distances = torch.cdist(prototypes[index], network())
            loss = F.cross_entropy(-distances - 0.5 * F.one_hot(labels[index], C), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    config = fedtgp.Config(server_batch_size=4, server_lr=0.3)
    trained = fedtgp.train_network(params, prototypes, labels, torch.tensor(0.5).double(), order, config)
    laws.assert_agree(trained, dict(network.state_dict()), "the network")


def means_of(fed, client, model):
    """A client's class means under a model in evaluation mode, and their classes."""
    features, _, labels = fed.predict(*model, fed.training[client])
    classes = labels.unique().tolist()
    return [features[labels == label].mean(0) for label in classes], classes


def test_a_round_of_fedtgp_trains_on_the_class_means_of_the_trained_models():
    parts = [np.array([0, 3, 1, 6, 4]), np.array([7, 10, 13]), np.array([12, 15]), NOBODY]
    options = {"server_epochs": 3, "server_batch_size": 2}
    setup, fed = toy.federation("fedtgp", options, parts=parts)
    first = laws.initial_state(setup, fed)
    first = first._replace(network={name: 0.9 * value for name, value in first.network.items()})  # of an earlier round
    state, _ = laws.method_round(setup, fed, first, fed.cohort(0))
    means = []
    labels = []
    for client in range(3):
        own_means, own_labels = means_of(fed, client, state.clients[client])
        means += own_means
        labels += own_labels
    assert labels == [0, 1, 1, 0]

    first_0, first_1, second_1, third_0 = means
    margin = ((first_0 + third_0) / 2 - (first_1 + second_1) / 2).norm()
    order = [generator(fed.config.seed, 0, "server order", epoch).permutation(4) for epoch in range(3)]
    expected = fedtgp.train_network(
        first.network, torch.stack(means), torch.tensor(labels), margin, order, setup.method_config
    )
    laws.assert_agree(state.network, expected, "the server's network")

    prototypes, has_prototype = setup.method.prototypes(state)
    assert torch.equal(prototypes, fedtgp.global_prototypes(state.network))
    assert has_prototype.all()


def test_without_any_prototype_fedtgps_network_stays():
    parts = [NOBODY, np.array([0, 1, 2]), np.array([3]), np.array([4])]
    setup, fed = toy.federation("fedtgp", parts=parts, cohort_size=1)
    first = toy.simulate(setup, fed, 0, [[0]])
    state = toy.simulate(setup, fed, 1, [[0]])
    laws.assert_agree(state.network, first.network, "the server's network")
    assert not state.has_prototype.any()


@pytest.fixture
def given_to_the_server(monkeypatch):
    """Prototypes and margin of each training of the server, which does not take place."""
    calls = []

    def train_network(network, prototypes, labels, margin, order, config):
        calls.append(SimpleNamespace(prototypes=prototypes, margin=float(margin)))
        return network

    monkeypatch.setattr(fedtgp, "train_network", train_network)
    return calls


def test_the_code_form_sends_prototypes_of_the_model_before_training(given_to_the_server):
    """The authors' order of steps: load the model, train it, collect prototypes by the stored model, store it."""
    parts = [np.array([0, 3, 1]), np.array([7, 10, 13, 2]), NOBODY, NOBODY]
    setup, fed = toy.federation("fedtgp", {"form": "code"}, parts=parts)
    state = laws.initial_state(setup, fed)
    stored = dict.fromkeys(range(2), fed.initial_model())
    for round, cohort in enumerate([[0, 1], [0], [0, 1]]):  # client 1 sits a round out, what it has stored is older
        state, _ = laws.method_round(setup, fed, state, fed.cohort_of(round, cohort))
        expected = []
        for client in cohort:
            means, _ = means_of(fed, client, stored[client])
            expected += means
            stored[client] = state.clients[client]
        sent = given_to_the_server[round].prototypes
        laws.assert_agree(sent, torch.stack(expected), f"what is sent in round {round}")


@pytest.mark.parametrize(("form", "margin"), [("paper", 0.0), ("code", 7.0)])
def test_the_margin_of_a_single_class_is_the_threshold_in_the_code_form(form, margin, given_to_the_server):
    setup, fed = toy.federation("fedtgp", {"form": form, "margin_threshold": 7.0}, parts=[np.array([0, 3])] * 4)
    toy.simulate(setup, fed, 1)
    (call,) = given_to_the_server
    assert call.margin == margin


# FedGen

COUNTS = torch.tensor([3, 0, 1])


def initial_generator(num_classes=3, dim=5):
    first = fedgen.initial_generator(num_classes, dim, np.random.default_rng(0))
    return tree_map(torch.Tensor.double, first)


def plain_generator(fedgens):
    """The generator as a module."""
    params, buffers = fedgens
    width, num_inputs = params["hidden.weight"].shape
    dim, _ = params["out.weight"].shape
    layers = {
        "hidden": nn.Linear(num_inputs, width), "norm": nn.BatchNorm1d(width), "relu": nn.ReLU(),
        "out": nn.Linear(width, dim),
    }  # fmt: skip
    module = nn.Sequential(OrderedDict(layers)).double()
    statistics = {"norm.running_mean": buffers["norm.mean"], "norm.running_var": buffers["norm.var"]}
    module.load_state_dict({**params, **statistics, "norm.num_batches_tracked": torch.tensor(0)})
    return module


def inputs(noise, labels, num_classes=3):
    return torch.cat([noise, F.one_hot(labels, num_classes).double()], 1)


def test_fedgens_size_is_that_of_fedsa():
    params = fedgen.initial_generator(100, 512, np.random.default_rng(0)).params
    assert sum(value.numel() for value in params.values()) == 331_776
    assert params["hidden.weight"].abs().max() <= 132**-0.5
    assert params["out.weight"].abs().max() <= 512**-0.5


@pytest.mark.parametrize(("uniform", "mean", "std"), [(False, 0, 1), (True, 0.5, 12**-0.5)])
def test_fedgens_noise_is_normal_or_uniform_and_labels_follow_the_class_counts(uniform, mean, std):
    noise, labels = fedgen.draw_samples(COUNTS, 50, 40, np.random.default_rng(0), uniform=uniform)
    assert noise.mean().item() == pytest.approx(mean, abs=0.01)
    assert noise.std().item() == pytest.approx(std, abs=0.01)
    assert (0 <= noise.min() < 0.001 < 0.999 < noise.max() < 1) == uniform
    shares = torch.bincount(labels.flatten(), minlength=3) / 2000
    torch.testing.assert_close(shares, torch.tensor([0.75, 0.0, 0.25]), atol=0.03, rtol=0)
    assert shares[1] == 0


def test_training_of_fedgens_generator_is_plain_adam_on_the_mean_head():
    first = initial_generator()
    samples = fedgen.draw_samples(COUNTS, 4, 6, np.random.default_rng(1))
    head = {"head.weight": randn(3, 5), "head.bias": randn(3)}
    after = fedgen.train_generator(first, head, samples, lr=0.01)
    assert toy.distance(first, initial_generator()) == 0  # it is left as it was

    module = plain_generator(first)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for noise, labels in zip(*samples, strict=True):
        features = module(inputs(noise, labels))
        logits = features @ head["head.weight"].T + head["head.bias"]
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    torch.testing.assert_close(after.params["out.weight"], module.out.weight.detach())
    torch.testing.assert_close(after.params["hidden.weight"], module.hidden.weight.detach())
    torch.testing.assert_close(after.buffers["norm.var"], module.norm.running_var)


def plain_fedgen_round(fed, setup, round, kept, shared):
    """One round by plain torch: every client, the mean head, and the generator, which the code's form leaves alone."""
    head, shared_generator = shared
    config = setup.config
    options = setup.method_config
    is_code_form = options.form == "code"
    weight = options.generator_weight if is_code_form or round > 0 else 0.0
    examples = np.concatenate(fed.training)
    counts = torch.bincount(fed.engine.labels[examples], minlength=3)
    most_steps = config.local_epochs * math.ceil(max(map(len, fed.training)) / config.batch_size)

    after = {}
    mean_head = {name: torch.zeros_like(value) for name, value in head.items()}
    for client in range(fed.num_clients):
        params, buffers = kept.get(client, fed.initial_model(fed.networks[fed.architecture[client]]))
        module = plain_generator(shared_generator).train(is_code_form)
        draw = generator(config.seed, round, client, "generated")
        noise, labels = fedgen.draw_samples(counts, most_steps, config.batch_size, draw, uniform=is_code_form)
        samples = zip(noise, labels, strict=True)

        def objective(network, features, logits, y, module=module, samples=samples):
            noise, labels = next(samples)
            generated = F.cross_entropy(network.head(module(inputs(noise, labels))), labels)
            return F.cross_entropy(logits, y) + weight * generated

        trained = train_plainly(fed, round, client, Model({**params, **head}, buffers), objective)
        body = {name: value for name, value in trained.params.items() if name not in head}
        after[client] = Model(body, trained.buffers)
        share = len(fed.training[client]) / len(examples)
        for name in head:
            mean_head[name] += share * trained.params[name]

    if not is_code_form:
        draw = generator(config.seed, round, "generator")
        samples = fedgen.draw_samples(counts, options.generator_steps, config.batch_size, draw)
        shared_generator = fedgen.train_generator(shared_generator, mean_head, samples, options.generator_lr)
    return after, (mean_head, shared_generator)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_three_rounds_of_fedgen_are_those_of_a_plain_loop(form):
    run = {"momentum": 0.0, "weight_decay": 0.0, "backbone": "cnn-2x32,cnn-2x64", "data": toy.toy_dataset(size=16)}
    options = {"form": form, "generator_weight": 2.0, "generator_steps": 5, "generator_lr": 0.01}
    setup, fed = toy.federation("fedgen", options, **run)
    first = laws.initial_state(setup, fed)
    counts = torch.bincount(fed.engine.labels[:34]).tolist()  # of all clients, in the code's form at once
    assert first.class_counts.tolist() == (counts if form == "code" else [1, 1, 1])

    shared = first.head, first.generator
    state = laws.assert_rounds_agree(
        setup, fed, plain_fedgen_round, shared, lambda state: (state.head, state.generator)
    )
    assert state.class_counts.tolist() == counts


def test_class_counts_are_kept_where_nobody_has_an_example():
    previous = torch.tensor([1, 2, 3])
    assert fedgen.sum_counts(torch.tensor([[1, 0, 4], [2, 0, 0]]), previous).tolist() == [3, 0, 4]
    assert fedgen.sum_counts(torch.zeros(2, 3, dtype=torch.int64), previous).tolist() == [1, 2, 3]
