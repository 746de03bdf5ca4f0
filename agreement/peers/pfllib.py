"""PFLlib."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement import equations
from agreement.rows import Difference, Peer, Quantity, Row


@dataclass(frozen=True)
class PeerRun:
    """A run of one of its servers."""

    server: str  # module of flcore/servers and class
    options: Mapping[str, Any] = field(default_factory=dict)  # of its command line
    own_weight_decay: float = 0.0  # that it has whatever the problem is
    drop_last: bool = False  # whether a batch that is not full is left out
    epochs_of_passes: tuple[int, ...] | None = None  # which epoch a pass over a client's data is; all in turn if None
    shares_head_alone: bool = False  # whether the server's model is a head alone
    shares_compressed_parameters: bool = False  # whether the server has no model, but what it sends of one
    class_vectors: str = ""  # what the server has of each class, by its attribute
    kept: tuple[str, ...] = ()  # what stays with a client, by its attributes: models, or numbers
    patch: str = ""  # a function of the adapter, which makes the change


FEDDYN = PeerRun("serverdyn:FedDyn", {"alpha": 0.1})
MOON = PeerRun("servermoon:MOON", {"mu": 1.0, "tau": 0.5})
FML = PeerRun("serverfml:FML", {"alpha": 0.3, "beta": 0.6})
FEDKD = PeerRun(
    "serverkd:FedKD", {"mentee_learning_rate": 0.1, "T_start": 0.95, "T_end": 0.98}, shares_compressed_parameters=True
)
FEDDISTILL = PeerRun("serverfd:FD", {"lamda": 1.0}, class_vectors="global_logits")
FEDPROTO = PeerRun("serverproto:FedProto", {"lamda": 1.0}, class_vectors="global_protos")
LG_FEDAVG = PeerRun("serverlg:LG_FedAvg", shares_head_alone=True)
SHARED_AND_PERSONAL = (Quantity.SHARED, Quantity.PERSONAL)
PERSONAL_AND_VECTORS = (Quantity.PERSONAL, Quantity.CLASS_VECTORS)
SQUARED_NORM = "the norm in the penalty is squared"
NEWCOMERS_WITHOUT_PAST = "a client that takes part for the first time has the received model as its last one"
DITTO = PeerRun("serverditto:Ditto", {"mu": 0.5, "plocal_epochs": 2}, kept=("model_per",))
APFL = PeerRun("serverapfl:APFL", {"alpha": 0.3}, kept=("model_per", "alpha"))
PFEDME = PeerRun(
    "serverpFedMe:pFedMe",
    {"lamda": 15.0, "K": 3, "p_learning_rate": 0.05, "local_learning_rate": 0.005, "beta": 0.7},
    own_weight_decay=0.001,
)
SCAFFOLD = PeerRun("serverscaffold:SCAFFOLD")
FEDAVG = PeerRun("serveravg:FedAvg")
FEDNTD = PeerRun("serverntd:FedNTD", {"beta": 1.0, "tau": 1.0})

PEER = Peer(
    name="PFLlib",
    module="pfllib",
    commit="d832e76f6a23b833038949ec1e4fdefe63a4d350",
    source_folders=("system",),
    rows=(
        Row("FedAvg", "fedavg", FEDAVG),
        Row("FedAvg, drop_last", "fedavg, drop last", PeerRun("serveravg:FedAvg", drop_last=True)),
        Row("FedAvg, 2 of 4", "fedavg, half", FEDAVG),
        Row("FedProx", "fedprox", PeerRun("serverprox:FedProx", {"mu": 0.5})),
        Row("SCAFFOLD, clients of one size", "scaffold, equal", SCAFFOLD),
        Row(
            "SCAFFOLD",
            "scaffold",
            SCAFFOLD,
            difference=Difference(
                cause="Models and control variates are plain means (serverscaffold.py); fedcli weights both by "
                "examples.",
                decided_by=equations.SCAFFOLD_MEANS_BY_OPTION,
                closed_by="SCAFFOLD, plain means here too",
            ),
        ),
        Row("SCAFFOLD, plain means here too", "scaffold, uniform", SCAFFOLD),
        Row("SCAFFOLD, 2 of 4", "scaffold, half", SCAFFOLD),
        Row(
            "SCAFFOLD, server rate 2",
            "scaffold, equal, server rate 2",
            PeerRun("serverscaffold:SCAFFOLD", {"server_learning_rate": 2.0}),
        ),
        Row(
            "MOON, 2 of 4, newcomers",
            "moon, half",
            replace(MOON, patch="give_newcomers_no_past"),
            change=NEWCOMERS_WITHOUT_PAST,
        ),
        Row(
            "MOON, 2 of 4",
            "moon, half",
            MOON,
            difference=Difference(
                cause="A client's last model is the initial one until it has taken part (clientmoon.py).",
                decided_by=equations.MOON_FIRST_ROUND,
                closed_by="MOON, 2 of 4, newcomers",
            ),
        ),
        Row("MOON, 2 of 4, such a last model here too", "moon, half, initial past", MOON),
        Row("MOON", "moon", MOON),
        Row(
            "FedDyn, clients of one size",
            "feddyn, equal",
            FEDDYN,
            difference=Difference(
                cause="The norm in the penalty is not squared (clientdyn.py).",
                decided_by=equations.FEDDYN_SQUARED_NORM,
                closed_by="FedDyn, clients of one size, squared",
            ),
        ),
        Row(
            "FedDyn, clients of one size, squared",
            "feddyn, equal",
            replace(FEDDYN, patch="square_the_norm"),
            change=SQUARED_NORM,
        ),
        Row(
            "FedDyn, squared, plain alpha here too",
            "feddyn, uniform",
            replace(FEDDYN, patch="square_the_norm"),
            change=SQUARED_NORM,
        ),
        Row(
            "FedDyn, squared, alpha by size",
            "feddyn",
            replace(FEDDYN, patch="square_the_norm_by_size"),
            change=f"{SQUARED_NORM}, and alpha is divided by a client's size over the mean size",
        ),
        Row("FedDyn, squared, 2 of 4", "feddyn, half", replace(FEDDYN, patch="square_the_norm"), change=SQUARED_NORM),
        Row("FedProto", "fedproto", FEDPROTO, compared=PERSONAL_AND_VECTORS),
        Row(
            "FedProto, fedcli's default",
            "fedproto, last epoch",
            FEDPROTO,
            compared=PERSONAL_AND_VECTORS,
            difference=Difference(
                cause="fedcli takes prototypes of the last epoch by default, as the authors' code (Reading 4).",
                decided_by=equations.FEDPROTO_EPOCHS,
                closed_by="FedProto",
            ),
        ),
        Row("LG-FedAvg", "lg-fedavg", LG_FEDAVG, compared=(Quantity.HEAD, Quantity.BODIES)),
        Row(
            "LG-FedAvg, 2 of 4",
            "lg-fedavg, half",
            LG_FEDAVG,
            compared=(Quantity.HEAD, Quantity.BODIES),
        ),
        Row("FML, --form code", "fml, code", FML, compared=SHARED_AND_PERSONAL),
        Row(
            "FML",
            "fml",
            FML,
            compared=SHARED_AND_PERSONAL,
            difference=Difference(
                cause="KL is a mean over classes too, and both losses have gradients through both models "
                "(clientfml.py).",
                decided_by="FML: KL sums over classes, the other model's output is the target.",
                closed_by="FML, --form code",
            ),
        ),
        Row(
            "FedKD, --form code",
            "fedkd, code",
            replace(FEDKD, patch="take_projection_of_fedcli"),
            compared=SHARED_AND_PERSONAL,
            change="its projection of features begins as fedcli's",
        ),
        Row(
            "FedDistill",
            "feddistill, logits",
            FEDDISTILL,
            compared=PERSONAL_AND_VECTORS,
            difference=Difference(
                cause="The mean logits themselves are the target of a cross-entropy (clientfd.py).",
                decided_by="FedDistill: the target is a distribution.",
                closed_by="FedDistill, softmax of the target",
            ),
        ),
        Row(
            "FedDistill, softmax of the target",
            "feddistill, logits",
            replace(FEDDISTILL, patch="take_softmax"),
            compared=PERSONAL_AND_VECTORS,
            change="the target passes a softmax",
        ),
        Row(
            "FedPer",
            "fedper",
            PeerRun("serverper:FedPer", kept=("model.head",)),
            compared=(Quantity.SHARED, Quantity.KEPT),
        ),
        Row(
            "FedRep, two epochs of the head",
            "fedrep",
            PeerRun("serverrep:FedRep", {"plocal_epochs": 2}, epochs_of_passes=(2, 3, 0, 1), kept=("model.head",)),
            compared=(Quantity.SHARED, Quantity.KEPT),
        ),
        Row("FedBABU, before tuning", "fedbabu", PeerRun("serverbabu:FedBABU", {"fine_tuning_epochs": 0})),
        Row("Ditto", "ditto", DITTO, compared=(Quantity.SHARED, Quantity.KEPT)),
        Row(
            "APFL",
            "apfl",
            APFL,
            compared=(Quantity.SHARED, Quantity.KEPT),
            difference=Difference(
                cause="v moves by the gradient of its own loss; a client keeps the mixture in the place of v; alpha "
                "moves after every step (clientapfl.py).",
                decided_by=equations.APFL_PERSONAL_MODEL_AND_ALPHA,
                closed_by="APFL, so here too",
            ),
        ),
        Row("APFL, so here too", "apfl, mixture kept", APFL, compared=(Quantity.SHARED, Quantity.KEPT)),
        Row(
            "pFedMe",
            "pfedme",
            PFEDME,
            difference=Difference(
                cause="0.001 theta is added to the gradient of the personal model (optimizers/fedoptimizer.py, `mu`).",
                decided_by="pFedMe, Eq. 7: the loss and lambda (theta - w) alone.",
                closed_by="pFedMe, weight decay 0.001 here too",
            ),
        ),
        Row("pFedMe, weight decay 0.001 here too", "pfedme, decay", PFEDME),
        Row("FedRoD", "fedrod", PeerRun("serverrod:FedROD", kept=("head",)), compared=(Quantity.SHARED, Quantity.KEPT)),
        Row(
            "FedNTD",
            "fedntd",
            FEDNTD,
            difference=Difference(
                cause="The mean of the models is plain for this method (serverntd.py); fedcli weights by examples.",
                decided_by="FedNTD aggregates as FedAvg: weights n_k / n.",
                closed_by="FedNTD, plain means here too",
            ),
        ),
        Row("FedNTD, plain means here too", "fedntd, uniform", FEDNTD),
        Row(
            "FedLC, drop_last",
            "fedlc, drop last",
            PeerRun("serverlc:FedLC", {"tau": 1.0}, drop_last=True),
            difference=Difference(
                cause="The counts behind the margins are those of all clients together (serverlc.py).",
                decided_by="FedLC: n_c are the examples of the client that trains.",
                closed_by="FedLC, drop_last, own counts",
            ),
        ),
        Row(
            "FedLC, drop_last, own counts",
            "fedlc, drop last",
            PeerRun("serverlc:FedLC", {"tau": 1.0}, drop_last=True, patch="calibrate_each_client"),
            change="each client is given the margins of its own counts",
        ),
        Row(
            "FedLC, own counts",
            "fedlc",
            PeerRun("serverlc:FedLC", {"tau": 1.0}, patch="calibrate_each_client"),
            change="each client is given the margins of its own counts",
        ),
    ),
)
