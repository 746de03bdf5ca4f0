"""FedAvgM: three rounds by hand, three rounds against FedAvg's means, and what the velocity leaves alone."""

from types import SimpleNamespace

import torch

from fedcli.papers.baselines import fedavgm


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_three_rounds_by_hand():
    config = fedavgm.Config(server_momentum=0.5, server_lr=0.5)
    cohort = SimpleNamespace(weights=torch.tensor([0.25, 0.75], dtype=torch.float64))
    fed = SimpleNamespace(upload_model=lambda clients: (clients.params, clients.buffers))
    state = fedavgm.ServerState({"w": column(10.0)[0]}, {"mean": column(7.0)[0]}, {"w": column(0.0)[0]})
    rounds = [  # what the two clients return; then Delta, v and w by hand
        ((6.0, 8.0), 2.5, 2.5, 8.75),
        ((6.75, 4.75), 3.5, 4.75, 6.375),
        ((6.375, 6.375), 0.0, 2.375, 5.1875),  # clients that stand still: the velocity alone moves the model
    ]
    for local, delta, velocity, params in rounds:
        assert state.params["w"].item() - (local[0] + 3 * local[1]) / 4 == delta
        clients = SimpleNamespace(params={"w": column(*local)}, buffers={"mean": column(1.0, 5.0)})
        state = fedavgm.aggregate(state, clients, cohort, fed, config)
        assert state.velocity["w"].item() == velocity
        assert state.params["w"].item() == params
        assert state.buffers["mean"].item() == 4.0  # the plain mean, whatever went before
