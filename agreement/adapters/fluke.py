"""fluke: its Client, Server and CentralizedFL classes. Its loader is replaced by one of the problem's batches."""

import copy
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL, fednova
from fluke.algorithms.feddyn import get_all_params_of
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.nets import EncoderHeadNet
from fluke.utils.model import state_dict_zero_like
from torch import Tensor, nn

from agreement import network
from agreement.adapters.feed import Ends, EpochLoader, Feed, Problem
from agreement.peers.fluke import Setup


class Loader(EpochLoader, FastDataLoader):
    """A client's batches, in a loader that fluke takes for its own."""

    def __init__(self, feed: Feed, client: int):
        EpochLoader.__init__(self, feed, client)
        problem = feed.problem
        part = problem.parts[client]
        FastDataLoader.__init__(self, problem.x[part], problem.y[part], num_labels=10, batch_size=problem.batch_size)


class Observer:
    """Observes an algorithm: counts its rounds, and keeps what each ends with.

    After the last one the clients are trained once more.

    Attributes:
        ends: What the last round ended with; empty before.
    """

    def __init__(self, feed: Feed, read_ends: Callable[[], Ends]):
        self.ends: Ends = {}
        self._feed = feed
        self._read_ends = read_ends

    def end_round(self, round: int) -> None:
        """Is called after each round, which is counted from 1."""
        self._feed.round = round
        self.ends = self._read_ends()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None  # for whatever else an observer is told


def run(setup: Setup, problem: Problem) -> Ends:
    """Runs an algorithm of fluke."""
    set_up_environment()
    feed = Feed(problem)
    algorithm = make_algorithm(setup, feed)
    if setup.patch:
        PATCHES[setup.patch](algorithm, problem)
    observer = Observer(feed, partial(ends_of, algorithm, setup))
    algorithm.attach(observer)
    algorithm.server.get_eligible_clients = lambda share: [algorithm.clients[client] for client in feed.cohort]
    algorithm.run(problem.num_rounds, 1.0, finalize=False)
    return observer.ends


def set_up_environment() -> None:
    """Tells fluke to run on the CPU and to evaluate nothing."""
    environment = FlukeENV()
    environment.set_seed(1)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_evaluator(ClassificationEval(eval_every=1, n_classes=10))
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)


def make_algorithm(setup: Setup, feed: Feed) -> CentralizedFL:
    """Makes an algorithm with its server and clients."""
    problem = feed.problem
    kind = resolve_name(f"fluke.algorithms.{setup.algorithm}")
    without_init = kind.__new__(kind)  # which says the classes of its clients and its server
    make_client = without_init.get_client_class()
    make_server = without_init.get_server_class()
    clients = [make_client(**options_of_client(client, setup, feed)) for client in range(problem.num_clients)]
    shared = make_model(problem)
    if setup.shares_head_alone:
        shared = shared.head
    server = make_server(model=shared, test_set=None, clients=clients, **setup.server)
    names = DDict(client=DDict(), server=DDict(), model="x")
    return kind(problem.num_clients, None, names, clients=clients, server=server)


def options_of_client(client: int, setup: Setup, feed: Feed) -> dict[str, Any]:
    """What a client is made with."""
    problem = feed.problem
    optimizer = OptimizerConfigurator(
        optimizer_cfg=DDict(name="SGD", **{"lr": problem.lr, **setup.sgd}),
        scheduler_cfg=DDict(name="StepLR", step_size=1, gamma=1),
    )
    options = {
        "index": client,
        "train_set": Loader(feed, client),
        "test_set": None,
        "optimizer_cfg": optimizer,
        "loss_fn": nn.CrossEntropyLoss(),
        "local_epochs": problem.epochs,
        "clipping": 0,
    }
    if setup.clients_have_models:
        options["model"] = make_model(problem)
    return {**options, **setup.client}


def make_model(problem: Problem) -> EncoderHeadNet:
    """Makes the first model, of its class."""
    body = network.body(network=problem.network)
    return network.load_weights(EncoderHeadNet(body, network.head()), problem.weights)


def ends_of(algorithm: CentralizedFL, setup: Setup) -> Ends:
    """What an algorithm's server and clients hold after a round."""
    return {**ends_of_clients(algorithm.clients, setup), **ends_of_server(algorithm.server, setup)}


def ends_of_clients(clients: list[Any], setup: Setup) -> Ends:
    """The clients' models, whole and without their heads, and what else stays with a client."""
    ends: Ends = {"personal": [], "bodies": [], "kept": []}
    for client in clients:
        if client.model is not None:
            params = network.parameters_of(client.model)
            ends["personal"] += params
            ends["bodies"] += network.body_of(params)
        for attribute in setup.kept:
            ends["kept"] += network.parameters_or_number(attrgetter(attribute)(client))
        if setup.keeps_normalisation:
            for module in normalisations(client.model).values():
                ends["kept"] += network.parameters_of(module)
                ends["kept"] += network.statistics_of(module)
    return ends


def ends_of_server(server: Any, setup: Setup) -> Ends:
    """The server's model, or the part of one that the clients share, and its prototypes."""
    ends: Ends = {}
    shared = attrgetter(setup.shared)(server)
    if shared is not None:
        name = "head" if setup.shares_head_alone else "shared"
        ends[name] = network.parameters_of(shared)
        ends["statistics"] = network.statistics_of(shared)
    if setup.keeps_normalisation:
        ends["shared"] = parameters_without_normalisation(shared)
    if hasattr(server, "prototypes"):
        ends["class vectors"] = [torch.stack(list(server.prototypes))]
    return ends


def normalisations(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of batch normalisation of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}


def parameters_without_normalisation(model: nn.Module) -> list[Tensor]:
    """A copy of a model's parameters but for those of batch normalisation."""
    left_out = set()
    for name in normalisations(model):
        left_out |= {f"{name}.weight", f"{name}.bias"}
    return [value.detach().clone() for name, value in model.named_parameters() if name not in left_out]


def velocity_from_zero(algorithm: CentralizedFL, problem: Problem) -> None:
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


def sum_of_changes(algorithm: CentralizedFL, problem: Problem) -> None:
    """The dual of a client is the sum of w_i - w_g over its rounds."""

    def with_sum(client: Any, fit: Callable[[int], float]) -> Callable[..., float]:
        def fit_and_add(override_local_epochs: int = 0) -> float:
            dual = client.prev_grads.clone()
            start = get_all_params_of(client.model)
            loss = fit(override_local_epochs)
            client.prev_grads = dual + get_all_params_of(client.model) - start
            return loss

        return fit_and_add

    for client in algorithm.clients:
        client.fit = with_sum(client, client.fit)


PATCHES = {
    "velocity_from_zero": velocity_from_zero,
    "keep_the_rest": keep_the_rest,
    "sum_of_changes": sum_of_changes,
}
