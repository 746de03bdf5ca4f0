"""From options to a set-up that can start: values of protocol and data set, defaults, and what is refused.

Data that is given by its path is imported, under a name of its own. Else nothing is read of the data, and nothing
is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fedcli.declarations import DataSetting, Method, Post, Protocol, check_value, facts_of, flag_of
from fedcli.errors import UserError
from fedcli.registry import default_protocol, find_post, find_protocol, posts
from fedcli.runs.options import RunConfig, fields_of, option_panels, parse_size, unknown_option
from fedcli.userfiles import absolute, is_from_file

DEFAULT_DATASET = "digits"
FOLLOWS = {"partition_seed": "seed", "cohort_size": "num_clients"}  # options that are another one where none is given


@dataclass(frozen=True)
class Setup:
    """A run that has been checked and can start."""

    method: Method
    options: Any  # the method's Config
    run: RunConfig  # no None but for what the data decide
    protocol: Protocol
    setting: DataSetting | None  # what the protocol says of the data set, if anything
    partition: Any  # fedcli.core.partition.Partition
    selection: str
    device: Any  # torch.device
    origin: dict[str, str]  # of each value: "command line", "protocol ...", "default", ...
    post: Post | None = None  # the step after the last round
    post_options: Any = None  # its Config

    @property
    def dataset(self) -> str:
        """The data set's name."""
        assert self.run.dataset is not None  # `resolve` has chosen one
        return self.run.dataset

    @property
    def cohort_size(self) -> int:
        """Clients in each round, K; all where none are given."""
        return self.run.cohort_size or self.run.num_clients

    @property
    def partition_seed(self) -> int:
        """Seed of the partition; the run's where none is given."""
        return self.run.seed if self.run.partition_seed is None else self.run.partition_seed

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The data sets that the run reads."""
        return tuple(filter(None, (self.run.dataset, self.run.public_dataset)))

    def values(self) -> dict[str, Any]:
        """All options, the run's, the method's and those of the step after it, as one flat dict."""
        values = {**vars(self.run), **vars(self.options)}
        if self.post is not None:
            values |= vars(self.post_options)
        return values

    def with_seed(self, seed: int) -> "Setup":
        """The same run with another seed that was typed, which is the partition's too where that has none of its own.

        Raises:
            UserError: The seed is out of range.
        """
        check_value(fields_of(RunConfig)["seed"], seed)
        run = replace(self.run, seed=seed)
        if self.origin["partition_seed"] == "seed":
            run = replace(run, partition_seed=seed)
        return replace(self, run=run, origin={**self.origin, "seed": "command line"})


def resolve(
    method: Method, given: Mapping[str, Any], *, sources: Mapping[str, str] | None = None, need_data: bool = True
) -> Setup:
    """Puts together what was given, the protocol's values and the defaults; imports data given as a path.

    Args:
        method: The method.
        given: Options by name; None stands for the default, whatever the protocol says.
        sources: Where options come from that were not typed, for `Setup.origin`.
        need_data: Whether the data set must be on this machine.

    Raises:
        UserError: The first reason why it cannot run.
    """
    from fedcli.core import partition
    from fedcli.data import datasets

    option_panels(method, posts(method))  # refuses clashes of names
    given = {name: _as_recorded(name, value, method) for name, value in given.items()}
    given = _with_imported_data(given)
    protocol = find_protocol(given["protocol"], method) if "protocol" in given else None
    dataset = given.get("dataset") or default_dataset(method, protocol)
    if need_data:
        datasets.available(dataset)
    protocol = protocol or default_protocol(method, dataset)
    post_name = {**protocol.settings, **given}.get("post")
    post = None if post_name is None else find_post(post_name, method)
    kinds = [RunConfig, method.config]
    if post is not None:
        kinds.append(post.config)
    values, origin = default_options(protocol, dataset, method.name, *kinds)
    values |= given
    origin |= {name: (sources or {}).get(name, "command line") for name in given}
    allowed = fields_of(*kinds)
    for name, value in values.items():
        if name not in allowed:
            raise unknown_option(name, method, posts(method, values["post"]), values["post"])
        check_value(allowed[name], value)
    for name, other in FOLLOWS.items():
        if values[name] is None:
            values[name] = values[other]
            origin[name] = other
    if not method.uses_public_data and "public_dataset" not in given:
        values["public_dataset"] = None  # the protocol's, for the methods that need one
    values["partition"] = partition.from_flag(values["partition"]).flag  # dirichlet:.5 is dirichlet:0.5
    run = _filled(RunConfig, values)
    options = _filled(method.config, values)
    post_options = None if post is None else _filled(post.config, values)
    _refuse_combinations(run, method, protocol)
    selection = protocol.selection
    if selection == "best-validation" and run.validation == 0:
        selection = "last"
        origin["selection"] = "no validation part"
    return Setup(
        method=method,
        options=options,
        run=run,
        protocol=protocol,
        setting=protocol.datasets.get(dataset),
        partition=partition.from_flag(run.partition, run.remainder),
        selection=selection,
        device=find_device(run.device),
        origin=origin,
        post=post,
        post_options=post_options,
    )


def _filled(kind: type, values: Mapping[str, Any]) -> Any:
    """A configuration of a kind, with those of the values that are its options."""
    return kind(**{name: values[name] for name in fields_of(kind)})


def _with_imported_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """Imports data sets that are given as paths; returns the options with the full name of each data set."""
    from fedcli.data.imports import import_if_path

    named = dict(given)
    for option in ("dataset", "public_dataset"):
        if isinstance(given.get(option), str):
            named[option] = import_if_path(given[option])
    return named


def _as_recorded(name: str, value: Any, method: Method) -> Any:
    """The value of an option as it is recorded: full names, absolute paths of a user's files."""
    if name == "clients_per_chunk":
        return str(value)
    if not isinstance(value, str):
        return value
    if name == "protocol" and not is_from_file(value):
        return find_protocol(value, method).name
    if name == "post" and not is_from_file(value):
        return find_post(value, method).name
    return absolute(value)


def default_dataset(method: Method, protocol: Protocol | None = None) -> str:
    """The data set where none is given: the only one of a named protocol, or a built-in one that the paper has."""
    from fedcli.data.catalog import BUILT_IN

    if protocol is None:
        suited = [name for name in BUILT_IN if name in default_protocol(method, name).datasets]
    else:
        suited = list(protocol.datasets) if len(protocol.datasets) == 1 else []
    return next(iter(suited), DEFAULT_DATASET)


class Defaults(NamedTuple):
    """Options where none is given, by name."""

    values: dict[str, Any]
    origin: dict[str, str]  # where each comes from


def default_options(protocol: Protocol, dataset: str, method: str = "", *kinds: type) -> Defaults:
    """The options of these kinds, or of `RunConfig` alone, where none is given."""
    values = {name: field.default for name, field in fields_of(*(kinds or (RunConfig,))).items()}
    values |= {"protocol": protocol.name, "dataset": dataset}
    origin = dict.fromkeys(values, "default")
    source = f"protocol {protocol.name}"
    layers = {source: {**protocol.settings, **protocol.method_options.get(method, {})}}
    setting = protocol.datasets.get(dataset)
    if setting is not None:
        special = setting.method_options.get(method, {})
        layers[f"{source}, {dataset}"] = {"backbone": setting.backbone, **setting.settings, **special}
    for source, layer in layers.items():
        values |= layer
        origin |= dict.fromkeys(layer, source)
    return Defaults(values, origin)


def _refuse_combinations(run: RunConfig, method: Method, protocol: Protocol) -> None:
    """Refuses options that cannot run together."""
    from fedcli.core import engine

    engine.parse_chunking(run.clients_per_chunk, default=1)
    parse_size(run.state_memory or "0")
    if run.cohort_size is not None and run.cohort_size > run.num_clients:
        raise UserError(
            f"--cohort-size {run.cohort_size} is larger than --num-clients {run.num_clients}; use as many or fewer."
        )
    _refuse_networks(run, method, protocol)
    if run.local_test and protocol.evaluation != "clients":
        raise UserError(f"the protocol {protocol.name} uses no --local-test (got {run.local_test:g}); leave it out.")
    _refuse_public_images(run, method)
    if method.optimizers and run.optimizer not in method.optimizers:
        raise UserError(
            f"'{method.name}' counts on steps along gradients (got --optimizer {run.optimizer}); choose --optimizer "
            f"{' or '.join(method.optimizers)}."
        )
    if run.per_client_every:
        _refuse_no_clients(run, method, protocol)
    if run.drift_every and protocol.evaluation == "clients":
        raise UserError(
            f"--drift-every {run.drift_every} needs common test images (got the protocol {protocol.name}, which has "
            "none); leave it out."
        )


def _refuse_networks(run: RunConfig, method: Method, protocol: Protocol) -> None:
    """Refuses networks that there are not, that the method cannot mix, or that what follows cannot use."""
    from fedcli.core import backbones

    networks = set(run.backbone.split(",")) if run.backbone else set()
    for name in networks:
        backbones.find(name)  # refuses an unknown one
    if not networks:
        raise UserError(
            f"the protocol {protocol.name} has networks for {', '.join(protocol.datasets) or 'no data set'} (got "
            f"--dataset {run.dataset} and no --backbone); choose one of these, or add --backbone, e.g. cnn-small."
        )
    if len(networks) > 1 and not method.mixed_networks:
        raise UserError(
            f"'{method.name}' needs one network for all clients (got --backbone {run.backbone}); name one of them."
        )
    if method.personal is not None or len(networks) > 1:
        needs = f"needs a global model of one network (got '{method.name}' with {run.backbone}); leave it out."
        if run.post:
            raise UserError(f"--post {run.post} {needs}")
        if run.drift_every:
            raise UserError(f"--drift-every {run.drift_every} {needs}")


def _refuse_public_images(run: RunConfig, method: Method) -> None:
    """Refuses public images for a method without a use for them, and a method that needs them without any."""
    if run.public_dataset and not method.uses_public_data:
        raise UserError(
            f"'{method.name}' uses no public images (got --public-dataset {run.public_dataset}); leave it out."
        )
    if method.uses_public_data and not run.public_dataset:
        raise UserError(
            f"'{method.name}' needs public images (got no --public-dataset); name a data set; 'fedcli data list' "
            "shows all."
        )


def _refuse_no_clients(run: RunConfig, method: Method, protocol: Protocol) -> None:
    """Refuses `--per-client-every` where rounds are not tested, or clients have nothing of their own to be tested."""
    if run.per_client_every % run.eval_every:
        raise UserError(
            f"--per-client-every {run.per_client_every} has rounds that are not tested (got --eval-every "
            f"{run.eval_every}); choose a multiple of it."
        )
    has_own_models = protocol.evaluation == "server" and method.personal is not None
    if not run.validation and protocol.evaluation != "clients" and not has_own_models:
        raise UserError(
            f"--per-client-every {run.per_client_every} needs images or models of the clients' own (got --validation 0 "
            f"and '{method.name}' under the protocol {protocol.name}); give --validation 0.1, or leave it out."
        )


def refuse_without_effect(setup: Setup) -> None:
    """Refuses typed options that have no effect; a protocol, a record and a file may have such."""
    values = setup.values()
    for name, field in fields_of(RunConfig, setup.method.config).items():
        facts = facts_of(field)
        is_typed = setup.origin[name] == "command line" and values[name] != field.default
        if is_typed and facts.is_idle(values):
            others = ", ".join(f"{flag_of(other)} {values[other]}" for other in facts.only_with)
            raise UserError(f"{flag_of(name)} is for {facts.need_text} (got {others}); leave it out.")
    is_typed = setup.origin["remainder"] == "command line" and setup.run.remainder != RunConfig.remainder
    if is_typed and "classes:" not in setup.run.partition:
        raise UserError(f"--remainder is for --partition classes:C (got {setup.run.partition}); leave it out.")


def find_device(name: str) -> Any:
    """The `torch.device` of that name, if it is here; auto is CUDA where there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count()
    names = ["cpu", *[f"cuda:{index}" for index in range(count)]]
    if count > 0:
        names.append("cuda")
    if name not in names:
        raise UserError(
            f"--device must be auto, cpu, cuda or cuda:N (got '{name}'); this machine has {count} CUDA devices."
        )
    return torch.device(name)
