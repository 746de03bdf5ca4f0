"""FedTGP: margin, loss and the server's training against slow loops and torch.optim; what is sent."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli.core.batches import generator
from fedcli.papers.baselines import fedtgp
from tests import laws

C, D = 4, 3
NOBODY = np.array([], int)


def network_of(params):
    """The server's network as torch modules, and what it gives."""
    classes, width = params["vectors"].shape
    layers = {
        "vectors": nn.Embedding(classes, width),
        "hidden": nn.Linear(width, width),
        "out": nn.Linear(width, width),
    }
    modules = nn.ModuleDict(layers).double()
    modules.load_state_dict({name.replace("vectors", "vectors.weight"): value for name, value in params.items()})
    return modules, lambda: modules["out"](modules["hidden"](modules["vectors"].weight).relu())


def test_the_network_is_the_authors():
    params = fedtgp.initial_network(100, 512, np.random.default_rng(0))
    assert sum(value.numel() for value in params.values()) == 576_512
    assert abs(params.pop("vectors").std() - 1) < 0.02
    assert all(0.9 < value.abs().max() * 512**0.5 <= 1 for value in params.values())


def test_margin_by_hand():
    centres = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 16.0], [99.0, 99.0]])
    known = torch.tensor([True, True, True, False])  # 5, 12 and hypot(3, 16) apart
    assert fedtgp.adaptive_margin(centres, known, 100.0).item() == pytest.approx(12)
    assert fedtgp.adaptive_margin(centres, known, 100.0, "pairs").item() == pytest.approx(math.hypot(3, 16))
    for form in ("nearest", "pairs"):
        assert fedtgp.adaptive_margin(centres, known, 10.0, form).item() == 10
        assert fedtgp.adaptive_margin(centres, torch.tensor([False, True, False, False]), 10.0, form).item() == 0


def test_the_servers_training_is_sgd_on_the_cross_entropy_of_distances_with_a_margin():
    draw = np.random.default_rng(0)
    prototypes, labels = torch.from_numpy(draw.standard_normal((11, D))), torch.tensor([0, 1, 3] * 3 + [0, 1])
    params, order = fedtgp.initial_network(C, D, draw), [draw.permutation(11) for _ in range(3)]
    modules, targets = network_of(params)
    torch.testing.assert_close(fedtgp.global_prototypes(params), targets().detach())
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.3)
    for epoch in order:
        for index in (epoch[:4], epoch[4:8], epoch[8:]):
            distances = torch.cdist(prototypes[index], targets())
            loss = F.cross_entropy(-distances - 0.5 * F.one_hot(labels[index], C), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    config = fedtgp.Config(server_batch_size=4, server_lr=0.3)
    trained = fedtgp.train_network(params, prototypes, labels, torch.tensor(0.5).double(), order, config)
    laws.assert_agree(network_of(trained)[0].state_dict(), modules.state_dict(), "the network")


def means_of(fed, client, model):
    """A client's class means under a model in evaluation mode, and their classes."""
    features, _, labels = fed.predict(*model, fed.training[client])
    classes = labels.unique().tolist()
    return [features[labels == label].mean(0) for label in classes], classes


def test_a_round_trains_on_the_class_means_of_the_trained_models():
    parts = [np.array([0, 3, 1, 6, 4]), np.array([7, 10, 13]), np.array([12, 15]), NOBODY]
    options = {"server_epochs": 3, "server_batch_size": 2}
    setup, fed = laws.federation("fedtgp", options, parts=parts)
    first = setup.method.init(fed, setup.options)
    first = first._replace(network={name: 0.9 * value for name, value in first.network.items()})  # of an earlier round
    state, _ = setup.method.run_round(first, fed.cohort(0), fed, setup.options)
    rows, labels = [], []
    for client in range(3):
        means, classes = means_of(fed, client, state.clients[client])
        rows, labels = rows + means, labels + classes
    assert labels == [0, 1, 1, 0]
    margin = ((rows[0] + rows[3]) / 2 - (rows[1] + rows[2]) / 2).norm()
    order = [generator(fed.config.seed, 0, "server order", epoch).permutation(4) for epoch in range(3)]
    given = torch.stack(rows), torch.tensor(labels), margin, order, setup.options
    laws.assert_agree(state.network, fedtgp.train_network(first.network, *given), "the server's network")
    prototypes, has_prototype = setup.method.prototypes(state)
    assert torch.equal(prototypes, fedtgp.global_prototypes(state.network))
    assert has_prototype.all()


def test_without_any_prototype_the_network_stays():
    parts = [NOBODY, np.array([0, 1, 2]), np.array([3]), np.array([4])]
    setup, fed = laws.federation("fedtgp", parts=parts, cohort_size=1)
    first, state = (laws.simulate(setup, fed, rounds, [[0]]) for rounds in (0, 1))
    laws.assert_agree(state.network, first.network, "the server's network")
    assert not state.has_prototype.any()


@pytest.fixture
def given_to_the_server(monkeypatch):
    """Prototypes and margin of each training of the server, which does not take place."""
    given = []

    def train_network(network, prototypes, labels, margin, *rest):
        given.append((prototypes, float(margin)))
        return network

    monkeypatch.setattr(fedtgp, "train_network", train_network)
    return given


def test_the_code_form_sends_prototypes_of_the_model_before_training(given_to_the_server):
    """The authors' order of steps: load the model, train it, collect prototypes by the stored model, store it."""
    parts = [np.array([0, 3, 1]), np.array([7, 10, 13, 2]), NOBODY, NOBODY]
    setup, fed = laws.federation("fedtgp", {"form": "code"}, parts=parts)
    state = setup.method.init(fed, setup.options)
    stored = dict.fromkeys(range(2), fed.initial_model())
    for number, cohort in enumerate([[0, 1], [0], [0, 1]]):  # client 1 sits a round out, what it has stored is older
        state, _ = setup.method.run_round(state, fed.cohort_of(number, cohort), fed, setup.options)
        expected = [mean for client in cohort for mean in means_of(fed, client, stored[client])[0]]
        laws.assert_agree(given_to_the_server[number][0], torch.stack(expected), f"what is sent in round {number}")
        stored |= {client: state.clients[client] for client in cohort}


@pytest.mark.parametrize(("form", "margin"), [("paper", 0.0), ("code", 7.0)])
def test_the_margin_of_a_single_class_is_the_threshold_in_the_code_form(form, margin, given_to_the_server):
    setup, fed = laws.federation("fedtgp", {"form": form, "margin_threshold": 7.0}, parts=[np.array([0, 3])] * 4)
    laws.simulate(setup, fed, 1)
    assert [own for _, own in given_to_the_server] == [margin]
