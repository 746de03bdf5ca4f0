"""PFLlib: its client and server classes, which are given the problem's batches in the place of its files."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
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

from agreement import small_networks
from agreement.adapters.feed import EpochLoader, Feed
from agreement.adapters.final_tensors import TensorsByQuantity, read_kept, read_personal_models
from agreement.adapters.patches import Patch, patches_of
from agreement.adapters.refusals import refuse_momentum, refuse_weight_decay
from agreement.exchange import Problem
from agreement.peers.pfllib import PeerConfig
from agreement.rows import Quantity, SharedPart
from agreement.small_networks import NUM_CLASSES

OPTIONS = {  # of its command line; those of a row come on top
    "algorithm": "x",
    "dataset": "digits",
    "device": "cpu",
    "save_folder_name": "items",
    "num_classes": NUM_CLASSES,
    "few_shot": 0,
    "learning_rate_decay_gamma": 1.0,
    "learning_rate_decay": False,
    "random_join_ratio": False,
    "time_select": False,
    "goal": "test",
    "time_threthold": 1e9,
    "top_cnt": 100,
    "auto_break": False,
    "eval_gap": 100,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "dlg_eval": False,
    "dlg_gap": 100,
    "batch_num_per_client": 2,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 0,
    "server_learning_rate": 1.0,
}


class ChoiceOfClients:
    """Stands for a server's choice of clients, with which each round begins.

    A server trains one round more than it is told; what it ends with is read as that round begins.

    Attributes:
        final_tensors: What the last round ended with; empty before.
    """

    def __init__(self, server: Any, feed: Feed, read_final_tensors: Callable[[], TensorsByQuantity]):
        self.final_tensors: TensorsByQuantity = {}
        self._server = server
        self._feed = feed
        self._read_final_tensors = read_final_tensors
        self._num_begun = 0

    def begin_round(self) -> list:
        """The clients of the next round."""
        self._feed.round = self._num_begun
        self._num_begun += 1
        if self._feed.round == self._feed.problem.num_rounds:
            self.final_tensors = self._read_final_tensors()
        return [self._server.clients[client] for client in self._feed.cohort]


def run(config: PeerConfig, problem: Problem, patch: Patch) -> TensorsByQuantity:
    """Runs a server of PFLlib and its clients."""
    refuse_momentum(problem)
    refuse_weight_decay(problem, fixed=config.own_weight_decay)
    feed = Feed(problem, num_extra_rounds=1)
    replace_files(config, feed)
    Path("system").mkdir()
    with contextlib.chdir("system"):  # it writes models, and results to ../results
        make_server = resolve_name(f"flcore.servers.{config.server}")
        server = make_server(make_arguments(config, problem), 0)
        patch(server, problem)
        choice = ChoiceOfClients(server, feed, partial(read_final_tensors, server, config))
        server.select_clients = choice.begin_round
        server.train()
    return choice.final_tensors


def replace_files(config: PeerConfig, feed: Feed) -> None:
    """Lets servers and clients read the problem in the place of their files."""

    def load_train_data(client: clientbase.Client, batch_size: int | None = None) -> EpochLoader:
        return EpochLoader(feed, client.id, config.epoch_of_pass, config.drop_last)

    read = partial(read_client_data, feed.problem)
    mock.patch.object(clientbase, "read_client_data", read).start()
    mock.patch.object(serverbase, "read_client_data", read).start()
    mock.patch.object(clientbase.Client, "load_train_data", load_train_data).start()


def read_client_data(
    problem: Problem, dataset: str, client: int, is_train: bool = True, few_shot: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """A client's training images with their labels, or some test images."""
    if not is_train:
        return list(zip(*problem.test_batch, strict=True))
    part = problem.parts[client]
    return list(zip(problem.x[part], problem.y[part], strict=True))


def make_arguments(config: PeerConfig, problem: Problem) -> SimpleNamespace:
    """The options of its command line, and the first model."""
    first_model = BaseHeadSplit(small_networks.make_body(problem.network_name), small_networks.head())
    options = {
        **OPTIONS,
        "local_learning_rate": problem.lr,
        "batch_size": problem.batch_size,
        "local_epochs": problem.epochs,
        "global_rounds": problem.num_rounds,
        "num_clients": problem.num_clients,
        "join_ratio": problem.share_of_clients,
        "model": small_networks.load_weights(first_model, problem.weights),
        **config.options,
    }
    return SimpleNamespace(**options)


def read_final_tensors(server: Any, config: PeerConfig) -> TensorsByQuantity:
    """What a server and its clients hold."""
    final_tensors = read_personal_models([small_networks.copy_parameters(client.model) for client in server.clients])
    final_tensors[Quantity.KEPT] = read_kept(server.clients, config.kept)
    if config.shared_part is SharedPart.COMPRESSED:
        shared = [decompress(value) for value in server.compressed_param.values()]
    else:
        shared = small_networks.copy_parameters(server.global_model)
    final_tensors[config.shared_part.quantity] = shared
    if config.class_vectors:
        by_class = getattr(server, config.class_vectors)
        final_tensors[Quantity.CLASS_VECTORS] = [by_class[label] for label in range(NUM_CLASSES)]
    return final_tensors


def decompress(value: np.ndarray | list[np.ndarray]) -> Tensor:
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
        counts = problem.y[problem.parts[client.id]].bincount(minlength=NUM_CLASSES)
        client.calibration = torch.where(counts > 0, tau * counts.clamp(min=1) ** -0.25, 1e4)


def take_projection_of_fedcli(server: Any, problem: Problem) -> None:
    """The projection of features is the one that fedcli draws from its seed."""
    for client in server.clients:
        client.W_h.weight.data = problem.fedkd_projection.clone()


PATCHES = patches_of(
    square_the_norm,
    square_the_norm_by_size,
    give_newcomers_no_past,
    take_softmax,
    calibrate_each_client,
    take_projection_of_fedcli,
)
