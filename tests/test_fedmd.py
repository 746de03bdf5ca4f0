"""FedMD's digest against a plain loop, its costs and its average."""

import pytest
import torch

from fedcli.core.trees import select
from fedcli.papers.baselines.fedavg import make_local_loss
from fedcli.papers.baselines.fedmd import ClientState, ServerState, digest, digest_loss
from fedcli.registry import find_method
from tests import laws
from tests.reference import modules_of

FEDMD = find_method("fedmd")
TWO = {"backbone": "cnn-small,cnn-mcmahan", "data": laws.toy_dataset(size=16)}


def started(overrides=None, **run):
    """A federation whose clients have different weights under two networks."""
    setup, fed = laws.federation(FEDMD, overrides, **{**TWO, **run})
    clients = {}
    for client in range(fed.num_clients):
        params, buffers = fed.initial_model(fed.networks[fed.architecture[client]])
        draw = torch.Generator().manual_seed(client)
        moved = {
            name: value + 0.1 * torch.randn(value.shape, dtype=value.dtype, generator=draw)
            for name, value in params.items()
        }
        clients[client] = ClientState(moved, buffers)
    return setup, fed, fed.cohort(0), clients


def stacked(fed, cohort, clients):
    groups = fed.groups(cohort)
    kept = [fed.recall(clients, group, None) for group in groups]
    return groups, [FEDMD.module.Client(own.params, own.buffers, {}) for own in kept]


def test_digest_loss_by_hand():
    logits, consensus = torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor([[0.0, -2.0], [0.0, 1.0]])
    assert digest_loss(logits, consensus) == (1 + 0 + 0 + 3) / 4


@pytest.mark.parametrize(("epochs", "backbone"), [(1, f"{laws.NORMED},cnn-small"), (2, TWO["backbone"])])
def test_digest_is_a_plain_loop_towards_scores_in_evaluation_mode_of_before_any_update(epochs, backbone):
    setup, fed, cohort, clients = started({"digest_epochs": epochs}, optimizer="adam", lr=0.003, backbone=backbone)
    modules = modules_of(fed, clients)
    batches = list(fed.public_batches(0))
    with torch.no_grad():
        means = [torch.stack([module.eval()(batch.x)[1] for module in modules]).mean(0) for batch in batches]
    for module in modules:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.003)  # without weight decay
        for _ in range(epochs):
            for batch, mean in zip(batches, means, strict=True):
                optimizer.zero_grad()
                torch.nn.functional.l1_loss(module.train()(batch.x)[1], mean).backward()
                optimizer.step()
    groups, models = stacked(fed, cohort, clients)
    models, terms = digest(models, cohort, fed, setup.options)
    for group, model in zip(groups, models, strict=True):
        for k, client in enumerate(group.client_ids):
            expected = {name: value.detach() for name, value in modules[client].named_parameters()}
            laws.assert_agree(select(model.params, k), expected, f"client {client}")
    assert terms["digest"].shape == (4,)


@pytest.mark.parametrize("backbone", ["cnn-small,cnn-mcmahan", f"{laws.NORMED},cnn-small"])
def test_by_batch_every_batch_has_scores_in_training_mode_and_an_optimizer_of_its_own(backbone):
    overrides, run = {"digest_epochs": 2, "exchange": "batch"}, {"optimizer": "adam", "lr": 0.003}
    setup, fed, cohort, clients = started(overrides, backbone=backbone, **run)
    modules = modules_of(fed, clients)
    for epoch in range(2):
        for batch in fed.public_batches(0, epoch):
            before = [{name: value.clone() for name, value in module.named_buffers()} for module in modules]
            with torch.no_grad():
                mean = torch.stack([module(batch.x)[1] for module in modules]).mean(0)
            for module, buffers in zip(modules, before, strict=True):
                for name, value in module.named_buffers():  # the exchange leaves the running statistics alone
                    value.copy_(buffers[name])
                optimizer = torch.optim.Adam(module.parameters(), lr=0.003)
                optimizer.zero_grad()
                torch.nn.functional.l1_loss(module(batch.x)[1], mean).backward()
                optimizer.step()
    groups, models = stacked(fed, cohort, clients)
    models, terms = digest(models, cohort, fed, setup.options)
    for group, model in zip(groups, models, strict=True):
        for k, client in enumerate(group.client_ids):
            expected = {name: value.detach() for name, value in modules[client].named_parameters()}
            laws.assert_agree(select(model.params, k), expected, f"client {client}")
            running = dict(modules[client].named_buffers())
            if running:
                laws.assert_agree(select(model.buffers, k), running, f"statistics of client {client}")
    assert terms["digest"].shape == (4,)
    expected = {"params": 0, "buffers": 0, "other": 2 * 4 * 12 * 3}
    assert fed.sent_up == fed.sent_down == expected


def test_a_round_by_batch_digests_then_trains():
    setup, fed, cohort, clients = started({"exchange": "batch"})
    groups, models = stacked(fed, cohort, clients)
    digested, _ = digest(models, cohort, fed, setup.options)
    between = {}
    for group, model in zip(groups, digested, strict=True):
        for k, client in enumerate(group.client_ids):
            between[int(client)] = ClientState(select(model.params, k), select(model.buffers, k))
    expected, _ = find_method("local").run_round(ServerState(between), cohort, fed, setup.options)
    state, terms = setup.method.run_round(ServerState(clients), cohort, fed, setup.options)
    laws.assert_agree(state.clients, expected.clients, "a round")
    assert set(terms) == {"digest", "cross_entropy"}


def test_local_training_begins_at_the_average():
    overrides = {"digest_epochs": 0, "average_parameters": True}
    setup, fed, cohort, clients = started(overrides, backbone="cnn-small")
    state, _ = setup.method.run_round(ServerState(clients), cohort, fed, setup.options)
    mean = {name: sum(own.params[name] for own in clients.values()) / 4 for name in clients[0].params}
    same = {client: ClientState(mean, {}) for client in clients}
    expected, _ = find_method("local").run_round(ServerState(same), cohort, fed, setup.options)
    for client in range(4):
        laws.assert_agree(state.clients[client].params, expected.clients[client].params, f"client {client}")


def test_newcomers_train_on_their_own_data_before_their_first_digest():
    """Two clients of which one comes later; who has taken part is not trained so again."""
    data, parts = laws.toy_dataset(num_train=12), laws.toy_parts((6, 5))
    run = {"data": data, "parts": parts, "num_clients": 2, "backbone": "cnn-small", "local_epochs": 2}
    setup, fed = laws.federation(FEDMD, {"pretrain_epochs": 3}, **run)
    plain, same = laws.federation(FEDMD, **run)
    state, expected = setup.method.init(fed, setup.options), {}
    for number, members in enumerate([[0], [0, 1]]):
        cohort = fed.cohort_of(number, members)
        for client in set(members) - expected.keys():
            alone = fed.cohort_of(number, [client])
            fresh = fed.broadcast(*fed.initial_model(), alone)
            trained, _ = fed.train(fresh, alone, make_local_loss(fed.network), epochs=range(2, 5))
            expected[client] = ClientState(select(trained.params, 0), select(trained.buffers, 0))
        state, _ = setup.method.run_round(state, cohort, fed, setup.options)
        after, _ = plain.method.run_round(ServerState(expected), cohort, same, plain.options)
        expected = dict(after.clients)
        laws.assert_agree(state.clients, expected, f"round {number}")
