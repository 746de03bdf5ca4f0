"""Flower."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agreement import paper_statements
from agreement.rows import Change, Explanation, Package, Peer, Row, list_rows


@dataclass(frozen=True)
class PeerConfig:
    """How a server is run with a strategy, or that of the baseline niid_bench for SCAFFOLD and FedNova."""

    # Of client and server: "fedavg", "fednova", "fedprox" and "scaffold" of niid_bench, or "fedprox-baseline".
    kind: str = "fedavg"
    strategy: str = "flwr.server.strategy:FedAvg"  # module and class
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy
    proximal_mu: float = 0.0


def instantiate(configuration: Any) -> None:
    """Stands for Hydra's function of this name, by which the baselines make their networks, and makes none.

    Each server is given its first parameters by the adapter.
    """


FEDAVGM_OPTIONS = {"server_momentum": 0.9, "server_learning_rate": 1.0}
FLWR_FEDAVGM = PeerConfig(strategy="flwr.server.strategy:FedAvgM", options=FEDAVGM_OPTIONS)
BASELINE_FEDAVGM = PeerConfig(strategy="fedavgm.strategy:CustomFedAvgM", options=FEDAVGM_OPTIONS)
FEDOPT_OPTIONS = {"eta": 0.05, "tau": 0.01}
FEDOPT_OPTIONS_WITH_BETAS = {**FEDOPT_OPTIONS, "beta_1": 0.9, "beta_2": 0.99}
FEDADAM = PeerConfig(strategy="flwr.server.strategy:FedAdam", options=FEDOPT_OPTIONS_WITH_BETAS)
FEDYOGI = PeerConfig(strategy="flwr.server.strategy:FedYogi", options=FEDOPT_OPTIONS_WITH_BETAS)
FEDADAGRAD = PeerConfig(strategy="flwr.server.strategy:FedAdagrad", options=FEDOPT_OPTIONS)
FEDNOVA = PeerConfig(kind="fednova")
SCAFFOLD = PeerConfig(kind="scaffold")
MOMENT_FROM_TAU_SQUARED = Change("the second moment starts at tau^2", patch="start_at_tau_squared")

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
    rows=list_rows(
        Row(label="FedAvg", case="fedavg", config=PeerConfig()),
        Row(label="FedAvgM", case="fedavgm", config=FLWR_FEDAVGM),
        Row(label="FedAvgM, 2 of 4 clients", case="fedavgm, half", config=FLWR_FEDAVGM),
        Row(
            label="FedAvgM, baseline fedavgm",
            case="fedavgm",
            config=BASELINE_FEDAVGM,
            explanation=Explanation(
                cause="The server's momentum is Nesterov's (strategy.py).",
                paper_says=paper_statements.FEDAVGM_VELOCITY,
                closed_by=Row(
                    label="FedAvgM, baseline fedavgm; fedcli: Nesterov",
                    case="fedavgm, nesterov",
                    config=BASELINE_FEDAVGM,
                ),
            ),
        ),
        Row(label="FedProx, baseline niid_bench", case="fedprox", config=PeerConfig(kind="fedprox", proximal_mu=0.5)),
        Row(
            label="FedProx, baseline fedprox; fedcli: weight decay 0.001",
            case="fedprox, decay",
            config=PeerConfig(kind="fedprox-baseline", proximal_mu=0.5),
        ),
        Row(label="FedNova, baseline niid_bench", case="fednova", config=FEDNOVA),
        Row(
            label="FedNova with momentum, baseline niid_bench",
            case="fednova, momentum",
            config=FEDNOVA,
        ),
        Row(label="SCAFFOLD, baseline niid_bench", case="scaffold", config=SCAFFOLD),
        Row(
            label="SCAFFOLD, baseline niid_bench, 2 of 4 clients",
            case="scaffold, half",
            config=SCAFFOLD,
            explanation=Explanation(
                cause="The control variates begin as the weights of the network (server_scaffold.py).",
                paper_says=paper_statements.SCAFFOLD_FIRST_CONTROLS,
                closed_by=Row(
                    label="SCAFFOLD, baseline niid_bench, 2 of 4 clients; changed: c from 0",
                    case="scaffold, half",
                    config=SCAFFOLD,
                    change=Change("the control variates begin at 0", patch="start_controls_at_zero"),
                ),
            ),
        ),
        Row(
            label="FedAdam",
            case="fedadam",
            config=FEDADAM,
            explanation=Explanation(
                cause="The second moment starts at 0, and the bias is corrected by the number of the round plus 1 "
                "(fedadam.py).",
                paper_says="Algorithm 2 of Reddi et al.: v_{-1} >= tau^2, and no correction (Readings 2 and 3).",
                closed_by=Row(
                    label="FedAdam; changed: v from tau^2, no correction",
                    case="fedadam",
                    config=FEDADAM,
                    change=Change(
                        "the second moment starts at tau^2, and the correction is undone",
                        patch="start_at_tau_squared_uncorrected",
                    ),
                ),
            ),
        ),
        Row(
            label="FedYogi",
            case="fedyogi",
            config=FEDYOGI,
            explanation=Explanation(
                cause="The second moment starts at 0 (fedyogi.py).",
                paper_says=paper_statements.REDDI_SECOND_MOMENT,
                closed_by=Row(
                    label="FedYogi; changed: v from tau^2",
                    case="fedyogi",
                    config=FEDYOGI,
                    change=MOMENT_FROM_TAU_SQUARED,
                ),
            ),
        ),
        Row(
            label="FedAdagrad",
            case="fedadagrad, without momentum",
            config=FEDADAGRAD,
            explanation=Explanation(
                cause="The second moment starts at 0 (fedadagrad.py).",
                paper_says=paper_statements.REDDI_SECOND_MOMENT,
                closed_by=Row(
                    label="FedAdagrad; changed: v from tau^2",
                    case="fedadagrad, without momentum",
                    config=FEDADAGRAD,
                    change=MOMENT_FROM_TAU_SQUARED,
                ),
            ),
        ),
    ),
)
