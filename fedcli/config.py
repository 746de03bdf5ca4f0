"""The configuration of a run: its options, where each value comes from, and what is refused before anything starts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedcli import backbones, datasets, partition
from fedcli.errors import UserError, unknown
from fedcli.registry import (
    DataSetting,
    Method,
    Protocol,
    check_value,
    default_protocol,
    find_protocol,
    method_options,
    option,
)

DEFAULT_DATASET = "digits"
PRECISIONS = ("float32", "float64", "tf32", "bf16")


@dataclass(frozen=True)
class RunConfig:
    """The options that every method has. None stands for what is found out later: from the data or the machine."""

    protocol: str | None = option(
        None, "Experimental set-up, paper:setting; fixes every option below that is not given"
    )
    dataset: str | None = option(None, f"Data set; {DEFAULT_DATASET} where none is given. 'fedcli data list' shows all")
    public_dataset: str | None = option(None, "Unlabelled images for the methods that need them: a data set's name")
    public_examples: int | None = option(None, "Use so many of the public images; all where not given", low=1)
    public_batch_size: int = option(256, "Public images in a minibatch", low=1)
    partition: str = option(
        "iid", "How the examples are divided among clients: iid, dirichlet:A, classes:C, dominant:C, missing:X, domains"
    )
    partition_seed: int | None = option(None, "Seed of the partition; the run's seed where not given", low=0)
    num_clients: int = option(10, "Clients in the population", symbol="N", low=1)
    cohort_size: int | None = option(None, "Clients that take part in a round; all where not given", symbol="K", low=1)
    rounds: int = option(10, "Communication rounds", symbol="T", low=1)
    local_epochs: int = option(1, "Passes over a client's data in a round", symbol="E", low=1)
    batch_size: int = option(64, "Samples in a minibatch", symbol="B", low=1)
    drop_last: bool = option(False, "Leave out the last batch of an epoch where it is not full")
    optimizer: str = option("sgd", "Local optimizer, new in every round", choices=("sgd", "adam"))
    lr: float = option(0.01, "Learning rate", low=0, open_low=True)
    lr_decay: float = option(1.0, "Factor on the learning rate after each round", low=0, open_low=True, high=1, off=1)
    momentum: float = option(0.0, "Momentum of SGD", low=0, high=1, open_high=True, off=0)
    weight_decay: float = option(0.0, "Coefficient of the L2 penalty's gradient", low=0, off=0)
    validation: float = option(
        0.0, "Share of each client's examples held out for validation", low=0, high=1, open_high=True, off=0
    )
    local_test: float = option(
        0.0,
        "Share of each client's examples that is its own test part, for protocols that test on it; the official "
        "training and test images are then divided together",
        low=0,
        high=1,
        open_high=True,
        off=0,
    )
    train_examples: int | None = option(
        None, "Use a stratified part of the training images; the record is labelled reduced", low=1
    )
    backbone: str | None = option(
        None,
        "Network; the protocol names one for each of its data sets. Several, divided by commas, are dealt to the "
        "clients in turn, for the methods that allow it",
    )
    seed: int = option(0, "Seed of the initial model, the cohorts and the batches", low=0, high=2**32 - 1)
    device: str = option("auto", "auto, cpu, cuda or cuda:N; auto is cuda where there is one")
    precision: str = option("float32", "Arithmetic of training", choices=PRECISIONS)
    clients_per_chunk: str = option(
        "auto", "Clients stacked into one computation, 1 to the cohort size; auto is 1 on a CPU and all on CUDA"
    )
    eval_every: int = option(1, "Evaluate after every so many rounds, and after the last", low=1)
    checkpoint_every: int = option(1, "Write a checkpoint after every so many rounds, and after the last", low=1)


PANELS = {
    "Federation": (
        "protocol", "dataset", "public_dataset", "public_examples", "partition", "partition_seed", "num_clients",
        "cohort_size", "rounds", "validation", "local_test", "train_examples",
    ),
    "Local training": (
        "local_epochs", "batch_size", "public_batch_size", "drop_last", "optimizer", "lr", "lr_decay", "momentum",
        "weight_decay", "backbone",
    ),
    "Machine": ("seed", "device", "precision", "clients_per_chunk"),
    "Output": ("eval_every", "checkpoint_every"),
}  # fmt: skip


_NOT_FIELDS = {"method", "out", "seeds", "progress", "help"}  # taken by the command line and by `fedcli.run`


def option_panels(method: Method) -> dict[str, dict[str, dataclasses.Field]]:
    """The options of a method as `{panel title: {name: field}}`, its own panel first.

    Raises:
        UserError: If the method declares an option that every method has.
    """
    own = {field.name: field for field in dataclasses.fields(method.config)}
    run_fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    if taken := [name for name in own if name in run_fields or name in _NOT_FIELDS]:
        raise UserError(
            f"the option '{taken[0]}' of '{method.name}' is one that every method has; rename it in {method.file}."
        )
    panels = {title: {name: run_fields[name] for name in names} for title, names in PANELS.items()}
    return {method.title: own, **panels} if own else panels


@dataclass(frozen=True)
class Setup:
    """A run that has been checked and can start."""

    method: Method
    options: Any  # the method's Config
    run: RunConfig  # no None but for what the data decide
    protocol: Protocol
    setting: DataSetting | None  # what the protocol says of the data set; None where it does not know it
    partition: partition.Partition
    selection: str
    device: torch.device
    origin: dict[str, str]  # of each value: "command line", "protocol ...", "default", ...

    def values(self) -> dict[str, Any]:
        """All options, the run's and the method's, as one flat dict."""
        return {**dataclasses.asdict(self.run), **dataclasses.asdict(self.options)}


def resolve(method: Method, given: Mapping[str, Any], *, need_data: bool = True) -> Setup:
    """Puts together what was given, the protocol's values and the defaults, and refuses what cannot run.

    Args:
        method: The method.
        given: Options by field name, the run's and the method's, those that were given and not None.
        need_data: Whether the data set must be on this machine; a plan of runs needs none.

    Raises:
        UserError: For the first thing that is wrong. No data are read.
    """
    option_panels(method)  # refuses clashes of names
    run_fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    run_given = {name: value for name, value in given.items() if name in run_fields}
    method_given = {name: value for name, value in given.items() if name not in run_fields}
    for name, value in run_given.items():
        check_value(run_fields[name], value)
    method_options(method, method_given)

    dataset = run_given.get("dataset") or _only_dataset(run_given.get("protocol"), method) or DEFAULT_DATASET
    if need_data:
        datasets.available(dataset)
    if "protocol" in run_given:
        protocol = find_protocol(run_given["protocol"], method)
    else:
        protocol = default_protocol(method, dataset)
    setting = protocol.datasets.get(dataset)

    values, origin = _merge(run_given, protocol, setting, dataset)
    options, option_origin = _method_values(method, method_given, protocol)
    if values["partition_seed"] is None:
        values["partition_seed"], origin["partition_seed"] = values["seed"], "seed"
    if values["cohort_size"] is None:
        values["cohort_size"], origin["cohort_size"] = values["num_clients"], "num_clients"
    if not method.uses_public_data and "public_dataset" not in run_given:
        values["public_dataset"] = None  # the protocol's, for the methods that need one
    run = RunConfig(**values)
    _refuse(run, method, protocol)
    if run.public_dataset is not None:
        datasets.available(run.public_dataset)
    selection = protocol.selection
    if selection == "best-validation" and run.validation == 0:
        selection, origin["selection"] = "last", "no validation part"
    parts = partition.from_flag(run.partition)
    device = find_device(run.device)
    return Setup(method, options, run, protocol, setting, parts, selection, device, {**origin, **option_origin})


def _only_dataset(protocol: str | None, method: Method) -> str | None:
    """The data set of a named protocol that has just one."""
    known = list(find_protocol(protocol, method).datasets) if protocol else []
    return known[0] if len(known) == 1 else None


def _merge(
    given: Mapping[str, Any], protocol: Protocol, setting: DataSetting | None, dataset: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of the run's options and where each comes from; the later layers override the earlier."""
    layers = [("default", {field.name: field.default for field in dataclasses.fields(RunConfig)})]
    layers.append((f"protocol {protocol.name}", protocol.settings))
    if setting is not None:
        layers.append((f"protocol {protocol.name}, {dataset}", {"backbone": setting.backbone, **setting.settings}))
    layers.append(("default", {"protocol": protocol.name, "dataset": dataset}))
    layers.append(("command line", given))
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, layer in layers:
        values.update(layer)
        origin.update(dict.fromkeys(layer, name))
    return values, origin


def _method_values(method: Method, given: Mapping[str, Any], protocol: Protocol) -> tuple[Any, dict[str, str]]:
    """The method's options and where each comes from."""
    tuned = protocol.method_options.get(method.name, {})
    origin = {field.name: "default" for field in dataclasses.fields(method.config)}
    origin |= dict.fromkeys(tuned, f"protocol {protocol.name}") | dict.fromkeys(given, "command line")
    return method_options(method, {**tuned, **given}), origin


def _refuse(run: RunConfig, method: Method, protocol: Protocol) -> None:
    """Refuses combinations that cannot run."""
    if run.cohort_size > run.num_clients:
        raise UserError(
            f"--cohort-size {run.cohort_size} is larger than --num-clients {run.num_clients}; "
            f"use {run.num_clients} or fewer."
        )
    if run.backbone is None:
        raise UserError(
            f"the protocol {run.protocol} names no network for '{run.dataset}' (got no --backbone); "
            f"choose one with --backbone: {', '.join(backbones.names())}."
        )
    kinds = run.backbone.split(",")
    for name in kinds:
        if name not in backbones.names():
            raise unknown("backbone", name, backbones.names(), f"there are {', '.join(backbones.names())}.")
    if len(set(kinds)) > 1 and not method.mixed_networks:
        raise UserError(
            f"'{method.name}' needs one network for all clients (got --backbone {run.backbone}); name one of them."
        )
    if (protocol.evaluation == "clients") != (run.local_test > 0):
        needs = "tests on the clients' own parts" if protocol.evaluation == "clients" else "has no such parts"
        raise UserError(
            f"the protocol {protocol.name} {needs} (got --local-test {run.local_test:g}); "
            + ("choose a share above 0." if protocol.evaluation == "clients" else "leave the option out.")
        )
    if run.public_dataset is not None and not method.uses_public_data:
        raise UserError(
            f"'{method.name}' uses no public images (got --public-dataset {run.public_dataset}); leave the option out."
        )
    if run.public_dataset is None and method.uses_public_data:
        raise UserError(
            f"'{method.name}' needs unlabelled public images (got no --public-dataset); name a data set, "
            f"'fedcli data list' shows all."
        )
    chunk = run.clients_per_chunk
    if chunk != "auto" and not (chunk.isdigit() and int(chunk) > 0):
        raise UserError(
            f"--clients-per-chunk must be auto or a whole number from 1 (got '{chunk}'); "
            f"1 trains one client after the other."
        )


def find_device(name: str) -> torch.device:
    """The device of that name; auto is CUDA where there is one.

    Raises:
        UserError: If the name is not one or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device must be auto, cpu, cuda or cuda:N (got '{name}'); choose one of them.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {name} is not there (PyTorch sees {torch.cuda.device_count()} CUDA devices); "
            f"use --device cpu or a PyTorch built for CUDA."
        )
    return device
