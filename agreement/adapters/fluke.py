"""fluke: its Client, Server and CentralizedFL classes. Its loader is replaced by one of the problem's batches."""

import copy
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL, fednova
from fluke.algorithms.feddyn import get_all_params_of
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.nets import EncoderHeadNet
from fluke.utils.model import state_dict_zero_like
from torch import Tensor, nn

from agreement import small_networks
from agreement.adapters.feed import EpochLoader, Feed
from agreement.adapters.final_tensors import TensorsByQuantity, read_kept, read_personal_models
from agreement.adapters.patches import Patch, patches_of
from agreement.exchange import Problem
from agreement.peers.fluke import PeerConfig
from agreement.rows import Quantity, SharedPart
from agreement.small_networks import NUM_CLASSES


class FlukeLoader(EpochLoader, FastDataLoader):
    """A client's batches, in a loader that fluke takes for its own."""

    def __init__(self, feed: Feed, client: int):
        EpochLoader.__init__(self, feed, client)
        problem = feed.problem
        part = problem.parts[client]
        FastDataLoader.__init__(
            self, problem.x[part], problem.y[part], num_labels=NUM_CLASSES, batch_size=problem.batch_size
        )


class Observer:
    """Observes an algorithm: counts its rounds, and keeps what each ends with.

    It is told of no round after the last one, though some clients train once more when the algorithm is finalised.

    Attributes:
        final_tensors: What the last round ended with; empty before.
    """

    def __init__(self, feed: Feed, read_final_tensors: Callable[[], TensorsByQuantity]):
        self.final_tensors: TensorsByQuantity = {}
        self._feed = feed
        self._read_final_tensors = read_final_tensors

    def end_round(self, round: int) -> None:
        """Is called after each round, which is counted from 1."""
        self._feed.round = round
        self.final_tensors = self._read_final_tensors()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None  # for whatever else an observer is told


def run(config: PeerConfig, problem: Problem, patch: Patch) -> TensorsByQuantity:
    """Runs an algorithm of fluke."""
    set_up_environment()
    feed = Feed(problem, num_extra_rounds=1)
    algorithm = make_algorithm(config, feed)
    patch(algorithm, problem)
    observer = Observer(feed, partial(read_final_tensors, algorithm, config))
    algorithm.attach(observer)
    algorithm.server.get_eligible_clients = lambda share: [algorithm.clients[client] for client in feed.cohort]
    algorithm.run(problem.num_rounds, 1.0, finalize=False)
    return observer.final_tensors


def set_up_environment() -> None:
    """Tells fluke to run on the CPU and to evaluate nothing."""
    environment = FlukeENV()
    environment.set_seed(1)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_evaluator(ClassificationEval(eval_every=1, n_classes=NUM_CLASSES))
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)


def make_algorithm(config: PeerConfig, feed: Feed) -> CentralizedFL:
    """Makes an algorithm with its server and clients."""
    problem = feed.problem
    kind = resolve_name(f"fluke.algorithms.{config.algorithm}")
    without_init = kind.__new__(kind)  # which says the classes of its clients and its server
    make_client = without_init.get_client_class()
    make_server = without_init.get_server_class()
    clients = [make_client(**make_client_options(client, config, feed)) for client in range(problem.num_clients)]
    shared = make_model(problem)
    if config.shared_part is SharedPart.HEAD:
        shared = shared.head
    server = make_server(model=shared, test_set=None, clients=clients, **config.server_options)
    names = DDict(client=DDict(), server=DDict(), model="x")
    return kind(problem.num_clients, None, names, clients=clients, server=server)


def make_client_options(client: int, config: PeerConfig, feed: Feed) -> dict[str, Any]:
    """What a client is made with."""
    problem = feed.problem
    optimizer = OptimizerConfigurator(
        optimizer_cfg=DDict(name="SGD", lr=problem.lr, momentum=problem.momentum, weight_decay=problem.weight_decay),
        scheduler_cfg=DDict(name="StepLR", step_size=1, gamma=1),
    )
    options = {
        "index": client,
        "train_set": FlukeLoader(feed, client),
        "test_set": None,
        "optimizer_cfg": optimizer,
        "loss_fn": nn.CrossEntropyLoss(),
        "local_epochs": problem.epochs,
        "clipping": 0,
    }
    if config.clients_have_models:
        options["model"] = make_model(problem)
    return {**options, **config.client_options}


def make_model(problem: Problem) -> EncoderHeadNet:
    """Makes the first model, of its class."""
    body = small_networks.make_body(problem.network_name)
    return small_networks.load_weights(EncoderHeadNet(body, small_networks.head()), problem.weights)


def read_final_tensors(algorithm: CentralizedFL, config: PeerConfig) -> TensorsByQuantity:
    """What an algorithm's server and clients hold after a round."""
    return {**read_clients(algorithm.clients, config), **read_server(algorithm.server, config)}


def read_clients(clients: list[Any], config: PeerConfig) -> TensorsByQuantity:
    """The clients' models, whole and without their heads, and what else stays with a client."""
    models = [client.model for client in clients if client.model is not None]
    personal = read_personal_models([small_networks.copy_parameters(model) for model in models])
    kept = read_kept(clients, config.kept)
    if config.shared_part is SharedPart.ALL_BUT_NORMALISATION:
        for model in models:
            for module in find_normalisations(model).values():
                kept += small_networks.copy_parameters(module)
                kept += small_networks.copy_statistics(module)
    return {**personal, Quantity.KEPT: kept}


def read_server(server: Any, config: PeerConfig) -> TensorsByQuantity:
    """The server's model, or the part of one that the clients share, and its prototypes."""
    final_tensors: TensorsByQuantity = {}
    shared = attrgetter(config.server_model)(server)
    if shared is not None:
        copy_shared = small_networks.copy_parameters
        if config.shared_part is SharedPart.ALL_BUT_NORMALISATION:
            copy_shared = copy_parameters_without_normalisation
        final_tensors[config.shared_part.quantity] = copy_shared(shared)
        final_tensors[Quantity.STATISTICS] = small_networks.copy_statistics(shared)
    if config.class_vectors:
        final_tensors[Quantity.CLASS_VECTORS] = list(getattr(server, config.class_vectors))
    return final_tensors


def find_normalisations(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of batch normalisation of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}


def copy_parameters_without_normalisation(model: nn.Module) -> list[Tensor]:
    """A copy of a model's parameters but for those of batch normalisation."""
    left_out = set()
    for name in find_normalisations(model):
        left_out |= {f"{name}.weight", f"{name}.bias"}
    return [value.detach().clone() for name, value in model.named_parameters() if name not in left_out]


def start_velocity_at_zero(algorithm: CentralizedFL, problem: Problem) -> None:
    """The velocity of FedAvgM is zero before the first round."""
    server = algorithm.server
    server.momentum_vector = state_dict_zero_like(server.model.state_dict())


def keep_the_rest(algorithm: CentralizedFL, problem: Problem) -> None:
    """The share of the former model that the weights leave is kept."""
    aggregate_models = fednova.aggregate_models

    def aggregate_with_the_rest(model: nn.Module, models: list[nn.Module], weights: list[float], eta: float) -> Any:
        rest = 1 - float(sum(weights))
        return aggregate_models(model, [*models, copy.deepcopy(model)], [*map(float, weights), rest], eta)

    mock.patch.object(fednova, "aggregate_models", aggregate_with_the_rest).start()


def sum_changes(algorithm: CentralizedFL, problem: Problem) -> None:
    """The dual of a client is the sum of w_i - w_g over its rounds."""

    def fit_and_add(client: Any, fit: Callable[[int], float], override_local_epochs: int = 0) -> float:
        dual = client.prev_grads.clone()
        start = get_all_params_of(client.model)
        loss = fit(override_local_epochs)
        client.prev_grads = dual + get_all_params_of(client.model) - start
        return loss

    for client in algorithm.clients:
        client.fit = partial(fit_and_add, client, client.fit)


PATCHES = patches_of(start_velocity_at_zero, keep_the_rest, sum_changes)
