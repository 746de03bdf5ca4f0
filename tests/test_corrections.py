"""SCAFFOLD, FedDyn and MOON, whose clients keep what corrects their training: by hand and against slow loops."""

import pytest
import torch
import torch.nn.functional as F

from fedcli.core.trees import select, stack
from fedcli.papers.baselines import fedavg, feddyn, moon
from fedcli.papers.baselines.moon import cosine, model_contrastive
from fedcli.papers.baselines.scaffold import update_control
from tests import laws
from tests.reference import train_plainly
from tests.toys import minibatch, randn

# SCAFFOLD

ONE_STEP = {"local_epochs": 1, "batch_size": 16, "momentum": 0.0}  # one full batch for the toy clients


def full_gradient(fed, params, client):
    """Gradient of a client's whole objective with its weight decay, by one step of torch.optim."""
    end = train_plainly(fed, 0, client, (params, {}), lambda module, features, logits, y: F.cross_entropy(logits, y))
    return {name: (value - end[name]) / fed.config.lr for name, value in params.items()}


def test_a_client_without_steps_keeps_its_control():
    c_i, local = ({"w": torch.tensor([values])} for values in ([5.0, 6.0], [1.0, 1.0]))
    new = update_control(c_i, {"w": torch.ones(2)}, {"w": torch.ones(2)}, local, torch.tensor([0.0]), 0.1)
    assert new["w"].tolist() == [[5, 6]]


def test_two_rounds_of_scaffold_by_plain_gradients():
    """One full-batch step a round: c_i is the gradient with its weight decay, c a mean weighted by n_i / 34."""
    setup, fed = laws.federation("scaffold", cohort_size=2, lr_decay=0.5, **ONE_STEP)
    lr = setup.run.lr / 2  # of the second round
    start, cohorts = fed.initial_model()[0], ([0, 1], [0, 2])
    before, after = (laws.simulate(setup, fed, rounds, cohorts) for rounds in (1, 2))
    first = {client: full_gradient(fed, start, client) for client in (0, 1)}
    for client, g in first.items():
        laws.assert_agree(before.clients[client].c_i, g, f"c_i of client {client}")
    c = {name: (13 * first[0][name] + 7 * first[1][name]) / 34 for name in start}
    laws.assert_agree(before.c, c, "c")
    second = {client: full_gradient(fed, before.params, client) for client in (0, 2)}
    for name, x in before.params.items():
        direction = 13 / 23 * (second[0][name] - first[0][name]) + 10 / 23 * second[2][name] + c[name]
        torch.testing.assert_close(after.params[name], x - lr * direction, rtol=1e-9, atol=1e-12)
        mean = c[name] + (13 * (second[0][name] - first[0][name]) + 10 * second[2][name]) / 34
        torch.testing.assert_close(after.c[name], mean, rtol=1e-8, atol=1e-11)
    for client in (0, 2):  # option II gives back the gradient that the correction was added to
        laws.assert_agree(after.clients[client].c_i, second[client], f"c_i of client {client}")


def test_under_uniform_weighting_scaffold_is_algorithm_1():
    """Line 16 has 1 / |S|, line 17 1 / N; one full-batch step a round, two of four clients of different sizes."""
    setup, fed = laws.federation("scaffold", cohort_size=2, weighting="uniform", **ONE_STEP)
    start = fed.initial_model()[0]
    state = laws.simulate(setup, fed, 1, ([0, 1],))
    first = [full_gradient(fed, start, client) for client in (0, 1)]
    laws.assert_agree(state.c, {name: (first[0][name] + first[1][name]) / 4 for name in start}, "c")
    moved = {name: start[name] - setup.run.lr * (first[0][name] + first[1][name]) / 2 for name in start}
    laws.assert_agree(state.params, moved, "the model")


def test_with_momentum_a_client_has_gone_as_far_as_it_would_along_a_constant_gradient():
    """After a single step, which has no momentum yet, c_i is (1 - rho) times the gradient."""
    setup, fed = laws.federation("scaffold", **{**ONE_STEP, "momentum": 0.9, "weight_decay": 0.0})
    gradient = full_gradient(fed, fed.initial_model()[0], 1)
    expected = {name: 0.1 * value for name, value in gradient.items()}
    laws.assert_agree(laws.simulate(setup, fed, 1).clients[1].c_i, expected, "c_i")


def test_scaffolds_rate_of_the_server_scales_the_parameters_and_not_the_buffers():
    run = {"backbone": laws.NORMED, "local_epochs": 1}
    setup, fed = laws.federation("scaffold", {"server_lr": 0.5, "clip_norm": 0.0}, **run)
    state, average = laws.simulate(setup, fed, 1), laws.simulate(*laws.federation("fedavg", **run), 1)
    half = {name: (value + average.params[name]) / 2 for name, value in fed.initial_model()[0].items()}
    laws.assert_agree((state.params, state.buffers), (half, average.buffers), "half the way, and all of the buffers")


# FedDyn

COHORTS = ([0, 1], [1, 3], [0, 2])


def test_without_clipping_feddyn_is_algorithm_1_in_a_slow_loop():
    """Three rounds with two of four clients, in h_i, with alpha by a client's size, and plain means also of buffers."""
    run = {"parts": laws.toy_parts((6, 2, 3, 5)), "cohort_size": 2, "local_epochs": 1, "backbone": laws.NORMED}
    ours = laws.simulate(*laws.federation("feddyn", {"alpha": 0.2, "clip_norm": 0.0}, **run), 3, COHORTS)
    _, fed = laws.federation("feddyn", reference=True, **run)
    task, (w, buffers) = fedavg.make_local_loss(fed.network), fed.initial_model()
    h = [{name: torch.zeros_like(value) for name, value in w.items()} for _ in range(4)]
    alphas = [0.2 / (n / 4) for n in (6, 2, 3, 5)]

    def objective(params, buffers, batch, context):
        alpha, h_i = context
        loss, aux = task(params, buffers, batch, None)
        for name, value in params.items():
            loss = loss + alpha * ((value * h_i[name]).sum() + (value - w[name]).square().sum() / 2)
        return loss, aux

    for number, members in enumerate(COHORTS):
        cohort = fed.cohort_of(number, members)
        alpha, h_i = zip(*((alphas[client], h[client]) for client in members), strict=True)
        context = torch.tensor(alpha).double(), stack(h_i)
        clients, _ = fed.train(fed.broadcast(w, buffers, cohort), cohort, objective, context, (0, 0))
        ends = [select(clients.params, place) for place in range(2)]
        for client, end in zip(members, ends, strict=True):
            h[client] = {name: h[client][name] + end[name] - w[name] for name in w}
        w = {name: (ends[0][name] + ends[1][name]) / 2 + sum(one[name] for one in h) / 4 for name in w}
        buffers = {name: value.sum(0) / 2 for name, value in clients.buffers.items()}
    laws.assert_agree((ours.params, ours.buffers), (w, buffers), "the model and its statistics")


def test_under_uniform_weighting_all_clients_of_feddyn_have_one_alpha():
    one = feddyn.client_alphas(0.2, torch.ones(3), 1.0)
    assert one.tolist() == pytest.approx([0.2] * 3)
    sizes, equal = laws.toy_parts((6, 2, 3, 5)), laws.toy_parts((4, 4, 4, 4))
    for weighting, parts, same in (("uniform", sizes, True), ("examples", sizes, False), ("examples", equal, True)):
        setup, fed = laws.federation("feddyn", {"alpha": 0.2}, parts=parts, weighting=weighting)
        given = []
        fed.train = lambda clients, cohort, step, context, axes, given=given: given.append(context) or (clients, {})
        setup.method.run_round(setup.method.init(fed, setup.options), fed.cohort(0), fed, setup.options)
        assert (given[0].alpha == 0.2).all() == same


def simplified(alpha, **run):
    return laws.federation("feddyn", {"form": "simplified", "alpha": alpha}, cohort_size=2, **run)


def test_feddyns_simplified_form_is_fedavg_in_its_first_round_and_with_alpha_0_and_keeps_the_last_models():
    base = laws.federation("fedavg", cohort_size=2)
    first = laws.simulate(*simplified(0.1), 1, COHORTS)
    laws.assert_agree(first.params, laws.simulate(*base, 1, COHORTS).params, "the first round")
    mean = {name: (13 * first.clients[0].dual[name] + 7 * first.clients[1].dual[name]) / 20 for name in first.params}
    laws.assert_agree(first.params, mean, "the mean of what the clients keep")
    off = laws.simulate(*simplified(0.0), 3, COHORTS)
    laws.assert_agree(off.params, laws.simulate(*base, 3, COHORTS).params, "alpha = 0")


def test_feddyns_simplified_form_pulls_from_the_last_local_model_to_the_global_one():
    """One full-batch step: the second round differs from a plain one by -lr alpha_i (w_i of before - w_g)."""
    (setup, fed), (plain, _) = (simplified(alpha, local_epochs=1, batch_size=16, momentum=0.0) for alpha in (0.2, 0.0))
    first = laws.simulate(setup, fed, 1, COHORTS)
    ends = [s.method.run_round(first, fed.cohort_of(1, [0, 1]), fed, s.options)[0].clients for s in (setup, plain)]
    for client, n in ((0, 13), (1, 7)):
        for name, value in first.params.items():
            pull = 0.2 / (n / 8.5) * (first.clients[client].dual[name] - value)
            difference = ends[0][client].dual[name] - ends[1][client].dual[name]
            torch.testing.assert_close(difference, -setup.run.lr * pull, rtol=1e-7, atol=1e-12)


# MOON


def test_moons_term_is_the_cross_entropy_of_two_cosines():
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


def test_moons_other_models_run_in_evaluation_mode_and_are_constants():
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


def test_in_moon_taking_part_for_the_first_time_a_client_trains_without_the_term():
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
