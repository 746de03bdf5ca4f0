"""Flower."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement.rows import Peer, Row


@dataclass(frozen=True)
class Setup:
    """A run of a server with a strategy, or of that of the baseline niid_bench for SCAFFOLD and FedNova."""

    client: str = "fedavg"  # of the baseline niid_bench: or "fedprox", "fednova", "scaffold"; or "fedprox-baseline"
    strategy: str = "flwr.server.strategy:FedAvg"  # module and class
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy
    lr: float | None = None  # the problem's if None
    momentum: float = 0.0  # of a client
    proximal_mu: float = 0.0
    patch: str = ""  # a function of the adapter, which makes the change


def build_nothing(configuration: Any) -> None:
    """Stands for what builds an experiment's network: the adapter gives each server its first parameters."""


OPTIONS_OF_FEDAVGM = {"server_momentum": 0.9, "server_learning_rate": 1.0}
FLWR_FEDAVGM = Setup(strategy="flwr.server.strategy:FedAvgM", options=OPTIONS_OF_FEDAVGM)
BASELINE_FEDAVGM = Setup(strategy="fedavgm.strategy:CustomFedAvgM", options=OPTIONS_OF_FEDAVGM)
OPTIONS_OF_FEDADAGRAD = {"eta": 0.05, "tau": 0.01}
FEDADAM = Setup(
    strategy="flwr.server.strategy:FedAdam", options={**OPTIONS_OF_FEDADAGRAD, "beta_1": 0.9, "beta_2": 0.99}
)
FEDYOGI = Setup(
    strategy="flwr.server.strategy:FedYogi", options={**OPTIONS_OF_FEDADAGRAD, "beta_1": 0.9, "beta_2": 0.99}
)
FEDADAGRAD = Setup(strategy="flwr.server.strategy:FedAdagrad", options=OPTIONS_OF_FEDADAGRAD)
SCAFFOLD = Setup(client="scaffold")
REDDI_ALGORITHM_2 = "Algorithm 2 of Reddi et al.: v_{-1} >= tau^2, and no correction (Readings 2 and 3)."

PEER = Peer(
    name="Flower",
    module="flower",
    commit="fdef7afb1dca3030553be302366cfd285ed6632c",
    package="flwr 1.42.0",
    source_folders=("baselines/niid_bench", "baselines/fedavgm", "baselines/fedprox"),
    absent_modules={
        "hydra": {},
        "hydra.utils": {"instantiate": build_nothing},
        "omegaconf": {"DictConfig": dict},
        "easydict": {"EasyDict": dict},
    },
    rows=(
        Row("FedAvg", "fedavg", Setup()),
        Row("FedAvgM", "fedavgm", FLWR_FEDAVGM),
        Row("FedAvgM, 2 of 4", "fedavgm, half", FLWR_FEDAVGM),
        Row(
            "baseline FedAvgM",
            "fedavgm",
            BASELINE_FEDAVGM,
            cause="The server's momentum is Nesterov's (strategy.py).",
            decided_by="FedAvgM: w <- w - v with v <- beta v + Delta.",
            closed_by="baseline FedAvgM, Nesterov here too",
        ),
        Row("baseline FedAvgM, Nesterov here too", "fedavgm, nesterov", BASELINE_FEDAVGM),
        Row("niid_bench FedProx", "fedprox", Setup(client="fedprox", proximal_mu=0.5)),
        Row("baseline FedProx, its weight decay", "fedprox, decay", Setup(client="fedprox-baseline", proximal_mu=0.5)),
        Row("niid_bench FedNova", "fednova", Setup(client="fednova")),
        Row("niid_bench FedNova with momentum", "fednova, momentum", Setup(client="fednova", lr=0.03, momentum=0.9)),
        Row("niid_bench SCAFFOLD", "scaffold", SCAFFOLD),
        Row(
            "niid_bench SCAFFOLD, 2 of 4",
            "scaffold, half",
            SCAFFOLD,
            cause="The control variates begin as the weights of the network (server_scaffold.py).",
            decided_by="SCAFFOLD, Section 4: they begin at 0, or as gradients at the first model.",
            closed_by="niid_bench SCAFFOLD, 2 of 4, c from 0",
        ),
        Row(
            "niid_bench SCAFFOLD, 2 of 4, c from 0",
            "scaffold, half",
            replace(SCAFFOLD, patch="start_controls_at_zero"),
            change="the control variates begin at 0",
        ),
        Row(
            "FedAdam",
            "fedadam",
            FEDADAM,
            cause="The second moment starts at 0, and the bias is corrected by the number of the round plus 1 "
            "(fedadam.py).",
            decided_by=REDDI_ALGORITHM_2,
            closed_by="FedAdam, v from tau^2, no correction",
        ),
        Row(
            "FedAdam, v from tau^2, no correction",
            "fedadam",
            replace(FEDADAM, patch="start_at_tau_squared"),
            change="the second moment starts at tau^2, and the correction is undone",
        ),
        Row(
            "FedYogi",
            "fedyogi",
            FEDYOGI,
            cause="The second moment starts at 0 (fedyogi.py).",
            decided_by=REDDI_ALGORITHM_2,
            closed_by="FedYogi, v from tau^2",
        ),
        Row(
            "FedYogi, v from tau^2",
            "fedyogi",
            replace(FEDYOGI, patch="start_at_tau_squared"),
            change="the second moment starts at tau^2",
        ),
        Row(
            "FedAdagrad",
            "fedadagrad, without momentum",
            FEDADAGRAD,
            cause="The second moment starts at 0 (fedadagrad.py).",
            decided_by=REDDI_ALGORITHM_2,
            closed_by="FedAdagrad, v from tau^2",
        ),
        Row(
            "FedAdagrad, v from tau^2",
            "fedadagrad, without momentum",
            replace(FEDADAGRAD, patch="start_at_tau_squared"),
            change="the second moment starts at tau^2",
        ),
    ),
)
