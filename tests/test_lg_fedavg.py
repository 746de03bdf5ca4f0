"""LG-FedAvg: heads are averaged and extractors stay, against a plain loop."""

import torch
import torch.nn.functional as F

from tests import laws
from tests.reference import train_plainly
from tests.toys import MIXED

HEAD = ("head.weight", "head.bias")


def test_two_rounds_are_those_of_a_plain_loop():
    sizes, cohorts = (12, 4, 8, 6), ([0, 1, 3], [1, 2, 3])
    setup, fed = laws.federation("lg-fedavg", parts=laws.toy_parts(sizes))
    first, buffers = fed.initial_model()
    head, own = {name: first[name] for name in HEAD}, dict.fromkeys(range(4), first)
    for number, clients in enumerate(cohorts):
        for client in clients:
            model = {**own[client], **head}, buffers
            own[client] = train_plainly(fed, number, client, model, lambda m, f, logits, y: F.cross_entropy(logits, y))
        total = sum(sizes[client] for client in clients)
        head = {name: sum(sizes[client] * own[client][name] for client in clients) / total for name in HEAD}
        state = laws.simulate(setup, fed, number + 1, cohorts)
        laws.assert_agree(state.head, head, "the averaged head")
        assert len(state.clients) == 3 + number
        for client, (params, _) in setup.method.personal(state).items():  # which is tested
            laws.assert_agree(params, {**own[client], **head}, f"client {client}")


def test_the_first_head_is_the_first_networks():
    setup, fed = laws.federation("lg-fedavg", backbone=MIXED)
    head = setup.method.init(fed, setup.options).head
    first, second = (fed.initial_model(network)[0] for network in fed.networks)
    assert all(torch.equal(head[name], first[name]) for name in HEAD)
    assert not torch.equal(head["head.weight"], second["head.weight"])
