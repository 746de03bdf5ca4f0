"""FL-Simulator."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement import equations
from agreement.rows import Difference, Peer, Row


@dataclass(frozen=True)
class PeerRun:
    """A run of one of its servers."""

    method: str  # the name of its server
    options: Mapping[str, Any] = field(default_factory=dict)  # of its command line
    patch: str = ""  # a function of the adapter, which makes the change


PLAIN_MEAN_OF_MODELS = "The mean of the models is plain (server.py); fedcli weights by examples."
FEDSAM = PeerRun("FedSAM", {"rho": 0.1})
MOFEDSAM = PeerRun("MoFedSAM", {"rho": 0.1, "alpha": 0.3})
ADDED_TO_THE_NORM = "1e-7 is added to the norm of the gradient (optimizer/ESAM.py)."
FEDAVG = PeerRun("FedAvg")
SCAFFOLD = PeerRun("SCAFFOLD")
FEDDYN = PeerRun("FedDyn", {"lamb": 0.1})

PEER = Peer(
    name="FL-Simulator",
    module="fl_simulator",
    commit="502bec65570165d1ff1a6ce76375297145c734e3",
    rows=(
        Row(
            "FedAvg",
            "fedavg",
            FEDAVG,
            difference=Difference(
                cause=PLAIN_MEAN_OF_MODELS,
                decided_by=equations.FEDAVG_WEIGHTS,
                closed_by="FedAvg, plain means here too",
            ),
        ),
        Row("FedAvg, plain means here too", "fedavg, uniform", FEDAVG),
        Row("FedProx, plain means here too", "fedprox, uniform", PeerRun("FedProx", {"lamb": 0.5})),
        Row("SCAFFOLD, clients of one size", "scaffold, equal, clipped", SCAFFOLD),
        Row("SCAFFOLD, 2 of 4", "scaffold, half", SCAFFOLD),
        Row(
            "SCAFFOLD, plain means here too",
            "scaffold, uniform",
            SCAFFOLD,
            difference=Difference(
                cause="K is the first client's for all, and no whole number for a batch that is not full "
                "(server/SCAFFOLD.py).",
                decided_by="SCAFFOLD, line 12: K of the client.",
                closed_by="SCAFFOLD, plain means here too, own K",
            ),
        ),
        Row(
            "SCAFFOLD, plain means here too, own K",
            "scaffold, uniform",
            PeerRun("SCAFFOLD", patch="count_own_steps"),
            change="K is the client's number of steps",
        ),
        Row("FedDyn, clients of one size", "feddyn, equal, clipped", FEDDYN),
        Row(
            "FedDyn",
            "feddyn",
            FEDDYN,
            difference=Difference(
                cause="All clients have one alpha; fedcli's is divided by a client's size, as in the authors' code.",
                decided_by="FedDyn, Algorithm 1: one alpha, for which fedcli has --weighting uniform (Reading 2).",
                closed_by="FedDyn, one alpha here too",
            ),
        ),
        Row("FedDyn, one alpha here too", "feddyn, uniform", FEDDYN),
        Row("FedDyn, 2 of 4", "feddyn, half", FEDDYN),
        Row("FedCM, clients of one size", "fedcm, equal", PeerRun("FedCM", {"alpha": 0.3})),
        Row(
            "FedSAM, plain means here too",
            "fedsam",
            FEDSAM,
            difference=Difference(
                cause=ADDED_TO_THE_NORM,
                decided_by="FedSAM: w + rho g / ||g||.",
                closed_by="FedSAM, plain means here too, norm alone",
            ),
        ),
        Row(
            "FedSAM, plain means here too, norm alone",
            "fedsam",
            replace(FEDSAM, patch="divide_by_the_norm"),
            change="the 1e-7 is taken out of the norm",
        ),
        Row(
            "MoFedSAM, clients of one size",
            "mofedsam, equal",
            MOFEDSAM,
            difference=Difference(
                cause=ADDED_TO_THE_NORM,
                decided_by="MoFedSAM: w + rho g / ||g||.",
                closed_by="MoFedSAM, clients of one size, norm alone",
            ),
        ),
        Row(
            "MoFedSAM, clients of one size, norm alone",
            "mofedsam, equal",
            replace(MOFEDSAM, patch="divide_by_the_norm"),
            change="the 1e-7 is taken out of the norm",
        ),
    ),
)
