"""FL-bench."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement import equations
from agreement.rows import Difference, Peer, Quantity, Row


@dataclass(frozen=True)
class PeerRun:
    """A run of one of its servers."""

    server: str  # module of src/server, which is the name of its configuration too, and class
    options: Mapping[str, Any] = field(default_factory=dict)  # of that configuration
    local_epoch: int | None = None  # the problem's epochs if None
    weight_decay: float = 0.0
    class_vectors: str = ""  # what the server has of each class, by its attribute
    patch: str = ""  # a function of the adapter, which makes the change


def fedopt(kind: str) -> PeerRun:
    """The server of FedOpt with an optimizer of this kind."""
    options = {"type": kind, "beta1": 0.9, "beta2": 0.99, "server_lr": 0.05, "tau": 0.01}
    return PeerRun("fedopt:FedOptServer", options)


SCAFFOLD = PeerRun("scaffold:SCAFFOLDServer", {"global_lr": 1.0})
FEDDYN = PeerRun("feddyn:FedDynServer", {"alpha": 0.1, "max_grad_norm": 10})
LG_FEDAVG = PeerRun("lgfedavg:LGFedAvgServer", {"num_global_layers": 1})
FEDAVGM = PeerRun("fedavgm:FedAvgMServer", {"server_momentum": 0.9})
MOMENT_FROM_0 = "The second moment starts at 0 (server/fedopt.py, `velocities`)."
MOMENT_FROM_TAU_SQUARED = "the second moment starts at tau^2"

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
    rows=(
        Row("FedAvg", "fedavg", PeerRun("fedavg:FedAvgServer")),
        Row("FedProx", "fedprox", PeerRun("fedprox:FedProxServer", {"mu": 0.5})),
        Row(
            "FedAvgM",
            "fedavgm",
            FEDAVGM,
            difference=Difference(
                cause="The server's momentum is Nesterov's (server/fedavgm.py).",
                decided_by=equations.FEDAVGM_VELOCITY,
                closed_by="FedAvgM, Nesterov here too",
            ),
        ),
        Row("FedAvgM, Nesterov here too", "fedavgm, nesterov", FEDAVGM),
        Row(
            "SCAFFOLD, clients of one size",
            "scaffold, equal",
            SCAFFOLD,
            difference=Difference(
                cause="A client takes local_epoch batches, not epochs (client/scaffold.py), and its new control "
                "variate is not stored (server/scaffold.py).",
                decided_by="SCAFFOLD, lines 9 to 14: K local steps; c_i <- c_i+.",
                closed_by="SCAFFOLD, as many batches, c_i stored",
            ),
        ),
        Row(
            "SCAFFOLD, as many batches, c_i stored",
            "scaffold, equal",
            replace(SCAFFOLD, local_epoch=6, patch="keep_controls"),
            change="local_epoch is the number of steps, and the server stores c_i",
        ),
        Row("MOON", "moon", PeerRun("moon:MOONServer", {"mu": 1.0, "tau": 0.5})),
        Row(
            "FedDyn, clients of one size",
            "feddyn, equal",
            FEDDYN,
            difference=Difference(
                cause="The quadratic term is missing (client/feddyn.py); it stands in neither loss nor weight decay.",
                decided_by=equations.FEDDYN_PENALTY,
                closed_by="FedDyn, clients of one size, weight decay alpha",
            ),
        ),
        Row(
            "FedDyn, clients of one size, weight decay alpha",
            "feddyn, equal",
            replace(FEDDYN, weight_decay=0.1),
            change="the run's weight decay is alpha",
        ),
        Row(
            "FedProto",
            "fedproto",
            PeerRun("fedproto:FedProtoServer", {"lamda": 1.0}, class_vectors="global_prototypes"),
            compared=(Quantity.PERSONAL, Quantity.CLASS_VECTORS),
        ),
        Row(
            "LG-FedAvg",
            "lg-fedavg",
            LG_FEDAVG,
            compared=(Quantity.HEAD, Quantity.BODIES),
            difference=Difference(
                cause="The first layer is shared and the rest kept (client/lgfedavg.py).",
                decided_by="LG-FedAvg: local representations, a global head.",
                closed_by="LG-FedAvg, base kept",
            ),
        ),
        Row(
            "LG-FedAvg, base kept",
            "lg-fedavg",
            replace(LG_FEDAVG, patch="keep_base"),
            compared=(Quantity.HEAD, Quantity.BODIES),
            change="the clients keep the base",
        ),
        Row(
            "FedAdam",
            "fedadam",
            fedopt("adam"),
            difference=Difference(
                cause=MOMENT_FROM_0,
                decided_by=equations.REDDI_SECOND_MOMENT,
                closed_by="FedAdam, v from tau^2",
            ),
        ),
        Row(
            "FedAdam, v from tau^2",
            "fedadam",
            replace(fedopt("adam"), patch="start_at_tau_squared"),
            change=MOMENT_FROM_TAU_SQUARED,
        ),
        Row(
            "FedYogi",
            "fedyogi",
            fedopt("yogi"),
            difference=Difference(
                cause=MOMENT_FROM_0,
                decided_by=equations.REDDI_SECOND_MOMENT,
                closed_by="FedYogi, v from tau^2",
            ),
        ),
        Row(
            "FedYogi, v from tau^2",
            "fedyogi",
            replace(fedopt("yogi"), patch="start_at_tau_squared"),
            change=MOMENT_FROM_TAU_SQUARED,
        ),
        Row(
            "FedAdagrad",
            "fedadagrad",
            fedopt("adagrad"),
            difference=Difference(
                cause=MOMENT_FROM_0,
                decided_by=equations.REDDI_SECOND_MOMENT,
                closed_by="FedAdagrad, v from tau^2",
            ),
        ),
        Row(
            "FedAdagrad, v from tau^2",
            "fedadagrad",
            replace(fedopt("adagrad"), patch="start_at_tau_squared"),
            change=MOMENT_FROM_TAU_SQUARED,
        ),
        Row("FedLC", "fedlc", PeerRun("fedlc:FedLCServer", {"tau": 1.0})),
    ),
)
