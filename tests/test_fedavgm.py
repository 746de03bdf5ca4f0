"""FedAvgM: three rounds by hand, three rounds against FedAvg's means, and what the velocity leaves alone."""

from types import SimpleNamespace

import pytest
import torch

from fedcli.errors import UserError
from fedcli.papers.baselines import fedavgm
from fedcli.registry import find_method
from fedcli.runs.rounds import one_round
from tests import laws

FEDAVGM = find_method("fedavgm")


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_momentum_update_is_undamped():
    velocity = fedavgm.momentum_update({"w": column(4.0, -2.0)}, {"w": column(1.0, 1.0)}, 0.25)
    assert torch.equal(velocity["w"], column(2.0, 0.5))


def test_three_rounds_by_hand():
    config = fedavgm.Config(server_momentum=0.5)
    cohort = SimpleNamespace(weights=torch.tensor([0.25, 0.75], dtype=torch.float64))
    fed = SimpleNamespace(upload_model=lambda clients: (clients.params, clients.buffers))
    state = fedavgm.ServerState({"w": column(10.0)[0]}, {"mean": column(7.0)[0]}, {"w": column(0.0)[0]})
    rounds = [  # what the two clients return; then Delta, v and w by hand
        ((6.0, 8.0), 2.5, 2.5, 7.5),
        ((5.5, 3.5), 3.5, 4.75, 2.75),
        ((2.75, 2.75), 0.0, 2.375, 0.375),  # clients that stand still: the velocity alone moves the model
    ]
    for local, delta, velocity, params in rounds:
        assert state.params["w"].item() - (local[0] + 3 * local[1]) / 4 == delta
        clients = SimpleNamespace(params={"w": column(*local)}, buffers={"mean": column(1.0, 5.0)})
        state = fedavgm.aggregate(state, clients, cohort, fed, config)
        assert state.velocity["w"].item() == velocity
        assert state.params["w"].item() == params
        assert state.buffers["mean"].item() == 4.0  # the plain mean, whatever went before


def test_a_server_rate_of_one_minus_beta_is_the_damped_form():
    """Three rounds against v <- beta v + (1 - beta) Delta, w <- w - v, written out."""
    config = fedavgm.Config(server_momentum=0.75, server_lr=0.25)
    cohort = SimpleNamespace(weights=torch.ones(1, dtype=torch.float64))
    fed = SimpleNamespace(upload_model=lambda clients: (clients.params, clients.buffers))
    state = fedavgm.ServerState({"w": column(10.0)[0]}, {}, {"w": column(0.0)[0]})
    w, v = 10.0, 0.0
    for local in (6.0, 5.5, 9.0):
        v = 0.75 * v + 0.25 * (w - local)
        w = w - v
        clients = SimpleNamespace(params={"w": column(local)}, buffers={})
        state = fedavgm.aggregate(state, clients, cohort, fed, config)
        assert state.params["w"].item() == pytest.approx(w, rel=1e-14)


def test_rounds_follow_the_recurrence_on_the_means_of_fedavg():
    beta = 0.7
    run = {"data": laws.toy_dataset(num_train=6, channels=3), "parts": laws.toy_parts((4, 2)), "num_clients": 2}
    run |= {"backbone": "resnet10-3x3", "local_epochs": 1}
    setup, fed = laws.federation(FEDAVGM, {"server_momentum": beta}, **run)
    base_setup, base_fed = laws.federation("fedavg", **run)
    state = setup.method.init(fed, setup.options)
    velocity = {name: 0.0 for name in state.params}
    for number in range(3):
        before = base_setup.method.init(base_fed, base_setup.options)._replace(
            params=state.params, buffers=state.buffers
        )
        mean, _ = base_setup.method.run_round(before, base_fed.cohort(number), base_fed, base_setup.options)
        expected = {}
        for name, value in state.params.items():
            velocity[name] = beta * velocity[name] + (value - mean.params[name])
            expected[name] = value - velocity[name]
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        laws.assert_agree(state.params, expected, f"parameters after round {number}")
        laws.assert_agree(state.velocity, velocity, f"velocity after round {number}")
        laws.assert_agree(state.buffers, mean.buffers, f"buffers after round {number}")


def test_the_first_round_is_fedavg_and_the_second_is_not():
    ours, base = laws.federation(FEDAVGM), laws.federation("fedavg")
    laws.assert_agree(laws.simulate(*ours, 1).params, laws.simulate(*base, 1).params, "the first round")
    assert laws.distance(laws.simulate(*ours, 2).params, laws.simulate(*base, 2).params) > 1e-3


def test_costs_are_those_of_fedavg():
    setup, fed = laws.federation(FEDAVGM)
    one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort(0))
    model = 4 * fed.sizes.parameters  # four clients
    assert fed.sent_down == fed.sent_up == {"params": model, "buffers": 0, "other": 0}
    assert setup.method.client_memory(fed.sizes) == fed.sizes.parameters


@pytest.mark.parametrize("beta", [-0.1, 1.0])
def test_a_momentum_that_diverges_is_refused(beta):
    with pytest.raises(UserError, match="--server-momentum must be >= 0 and < 1"):
        laws.federation(FEDAVGM, {"server_momentum": beta})
