"""FedDyn: Algorithm 1 in a slow loop, and FedFA's form of it."""

import torch

from fedcli.core.trees import select, stack
from fedcli.papers.baselines.fedavg import make_local_loss
from tests import laws

COHORTS = ([0, 1], [1, 3], [0, 2])


def test_without_clipping_it_is_algorithm_1_in_a_slow_loop():
    """Three rounds with two of four clients, in h_i, with alpha by a client's size, and plain means also of buffers."""
    run = {"parts": laws.toy_parts((6, 2, 3, 5)), "cohort_size": 2, "local_epochs": 1, "backbone": laws.NORMED}
    ours = laws.simulate(*laws.federation("feddyn", {"alpha": 0.2, "clip_norm": 0.0}, **run), 3, COHORTS)
    _, fed = laws.federation("feddyn", reference=True, **run)
    task, (w, buffers) = make_local_loss(fed.network), fed.initial_model()
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
        context = (
            torch.tensor([alphas[client] for client in members]).double(),
            stack([h[client] for client in members]),
        )
        clients, _ = fed.train(fed.broadcast(w, buffers, cohort), cohort, objective, context, (0, 0))
        ends = [select(clients.params, place) for place in range(2)]
        for client, end in zip(members, ends, strict=True):
            h[client] = {name: h[client][name] + end[name] - w[name] for name in w}
        w = {name: (ends[0][name] + ends[1][name]) / 2 + sum(one[name] for one in h) / 4 for name in w}
        buffers = {name: value.sum(0) / 2 for name, value in clients.buffers.items()}
    laws.assert_agree((ours.params, ours.buffers), (w, buffers), "the model and its statistics")


def simplified(alpha, **run):
    return laws.federation("feddyn", {"form": "simplified", "alpha": alpha}, cohort_size=2, **run)


def test_the_simplified_form_is_fedavg_in_its_first_round_and_with_alpha_0_and_keeps_the_last_models():
    base = laws.federation("fedavg", cohort_size=2)
    first = laws.simulate(*simplified(0.1), 1, COHORTS)
    laws.assert_agree(first.params, laws.simulate(*base, 1, COHORTS).params, "the first round")
    mean = {name: (13 * first.clients[0].dual[name] + 7 * first.clients[1].dual[name]) / 20 for name in first.params}
    laws.assert_agree(first.params, mean, "the mean of what the clients keep")
    off = laws.simulate(*simplified(0.0), 3, COHORTS)
    laws.assert_agree(off.params, laws.simulate(*base, 3, COHORTS).params, "alpha = 0")


def test_the_simplified_form_pulls_from_the_last_local_model_to_the_global_one():
    """One full-batch step: the second round differs from a plain one by -lr alpha_i (w_i of before - w_g)."""
    (setup, fed), (plain, _) = (simplified(alpha, local_epochs=1, batch_size=16, momentum=0.0) for alpha in (0.2, 0.0))
    first = laws.simulate(setup, fed, 1, COHORTS)
    ends = [s.method.run_round(first, fed.cohort_of(1, [0, 1]), fed, s.options)[0].clients for s in (setup, plain)]
    for client, n in ((0, 13), (1, 7)):
        for name, value in first.params.items():
            pull = 0.2 / (n / 8.5) * (first.clients[client].dual[name] - value)
            difference = ends[0][client].dual[name] - ends[1][client].dual[name]
            torch.testing.assert_close(difference, -setup.run.lr * pull, rtol=1e-7, atol=1e-12)
