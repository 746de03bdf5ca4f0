"""FedDF: distillation in the server and in the clients against plain loops, and where both are simpler methods."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.core.clients import Client
from fedcli.papers.baselines import feddf
from fedcli.papers.baselines.fedavg import make_local_loss
from tests import laws
from tests.reference import models_of, modules_of
from tests.toys import TWO_NETWORKS


def plain_adam(network, start, batches, targets, lr):
    """The student after steps of Adam with cosine annealing, by torch.optim, and the mean loss."""
    params = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(params.values(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    losses = []
    for x, target in zip(batches, targets, strict=True):
        own = F.log_softmax(network(params, {}, x, train=True).logits, 1)
        loss = F.kl_div(own, F.softmax(target, 1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return {name: value.detach() for name, value in params.items()}, np.mean(losses)


def test_without_distillation_it_is_fedavg():
    setup, fed = laws.federation("feddf", {"distillation_epochs": 0})
    state = laws.simulate(setup, fed, 3)
    base = laws.simulate(*laws.federation("fedavg"), 3)
    laws.assert_agree(state.students[0].params, base.params, "feddf against fedavg")


def test_each_architecture_has_a_student_taught_by_all_clients():
    options = {"distillation_epochs": 2, "distillation_lr": 0.01}
    setup, fed = laws.federation("feddf", options, **TWO_NETWORKS)
    cohort, start, trained = fed.cohort(0), setup.method.init(fed, setup.options), []
    groups = fed.groups(cohort)
    for group in groups:
        received = fed.broadcast(*fed.initial_model(group.network), group)
        trained.append(fed.train(received, group, make_local_loss(group.network))[0])
    means = [feddf.mean_model(clients, group.weights, fed) for clients, group in zip(trained, groups, strict=True)]
    batches = [batch.x for epoch in (0, 1) for batch in fed.public_batches(0, epoch)]
    modules = [module.eval() for module in modules_of(fed, models_of(groups, trained))]
    with torch.no_grad():
        targets = [sum(module(x)[1] for module in modules) / 4 for x in batches]
    after, terms = setup.method.run_round(start, cohort, fed, setup.options)
    for kind, (network, mean) in enumerate(zip(fed.networks, means, strict=True)):
        expected, loss = plain_adam(network, mean.params, batches, targets, 0.01)
        laws.assert_agree(after.students[kind].params, expected, f"the student of {fed.backbones[kind]}")
        assert terms["distillation"][kind::2].tolist() == pytest.approx([loss] * 2)
    assert [setup.method.personal(after)[c] is after.students[c % 2] for c in range(4)] == [True] * 4


def test_an_architecture_that_nobody_has_in_a_round_keeps_its_student():
    setup, fed = laws.federation("feddf", cohort_size=2, **TWO_NETWORKS)
    start, after = (laws.simulate(setup, fed, rounds, [[0, 2]]) for rounds in (0, 1))
    assert laws.distance(after.students[1], start.students[1]) == 0
    assert laws.distance(after.students[0], start.students[0]) > 1e-4


def test_clients_without_examples_are_averaged_plainly():
    _, fed = laws.federation("feddf")
    clients = Client({"w": torch.tensor([[1.0], [3.0]])}, {}, {})
    assert feddf.mean_model(clients, torch.zeros(2), fed).params["w"].tolist() == [2]
    assert feddf.mean_model(clients, torch.tensor([0.3, 0.1]), fed).params["w"].item() == pytest.approx(1.5)


def test_clients_learn_from_all_logits_before_any_of_them_moves():
    setup, fed = laws.federation("feddf-client", {"distillation_lr": 0.3}, weight_decay=0.01, **TWO_NETWORKS)
    states = laws.simulate(setup, fed, 1).clients

    def objective(k, features, logits, everyone):
        target = sum(said for _, said in everyone) / 4
        loss = F.kl_div(F.log_softmax(logits, 1), F.softmax(target, 1), reduction="batchmean")
        return loss, loss

    optimizer = partial(torch.optim.SGD, lr=0.3, weight_decay=0.01)
    terms, (losses,) = laws.assert_public_phase_agrees(
        setup, fed, fed.cohort(1), states, feddf.distil_into_clients, objective, optimizer
    )
    assert terms["distillation"].tolist() == pytest.approx(losses)
