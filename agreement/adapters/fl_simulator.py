"""FL-Simulator: its client and server classes. Its data set and its loader are replaced by the problem's batches."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import server as servers
import torch
from client import client as client_module
from optimizer.ESAM import ESAM
from torch import nn

from agreement import small_networks
from agreement.adapters.feed import EpochLoader, Feed
from agreement.adapters.final_tensors import TensorsByQuantity
from agreement.adapters.patches import Patch, patches_of
from agreement.adapters.refusals import refuse_momentum
from agreement.exchange import Problem
from agreement.peers.fl_simulator import PeerConfig
from agreement.rows import Quantity

OPTIONS = {  # of its command line; those of a row come on top
    "active_ratio": 1.0,
    "seed": 1,
    "lr_decay": 1.0,
    "dataset": "x",
    "global_learning_rate": 1.0,
    "use_RI": False,
    "beta": 0.1,
    "non_iid": False,
    "out_file": "",
    "split_rule": "",
    "split_coef": 0,
}
ADDED_TO_NORM = 1e-7  # in optimizer/ESAM.py


def run(config: PeerConfig, problem: Problem, patch: Patch) -> TensorsByQuantity:
    """Runs a server of FL-Simulator and its clients."""
    refuse_momentum(problem)
    feed = Feed(problem)
    replace_loader(feed)
    server = make_server(config, problem)
    patch(server, problem)
    server._activate_clients_ = lambda round: np.array(feed.cohort)
    server._test_ = partial(end_round, feed)  # the last thing that it does in a round
    server._save_results_ = lambda: None
    server._summary_ = lambda: None
    server.train()
    return {Quantity.SHARED: small_networks.copy_parameters(server.server_model)}


def end_round(feed: Feed, round: int, clients: np.ndarray) -> None:
    """Stands for the server's test, and goes on to the next round's batches."""
    feed.round = round + 1


class ClientImages(NamedTuple):
    """Stands for a client's images: says which client it is, and how many they are."""

    client: int
    shape: tuple[int]


def replace_loader(feed: Feed) -> None:
    """Lets a client, which makes a data set of its images and a loader of that, load the problem's batches."""

    def dataset_of(images: ClientImages, labels: None, train: bool, dataset_name: str) -> ClientImages:
        return images

    def loader_of(images: ClientImages, batch_size: int, shuffle: bool) -> EpochLoader:
        return EpochLoader(feed, images.client)

    mock.patch.object(client_module, "Dataset", dataset_of).start()
    mock.patch.object(client_module, "data", SimpleNamespace(DataLoader=loader_of)).start()


def make_server(config: PeerConfig, problem: Problem) -> Any:
    """Makes its server of a method."""
    images = [ClientImages(client, shape=(len(part),)) for client, part in enumerate(problem.parts)]
    arguments = SimpleNamespace(**(OPTIONS | config.options))
    arguments.method = config.method
    arguments.total_client = problem.num_clients
    arguments.comm_rounds = problem.num_rounds
    arguments.local_learning_rate = problem.lr
    arguments.weight_decay = problem.weight_decay
    arguments.batchsize = problem.batch_size
    arguments.local_epochs = problem.epochs
    make = partial(make_model, problem)
    return getattr(servers, config.method)(
        device=torch.device("cpu"),
        model_func=make,
        init_model=make(),
        init_par_list=torch.cat([value.flatten() for value in problem.weights]),
        datasets=SimpleNamespace(client_x=images, client_y=[None] * len(images)),
        method=config.method,
        args=arguments,
    )


def make_model(problem: Problem) -> nn.Module:
    """Makes the first model."""
    return small_networks.make_network(problem.network_name, problem.weights)


def count_own_steps(server: Any, problem: Problem) -> None:
    """K of SCAFFOLD is that of the client, in whole batches."""
    original = server.postprocess

    def postprocess(client: int, vectors: Any) -> None:
        num_batches = math.ceil(len(problem.parts[client]) / problem.batch_size)
        server.local_iteration = problem.epochs * num_batches
        original(client, vectors)

    server.postprocess = postprocess


def divide_by_the_norm(server: Any, problem: Problem) -> None:
    """What is added to the norm of SAM's gradient is taken out again."""
    original = ESAM._grad_norm

    def norm_less_what_is_added(optimizer: ESAM) -> torch.Tensor:
        return original(optimizer) - ADDED_TO_NORM

    mock.patch.object(ESAM, "_grad_norm", norm_less_what_is_added).start()


PATCHES = patches_of(count_own_steps, divide_by_the_norm)
