"""fluke."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agreement import paper_statements
from agreement.rows import Change, Explanation, Package, Peer, Quantity, Row, SharedPart, list_rows


@dataclass(frozen=True)
class PeerConfig:
    """How one of its algorithms is run."""

    algorithm: str  # module of fluke.algorithms and class
    client_options: Mapping[str, Any] = field(default_factory=dict)
    server_options: Mapping[str, Any] = field(default_factory=dict)
    clients_have_models: bool = False  # whether each client is given a model of its own before the first round
    shared_part: SharedPart = SharedPart.MODEL
    server_model: str = "model"  # the server's model, by its attribute
    kept: tuple[str, ...] = ()  # what stays with a client, by its attributes: models, or numbers
    class_vectors: str = ""  # what the server has of each class, by its attribute


WEIGHTED_BY_EXAMPLES = {"weighted": True}
WEIGHTS_OF_FEDNOVA = (
    "The weights of the models do not sum to 1, and nothing is added for the former model (fednova.py)."
)
FEDNOVA_AVERAGING = "FedNova, normalised averaging: x less the step, so that the weights of x and x_i sum to 1."
REST_OF_FORMER_MODEL = Change("the former model gets the weight that the others leave", patch="keep_the_rest")
SUM_OF_CHANGES = Change("a client keeps the sum of w_i - w_g", patch="sum_changes")
PERSONAL_AND_VECTORS = (Quantity.PERSONAL, Quantity.CLASS_VECTORS)

FEDAVG = PeerConfig("fedavg:FedAVG")
FEDAVG_BY_EXAMPLES = replace(FEDAVG, server_options=WEIGHTED_BY_EXAMPLES)
FEDAVGM = PeerConfig("fedavgm:FedAVGM")
FEDNOVA = PeerConfig("fednova:FedNova", server_options=WEIGHTED_BY_EXAMPLES)
FEDNOVA_WITH_MOMENTUM = replace(FEDNOVA, client_options={"persistency": False})
FEDRS = PeerConfig("fedrs:FedRS", client_options={"alpha": 0.5}, server_options=WEIGHTED_BY_EXAMPLES)
FEDDYN = PeerConfig("feddyn:FedDyn", client_options={"alpha": 0.1}, server_model="cld_mdl")
MOON = PeerConfig("moon:MOON", client_options={"mu": 1.0, "tau": 0.5}, server_options=WEIGHTED_BY_EXAMPLES)
APFL = PeerConfig(
    "apfl:APFL",
    client_options={"lam": 0.3},
    server_options={**WEIGHTED_BY_EXAMPLES, "tau": 1},
    clients_have_models=True,
    kept=("personalized_model", "hyper_params.lam"),
)
FEDPROTO = PeerConfig(
    "fedproto:FedProto",
    client_options={"n_protos": 10, "lam": 1.0},
    clients_have_models=True,
    class_vectors="prototypes",
)
SCAFFOLD = PeerConfig("scaffold:SCAFFOLD")

PEER = Peer(
    name="fluke",
    module="fluke",
    package=Package("fluke-fl", "0.8.1"),
    rows=list_rows(
        Row(
            label="FedAvg",
            case="fedavg",
            config=FEDAVG,
            explanation=Explanation(
                cause="The mean of the models is plain by default (server.py, `weighted`).",
                paper_says=paper_statements.FEDAVG_WEIGHTS,
                closed_by=Row(label="FedAvg, weighted", case="fedavg", config=FEDAVG_BY_EXAMPLES),
            ),
        ),
        Row(
            label="FedAvg; fedcli: plain means",
            case="fedavg, uniform",
            config=FEDAVG,
        ),
        Row(
            label="FedAvg with momentum",
            case="fedavg, momentum",
            config=FEDAVG_BY_EXAMPLES,
            explanation=Explanation(
                cause="The clients' momentum lives on from round to round by default (client.py, `persistency`).",
                paper_says="FedAvg has no momentum; here the local optimizer is new in every round.",
                closed_by=Row(
                    label="FedAvg with momentum, persistency False",
                    case="fedavg, momentum",
                    config=replace(FEDAVG_BY_EXAMPLES, client_options={"persistency": False}),
                ),
            ),
        ),
        Row(
            label="FedProx",
            case="fedprox",
            config=PeerConfig("fedprox:FedProx", client_options={"mu": 0.5}, server_options=WEIGHTED_BY_EXAMPLES),
        ),
        Row(label="SCAFFOLD, clients of one size", case="scaffold, equal", config=SCAFFOLD),
        Row(label="SCAFFOLD, 2 of 4 clients", case="scaffold, half", config=SCAFFOLD),
        Row(
            label="SCAFFOLD",
            case="scaffold",
            config=SCAFFOLD,
            explanation=Explanation(
                cause="Models are weighted by n_i, the control variates by 1 / N (scaffold.py).",
                paper_says=paper_statements.SCAFFOLD_MEANS,
                closed_by=Row(label="SCAFFOLD; fedcli: c by 1 / N", case="scaffold, c uniform", config=SCAFFOLD),
            ),
        ),
        Row(
            label="SCAFFOLD, weighted False; fedcli: plain means",
            case="scaffold, uniform",
            config=replace(SCAFFOLD, server_options={"weighted": False}),
        ),
        Row(
            label="SCAFFOLD, global_step 2",
            case="scaffold, equal, server rate 2",
            config=replace(SCAFFOLD, server_options={"global_step": 2}),
            explanation=Explanation(
                cause="`global_step` multiplies the weights of the models, and not the change of the model "
                "(scaffold.py).",
                paper_says="SCAFFOLD, line 17: x + eta_g times the mean change.",
                closed_by=Row(
                    label="SCAFFOLD, lr 2",
                    case="scaffold, equal, server rate 2",
                    config=replace(SCAFFOLD, server_options={"lr": 2.0}),
                ),
            ),
        ),
        Row(
            label="FedAvgM",
            case="fedavgm",
            config=FEDAVGM,
            explanation=Explanation(
                cause="The first round sets the velocity to zero and leaves the model as it was (fedavgm.py).",
                paper_says="FedAvgM: v starts at 0, and the first round already moves the model.",
                closed_by=Row(
                    label="FedAvgM; changed: velocity from 0",
                    case="fedavgm",
                    config=FEDAVGM,
                    change=Change(
                        "it is given the velocity of zero before the first round, in which it then takes the change",
                        patch="start_velocity_at_zero",
                    ),
                ),
            ),
        ),
        Row(
            label="FedNova",
            case="fednova",
            config=FEDNOVA,
            explanation=Explanation(
                cause=WEIGHTS_OF_FEDNOVA,
                paper_says=FEDNOVA_AVERAGING,
                closed_by=Row(
                    label="FedNova; changed: weights sum to 1",
                    case="fednova",
                    config=FEDNOVA,
                    change=REST_OF_FORMER_MODEL,
                ),
            ),
        ),
        Row(
            label="FedNova with momentum",
            case="fednova, momentum",
            config=FEDNOVA_WITH_MOMENTUM,
            explanation=Explanation(
                cause=WEIGHTS_OF_FEDNOVA,
                paper_says=FEDNOVA_AVERAGING,
                closed_by=Row(
                    label="FedNova with momentum; changed: weights sum to 1",
                    case="fednova, momentum",
                    config=FEDNOVA_WITH_MOMENTUM,
                    change=REST_OF_FORMER_MODEL,
                ),
            ),
        ),
        Row(
            label="FedDyn, clients of one size",
            case="feddyn, equal",
            config=FEDDYN,
            explanation=Explanation(
                cause="The kept gradient has the other sign, and alpha stands before it twice (feddyn.py).",
                paper_says="FedDyn, Algorithm 1: the gradient of a client falls by alpha (w_i - w_g).",
                closed_by=Row(
                    label="FedDyn, clients of one size; changed: kept gradient",
                    case="feddyn, equal",
                    config=FEDDYN,
                    change=SUM_OF_CHANGES,
                ),
            ),
        ),
        Row(
            label="FedDyn, weighted False; changed: kept gradient",
            case="feddyn",
            config=replace(FEDDYN, server_options={"weighted": False}),
            change=SUM_OF_CHANGES,
        ),
        Row(label="MOON", case="moon", config=MOON),
        Row(
            label="FedAvg with batch normalisation",
            case="fedavg, batch norm",
            config=FEDAVG_BY_EXAMPLES,
            compared=(Quantity.SHARED, Quantity.STATISTICS),
        ),
        Row(
            label="MOON with batch normalisation",
            case="moon, batch norm",
            config=MOON,
            explanation=Explanation(
                cause="The received model and the client's last one give their features in training mode, by the "
                "batch's mean and variance (moon.py).",
                paper_says=paper_statements.MOON_MODE,
                closed_by=Row(
                    label="MOON with batch normalisation; fedcli: training mode",
                    case="moon, batch norm, training mode",
                    config=MOON,
                ),
            ),
        ),
        Row(
            label="FedBN",
            case="fedbn, batch norm",
            config=PeerConfig(
                "fedbn:FedBN", server_options=WEIGHTED_BY_EXAMPLES, shared_part=SharedPart.ALL_BUT_NORMALISATION
            ),
            compared=(Quantity.SHARED, Quantity.KEPT),
        ),
        Row(
            label="FedRS",
            case="fedrs",
            config=FEDRS,
            explanation=Explanation(
                cause="A class with one or two examples counts as absent (fedrs.py, `count_as_missing`).",
                paper_says="FedRS: absent are the classes that a client lacks.",
                closed_by=Row(
                    label="FedRS, count_as_missing 0",
                    case="fedrs",
                    config=replace(FEDRS, client_options={"alpha": 0.5, "count_as_missing": 0}),
                ),
            ),
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
        Row(
            label="APFL",
            case="apfl",
            config=APFL,
            compared=(Quantity.SHARED, Quantity.KEPT),
            explanation=Explanation(
                cause="The gradient of the mixture ends in a copy (apfl.py, `merge_models`), so v is not trained; at "
                "the end of a round a client keeps the mixture in the place of v.",
                paper_says="APFL, Algorithm 1: v moves by the gradient at the mixture, and is kept.",
                closed_by=Row(
                    label="APFL; fedcli: mixture kept, v untrained",
                    case="apfl, mixture kept, v untrained",
                    config=APFL,
                    compared=(Quantity.SHARED, Quantity.KEPT),
                ),
            ),
        ),
        Row(
            label="LG-FedAvg",
            case="lg-fedavg",
            config=PeerConfig(
                "lg_fedavg:LGFedAVG",
                server_options=WEIGHTED_BY_EXAMPLES,
                clients_have_models=True,
                shared_part=SharedPart.HEAD,
            ),
            compared=(Quantity.HEAD, Quantity.BODIES),
        ),
    ),
)
