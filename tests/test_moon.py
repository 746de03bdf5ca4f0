"""MOON: its term against torch's, what it compares with, and the first round that a client takes part in."""

import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines import fedavg, moon
from fedcli.papers.baselines.moon import cosine, model_contrastive
from tests import laws
from tests.toys import minibatch, randn


def test_the_term_is_the_cross_entropy_of_two_cosines():
    z, z_global, z_previous = randn(3, 6, 5)
    pair = torch.stack([F.cosine_similarity(z, other) for other in (z_global, z_previous)], 1) / 0.5
    expected = F.cross_entropy(pair, torch.zeros(6, dtype=torch.int64))
    torch.testing.assert_close(model_contrastive(z, z_global, z_previous, 0.5), expected)


@pytest.mark.parametrize("length", [0.0, 1e-20, 1e-8])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_feature_without_direction_has_cosine_0_and_no_gradient(which, length):
    three = randn(3, 6, 5)
    three[which, 2] = length
    assert cosine(three[which], three[which - 1])[2] == 0
    z = three[0].clone().requires_grad_()
    model_contrastive(z, three[1], three[2], 0.5).backward()
    assert z.grad.abs().max() < 10
    assert (z.grad[2] == 0).all() == (which == 0)  # of the two terms, the one that has a direction remains


def test_the_other_models_run_in_evaluation_mode_and_are_constants():
    setup, fed = laws.federation("moon", backbone=laws.NORMED, local_epochs=1)
    first, state = fed.initial_model(), laws.simulate(setup, fed, 1)
    given = [{name: value.clone().requires_grad_() for name, value in tree.items()} for tree in (first[0], state[0])]
    context = moon.Context(given[0], first[1], given[1], state.buffers, torch.tensor(True))
    batch, own = minibatch(fed, 4), state.clients[2]
    local_loss = moon.make_local_loss(fed.network, moon.Config(contrastive_weight=3.0, temperature=0.2))
    loss, aux = local_loss(*own, batch, context)
    features, logits, _ = fed.network(*own, batch.x)
    z_global, z_previous = (fed.network(*model, batch.x, train=False).features for model in (first, state[:2]))
    contrast = model_contrastive(features, z_global, z_previous, 0.2)
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.y) + 3 * contrast)
    torch.testing.assert_close(aux.terms["contrastive"], contrast)
    assert not loss.requires_grad  # the client's own parameters do not ask for a gradient here


def test_taking_part_for_the_first_time_a_client_trains_without_the_term():
    setup, fed = laws.federation("moon", cohort_size=2)
    start = setup.method.init(fed, setup.options)
    state, terms = setup.method.run_round(start, fed.cohort_of(0, [0, 1]), fed, setup.options)
    assert terms["contrastive"].tolist() == [0, 0]
    cohort = fed.cohort_of(1, [1, 2])
    after, terms = setup.method.run_round(state, cohort, fed, setup.options)
    assert terms["contrastive"][0] > 0.1  # client 1 has a previous model
    assert terms["contrastive"][1] == 0
    plain, _ = fed.train(fed.broadcast(*state[:2], cohort), cohort, fedavg.make_local_loss(fed.network))
    for name, value in plain.params.items():
        torch.testing.assert_close(after.clients[2].params[name], value[1])
        assert not torch.allclose(after.clients[1].params[name], value[0], rtol=1e-6)
