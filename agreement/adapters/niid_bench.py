"""NIID-Bench: its experiments.py, run as a script, with its loaders, networks and draw of clients replaced."""

import runpy
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import model as models
import numpy as np
import utils
from torch import Tensor, nn

from agreement import small_networks
from agreement.adapters.feed import EpochLoader, Feed
from agreement.adapters.final_tensors import TensorsByQuantity
from agreement.adapters.patches import Patch, patches_of
from agreement.exchange import Problem, clone_folder
from agreement.peers.niid_bench import PeerConfig
from agreement.rows import Quantity

EPOCH_TO_MEASURE = 0  # whose batches are read to measure accuracy; any would do


class Positions(list[int]):
    """The positions of a client's examples, by which its loader knows the client."""

    def __init__(self, client: int, positions: list[int]):
        super().__init__(positions)
        self.client = client


class OneTestBatch(list):
    """Some test images and labels, in one batch. A plain list the script would take for one of several loaders."""

    def __init__(self, problem: Problem):
        super().__init__([problem.test_batch])


class Small(nn.Module):
    """The network, in the place of its own."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.base = small_networks.make_body(problem.network_name)
        self.head = small_networks.head()
        small_networks.load_weights(self, problem.weights)

    def forward(self, x: Tensor) -> Any:
        """Logits `[B, C]`."""
        return self.head(self.base(x))


class SmallWithFeatures(Small):
    """The network as MOON has it."""

    def forward(self, x: Tensor) -> Any:
        """Features, projected features, which are the same, and logits."""
        features = self.base(x)
        return features, features, self.head(features)


class Networks:
    """Makes the networks of the script in the place of its own classes.

    The script makes first the models, one for each client and a global one; for SCAFFOLD then as many networks again,
    whose parameters are the first control variates.

    Attributes:
        controls_start_at_zero: Whether the parameters of the latter are 0.
    """

    def __init__(self, problem: Problem):
        self.controls_start_at_zero = False
        self._problem = problem
        self._num_made = 0

    def make(self, kind: type[Small], *arguments: Any, **options: Any) -> Small:
        """Makes the next network; what the script gives its own classes says nothing of it."""
        made = kind(self._problem)
        num_models = self._problem.num_clients + 1
        is_control = self._num_made >= num_models
        if self.controls_start_at_zero and is_control:
            for parameter in made.parameters():
                parameter.data.zero_()
        self._num_made += 1
        return made


def run(config: PeerConfig, problem: Problem, patch: Patch) -> TensorsByQuantity:
    """Runs the script with an algorithm."""
    feed = Feed(problem)
    feed.round = -1  # before the first
    networks = Networks(problem)
    patch(networks, problem)
    mock.patch.object(utils, "get_dataloader", partial(make_loaders, feed)).start()
    mock.patch.object(utils, "partition_data", partial(divide_data, problem)).start()
    for module in (models, utils):
        mock.patch.object(module, "SimpleCNNMNIST", partial(networks.make, Small)).start()
        mock.patch.object(module, "ModelFedCon_noheader", partial(networks.make, SmallWithFeatures)).start()
    mock.patch("numpy.random.shuffle", partial(begin_round, feed)).start()
    model = run_script({"alg": config.algorithm, **make_options(problem), **config.options})
    return {
        Quantity.SHARED: small_networks.copy_parameters(model),
        Quantity.STATISTICS: small_networks.copy_statistics(model),
    }


def begin_round(feed: Feed, order: list[int]) -> None:
    """Stands for the shuffle that the script does once in a round, of which it takes the first clients."""
    feed.round += 1
    others = [client for client in range(feed.problem.num_clients) if client not in feed.cohort]
    order[:] = feed.cohort + others


class Loaders(NamedTuple):
    """What the script's `get_dataloader` returns; nothing of the two data sets is used but their lengths."""

    train: EpochLoader | OneTestBatch
    test: OneTestBatch
    train_set: tuple = (0,)
    test_set: tuple = (0,)


def make_loaders(
    feed: Feed, dataset: str, folder: str, train_size: int, test_size: int, positions: Positions | None = None,
    *arguments: Any, **options: Any,
) -> Loaders:  # fmt: skip
    """Loaders of training and test images, the former of a client if there are positions.

    The loader of a client is new in each round. Its first and last pass are to measure accuracy, which is not compared;
    those between are the local epochs, in their order.
    """
    test = OneTestBatch(feed.problem)
    if positions is None:
        return Loaders(train=test, test=test)
    local_epochs = range(feed.problem.epochs)
    epoch_of_pass = [EPOCH_TO_MEASURE, *local_epochs, EPOCH_TO_MEASURE]
    return Loaders(train=EpochLoader(feed, positions.client, epoch_of_pass), test=test)


class Division(NamedTuple):
    """What the script's `partition_data` returns; its images are not used."""

    x_train: None
    y_train: np.ndarray
    x_test: None
    y_test: np.ndarray
    positions: dict[int, Positions]  # by client
    classes: dict[int, dict[int, int]]  # of each client, with a count that is not used


def divide_data(problem: Problem, *arguments: Any, **options: Any) -> Division:
    """The problem's labels and the examples of its clients."""
    labels = problem.y.numpy()
    parts = {}
    classes = {}
    for client, part in enumerate(problem.parts):
        parts[client] = Positions(client, part)
        classes[client] = dict.fromkeys(map(int, labels[part]), 1)
    return Division(x_train=None, y_train=labels, x_test=None, y_test=labels, positions=parts, classes=classes)


def make_options(problem: Problem) -> dict[str, Any]:
    """The options of the script that say what the problem is."""
    return {
        "model": "simple-cnn",
        "dataset": "mnist",
        "n_parties": problem.num_clients,
        "comm_round": problem.num_rounds,
        "epochs": problem.epochs,
        "lr": problem.lr,
        "batch-size": problem.batch_size,
        "rho": problem.momentum,
        "reg": problem.weight_decay,
        "sample": problem.share_of_clients,
        "device": "cpu",
        "logdir": "logs/",
        "modeldir": "models/",
        "log_file_name": "x",
    }


def run_script(options: Mapping[str, Any]) -> nn.Module:
    """Runs experiments.py with options; returns its global model."""
    script = clone_folder() / "experiments.py"
    command = [script.name, *(f"--{name}={value}" for name, value in options.items())]
    with mock.patch("sys.argv", command):
        names = runpy.run_path(str(script), run_name="__main__")
    return names["global_model"]


def start_controls_at_zero(networks: Networks, problem: Problem) -> None:
    """SCAFFOLD's control variates begin at 0."""
    networks.controls_start_at_zero = True


PATCHES = patches_of(start_controls_at_zero)
