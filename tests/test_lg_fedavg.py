"""LG-FedAvg: heads are averaged and extractors stay, against a plain loop; what is sent."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedcli.registry import find_method
from fedcli.runs.rounds import one_round
from tests import laws
from tests.reference import load, optimizer_of

LG = find_method("lg-fedavg")
HEAD = ("head.weight", "head.bias")


def trained(fed, setup, client, number, params, buffers):
    """The client's parameters after a round of plain torch."""
    module = load(copy.deepcopy(fed.network.module), params, buffers).train()
    optimizer = optimizer_of(module, setup.run, setup.run.lr)
    plan = fed.plan(fed.cohort_of(number, [client]))
    for t in range(int(plan.steps[0])):
        x, y = fed.engine.gather(plan.index[t, 0, : plan.size[t, 0]])
        optimizer.zero_grad()
        F.cross_entropy(module(x)[1], y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.named_parameters()}


def test_two_rounds_are_those_of_a_plain_loop():
    setup, fed = laws.federation(LG, parts=laws.toy_parts((12, 4, 8, 6)))
    first, buffers = fed.initial_model()
    head, own = {name: first[name] for name in HEAD}, dict.fromkeys(range(4), first)
    for number, clients in enumerate(([0, 1, 3], [1, 2, 3])):
        for client in clients:
            own[client] = trained(fed, setup, client, number, {**own[client], **head}, buffers)
        sizes = [(12, 4, 8, 6)[client] for client in clients]
        head = {name: sum(n * own[c][name] for n, c in zip(sizes, clients, strict=True)) / sum(sizes) for name in HEAD}
        state = laws.simulate(setup, fed, number + 1, ([0, 1, 3], [1, 2, 3]))
        laws.assert_agree(state.head, head, "the averaged head")
        assert len(state.clients) == 3 + number
        for client, (params, _) in setup.method.personal(state).items():
            laws.assert_agree(params, {**own[client], **head}, f"client {client}")
            assert list(params) == list(first)


def test_clients_keep_no_head_and_send_nothing_else():
    setup, fed = laws.federation(LG, cohort_size=2)
    state, entry = one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort_of(0, [1, 3]))
    head = fed.num_classes * (fed.feature_dim + 1)
    assert sum(fed.sent_down.values()) == sum(fed.sent_up.values()) == 2 * head
    assert all(not name.startswith("head") for own in state.clients.values() for name in own.params)
    assert set(entry["terms"]) == {"cross_entropy"}
    assert setup.method.client_memory(fed.sizes) == fed.sizes.parameters


def test_tested_is_the_own_extractor_under_the_averaged_head():
    setup, fed = laws.federation(LG)
    state, entry = one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort(0))
    given = [fed.predict({**own.params, **state.head}, own.buffers) for own in state.clients.values()]
    right = torch.stack([logits.argmax(1) == labels for _, logits, labels in given])
    assert entry["test_accuracy"] == pytest.approx(right.double().mean().item())


def test_the_first_head_is_the_first_networks():
    setup, fed = laws.federation(LG, backbone="resnet10-3x3,cnn-3conv", data=laws.toy_dataset(num_train=12))
    head = setup.method.init(fed, setup.options).head
    params, _ = fed.initial_model(fed.networks[0])
    assert all(torch.equal(head[name], params[name]) for name in HEAD)
    assert not torch.equal(head["head.weight"], fed.initial_model(fed.networks[1])[0]["head.weight"])
