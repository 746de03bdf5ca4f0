"""FedDF: distillation in the server and in the clients against plain loops, and where both are simpler methods."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.core.clients import Client
from fedcli.core.trees import select
from fedcli.papers.baselines import feddf
from fedcli.papers.baselines.fedavg import make_local_loss
from fedcli.registry import find_method
from tests import laws
from tests.reference import exchange_plainly, models_of, modules_of

FEDDF, CLIENT_FORM = find_method("feddf"), find_method("feddf-client")
MIXED = {"backbone": "cnn-small,cnn-mcmahan", "data": laws.toy_dataset(size=16)}


def logits(network, model, x):
    return network(*model[:2], x, train=False).logits


def plain_adam(network, start, batches, targets, lr):
    """The student after steps of Adam with cosine annealing, by torch.optim."""
    params = {name: value.clone().requires_grad_() for name, value in start[0].items()}
    optimizer = torch.optim.Adam(params.values(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    losses = []
    for x, target in zip(batches, targets, strict=True):
        own = F.log_softmax(network(params, start[1], x, train=True).logits, 1)
        loss = F.kl_div(own, F.softmax(target, 1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return {name: value.detach() for name, value in params.items()}, np.mean(losses)


def test_without_distillation_it_is_fedavg():
    setup, fed = laws.federation(FEDDF, {"distillation_epochs": 0})
    state = laws.simulate(setup, fed, 3)
    base = laws.simulate(*laws.federation("fedavg"), 3)
    laws.assert_agree(state.students[0].params, base.params, "feddf against fedavg")
    found = setup.method.personal(state)
    assert sorted(found) == [0, 1, 2, 3]
    assert all(model is state.students[0] for model in found.values())


def test_each_architecture_has_a_student_taught_by_all_clients():
    setup, fed = laws.federation(FEDDF, {"distillation_epochs": 2, "distillation_lr": 0.01}, **MIXED)
    cohort, start = fed.cohort(0), setup.method.init(fed, setup.options)
    trained, means = {}, []
    for group in fed.groups(cohort):
        clients, _ = fed.train(
            fed.broadcast(*fed.initial_model(group.network), group), group, make_local_loss(group.network)
        )
        shares = group.weights / group.weights.sum()
        means.append({name: torch.tensordot(shares, value, 1) for name, value in clients.params.items()})
        trained |= {client: select((clients.params, clients.buffers), k) for k, client in enumerate(group.client_ids)}
    batches = [batch.x for epoch in (0, 1) for batch in fed.public_batches(0, epoch)]
    networks = [fed.networks[kind] for kind in fed.architecture]
    with torch.no_grad():
        targets = [sum(logits(networks[c], trained[c], x) for c in range(4)) / 4 for x in batches]
    fed.start_round()
    after, terms = setup.method.run_round(start, cohort, fed, setup.options)
    for kind, (network, mean) in enumerate(zip(fed.networks, means, strict=True)):
        expected, loss = plain_adam(network, (mean, {}), batches, targets, 0.01)
        laws.assert_agree(after.students[kind].params, expected, f"the student of {fed.backbones[kind]}")
        assert terms["distillation"][kind::2].tolist() == pytest.approx([loss] * 2)
    assert [setup.method.personal(after)[c] is after.students[c % 2] for c in range(4)] == [True] * 4
    everyone = sum(sum(p.numel() for p in network.module.parameters()) for network in networks)
    assert fed.sent_down == fed.sent_up == {"params": everyone, "buffers": 0, "other": 0}


def test_an_architecture_that_nobody_has_in_a_round_keeps_its_student():
    setup, fed = laws.federation(FEDDF, cohort_size=2, **MIXED)
    start = setup.method.init(fed, setup.options)
    after, _ = setup.method.run_round(start, fed.cohort_of(0, [0, 2]), fed, setup.options)
    assert laws.distance(after.students[1], start.students[1]) == 0
    assert laws.distance(after.students[0], start.students[0]) > 1e-4


def test_clients_without_examples_are_averaged_plainly():
    _, fed = laws.federation(FEDDF)
    clients = Client({"w": torch.tensor([[1.0], [3.0]])}, {}, {})
    assert feddf.mean_model(clients, torch.zeros(2), fed).params["w"].tolist() == [2]
    assert feddf.mean_model(clients, torch.tensor([0.3, 0.1]), fed).params["w"].item() == pytest.approx(1.5)


# In the clients


def test_clients_learn_from_all_logits_before_any_of_them_moves():
    setup, fed = laws.federation(CLIENT_FORM, {"distillation_lr": 0.3}, weight_decay=0.01, **MIXED)
    state, cohort = laws.simulate(setup, fed, 1), fed.cohort(1)

    def objective(k, features, logits, everyone):
        target = sum(said for _, said in everyone) / 4
        loss = F.kl_div(F.log_softmax(logits, 1), F.softmax(target, 1), reduction="batchmean")
        return loss, loss

    optimizer = partial(torch.optim.SGD, lr=0.3, weight_decay=0.01)
    expected, (losses,) = exchange_plainly(modules_of(fed, state.clients), fed.public_batches(1), objective, optimizer)
    groups = fed.groups(cohort)
    start = [Client(*fed.recall(state.clients, group, None), optimizer={}) for group in groups]
    fed.start_round()
    trained, terms = feddf.distil_into_clients(start, cohort, fed, setup.options)
    laws.assert_agree(models_of(groups, trained), expected, "the models")
    assert terms["distillation"].tolist() == pytest.approx(losses)
    assert fed.sent_up["other"] == fed.sent_down["other"] == 4 * 12 * 3  # logits of 12 images
