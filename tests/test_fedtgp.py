"""FedTGP: margin, loss and the server's training against slow loops and torch.optim; what is sent."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli.core.batches import generator
from fedcli.papers.baselines import fedtgp
from fedcli.registry import find_method
from tests import laws

FEDTGP = find_method("fedtgp")
C, D = 4, 3


def network_of(params):
    """The server's network as torch modules."""
    classes, width = params["vectors"].shape
    vectors, hidden, out = nn.Embedding(classes, width), nn.Linear(width, width), nn.Linear(width, width)
    modules = nn.ModuleList([vectors, nn.Sequential(hidden, nn.ReLU(), out)]).double()
    with torch.no_grad():
        for own, value in zip(modules.parameters(), (params[name] for name in params_in_order(params)), strict=True):
            own.copy_(value)
    return modules


def params_in_order(params):
    return ["vectors", "hidden.weight", "hidden.bias", "out.weight", "out.bias"]


def example(seed=0):
    """Eleven prototypes of three of four classes, and a network."""
    draw = np.random.default_rng(seed)
    prototypes = torch.from_numpy(draw.standard_normal((11, D)))
    return prototypes, torch.tensor([0, 1, 3, 0, 1, 3, 0, 1, 3, 0, 1]), fedtgp.initial_network(C, D, draw)


def test_the_network_is_the_authors():
    params = fedtgp.initial_network(100, 512, np.random.default_rng(0))
    assert sum(value.numel() for value in params.values()) == 576_512
    assert abs(params["vectors"].std() - 1) < 0.02
    for name in params_in_order(params)[1:]:
        assert 0.9 < params[name].abs().max() * 512**0.5 <= 1
    _, _, params = example()
    vectors, layers = network_of(params)
    torch.testing.assert_close(fedtgp.global_prototypes(params), layers(vectors.weight).detach())


def test_margin_by_hand():
    centres = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 16.0], [99.0, 99.0]])
    known = torch.tensor([True, True, True, False])  # 5, 12 and hypot(3, 16) apart
    assert fedtgp.adaptive_margin(centres, known, 100.0).item() == pytest.approx(12)
    assert fedtgp.adaptive_margin(centres, known, 100.0, "pairs").item() == pytest.approx(math.hypot(3, 16))
    for form in ("nearest", "pairs"):
        assert fedtgp.adaptive_margin(centres, known, 10.0, form).item() == 10
        assert fedtgp.adaptive_margin(centres, torch.tensor([False, True, False, False]), 10.0, form).item() == 0


def test_contrastive_loss_is_the_cross_entropy_of_distances_with_a_margin():
    prototypes, labels, params = example()
    targets = fedtgp.global_prototypes(params)
    expected = F.cross_entropy(-torch.cdist(prototypes, targets) - 0.7 * F.one_hot(labels, C), labels)
    found = fedtgp.contrastive_loss(prototypes, labels, targets, torch.tensor(0.7).double())
    torch.testing.assert_close(found, expected)


def test_distance_has_a_gradient_everywhere():
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    distances = fedtgp.distance(points, torch.zeros(2, 2).double())
    assert distances.tolist() == [0, 5]
    (grad,) = torch.autograd.grad(distances.sum(), points)
    assert grad.tolist() == [[0, 0], pytest.approx([0.6, 0.8])]


def test_the_servers_training_is_sgd():
    prototypes, labels, params = example()
    config = fedtgp.Config(server_batch_size=4, server_lr=0.3)
    order = [np.random.default_rng(epoch).permutation(11) for epoch in range(3)]
    modules = network_of(params)
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.3)
    for epoch in order:
        for index in (epoch[:4], epoch[4:8], epoch[8:]):
            distances = torch.cdist(prototypes[index], modules[1](modules[0].weight))
            loss = F.cross_entropy(-distances - 0.5 * F.one_hot(labels[index], C), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    trained = fedtgp.train_network(params, prototypes, labels, torch.tensor(0.5).double(), order, config)
    assert list(trained) == list(params)
    for own, name in zip(modules.parameters(), params_in_order(params), strict=True):
        torch.testing.assert_close(trained[name], own.detach(), rtol=1e-9, atol=1e-12)
        assert not trained[name].requires_grad


def test_a_round_trains_on_the_class_means_of_the_trained_models():
    parts = [np.array([0, 3, 1, 6, 4]), np.array([7, 10, 13]), np.array([12, 15]), np.array([], int)]
    options = {"server_epochs": 3, "server_batch_size": 2}
    setup, fed = laws.federation(FEDTGP, options, parts=parts)
    first = setup.method.init(fed, setup.options)
    first = first._replace(network={name: 0.9 * value for name, value in first.network.items()})  # of an earlier round
    state, _ = setup.method.run_round(first, fed.cohort(0), fed, setup.options)
    rows, labels = [], []
    for client in range(4):
        own = state.clients[client]
        features, _, found = fed.predict(*own, fed.training[client])  # in evaluation mode
        for label in range(3):
            if (found == label).any():
                rows.append(features[found == label].mean(0))
                labels.append(label)
    assert labels == [0, 1, 1, 0]
    centres = [(rows[0] + rows[3]) / 2, (rows[1] + rows[2]) / 2]
    margin = (centres[0] - centres[1]).norm()
    order = [generator(fed.config.seed, 0, "server order", epoch).permutation(4) for epoch in range(3)]
    expected = fedtgp.train_network(
        first.network, torch.stack(rows), torch.tensor(labels), margin, order, setup.options
    )
    laws.assert_agree(state.network, expected, "the server's network")
    assert state.has_prototype.all()
    prototypes, known = setup.method.prototypes(state)
    assert torch.equal(prototypes, fedtgp.global_prototypes(state.network))
    assert known.all()


def test_without_any_prototype_the_network_stays():
    parts = [np.array([], int), np.array([0, 1, 2]), np.array([3]), np.array([4])]
    setup, fed = laws.federation(FEDTGP, parts=parts, cohort_size=1)
    first = setup.method.init(fed, setup.options)
    state = laws.simulate(setup, fed, 1, [[0]])
    laws.assert_agree(state.network, first.network, "the server's network")
    assert not state.has_prototype.any()


def test_the_code_form_sends_prototypes_of_the_model_before_training(monkeypatch):
    """The authors' order of steps: load the model, train it, collect prototypes by the stored model, store it."""
    sent = []
    monkeypatch.setattr(
        fedtgp, "train_network", lambda network, prototypes, labels, *rest: sent.append(prototypes) or network
    )
    parts = [np.array([0, 3, 1]), np.array([7, 10, 13, 2]), np.array([], int), np.array([], int)]
    setup, fed = laws.federation(FEDTGP, {"form": "code"}, parts=parts)
    state = setup.method.init(fed, setup.options)
    stored = dict.fromkeys(range(2), fed.initial_model())
    for number, cohort in enumerate([[0, 1], [0], [0, 1]]):  # client 1 sits a round out, what it has stored is older
        state, _ = setup.method.run_round(state, fed.cohort_of(number, cohort), fed, setup.options)
        expected = []
        for client in cohort:
            features, _, labels = fed.predict(*stored[client], fed.training[client])
            expected += [features[labels == label].mean(0) for label in labels.unique()]
            stored[client] = state.clients[client]
        laws.assert_agree(sent[number], torch.stack(expected), f"what is sent in round {number}")


@pytest.mark.parametrize(("form", "margin"), [("paper", 0.0), ("code", 7.0)])
def test_the_margin_of_a_single_class_is_the_threshold_in_the_code_form(monkeypatch, form, margin):
    found = []
    monkeypatch.setattr(
        fedtgp, "train_network", lambda network, prototypes, labels, margin, *rest: found.append(margin) or network
    )
    setup, fed = laws.federation(FEDTGP, {"form": form, "margin_threshold": 7.0}, parts=[np.array([0, 3])] * 4)
    laws.simulate(setup, fed, 1)
    assert [float(one) for one in found] == [margin]
