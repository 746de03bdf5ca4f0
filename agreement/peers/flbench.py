"""FL-bench."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement import paper_statements
from agreement.rows import Change, Explanation, Peer, Quantity, Row, list_rows


@dataclass(frozen=True)
class PeerConfig:
    """How one of its servers is run."""

    server: str  # module of src/server, which is the name of its configuration too, and class
    options: Mapping[str, Any] = field(default_factory=dict)  # of that configuration
    local_epoch: int | None = None  # the problem's epochs if None
    weight_decay: float = 0.0
    class_vectors: str = ""  # what the server has of each class, by its attribute


def fedopt(kind: str) -> PeerConfig:
    """The server of FedOpt with an optimizer of this kind."""
    options = {"type": kind, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.05, "tau": 0.01}
    return PeerConfig("fedopt:FedOptServer", options=options)


SCAFFOLD = PeerConfig("scaffold:SCAFFOLDServer", options={"global_lr": 1.0})
FEDDYN = PeerConfig("feddyn:FedDynServer", options={"alpha": 0.1, "max_grad_norm": 10})
LG_FEDAVG = PeerConfig("lgfedavg:LGFedAvgServer", options={"num_global_layers": 1})
FEDAVGM = PeerConfig("fedavgm:FedAvgMServer", options={"server_momentum": 0.9})
FEDADAM = fedopt("adam")
FEDYOGI = fedopt("yogi")
FEDADAGRAD = fedopt("adagrad")
MOMENT_FROM_0 = "The second moment starts at 0 (server/fedopt.py, `velocities`)."
MOMENT_FROM_TAU_SQUARED = Change("the second moment starts at tau^2", patch="start_at_tau_squared")

PEER = Peer(
    name="FL-bench",
    module="flbench",
    commit="06e658bca5af6ce732e25bb7c0f8be321e14a85e",
    absent_modules={
        "ray": {},
        "ray.actor": {"ActorHandle": object},
        "pynvml": {},
        "faker": {},
        "data": {},
        "data.utils": {},
        "data.utils.datasets": {"DATASETS": {}, "BaseDataset": object},
    },
    rows=list_rows(
        Row(label="FedAvg", case="fedavg", config=PeerConfig("fedavg:FedAvgServer")),
        Row(label="FedProx", case="fedprox", config=PeerConfig("fedprox:FedProxServer", options={"mu": 0.5})),
        Row(
            label="FedAvgM",
            case="fedavgm",
            config=FEDAVGM,
            explanation=Explanation(
                cause="The server's momentum is Nesterov's (server/fedavgm.py).",
                paper_says=paper_statements.FEDAVGM_VELOCITY,
                closed_by=Row(label="FedAvgM; fedcli: Nesterov", case="fedavgm, nesterov", config=FEDAVGM),
            ),
        ),
        Row(
            label="SCAFFOLD, clients of one size",
            case="scaffold, equal",
            config=SCAFFOLD,
            explanation=Explanation(
                cause="A client takes local_epoch batches, not epochs (client/scaffold.py), and its new control "
                "variate is not stored (server/scaffold.py).",
                paper_says="SCAFFOLD, lines 9 to 14: K local steps; c_i <- c_i+.",
                closed_by=Row(
                    label="SCAFFOLD, clients of one size; changed: number of batches, c_i stored",
                    case="scaffold, equal",
                    config=replace(SCAFFOLD, local_epoch=6),
                    change=Change(
                        "local_epoch is the number of steps, and the server stores c_i", patch="keep_controls"
                    ),
                ),
            ),
        ),
        Row(label="MOON", case="moon", config=PeerConfig("moon:MOONServer", options={"mu": 1.0, "tau": 0.5})),
        Row(
            label="FedDyn, clients of one size",
            case="feddyn, equal",
            config=FEDDYN,
            explanation=Explanation(
                cause="The quadratic term is missing (client/feddyn.py); it stands in neither loss nor weight decay.",
                paper_says="FedDyn, Algorithm 1: alpha / 2 ||w - w_g||^2.",
                closed_by=Row(
                    label="FedDyn, clients of one size; changed: weight decay alpha",
                    case="feddyn, equal",
                    config=replace(FEDDYN, weight_decay=0.1),
                    change=Change("the run's weight decay is alpha"),
                ),
            ),
        ),
        Row(
            label="FedProto",
            case="fedproto",
            config=PeerConfig("fedproto:FedProtoServer", options={"lamda": 1.0}, class_vectors="global_prototypes"),
            compared=(Quantity.PERSONAL, Quantity.CLASS_VECTORS),
        ),
        Row(
            label="LG-FedAvg",
            case="lg-fedavg",
            config=LG_FEDAVG,
            compared=(Quantity.HEAD, Quantity.BODIES),
            explanation=Explanation(
                cause="The first layer is shared and the rest kept (client/lgfedavg.py).",
                paper_says="LG-FedAvg: local representations, a global head.",
                closed_by=Row(
                    label="LG-FedAvg; changed: base kept",
                    case="lg-fedavg",
                    config=LG_FEDAVG,
                    compared=(Quantity.HEAD, Quantity.BODIES),
                    change=Change("the clients keep the base", patch="keep_base"),
                ),
            ),
        ),
        Row(
            label="FedAdam",
            case="fedadam",
            config=FEDADAM,
            explanation=Explanation(
                cause=MOMENT_FROM_0,
                paper_says=paper_statements.REDDI_SECOND_MOMENT,
                closed_by=Row(
                    label="FedAdam; changed: v from tau^2",
                    case="fedadam",
                    config=FEDADAM,
                    change=MOMENT_FROM_TAU_SQUARED,
                ),
            ),
        ),
        Row(
            label="FedYogi",
            case="fedyogi",
            config=FEDYOGI,
            explanation=Explanation(
                cause=MOMENT_FROM_0,
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
            case="fedadagrad",
            config=FEDADAGRAD,
            explanation=Explanation(
                cause=MOMENT_FROM_0,
                paper_says=paper_statements.REDDI_SECOND_MOMENT,
                closed_by=Row(
                    label="FedAdagrad; changed: v from tau^2",
                    case="fedadagrad",
                    config=FEDADAGRAD,
                    change=MOMENT_FROM_TAU_SQUARED,
                ),
            ),
        ),
        Row(label="FedLC", case="fedlc", config=PeerConfig("fedlc:FedLCServer", options={"tau": 1.0})),
    ),
)
