"""FedAvgM: three rounds by hand, and what the velocity leaves alone."""

from types import SimpleNamespace

import torch

from fedcli.papers.baselines import fedavgm


def test_three_rounds_by_hand():
    config = fedavgm.Config(server_momentum=0.5, server_lr=0.5)
    cohort = SimpleNamespace(weights=torch.tensor([0.25, 0.75]))
    fed = SimpleNamespace(upload_model=lambda clients: (clients.params, clients.buffers))
    state = fedavgm.ServerState(*({"w": torch.tensor([value])} for value in (10.0, 7.0, 0.0)))
    rounds = [  # what the two clients return; then v and w by hand
        ((6.0, 8.0), 2.5, 8.75),  # Delta = 10 - 7.5
        ((6.75, 4.75), 4.75, 6.375),  # Delta = 8.75 - 5.25
        ((6.375, 6.375), 2.375, 5.1875),  # clients that stand still: the velocity alone moves the model
    ]
    for local, velocity, params in rounds:
        params_of, buffers_of = ({"w": torch.tensor(values)[:, None]} for values in (local, (1.0, 5.0)))
        state = fedavgm.aggregate(state, SimpleNamespace(params=params_of, buffers=buffers_of), cohort, fed, config)
        # The buffers are the plain mean, whatever went before.
        assert [tree["w"].item() for tree in state] == [params, 4.0, velocity]
