"""What is compared: the rows of a peer, and the cases that fedcli is run with.

A case is what fedcli runs; a row is a run of a peer that is held to a case. Both sides have the same clients, batches
and first weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOON_OPTIONS = {"contrastive_weight": 1.0, "temperature": 0.5}
RUN_WITH_MOMENTUM = {"momentum": 0.9, "lr": 0.03}


@dataclass(frozen=True)
class Case:
    """A run of fedcli."""

    method: str  # a key of `agreement.bridges.BRIDGES`, or the name of a registered method
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    run: Mapping[str, Any] = field(default_factory=dict)  # of the run, in place of those of agreement/problem.py
    partition: str = "skew"  # a key of `agreement.problem.PARTITIONS`
    network: str = "small"  # or "normed", with batch normalisation


@dataclass(frozen=True)
class Row:
    """A run of a peer, and what it is held to."""

    label: str  # of the peer's rows, each once
    case: str  # a key of `CASES`
    setup: Any  # what the peer's adapter runs: a `Setup` of the peer's module
    compared: tuple[str, ...] = ("shared",)  # or "statistics", "personal", "bodies", "head", "kept", "class vectors"
    change: str = ""  # the one thing of the peer that is changed; empty for its code and defaults as they are
    cause: str = ""  # why it differs, with the place in the peer's code; empty where it agrees
    decided_by: str = ""  # the equation of the paper that decides, and what it says
    closed_by: str = ""  # the row in which nothing but the cause is changed; empty where it is open


@dataclass(frozen=True)
class Peer:
    """A project whose code is run."""

    name: str
    module: str  # of its rows in agreement/peers, and of its adapter in agreement/adapters
    rows: tuple[Row, ...]
    commit: str = ""  # of the clone; empty for a package
    package: str = ""  # of the registry, with its version
    source_folders: tuple[str, ...] = (".",)  # of the clone, from which its modules are imported
    # Modules that it imports and does not need here, each with the names that it imports from them.
    absent_modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


CASES = {
    "fedavg": Case("fedavg"),
    "fedavg, half": Case("fedavg", partition="half"),
    "fedavg, uniform": Case("fedavg", run={"weighting": "uniform"}),
    "fedavg, momentum": Case("fedavg", run={**RUN_WITH_MOMENTUM, "weight_decay": 1e-3}),
    "fedavg, normed": Case("fedavg", network="normed"),
    "fedavg, drop last": Case("fedavg", run={"drop_last": True}),
    "fedprox": Case("fedprox", options={"proximal_weight": 0.5}),
    "fedprox, uniform": Case("fedprox", options={"proximal_weight": 0.5}, run={"weighting": "uniform"}),
    "fedprox, decay": Case("fedprox", options={"proximal_weight": 0.5}, run={"weight_decay": 1e-3}),
    "fedavgm": Case("fedavgm", options={"server_momentum": 0.9}),
    "fedavgm, half": Case("fedavgm", options={"server_momentum": 0.9}, partition="half"),
    "fedavgm, nesterov": Case("nesterov", options={"server_momentum": 0.9}),
    "scaffold": Case("scaffold", options={"clip_norm": 0.0}),
    "scaffold, equal": Case("scaffold", options={"clip_norm": 0.0}, partition="equal"),
    "scaffold, equal, clipped": Case("scaffold", partition="equal"),
    "scaffold, equal, server rate 2": Case(
        "scaffold", options={"clip_norm": 0.0, "server_lr": 2.0}, run={"lr": 0.05}, partition="equal"
    ),
    "scaffold, half": Case("scaffold", options={"clip_norm": 0.0}, partition="half"),
    "scaffold, uniform": Case("scaffold", options={"clip_norm": 0.0}, run={"weighting": "uniform"}),
    "scaffold, c uniform": Case("scaffold_with_uniform_control", options={"clip_norm": 0.0}),
    "scaffold, equal, momentum": Case("scaffold", options={"clip_norm": 0.0}, run=RUN_WITH_MOMENTUM, partition="equal"),
    "scaffold, equal, correction after momentum": Case(
        "scaffold_after_momentum", options={"clip_norm": 0.0}, run=RUN_WITH_MOMENTUM, partition="equal"
    ),
    "feddyn": Case("feddyn", options={"alpha": 0.1, "clip_norm": 0.0}),
    "feddyn, equal": Case("feddyn", options={"alpha": 0.1, "clip_norm": 0.0}, partition="equal"),
    "feddyn, equal, clipped": Case("feddyn", options={"alpha": 0.1}, partition="equal"),
    "feddyn, half": Case("feddyn", options={"alpha": 0.1, "clip_norm": 0.0}, partition="half"),
    "feddyn, uniform": Case("feddyn", options={"alpha": 0.1, "clip_norm": 0.0}, run={"weighting": "uniform"}),
    "fednova": Case("fednova"),
    "fednova, momentum": Case("fednova", run=RUN_WITH_MOMENTUM),
    "moon": Case("moon", options=MOON_OPTIONS),
    "moon, normed": Case("moon", options=MOON_OPTIONS, network="normed"),
    "moon, normed, momentum": Case("moon", options=MOON_OPTIONS, run=RUN_WITH_MOMENTUM, network="normed"),
    "moon, normed, training mode": Case("moon_in_training_mode", options=MOON_OPTIONS, network="normed"),
    "moon, normed, received in training mode, momentum": Case(
        "moon_with_received_in_training_mode",
        options=MOON_OPTIONS,
        run=RUN_WITH_MOMENTUM,
        network="normed",
    ),
    "fedbn, normed": Case("fedbn", network="normed"),
    "moon, half": Case("moon", options=MOON_OPTIONS, partition="half"),
    "moon, momentum": Case("moon", options=MOON_OPTIONS, run=RUN_WITH_MOMENTUM),
    "moon, half, momentum": Case("moon", options=MOON_OPTIONS, run=RUN_WITH_MOMENTUM, partition="half"),
    "moon, half, initial past": Case("moon_with_initial_past", options=MOON_OPTIONS, partition="half"),
    "moon, half, momentum, initial past": Case(
        "moon_with_initial_past",
        options=MOON_OPTIONS,
        run=RUN_WITH_MOMENTUM,
        partition="half",
    ),
    "fedrs": Case("fedrs", options={"scaling": 0.5}),
    "fedproto": Case("fedproto", options={"prototype_weight": 1.0, "gathered_epochs": "all"}),
    "fedproto, last epoch": Case("fedproto", options={"prototype_weight": 1.0}),
    "lg-fedavg": Case("lg-fedavg"),
    "lg-fedavg, half": Case("lg-fedavg", partition="half"),
    "fml": Case("fml", options={"private_task_share": 0.3, "shared_task_share": 0.6}),
    "fml, code": Case("fml", options={"form": "code", "private_task_share": 0.3, "shared_task_share": 0.6}),
    "fedkd, code": Case("fedkd", options={"form": "code"}),
    "feddistill, logits": Case("feddistill", options={"averaged": "logits"}),
    "fedadam": Case("fedadam", options={"server_lr": 0.05, "adaptivity": 0.01}),
    "fedyogi": Case("fedyogi", options={"server_lr": 0.05, "adaptivity": 0.01}),
    "fedadagrad": Case("fedadagrad", options={"server_lr": 0.05, "server_momentum": 0.9, "adaptivity": 0.01}),
    "fedadagrad, without momentum": Case("fedadagrad", options={"server_lr": 0.05, "adaptivity": 0.01}),
    "fedsam": Case("fedsam", options={"perturbation": 0.1}, run={"weighting": "uniform"}),
    "fedcm, equal": Case("fedcm", options={"gradient_share": 0.3}, partition="equal"),
    "mofedsam, equal": Case("mofedsam", options={"gradient_share": 0.3, "perturbation": 0.1}, partition="equal"),
    "fedntd": Case("fedntd", options={"distillation_weight": 1.0, "temperature": 1.0}),
    "fedntd, tau 3": Case("fedntd", options={"distillation_weight": 0.5, "temperature": 3.0}),
    "feddecorr": Case("feddecorr", options={"decorrelation_weight": 0.01}, partition="equal"),
    "fedntd, uniform": Case(
        "fedntd", options={"distillation_weight": 1.0, "temperature": 1.0}, run={"weighting": "uniform"}
    ),
    "fedlc, drop last": Case("fedlc", options={"margin": 1.0}, run={"drop_last": True}),
    "fedper": Case("fedper"),
    "fedrep": Case("fedrep", options={"head_epochs": 2}),
    "fedbabu": Case("fedbabu", options={"tuning_epochs": 0}),
    "ditto": Case("ditto", options={"proximal_weight": 0.5}),
    "apfl": Case("apfl", options={"mixing": 0.3}),
    "apfl, mixture kept": Case("apfl_keeping_the_mixture", options={"mixing": 0.3}),
    "apfl, mixture kept, v untrained": Case("apfl_keeping_the_mixture_untrained", options={"mixing": 0.3}),
    "pfedme": Case("pfedme", options={"personal_steps": 3, "server_mixing": 0.7}, run={"lr": 0.05}),
    "pfedme, decay": Case(
        "pfedme", options={"personal_steps": 3, "server_mixing": 0.7}, run={"lr": 0.05, "weight_decay": 1e-3}
    ),
    "fedrod": Case("fedrod"),
    "fedlc": Case("fedlc", options={"margin": 1.0}),
}
