"""FedKD: truncation and what it costs by hand, the objective, and clients that stay in step with the server."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fedcli.papers.baselines import fedkd, fml
from fedcli.papers.baselines.fedkd import Factors, compress, energy_share, restore, truncate
from fedcli.papers.baselines.fml import joined, part

from fedcli.core.batches import Batch
from fedcli.core.trees import count_floats
from fedcli.registry import find_method
from tests import laws

FEDKD = find_method("fedkd")
MIXED = {"backbone": "cnn-small,cnn-mcmahan", "data": laws.toy_dataset(size=16)}


def with_values(values, rows, columns, seed=0):
    """A matrix of these singular values."""
    draw = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(size, len(values), dtype=torch.float64, generator=draw))[0]
        for size in (rows, columns)
    )
    return (u * torch.tensor(values, dtype=torch.float64)) @ v.T


@pytest.mark.parametrize(("share", "rank"), [(0.6, 1), (0.65, 2), (0.92, 2), (0.93, 3), (1.0, 3)])
def test_truncation_by_hand(share, rank):
    matrix = with_values([3.0, 2.0, 1.0], 5, 7)  # squares 9, 4, 1 of 14: 64.3 %, 92.9 %, 100 %
    factors = truncate(matrix, share)
    assert [list(part.shape) for part in factors] == [[5, rank], [rank], [rank, 7]]
    torch.testing.assert_close(factors.s, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)[:rank])
    lost = (restore(factors, matrix) - matrix).square().sum().item()
    assert lost == pytest.approx(sum([9.0, 4.0, 1.0][rank:]), abs=1e-12)


def test_what_is_sent_of_a_tensor():
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


def example_loss(config):
    _, fed = laws.federation(FEDKD, **MIXED)
    mentee, mentor = fed.networks
    models = [fed.initial_model(network) for network in (mentor, mentee)]
    params, buffers = (joined(*trees) for trees in zip(*models, strict=True))
    params = {**params, "projection": fedkd.initial_projection(mentor, mentee, fed)}
    params = {name: value.requires_grad_() for name, value in params.items()}
    x, y = fed.engine.gather(np.arange(6))
    batch = Batch(x, y, None, torch.tensor(True), torch.tensor(1), torch.tensor(0.1))
    loss, aux = fedkd.make_local_loss(mentor, mentee, config)(params, buffers, batch, None)
    own, shared = (net(part(params, name), {}, x) for net, name in ((mentor, fml.PRIVATE), (mentee, fml.SHARED)))
    return params, loss, aux, own, shared, y


def test_each_network_follows_its_own_loss():
    params, loss, aux, own, shared, y = example_loss(fedkd.Config(distillation_weight=0.5))
    tasks = F.cross_entropy(own.logits, y), F.cross_entropy(shared.logits, y)
    divisor = sum(tasks).detach()

    def learned(logits, other, features, projected):
        to_other = F.kl_div(F.log_softmax(logits, 1), F.softmax(other, 1).detach(), reduction="batchmean")
        return 0.5 * (to_other + F.mse_loss(features, projected)) / divisor

    projection = params["projection"]
    assert projection.shape == (512, 64)
    projected = F.linear(shared.features, projection)
    mentor = tasks[0] + learned(own.logits, shared.logits, own.features, projected.detach())
    mentee = tasks[1] + learned(shared.logits, own.logits, own.features.detach(), projected)
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()), retain_graph=True), strict=True))
    for expected, prefixes in ((mentor, ("private.",)), (mentee, ("shared.", "projection"))):
        names = [name for name in params if name.startswith(prefixes)]
        found = torch.autograd.grad(expected, [params[name] for name in names], retain_graph=True)
        for name, grad in zip(names, found, strict=True):
            torch.testing.assert_close(grads[name], grad)
    torch.testing.assert_close(loss, mentor + mentee - 0.5 * aux.terms["hidden"] / divisor)  # both have that term
    assert aux.outputs.shape == (6, 512)


def mentees(*changes):
    """A server state with one matrix and one vector, and clients whose matrices have moved by `changes`."""
    params = {"matrix": torch.ones(6, 8, dtype=torch.float64), "vector": torch.zeros(3, dtype=torch.float64)}
    trained = {
        "matrix": params["matrix"] + torch.stack(changes),
        "vector": torch.arange(3 * len(changes)).reshape(-1, 3).double(),
    }
    return fedkd.ServerState(params, {}, torch.arange(4), {}), trained


def test_exchange_by_hand_and_what_it_sends():
    _, fed = laws.federation(FEDKD)
    first, second = with_values([4.0, 0.5], 6, 8, seed=1), with_values([2.0, 2.0], 6, 8, seed=2)
    state, trained = mentees(first, second)
    new = fedkd.exchange(trained, state, fed.cohort_of(0, [0, 1]), fed, share=0.95)
    mean = (restore(truncate(first, 0.95), first) + second) / 2  # 16 of 16.25 are enough for the first
    expected = state.params["matrix"] + restore(truncate(mean, 0.95), mean)
    torch.testing.assert_close(new["matrix"], expected)
    assert new["vector"].tolist() == [1.5, 2.5, 3.5]
    assert fed.sent_up["other"] == (15 + 3) + (30 + 3)
    rank = len(truncate(mean, 0.95).s)
    assert fed.sent_down["other"] == 2 * (15 * rank + 3)


def test_without_truncation_the_mentee_is_the_plain_mean():
    setup, fed = laws.federation(FEDKD, {"energy_start": 1.0, "energy_end": 1.0}, **MIXED)
    start = setup.method.init(fed, setup.options)
    _, (trained, _), _ = fedkd.train_clients(start, fed.cohort(0), fed, setup.options)
    after, _ = setup.method.run_round(start, fed.cohort(0), fed, setup.options)
    laws.assert_agree(after.params, {name: value.mean(0) for name, value in trained.items()}, "the mentee")
    setup, fed = laws.federation(FEDKD, **MIXED)
    truncated, _ = setup.method.run_round(start, fed.cohort(0), fed, setup.options)
    change, exact = ({name: one.params[name] - start.params[name] for name in one.params} for one in (truncated, after))
    assert 0.05 < laws.distance(change, exact) < 0.5


def test_who_sat_out_is_sent_the_whole_mentee():
    setup, fed = laws.federation(FEDKD, cohort_size=2)
    state = setup.method.init(fed, setup.options)
    size = fed.sizes.parameters
    for clients, whole in (([0, 1], 0), ([1, 0], 0), ([1, 2], 1), ([0, 3], 2)):
        fed.start_round()
        state, _ = setup.method.run_round(state, fed.cohort_of(0, clients), fed, setup.options)
        assert fed.sent_down["params"] == whole * size
        assert fed.sent_down["other"] < 2 * size
        assert state.in_step.tolist() == sorted(clients)


def test_factors_are_smaller_than_the_mentee():
    setup, fed = laws.federation(FEDKD)
    state = laws.simulate(setup, fed, 1)
    assert 0 < fed.sent_up["other"] < 4 * count_floats(state.params) / 2
    assert 0 < fed.sent_down["other"] < 4 * count_floats(state.params)
    assert fed.sent_down["params"] == fed.sent_up["params"] == 0


def test_running_statistics_are_averaged_and_sent_as_they_are(monkeypatch):
    monkeypatch.setattr(fedkd, "exchange", lambda trained, state, *rest: state.params)  # slow for so many weights
    run = {"local_epochs": 1, "parts": laws.toy_parts((4, 3, 2, 3)), "data": laws.toy_dataset(num_train=12, channels=3)}
    setup, fed = laws.federation(FEDKD, backbone="resnet10-3x3,cnn-small", **run)
    start = setup.method.init(fed, setup.options)
    _, (_, trained), _ = fedkd.train_clients(start, fed.cohort(0), fed, setup.options)
    after, _ = setup.method.run_round(start, fed.cohort(0), fed, setup.options)
    assert fed.sent_down["buffers"] == fed.sent_up["buffers"] == 4 * count_floats(start.buffers)
    laws.assert_agree(after.buffers, {name: value.mean(0) for name, value in trained.items()}, "the statistics")
    assert laws.distance(after.buffers, start.buffers) > 1e-3


def test_clients_keep_mentor_and_projection_and_are_tested_with_the_mentor():
    setup, fed = laws.federation(FEDKD, **MIXED)
    state = laws.simulate(setup, fed, 1)
    for client, own in state.clients.items():
        network = fed.networks[fed.architecture[client]]
        assert own.params.keys() == fed.initial_model(network)[0].keys()
        first = fedkd.initial_projection(network, fed.networks[0], fed)
        assert own.projection.shape == (network.feature_dim, 64)
        assert laws.distance(own.projection, first) > 1e-4
        assert setup.method.personal(state)[client][0] is own.params


def test_chunking_is_invisible_with_different_networks():
    laws.law_4_chunking_is_invisible(FEDKD, rounds=2, chunks=(2,), **MIXED)


def test_restore_gives_the_shape_back():
    tensor = torch.randn(4, 3, 2, 2)
    sent = Factors(*torch.linalg.svd(tensor.flatten(1), full_matrices=False))
    torch.testing.assert_close(restore(sent, tensor), tensor)
