"""PFLlib."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement import paper_statements
from agreement.rows import Change, Explanation, Peer, Quantity, Row, SharedPart, list_rows


@dataclass(frozen=True)
class PeerConfig:
    """How one of its servers is run."""

    server: str  # module of flcore/servers and class
    options: Mapping[str, Any] = field(default_factory=dict)  # of its command line
    own_weight_decay: float = 0.0  # that it has whatever the problem is
    drop_last: bool = False  # whether a batch that is not full is left out
    epoch_of_pass: tuple[int, ...] | None = None  # which epoch a pass over a client's data is; all in turn if None
    shared_part: SharedPart = SharedPart.MODEL
    class_vectors: str = ""  # what the server has of each class, by its attribute
    kept: tuple[str, ...] = ()  # what stays with a client, by its attributes: models, or numbers


FEDAVG = PeerConfig("serveravg:FedAvg")
SCAFFOLD = PeerConfig("serverscaffold:SCAFFOLD")
MOON = PeerConfig("servermoon:MOON", options={"mu": 1.0, "tau": 0.5})
FEDDYN = PeerConfig("serverdyn:FedDyn", options={"alpha": 0.1})
FEDPROTO = PeerConfig("serverproto:FedProto", options={"lamda": 1.0}, class_vectors="global_protos")
LG_FEDAVG = PeerConfig("serverlg:LG_FedAvg", shared_part=SharedPart.HEAD)
FML = PeerConfig("serverfml:FML", options={"alpha": 0.3, "beta": 0.6})
FEDKD = PeerConfig(
    "serverkd:FedKD",
    options={"mentee_learning_rate": 0.1, "T_start": 0.95, "T_end": 0.98},
    shared_part=SharedPart.COMPRESSED,
)
FEDDISTILL = PeerConfig("serverfd:FD", options={"lamda": 1.0}, class_vectors="global_logits")
DITTO = PeerConfig("serverditto:Ditto", options={"mu": 0.5, "plocal_epochs": 2}, kept=("model_per",))
APFL = PeerConfig("serverapfl:APFL", options={"alpha": 0.3}, kept=("model_per", "alpha"))
PFEDME = PeerConfig(
    "serverpFedMe:pFedMe",
    options={"lamda": 15.0, "K": 3, "p_learning_rate": 0.05, "local_learning_rate": 0.005, "beta": 0.7},
    own_weight_decay=0.001,
)
FEDNTD = PeerConfig("serverntd:FedNTD", options={"beta": 1.0, "tau": 1.0})
FEDLC = PeerConfig("serverlc:FedLC", options={"tau": 1.0})

SHARED_AND_PERSONAL = (Quantity.SHARED, Quantity.PERSONAL)
PERSONAL_AND_VECTORS = (Quantity.PERSONAL, Quantity.CLASS_VECTORS)

SQUARED_NORM = Change("the norm in the penalty is squared", patch="square_the_norm")
NEWCOMERS_WITHOUT_PAST = Change(
    "a client that takes part for the first time has the received model as its last one", patch="give_newcomers_no_past"
)
OWN_COUNTS = Change("each client is given the margins of its own counts", patch="calibrate_each_client")

PEER = Peer(
    name="PFLlib",
    module="pfllib",
    commit="d832e76f6a23b833038949ec1e4fdefe63a4d350",
    source_folders=("system",),
    rows=list_rows(
        Row(label="FedAvg", case="fedavg", config=FEDAVG),
        Row(label="FedAvg, drop_last", case="fedavg, drop last", config=replace(FEDAVG, drop_last=True)),
        Row(label="FedAvg, 2 of 4 clients", case="fedavg, half", config=FEDAVG),
        Row(label="FedProx", case="fedprox", config=PeerConfig("serverprox:FedProx", options={"mu": 0.5})),
        Row(label="SCAFFOLD, clients of one size", case="scaffold, equal", config=SCAFFOLD),
        Row(
            label="SCAFFOLD",
            case="scaffold",
            config=SCAFFOLD,
            explanation=Explanation(
                cause="Models and control variates are plain means (serverscaffold.py); fedcli weights both by "
                "examples.",
                paper_says="SCAFFOLD, lines 16 and 17: plain, for which fedcli has --weighting uniform (Reading 5).",
                closed_by=Row(label="SCAFFOLD; fedcli: plain means", case="scaffold, uniform", config=SCAFFOLD),
            ),
        ),
        Row(label="SCAFFOLD, 2 of 4 clients", case="scaffold, half", config=SCAFFOLD),
        Row(
            label="SCAFFOLD, clients of one size, server rate 2",
            case="scaffold, equal, server rate 2",
            config=replace(SCAFFOLD, options={"server_learning_rate": 2.0}),
        ),
        Row(
            label="MOON, 2 of 4 clients",
            case="moon, half",
            config=MOON,
            explanation=Explanation(
                cause="A client's last model is the initial one until it has taken part (clientmoon.py).",
                paper_says=paper_statements.MOON_FIRST_ROUND,
                closed_by=Row(
                    label="MOON, 2 of 4 clients; changed: received model as a newcomer's last one",
                    case="moon, half",
                    config=MOON,
                    change=NEWCOMERS_WITHOUT_PAST,
                ),
            ),
        ),
        Row(
            label="MOON, 2 of 4 clients; fedcli: initial model as a newcomer's last one",
            case="moon, half, initial past",
            config=MOON,
        ),
        Row(label="MOON", case="moon", config=MOON),
        Row(
            label="FedDyn, clients of one size",
            case="feddyn, equal",
            config=FEDDYN,
            explanation=Explanation(
                cause="The norm in the penalty is not squared (clientdyn.py).",
                paper_says="FedDyn, Algorithm 1: alpha / 2 times the squared norm.",
                closed_by=Row(
                    label="FedDyn, clients of one size; changed: squared norm",
                    case="feddyn, equal",
                    config=FEDDYN,
                    change=SQUARED_NORM,
                ),
            ),
        ),
        Row(
            label="FedDyn; changed: squared norm; fedcli: one alpha",
            case="feddyn, uniform",
            config=FEDDYN,
            change=SQUARED_NORM,
        ),
        Row(
            label="FedDyn; changed: squared norm, alpha by size",
            case="feddyn",
            config=FEDDYN,
            change=Change(
                "the norm in the penalty is squared, and alpha is divided by a client's size over the mean size",
                patch="square_the_norm_by_size",
            ),
        ),
        Row(
            label="FedDyn, 2 of 4 clients; changed: squared norm",
            case="feddyn, half",
            config=FEDDYN,
            change=SQUARED_NORM,
        ),
        Row(
            label="FedProto; fedcli: last epoch",
            case="fedproto, last epoch",
            config=FEDPROTO,
            compared=PERSONAL_AND_VECTORS,
            explanation=Explanation(
                cause="fedcli takes prototypes of the last epoch by default, as the authors' code (Reading 4).",
                paper_says=paper_statements.FEDPROTO_EPOCHS,
                closed_by=Row(label="FedProto", case="fedproto", config=FEDPROTO, compared=PERSONAL_AND_VECTORS),
            ),
        ),
        Row(label="LG-FedAvg", case="lg-fedavg", config=LG_FEDAVG, compared=(Quantity.HEAD, Quantity.BODIES)),
        Row(
            label="LG-FedAvg, 2 of 4 clients",
            case="lg-fedavg, half",
            config=LG_FEDAVG,
            compared=(Quantity.HEAD, Quantity.BODIES),
        ),
        Row(
            label="FML",
            case="fml",
            config=FML,
            compared=SHARED_AND_PERSONAL,
            explanation=Explanation(
                cause="KL is a mean over classes too, and both losses have gradients through both models "
                "(clientfml.py).",
                paper_says="FML: KL sums over classes, the other model's output is the target.",
                closed_by=Row(
                    label="FML; fedcli: --form code", case="fml, code", config=FML, compared=SHARED_AND_PERSONAL
                ),
            ),
        ),
        Row(
            label="FedKD; changed: first projection; fedcli: --form code",
            case="fedkd, code",
            config=FEDKD,
            compared=SHARED_AND_PERSONAL,
            change=Change("its projection of features begins as fedcli's", patch="take_projection_of_fedcli"),
        ),
        Row(
            label="FedDistill",
            case="feddistill, logits",
            config=FEDDISTILL,
            compared=PERSONAL_AND_VECTORS,
            explanation=Explanation(
                cause="The mean logits themselves are the target of a cross-entropy (clientfd.py).",
                paper_says="FedDistill: the target is a distribution.",
                closed_by=Row(
                    label="FedDistill; changed: softmax of the target",
                    case="feddistill, logits",
                    config=FEDDISTILL,
                    compared=PERSONAL_AND_VECTORS,
                    change=Change("the target passes a softmax", patch="take_softmax"),
                ),
            ),
        ),
        Row(
            label="FedPer",
            case="fedper",
            config=PeerConfig("serverper:FedPer", kept=("model.head",)),
            compared=(Quantity.SHARED, Quantity.KEPT),
        ),
        Row(
            label="FedRep, two epochs of the head",
            case="fedrep",
            config=PeerConfig(
                "serverrep:FedRep", options={"plocal_epochs": 2}, epoch_of_pass=(2, 3, 0, 1), kept=("model.head",)
            ),
            compared=(Quantity.SHARED, Quantity.KEPT),
        ),
        Row(
            label="FedBABU, before tuning",
            case="fedbabu",
            config=PeerConfig("serverbabu:FedBABU", options={"fine_tuning_epochs": 0}),
        ),
        Row(label="Ditto", case="ditto", config=DITTO, compared=(Quantity.SHARED, Quantity.KEPT)),
        Row(
            label="APFL",
            case="apfl",
            config=APFL,
            compared=(Quantity.SHARED, Quantity.KEPT),
            explanation=Explanation(
                cause="v moves by the gradient of its own loss; a client keeps the mixture in the place of v; alpha "
                "moves after every step (clientapfl.py).",
                paper_says="APFL, Algorithm 1: v moves by the gradient at the mixture, and is kept; alpha may be "
                "fixed.",
                closed_by=Row(
                    label="APFL; fedcli: mixture kept, alpha in every step",
                    case="apfl, mixture kept",
                    config=APFL,
                    compared=(Quantity.SHARED, Quantity.KEPT),
                ),
            ),
        ),
        Row(
            label="pFedMe",
            case="pfedme",
            config=PFEDME,
            explanation=Explanation(
                cause="0.001 theta is added to the gradient of the personal model (optimizers/fedoptimizer.py, `mu`).",
                paper_says="pFedMe, Eq. 7: the loss and lambda (theta - w) alone.",
                closed_by=Row(label="pFedMe; fedcli: weight decay 0.001", case="pfedme, decay", config=PFEDME),
            ),
        ),
        Row(
            label="FedRoD",
            case="fedrod",
            config=PeerConfig("serverrod:FedROD", kept=("head",)),
            compared=(Quantity.SHARED, Quantity.KEPT),
        ),
        Row(
            label="FedNTD",
            case="fedntd",
            config=FEDNTD,
            explanation=Explanation(
                cause="The mean of the models is plain for this method (serverntd.py); fedcli weights by examples.",
                paper_says="FedNTD aggregates as FedAvg: weights n_k / n.",
                closed_by=Row(label="FedNTD; fedcli: plain means", case="fedntd, uniform", config=FEDNTD),
            ),
        ),
        Row(
            label="FedLC, drop_last",
            case="fedlc, drop last",
            config=replace(FEDLC, drop_last=True),
            explanation=Explanation(
                cause="The counts behind the margins are those of all clients together (serverlc.py).",
                paper_says="FedLC: n_c are the examples of the client that trains.",
                closed_by=Row(
                    label="FedLC, drop_last; changed: own counts",
                    case="fedlc, drop last",
                    config=replace(FEDLC, drop_last=True),
                    change=OWN_COUNTS,
                ),
            ),
        ),
        Row(
            label="FedLC; changed: own counts",
            case="fedlc",
            config=FEDLC,
            change=OWN_COUNTS,
        ),
    ),
)
