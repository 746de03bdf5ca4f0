"""FedAvg, and methods that change one step of it, by hand and against plain loops.

FedAvgM, FedProx, FedRS, LG-FedAvg and FedNova.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core.learning_rates import schedule_factor
from fedcli.core.optimizers import AdamW
from fedcli.papers.baselines import fedavgm, fednova
from fedcli.papers.baselines.fedrs import class_scales, class_shares, restricted_cross_entropy
from tests import laws
from tests.networks import MIXED_NETWORKS
from tests.plain_loops import Model, train_plainly
from tests.tensors import randn
from tests.user_errors import raises_user_error


def test_weights_are_shares_of_the_cohorts_examples_validation_included():
    _, fed = toy.federation("fedavg", validation=0.25)
    np.testing.assert_allclose(fed.cohort_of(0, [0, 3]).weights.numpy(), [13 / 17, 4 / 17])
    assert [len(part) for part in fed.training] == [10, 6, 8, 3]
    assert [len(part) for part in fed.validation] == [3, 1, 2, 1]


def test_uniform_weighting_changes_nothing_but_the_weights():
    """Every client counts the same."""
    run = {"parts": toy.toy_parts((5, 3, 2, 0)), "weighting": "uniform"}
    setup, fed = toy.federation("fedavg", **run)
    cohort = fed.cohort_of(0, [0, 2, 3])
    assert cohort.weights.tolist() == [1 / 3] * 3
    assert cohort.num_examples.tolist() == [5, 2, 0]
    assert fed.class_counts(cohort).sum(1).tolist() == [5, 2, 0]

    params, buffers = fed.initial_model()
    ends = [train_plainly(fed, 0, client, Model(params, buffers)) for client in range(4)]
    mean = {name: sum(end.params[name] for end in ends) / 4 for name in params}
    laws.assert_agree(toy.simulate(setup, fed, 1).params, mean, "the model")


@pytest.mark.parametrize(("method", "mu"), [("fedavg", 0.0), ("fedprox", 0.7)])
def test_a_round_is_the_weighted_mean_of_clients_by_a_plain_loop(method, mu):
    options = {"proximal_weight": mu} if method == "fedprox" else {}
    sizes = (5, 3, 2, 2)
    setup, fed = toy.federation(method, options, parts=toy.toy_parts(sizes))
    received, buffers = fed.initial_model()

    def objective(module, features, logits, y):
        distance = sum((value - received[name]).square().sum() for name, value in module.named_parameters())
        return F.cross_entropy(logits, y) + mu / 2 * distance

    mean = {name: torch.zeros_like(value) for name, value in received.items()}
    for client, size in enumerate(sizes):
        end = train_plainly(fed, 0, client, Model(received, buffers), objective)
        for name in mean:
            mean[name] += size / 12 * end.params[name]
    laws.assert_agree(toy.simulate(setup, fed, 1).params, mean, "the model")


def test_the_learning_rate_decays_from_round_to_round():
    def third_round(setup, fed):
        return toy.simulate(setup, fed, 3, state=setup.method.init(fed, None), first=2)

    setup, decaying = toy.federation("fedavg", lr=0.04, lr_decay=0.5)
    assert [decaying.lr(round) for round in range(3)] == [0.04, 0.02, 0.01]
    at_a_quarter = third_round(*toy.federation("fedavg", lr=0.01))
    laws.assert_agree(third_round(setup, decaying), at_a_quarter, "the third round")

    _, linear = toy.federation("fedmd", lr_schedule="linear", rounds=40, lr=0.001)
    rates = [linear.lr(round) for round in (0, 1, 2, 39)]
    assert rates == pytest.approx([0.001, 0.001, 0.001 * (1 - 0.9 / 40), 0.001 * (1 - 0.9 * 38 / 40)])
    assert next(linear.public_batches(39)).lr.item() == pytest.approx(rates[3])


def test_schedules_are_those_of_pytorch_over_all_rounds_and_a_warm_up_rises_to_the_full_rate():
    def rates(**options):
        _, fed = toy.federation("fedavg", lr=0.1, **options)
        return [fed.lr(round) for round in range(8)]

    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=8)
    expected = []
    for _ in range(8):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        cosine.step()
    assert rates(lr_schedule="cosine", rounds=8) == pytest.approx(expected)
    assert rates(lr_schedule="step", rounds=8) == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 2)
    assert rates(warmup_rounds=3, rounds=8) == pytest.approx([0.025, 0.05, 0.075] + [0.1] * 5)

    with raises_user_error("unknown schedule", "got 'cosin'", "cosine or step"):
        schedule_factor("cosin", 0, 8)
    first, second, *_ = rates(lr_schedule="cosine", lr_decay=0.5, warmup_rounds=1, rounds=8)
    assert first == pytest.approx(0.05)
    assert second == pytest.approx(0.5 * expected[1])


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_is_pytorchs(weight_decay):
    names = ("one", "two")
    start = {name: torch.randn(3, dtype=torch.float64) for name in names}
    live = {name: start[name].clone().requires_grad_() for name in names}
    theirs = torch.optim.AdamW(live.values(), lr=0.1, weight_decay=weight_decay)
    zeros = {name: torch.zeros(3, dtype=torch.float64) for name in names}
    ours = start
    state = (torch.zeros((), dtype=torch.float64), zeros, zeros)
    for _ in range(4):
        grads = {name: torch.randn(3, dtype=torch.float64) for name in names}
        ours, state = AdamW(weight_decay).update(ours, grads, state, torch.tensor(0.1, dtype=torch.float64))
        for name, value in live.items():
            value.grad = grads[name]
        theirs.step()
    for name in names:
        torch.testing.assert_close(ours[name], live[name].detach(), rtol=1e-12, atol=0)


# FedAvgM


def test_three_rounds_of_fedavgm_by_hand():
    config = fedavgm.Config(server_momentum=0.5, server_lr=0.5)
    cohort = SimpleNamespace(weights=torch.tensor([0.25, 0.75]))
    fed = SimpleNamespace(upload_model=lambda clients: (clients.params, clients.buffers))
    buffers = {"w": torch.tensor([[1.0], [5.0]])}

    def after_round(state, first, second):
        """The server's state after a round in which the two clients return these parameters."""
        clients = SimpleNamespace(params={"w": torch.tensor([[first], [second]])}, buffers=buffers)
        state = fedavgm.aggregate(state, clients, cohort, fed, config)
        assert state.buffers["w"].item() == 4.0  # the plain mean, whatever went before
        return state

    first_state = fedavgm.ServerState(
        params={"w": torch.tensor([10.0])}, buffers={"w": torch.tensor([7.0])}, velocity={"w": torch.tensor([0.0])}
    )
    state = after_round(first_state, 6.0, 8.0)  # Delta = 10 - 7.5
    assert state.velocity["w"].item() == 2.5
    assert state.params["w"].item() == 8.75

    state = after_round(state, 6.75, 4.75)  # Delta = 8.75 - 5.25
    assert state.velocity["w"].item() == 4.75
    assert state.params["w"].item() == 6.375

    state = after_round(state, 6.375, 6.375)  # clients that stand still: the velocity alone moves the model
    assert state.velocity["w"].item() == 2.375
    assert state.params["w"].item() == 5.1875


# FedRS


def test_fedrss_shares_are_those_of_the_training_part():
    parts = [np.array([0, 3, 1, 6, 4, 5, 8, 11, 14, 2]), np.array([7, 9]), np.array([], int), np.array([10, 12])]
    _, fed = toy.federation("fedrs", parts=parts, validation=0.2)  # labels 0, 1, 2, 0, 1, 2, ...
    cohort = fed.cohort_of(0, [1, 0, 2])
    expected = []
    for client in cohort.client_ids:
        labels = [int(fed.engine.labels[i]) for i in fed.training[client]]
        expected.append([labels.count(c) / max(len(labels), 1) for c in range(3)])
    assert len(fed.training[0]) == 8
    assert class_shares(fed, cohort).tolist() == expected


def test_fedrss_scales_by_hand():
    shares = torch.tensor([[0.5, 0.0, 0.4, 0.1], [0.0, 0.0, 0.0, 0.0]])
    hard = class_scales(shares, 0.5, "hard")
    soft = class_scales(shares, 0.5, "soft")
    assert hard.tolist() == [[1, 0.5, 1, 1], [0.5] * 4]
    assert soft[0].tolist() == pytest.approx([1, 0.5, 0.9, 0.6])
    assert soft[1].tolist() == [0.5] * 4


def test_restricted_softmax_scales_the_logits():
    logits = randn(6, 4)
    labels = torch.tensor([0, 1, 2, 0, 2, 1])
    scales = torch.tensor([1.0, 1.0, 1.0, 0.3])
    expected = F.cross_entropy(scales * logits, labels)
    torch.testing.assert_close(restricted_cross_entropy(logits, labels, scales), expected)


# LG-FedAvg

HEAD = ("head.weight", "head.bias")


def test_two_rounds_of_lg_fedavg_are_those_of_a_plain_loop():
    sizes = (12, 4, 8, 6)
    cohorts = ([0, 1, 3], [1, 2, 3])
    setup, fed = toy.federation("lg-fedavg", parts=toy.toy_parts(sizes))
    first, buffers = fed.initial_model()
    head = {name: first[name] for name in HEAD}
    bodies = dict.fromkeys(range(4), first)
    for round, clients in enumerate(cohorts):
        for client in clients:
            model = Model({**bodies[client], **head}, buffers)
            bodies[client] = train_plainly(fed, round, client, model).params
        total = sum(sizes[client] for client in clients)
        head = {name: sum(sizes[client] * bodies[client][name] for client in clients) / total for name in HEAD}
        state = toy.simulate(setup, fed, round + 1, cohorts)
        laws.assert_agree(state.head, head, "the averaged head")
        assert len(state.clients) == 3 + round
        for client, (params, _) in setup.method.personal(state).items():  # which is tested
            laws.assert_agree(params, {**bodies[client], **head}, f"client {client}")


def test_lg_fedavgs_first_head_is_the_first_networks():
    setup, fed = toy.federation("lg-fedavg", backbone=MIXED_NETWORKS)
    head = laws.initial_state(setup, fed).head
    first_network, second_network = fed.networks
    first, _ = fed.initial_model(first_network)
    second, _ = fed.initial_model(second_network)
    for name in HEAD:
        assert torch.equal(head[name], first[name])
    assert not torch.equal(head["head.weight"], second["head.weight"])


# FedNova

EQUAL_STEPS = (8, 7, 6, 5)  # examples; batches of 4 make two steps an epoch of each


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_effective_steps_are_how_far_momentum_sgd_goes_along_a_constant_gradient(rho):
    steps = torch.tensor([0, 1, 2, 7, 50])
    for tau, ours in zip(steps.tolist(), fednova.effective_steps(steps, rho).tolist(), strict=True):
        w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=1.0, momentum=rho)
        for _ in range(tau):
            w.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step()
        assert ours == pytest.approx(-w.item(), rel=1e-12)


def test_normalised_average_against_a_loop():
    start = {"w": randn(3, 2)}
    local = {"w": randn(4, 3, 2, seed=1)}
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    effective = torch.tensor([2.0, 5.0, 0.0, 1.5])  # the third client took no step
    ours = fednova.normalised_average(start, local, effective, weights)

    mean_steps = float((weights * effective).sum())
    mean = sum(weights[k] * (start["w"] - local["w"][k]) / effective[k] for k in (0, 1, 3))
    torch.testing.assert_close(ours["w"], start["w"] - mean_steps * mean)

    nobody = fednova.normalised_average(start, local, torch.zeros(4).double(), weights)
    assert toy.distance(nobody, start) == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_fednova_is_fedavg(momentum):
    run = {"parts": toy.toy_parts(EQUAL_STEPS), "momentum": momentum, "lr": 0.01}
    setup, fed = toy.federation("fednova", backbone=toy.BATCHNORM, **run)
    assert set(fed.plan(fed.cohort(0)).num_steps.tolist()) == {4}

    state = toy.simulate(setup, fed, 3)
    expected = laws.state_after_rounds(3, "fedavg", backbone=toy.BATCHNORM, **run)
    laws.assert_agree(tuple(state), tuple(expected), "parameters and buffers")


@pytest.mark.parametrize(
    ("run", "steps", "momentum"),
    [
        pytest.param({"momentum": 0.0}, [8, 4, 6, 2], 0.0, id="without momentum"),
        pytest.param(
            {"parts": toy.toy_parts((3, 13, 8, 4)), "drop_last": True}, [0, 6, 4, 2], 0.9, id="a client without steps"
        ),  # client 0 has no full batch
    ],
)
def test_a_round_of_fednova_is_the_normalised_average_by_effective_steps(run, steps, momentum):
    setup, fed = toy.federation("fednova", **run)
    start, buffers = fed.initial_model()
    cohort = fed.cohort(0)
    received = fed.broadcast(start, buffers, cohort)
    clients, _ = fed.train(received, cohort, fednova.make_local_loss(fed.network, setup.method_config))
    effective = fednova.effective_steps(torch.tensor(steps), momentum)
    expected = fednova.normalised_average(start, clients.params, effective, cohort.weights)
    laws.assert_agree(toy.simulate(setup, fed, 1).params, expected, "the model")
