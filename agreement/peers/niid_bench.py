"""NIID-Bench."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement import equations
from agreement.rows import Difference, Peer, Quantity, Row


@dataclass(frozen=True)
class PeerRun:
    """A run of its script."""

    algorithm: str  # its --alg
    options: Mapping[str, Any] = field(default_factory=dict)  # others of the script
    patch: str = ""  # a function of the adapter, which makes the change


SCAFFOLD = PeerRun("scaffold")
MOON = PeerRun("moon", {"mu": 1.0, "temperature": 0.5})
FEDNOVA = PeerRun("fednova")
FEDAVG = PeerRun("fedavg")

PEER = Peer(
    name="NIID-Bench",
    module="niid_bench",
    commit="61b901ab645e62391772e9898384c2c3485b7a6c",
    rows=(
        Row("FedAvg", "fedavg", FEDAVG),
        Row("FedProx", "fedprox", PeerRun("fedprox", {"mu": 0.5})),
        Row("FedNova", "fednova", FEDNOVA),
        Row("FedNova with momentum", "fednova, momentum", FEDNOVA),
        Row("SCAFFOLD, clients of one size", "scaffold, equal", SCAFFOLD),
        Row(
            "SCAFFOLD",
            "scaffold",
            SCAFFOLD,
            difference=Difference(
                cause="Models are weighted by n_i, the control variates by 1 / N (experiments.py).",
                decided_by=equations.SCAFFOLD_MEANS,
                closed_by="SCAFFOLD, c by 1 / N here too",
            ),
        ),
        Row("SCAFFOLD, c by 1 / N here too", "scaffold, c uniform", SCAFFOLD),
        Row(
            "SCAFFOLD, 2 of 4",
            "scaffold, half",
            SCAFFOLD,
            difference=Difference(
                cause="The control variates begin as the weights of a network (experiments.py, 992 to 994; its issue "
                "8).",
                decided_by=equations.SCAFFOLD_FIRST_CONTROLS,
                closed_by="SCAFFOLD, 2 of 4, c from 0",
            ),
        ),
        Row(
            "SCAFFOLD, 2 of 4, c from 0",
            "scaffold, half",
            replace(SCAFFOLD, patch="start_controls_at_zero"),
            change="the control variates begin at 0",
        ),
        Row(
            "SCAFFOLD with momentum",
            "scaffold, equal, momentum",
            SCAFFOLD,
            difference=Difference(
                cause="c - c_i is added after the optimizer's step, and c_i divides by K eta_l without the momentum "
                "(experiments.py).",
                decided_by="The paper's local step has no momentum (Reading 3).",
                closed_by="SCAFFOLD with momentum, so here too",
            ),
        ),
        Row("SCAFFOLD with momentum, so here too", "scaffold, equal, correction after momentum", SCAFFOLD),
        Row("MOON with its momentum", "moon, momentum", MOON),
        Row(
            "FedAvg with batch normalisation",
            "fedavg, normed",
            FEDAVG,
            compared=(Quantity.SHARED, Quantity.STATISTICS),
        ),
        Row(
            "MOON with batch normalisation",
            "moon, normed, momentum",
            MOON,
            difference=Difference(
                cause="The received model gives its features in training mode, by the batch's mean and variance; the "
                "client's last model in evaluation mode (experiments.py).",
                decided_by=equations.MOON_MODE,
                closed_by="MOON with batch normalisation, received model so here too",
            ),
        ),
        Row(
            "MOON with batch normalisation, received model so here too",
            "moon, normed, received in training mode, momentum",
            MOON,
        ),
        Row(
            "MOON with its momentum, 2 of 4",
            "moon, half, momentum",
            MOON,
            difference=Difference(
                cause="A client's last model is an untrained network until it has taken part.",
                decided_by=equations.MOON_FIRST_ROUND,
                closed_by="MOON with its momentum, 2 of 4, such a last model here too",
            ),
        ),
        Row("MOON with its momentum, 2 of 4, such a last model here too", "moon, half, momentum, initial past", MOON),
    ),
)
