"""FedMD's digest against a plain loop, its costs and its average."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedcli.core.trees import select, tree_map
from fedcli.papers.baselines.fedavg import make_local_loss
from fedcli.papers.baselines.fedmd import ClientState, ServerState, digest
from fedcli.registry import find_method
from tests import laws
from tests.reference import models_of, modules_of, stacked_by_network
from tests.toys import with_different_models

NORMED = f"{laws.NORMED},cnn-small"
LOCAL, ADAM = find_method("local"), {"optimizer": "adam", "lr": 0.003}


def test_digest_is_a_plain_loop_towards_scores_in_evaluation_mode_of_before_any_update():
    setup, fed, cohort, states = with_different_models("fedmd", {"digest_epochs": 2}, backbone=NORMED, **ADAM)
    modules, batches = modules_of(fed, states), list(fed.public_batches(0))
    with torch.no_grad():
        means = [torch.stack([module.eval()(batch.x)[1] for module in modules]).mean(0) for batch in batches]
    towards = iter([mean for mean in means * 2 for _ in modules])

    def objective(k, features, logits, everyone):
        return (F.l1_loss(logits, next(towards)),)

    optimizer = partial(torch.optim.Adam, lr=0.003)  # without weight decay
    given = setup, fed, cohort, states, digest, objective, optimizer
    terms, _ = laws.assert_public_phase_agrees(*given, batches * 2, fresh=False)
    assert terms["digest"].shape == (4,)


def test_by_batch_every_batch_has_scores_in_training_mode_and_an_optimizer_of_its_own():
    overrides = {"digest_epochs": 2, "exchange": "batch"}
    setup, fed, cohort, states = with_different_models("fedmd", overrides, backbone=NORMED, **ADAM)

    def objective(k, features, logits, everyone):
        return (F.l1_loss(logits, torch.stack([said for _, said in everyone]).mean(0)),)

    batches = [batch for epoch in range(2) for batch in fed.public_batches(0, epoch)]
    given = setup, fed, cohort, states, digest, objective, partial(torch.optim.Adam, lr=0.003)
    laws.assert_public_phase_agrees(*given, batches)  # the exchange leaves the running statistics alone


@pytest.mark.parametrize("averaged", [False, True])
def test_local_training_begins_at_the_digested_models_or_at_their_average(averaged):
    overrides = {"exchange": "batch", "average_parameters": averaged}
    setup, fed, cohort, states = with_different_models("fedmd", overrides, backbone=laws.NORMED)
    digested, _ = digest(stacked_by_network(fed, cohort, states), cohort, fed, setup.options)
    models = models_of(fed.groups(cohort), digested)
    if averaged:  # uniformly, buffers too
        mean = tree_map(lambda *leaves: sum(leaves) / 4, *models.values())
        models = dict.fromkeys(models, mean)
    between = {client: ClientState(*model) for client, model in models.items()}
    expected, _ = LOCAL.run_round(ServerState(between), cohort, fed, setup.options)
    state, terms = setup.method.run_round(ServerState(states), cohort, fed, setup.options)
    laws.assert_agree(state.clients, expected.clients, "a round")
    assert set(terms) == {"digest", "cross_entropy"}


def test_newcomers_train_on_their_own_data_before_their_first_digest():
    """Two clients of which one comes later; who has taken part is not trained so again."""
    run = {"parts": laws.toy_parts((6, 5)), "num_clients": 2}
    setup, fed = laws.federation("fedmd", {"pretrain_epochs": 3}, **run)
    plain, same = laws.federation("fedmd", **run)
    state, expected = setup.method.init(fed, setup.options), {}
    for number, members in enumerate([[0], [0, 1]]):
        cohort = fed.cohort_of(number, members)
        for client in set(members) - expected.keys():
            alone = fed.cohort_of(number, [client])
            fresh = fed.broadcast(*fed.initial_model(), alone)
            trained, _ = fed.train(fresh, alone, make_local_loss(fed.network), epochs=range(2, 5))
            expected[client] = ClientState(*select((trained.params, trained.buffers), 0))
        state, _ = setup.method.run_round(state, cohort, fed, setup.options)
        after, _ = plain.method.run_round(ServerState(expected), cohort, same, plain.options)
        expected = dict(after.clients)
        laws.assert_agree(state.clients, expected, f"round {number}")
