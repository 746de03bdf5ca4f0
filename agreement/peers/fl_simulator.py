"""FL-Simulator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agreement import paper_statements
from agreement.rows import Change, Explanation, Peer, Row, list_rows


@dataclass(frozen=True)
class PeerConfig:
    """How one of its servers is run."""

    method: str  # the name of its server
    options: Mapping[str, Any] = field(default_factory=dict)  # of its command line


FEDAVG = PeerConfig("FedAvg")
SCAFFOLD = PeerConfig("SCAFFOLD")
FEDDYN = PeerConfig("FedDyn", options={"lamb": 0.1})
FEDSAM = PeerConfig("FedSAM", options={"rho": 0.1})
MOFEDSAM = PeerConfig("MoFedSAM", options={"rho": 0.1, "alpha": 0.3})

NORM_ALONE = Change("the 1e-7 is taken out of the norm", patch="divide_by_the_norm")

PLAIN_MEAN_OF_MODELS = "The mean of the models is plain (server.py); fedcli weights by examples."
ADDED_TO_THE_NORM = "1e-7 is added to the norm of the gradient (optimizer/ESAM.py)."

PEER = Peer(
    name="FL-Simulator",
    module="fl_simulator",
    commit="502bec65570165d1ff1a6ce76375297145c734e3",
    rows=list_rows(
        Row(
            label="FedAvg",
            case="fedavg",
            config=FEDAVG,
            explanation=Explanation(
                cause=PLAIN_MEAN_OF_MODELS,
                paper_says=paper_statements.FEDAVG_WEIGHTS,
                closed_by=Row(label="FedAvg; fedcli: plain means", case="fedavg, uniform", config=FEDAVG),
            ),
        ),
        Row(
            label="FedProx; fedcli: plain means",
            case="fedprox, uniform",
            config=PeerConfig("FedProx", options={"lamb": 0.5}),
        ),
        Row(label="SCAFFOLD, clients of one size", case="scaffold, equal, clipped", config=SCAFFOLD),
        Row(label="SCAFFOLD, 2 of 4 clients", case="scaffold, half", config=SCAFFOLD),
        Row(
            label="SCAFFOLD; fedcli: plain means",
            case="scaffold, uniform",
            config=SCAFFOLD,
            explanation=Explanation(
                cause="K is the first client's for all, and no whole number for a batch that is not full "
                "(server/SCAFFOLD.py).",
                paper_says="SCAFFOLD, line 12: K of the client.",
                closed_by=Row(
                    label="SCAFFOLD; changed: K of the client; fedcli: plain means",
                    case="scaffold, uniform",
                    config=SCAFFOLD,
                    change=Change("K is the client's number of steps", patch="count_own_steps"),
                ),
            ),
        ),
        Row(label="FedDyn, clients of one size", case="feddyn, equal, clipped", config=FEDDYN),
        Row(
            label="FedDyn",
            case="feddyn",
            config=FEDDYN,
            explanation=Explanation(
                cause="All clients have one alpha (client/feddyn.py, `lamb`); fedcli's is divided by a client's size, "
                "as in the authors' code.",
                paper_says="FedDyn, Algorithm 1: one alpha, for which fedcli has --weighting uniform (Reading 2).",
                closed_by=Row(label="FedDyn; fedcli: one alpha", case="feddyn, uniform", config=FEDDYN),
            ),
        ),
        Row(label="FedDyn, 2 of 4 clients", case="feddyn, half", config=FEDDYN),
        Row(
            label="FedCM, clients of one size", case="fedcm, equal", config=PeerConfig("FedCM", options={"alpha": 0.3})
        ),
        Row(
            label="FedSAM; fedcli: plain means",
            case="fedsam",
            config=FEDSAM,
            explanation=Explanation(
                cause=ADDED_TO_THE_NORM,
                paper_says="FedSAM: w + rho g / ||g||.",
                closed_by=Row(
                    label="FedSAM; changed: norm alone; fedcli: plain means",
                    case="fedsam",
                    config=FEDSAM,
                    change=NORM_ALONE,
                ),
            ),
        ),
        Row(
            label="MoFedSAM, clients of one size",
            case="mofedsam, equal",
            config=MOFEDSAM,
            explanation=Explanation(
                cause=ADDED_TO_THE_NORM,
                paper_says="MoFedSAM: w + rho g / ||g||.",
                closed_by=Row(
                    label="MoFedSAM, clients of one size; changed: norm alone",
                    case="mofedsam, equal",
                    config=MOFEDSAM,
                    change=NORM_ALONE,
                ),
            ),
        ),
    ),
)
