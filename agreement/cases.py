"""The cases: what fedcli is run with. A row of a peer is held to one of them."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

DEFAULT_NETWORK = "small"


@dataclass(frozen=True)
class Case:
    """A run of fedcli."""

    method: str  # a key of `agreement.bridges.BRIDGES`, or the name of a registered method
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    run_options: Mapping[str, Any] = field(default_factory=dict)  # in place of those of `agreement.problem.RUN`
    partition: str = "skew"  # a key of `agreement.problem.PARTITIONS`
    network_name: str = DEFAULT_NETWORK  # a key of `agreement.small_networks.BODIES`


UNIFORM = {"weighting": "uniform"}
DROP_LAST = {"drop_last": True}
WITH_MOMENTUM = {"momentum": 0.9, "lr": 0.03}
FEDPROX_OPTIONS = {"proximal_weight": 0.5}
FEDAVGM_OPTIONS = {"server_momentum": 0.9}
UNCLIPPED = {"clip_norm": 0.0}
FEDDYN_OPTIONS = {"alpha": 0.1, **UNCLIPPED}
MOON_OPTIONS = {"contrastive_weight": 1.0, "temperature": 0.5}
FML_OPTIONS = {"private_task_share": 0.3, "shared_task_share": 0.6}
FEDOPT_OPTIONS = {"server_lr": 0.05, "adaptivity": 0.01}
FEDNTD_OPTIONS = {"distillation_weight": 1.0, "temperature": 1.0}
FEDLC_OPTIONS = {"margin": 1.0}
APFL_OPTIONS = {"mixing": 0.3}
PFEDME_OPTIONS = {"personal_steps": 3, "server_mixing": 0.7}

CASES = {
    # The mean of the models
    "fedavg": Case("fedavg"),
    "fedavg, half": Case("fedavg", partition="half"),
    "fedavg, uniform": Case("fedavg", run_options=UNIFORM),
    "fedavg, momentum": Case("fedavg", run_options={**WITH_MOMENTUM, "weight_decay": 1e-3}),
    "fedavg, batch norm": Case("fedavg", network_name="batch_norm"),
    "fedavg, drop last": Case("fedavg", run_options=DROP_LAST),
    "fedbn, batch norm": Case("fedbn", network_name="batch_norm"),
    # FedProx
    "fedprox": Case("fedprox", options=FEDPROX_OPTIONS),
    "fedprox, uniform": Case("fedprox", options=FEDPROX_OPTIONS, run_options=UNIFORM),
    "fedprox, decay": Case("fedprox", options=FEDPROX_OPTIONS, run_options={"weight_decay": 1e-3}),
    # Optimizers of the server
    "fedavgm": Case("fedavgm", options=FEDAVGM_OPTIONS),
    "fedavgm, half": Case("fedavgm", options=FEDAVGM_OPTIONS, partition="half"),
    "fedavgm, nesterov": Case("nesterov", options=FEDAVGM_OPTIONS),
    "fedadam": Case("fedadam", options=FEDOPT_OPTIONS),
    "fedyogi": Case("fedyogi", options=FEDOPT_OPTIONS),
    "fedadagrad": Case("fedadagrad", options={"server_lr": 0.05, "server_momentum": 0.9, "adaptivity": 0.01}),
    "fedadagrad, without momentum": Case("fedadagrad", options=FEDOPT_OPTIONS),
    # Control variates and dual variables
    "scaffold": Case("scaffold", options=UNCLIPPED),
    "scaffold, equal": Case("scaffold", options=UNCLIPPED, partition="equal"),
    "scaffold, equal, clipped": Case("scaffold", partition="equal"),
    "scaffold, equal, server rate 2": Case(
        "scaffold", options={**UNCLIPPED, "server_lr": 2.0}, run_options={"lr": 0.05}, partition="equal"
    ),
    "scaffold, half": Case("scaffold", options=UNCLIPPED, partition="half"),
    "scaffold, uniform": Case("scaffold", options=UNCLIPPED, run_options=UNIFORM),
    "scaffold, c uniform": Case("scaffold_with_uniform_control", options=UNCLIPPED),
    "scaffold, equal, momentum": Case("scaffold", options=UNCLIPPED, run_options=WITH_MOMENTUM, partition="equal"),
    "scaffold, equal, correction after momentum": Case(
        "scaffold_after_momentum", options=UNCLIPPED, run_options=WITH_MOMENTUM, partition="equal"
    ),
    "feddyn": Case("feddyn", options=FEDDYN_OPTIONS),
    "feddyn, equal": Case("feddyn", options=FEDDYN_OPTIONS, partition="equal"),
    "feddyn, equal, clipped": Case("feddyn", options={"alpha": 0.1}, partition="equal"),
    "feddyn, half": Case("feddyn", options=FEDDYN_OPTIONS, partition="half"),
    "feddyn, uniform": Case("feddyn", options=FEDDYN_OPTIONS, run_options=UNIFORM),
    # Normalised averaging
    "fednova": Case("fednova"),
    "fednova, momentum": Case("fednova", run_options=WITH_MOMENTUM),
    # MOON
    "moon": Case("moon", options=MOON_OPTIONS),
    "moon, momentum": Case("moon", options=MOON_OPTIONS, run_options=WITH_MOMENTUM),
    "moon, half": Case("moon", options=MOON_OPTIONS, partition="half"),
    "moon, half, momentum": Case("moon", options=MOON_OPTIONS, run_options=WITH_MOMENTUM, partition="half"),
    "moon, half, initial past": Case("moon_with_initial_past", options=MOON_OPTIONS, partition="half"),
    "moon, half, momentum, initial past": Case(
        "moon_with_initial_past", options=MOON_OPTIONS, run_options=WITH_MOMENTUM, partition="half"
    ),
    "moon, batch norm": Case("moon", options=MOON_OPTIONS, network_name="batch_norm"),
    "moon, batch norm, momentum": Case(
        "moon", options=MOON_OPTIONS, run_options=WITH_MOMENTUM, network_name="batch_norm"
    ),
    "moon, batch norm, training mode": Case("moon_in_training_mode", options=MOON_OPTIONS, network_name="batch_norm"),
    "moon, batch norm, received in training mode, momentum": Case(
        "moon_with_received_in_training_mode",
        options=MOON_OPTIONS,
        run_options=WITH_MOMENTUM,
        network_name="batch_norm",
    ),
    # Momentum and perturbation of the local step
    "fedcm, equal": Case("fedcm", options={"gradient_share": 0.3}, partition="equal"),
    "fedsam": Case("fedsam", options={"perturbation": 0.1}, run_options=UNIFORM),
    "mofedsam, equal": Case("mofedsam", options={"gradient_share": 0.3, "perturbation": 0.1}, partition="equal"),
    # Local losses
    "fedlc": Case("fedlc", options=FEDLC_OPTIONS),
    "fedlc, drop last": Case("fedlc", options=FEDLC_OPTIONS, run_options=DROP_LAST),
    "fedrs": Case("fedrs", options={"scaling": 0.5}),
    "feddecorr": Case("feddecorr", options={"decorrelation_weight": 0.01}, partition="equal"),
    "fedntd": Case("fedntd", options=FEDNTD_OPTIONS),
    "fedntd, uniform": Case("fedntd", options=FEDNTD_OPTIONS, run_options=UNIFORM),
    "fedntd, tau 3": Case("fedntd", options={"distillation_weight": 0.5, "temperature": 3.0}),
    # Prototypes, outputs and pairs of models
    "fedproto": Case("fedproto", options={"prototype_weight": 1.0, "gathered_epochs": "all"}),
    "fedproto, last epoch": Case("fedproto", options={"prototype_weight": 1.0}),
    "feddistill, logits": Case("feddistill", options={"averaged": "logits"}),
    "fml": Case("fml", options=FML_OPTIONS),
    "fml, code": Case("fml", options={"form": "code", **FML_OPTIONS}),
    "fedkd, code": Case("fedkd", options={"form": "code"}),
    # Personal models
    "lg-fedavg": Case("lg-fedavg"),
    "lg-fedavg, half": Case("lg-fedavg", partition="half"),
    "fedper": Case("fedper"),
    "fedrep": Case("fedrep", options={"head_epochs": 2}),
    "fedbabu": Case("fedbabu", options={"tuning_epochs": 0}),
    "fedrod": Case("fedrod"),
    "ditto": Case("ditto", options={"proximal_weight": 0.5}),
    "apfl": Case("apfl", options=APFL_OPTIONS),
    "apfl, mixture kept": Case("apfl_keeping_the_mixture", options=APFL_OPTIONS),
    "apfl, mixture kept, v untrained": Case("apfl_keeping_the_mixture_untrained", options=APFL_OPTIONS),
    "pfedme": Case("pfedme", options=PFEDME_OPTIONS, run_options={"lr": 0.05}),
    "pfedme, decay": Case("pfedme", options=PFEDME_OPTIONS, run_options={"lr": 0.05, "weight_decay": 1e-3}),
}
