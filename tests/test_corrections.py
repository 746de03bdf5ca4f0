"""SCAFFOLD, FedDyn and MOON, whose clients keep what corrects their training: by hand and against plain loops."""

import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core.trees import select, stack, tree_map
from fedcli.papers.baselines import fedavg, feddyn, moon
from fedcli.papers.baselines.moon import cosine, model_contrastive
from fedcli.papers.baselines.scaffold import update_control
from tests import laws
from tests.first_rounds import minibatch
from tests.plain_federation import PlainFederation
from tests.plain_loops import Model, train_plainly
from tests.tensors import randn

# SCAFFOLD

ONE_STEP = {"local_epochs": 1, "batch_size": 16, "momentum": 0.0}  # one full batch for the toy clients


def full_gradient(fed, params, client):
    """Gradient of a client's whole objective with its weight decay, by one step of torch.optim."""
    end = train_plainly(fed, 0, client, Model(params, {}))
    return {name: (value - end.params[name]) / fed.config.lr for name, value in params.items()}


def test_a_client_without_steps_keeps_its_control():
    c_i = {"w": torch.tensor([[5.0, 6.0]])}
    local = {"w": torch.tensor([[1.0, 1.0]])}
    new = update_control(c_i, {"w": torch.ones(2)}, {"w": torch.ones(2)}, local, torch.tensor([0.0]), 0.1)
    assert new["w"].tolist() == [[5, 6]]


def test_two_rounds_of_scaffold_by_plain_gradients():
    """One full-batch step a round: c_i is the gradient with its weight decay, c a mean weighted by n_i / 34."""
    setup, fed = toy.federation("scaffold", cohort_size=2, lr_decay=0.5, **ONE_STEP)
    lr = setup.config.lr / 2  # of the second round
    start, _ = fed.initial_model()
    cohorts = ([0, 1], [0, 2])

    before = toy.simulate(setup, fed, 1, cohorts)
    gradient_0 = full_gradient(fed, start, 0)
    gradient_1 = full_gradient(fed, start, 1)
    laws.assert_agree(before.clients[0].c_i, gradient_0, "c_i of client 0")
    laws.assert_agree(before.clients[1].c_i, gradient_1, "c_i of client 1")
    c = {name: (13 * gradient_0[name] + 7 * gradient_1[name]) / 34 for name in start}
    laws.assert_agree(before.c, c, "c")

    after = toy.simulate(setup, fed, 2, cohorts)
    second_gradient_0 = full_gradient(fed, before.params, 0)
    gradient_2 = full_gradient(fed, before.params, 2)
    for name, x in before.params.items():
        change_0 = second_gradient_0[name] - gradient_0[name]
        direction = 13 / 23 * change_0 + 10 / 23 * gradient_2[name] + c[name]
        torch.testing.assert_close(after.params[name], x - lr * direction, rtol=1e-9, atol=1e-12)
        mean = c[name] + (13 * change_0 + 10 * gradient_2[name]) / 34
        torch.testing.assert_close(after.c[name], mean, rtol=1e-8, atol=1e-11)

    # Option II gives back the gradient that the correction was added to.
    laws.assert_agree(after.clients[0].c_i, second_gradient_0, "c_i of client 0")
    laws.assert_agree(after.clients[2].c_i, gradient_2, "c_i of client 2")


def test_under_uniform_weighting_scaffold_is_algorithm_1():
    """Line 16 has 1 / |S|, line 17 1 / N; one full-batch step a round, two of four clients of different sizes."""
    setup, fed = toy.federation("scaffold", cohort_size=2, weighting="uniform", **ONE_STEP)
    start, _ = fed.initial_model()
    state = toy.simulate(setup, fed, 1, ([0, 1],))

    gradient_0 = full_gradient(fed, start, 0)
    gradient_1 = full_gradient(fed, start, 1)
    total = {name: gradient_0[name] + gradient_1[name] for name in start}
    laws.assert_agree(state.c, {name: total[name] / 4 for name in start}, "c")
    moved = {name: start[name] - setup.config.lr * total[name] / 2 for name in start}
    laws.assert_agree(state.params, moved, "the model")


def test_with_momentum_c_i_is_of_the_way_along_a_constant_gradient():
    """After a single step, which has no momentum yet, c_i is (1 - rho) times the gradient."""
    setup, fed = toy.federation("scaffold", **{**ONE_STEP, "momentum": 0.9, "weight_decay": 0.0})
    start, _ = fed.initial_model()
    state = toy.simulate(setup, fed, 1)

    expected = {name: 0.1 * value for name, value in full_gradient(fed, start, 1).items()}
    laws.assert_agree(state.clients[1].c_i, expected, "c_i")


def test_scaffolds_server_lr_scales_the_parameters():
    """Buffers are averaged as they are."""
    run = {"backbone": toy.BATCHNORM, "local_epochs": 1}
    setup, fed = toy.federation("scaffold", {"server_lr": 0.5, "clip_norm": 0.0}, **run)
    state = toy.simulate(setup, fed, 1)
    average = laws.state_after_rounds(1, "fedavg", **run)
    start, _ = fed.initial_model()
    half = {name: (value + average.params[name]) / 2 for name, value in start.items()}
    laws.assert_agree((state.params, state.buffers), (half, average.buffers), "half the way, and all of the buffers")


# FedDyn

COHORTS = ([0, 1], [1, 3], [0, 2])


def test_without_clipping_feddyn_is_algorithm_1_in_a_plain_loop():
    """Three rounds have two of four clients each, in h_i, alpha is by a client's size, and buffers have plain means."""
    run = {"parts": toy.toy_parts((6, 2, 3, 5)), "cohort_size": 2, "local_epochs": 1, "backbone": toy.BATCHNORM}
    ours = laws.state_after_rounds(3, "feddyn", {"alpha": 0.2, "clip_norm": 0.0}, cohorts=COHORTS, **run)
    _, fed = toy.federation("feddyn", federation_type=PlainFederation, **run)
    task = fedavg.make_local_loss(fed.network)
    w, buffers = fed.initial_model()
    h = [tree_map(torch.zeros_like, w) for _ in range(4)]
    alphas = torch.tensor([0.2 / (n / 4) for n in (6, 2, 3, 5)], dtype=torch.float64)

    def objective(params, buffers, batch, context):
        alpha, h_i = context
        loss, aux = task(params, buffers, batch, None)
        for name, value in params.items():
            loss = loss + alpha * ((value * h_i[name]).sum() + (value - w[name]).square().sum() / 2)
        return loss, aux

    for round, members in enumerate(COHORTS):
        cohort = fed.cohort_of(round, members)
        context = (alphas[members], stack([h[client] for client in members]))
        clients, _ = fed.train(fed.broadcast(w, buffers, cohort), cohort, objective, context, (0, 0))
        for place, client in enumerate(members):
            end = select(clients.params, place)
            h[client] = {name: h[client][name] + end[name] - w[name] for name in w}
        mean_h = {name: sum(h_i[name] for h_i in h) / 4 for name in w}
        w = {name: clients.params[name].sum(0) / 2 + mean_h[name] for name in w}
        buffers = {name: value.sum(0) / 2 for name, value in clients.buffers.items()}
    laws.assert_agree((ours.params, ours.buffers), (w, buffers), "the model and its statistics")


def test_under_uniform_weighting_all_clients_of_feddyn_have_one_alpha():
    alpha_of_clients = feddyn.client_alphas(0.2, torch.ones(3), 1.0)
    assert alpha_of_clients.tolist() == pytest.approx([0.2] * 3)

    sizes = toy.toy_parts((6, 2, 3, 5))
    equal = toy.toy_parts((4, 4, 4, 4))

    def alphas(parts, weighting):
        """What the clients are given in a round in which none trains."""
        setup, fed = toy.federation("feddyn", {"alpha": 0.2}, parts=parts, weighting=weighting)
        contexts = []

        def train(clients, cohort, step, context, axes):
            contexts.append(context)
            return clients, {}

        fed.train = train
        laws.method_round(setup, fed, laws.initial_state(setup, fed), fed.cohort(0))
        (context,) = contexts
        return context.alpha

    assert (alphas(sizes, "uniform") == 0.2).all()
    assert not (alphas(sizes, "examples") == 0.2).all()
    assert (alphas(equal, "examples") == 0.2).all()


def simplified(alpha, **run):
    return toy.federation("feddyn", {"form": "simplified", "alpha": alpha}, cohort_size=2, **run)


def test_feddyns_simplified_form_begins_as_fedavg():
    """It is FedAvg in its first round, and in all with alpha = 0, and keeps the last models."""
    first = toy.simulate(*simplified(0.1), 1, COHORTS)
    fedavgs_first = laws.state_after_rounds(1, "fedavg", cohorts=COHORTS, cohort_size=2)
    laws.assert_agree(first.params, fedavgs_first.params, "the first round")
    dual_0 = first.clients[0].dual
    dual_1 = first.clients[1].dual
    mean = {name: (13 * dual_0[name] + 7 * dual_1[name]) / 20 for name in first.params}
    laws.assert_agree(first.params, mean, "the mean of what the clients keep")

    off = toy.simulate(*simplified(0.0), 3, COHORTS)
    fedavgs = laws.state_after_rounds(3, "fedavg", cohorts=COHORTS, cohort_size=2)
    laws.assert_agree(off.params, fedavgs.params, "alpha = 0")


def test_feddyns_simplified_form_pulls_to_the_global_model():
    """One full-batch step: the second round differs from a plain one by -lr alpha_i (w_i of before - w_g)."""
    run = {"local_epochs": 1, "batch_size": 16, "momentum": 0.0}
    setup, fed = simplified(0.2, **run)
    plain, _ = simplified(0.0, **run)
    first = toy.simulate(setup, fed, 1, COHORTS)
    cohort = fed.cohort_of(1, [0, 1])

    pulled, _ = laws.method_round(setup, fed, first, cohort)
    free, _ = laws.method_round(plain, fed, first, cohort)

    for client, n in ((0, 13), (1, 7)):
        alpha_i = 0.2 / (n / 8.5)
        for name, w_g in first.params.items():
            pull = alpha_i * (first.clients[client].dual[name] - w_g)
            difference = pulled.clients[client].dual[name] - free.clients[client].dual[name]
            torch.testing.assert_close(difference, -setup.config.lr * pull, rtol=1e-7, atol=1e-12)


# MOON


def test_moons_term_is_the_cross_entropy_of_two_cosines():
    z, z_global, z_previous = randn(3, 6, 5)
    pair = torch.stack([F.cosine_similarity(z, other) for other in (z_global, z_previous)], 1) / 0.5
    expected = F.cross_entropy(pair, torch.zeros(6, dtype=torch.int64))
    torch.testing.assert_close(model_contrastive(z, z_global, z_previous, 0.5), expected)


@pytest.mark.parametrize("length", [0.0, 1e-20, 1e-8])
@pytest.mark.parametrize("model", ["own", "global", "previous"])
def test_a_feature_without_direction_has_cosine_0_and_no_gradient(model, length):
    features = {"own": randn(6, 5, seed=0), "global": randn(6, 5, seed=1), "previous": randn(6, 5, seed=2)}
    features[model][2] = length
    another = features["global" if model == "own" else "own"]
    assert cosine(features[model], another)[2] == 0

    z = features["own"].requires_grad_()
    model_contrastive(z, features["global"], features["previous"], 0.5).backward()
    assert z.grad.abs().max() < 10
    assert (z.grad[2] == 0).all() == (model == "own")  # of the two terms, the one that has a direction remains


def test_moons_other_models_run_in_evaluation_mode_and_are_constants():
    setup, fed = toy.federation("moon", backbone=toy.BATCHNORM, local_epochs=1)

    def with_gradients(params):
        return {name: value.clone().requires_grad_() for name, value in params.items()}

    params, buffers = fed.initial_model()
    state = toy.simulate(setup, fed, 1)
    context = moon.Context(
        with_gradients(params), buffers, with_gradients(state.params), state.buffers, torch.tensor(True)
    )
    batch = minibatch(fed, 4)
    client_state = state.clients[2]
    local_loss = moon.make_local_loss(fed.network, moon.Config(contrastive_weight=3.0, temperature=0.2))
    loss, aux = local_loss(*client_state, batch, context)

    features, logits, _ = fed.network(*client_state, batch.x)
    z_global = fed.network(params, buffers, batch.x, train=False).features
    z_previous = fed.network(state.params, state.buffers, batch.x, train=False).features
    contrast = model_contrastive(features, z_global, z_previous, 0.2)
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.y) + 3 * contrast)
    torch.testing.assert_close(aux.terms["contrastive"], contrast)
    assert not loss.requires_grad  # the client's own parameters do not ask for a gradient here


def test_a_new_client_of_moon_trains_without_the_term():
    setup, fed = toy.federation("moon", cohort_size=2)
    start = laws.initial_state(setup, fed)
    state, terms = laws.method_round(setup, fed, start, fed.cohort_of(0, [0, 1]))
    assert terms["contrastive"].tolist() == [0, 0]

    cohort = fed.cohort_of(1, [1, 2])
    after, terms = laws.method_round(setup, fed, state, cohort)
    assert terms["contrastive"][0] > 0.1  # client 1 has a previous model
    assert terms["contrastive"][1] == 0

    received = fed.broadcast(state.params, state.buffers, cohort)
    plain, _ = fed.train(received, cohort, fedavg.make_local_loss(fed.network))
    for name, value in plain.params.items():
        torch.testing.assert_close(after.clients[2].params[name], value[1])
        assert not torch.allclose(after.clients[1].params[name], value[0], rtol=1e-6)
