"""Flower: flwr's server and strategies, and the clients of its baselines niid_bench, fedavgm and fedprox."""

import functools
import inspect
import logging
import typing
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import flwr.common.typing
import flwr.server.server
import numpy as np
import torch
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    GetParametersRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.server import Server
from torch import Tensor

from agreement import network
from agreement.adapters.feed import Ends, EpochLoader, Feed, Problem
from agreement.peers.flower import Setup

CLIENTS = {  # of the baseline niid_bench
    "fedavg": "niid_bench.client_fedavg:FlowerClientFedAvg",
    "fednova": "niid_bench.client_fednova:FlowerClientFedNova",
    "fedprox": "niid_bench.client_fedprox:FlowerClientFedProx",
    "scaffold": "niid_bench.client_scaffold:FlowerClientScaffold",
}
OK = Status(Code.OK, "")
CONTROLS = Path("controls")  # where clients of SCAFFOLD keep their control variates
NUM_CLIENTS = {"min_fit_clients": 2, "min_available_clients": 2, "min_evaluate_clients": 0, "fraction_evaluate": 0.0}


def suit_older_baselines() -> None:
    """Gives flwr what the baselines, which were written for an older one, import from it and call."""
    logging.disable(logging.CRITICAL)
    for name in ("Callable", "Dict", "List", "Optional", "Tuple", "Union"):
        if not hasattr(flwr.common.typing, name):
            setattr(flwr.common.typing, name, getattr(typing, name))
    fit_clients = flwr.server.server.fit_clients
    if "group_id" in inspect.signature(fit_clients).parameters and not isinstance(fit_clients, functools.partial):
        flwr.server.server.fit_clients = functools.partial(fit_clients, group_id=0)


suit_older_baselines()


class Trained(NamedTuple):
    """What a client of a baseline answers."""

    arrays: list[np.ndarray]
    num_examples: int
    metrics: dict[str, Any]


class InProcess(ClientProxy):
    """A client in this process, as Flower's server calls it."""

    def __init__(self, number: int, client: Any):
        super().__init__(str(number))
        self._client = client

    def fit(self, ins: FitIns, timeout: float | None = None, group_id: int | None = None) -> FitRes:
        """Trains the client."""
        arrays, num_examples, metrics = self._client.fit(parameters_to_ndarrays(ins.parameters), ins.config)
        return FitRes(status=OK, parameters=ndarrays_to_parameters(arrays), num_examples=num_examples, metrics=metrics)

    def get_parameters(self, ins: Any, timeout: float | None = None, group_id: int | None = None) -> GetParametersRes:
        """The client's parameters."""
        arrays = self._client.get_parameters({})
        return GetParametersRes(status=OK, parameters=ndarrays_to_parameters(arrays))

    def get_properties(self, *arguments: Any, **options: Any) -> None:
        """Nothing: no server here asks for them."""

    def evaluate(self, *arguments: Any, **options: Any) -> None:
        """Nothing: no server here asks for it."""

    def reconnect(self, *arguments: Any, **options: Any) -> None:
        """Nothing: no server here asks for it."""


def run(setup: Setup, problem: Problem) -> Ends:
    """Runs a server of Flower and clients of its baselines."""
    feed = Feed(problem)
    CONTROLS.mkdir()
    clients = []
    manager = SimpleClientManager()
    for number in range(problem.num_clients):
        client = InProcess(number, make_client(setup, EpochLoader(feed, number), problem))
        clients.append(client)
        manager.register(client)
    manager.sample = lambda *arguments, **options: [clients[number] for number in feed.cohort]
    server = make_server(setup, problem, manager)
    server.parameters = first_parameters(problem)
    for number in range(problem.num_rounds):
        feed.round = number
        server.parameters, _, (_, failures) = server.fit_round(server_round=number + 1, timeout=None)
        if failures:
            raise RuntimeError(str(failures[0]))
    return {"shared": tensors_of_message(server.parameters)}


def first_parameters(problem: Problem) -> flwr.common.Parameters:
    """The parameters that all sides start from, as Flower sends them."""
    return ndarrays_to_parameters([value.numpy() for value in problem.weights])


def tensors_of_message(parameters: flwr.common.Parameters) -> list[Tensor]:
    """The tensors in what Flower sends."""
    return [torch.from_numpy(array.copy()) for array in parameters_to_ndarrays(parameters)]


def make_client(setup: Setup, loader: EpochLoader, problem: Problem) -> Any:
    """A client of a baseline."""
    options = {
        "net": network.load_weights(network.small(), problem.weights),
        "trainloader": loader,
        "valloader": None,
        "device": torch.device("cpu"),
        "num_epochs": problem.epochs,
        "learning_rate": problem.lr if setup.lr is None else setup.lr,
        "momentum": setup.momentum,
        "weight_decay": 0.0,
    }
    baseline = "fedavg" if setup.client == "fedprox-baseline" else setup.client
    make = resolve_name(CLIENTS[baseline])
    if setup.client == "scaffold":
        return make(loader.client, **options, save_dir=str(CONTROLS))
    if setup.client == "fedprox":
        return make(**options, proximal_mu=setup.proximal_mu)
    client = make(**options)
    if setup.client == "fedprox-baseline":
        client.fit = functools.partial(fit_as_baseline_fedprox, client, setup.proximal_mu)
    return client


class NamedBatches:
    """A client's batches as the baseline fedprox has them, each in a dict."""

    def __init__(self, loader: EpochLoader):
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for x, y in self._loader:
            yield {"image": x, "img": x, "label": y}


def fit_as_baseline_fedprox(client: Any, proximal_mu: float, parameters: list[np.ndarray], config: Any) -> Trained:
    """Trains a client by the function of the baseline fedprox."""
    train = resolve_name("fedprox.model:train")
    client.set_parameters(parameters)
    train(
        net=client.net,
        trainloader=NamedBatches(client.trainloader),
        device=client.device,
        epochs=client.num_epochs,
        learning_rate=client.learning_rate,
        proximal_mu=proximal_mu,
    )
    return Trained(arrays=client.get_parameters({}), num_examples=len(client.trainloader.dataset), metrics={})


def make_server(setup: Setup, problem: Problem, manager: SimpleClientManager) -> Server:
    """A server of Flower, or of its baseline niid_bench."""
    if setup.client == "scaffold":
        strategy = resolve_name("niid_bench.strategy:ScaffoldStrategy")(**NUM_CLIENTS)
        server = resolve_name("niid_bench.server_scaffold:ScaffoldServer")(strategy, {}, manager)
        start_controls(server, problem, at_zero=setup.zero_controls)
        return server
    if setup.client == "fednova":
        strategy = resolve_name("niid_bench.strategy:FedNovaStrategy")(**NUM_CLIENTS)
        return resolve_name("niid_bench.server_fednova:FedNovaServer")(client_manager=manager, strategy=strategy)
    options = dict(setup.options)
    if options:
        options["initial_parameters"] = first_parameters(problem)
    strategy = resolve_name(setup.strategy)(**NUM_CLIENTS, **options)
    if setup.patch:
        PATCHES[setup.patch](strategy, problem)
    return Server(client_manager=manager, strategy=strategy)


def start_controls(server: Server, problem: Problem, at_zero: bool) -> None:
    """Gives SCAFFOLD its first control variates: the first parameters, or 0 for the server and every client."""
    if not at_zero:
        server.server_cv = tensors_of_message(first_parameters(problem))
        return
    server.server_cv = [torch.zeros_like(value) for value in problem.weights]
    for client in range(problem.num_clients):
        torch.save(server.server_cv, CONTROLS / f"client_cv_{client}.pt")


def start_at_tau_squared(strategy: Any, problem: Problem) -> None:
    """The second moment starts at tau^2, and the correction of the bias is undone."""
    aggregate_fit = strategy.aggregate_fit
    eta = strategy.eta
    has_correction = type(strategy).__name__ == "FedAdam"
    strategy.v_t = [np.full_like(value, strategy.tau**2) for value in strategy.current_weights]

    def aggregate_without_correction(server_round: int, results: list, failures: list) -> Any:
        if has_correction:
            power = server_round + 1
            strategy.eta = eta * (1 - strategy.beta_1**power) / (1 - strategy.beta_2**power) ** 0.5
        return aggregate_fit(server_round, results, failures)

    strategy.aggregate_fit = aggregate_without_correction


PATCHES = {"start_at_tau_squared": start_at_tau_squared}
