"""PFLlib: its client and server classes, which are given the problem's batches in the place of its files."""

import contextlib
import copy
import importlib
import io
import operator
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agreement import network
from agreement.peers import Feed, parameters_of
from agreement.rows import Peer, Row

OPTIONS = {  # of its command line; those of a row come on top
    "algorithm": "x", "dataset": "digits", "device": "cpu", "save_folder_name": "items", "num_classes": 10,
    "few_shot": 0, "learning_rate_decay_gamma": 1.0, "learning_rate_decay": False, "join_ratio": 1.0,
    "random_join_ratio": False, "time_select": False, "goal": "test", "time_threthold": 1e9, "top_cnt": 100,
    "auto_break": False, "eval_gap": 100, "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0,
    "dlg_eval": False, "dlg_gap": 100, "batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0,
    "server_learning_rate": 1.0,
}  # fmt: skip


def square_the_norm(server, problem):
    """The norm in the penalty of FedDyn is squared."""
    import torch

    class Squared:
        """torch, whose `norm` is squared."""

        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        def norm(vector, order):
            return (vector * vector).sum()

    module = importlib.import_module("flcore.clients.clientdyn")
    module.torch = Squared()
    server.restore = lambda: setattr(module, "torch", torch)


def square_the_norm_by_size(server, problem):
    """The same, and alpha is divided by a client's size over the mean size."""
    square_the_norm(server, problem)
    sizes = [len(part) for part in problem["parts"]]
    for client in server.clients:
        client.alpha = client.alpha * sum(sizes) / len(sizes) / sizes[client.id]


def give_newcomers_no_past(server, problem):
    """The contrast is constant while a client takes part for the first time: its last model is the global one."""

    def without_past(client, original):
        def train():
            if not hasattr(client, "has_past"):
                client.has_past = True
                client.old_model = copy.deepcopy(client.global_model)
            original()

        return train

    for client in server.clients:
        client.train = without_past(client, client.train)


def take_softmax(server, problem):
    """The target of a cross-entropy is a distribution."""
    import torch

    cross_entropy = torch.nn.CrossEntropyLoss()

    def loss(output, target):
        return cross_entropy(output, target.softmax(-1) if target.is_floating_point() else target)

    for client in server.clients:
        client.loss = loss


def sum_over_classes(server, problem):
    """KL sums over classes, and its target is a constant."""
    from torch.nn import functional

    for client in server.clients:
        client.KL = lambda logs, target: functional.kl_div(logs, target.detach(), reduction="batchmean")


def calibrate_each_client(server, problem):
    """The calibration is of a client's own counts, in all of its batches."""
    import torch

    for client in server.clients:
        counts = problem["y"][problem["parts"][client.id]].bincount(minlength=10)
        client.calibration = torch.where(counts > 0, client.args_tau * counts.clamp(min=1) ** -0.25, 1e4)


def same_projection(server, problem):
    """The projection of features that fedcli draws from its seed."""
    import zlib

    import numpy as np
    import torch

    draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([3, zlib.crc32(b"projection")])))
    first = torch.from_numpy(draw.uniform(-(16**-0.5), 16**-0.5, (16, 16)))
    for client in server.clients:
        client.W_h.weight.data = first.clone()


def run(row: Row, problem: dict[str, Any]) -> dict[str, list]:
    """Runs PFLlib for a row; returns what it ends with."""
    import sys

    system = str(Path(os.environ["CLONE"]) / "system")
    if system not in sys.path:
        sys.path.insert(0, system)
    clientbase = importlib.import_module("flcore.clients.clientbase")
    serverbase = importlib.import_module("flcore.servers.serverbase")
    how = dict(row.how)
    module = how.pop("module")
    name = how.pop("name")
    change = how.pop("change", None)
    drop_last = how.pop("drop_last", False)
    kept = how.pop("kept", None)
    order = how.pop("order", [*range(problem["epochs"])])
    feed = Feed(problem)

    class Loader:
        """A client's batches of the round; every pass is the next epoch."""

        def __init__(self, client):
            self.client = client
            self.passes = 0

        def __len__(self):
            return len([*self.of_epoch(0)])

        def of_epoch(self, epoch):
            for x, y in feed.batches(self.client, epoch):
                if len(y) == problem["batch_size"] or not drop_last:
                    yield x, y

        def __iter__(self):
            epoch = order[self.passes % len(order)]
            self.passes += 1
            return self.of_epoch(epoch)

    def read_client_data(dataset, index, is_train=True, few_shot=0):
        if not is_train:
            return list(zip(problem["x_test"][:64], problem["y_test"][:64], strict=True))
        part = problem["parts"][index]
        return list(zip(problem["x"][part], problem["y"][part], strict=True))

    clientbase.read_client_data = read_client_data
    serverbase.read_client_data = read_client_data
    clientbase.Client.load_train_data = lambda client, batch_size=None: Loader(client.id)
    arguments = arguments_of(problem, how)
    ends: dict[str, list] = {}

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        Path(folder, "system").mkdir()
        os.chdir(Path(folder, "system"))  # it writes models and ../results
        make_server = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
        server = make_server(arguments, 0)
        for client in server.clients:
            client.args_tau = how.get("tau")
        if change:
            change(server, problem)
        rounds = iter(range(arguments.global_rounds + 1))  # it trains one round more than it is told

        def select_clients():
            feed.round = next(rounds)
            if feed.round == arguments.global_rounds:
                ends.update(ends_of(server, name, kept))
            return [server.clients[client] for client in feed.cohort]

        server.select_clients = select_clients
        server.train()
        getattr(server, "restore", lambda: None)()
        os.chdir("/")
    return ends


def arguments_of(problem: dict[str, Any], how: dict[str, Any]) -> SimpleNamespace:
    """The options of its command line for a problem, and the model; those of a row come on top."""
    import torch

    split = importlib.import_module("flcore.trainmodel.models").BaseHeadSplit
    first_cohort, *_ = problem["cohorts"]
    arguments = SimpleNamespace(**{**OPTIONS, **how})
    arguments.local_learning_rate = how.get("local_learning_rate", problem["lr"])
    arguments.batch_size = problem["batch_size"]
    arguments.local_epochs = problem["epochs"]
    arguments.global_rounds = len(problem["cohorts"])
    arguments.num_clients = len(problem["parts"])
    arguments.join_ratio = len(first_cohort) / arguments.num_clients
    arguments.model = network.start(split(network.body(), torch.nn.Linear(16, 10)), problem["weights"])
    return arguments


def ends_of(server: Any, name: str, kept: str | None) -> dict[str, list]:
    """What a server of PFLlib and its clients hold.

    Args:
        server: At the end.
        name: The class of the server.
        kept: The model of a client that stays with it, by its attribute.
    """
    import torch

    ends: dict[str, list] = {"personal": [], "bodies": [], "kept": []}
    for client in server.clients:
        params = parameters_of(client.model)
        ends["personal"] += params
        ends["bodies"] += params[:-2]
        if kept:
            ends["kept"] += parameters_of(operator.attrgetter(kept)(client))
        if name == "APFL":
            ends["kept"] += [*parameters_of(client.model_per), torch.tensor(client.alpha)]
    shared = server.global_model
    if isinstance(shared, torch.nn.Module):
        ends["shared"] = parameters_of(shared)
        ends["head"] = ends["shared"]
    elif isinstance(shared, dict) and hasattr(server, "compressed_param"):
        ends["shared"] = [restored(value) for value in server.compressed_param.values()]
    for field in ("global_protos", "global_logits"):
        if hasattr(server, field):
            ends["prototypes"] = [getattr(server, field)[label] for label in range(10)]
    return ends


def restored(value: Any) -> Any:
    """A tensor of FedKD out of what it has compressed."""
    import numpy as np
    import torch

    if isinstance(value, list):
        left, singular, right = value
        value = np.matmul(left * singular[..., None, :], right)
    return torch.tensor(value)


def method(module: str, name: str, **options: Any) -> dict[str, Any]:
    """The module and class of a server, and its options."""
    return {"module": module, "name": name, **options}


DYN = method("serverdyn", "FedDyn", alpha=0.1)
MOON = method("servermoon", "MOON", mu=1.0, tau=0.5)
FML = method("serverfml", "FML", alpha=0.3, beta=0.6)
DISTILL = method("serverfd", "FD", lamda=1.0)
BOTH = ("shared", "personal")
PROTOTYPES = ("personal", "prototypes")
SQUARED = "the norm in the penalty is squared"
NEWCOMER = "a client that takes part for the first time has the received model as its last one"

DITTO = method("serverditto", "Ditto", mu=0.5, plocal_epochs=2, kept="model_per")
MIXED = method("serverapfl", "APFL", alpha=0.3)
ME = {"lamda": 15.0, "K": 3, "p_learning_rate": 0.05, "local_learning_rate": 0.005, "beta": 0.7}

PEER = Peer(
    name="PFLlib", module="pfllib", commit="d832e76f6a23b833038949ec1e4fdefe63a4d350",
    rows=(
        Row("FedAvg", "fedavg", method("serveravg", "FedAvg")),
        Row("FedAvg, drop_last", "fedavg, drop last", method("serveravg", "FedAvg", drop_last=True)),
        Row("FedAvg, 2 of 4", "fedavg, half", method("serveravg", "FedAvg")),
        Row("FedProx", "fedprox", method("serverprox", "FedProx", mu=0.5)),
        Row("SCAFFOLD, clients of one size", "scaffold, equal", method("serverscaffold", "SCAFFOLD")),
        Row(
            "SCAFFOLD", "scaffold", method("serverscaffold", "SCAFFOLD"),
            cause="Models and control variates are plain means (serverscaffold.py); fedcli weights both by examples.",
            judge="SCAFFOLD, lines 16 and 17: plain, for which fedcli has --weighting uniform (Reading 5).",
            closed_by="SCAFFOLD, plain means here too",
        ),
        Row("SCAFFOLD, plain means here too", "scaffold, uniform", method("serverscaffold", "SCAFFOLD")),
        Row("SCAFFOLD, 2 of 4", "scaffold, half", method("serverscaffold", "SCAFFOLD")),
        Row(
            "SCAFFOLD, server rate 2", "scaffold, equal, server rate 2",
            method("serverscaffold", "SCAFFOLD", server_learning_rate=2.0, local_learning_rate=0.05),
        ),
        Row("MOON, 2 of 4, newcomers", "moon, half", {**MOON, "change": give_newcomers_no_past}, change=NEWCOMER),
        Row(
            "MOON, 2 of 4", "moon, half", MOON,
            cause="A client's last model is the initial one until it has taken part (clientmoon.py).",
            judge="MOON is silent; the authors' code has no term in the first round (Reading 3).",
            closed_by="MOON, 2 of 4, newcomers",
        ),
        Row("MOON, 2 of 4, such a last model here too", "moon, half, initial past", MOON),
        Row("MOON", "moon", MOON),
        Row(
            "FedDyn, clients of one size", "feddyn, equal", DYN,
            cause="The norm in the penalty is not squared (clientdyn.py).",
            judge="FedDyn, Algorithm 1: alpha / 2 times the squared norm.",
            closed_by="FedDyn, clients of one size, squared",
        ),
        Row(
            "FedDyn, clients of one size, squared", "feddyn, equal", {**DYN, "change": square_the_norm}, change=SQUARED,
        ),
        Row(
            "FedDyn, squared, plain alpha here too", "feddyn, uniform", {**DYN, "change": square_the_norm},
            change=SQUARED,
        ),
        Row(
            "FedDyn, squared, alpha by size", "feddyn", {**DYN, "change": square_the_norm_by_size},
            change=f"{SQUARED}, and alpha is divided by a client's size over the mean size",
        ),
        Row("FedDyn, squared, 2 of 4", "feddyn, half", {**DYN, "change": square_the_norm}, change=SQUARED),
        Row("FedProto", "fedproto", method("serverproto", "FedProto", lamda=1.0), PROTOTYPES),
        Row(
            "FedProto, fedcli's default", "fedproto, last epoch", method("serverproto", "FedProto", lamda=1.0),
            PROTOTYPES,
            cause="fedcli takes prototypes of the last epoch by default, as the authors' code (Reading 4).",
            judge="FedProto, Eq. 3: of the client's data, without a word of epochs.", closed_by="FedProto",
        ),
        Row("LG-FedAvg", "lg-fedavg", method("serverlg", "LG_FedAvg"), ("head", "bodies")),
        Row("LG-FedAvg, 2 of 4", "lg-fedavg, half", method("serverlg", "LG_FedAvg"), ("head", "bodies")),
        Row("FML, --form code", "fml, code", FML, BOTH),
        Row(
            "FML", "fml", FML, BOTH,
            cause="KL is a mean over classes too, and both losses have gradients through both models (clientfml.py).",
            judge="FML: KL sums over classes, the other model's output is the target.", closed_by="FML, --form code",
        ),
        Row(
            "FedKD, --form code", "fedkd, code",
            method("serverkd", "FedKD", mentee_learning_rate=0.1, T_start=0.95, T_end=0.98, change=same_projection),
            BOTH, change="its projection of features begins as fedcli's",
        ),
        Row(
            "FedDistill", "feddistill, logits", DISTILL, PROTOTYPES,
            cause="The mean logits themselves are the target of a cross-entropy (clientfd.py).",
            judge="FedDistill: the target is a distribution.", closed_by="FedDistill, softmax of the target",
        ),
        Row(
            "FedDistill, softmax of the target", "feddistill, logits", {**DISTILL, "change": take_softmax}, PROTOTYPES,
            change="the target passes a softmax",
        ),
        Row("FedPer", "fedper", method("serverper", "FedPer", kept="model.head"), ("shared", "kept")),
        Row(
            "FedRep, two epochs of the head", "fedrep",
            method("serverrep", "FedRep", plocal_epochs=2, order=[2, 3, 0, 1], kept="model.head"), ("shared", "kept"),
        ),
        Row("FedBABU, before tuning", "fedbabu", method("serverbabu", "FedBABU", fine_tuning_epochs=0)),
        Row("Ditto", "ditto", DITTO, ("shared", "kept")),
        Row(
            "APFL", "apfl", MIXED, ("shared", "kept"),
            cause="v moves by the gradient of its own loss; a client keeps the mixture in the place of v; alpha moves "
            "after every step (clientapfl.py).",
            judge="APFL, Algorithm 1: v moves by the gradient at the mixture, and is kept; alpha may be fixed.",
            closed_by="APFL, so here too",
        ),
        Row("APFL, so here too", "apfl, mixture kept", MIXED, ("shared", "kept")),
        Row(
            "pFedMe", "pfedme", method("serverpFedMe", "pFedMe", **ME),
            cause="0.001 theta is added to the gradient of the personal model (optimizers/fedoptimizer.py, `mu`).",
            judge="pFedMe, Eq. 7: the loss and lambda (theta - w) alone.",
            closed_by="pFedMe, weight decay 0.001 here too",
        ),
        Row("pFedMe, weight decay 0.001 here too", "pfedme, decay", method("serverpFedMe", "pFedMe", **ME)),
        Row("FedRoD", "fedrod", method("serverrod", "FedROD", kept="head"), ("shared", "kept")),
        Row(
            "FedNTD", "fedntd", method("serverntd", "FedNTD", beta=1.0, tau=1.0),
            cause="The mean of the models is plain for this method (serverntd.py); fedcli weights by examples.",
            judge="FedNTD aggregates as FedAvg: weights n_k / n.", closed_by="FedNTD, plain means here too",
        ),
        Row("FedNTD, plain means here too", "fedntd, uniform", method("serverntd", "FedNTD", beta=1.0, tau=1.0)),
        Row(
            "FedLC, drop_last", "fedlc, drop last", method("serverlc", "FedLC", tau=1.0, drop_last=True),
            cause="The counts behind the margins are those of all clients together (serverlc.py).",
            judge="FedLC: n_c are the examples of the client that trains.", closed_by="FedLC, drop_last, own counts",
        ),
        Row(
            "FedLC, drop_last, own counts", "fedlc, drop last",
            method("serverlc", "FedLC", tau=1.0, drop_last=True, change=calibrate_each_client),
            change="each client is given the margins of its own counts",
        ),
        Row(
            "FedLC, own counts", "fedlc", method("serverlc", "FedLC", tau=1.0, change=calibrate_each_client),
            change="each client is given the margins of its own counts",
        ),
    ),
)  # fmt: skip
