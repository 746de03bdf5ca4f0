"""NIID-Bench."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agreement import paper_statements
from agreement.rows import Change, Explanation, Peer, Quantity, Row, list_rows


@dataclass(frozen=True)
class PeerConfig:
    """How its script is run."""

    algorithm: str  # its --alg
    options: Mapping[str, Any] = field(default_factory=dict)  # others of the script


SCAFFOLD = PeerConfig("scaffold")
MOON = PeerConfig("moon", options={"mu": 1.0, "temperature": 0.5})
FEDNOVA = PeerConfig("fednova")
FEDAVG = PeerConfig("fedavg")

PEER = Peer(
    name="NIID-Bench",
    module="niid_bench",
    commit="61b901ab645e62391772e9898384c2c3485b7a6c",
    rows=list_rows(
        Row(label="FedAvg", case="fedavg", config=FEDAVG),
        Row(label="FedProx", case="fedprox", config=PeerConfig("fedprox", options={"mu": 0.5})),
        Row(label="FedNova", case="fednova", config=FEDNOVA),
        Row(label="FedNova with momentum", case="fednova, momentum", config=FEDNOVA),
        Row(label="SCAFFOLD, clients of one size", case="scaffold, equal", config=SCAFFOLD),
        Row(
            label="SCAFFOLD",
            case="scaffold",
            config=SCAFFOLD,
            explanation=Explanation(
                cause="Models are weighted by n_i, the control variates by 1 / N (experiments.py).",
                paper_says=paper_statements.SCAFFOLD_MEANS,
                closed_by=Row(label="SCAFFOLD; fedcli: c by 1 / N", case="scaffold, c uniform", config=SCAFFOLD),
            ),
        ),
        Row(
            label="SCAFFOLD, 2 of 4 clients",
            case="scaffold, half",
            config=SCAFFOLD,
            explanation=Explanation(
                cause="The control variates begin as the weights of a network (experiments.py, 992 to 994; its issue "
                "8).",
                paper_says=paper_statements.SCAFFOLD_FIRST_CONTROLS,
                closed_by=Row(
                    label="SCAFFOLD, 2 of 4 clients; changed: c from 0",
                    case="scaffold, half",
                    config=SCAFFOLD,
                    change=Change("the control variates begin at 0", patch="start_controls_at_zero"),
                ),
            ),
        ),
        Row(
            label="SCAFFOLD with momentum, clients of one size",
            case="scaffold, equal, momentum",
            config=SCAFFOLD,
            explanation=Explanation(
                cause="c - c_i is added after the optimizer's step, and c_i divides by K eta_l without the momentum "
                "(experiments.py).",
                paper_says="The paper's local step has no momentum (Reading 3).",
                closed_by=Row(
                    label="SCAFFOLD with momentum, clients of one size; fedcli: correction after momentum",
                    case="scaffold, equal, correction after momentum",
                    config=SCAFFOLD,
                ),
            ),
        ),
        Row(label="MOON with momentum", case="moon, momentum", config=MOON),
        Row(
            label="FedAvg with batch normalisation",
            case="fedavg, batch norm",
            config=FEDAVG,
            compared=(Quantity.SHARED, Quantity.STATISTICS),
        ),
        Row(
            label="MOON with momentum and batch normalisation",
            case="moon, batch norm, momentum",
            config=MOON,
            explanation=Explanation(
                cause="The received model gives its features in training mode, by the batch's mean and variance; the "
                "client's last model in evaluation mode (experiments.py).",
                paper_says=paper_statements.MOON_MODE,
                closed_by=Row(
                    label="MOON with momentum and batch normalisation; fedcli: received model in training mode",
                    case="moon, batch norm, received in training mode, momentum",
                    config=MOON,
                ),
            ),
        ),
        Row(
            label="MOON with momentum, 2 of 4 clients",
            case="moon, half, momentum",
            config=MOON,
            explanation=Explanation(
                cause="A client's last model is an untrained network until it has taken part (experiments.py, "
                "`old_nets`).",
                paper_says=paper_statements.MOON_FIRST_ROUND,
                closed_by=Row(
                    label="MOON with momentum, 2 of 4 clients; fedcli: initial model as a newcomer's last one",
                    case="moon, half, momentum, initial past",
                    config=MOON,
                ),
            ),
        ),
    ),
)
