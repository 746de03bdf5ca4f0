"""Flower: flwr's server and strategies, and the clients of its baselines niid_bench, fedavgm and fedprox."""

import functools
import importlib
import inspect
import logging
import os
import shutil
import sys
import tempfile
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

from agreement import network
from agreement.peers import Feed
from agreement.rows import Peer, Row

BASELINES = ("niid_bench", "fedavgm", "fedprox")


def load_baselines() -> None:
    """Makes the baselines importable, without what builds their experiments, beside a newer flwr."""
    import flwr.common.typing
    import flwr.server.server

    logging.disable(logging.CRITICAL)
    for name in BASELINES:
        folder = str(Path(os.environ["CLONE"]) / "baselines" / name)
        if folder not in sys.path:
            sys.path.insert(0, folder)
    absent = {name: ModuleType(name) for name in ("hydra", "hydra.utils", "omegaconf", "easydict")}
    absent["hydra"].utils = absent["hydra.utils"]
    absent["hydra.utils"].instantiate = lambda *arguments, **options: None
    absent["omegaconf"].DictConfig = dict
    absent["easydict"].EasyDict = dict
    for name, module in absent.items():
        sys.modules.setdefault(name, module)
    for name in ("Callable", "Dict", "List", "Optional", "Tuple", "Union"):  # which it passed on before
        if not hasattr(flwr.common.typing, name):
            setattr(flwr.common.typing, name, getattr(typing, name))
    fit = flwr.server.server.fit_clients
    if "group_id" in inspect.signature(fit).parameters and not isinstance(fit, functools.partial):
        flwr.server.server.fit_clients = functools.partial(fit, group_id=0)


def make_client(kind: str, loader: Any, index: int, options: dict[str, Any], folder: Path) -> Any:
    """A client of a baseline."""
    import torch

    model = network.start(network.small(), loader.problem["weights"])
    cpu = torch.device("cpu")
    lr = options.get("lr", loader.problem["lr"])
    momentum = options.get("momentum", 0.0)
    epochs = loader.problem["epochs"]
    if kind == "scaffold":
        from niid_bench.client_scaffold import FlowerClientScaffold

        return FlowerClientScaffold(index, model, loader, None, cpu, epochs, lr, momentum, 0.0, str(folder))
    if kind == "fedprox":
        from niid_bench.client_fedprox import FlowerClientFedProx

        return FlowerClientFedProx(
            net=model,
            trainloader=loader,
            valloader=None,
            device=cpu,
            num_epochs=epochs,
            learning_rate=lr,
            momentum=momentum,
            weight_decay=0.0,
            proximal_mu=options["mu"],
        )
    if kind == "fednova":
        from niid_bench.client_fednova import FlowerClientFedNova

        return FlowerClientFedNova(model, loader, None, cpu, epochs, lr, momentum, 0.0)
    from niid_bench.client_fedavg import FlowerClientFedAvg

    made = FlowerClientFedAvg(model, loader, None, cpu, epochs, lr, momentum, 0.0)
    if kind == "fedprox-baseline":
        from fedprox.model import train

        class Pictures:
            """The batches as that baseline has them, each in a dict."""

            def __iter__(self):
                return ({"image": x, "img": x, "label": y} for x, y in loader)

        def fit(parameters, config):
            made.set_parameters(parameters)
            train(made.net, Pictures(), cpu, epochs, lr, options["mu"])
            return made.get_parameters({}), len(loader.dataset), {}

        made.fit = fit
    return made


def start_at_tau_squared(strategy):
    """The second moment starts at tau^2, and the correction of the bias is undone."""
    import numpy as np

    original = strategy.aggregate_fit
    eta = strategy.eta
    has_correction = type(strategy).__name__ == "FedAdam"
    strategy.v_t = [np.full_like(value, strategy.tau**2) for value in strategy.current_weights]

    def aggregate_fit(server_round, results, failures):
        if has_correction:
            power = server_round + 1
            strategy.eta = eta * (1 - strategy.beta_1**power) / (1 - strategy.beta_2**power) ** 0.5
        return original(server_round, results, failures)

    strategy.aggregate_fit = aggregate_fit


def run(row: Row, problem: dict[str, Any]) -> dict[str, list]:
    """Runs Flower for a row; returns what it ends with."""
    load_baselines()
    import torch
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.client_manager import SimpleClientManager

    how = dict(row.how)
    kind = how.get("client", "fedavg")
    feed = Feed(problem)
    controls = Path(tempfile.mkdtemp())

    class Loader:
        """A client's batches of the round; every pass is the next epoch."""

        def __init__(self, client):
            self.client = client
            self.passes = 0
            self.problem = problem
            self.dataset = problem["parts"][client]

        def __len__(self):
            return len(feed.positions(self.client, 0))

        def __iter__(self):
            epoch = self.passes % problem["epochs"]
            self.passes += 1
            return feed.batches(self.client, epoch)

    manager = SimpleClientManager()
    proxies = []
    for index in range(len(problem["parts"])):
        proxy = make_proxy(index, make_client(kind, Loader(index), index, how, controls))
        proxies.append(proxy)
        manager.register(proxy)
    manager.sample = lambda *arguments, **options: [proxies[client] for client in feed.cohort]
    first = ndarrays_to_parameters([value.numpy() for value in problem["weights"]])
    server = make_server(how, manager, first, controls)
    server.parameters = first
    for number in range(len(problem["cohorts"])):
        feed.round = number
        parameters, _, (_, failures) = server.fit_round(server_round=number + 1, timeout=None)
        if failures:
            raise RuntimeError(str(failures[0]))
        server.parameters = parameters
    shutil.rmtree(controls)
    return {"shared": [torch.from_numpy(value.copy()) for value in parameters_to_ndarrays(server.parameters)]}


def make_proxy(index: int, client: Any) -> Any:
    """What Flower's server calls a client by, in this process."""
    from flwr.common import Code, FitRes, GetParametersRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.client_proxy import ClientProxy

    class Proxy(ClientProxy):
        def fit(self, ins, timeout=None, group_id=None):
            arrays, count, told = client.fit(parameters_to_ndarrays(ins.parameters), ins.config)
            return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), count, told)

        def get_parameters(self, ins, timeout=None, group_id=None):
            return GetParametersRes(Status(Code.OK, ""), ndarrays_to_parameters(client.get_parameters({})))

        def get_properties(self, *arguments, **options): ...

        def evaluate(self, *arguments, **options): ...

        def reconnect(self, *arguments, **options): ...

    return Proxy(str(index))


def make_server(how: dict[str, Any], manager: Any, first: Any, controls: Path) -> Any:
    """A server of Flower or of its baseline niid_bench.

    Args:
        how: The arguments of a row.
        manager: Of the clients.
        first: The parameters that all sides start from.
        controls: The folder of the clients' control variates, for SCAFFOLD.
    """
    from flwr.server.server import Server

    kind = how.get("client", "fedavg")
    counts = {"min_fit_clients": 2, "min_available_clients": 2, "min_evaluate_clients": 0, "fraction_evaluate": 0.0}
    if kind == "scaffold":
        module = importlib.import_module("niid_bench.server_scaffold")
        strategy = importlib.import_module("niid_bench.strategy").ScaffoldStrategy(**counts)
        server = module.ScaffoldServer(strategy, {}, manager)
        start_controls(server, first, manager, controls, at_zero=how.get("zero_controls", False))
        return server
    if kind == "fednova":
        module = importlib.import_module("niid_bench.server_fednova")
        strategy = importlib.import_module("niid_bench.strategy").FedNovaStrategy(**counts)
        return module.FedNovaServer(client_manager=manager, strategy=strategy)
    home, name = how.get("strategy", ("flwr.server.strategy", "FedAvg"))
    options = how.get("options", {})
    if options:
        options = {"initial_parameters": first, **options}
    strategy = getattr(importlib.import_module(home), name)(**counts, **options)
    if "change" in how:
        how["change"](strategy)
    return Server(client_manager=manager, strategy=strategy)


def start_controls(server: Any, first: Any, manager: Any, controls: Path, at_zero: bool) -> None:
    """Gives SCAFFOLD its first control variates: the first parameters, or 0 for the server and every client."""
    import torch
    from flwr.common import parameters_to_ndarrays

    server.server_cv = [torch.from_numpy(value.copy()) for value in parameters_to_ndarrays(first)]
    if at_zero:
        server.server_cv = [torch.zeros_like(value) for value in server.server_cv]
        for client in range(manager.num_available()):
            torch.save(server.server_cv, controls / f"client_cv_{client}.pt")


def adaptive(name: str, **options: Any) -> dict[str, Any]:
    """A strategy of flwr with an adaptive server."""
    second = {} if name == "FedAdagrad" else {"beta_2": 0.99}
    momentum = {} if name == "FedAdagrad" else {"beta_1": 0.9}
    given = {"eta": 0.05, "tau": 0.01, **momentum, **second}
    return {"strategy": ("flwr.server.strategy", name), "options": given, **options}


MOMENTUM = {"server_momentum": 0.9, "server_learning_rate": 1.0}
CORE = {"strategy": ("flwr.server.strategy", "FedAvgM"), "options": MOMENTUM}
NESTEROV = {"strategy": ("fedavgm.strategy", "CustomFedAvgM"), "options": MOMENTUM}
SCAFFOLD = {"client": "scaffold"}
JUDGE = "Algorithm 2 of Reddi et al.: v_{-1} >= tau^2, and no correction (Readings 2 and 3)."

PEER = Peer(
    name="Flower", module="flower", commit="fdef7afb1dca3030553be302366cfd285ed6632c", package="flwr 1.42.0",
    rows=(
        Row("FedAvg", "fedavg", {}),
        Row("FedAvgM", "fedavgm", CORE),
        Row("FedAvgM, 2 of 4", "fedavgm, half", CORE),
        Row(
            "baseline FedAvgM", "fedavgm", NESTEROV, cause="The server's momentum is Nesterov's (strategy.py).",
            judge="FedAvgM: w <- w - v with v <- beta v + Delta.", closed_by="baseline FedAvgM, Nesterov here too",
        ),
        Row("baseline FedAvgM, Nesterov here too", "fedavgm, nesterov", NESTEROV),
        Row("niid_bench FedProx", "fedprox", {"client": "fedprox", "mu": 0.5}),
        Row("baseline FedProx, its weight decay", "fedprox, decay", {"client": "fedprox-baseline", "mu": 0.5}),
        Row("niid_bench FedNova", "fednova", {"client": "fednova"}),
        Row(
            "niid_bench FedNova with momentum", "fednova, momentum",
            {"client": "fednova", "lr": 0.03, "momentum": 0.9},
        ),
        Row("niid_bench SCAFFOLD", "scaffold", SCAFFOLD),
        Row(
            "niid_bench SCAFFOLD, 2 of 4", "scaffold, half", SCAFFOLD,
            cause="The control variates begin as the weights of the network (server_scaffold.py).",
            judge="SCAFFOLD, Section 4: they begin at 0, or as gradients at the first model.",
            closed_by="niid_bench SCAFFOLD, 2 of 4, c from 0",
        ),
        Row(
            "niid_bench SCAFFOLD, 2 of 4, c from 0", "scaffold, half", {**SCAFFOLD, "zero_controls": True},
            change="the control variates begin at 0",
        ),
        Row(
            "FedAdam", "fedadam", adaptive("FedAdam"), closed_by="FedAdam, v from tau^2, no correction",
            cause="The second moment starts at 0, and the bias is corrected by the number of the round plus 1 "
            "(fedadam.py).", judge=JUDGE,
        ),
        Row(
            "FedAdam, v from tau^2, no correction", "fedadam", adaptive("FedAdam", change=start_at_tau_squared),
            change="the second moment starts at tau^2, and the correction is undone",
        ),
        Row(
            "FedYogi", "fedyogi", adaptive("FedYogi"), closed_by="FedYogi, v from tau^2",
            cause="The second moment starts at 0 (fedyogi.py).", judge=JUDGE,
        ),
        Row(
            "FedYogi, v from tau^2", "fedyogi", adaptive("FedYogi", change=start_at_tau_squared),
            change="the second moment starts at tau^2",
        ),
        Row(
            "FedAdagrad", "fedadagrad, without momentum", adaptive("FedAdagrad"), closed_by="FedAdagrad, v from tau^2",
            cause="The second moment starts at 0 (fedadagrad.py).", judge=JUDGE,
        ),
        Row(
            "FedAdagrad, v from tau^2", "fedadagrad, without momentum",
            adaptive("FedAdagrad", change=start_at_tau_squared), change="the second moment starts at tau^2",
        ),
    ),
)  # fmt: skip
