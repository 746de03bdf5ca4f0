"""LG-FedAvg: heads are averaged and extractors stay, against a plain loop; what is sent."""

import pytest
import torch
import torch.nn.functional as F

from fedcli.registry import find_method
from fedcli.runs.rounds import one_round
from tests import laws
from tests.reference import train_plainly
from tests.toys import MIXED

LG = find_method("lg-fedavg")
HEAD = ("head.weight", "head.bias")


def test_two_rounds_are_those_of_a_plain_loop():
    setup, fed = laws.federation(LG, parts=laws.toy_parts((12, 4, 8, 6)))
    first, buffers = fed.initial_model()
    head, own = {name: first[name] for name in HEAD}, dict.fromkeys(range(4), first)
    for number, clients in enumerate(([0, 1, 3], [1, 2, 3])):
        for client in clients:
            model = {**own[client], **head}, buffers
            own[client] = train_plainly(fed, number, client, model, lambda m, f, logits, y: F.cross_entropy(logits, y))
        sizes = [(12, 4, 8, 6)[client] for client in clients]
        head = {name: sum(n * own[c][name] for n, c in zip(sizes, clients, strict=True)) / sum(sizes) for name in HEAD}
        state = laws.simulate(setup, fed, number + 1, ([0, 1, 3], [1, 2, 3]))
        laws.assert_agree(state.head, head, "the averaged head")
        assert len(state.clients) == 3 + number
        for client, (params, _) in setup.method.personal(state).items():
            laws.assert_agree(params, {**own[client], **head}, f"client {client}")
            assert list(params) == list(first)


def test_tested_is_the_own_extractor_under_the_averaged_head():
    setup, fed = laws.federation(LG)
    state, entry = one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort(0))
    given = [fed.predict({**own.params, **state.head}, own.buffers) for own in state.clients.values()]
    right = torch.stack([logits.argmax(1) == labels for _, logits, labels in given])
    assert entry["test_accuracy"] == pytest.approx(right.double().mean().item())


def test_the_first_head_is_the_first_networks():
    setup, fed = laws.federation(LG, backbone=MIXED)
    head = setup.method.init(fed, setup.options).head
    params, _ = fed.initial_model(fed.networks[0])
    assert all(torch.equal(head[name], params[name]) for name in HEAD)
    assert not torch.equal(head["head.weight"], fed.initial_model(fed.networks[1])[0]["head.weight"])
