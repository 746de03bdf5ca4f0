"""FedNova: effective steps against torch.optim, the normalised mean against a loop, and when it is FedAvg."""

import pytest
import torch

from fedcli.papers.baselines import fednova
from fedcli.registry import find_method
from tests import laws

FEDNOVA = find_method("fednova")
EQUAL_STEPS = (8, 7, 6, 5)  # examples; batches of 4 make two steps an epoch of each


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.99])
def test_effective_steps_is_how_far_momentum_sgd_goes_along_a_constant_gradient(rho):
    steps = torch.tensor([0, 1, 2, 7, 50])
    for tau, ours in zip(steps.tolist(), fednova.effective_steps(steps, rho).tolist(), strict=True):
        w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=1.0, momentum=rho)
        for _ in range(tau):
            optimizer.zero_grad()
            w.sum().backward()  # gradient 1
            optimizer.step()
        assert ours == pytest.approx(-w.item(), rel=1e-12)


def example():
    draw = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=draw).double() for name, shape in {"w": (3, 2), "b": (2,)}.items()}
    local = {name: value + torch.randn(4, *value.shape, generator=draw).double() for name, value in start.items()}
    return start, local, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def test_normalised_average_against_a_loop():
    start, local, weights = example()
    effective = [2.0, 5.0, 0.0, 1.5]  # the third client took no step
    along = sum(p * a for p, a in zip(weights.tolist(), effective, strict=True))
    ours = fednova.normalised_average(start, local, torch.tensor(effective).double(), weights)
    for name, value in start.items():
        mean = sum(weights[k] * (value - local[name][k]) / effective[k] for k in (0, 1, 3))
        torch.testing.assert_close(ours[name], value - along * mean, rtol=1e-12, atol=1e-12)
    nobody = fednova.normalised_average(start, local, torch.zeros(4).double(), weights)
    assert laws.distance(nobody, start) == 0


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.9)])
def test_with_equal_steps_it_is_fedavg(optimizer, momentum):
    run = {"parts": laws.toy_parts(EQUAL_STEPS), "optimizer": optimizer, "momentum": momentum, "lr": 0.01}
    ours, base = laws.federation(FEDNOVA, **run), laws.federation("fedavg", **run)
    assert set(ours[1].plan(ours[1].cohort(0)).steps.tolist()) == {4}
    laws.assert_agree(laws.simulate(*ours, 3).params, laws.simulate(*base, 3).params, "equal steps")


def test_under_adam_effective_steps_are_the_steps():
    setup, fed = laws.federation(FEDNOVA, optimizer="adam", lr=0.003)  # the toy run's momentum of 0.9 is SGD's
    state, cohort = setup.method.init(fed, setup.options), fed.cohort(0)
    local_loss = fednova.make_local_loss(fed.network, setup.options)
    clients, _ = fed.train(fed.broadcast(*state, cohort), cohort, local_loss)
    steps = torch.tensor([8, 4, 6, 2]).double()
    expected = fednova.normalised_average(state.params, clients.params, steps, cohort.weights)
    laws.assert_agree(laws.simulate(setup, fed, 1).params, expected, "one round under Adam")


def test_a_client_without_a_step_adds_nothing():
    run = {"parts": laws.toy_parts((3, 13, 8, 4)), "drop_last": True}  # client 0 has no full batch, but a weight
    setup, fed = laws.federation(FEDNOVA, **run)
    state, cohort = setup.method.init(fed, setup.options), fed.cohort(0)
    assert fed.plan(cohort).steps.tolist() == [0, 6, 4, 2]
    clients, _ = fed.train(fed.broadcast(*state, cohort), cohort, fednova.make_local_loss(fed.network, setup.options))
    effective = fednova.effective_steps(torch.tensor([6, 4, 2]), 0.9)
    rest = {name: value[1:] for name, value in clients.params.items()}
    expected = fednova.normalised_average(state.params, rest, effective, torch.tensor([13.0, 8.0, 4.0]).double() / 28)
    laws.assert_agree(laws.simulate(setup, fed, 1).params, expected, "without client 0")


def test_buffers_are_averaged_as_in_fedavg():
    run = {"data": laws.toy_dataset(num_train=16, channels=3), "parts": laws.toy_parts((8, 4, 2, 2))}
    run |= {"backbone": laws.NORMED, "local_epochs": 1}
    ours = laws.simulate(*laws.federation(FEDNOVA, **run), 1)
    base = laws.simulate(*laws.federation("fedavg", **run), 1)
    laws.assert_agree(ours.buffers, base.buffers, "buffers after a round")
    assert laws.distance(ours.params, base.params) > 1e-4
