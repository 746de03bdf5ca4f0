"""FL-bench: its client, trainer and server classes. The constructor of its server, which reads files, is replaced."""

import importlib
import sys
from collections import OrderedDict
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from agreement import network
from agreement.peers import Feed
from agreement.rows import Peer, Row

# What it imports and does not need here.
ABSENT = ("ray", "ray.actor", "pynvml", "data", "data.utils", "data.utils.datasets", "faker")


def keep_controls(server):
    """SCAFFOLD's server keeps what a client's control variate has become."""
    original = server.aggregate_client_updates

    def aggregate(packages):
        original(packages)
        for client, package in packages.items():
            server.c_local[client] = [c + d for c, d in zip(server.c_local[client], package["c_delta"], strict=True)]

    server.aggregate_client_updates = aggregate


def keep_base(server):
    """LG-FedAvg's clients keep the base and share the classifier."""
    own = [name for name in server.public_model_param_names if name.startswith("base")]
    server.trainer.worker.personal_params_name = own


def start_at_tau_squared(server):
    """The second moments start at tau^2."""
    optimizer = server.adaptive_optimizer
    for square in optimizer.velocities:
        square.data.fill_(optimizer.tau**2)


def load(problem: dict[str, Any], feed: Feed) -> ModuleType:
    """Its module of FedAvg's server, whose constructor is given the problem."""
    import torch

    for name in ABSENT:
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["ray"].actor = sys.modules["ray.actor"]
    sys.modules["ray.actor"].ActorHandle = object
    datasets = sys.modules["data.utils.datasets"]
    datasets.DATASETS = {}
    datasets.BaseDataset = object
    server_module = importlib.import_module("src.server.fedavg")
    constants = importlib.import_module("src.utils.constants")
    models = importlib.import_module("src.utils.models")
    trainers = importlib.import_module("src.utils.trainer")
    constants.NUM_CLASSES["digits"] = 10

    class Small(models.DecoupledModel):
        def __init__(self):
            super().__init__()
            self.base = network.body()
            self.classifier = torch.nn.Linear(16, 10)
            network.start(self, problem["weights"])

    class Data:
        """What its trainer asks of a data set."""

        classes = range(10)
        targets = problem["y"]

        def train(self): ...

        def eval(self): ...

        def __len__(self):
            return 1000

    class Loader:
        """A client's batches of the round; every pass in one call of the client is the next epoch."""

        def __init__(self, server):
            self.server = server
            self.call = None
            self.passes = 0

        def __iter__(self):
            number = self.server.current_epoch
            client = self.server.trainer.worker.client_id
            self.passes = self.passes + 1 if self.call == (number, client) else 0
            self.call = number, client
            feed.round = number
            return feed.batches(client, self.passes)

    def constructor(self, args, init_trainer=True, init_model=True):
        clients = range(len(problem["parts"]))
        self.args = args
        self.client_num = len(clients)
        self.train_clients = [*clients]
        self.device = torch.device("cpu")
        self.model = Small()
        self.model.check_and_preprocess(args)
        self.public_model_params = OrderedDict((name, p.data.clone()) for name, p in self.model.named_parameters())
        self.public_model_param_names = list(self.public_model_params)
        self.clients_personal_model_params = {client: {} for client in clients}
        self.client_optimizer_states = {client: {} for client in clients}
        self.client_lr_scheduler_states = {client: {} for client in clients}
        self.client_local_epoches = [args.common.local_epoch] * len(clients)
        self.client_metrics = {client: {} for client in clients}
        self.current_epoch = 0
        self.testing = False
        self.verbose = False
        self.selected_clients = [*clients]
        optimizer = partial(torch.optim.SGD, lr=args.optimizer.lr, weight_decay=args.optimizer.weight_decay)
        indices = [{"train": part, "val": [], "test": []} for part in problem["parts"]]
        given = {
            "model": Small(),
            "optimizer_cls": optimizer,
            "lr_scheduler_cls": None,
            "args": args,
            "dataset": Data(),
            "data_indices": indices,
            "device": self.device,
            "return_diff": self.return_diff,
        }
        self.trainer = trainers.FLbenchTrainer(self, self.client_cls, constants.MODE.SERIAL, 0, given)
        self.trainer.worker.trainloader = Loader(self)

    server_module.FedAvgServer.__init__ = constructor
    return server_module


def run(row: Row, problem: dict[str, Any]) -> dict[str, list]:
    """Runs FL-bench for a row; returns what it ends with."""
    load(problem, Feed(problem))
    how = dict(row.how)
    module = how.pop("module")
    name = how.pop("name")
    change = how.pop("change", None)
    local_epoch = how.pop("epochs", problem["epochs"])
    weight_decay = how.pop("weight_decay", 0.0)
    common = SimpleNamespace(
        use_cuda=False,
        buffers="local",
        batch_size=problem["batch_size"],
        client_side_evaluation=False,
        local_epoch=local_epoch,
        reset_optimizer_on_global_epoch=True,
        test=SimpleNamespace(client=SimpleNamespace(train=True, val=True, test=True)),
    )
    arguments = SimpleNamespace(
        common=common,
        dataset=SimpleNamespace(name="digits"),
        optimizer=SimpleNamespace(lr=problem["lr"], weight_decay=weight_decay),
        **{module: SimpleNamespace(**how)},
    )
    make_server = getattr(importlib.import_module(f"src.server.{module}"), name)
    server = make_server(arguments)
    if change:
        change(server)
    for number in range(len(problem["cohorts"])):
        server.current_epoch = number
        server.train_one_round()
    return ends_of(server)


def ends_of(server: Any) -> dict[str, list]:
    """What a server of FL-bench holds after the last round."""
    names = server.public_model_param_names
    shared = server.public_model_params
    personal = []
    bodies = []
    for kept in server.clients_personal_model_params.values():
        params = [kept.get(name, shared[name]) for name in names]
        personal += params
        bodies += params[:-2]
    ends = {
        "shared": [*shared.values()],
        "head": [shared[name] for name in names[-2:]],
        "personal": personal,
        "bodies": bodies,
    }
    if hasattr(server, "global_prototypes"):
        ends["prototypes"] = [server.global_prototypes[label] for label in range(10)]
    return ends


def method(module: str, name: str, **options: Any) -> dict[str, Any]:
    """The module and class of a server, and its options."""
    return {"module": module, "name": name, **options}


def adaptive(kind: str, **options: Any) -> dict[str, Any]:
    """A server of FedOpt."""
    return method("fedopt", "FedOptServer", type=kind, beta1=0.9, beta2=0.99, server_lr=0.05, tau=0.01, **options)


SCAFFOLD = method("scaffold", "SCAFFOLDServer", global_lr=1.0)
DYN = method("feddyn", "FedDynServer", alpha=0.1, max_grad_norm=10)
NESTEROV = method("fedavgm", "FedAvgMServer", server_momentum=0.9)
SQUARE = {
    "cause": "The second moment starts at 0 (server/fedopt.py, `velocities`).",
    "judge": "Algorithm 2 of Reddi et al.: v_{-1} >= tau^2 (Reading 2).",
}
STARTED = "the second moment starts at tau^2"

PEER = Peer(
    name="FL-bench", module="flbench", commit="06e658bca5af6ce732e25bb7c0f8be321e14a85e",
    rows=(
        Row("FedAvg", "fedavg", method("fedavg", "FedAvgServer")),
        Row("FedProx", "fedprox", method("fedprox", "FedProxServer", mu=0.5)),
        Row(
            "FedAvgM", "fedavgm", NESTEROV, cause="The server's momentum is Nesterov's (server/fedavgm.py).",
            judge="FedAvgM: w <- w - v with v <- beta v + Delta.", closed_by="FedAvgM, Nesterov here too",
        ),
        Row("FedAvgM, Nesterov here too", "fedavgm, nesterov", NESTEROV),
        Row(
            "SCAFFOLD, clients of one size", "scaffold, equal", SCAFFOLD,
            cause="A client takes local_epoch batches, not epochs (client/scaffold.py), and its new control variate is "
            "not stored (server/scaffold.py).",
            judge="SCAFFOLD, lines 9 to 14: K local steps; c_i <- c_i+.",
            closed_by="SCAFFOLD, as many batches, c_i stored",
        ),
        Row(
            "SCAFFOLD, as many batches, c_i stored", "scaffold, equal",
            {**SCAFFOLD, "epochs": 6, "change": keep_controls},
            change="local_epoch is the number of steps, and the server stores c_i",
        ),
        Row("MOON", "moon", method("moon", "MOONServer", mu=1.0, tau=0.5)),
        Row(
            "FedDyn, clients of one size", "feddyn, equal", DYN,
            cause="The quadratic term is missing (client/feddyn.py); it stands in neither loss nor weight decay.",
            judge="FedDyn, Algorithm 1: alpha / 2 ||w - w_g||^2.",
            closed_by="FedDyn, clients of one size, weight decay alpha",
        ),
        Row(
            "FedDyn, clients of one size, weight decay alpha", "feddyn, equal", {**DYN, "weight_decay": 0.1},
            change="the run's weight decay is alpha",
        ),
        Row(
            "FedProto", "fedproto", method("fedproto", "FedProtoServer", lamda=1.0), ("personal", "prototypes"),
        ),
        Row(
            "LG-FedAvg", "lg-fedavg", method("lgfedavg", "LGFedAvgServer", num_global_layers=1), ("head", "bodies"),
            cause="The first layer is shared and the rest kept (client/lgfedavg.py).",
            judge="LG-FedAvg: local representations, a global head.", closed_by="LG-FedAvg, base kept",
        ),
        Row(
            "LG-FedAvg, base kept", "lg-fedavg",
            method("lgfedavg", "LGFedAvgServer", num_global_layers=1, change=keep_base), ("head", "bodies"),
            change="the clients keep the base",
        ),
        Row("FedAdam", "fedadam", adaptive("adam"), **SQUARE, closed_by="FedAdam, v from tau^2"),
        Row(
            "FedAdam, v from tau^2", "fedadam", adaptive("adam", change=start_at_tau_squared), change=STARTED,
        ),
        Row("FedYogi", "fedyogi", adaptive("yogi"), **SQUARE, closed_by="FedYogi, v from tau^2"),
        Row(
            "FedYogi, v from tau^2", "fedyogi", adaptive("yogi", change=start_at_tau_squared), change=STARTED,
        ),
        Row("FedAdagrad", "fedadagrad", adaptive("adagrad"), **SQUARE, closed_by="FedAdagrad, v from tau^2"),
        Row(
            "FedAdagrad, v from tau^2", "fedadagrad", adaptive("adagrad", change=start_at_tau_squared), change=STARTED,
        ),
        Row("FedLC", "fedlc", method("fedlc", "FedLCServer", tau=1.0)),
    ),
)  # fmt: skip
