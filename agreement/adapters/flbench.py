"""FL-bench: its client, trainer and server classes. The constructor of its server, which reads files, is replaced."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial, partialmethod
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from src.server.fedavg import FedAvgServer
from src.utils.constants import MODE, NUM_CLASSES
from src.utils.models import DecoupledModel
from src.utils.trainer import FLbenchTrainer
from torch import Tensor

from agreement import small_networks
from agreement.adapters.feed import EpochLoader, Feed
from agreement.adapters.final_tensors import TensorsByQuantity, read_personal_models
from agreement.adapters.patches import Patch, patches_of
from agreement.adapters.refusals import refuse_momentum, refuse_weight_decay
from agreement.exchange import Problem
from agreement.peers.flbench import PeerConfig
from agreement.rows import Quantity


class Labels:
    """What its trainer asks of a data set; the images come from the loader."""

    classes = range(small_networks.NUM_CLASSES)

    def __init__(self, labels: Tensor):
        self.targets = labels

    def __len__(self) -> int:
        return len(self.targets)

    def train(self) -> None:
        """Nothing: no image is augmented."""

    def eval(self) -> None:
        """Nothing: no image is augmented."""


class LoaderOfCurrentClient:
    """The loader of its only worker: yields the batches of the client that the worker trains, epoch by epoch."""

    def __init__(self, server: FedAvgServer, feed: Feed):
        self._server = server
        self._feed = feed
        self._training: tuple[int, int] | None = None  # round and client
        self._loader: EpochLoader

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        client = self._server.trainer.worker.client_id
        training = (self._server.current_epoch, client)
        if training != self._training:
            self._training = training
            self._feed.round = self._server.current_epoch
            # Some clients read their data once more after the local epochs.
            self._loader = EpochLoader(self._feed, client, range(2 * self._feed.problem.epochs))
        return iter(self._loader)


def run(config: PeerConfig, problem: Problem, patch: Patch) -> TensorsByQuantity:
    """Runs a server of FL-bench and its clients."""
    refuse_momentum(problem)
    refuse_weight_decay(problem, fixed=config.weight_decay)
    mock.patch.dict(NUM_CLASSES, digits=small_networks.NUM_CLASSES).start()
    constructor = partialmethod(construct_server, feed=Feed(problem))
    mock.patch.object(FedAvgServer, "__init__", constructor).start()
    server = resolve_name(f"src.server.{config.server}")(make_arguments(config, problem))
    patch(server, problem)
    for number in range(problem.num_rounds):
        server.current_epoch = number
        server.train_one_round()
    return read_final_tensors(server, config)


def make_arguments(config: PeerConfig, problem: Problem) -> SimpleNamespace:
    """Its configuration."""
    common = SimpleNamespace(
        use_cuda=False,
        buffers="local",
        batch_size=problem.batch_size,
        client_side_evaluation=False,
        local_epoch=problem.epochs if config.local_epoch is None else config.local_epoch,
        reset_optimizer_on_global_epoch=True,
        test=SimpleNamespace(client=SimpleNamespace(train=True, val=True, test=True)),
    )
    arguments = SimpleNamespace(
        common=common,
        dataset=SimpleNamespace(name="digits"),
        optimizer=SimpleNamespace(lr=problem.lr, weight_decay=config.weight_decay),
    )
    module, _, _ = config.server.partition(":")
    setattr(arguments, module, SimpleNamespace(**config.options))
    return arguments


def construct_server(
    server: FedAvgServer, args: SimpleNamespace, init_trainer: bool = True, init_model: bool = True, *, feed: Feed
) -> None:
    """Stands for the constructor of its servers: gives a server what that one makes of files."""
    problem = feed.problem
    clients = range(problem.num_clients)
    server.args = args
    server.client_num = problem.num_clients
    server.train_clients = [*clients]
    server.selected_clients = [*clients]
    server.device = torch.device("cpu")
    server.model = make_model(problem)
    server.model.check_and_preprocess(args)
    server.public_model_params = OrderedDict((name, p.data.clone()) for name, p in server.model.named_parameters())
    server.public_model_param_names = list(server.public_model_params)
    server.clients_personal_model_params = {client: {} for client in clients}
    server.client_optimizer_states = {client: {} for client in clients}
    server.client_lr_scheduler_states = {client: {} for client in clients}
    server.client_local_epoches = [args.common.local_epoch] * problem.num_clients
    server.client_metrics = {client: {} for client in clients}
    server.current_epoch = 0
    server.testing = False
    server.verbose = False
    worker_arguments = make_worker_arguments(server, problem)
    server.trainer = FLbenchTrainer(server, server.client_cls, MODE.SERIAL, 0, worker_arguments)
    server.trainer.worker.trainloader = LoaderOfCurrentClient(server, feed)


def make_worker_arguments(server: FedAvgServer, problem: Problem) -> Mapping[str, Any]:
    """What the worker that trains one client after the other is made with."""
    options = server.args.optimizer
    return {
        "model": make_model(problem),
        "optimizer_cls": partial(torch.optim.SGD, lr=options.lr, weight_decay=options.weight_decay),
        "lr_scheduler_cls": None,
        "args": server.args,
        "dataset": Labels(problem.y),
        "data_indices": [{"train": part, "val": [], "test": []} for part in problem.parts],
        "device": server.device,
        "return_diff": server.return_diff,
    }


def make_model(problem: Problem) -> DecoupledModel:
    """Makes the first model, of its class."""
    model = DecoupledModel()
    model.base = small_networks.make_body(problem.network_name)
    model.classifier = small_networks.head()
    return small_networks.load_weights(model, problem.weights)


def read_final_tensors(server: FedAvgServer, config: PeerConfig) -> TensorsByQuantity:
    """What a server holds after the last round."""
    names = server.public_model_param_names
    shared = server.public_model_params
    models = []
    for own_params in server.clients_personal_model_params.values():
        models.append([own_params.get(name, shared[name]) for name in names])
    final_tensors = {
        Quantity.SHARED: [*shared.values()],
        Quantity.HEAD: small_networks.select_head([shared[name] for name in names]),
        **read_personal_models(models),
    }
    if config.class_vectors:
        by_class = getattr(server, config.class_vectors)
        final_tensors[Quantity.CLASS_VECTORS] = [by_class[label] for label in Labels.classes]
    return final_tensors


def keep_controls(server: FedAvgServer, problem: Problem) -> None:
    """SCAFFOLD's server keeps what a client's control variate has become."""
    original = server.aggregate_client_updates

    def aggregate_and_keep(packages: Mapping[int, Mapping[str, Any]]) -> None:
        original(packages)
        for client, package in packages.items():
            changes = zip(server.c_local[client], package["c_delta"], strict=True)
            server.c_local[client] = [control + change for control, change in changes]

    server.aggregate_client_updates = aggregate_and_keep


def keep_base(server: FedAvgServer, problem: Problem) -> None:
    """LG-FedAvg's clients keep the base and share the classifier."""
    names_of_base = [name for name in server.public_model_param_names if name.startswith("base")]
    server.trainer.worker.personal_params_name = names_of_base


def start_at_tau_squared(server: FedAvgServer, problem: Problem) -> None:
    """The second moments start at tau^2."""
    optimizer = server.adaptive_optimizer
    for second_moment in optimizer.velocities:
        second_moment.data.fill_(optimizer.tau**2)


PATCHES = patches_of(keep_controls, keep_base, start_at_tau_squared)
