"""fluke: its Client, Server and CentralizedFL classes. Its loader is replaced by one of the problem's batches."""

import copy
import importlib
from typing import Any

from agreement import network
from agreement.peers import Feed, parameters_of, statistics_of
from agreement.rows import Peer, Row

WEIGHTED = {"weighted": True}
WHOLE = "it is given the velocity of zero before the first round, in which it then takes the change"


def velocity_from_zero(algorithm, classes):
    """The velocity of FedAvgM is zero before the first round."""
    from fluke.utils.model import state_dict_zero_like

    algorithm.server.momentum_vector = state_dict_zero_like(algorithm.server.model.state_dict())


def keep_the_rest(algorithm, classes):
    """The share of the former model that the weights leave is kept."""
    module = importlib.import_module("fluke.algorithms.fednova")
    original = getattr(module.aggregate_models, "original", module.aggregate_models)

    def aggregate(model, models, weights, eta):
        rest = 1 - float(sum(weights))
        return original(model, [*models, copy.deepcopy(model)], [*map(float, weights), rest], eta)

    aggregate.original = original
    module.aggregate_models = aggregate
    algorithm.restore = lambda: setattr(module, "aggregate_models", original)


def sum_of_changes(algorithm, classes):
    """The dual of a client is the sum of w_i - w_g over its rounds."""
    from fluke.algorithms.feddyn import get_all_params_of

    def with_sum(client, original):
        def fit(override=0):
            dual = client.prev_grads.clone()
            start = get_all_params_of(client.model)
            loss = original(override)
            client.prev_grads = dual + get_all_params_of(client.model) - start
            return loss

        return fit

    for client in algorithm.clients:
        client.fit = with_sum(client, client.fit)


def ends_of_normalisation(algorithm: Any) -> dict[str, list]:
    """What FedBN holds: the shared model without normalisation, and the normalisation that each client keeps."""
    from torch import nn

    kept = []
    own = set()
    for client in algorithm.clients:
        for module in client.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                kept += parameters_of(module) + statistics_of(module)
    for name, module in algorithm.server.model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            own |= {f"{name}.weight", f"{name}.bias"}
    shared = [value.detach().clone() for name, value in algorithm.server.model.named_parameters() if name not in own]
    return {"shared": shared, "kept": kept}


def ends_of(algorithm: Any, how: dict[str, Any]) -> dict[str, list]:
    """What an algorithm of fluke holds after a round."""
    import torch

    clients = algorithm.clients
    server = algorithm.server
    ends = {"bodies": [], "personal": [], "kept": []}
    for client in clients:
        if client.model is not None:
            ends["personal"] += parameters_of(client.model)
            ends["bodies"] += parameters_of(client.model)[:-2]
    if how["name"] == "APFL":
        for client in clients:
            ends["kept"] += [*parameters_of(client.personalized_model), torch.tensor(client.hyper_params.lam)]
    if how["name"] == "FedBN":
        return ends_of_normalisation(algorithm)
    if server.model is not None:
        ends["head" if how["name"] == "LGFedAVG" else "shared"] = parameters_of(server.model)
        ends["statistics"] = statistics_of(server.model)
    if how.get("cloud"):
        ends["shared"] = parameters_of(server.cld_mdl)
    if hasattr(server, "prototypes"):
        ends["prototypes"] = [torch.stack(list(server.prototypes))]
    return ends


def run(row: Row, problem: dict[str, Any]) -> dict[str, list]:
    """Runs fluke for a row; returns what it ends with."""
    import torch
    from fluke import DDict
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.nets import EncoderHeadNet

    how = dict(row.how)
    feed = Feed(problem)
    ends: dict[str, list] = {}

    class Loader(FastDataLoader):
        """A client's batches of the round; every pass is the next epoch."""

        def __init__(self, client):
            part = problem["parts"][client]
            super().__init__(problem["x"][part], problem["y"][part], num_labels=10, batch_size=problem["batch_size"])
            self.client = client
            self.passes = 0

        def __iter__(self):
            epoch = self.passes % problem["epochs"]
            self.passes += 1
            return feed.batches(self.client, epoch)

    class Rounds:
        """Counts the rounds and keeps what the last one ends with: afterwards the clients are trained once more."""

        def end_round(self, round):
            feed.round = round
            ends.update(ends_of(algorithm, how))

        def __getattr__(self, name):
            return lambda *arguments, **options: None

    def model():
        body = network.body(network=problem["network"])
        return network.start(EncoderHeadNet(body, torch.nn.Linear(16, 10)), problem["weights"])

    set_up_environment()
    kind = getattr(importlib.import_module(f"fluke.algorithms.{how['module']}"), how["name"])
    shell = kind.__new__(kind)
    optimizer = OptimizerConfigurator(
        optimizer_cfg=DDict(name="SGD", **{"lr": problem["lr"], **how.get("sgd", {})}),
        scheduler_cfg=DDict(name="StepLR", step_size=1, gamma=1),
    )
    clients = []
    for index in range(len(problem["parts"])):
        own = {"model": model()} if how.get("own") else {}
        options = {"clipping": 0, **how.get("client", {})}
        client = shell.get_client_class()(
            index=index,
            train_set=Loader(index),
            test_set=None,
            optimizer_cfg=optimizer,
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=problem["epochs"],
            **own,
            **options,
        )
        clients.append(client)
    first = model().head if how["name"] == "LGFedAVG" else model()
    server = shell.get_server_class()(model=first, test_set=None, clients=clients, **how.get("server", {}))
    names = DDict(client=DDict(), server=DDict(), model="x")
    algorithm = kind(len(clients), None, names, clients=clients, server=server)
    if "change" in how:
        how["change"](algorithm, kind)
    algorithm.attach(Rounds())
    server.get_eligible_clients = lambda share: [clients[client] for client in feed.cohort]
    algorithm.run(len(problem["cohorts"]), 1.0, finalize=False)
    getattr(algorithm, "restore", lambda: None)()
    return ends


def set_up_environment() -> None:
    """Tells fluke to run on the CPU and to evaluate nothing."""
    from fluke import FlukeENV
    from fluke.evaluation import ClassificationEval

    environment = FlukeENV()
    environment.set_seed(1)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_evaluator(ClassificationEval(eval_every=1, n_classes=10))
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)


def method(module: str, name: str, **options: Any) -> dict[str, Any]:
    """The module and class of an algorithm, and what its clients, server and optimizer are given."""
    return {"module": module, "name": name, **options}


NEW_MOMENTUM = {"sgd": {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-3}, "server": WEIGHTED}
NOVA_MOMENTUM = {"sgd": {"lr": 0.03, "momentum": 0.9}, "server": WEIGHTED, "client": {"persistency": False}}
DYN = {"client": {"alpha": 0.1}, "cloud": True}
MOON = {"client": {"mu": 1.0, "tau": 0.5}}
MIXED = {"own": True, "client": {"lam": 0.3}, "server": {**WEIGHTED, "tau": 1}}
PROTO = {"own": True, "client": {"n_protos": 10, "lam": 1.0}}

PEER = Peer(
    name="fluke", module="fluke", package="fluke-fl 0.8.1",
    rows=(
        Row("FedAvg, weighted", "fedavg", method("fedavg", "FedAVG", server=WEIGHTED)),
        Row(
            "FedAvg, its default", "fedavg", method("fedavg", "FedAVG"),
            cause="The mean of the models is plain by default (server.py, `weighted`).",
            judge="FedAvg, Algorithm 1: weights n_k / n.", closed_by="FedAvg, weighted",
        ),
        Row("FedAvg, its default, plain means here too", "fedavg, uniform", method("fedavg", "FedAVG")),
        Row(
            "FedAvg with momentum", "fedavg, momentum", method("fedavg", "FedAVG", **NEW_MOMENTUM),
            cause="The clients' momentum lives on from round to round by default (client.py, `persistency`).",
            judge="FedAvg has no momentum; here the local optimizer is new in every round.",
            closed_by="FedAvg with momentum, new in every round",
        ),
        Row(
            "FedAvg with momentum, new in every round", "fedavg, momentum",
            method("fedavg", "FedAVG", **NEW_MOMENTUM, client={"persistency": False}),
        ),
        Row("FedProx", "fedprox", method("fedprox", "FedProx", client={"mu": 0.5}, server=WEIGHTED)),
        Row("SCAFFOLD, clients of one size", "scaffold, equal", method("scaffold", "SCAFFOLD")),
        Row("SCAFFOLD, 2 of 4", "scaffold, half", method("scaffold", "SCAFFOLD")),
        Row(
            "SCAFFOLD", "scaffold", method("scaffold", "SCAFFOLD"),
            cause="Models are weighted by n_i, the control variates by 1 / N (scaffold.py).",
            judge="SCAFFOLD, lines 16 and 17: both plain; here both by examples (Reading 5).",
            closed_by="SCAFFOLD, c by 1 / N here too",
        ),
        Row("SCAFFOLD, c by 1 / N here too", "scaffold, c uniform", method("scaffold", "SCAFFOLD")),
        Row(
            "SCAFFOLD, plain means", "scaffold, uniform", method("scaffold", "SCAFFOLD", server={"weighted": False}),
        ),
        Row(
            "SCAFFOLD, global_step 2", "scaffold, equal, server rate 2",
            method("scaffold", "SCAFFOLD", server={"global_step": 2}, sgd={"lr": 0.05}),
            cause="`global_step` multiplies the weights of the models, and not the change of the model (scaffold.py).",
            judge="SCAFFOLD, line 17: x + eta_g times the mean change.",
            closed_by="SCAFFOLD, lr 2 in its place",
        ),
        Row(
            "SCAFFOLD, lr 2 in its place", "scaffold, equal, server rate 2",
            method("scaffold", "SCAFFOLD", server={"lr": 2.0}, sgd={"lr": 0.05}),
        ),
        Row(
            "FedAvgM", "fedavgm", method("fedavgm", "FedAVGM"),
            cause="The first round sets the velocity to zero and leaves the model as it was (fedavgm.py).",
            judge="FedAvgM: v starts at 0, and the first round already moves the model.",
            closed_by="FedAvgM, velocity from 0",
        ),
        Row(
            "FedAvgM, velocity from 0", "fedavgm", method("fedavgm", "FedAVGM", change=velocity_from_zero),
            change=WHOLE,
        ),
        Row(
            "FedNova", "fednova", method("fednova", "FedNova", server=WEIGHTED),
            cause="The weights of the models do not sum to 1, and nothing is added for the former model (fednova.py).",
            judge="FedNova, normalised averaging: x less the step, so that the weights of x and x_i sum to 1.",
            closed_by="FedNova, with the rest of x",
        ),
        Row(
            "FedNova, with the rest of x", "fednova",
            method("fednova", "FedNova", server=WEIGHTED, change=keep_the_rest),
            change="the former model gets the weight that the others leave",
        ),
        Row(
            "FedNova with momentum", "fednova, momentum", method("fednova", "FedNova", **NOVA_MOMENTUM),
            cause="As without momentum.", judge="As without momentum.",
            closed_by="FedNova with momentum, with the rest of x",
        ),
        Row(
            "FedNova with momentum, with the rest of x", "fednova, momentum",
            method("fednova", "FedNova", **NOVA_MOMENTUM, change=keep_the_rest),
            change="the former model gets the weight that the others leave",
        ),
        Row(
            "FedDyn, clients of one size", "feddyn, equal", method("feddyn", "FedDyn", **DYN),
            cause="The kept gradient has the other sign, and alpha stands before it twice (feddyn.py).",
            judge="FedDyn, Algorithm 1: the gradient of a client falls by alpha (w_i - w_g).",
            closed_by="FedDyn, clients of one size, dual of the paper",
        ),
        Row(
            "FedDyn, clients of one size, dual of the paper", "feddyn, equal",
            method("feddyn", "FedDyn", **DYN, change=sum_of_changes),
            change="a client keeps the sum of w_i - w_g",
        ),
        Row(
            "FedDyn, dual of the paper, plain means", "feddyn",
            method("feddyn", "FedDyn", **DYN, server={"weighted": False}, change=sum_of_changes),
            change="a client keeps the sum of w_i - w_g",
        ),
        Row("MOON", "moon", method("moon", "MOON", **MOON, server=WEIGHTED)),
        Row(
            "FedAvg with batch normalisation", "fedavg, normed", method("fedavg", "FedAVG", server=WEIGHTED),
            ("shared", "statistics"),
        ),
        Row(
            "MOON with batch normalisation", "moon, normed", method("moon", "MOON", **MOON, server=WEIGHTED),
            cause="The received model and the client's last one give their features in training mode, by the batch's "
            "mean and variance (moon.py).",
            judge="MOON is silent; the authors' code evaluates both (Reading 4).",
            closed_by="MOON with batch normalisation, training mode here too",
        ),
        Row(
            "MOON with batch normalisation, training mode here too", "moon, normed, training mode",
            method("moon", "MOON", **MOON, server=WEIGHTED),
        ),
        Row("FedBN", "fedbn, normed", method("fedbn", "FedBN", server=WEIGHTED), ("shared", "kept")),
        Row(
            "FedRS", "fedrs", method("fedrs", "FedRS", client={"alpha": 0.5}, server=WEIGHTED),
            cause="A class with one or two examples counts as absent (fedrs.py, `count_as_missing`).",
            judge="FedRS: absent are the classes that a client lacks.", closed_by="FedRS, count_as_missing 0",
        ),
        Row(
            "FedRS, count_as_missing 0", "fedrs",
            method("fedrs", "FedRS", client={"alpha": 0.5, "count_as_missing": 0}, server=WEIGHTED),
        ),
        Row(
            "FedProto", "fedproto", method("fedproto", "FedProto", **PROTO), compared=("personal", "prototypes"),
        ),
        Row(
            "FedProto, fedcli's default", "fedproto, last epoch", method("fedproto", "FedProto", **PROTO),
            compared=("personal", "prototypes"),
            cause="fedcli takes prototypes of the last epoch by default, as the authors' code (Reading 4).",
            judge="FedProto, Eq. 3: of the client's data, without a word of epochs.", closed_by="FedProto",
        ),
        Row(
            "APFL", "apfl", method("apfl", "APFL", **MIXED), ("shared", "kept"),
            cause="The gradient of the mixture ends in a copy (apfl.py, `merge_models`), so v is not trained; at the "
            "end of a round a client keeps the mixture in the place of v.",
            judge="APFL, Algorithm 1: v moves by the gradient at the mixture, and is kept.",
            closed_by="APFL, so here too",
        ),
        Row(
            "APFL, so here too", "apfl, mixture kept, v untrained", method("apfl", "APFL", **MIXED), ("shared", "kept"),
        ),
        Row(
            "LG-FedAvg", "lg-fedavg", method("lg_fedavg", "LGFedAVG", own=True, server=WEIGHTED),
            compared=("head", "bodies"),
        ),
    ),
)  # fmt: skip
