"""PFLlib: its client and server classes, which are given the problem's batches in the place of its files."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from flcore.clients import clientbase, clientdyn
from flcore.servers import serverbase
from flcore.trainmodel.models import BaseHeadSplit
from torch import Tensor, nn

from agreement import network
from agreement.adapters.feed import Ends, EpochLoader, Feed, Problem
from agreement.peers.pfllib import Setup

OPTIONS = {  # of its command line; those of a row come on top
    "algorithm": "x", "dataset": "digits", "device": "cpu", "save_folder_name": "items", "num_classes": 10,
    "few_shot": 0, "learning_rate_decay_gamma": 1.0, "learning_rate_decay": False,
    "random_join_ratio": False, "time_select": False, "goal": "test", "time_threthold": 1e9, "top_cnt": 100,
    "auto_break": False, "eval_gap": 100, "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0,
    "dlg_eval": False, "dlg_gap": 100, "batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0,
    "server_learning_rate": 1.0,
}  # fmt: skip


class ChoiceOfClients:
    """Stands for a server's choice of clients, with which each round begins.

    A server trains one round more than it is told; what it ends with is read as that round begins.

    Attributes:
        ends: What the last round ended with; empty before.
    """

    def __init__(self, server: Any, feed: Feed, read_ends: Callable[[], Ends]):
        self.ends: Ends = {}
        self._server = server
        self._feed = feed
        self._read_ends = read_ends
        self._num_begun = 0

    def begin_round(self) -> list:
        """The clients of the next round."""
        self._feed.round = self._num_begun
        self._num_begun += 1
        if self._feed.round == self._feed.problem.num_rounds:
            self.ends = self._read_ends()
        return [self._server.clients[client] for client in self._feed.cohort]


def run(setup: Setup, problem: Problem) -> Ends:
    """Runs a server of PFLlib and its clients."""
    feed = Feed(problem)
    replace_files(setup, feed)
    Path("system").mkdir()
    with contextlib.chdir("system"):  # it writes models, and results to ../results
        make_server = resolve_name(f"flcore.servers.{setup.server}")
        server = make_server(arguments_of(setup, problem), 0)
        if setup.patch:
            PATCHES[setup.patch](server, problem)
        choice = ChoiceOfClients(server, feed, partial(ends_of, server, setup))
        server.select_clients = choice.begin_round
        server.train()
    return choice.ends


def replace_files(setup: Setup, feed: Feed) -> None:
    """Lets servers and clients read the problem in the place of their files."""

    def load_train_data(client: clientbase.Client, batch_size: int | None = None) -> EpochLoader:
        return EpochLoader(feed, client.id, setup.epochs_of_passes, setup.drop_last)

    read = partial(read_client_data, feed.problem)
    mock.patch.object(clientbase, "read_client_data", read).start()
    mock.patch.object(serverbase, "read_client_data", read).start()
    mock.patch.object(clientbase.Client, "load_train_data", load_train_data).start()


def read_client_data(
    problem: Problem, dataset: str, client: int, is_train: bool = True, few_shot: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """A client's training images with their labels, or some test images."""
    if not is_train:
        return list(zip(problem.x_test[:64], problem.y_test[:64], strict=True))
    part = problem.parts[client]
    return list(zip(problem.x[part], problem.y[part], strict=True))


def arguments_of(setup: Setup, problem: Problem) -> SimpleNamespace:
    """The options of its command line, and the first model."""
    options = {
        **OPTIONS,
        "local_learning_rate": problem.lr,
        "batch_size": problem.batch_size,
        "local_epochs": problem.epochs,
        "global_rounds": problem.num_rounds,
        "num_clients": problem.num_clients,
        "join_ratio": problem.share_of_clients,
        "model": network.load_weights(BaseHeadSplit(network.body(), network.head()), problem.weights),
    }
    return SimpleNamespace(**{**options, **setup.options})


def ends_of(server: Any, setup: Setup) -> Ends:
    """What a server and its clients hold."""
    ends: Ends = {"personal": [], "bodies": [], "kept": []}
    for client in server.clients:
        params = network.parameters_of(client.model)
        ends["personal"] += params
        ends["bodies"] += network.body_of(params)
        for attribute in setup.kept:
            ends["kept"] += network.parameters_or_number(attrgetter(attribute)(client))
    shared = server.global_model
    if isinstance(shared, nn.Module):
        ends["shared"] = network.parameters_of(shared)
        ends["head"] = ends["shared"]
    elif isinstance(shared, dict) and hasattr(server, "compressed_param"):
        ends["shared"] = [decompressed(value) for value in server.compressed_param.values()]
    for attribute in ("global_protos", "global_logits"):
        if hasattr(server, attribute):
            by_class = getattr(server, attribute)
            ends["class vectors"] = [by_class[label] for label in range(10)]
    return ends


def decompressed(value: np.ndarray | list[np.ndarray]) -> Tensor:
    """A tensor of FedKD out of what it has compressed: itself, or its singular value decomposition."""
    if isinstance(value, list):
        left, singular, right = value
        value = np.matmul(left * singular[..., None, :], right)
    return torch.tensor(value)


class TorchWithSquaredNorm:
    """torch, whose `norm` of a vector is its square."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def norm(vector: Tensor, order: int) -> Tensor:
        """The squared norm."""
        return (vector * vector).sum()


def square_the_norm(server: Any, problem: Problem) -> None:
    """The norm in the penalty of FedDyn is squared."""
    mock.patch.object(clientdyn, "torch", TorchWithSquaredNorm()).start()


def square_the_norm_by_size(server: Any, problem: Problem) -> None:
    """The same, and alpha is divided by a client's size over the mean size."""
    square_the_norm(server, problem)
    sizes = [len(part) for part in problem.parts]
    mean_size = sum(sizes) / len(sizes)
    for client in server.clients:
        client.alpha *= mean_size / sizes[client.id]


def give_newcomers_no_past(server: Any, problem: Problem) -> None:
    """The contrast is constant while a client takes part for the first time: its last model is the global one."""
    trained = set()

    def train_without_past(client: Any, train: Callable[[], None]) -> None:
        if client.id not in trained:
            trained.add(client.id)
            client.old_model = copy.deepcopy(client.global_model)
        train()

    for client in server.clients:
        client.train = partial(train_without_past, client, client.train)


def take_softmax(server: Any, problem: Problem) -> None:
    """The target of a cross-entropy is a distribution."""
    cross_entropy = nn.CrossEntropyLoss()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            target = target.softmax(-1)
        return cross_entropy(output, target)

    for client in server.clients:
        client.loss = loss


def calibrate_each_client(server: Any, problem: Problem) -> None:
    """The calibration is of a client's own counts, in all of its batches."""
    tau = server.args.tau
    for client in server.clients:
        counts = problem.y[problem.parts[client.id]].bincount(minlength=10)
        client.calibration = torch.where(counts > 0, tau * counts.clamp(min=1) ** -0.25, 1e4)


def same_projection(server: Any, problem: Problem) -> None:
    """The projection of features is the one that fedcli draws from its seed."""
    for client in server.clients:
        client.W_h.weight.data = problem.projection.clone()


PATCHES = {
    "square_the_norm": square_the_norm,
    "square_the_norm_by_size": square_the_norm_by_size,
    "give_newcomers_no_past": give_newcomers_no_past,
    "take_softmax": take_softmax,
    "calibrate_each_client": calibrate_each_client,
    "same_projection": same_projection,
}
