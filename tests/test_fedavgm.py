"""FedAvgM: three rounds by hand, three rounds against FedAvg's means, and what the velocity leaves alone."""

from types import SimpleNamespace

import pytest
import torch

from fedcli.papers.baselines import fedavgm
from fedcli.registry import find_method

FEDAVGM = find_method("fedavgm")


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


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
