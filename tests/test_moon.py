"""MOON: its term against a loop and by hand, what a client keeps, and the first round it takes part in."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.core.batches import Batch
from fedcli.papers.baselines import fedavg, moon
from fedcli.papers.baselines.moon import cosine, model_contrastive
from fedcli.registry import find_method
from tests import laws

MOON = find_method("moon")
NORMALISED = {"backbone": laws.NORMED, "local_epochs": 1, "parts": laws.toy_parts((4, 3, 2, 3))}


def example(samples=6, width=5):
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(samples, width, dtype=torch.float64, generator=draw) for _ in range(3))


def normalised_setup(**run):
    """A network whose features depend on the mode it runs in."""
    return laws.federation(MOON, data=laws.toy_dataset(num_train=12, channels=3), **NORMALISED, **run)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_term_is_the_cross_entropy_of_two_cosines_and_its_logarithm_is_before_the_mean(temperature):
    z, z_global, z_previous = example()
    pair = torch.stack([F.cosine_similarity(z, other) for other in (z_global, z_previous)], 1) / temperature
    each = F.cross_entropy(pair, torch.zeros(6, dtype=torch.int64), reduction="none")
    torch.testing.assert_close(model_contrastive(z, z_global, z_previous, temperature), each.mean())
    mask = torch.tensor([True, False, True, True, False, False])
    torch.testing.assert_close(model_contrastive(z, z_global, z_previous, temperature, mask), each[mask].mean())


@pytest.mark.parametrize("length", [0.0, 1e-20, 1e-8])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_feature_without_direction_has_cosine_0_and_no_gradient(which, length):
    three = example()
    three[which][2] = length
    assert cosine(three[which], three[which - 1])[2] == 0
    model_contrastive(three[0].requires_grad_(), *three[1:], 0.5).backward()
    assert torch.isfinite(three[0].grad).all()
    assert three[0].grad.abs().max() < 10
    assert (three[0].grad[2] == 0).all() == (which == 0)  # of the two terms, the one that has a direction remains
    assert three[0].grad[[0, 1, 3]].abs().max() > 0


def test_the_other_models_run_in_evaluation_mode_and_are_constants():
    setup, fed = normalised_setup()
    params, buffers = fed.initial_model()
    other = laws.simulate(setup, fed, 1)
    given = [{name: value.clone().requires_grad_() for name, value in tree.items()} for tree in (params, other.params)]
    context = moon.Context(given[0], buffers, given[1], other.buffers, torch.tensor(True))
    x, y = fed.engine.gather(np.arange(4))
    batch = Batch(x, y, None, torch.tensor(False), torch.tensor(1), torch.tensor(0.1))
    mine = {name: value.clone().requires_grad_() for name, value in other.clients[2].params.items()}
    loss, aux = moon.make_local_loss(fed.network, moon.Config(contrastive_weight=3.0, temperature=0.2))(
        mine, other.clients[2].buffers, batch, context
    )
    features, logits, after = fed.network(mine, other.clients[2].buffers, x)
    z_global = fed.network(params, buffers, x, train=False).features
    z_previous = fed.network(other.params, other.buffers, x, train=False).features
    contrast = model_contrastive(features, z_global, z_previous, 0.2)
    expected = F.cross_entropy(logits, y) + 3 * contrast
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(aux.terms["contrastive"], contrast)
    torch.testing.assert_close(aux.outputs, features)
    assert laws.distance(aux.buffers, after) == 0
    loss.backward()
    assert all(value.grad is None for tree in given for value in tree.values())
    assert all(value.grad is not None for value in mine.values())


@pytest.mark.parametrize("chunk", ["1", "2"])
def test_taking_part_for_the_first_time_a_client_trains_without_the_term(chunk):
    setup, fed = laws.federation(MOON, cohort_size=2, clients_per_chunk=chunk)
    state = setup.method.init(fed, setup.options)
    state, terms = setup.method.run_round(state, fed.cohort_of(0, [0, 1]), fed, setup.options)
    assert terms["contrastive"].tolist() == [0, 0]
    base_setup, base_fed = laws.federation("fedavg", cohort_size=2)
    first = laws.simulate(base_setup, base_fed, 1, [[0, 1]])
    laws.assert_agree(state.params, first.params, "the first round against FedAvg")

    cohort = fed.cohort_of(1, [1, 2])
    after, terms = setup.method.run_round(state, cohort, fed, setup.options)
    assert terms["contrastive"][0] > 0.1  # client 1 has a previous model
    assert terms["contrastive"][1] == 0
    plain, _ = fed.train(fed.broadcast(*state[:2], cohort), cohort, fedavg.make_local_loss(fed.network))
    for name, value in plain.params.items():
        torch.testing.assert_close(after.clients[2].params[name], value[1])
        assert not torch.allclose(after.clients[1].params[name], value[0], rtol=1e-6)
