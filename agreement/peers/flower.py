"""Flower."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement import equations
from agreement.rows import Difference, Package, Peer, Row


@dataclass(frozen=True)
class PeerRun:
    """A run of a server with a strategy, or of that of the baseline niid_bench for SCAFFOLD and FedNova."""

    client: str = "fedavg"  # of the baseline niid_bench: or "fedprox", "fednova", "scaffold"; or "fedprox-baseline"
    strategy: str = "flwr.server.strategy:FedAvg"  # module and class
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy
    proximal_mu: float = 0.0
    patch: str = ""  # a function of the adapter, which makes the change


def instantiate(configuration: Any) -> None:
    """Stands for Hydra's function of this name, by which the baselines make their networks, and makes none.

    Each server is given its first parameters by the adapter.
    """


FEDAVGM_OPTIONS = {"server_momentum": 0.9, "server_learning_rate": 1.0}
FLWR_FEDAVGM = PeerRun(strategy="flwr.server.strategy:FedAvgM", options=FEDAVGM_OPTIONS)
BASELINE_FEDAVGM = PeerRun(strategy="fedavgm.strategy:CustomFedAvgM", options=FEDAVGM_OPTIONS)
FEDOPT_OPTIONS = {"eta": 0.05, "tau": 0.01}
FEDOPT_OPTIONS_WITH_BETAS = {**FEDOPT_OPTIONS, "beta_1": 0.9, "beta_2": 0.99}
FEDADAM = PeerRun(strategy="flwr.server.strategy:FedAdam", options=FEDOPT_OPTIONS_WITH_BETAS)
FEDYOGI = PeerRun(strategy="flwr.server.strategy:FedYogi", options=FEDOPT_OPTIONS_WITH_BETAS)
FEDADAGRAD = PeerRun(strategy="flwr.server.strategy:FedAdagrad", options=FEDOPT_OPTIONS)
SCAFFOLD = PeerRun(client="scaffold")

PEER = Peer(
    name="Flower",
    module="flower",
    commit="fdef7afb1dca3030553be302366cfd285ed6632c",
    package=Package("flwr", "1.42.0"),
    source_folders=("baselines/niid_bench", "baselines/fedavgm", "baselines/fedprox"),
    absent_modules={
        "hydra": {},
        "hydra.utils": {"instantiate": instantiate},
        "omegaconf": {"DictConfig": dict},
        "easydict": {"EasyDict": dict},
    },
    rows=(
        Row("FedAvg", "fedavg", PeerRun()),
        Row("FedAvgM", "fedavgm", FLWR_FEDAVGM),
        Row("FedAvgM, 2 of 4", "fedavgm, half", FLWR_FEDAVGM),
        Row(
            "baseline FedAvgM",
            "fedavgm",
            BASELINE_FEDAVGM,
            difference=Difference(
                cause="The server's momentum is Nesterov's (strategy.py).",
                decided_by=equations.FEDAVGM_VELOCITY,
                closed_by="baseline FedAvgM, Nesterov here too",
            ),
        ),
        Row("baseline FedAvgM, Nesterov here too", "fedavgm, nesterov", BASELINE_FEDAVGM),
        Row("niid_bench FedProx", "fedprox", PeerRun(client="fedprox", proximal_mu=0.5)),
        Row(
            "baseline FedProx, its weight decay", "fedprox, decay", PeerRun(client="fedprox-baseline", proximal_mu=0.5)
        ),
        Row("niid_bench FedNova", "fednova", PeerRun(client="fednova")),
        Row("niid_bench FedNova with momentum", "fednova, momentum", PeerRun(client="fednova")),
        Row("niid_bench SCAFFOLD", "scaffold", SCAFFOLD),
        Row(
            "niid_bench SCAFFOLD, 2 of 4",
            "scaffold, half",
            SCAFFOLD,
            difference=Difference(
                cause="The control variates begin as the weights of the network (server_scaffold.py).",
                decided_by=equations.SCAFFOLD_FIRST_CONTROLS,
                closed_by="niid_bench SCAFFOLD, 2 of 4, c from 0",
            ),
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
            difference=Difference(
                cause="The second moment starts at 0, and the bias is corrected by the number of the round plus 1 "
                "(fedadam.py).",
                decided_by=equations.REDDI_SECOND_MOMENT_UNCORRECTED,
                closed_by="FedAdam, v from tau^2, no correction",
            ),
        ),
        Row(
            "FedAdam, v from tau^2, no correction",
            "fedadam",
            replace(FEDADAM, patch="start_at_tau_squared_uncorrected"),
            change="the second moment starts at tau^2, and the correction is undone",
        ),
        Row(
            "FedYogi",
            "fedyogi",
            FEDYOGI,
            difference=Difference(
                cause="The second moment starts at 0 (fedyogi.py).",
                decided_by=equations.REDDI_SECOND_MOMENT_UNCORRECTED,
                closed_by="FedYogi, v from tau^2",
            ),
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
            difference=Difference(
                cause="The second moment starts at 0 (fedadagrad.py).",
                decided_by=equations.REDDI_SECOND_MOMENT_UNCORRECTED,
                closed_by="FedAdagrad, v from tau^2",
            ),
        ),
        Row(
            "FedAdagrad, v from tau^2",
            "fedadagrad, without momentum",
            replace(FEDADAGRAD, patch="start_at_tau_squared"),
            change="the second moment starts at tau^2",
        ),
    ),
)
