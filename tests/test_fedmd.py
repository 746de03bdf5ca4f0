"""FedMD's digest against a plain loop, its costs and its average."""

from functools import partial

import pytest
import torch

from fedcli.core.clients import Client
from fedcli.core.trees import select
from fedcli.papers.baselines.fedavg import make_local_loss
from fedcli.papers.baselines.fedmd import ClientState, ServerState, digest, digest_loss
from fedcli.registry import find_method
from tests import laws
from tests.reference import exchange_plainly, models_of, modules_of

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


def digested(fed, cohort, clients, config):
    """The clients' models after a digest, and the terms."""
    groups = fed.groups(cohort)
    models = [Client(*fed.recall(clients, group, None), optimizer={}) for group in groups]
    models, terms = digest(models, cohort, fed, config)
    assert terms["digest"].shape == (4,)
    return models_of(groups, models)


def test_digest_loss_by_hand():
    logits, consensus = torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor([[0.0, -2.0], [0.0, 1.0]])
    assert digest_loss(logits, consensus) == (1 + 0 + 0 + 3) / 4


@pytest.mark.parametrize(("epochs", "backbone"), [(1, f"{laws.NORMED},cnn-small"), (2, TWO["backbone"])])
def test_digest_is_a_plain_loop_towards_scores_in_evaluation_mode_of_before_any_update(epochs, backbone):
    setup, fed, cohort, clients = started({"digest_epochs": epochs}, optimizer="adam", lr=0.003, backbone=backbone)
    modules, batches = modules_of(fed, clients), list(fed.public_batches(0))
    with torch.no_grad():
        means = [torch.stack([module.eval()(batch.x)[1] for module in modules]).mean(0) for batch in batches]
    towards = iter([mean for mean in means * epochs for _ in modules])

    def objective(k, features, logits, everyone):
        return (torch.nn.functional.l1_loss(logits, next(towards)),)

    for module in modules:
        module.train()
    optimizer = partial(torch.optim.Adam, lr=0.003)  # without weight decay
    expected, _ = exchange_plainly(modules, batches * epochs, objective, optimizer, fresh=False)
    laws.assert_agree(digested(fed, cohort, clients, setup.options), expected, "the models")


def test_by_batch_every_batch_has_scores_in_training_mode_and_an_optimizer_of_its_own():
    overrides, run = {"digest_epochs": 2, "exchange": "batch"}, {"optimizer": "adam", "lr": 0.003}
    setup, fed, cohort, clients = started(overrides, backbone=f"{laws.NORMED},cnn-small", **run)

    def objective(k, features, logits, everyone):
        return (torch.nn.functional.l1_loss(logits, torch.stack([said for _, said in everyone]).mean(0)),)

    batches = [batch for epoch in range(2) for batch in fed.public_batches(0, epoch)]
    optimizer = partial(torch.optim.Adam, lr=0.003)
    expected, _ = exchange_plainly(modules_of(fed, clients), batches, objective, optimizer)
    models = digested(fed, cohort, clients, setup.options)
    laws.assert_agree(models, expected, "the models")  # the exchange leaves the running statistics alone
    assert fed.sent_up == fed.sent_down == {"params": 0, "buffers": 0, "other": 2 * 4 * 12 * 3}


def test_a_round_by_batch_digests_then_trains():
    setup, fed, cohort, clients = started({"exchange": "batch"})
    between = {client: ClientState(*model) for client, model in digested(fed, cohort, clients, setup.options).items()}
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
