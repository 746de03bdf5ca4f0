"""FML and FedKD, with two networks a client: rounds against plain loops, and what is truncated and sent by hand."""

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli import toy
from fedcli.core import divergence
from fedcli.core.clients import Client
from fedcli.core.network_pairs import PRIVATE, SHARED, join_tensors, separate_models
from fedcli.core.trees import count_floats, tree_map
from fedcli.papers.baselines import fedkd, fml
from fedcli.papers.baselines.fedkd import compress, energy_share, restore, truncate
from tests import laws
from tests.first_rounds import minibatch
from tests.networks import TWO_NETWORKS
from tests.plain_loops import Model, train_pair
from tests.tensors import randn

RUN = {"momentum": 0.0, "weight_decay": 0.0, "rounds": 3, "local_epochs": 1, **TWO_NETWORKS}


class Form(NamedTuple):
    """The form of a method, and the bound of its gradients' norms, which is reached."""

    name: str
    bound: float


@pytest.fixture(params=["paper", "code"])
def form(request, monkeypatch):
    bound = 0.05
    monkeypatch.setattr(fml, "CLIP_NORM", bound)
    monkeypatch.setattr(fedkd, "CLIP_NORM", bound)
    return Form(request.param, bound if request.param == "code" else math.inf)


def test_divergence_is_torchs():
    logits = randn(6, 4, seed=0)
    teacher = randn(6, 4, seed=1)
    expected = F.kl_div(F.log_softmax(logits, 1), F.softmax(teacher, 1), reduction="batchmean")
    torch.testing.assert_close(divergence(logits, teacher), expected)


def test_three_rounds_of_fml_are_those_of_a_plain_loop(form):
    options = {"form": form.name, "private_task_share": 0.3, "shared_task_share": 0.6}
    setup, fed = toy.federation("fml", options, lr=0.2, **RUN)
    clipped_steps = 0

    def losses(private, shared, y):
        _, output = private
        _, output_g = shared
        if form.name == "code":  # 3 classes: its divergence is a mean over them too
            to_shared = divergence(output, output_g) / 3
            to_private = divergence(output_g, output) / 3
        else:
            to_shared = divergence(output, output_g.detach())
            to_private = divergence(output_g, output.detach())
        yield F.cross_entropy(output, y) * 0.3 + to_shared * 0.7
        yield F.cross_entropy(output_g, y) * 0.6 + to_private * 0.4

    def plain_round(fed, setup, round, models, received):
        nonlocal clipped_steps
        after = {}
        sent = []
        for client in range(fed.num_clients):
            private = models.get(client, fed.initial_model(fed.networks[fed.architecture[client]]))
            trained = train_pair(fed, round, client, private, Model(received, {}), losses, form.bound)
            after[client] = (trained.private, {})
            sent.append(trained.shared)
            clipped_steps += trained.num_clipped
        return after, {name: sum(params[name] for params in sent) / len(sent) for name in received}

    shared = laws.initial_state(setup, fed).params
    laws.assert_rounds_agree(setup, fed, plain_round, shared, lambda state: state.params)
    assert (clipped_steps > 10) == (form.name == "code")


def test_fml_averages_shared_networks_and_their_statistics_without_weights():
    setup, fed = toy.federation("fml", backbone=f"{toy.BATCHNORM},cnn-small", local_epochs=1)
    cohort = fed.cohort(0)
    start = laws.initial_state(setup, fed)
    shared_network, _ = fed.networks

    sent = []
    for group in fed.groups(cohort):
        private = fed.broadcast(*fed.initial_model(group.network), group)
        shared = fed.broadcast(start.params, start.buffers, group)
        both = Client(join_tensors(private.params, shared.params), join_tensors(private.buffers, shared.buffers), {})
        both, _ = fed.train(both, group, fml.make_local_loss(group.network, shared_network, setup.method_config))
        sent.append(separate_models(both).shared)
    mean = tree_map(lambda first, second: torch.cat([first, second]).mean(0), *sent)

    after, _ = laws.method_round(setup, fed, start, cohort)
    laws.assert_agree((after.params, after.buffers), mean, "the shared network")
    assert after.buffers


# FedKD


def with_values(values, rows, columns, seed=0):
    """A matrix of these singular values."""
    u, _ = torch.linalg.qr(randn(rows, len(values), seed=seed + rows))
    v, _ = torch.linalg.qr(randn(columns, len(values), seed=seed + columns))
    return (u * torch.tensor(values, dtype=torch.float64)) @ v.T


@pytest.mark.parametrize(("share", "rank"), [(0.6, 1), (0.65, 2), (0.92, 2), (0.93, 3), (1.0, 3)])
def test_truncation_keeps_the_fewest_singular_values_that_have_the_share(share, rank):
    matrix = with_values([3.0, 2.0, 1.0], 5, 7)  # squares 9, 4, 1 of 14: 64.3 %, 92.9 %, 100 %
    factors = truncate(matrix, share)
    assert [list(factor.shape) for factor in factors] == [[5, rank], [rank], [rank, 7]]
    torch.testing.assert_close(factors.s, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)[:rank])
    lost = (restore(factors, matrix) - matrix).square().sum().item()
    assert lost == pytest.approx(sum([9.0, 4.0, 1.0][rank:]), abs=1e-12)


def test_a_matrix_is_sent_in_factors_where_these_are_fewer_floats():
    matrix = with_values([3.0, 0.1], 6, 8)
    assert count_floats(compress(matrix, 0.95)) == 6 + 1 + 8
    assert count_floats(compress(with_values([3.0, 3.0, 3.0], 6, 8), 0.95)) == 3 * (6 + 1 + 8)

    full = with_values([1.0] * 4, 4, 5)
    assert compress(full, 0.95) is full  # 40 floats in factors, 20 as it is

    convolution = matrix.reshape(6, 2, 2, 2)
    sent = compress(convolution, 1.0)
    assert count_floats(sent) == 2 * (6 + 1 + 8)
    torch.testing.assert_close(restore(sent, convolution), convolution)

    vector = torch.ones(9)
    assert compress(vector, 0.95) is vector

    nothing = compress(torch.zeros(6, 8), 0.95)
    assert count_floats(nothing) == 0
    assert (restore(nothing, matrix) == 0).all()


def test_the_share_grows_from_round_to_round():
    assert [round(energy_share(0.95, 0.98, t, 3), 10) for t in range(3)] == [0.96, 0.97, 0.98]


def test_clients_send_truncated_changes_and_the_server_their_truncated_mean():
    _, fed = toy.federation("fedkd")
    first_change = with_values([4.0, 0.5], 6, 8, seed=1)
    second_change = with_values([2.0, 2.0], 6, 8, seed=2)
    params = {"matrix": torch.ones(6, 8, dtype=torch.float64), "vector": torch.zeros(3, dtype=torch.float64)}
    trained = {
        "matrix": 1 + torch.stack([first_change, second_change]), "vector": torch.arange(6.0).reshape(2, 3),
    }  # fmt: skip
    new = fedkd.exchange(trained, params, fed.cohort_of(0, [0, 1]), fed, share=0.95)

    first_sent = restore(truncate(first_change, 0.95), first_change)  # one value: 16 of 16.25 are enough
    mean = (first_sent + second_change) / 2
    sent = truncate(mean, 0.95)
    torch.testing.assert_close(new["matrix"], 1 + restore(sent, mean))
    assert new["vector"].tolist() == [1.5, 2.5, 3.5]
    assert fed.traffic.up["other"] == (15 + 3) + (30 + 3)
    assert fed.traffic.down["other"] == 2 * (15 * len(sent.s) + 3)


def truncate_plainly(weights, share):
    """What HtFLlib leaves of a tensor, by its description: the least number of values that exceeds the share, or 0."""
    if weights.ndim < 2 or weights.shape[0] < 2:
        return weights
    u, s, v = np.linalg.svd(weights, full_matrices=False)
    enough = [count for count in range(s.shape[-1]) if (s[..., :count] ** 2).sum() > share * (s**2).sum()]
    left = np.zeros_like(weights)
    for r in range(min(enough, default=0)):
        left += u[..., r, None] * s[..., r, None, None] * v[..., r, None, :]
    return left


@pytest.mark.parametrize(
    ("shape", "share", "is_nothing"),
    [
        ((8, 6), 0.5, False),
        ((1, 9), 0.9, False),
        ((7,), 0.9, False),
        ((4, 3, 5, 5), 0.6, False),
        ((4, 3, 1, 1), 0.95, True),  # all values would be needed, here and in the next
        ((3, 64), 0.95, True),
    ],
)
def test_the_codes_form_leaves_of_a_tensor_what_htfllib_does(shape, share, is_nothing):
    weights = np.random.default_rng(0).standard_normal(shape)
    sent = fedkd.truncate_as_htfllib(torch.from_numpy(weights), share)
    left = restore(sent, torch.from_numpy(weights)).numpy()
    np.testing.assert_allclose(left, truncate_plainly(weights, share), atol=1e-12)
    assert (abs(left).max() == 0) == is_nothing
    assert (count_floats(sent) == 0) == is_nothing


def test_three_rounds_of_fedkd_are_those_of_a_plain_loop(form):
    options = {"form": form.name, "distillation_weight": 0.7, "energy_start": 0.6, "energy_end": 0.9}
    setup, fed = toy.federation("fedkd", options, lr=0.1, **RUN)
    clipped_steps = 0

    def losses(private, shared, y, w_h):
        rep, output = private
        rep_g, output_g = shared
        task = F.cross_entropy(output, y)
        task_g = F.cross_entropy(output_g, y)
        hidden = F.mse_loss(rep, w_h(rep_g))
        if form.name == "code":  # its divergence is a mean also over classes
            weight = 0.7 / (task + task_g)
            yield task + weight * (divergence(output, output_g) / 3 + hidden)
            yield task_g + weight * (divergence(output_g, output) / 3 + hidden)
        else:
            weight = 0.7 / (task + task_g).detach()
            yield task + weight * (divergence(output, output_g.detach()) + hidden)
            yield task_g + weight * divergence(output_g, output.detach())

    def exchange(sent, mentee, share):
        """The new mentee, of what the clients send of theirs."""
        new = {}
        for name, start in mentee.items():
            if form.name == "code":
                mean = sum(truncate_plainly(params[name].numpy(), share) for params in sent) / len(sent)
                new[name] = torch.from_numpy(truncate_plainly(mean, share))
            else:
                mean = sum(restore(compress(params[name] - start, share), start) for params in sent) / len(sent)
                new[name] = start + restore(compress(mean, share), start)
        return new

    def plain_round(fed, setup, round, kept, mentee):
        nonlocal clipped_steps
        after = {}
        sent = []
        for client in range(fed.num_clients):
            network = fed.networks[fed.architecture[client]]
            first = (*fed.initial_model(network), fedkd.initial_projection(network, fed.networks[0], fed))
            *mentor, projection = kept.get(client, first)
            width, mentee_width = projection.shape
            w_h = nn.Linear(mentee_width, width, bias=False).double()
            w_h.load_state_dict({"weight": projection})

            losses_of_client = partial(losses, w_h=w_h)
            trained = train_pair(
                fed, round, client, Model(*mentor), Model(mentee, {}), losses_of_client, form.bound, further=w_h
            )
            after[client] = (trained.private, {}, trained.further["weight"])
            sent.append(trained.shared)
            clipped_steps += trained.num_clipped
        exchanges = round if form.name == "code" else round + 1
        return after, exchange(sent, mentee, 0.6 + 0.3 * exchanges / 3)

    mentee = laws.initial_state(setup, fed).params
    laws.assert_rounds_agree(setup, fed, plain_round, mentee, lambda state: state.params)
    assert (clipped_steps > 10) == (form.name == "code")


def test_a_client_that_is_certain_divides_by_almost_nothing():
    _, fed = toy.federation("fedkd", **TWO_NETWORKS)
    mentee, mentor = fed.networks
    mentor_params, _ = fed.initial_model(mentor)
    mentee_params, _ = fed.initial_model(mentee)
    params = join_tensors(mentor_params, mentee_params)
    params["projection"] = fedkd.initial_projection(mentor, mentee, fed)
    batch = minibatch(fed, 6)
    batch = batch._replace(y=batch.y[:1].expand(6))
    for prefix in (PRIVATE, SHARED):
        params[prefix + "head.bias"] = 1e4 * F.one_hot(batch.y[0], 3).double()
    params = {name: value.requires_grad_() for name, value in params.items()}
    loss, aux = fedkd.make_htfllib_loss(mentor, mentee, fedkd.Config(form="code"))(params, {}, batch, None)
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    assert all(torch.isfinite(grad).all() for grad in grads if grad is not None)
    assert aux.outputs.shape == (6, 512)  # the mentor's features


def test_who_sat_out_is_sent_the_whole_mentee():
    setup, fed = toy.federation("fedkd", cohort_size=2)
    state = laws.initial_state(setup, fed)
    size = fed.sizes.parameters
    for clients, newcomers in (([0, 1], 0), ([1, 0], 0), ([1, 2], 1), ([0, 3], 2)):
        fed.start_round()
        state, _ = laws.method_round(setup, fed, state, fed.cohort_of(0, clients))
        assert fed.traffic.down["params"] == newcomers * size
        assert fed.traffic.down["other"] < 2 * size
        assert state.in_step.tolist() == sorted(clients)


def test_running_statistics_are_averaged_and_sent_as_they_are(monkeypatch):
    monkeypatch.setattr(fedkd, "exchange", lambda trained, before, *rest: before)  # slow for so many weights
    setup, fed = toy.federation("fedkd", backbone=f"{toy.BATCHNORM},cnn-small", local_epochs=1)
    start = laws.initial_state(setup, fed)
    make_loss = partial(fedkd.make_local_loss, config=setup.method_config)
    _, mentees, _ = fedkd.train_clients(start, fed.cohort(0), fed, make_loss)
    after, _ = laws.method_round(setup, fed, start, fed.cohort(0))
    assert fed.traffic.down["buffers"] == fed.traffic.up["buffers"] == 4 * count_floats(start.buffers)
    laws.assert_agree(after.buffers, {name: value.mean(0) for name, value in mentees.buffers.items()}, "the statistics")
    assert toy.distance(after.buffers, start.buffers) > 1e-3
