"""FedNova: effective steps against torch.optim, the normalised mean against a loop, and when it is FedAvg."""

import pytest
import torch

from fedcli.papers.baselines import fednova
from tests import laws
from tests.toys import randn

EQUAL_STEPS = (8, 7, 6, 5)  # examples; batches of 4 make two steps an epoch of each


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_effective_steps_is_how_far_momentum_sgd_goes_along_a_constant_gradient(rho):
    steps = torch.tensor([0, 1, 2, 7, 50])
    for tau, ours in zip(steps.tolist(), fednova.effective_steps(steps, rho).tolist(), strict=True):
        w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=1.0, momentum=rho)
        for _ in range(tau):
            w.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step()
        assert ours == pytest.approx(-w.item(), rel=1e-12)


def test_normalised_average_against_a_loop():
    start, local, weights = {"w": randn(3, 2)}, {"w": randn(4, 3, 2, seed=1)}, torch.tensor([0.1, 0.2, 0.3, 0.4])
    effective = [2.0, 5.0, 0.0, 1.5]  # the third client took no step
    along = sum(p * a for p, a in zip(weights.tolist(), effective, strict=True))
    mean = sum(weights[k] * (start["w"] - local["w"][k]) / effective[k] for k in (0, 1, 3))
    ours = fednova.normalised_average(start, local, torch.tensor(effective), weights)
    torch.testing.assert_close(ours["w"], start["w"] - along * mean)
    nobody = fednova.normalised_average(start, local, torch.zeros(4).double(), weights)
    assert laws.distance(nobody, start) == 0


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.9)])
def test_with_equal_steps_it_is_fedavg(optimizer, momentum):
    run = {"parts": laws.toy_parts(EQUAL_STEPS), "optimizer": optimizer, "momentum": momentum, "lr": 0.01}
    ours, base = (laws.federation(name, backbone=laws.NORMED, **run) for name in ("fednova", "fedavg"))
    assert set(ours[1].plan(ours[1].cohort(0)).steps.tolist()) == {4}
    laws.assert_agree(tuple(laws.simulate(*ours, 3)), tuple(laws.simulate(*base, 3)), "parameters and buffers")


@pytest.mark.parametrize(
    ("run", "steps", "momentum"),
    [
        ({"optimizer": "adam", "lr": 0.003}, [8, 4, 6, 2], 0.0),  # the toy run's momentum of 0.9 is SGD's
        ({"parts": laws.toy_parts((3, 13, 8, 4)), "drop_last": True}, [0, 6, 4, 2], 0.9),  # client 0 has no full batch
    ],
)
def test_a_round_is_the_normalised_average_by_effective_steps(run, steps, momentum):
    setup, fed = laws.federation("fednova", **run)
    (start, buffers), cohort = fed.initial_model(), fed.cohort(0)
    received = fed.broadcast(start, buffers, cohort)
    clients, _ = fed.train(received, cohort, fednova.make_local_loss(fed.network, setup.options))
    effective = fednova.effective_steps(torch.tensor(steps), momentum)
    expected = fednova.normalised_average(start, clients.params, effective, cohort.weights)
    laws.assert_agree(laws.simulate(setup, fed, 1).params, expected, "the model")
