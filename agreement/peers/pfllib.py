"""PFLlib."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement.rows import Peer, Row


@dataclass(frozen=True)
class Setup:
    """A run of one of its servers."""

    server: str  # module of flcore/servers and class
    options: Mapping[str, Any] = field(default_factory=dict)  # of its command line
    drop_last: bool = False  # whether a batch that is not full is left out
    epochs_of_passes: tuple[int, ...] | None = None  # which epoch a pass over a client's data is; all in turn if None
    kept: tuple[str, ...] = ()  # what stays with a client, by its attributes: models, or numbers
    patch: str = ""  # a function of the adapter, which makes the change


FEDDYN = Setup("serverdyn:FedDyn", {"alpha": 0.1})
MOON = Setup("servermoon:MOON", {"mu": 1.0, "tau": 0.5})
FML = Setup("serverfml:FML", {"alpha": 0.3, "beta": 0.6})
FEDKD = Setup("serverkd:FedKD", {"mentee_learning_rate": 0.1, "T_start": 0.95, "T_end": 0.98})
FEDDISTILL = Setup("serverfd:FD", {"lamda": 1.0})
SHARED_AND_PERSONAL = ("shared", "personal")
PERSONAL_AND_VECTORS = ("personal", "class vectors")
SQUARED_NORM = "the norm in the penalty is squared"
NEWCOMERS_WITHOUT_PAST = "a client that takes part for the first time has the received model as its last one"
DITTO = Setup("serverditto:Ditto", {"mu": 0.5, "plocal_epochs": 2}, kept=("model_per",))
APFL = Setup("serverapfl:APFL", {"alpha": 0.3}, kept=("model_per", "alpha"))
PFEDME = Setup(
    "serverpFedMe:pFedMe",
    {"lamda": 15.0, "K": 3, "p_learning_rate": 0.05, "local_learning_rate": 0.005, "beta": 0.7},
)

PEER = Peer(
    name="PFLlib",
    module="pfllib",
    commit="d832e76f6a23b833038949ec1e4fdefe63a4d350",
    source_folders=("system",),
    rows=(
        Row("FedAvg", "fedavg", Setup("serveravg:FedAvg")),
        Row("FedAvg, drop_last", "fedavg, drop last", Setup("serveravg:FedAvg", drop_last=True)),
        Row("FedAvg, 2 of 4", "fedavg, half", Setup("serveravg:FedAvg")),
        Row("FedProx", "fedprox", Setup("serverprox:FedProx", {"mu": 0.5})),
        Row("SCAFFOLD, clients of one size", "scaffold, equal", Setup("serverscaffold:SCAFFOLD")),
        Row(
            "SCAFFOLD",
            "scaffold",
            Setup("serverscaffold:SCAFFOLD"),
            cause="Models and control variates are plain means (serverscaffold.py); fedcli weights both by examples.",
            decided_by="SCAFFOLD, lines 16 and 17: plain, for which fedcli has --weighting uniform (Reading 5).",
            closed_by="SCAFFOLD, plain means here too",
        ),
        Row("SCAFFOLD, plain means here too", "scaffold, uniform", Setup("serverscaffold:SCAFFOLD")),
        Row("SCAFFOLD, 2 of 4", "scaffold, half", Setup("serverscaffold:SCAFFOLD")),
        Row(
            "SCAFFOLD, server rate 2",
            "scaffold, equal, server rate 2",
            Setup("serverscaffold:SCAFFOLD", {"server_learning_rate": 2.0, "local_learning_rate": 0.05}),
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
            cause="A client's last model is the initial one until it has taken part (clientmoon.py).",
            decided_by="MOON is silent; the authors' code has no term in the first round (Reading 3).",
            closed_by="MOON, 2 of 4, newcomers",
        ),
        Row("MOON, 2 of 4, such a last model here too", "moon, half, initial past", MOON),
        Row("MOON", "moon", MOON),
        Row(
            "FedDyn, clients of one size",
            "feddyn, equal",
            FEDDYN,
            cause="The norm in the penalty is not squared (clientdyn.py).",
            decided_by="FedDyn, Algorithm 1: alpha / 2 times the squared norm.",
            closed_by="FedDyn, clients of one size, squared",
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
        Row("FedProto", "fedproto", Setup("serverproto:FedProto", {"lamda": 1.0}), compared=PERSONAL_AND_VECTORS),
        Row(
            "FedProto, fedcli's default",
            "fedproto, last epoch",
            Setup("serverproto:FedProto", {"lamda": 1.0}),
            compared=PERSONAL_AND_VECTORS,
            cause="fedcli takes prototypes of the last epoch by default, as the authors' code (Reading 4).",
            decided_by="FedProto, Eq. 3: of the client's data, without a word of epochs.",
            closed_by="FedProto",
        ),
        Row("LG-FedAvg", "lg-fedavg", Setup("serverlg:LG_FedAvg"), compared=("head", "bodies")),
        Row("LG-FedAvg, 2 of 4", "lg-fedavg, half", Setup("serverlg:LG_FedAvg"), compared=("head", "bodies")),
        Row("FML, --form code", "fml, code", FML, compared=SHARED_AND_PERSONAL),
        Row(
            "FML",
            "fml",
            FML,
            compared=SHARED_AND_PERSONAL,
            cause="KL is a mean over classes too, and both losses have gradients through both models (clientfml.py).",
            decided_by="FML: KL sums over classes, the other model's output is the target.",
            closed_by="FML, --form code",
        ),
        Row(
            "FedKD, --form code",
            "fedkd, code",
            replace(FEDKD, patch="same_projection"),
            compared=SHARED_AND_PERSONAL,
            change="its projection of features begins as fedcli's",
        ),
        Row(
            "FedDistill",
            "feddistill, logits",
            FEDDISTILL,
            compared=PERSONAL_AND_VECTORS,
            cause="The mean logits themselves are the target of a cross-entropy (clientfd.py).",
            decided_by="FedDistill: the target is a distribution.",
            closed_by="FedDistill, softmax of the target",
        ),
        Row(
            "FedDistill, softmax of the target",
            "feddistill, logits",
            replace(FEDDISTILL, patch="take_softmax"),
            compared=PERSONAL_AND_VECTORS,
            change="the target passes a softmax",
        ),
        Row("FedPer", "fedper", Setup("serverper:FedPer", kept=("model.head",)), compared=("shared", "kept")),
        Row(
            "FedRep, two epochs of the head",
            "fedrep",
            Setup("serverrep:FedRep", {"plocal_epochs": 2}, epochs_of_passes=(2, 3, 0, 1), kept=("model.head",)),
            compared=("shared", "kept"),
        ),
        Row("FedBABU, before tuning", "fedbabu", Setup("serverbabu:FedBABU", {"fine_tuning_epochs": 0})),
        Row("Ditto", "ditto", DITTO, compared=("shared", "kept")),
        Row(
            "APFL",
            "apfl",
            APFL,
            compared=("shared", "kept"),
            cause="v moves by the gradient of its own loss; a client keeps the mixture in the place of v; alpha moves "
            "after every step (clientapfl.py).",
            decided_by="APFL, Algorithm 1: v moves by the gradient at the mixture, and is kept; alpha may be fixed.",
            closed_by="APFL, so here too",
        ),
        Row("APFL, so here too", "apfl, mixture kept", APFL, compared=("shared", "kept")),
        Row(
            "pFedMe",
            "pfedme",
            PFEDME,
            cause="0.001 theta is added to the gradient of the personal model (optimizers/fedoptimizer.py, `mu`).",
            decided_by="pFedMe, Eq. 7: the loss and lambda (theta - w) alone.",
            closed_by="pFedMe, weight decay 0.001 here too",
        ),
        Row("pFedMe, weight decay 0.001 here too", "pfedme, decay", PFEDME),
        Row("FedRoD", "fedrod", Setup("serverrod:FedROD", kept=("head",)), compared=("shared", "kept")),
        Row(
            "FedNTD",
            "fedntd",
            Setup("serverntd:FedNTD", {"beta": 1.0, "tau": 1.0}),
            cause="The mean of the models is plain for this method (serverntd.py); fedcli weights by examples.",
            decided_by="FedNTD aggregates as FedAvg: weights n_k / n.",
            closed_by="FedNTD, plain means here too",
        ),
        Row("FedNTD, plain means here too", "fedntd, uniform", Setup("serverntd:FedNTD", {"beta": 1.0, "tau": 1.0})),
        Row(
            "FedLC, drop_last",
            "fedlc, drop last",
            Setup("serverlc:FedLC", {"tau": 1.0}, drop_last=True),
            cause="The counts behind the margins are those of all clients together (serverlc.py).",
            decided_by="FedLC: n_c are the examples of the client that trains.",
            closed_by="FedLC, drop_last, own counts",
        ),
        Row(
            "FedLC, drop_last, own counts",
            "fedlc, drop last",
            Setup("serverlc:FedLC", {"tau": 1.0}, drop_last=True, patch="calibrate_each_client"),
            change="each client is given the margins of its own counts",
        ),
        Row(
            "FedLC, own counts",
            "fedlc",
            Setup("serverlc:FedLC", {"tau": 1.0}, patch="calibrate_each_client"),
            change="each client is given the margins of its own counts",
        ),
    ),
)
