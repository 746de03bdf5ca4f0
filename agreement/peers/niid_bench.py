"""NIID-Bench: its experiments.py, run as a script, with its loaders, networks and draw of clients replaced."""

import contextlib
import importlib
import io
import os
import runpy
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from agreement import network
from agreement.peers import Feed, parameters_of, statistics_of
from agreement.rows import Peer, Row


def run(row: Row, problem: dict[str, Any]) -> dict[str, list]:
    """Runs NIID-Bench for a row; returns what it ends with."""
    import torch

    models = importlib.import_module("model")
    utils = importlib.import_module("utils")
    how = dict(row.how)
    first_control_is_zero = how.pop("zero_controls", False)
    everyone = range(len(problem["parts"]))
    made = []  # the networks, in the order of the script
    feed = Feed(problem)
    feed.round = -1

    def shuffle(order):
        """Puts the cohort first: the script shuffles once in a round, and takes the first clients."""
        feed.round += 1
        order[:] = feed.cohort + [client for client in everyone if client not in feed.cohort]

    class Loader:
        """The first and the last pass measure accuracy; those between are the local epochs."""

        def __init__(self, client):
            self.client = client
            self.passes = 0
            self.dataset = problem["parts"][client]

        def __len__(self):
            return len(feed.positions(self.client, 0))

        def __iter__(self):
            epoch = (self.passes - 1) % problem["epochs"]
            self.passes += 1
            for x, y in feed.batches(self.client, epoch):
                yield x.clone(), y.clone()

    class Positions(list):
        """The positions of a client's examples, by which its loader knows the client."""

        client = None

    class Batches(list):
        """No plain list, which the script takes for one of several loaders."""

    def get_dataloader(dataset, folder, train_size, test_size, positions=None, *others, **options):
        test = Batches([(problem["x_test"][:64], problem["y_test"][:64])])
        if positions is None:
            return test, test, [0], [0]
        return Loader(positions.client), test, [0], [0]

    def partition_data(*others, **options):
        labels = problem["y"].numpy()
        parts = {}
        classes = {}
        for client in everyone:
            positions = Positions(problem["parts"][client])
            positions.client = client
            parts[client] = positions
            classes[client] = dict.fromkeys(map(int, labels[positions]), 1)
        return None, labels, None, labels, parts, classes

    class Small(torch.nn.Module):
        gives_features = False

        def __init__(self, *others, **options):
            super().__init__()
            self.base = network.body(network=problem["network"])
            self.head = torch.nn.Linear(16, 10)
            network.start(self, problem["weights"])
            if first_control_is_zero and len(made) > len(everyone):  # after the clients' models and the global one
                for parameter in self.parameters():
                    parameter.data.zero_()
            made.append(self)

        def forward(self, x):
            features = self.base(x)
            logits = self.head(features)
            return (features, features, logits) if self.gives_features else logits

    class SmallWithFeatures(Small):
        gives_features = True

    utils.get_dataloader = get_dataloader
    utils.partition_data = partition_data
    for module in (models, utils):
        module.SimpleCNNMNIST = Small
        module.ModelFedCon_noheader = SmallWithFeatures
    with mock.patch("numpy.random.shuffle", shuffle):
        model = run_script({**options_of(problem), **how})
    return {"shared": parameters_of(model), "statistics": statistics_of(model)}


def options_of(problem: dict[str, Any]) -> dict[str, Any]:
    """The options of the script that say what the problem is; those of a row come on top."""
    num_clients = len(problem["parts"])
    first_cohort, *_ = problem["cohorts"]
    return {
        "model": "simple-cnn",
        "dataset": "mnist",
        "n_parties": num_clients,
        "comm_round": len(problem["cohorts"]),
        "epochs": problem["epochs"],
        "lr": problem["lr"],
        "batch-size": problem["batch_size"],
        "reg": 0,
        "rho": 0,
        "sample": len(first_cohort) / num_clients,
        "device": "cpu",
        "logdir": "logs/",
        "modeldir": "models/",
        "log_file_name": "x",
    }


def run_script(options: dict[str, Any]) -> Any:
    """Runs experiments.py with options; returns its global model."""
    script = Path(os.environ["CLONE"]) / "experiments.py"
    command = [script.name, *(f"--{name}={value}" for name, value in options.items())]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch("sys.argv", command),
    ):
        os.chdir(folder)  # it writes logs
        end = runpy.run_path(str(script), run_name="__main__")
        os.chdir("/")
    return end["global_model"]


SCAFFOLD = {"alg": "scaffold"}
MOON = {"alg": "moon", "mu": 1.0, "temperature": 0.5, "lr": 0.03}

PEER = Peer(
    name="NIID-Bench", module="niid_bench", commit="61b901ab645e62391772e9898384c2c3485b7a6c",
    rows=(
        Row("FedAvg", "fedavg", {"alg": "fedavg"}),
        Row("FedProx", "fedprox", {"alg": "fedprox", "mu": 0.5}),
        Row("FedNova", "fednova", {"alg": "fednova"}),
        Row("FedNova with momentum", "fednova, momentum", {"alg": "fednova", "rho": 0.9, "lr": 0.03}),
        Row("SCAFFOLD, clients of one size", "scaffold, equal", SCAFFOLD),
        Row(
            "SCAFFOLD", "scaffold", SCAFFOLD,
            cause="Models are weighted by n_i, the control variates by 1 / N (experiments.py).",
            judge="SCAFFOLD, lines 16 and 17: both plain; here both by examples (Reading 5).",
            closed_by="SCAFFOLD, c by 1 / N here too",
        ),
        Row("SCAFFOLD, c by 1 / N here too", "scaffold, c uniform", SCAFFOLD),
        Row(
            "SCAFFOLD, 2 of 4", "scaffold, half", SCAFFOLD,
            cause="The control variates begin as the weights of a network (experiments.py, 992 to 994; its issue 8).",
            judge="SCAFFOLD, Section 4: they begin at 0, or as gradients at the first model.",
            closed_by="SCAFFOLD, 2 of 4, c from 0",
        ),
        Row(
            "SCAFFOLD, 2 of 4, c from 0", "scaffold, half", {**SCAFFOLD, "zero_controls": True},
            change="the control variates begin at 0",
        ),
        Row(
            "SCAFFOLD with momentum", "scaffold, equal, momentum", {**SCAFFOLD, "rho": 0.9, "lr": 0.03},
            cause="c - c_i is added after the optimizer's step, and c_i divides by K eta_l without the momentum "
            "(experiments.py).",
            judge="The paper's local step has no momentum (Reading 3).",
            closed_by="SCAFFOLD with momentum, so here too",
        ),
        Row(
            "SCAFFOLD with momentum, so here too", "scaffold, equal, correction after momentum",
            {**SCAFFOLD, "rho": 0.9, "lr": 0.03},
        ),
        Row("MOON with its momentum", "moon, momentum", MOON),
        Row("FedAvg with batch normalisation", "fedavg, normed", {"alg": "fedavg"}, ("shared", "statistics")),
        Row(
            "MOON with batch normalisation", "moon, normed, momentum", MOON,
            cause="The received model gives its features in training mode, by the batch's mean and variance; the "
            "client's last model in evaluation mode (experiments.py).",
            judge="MOON is silent; the authors' code evaluates both (Reading 4).",
            closed_by="MOON with batch normalisation, received model so here too",
        ),
        Row(
            "MOON with batch normalisation, received model so here too",
            "moon, normed, received in training mode, momentum", MOON,
        ),
        Row(
            "MOON with its momentum, 2 of 4", "moon, half, momentum", MOON,
            cause="A client's last model is an untrained network until it has taken part.",
            judge="MOON is silent; the authors' code has no term in the first round (Reading 3).",
            closed_by="MOON with its momentum, 2 of 4, such a last model here too",
        ),
        Row(
            "MOON with its momentum, 2 of 4, such a last model here too", "moon, half, momentum, initial past", MOON,
        ),
    ),
)  # fmt: skip
