"""FL-Simulator: its client and server classes. Its data set and its loader are replaced by the problem's batches."""

import contextlib
import importlib
import io
from types import SimpleNamespace
from typing import Any

from agreement import network
from agreement.peers import Feed, parameters_of
from agreement.rows import Peer, Row

OPTIONS = {
    "active_ratio": 1.0, "seed": 1, "lr_decay": 1.0, "weight_decay": 0.0, "dataset": "x", "global_learning_rate": 1.0,
    "use_RI": False, "beta": 0.1, "non_iid": False, "out_file": "", "split_rule": "", "split_coef": 0,
}  # fmt: skip


def count_own_steps(server, problem):
    """K of SCAFFOLD is that of the client, in whole batches."""
    original = server.postprocess

    def postprocess(client, vectors):
        size = len(problem["parts"][client])
        server.local_iteration = problem["epochs"] * -(-size // problem["batch_size"])
        original(client, vectors)

    server.postprocess = postprocess


def divide_by_the_norm(server, problem):
    """What is added to the norm of SAM's gradient is taken out again."""
    import sys

    kind = sys.modules["optimizer.ESAM"].ESAM
    original = getattr(kind._grad_norm, "original", kind._grad_norm)

    def norm(self):
        return original(self) - 1e-7

    norm.original = original
    kind._grad_norm = norm
    server.restore = lambda: setattr(kind, "_grad_norm", original)


def run(row: Row, problem: dict[str, Any]) -> dict[str, list]:
    """Runs FL-Simulator for a row; returns what it ends with."""
    import numpy as np
    import torch

    client_module = importlib.import_module("client.client")
    servers = importlib.import_module("server")
    how = dict(row.how)
    name = how.pop("name")
    change = how.pop("change", None)
    feed = Feed(problem)

    class Loader:
        """A client's batches of the round; every pass is the next epoch."""

        def __init__(self, client, batch_size, shuffle):
            self.client = client
            self.passes = 0

        def __iter__(self):
            epoch = self.passes % problem["epochs"]
            self.passes += 1
            return feed.batches(self.client, epoch)

    class Examples(SimpleNamespace):
        """A client's images: the server asks for their number, the loader for the client."""

    client_module.Dataset = lambda images, labels, train, dataset_name: images.client
    client_module.data = SimpleNamespace(DataLoader=Loader)
    images = [Examples(client=client, shape=(len(part),)) for client, part in enumerate(problem["parts"])]
    arguments = SimpleNamespace(**{**OPTIONS, **how})
    arguments.method = name
    arguments.total_client = len(images)
    arguments.comm_rounds = len(problem["cohorts"])
    arguments.local_learning_rate = problem["lr"]
    arguments.batchsize = problem["batch_size"]
    arguments.local_epochs = problem["epochs"]

    def model():
        return network.start(network.small(), problem["weights"])

    data = SimpleNamespace(client_x=images, client_y=[None] * len(images))
    first = torch.cat([value.flatten() for value in problem["weights"]])
    with contextlib.redirect_stdout(io.StringIO()):
        server = getattr(servers, name)(torch.device("cpu"), model, model(), first.clone(), data, name, arguments)
        if change:
            change(server, problem)
        server._activate_clients_ = lambda number: np.array(feed.cohort)
        server._test_ = lambda number, selected: setattr(feed, "round", number + 1)
        server._save_results_ = lambda: None
        server._summary_ = lambda: None
        server.train()
        getattr(server, "restore", lambda: None)()
    return {"shared": parameters_of(server.server_model)}


PLAIN = "The mean of the models is plain (server.py); fedcli weights by examples."
SAM = {"name": "FedSAM", "rho": 0.1}
MOMENTUM_SAM = {"name": "MoFedSAM", "rho": 0.1, "alpha": 0.3}
ADDED = "1e-7 is added to the norm of the gradient (optimizer/ESAM.py)."

PEER = Peer(
    name="FL-Simulator", module="fl_simulator", commit="502bec65570165d1ff1a6ce76375297145c734e3",
    rows=(
        Row(
            "FedAvg", "fedavg", {"name": "FedAvg"}, cause=PLAIN, judge="FedAvg, Algorithm 1: weights n_k / n.",
            closed_by="FedAvg, plain means here too",
        ),
        Row("FedAvg, plain means here too", "fedavg, uniform", {"name": "FedAvg"}),
        Row("FedProx, plain means here too", "fedprox, uniform", {"name": "FedProx", "lamb": 0.5}),
        Row("SCAFFOLD, clients of one size", "scaffold, equal, clipped", {"name": "SCAFFOLD"}),
        Row("SCAFFOLD, 2 of 4", "scaffold, half", {"name": "SCAFFOLD"}),
        Row(
            "SCAFFOLD, plain means here too", "scaffold, uniform", {"name": "SCAFFOLD"},
            cause="K is the first client's for all, and no whole number for a batch that is not full "
            "(server/SCAFFOLD.py).",
            judge="SCAFFOLD, line 12: K of the client.", closed_by="SCAFFOLD, plain means here too, own K",
        ),
        Row(
            "SCAFFOLD, plain means here too, own K", "scaffold, uniform",
            {"name": "SCAFFOLD", "change": count_own_steps}, change="K is the client's number of steps",
        ),
        Row("FedDyn, clients of one size", "feddyn, equal, clipped", {"name": "FedDyn", "lamb": 0.1}),
        Row(
            "FedDyn", "feddyn", {"name": "FedDyn", "lamb": 0.1},
            cause="All clients have one alpha; fedcli's is divided by a client's size, as in the authors' code.",
            judge="FedDyn, Algorithm 1: one alpha, for which fedcli has --weighting uniform (Reading 2).",
            closed_by="FedDyn, one alpha here too",
        ),
        Row("FedDyn, one alpha here too", "feddyn, uniform", {"name": "FedDyn", "lamb": 0.1}),
        Row("FedDyn, 2 of 4", "feddyn, half", {"name": "FedDyn", "lamb": 0.1}),
        Row("FedCM, clients of one size", "fedcm, equal", {"name": "FedCM", "alpha": 0.3}),
        Row(
            "FedSAM, plain means here too", "fedsam", SAM, cause=ADDED,
            judge="FedSAM: w + rho g / ||g||.", closed_by="FedSAM, plain means here too, norm alone",
        ),
        Row(
            "FedSAM, plain means here too, norm alone", "fedsam", {**SAM, "change": divide_by_the_norm},
            change="the 1e-7 is taken out of the norm",
        ),
        Row(
            "MoFedSAM, clients of one size", "mofedsam, equal", MOMENTUM_SAM, cause=ADDED,
            judge="MoFedSAM: w + rho g / ||g||.", closed_by="MoFedSAM, clients of one size, norm alone",
        ),
        Row(
            "MoFedSAM, clients of one size, norm alone", "mofedsam, equal",
            {**MOMENTUM_SAM, "change": divide_by_the_norm}, change="the 1e-7 is taken out of the norm",
        ),
    ),
)  # fmt: skip
