"""Flower: flwr's server and strategies, and the clients of its baselines niid_bench, fedavgm and fedprox."""

import functools
import logging
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple
from unittest import mock

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

from agreement import small_networks
from agreement.adapters.feed import EpochLoader, Feed
from agreement.adapters.final_tensors import TensorsByQuantity
from agreement.adapters.patches import Patch, patches_of
from agreement.adapters.refusals import refuse_momentum, refuse_weight_decay
from agreement.exchange import Problem
from agreement.peers.flower import PeerConfig
from agreement.rows import Quantity

OK = Status(Code.OK, "")
WEIGHT_DECAY_OF_BASELINE_FEDPROX = 0.001  # in its model.py
CONTROLS = Path("controls")  # where clients of SCAFFOLD keep their control variates
PARTICIPATION = {"min_fit_clients": 2, "min_available_clients": 2, "min_evaluate_clients": 0, "fraction_evaluate": 0.0}


class FitResult(NamedTuple):
    """What a client of a baseline answers."""

    arrays: list[np.ndarray]
    num_examples: int
    metrics: dict[str, Any]


class InProcessClient(ClientProxy):
    """A client in this process, as Flower's server calls it."""

    def __init__(self, client_id: int, client: Any):
        super().__init__(str(client_id))
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


def run(config: PeerConfig, problem: Problem, patch: Patch) -> TensorsByQuantity:
    """Runs a server of Flower and clients of its baselines."""
    if config.kind == "fedprox-baseline":
        refuse_momentum(problem)
        refuse_weight_decay(problem, fixed=WEIGHT_DECAY_OF_BASELINE_FEDPROX)
    suit_older_baselines()
    feed = Feed(problem)
    CONTROLS.mkdir()
    clients = []
    manager = SimpleClientManager()
    for client_id in range(problem.num_clients):
        client = InProcessClient(client_id, make_client(config, EpochLoader(feed, client_id), problem))
        clients.append(client)
        manager.register(client)
    manager.sample = lambda *arguments, **options: [clients[client_id] for client_id in feed.cohort]
    server = make_server(config, problem, manager)
    server.parameters = make_first_parameters(problem)
    patch(server, problem)
    for number in range(problem.num_rounds):
        feed.round = number
        server.parameters, _, answers = server.fit_round(server_round=number + 1, timeout=None)
        _, failures = answers
        if failures:
            raise RuntimeError(str(failures[0]))
    return {Quantity.SHARED: to_tensors(server.parameters)}


def suit_older_baselines() -> None:
    """Gives flwr what the baselines, which were written for an older one, import from it and call."""
    logging.disable(logging.CRITICAL)
    for name in ("Callable", "Dict", "List", "Optional", "Tuple", "Union"):
        mock.patch.object(flwr.common.typing, name, getattr(typing, name), create=True).start()
    fit_clients = functools.partial(flwr.server.server.fit_clients, group_id=0)
    mock.patch.object(flwr.server.server, "fit_clients", fit_clients).start()


def make_first_parameters(problem: Problem) -> flwr.common.Parameters:
    """The parameters that all sides start from, as Flower sends them."""
    return ndarrays_to_parameters([value.numpy() for value in problem.weights])


def to_tensors(parameters: flwr.common.Parameters) -> list[Tensor]:
    """The tensors in what Flower sends."""
    return [torch.from_numpy(array.copy()) for array in parameters_to_ndarrays(parameters)]


def make_client(config: PeerConfig, loader: EpochLoader, problem: Problem) -> Any:
    """A client of a baseline."""
    options = {  # that all clients take
        "net": small_networks.make_network(problem.network_name, problem.weights),
        "trainloader": loader,
        "valloader": None,
        "device": torch.device("cpu"),
        "num_epochs": problem.epochs,
        "learning_rate": problem.lr,
        "momentum": problem.momentum,
        "weight_decay": problem.weight_decay,
    }
    return KINDS[config.kind].make_client(config, options)


def make_fedavg_client(config: PeerConfig, options: Mapping[str, Any]) -> Any:
    """A client of niid_bench that trains as FedAvg's do."""
    return resolve_name("niid_bench.client_fedavg:FlowerClientFedAvg")(**options)


def make_fednova_client(config: PeerConfig, options: Mapping[str, Any]) -> Any:
    """A client of niid_bench for FedNova."""
    return resolve_name("niid_bench.client_fednova:FlowerClientFedNova")(**options)


def make_fedprox_client(config: PeerConfig, options: Mapping[str, Any]) -> Any:
    """A client of niid_bench for FedProx."""
    return resolve_name("niid_bench.client_fedprox:FlowerClientFedProx")(**options, proximal_mu=config.proximal_mu)


def make_scaffold_client(config: PeerConfig, options: Mapping[str, Any]) -> Any:
    """A client of niid_bench for SCAFFOLD, which keeps its control variate in a file by its id."""
    make = resolve_name("niid_bench.client_scaffold:FlowerClientScaffold")
    return make(options["trainloader"].client, **options, save_dir=str(CONTROLS))


def make_client_of_baseline_fedprox(config: PeerConfig, options: Mapping[str, Any]) -> Any:
    """A client that trains by the function of the baseline fedprox."""
    client = make_fedavg_client(config, options)
    client.fit = functools.partial(fit_as_baseline_fedprox, client, config.proximal_mu)
    return client


class NamedBatches:
    """A client's batches as the baseline fedprox has them, each in a dict."""

    def __init__(self, loader: EpochLoader):
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for x, y in self._loader:
            yield {"image": x, "img": x, "label": y}


def fit_as_baseline_fedprox(client: Any, proximal_mu: float, parameters: list[np.ndarray], config: Any) -> FitResult:
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
    return FitResult(arrays=client.get_parameters({}), num_examples=len(client.trainloader.dataset), metrics={})


def make_server(config: PeerConfig, problem: Problem, manager: SimpleClientManager) -> Server:
    """A server of Flower, or of its baseline niid_bench."""
    return KINDS[config.kind].make_server(config, problem, manager)


def make_scaffold_server(config: PeerConfig, problem: Problem, manager: SimpleClientManager) -> Server:
    """A server of niid_bench for SCAFFOLD, whose control variate begins as the first parameters, as in its code."""
    strategy = resolve_name("niid_bench.strategy:ScaffoldStrategy")(**PARTICIPATION)
    server = resolve_name("niid_bench.server_scaffold:ScaffoldServer")(strategy, {}, manager)
    server.server_cv = to_tensors(make_first_parameters(problem))
    return server


def make_fednova_server(config: PeerConfig, problem: Problem, manager: SimpleClientManager) -> Server:
    """A server of niid_bench for FedNova."""
    strategy = resolve_name("niid_bench.strategy:FedNovaStrategy")(**PARTICIPATION)
    return resolve_name("niid_bench.server_fednova:FedNovaServer")(client_manager=manager, strategy=strategy)


def make_flower_server(config: PeerConfig, problem: Problem, manager: SimpleClientManager) -> Server:
    """A server of Flower with a strategy."""
    make_strategy = resolve_name(config.strategy)
    strategy = make_strategy(**PARTICIPATION, **config.options, initial_parameters=make_first_parameters(problem))
    return Server(client_manager=manager, strategy=strategy)


class Kind(NamedTuple):
    """How the client and the server of a run are made."""

    make_client: Callable[[PeerConfig, Mapping[str, Any]], Any]
    make_server: Callable[[PeerConfig, Problem, SimpleClientManager], Server]


KINDS = {  # by the names that `PeerConfig.kind` has
    "fedavg": Kind(make_fedavg_client, make_flower_server),
    "fednova": Kind(make_fednova_client, make_fednova_server),
    "fedprox": Kind(make_fedprox_client, make_flower_server),
    "fedprox-baseline": Kind(make_client_of_baseline_fedprox, make_flower_server),
    "scaffold": Kind(make_scaffold_client, make_scaffold_server),
}


def start_controls_at_zero(server: Server, problem: Problem) -> None:
    """The control variates of SCAFFOLD's server and of every client begin at 0."""
    server.server_cv = [torch.zeros_like(value) for value in problem.weights]
    for client in range(problem.num_clients):
        torch.save(server.server_cv, CONTROLS / f"client_cv_{client}.pt")


def start_at_tau_squared(server: Server, problem: Problem) -> None:
    """The second moment starts at tau^2."""
    strategy = server.strategy
    strategy.v_t = [np.full_like(value, strategy.tau**2) for value in strategy.current_weights]


def start_at_tau_squared_uncorrected(server: Server, problem: Problem) -> None:
    """The second moment starts at tau^2, and FedAdam's correction of the bias is undone."""
    start_at_tau_squared(server, problem)
    strategy = server.strategy
    aggregate_fit = strategy.aggregate_fit
    eta = strategy.eta

    def aggregate_without_correction(server_round: int, results: list, failures: list) -> Any:
        power = server_round + 1
        strategy.eta = eta * (1 - strategy.beta_1**power) / (1 - strategy.beta_2**power) ** 0.5
        return aggregate_fit(server_round, results, failures)

    strategy.aggregate_fit = aggregate_without_correction


PATCHES = patches_of(start_at_tau_squared, start_at_tau_squared_uncorrected, start_controls_at_zero)
