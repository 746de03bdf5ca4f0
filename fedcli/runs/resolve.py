"""From options to a set-up that can start: values of protocol and data set, defaults, and what is refused.

Data that is given by its path is imported, under a name of its own. Else nothing is read of the data, and nothing
is written.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, replace
from typing import Any, NamedTuple

from fedcli.declarations import (
    SELECTIONS,
    DataSetting,
    Method,
    Post,
    Protocol,
    check_value,
    fields_of,
    flag_of,
    in_declared_type,
    spec_of,
)
from fedcli.errors import UserError
from fedcli.registry import default_protocol, find_post, find_protocol, posts
from fedcli.runs.options import (
    ResolvedConfig,
    RunConfig,
    check_options,
    parse_size,
    refuse_names_of_step,
    refuse_reserved_names,
)
from fedcli.runs.origins import DEFAULT, FOLLOWS, NO_VALIDATION, TYPED, Origin, of_other_option, of_protocol, of_source
from fedcli.userfiles import make_absolute, names_user_file, resolve_beside

DEFAULT_DATASET = "digits"


@dataclass(frozen=True)
class Setup:
    """A run that has been checked and can start."""

    method: Method
    config: ResolvedConfig
    method_config: Any  # the method's Config
    protocol: Protocol
    data_setting: DataSetting | None  # what the protocol says of the data set, if anything
    partition: Any  # fedcli.core.partition.Partition
    selection: str
    device: Any  # torch.device
    origins: dict[str, Origin]  # of the options, and of `selection` where it is not the protocol's
    post: Post | None = None  # the step after the last round
    post_config: Any = None  # its Config

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return self.config.dataset

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The data sets that the run reads."""
        return tuple(filter(None, (self.config.dataset, self.config.public_dataset)))

    def all_options(self) -> dict[str, Any]:
        """Returns the options of the run, the method and the step after it, by name."""
        options = {**vars(self.config), **vars(self.method_config)}
        if self.post is not None:
            options |= vars(self.post_config)
        return options

    def with_seed(self, seed: int) -> "Setup":
        """The same run with another seed that was typed, which is the partition's too where that has none of its own.

        Raises:
            UserError: The seed is out of range.
        """
        check_value(fields_of(RunConfig)["seed"], seed)
        seeds: dict[str, Any] = {"seed": seed}
        for name, other in FOLLOWS.items():
            if other == "seed" and self.origins[name] == of_other_option(other):
                seeds[name] = seed
        return replace(self, config=replace(self.config, **seeds), origins={**self.origins, "seed": TYPED})


class OptionsWithOrigins(NamedTuple):
    """Options by name, and where each of them comes from."""

    options: dict[str, Any]
    origins: dict[str, Origin]


def resolve(
    method: Method, given: Mapping[str, Any], *, sources: Mapping[str, str] | None = None, need_data: bool = True
) -> Setup:
    """Puts together the options that were given, the protocol's and the defaults; imports data given as a path.

    Args:
        method: The method.
        given: Options by name. None is a value here, as a record has it, in place of the protocol's; an option that
            was not given must not be among them.
        sources: Where those of them come from that were not typed.
        need_data: Whether the data set must be on this machine.

    Raises:
        UserError: The first reason why it cannot run.
    """
    from fedcli.core import partition
    from fedcli.data import datasets

    refuse_reserved_names(method, posts(method))
    recorded = {name: _as_recorded(name, value, method) for name, value in given.items()}
    asked = _with_imported_data(recorded)
    named_protocol = find_protocol(asked["protocol"], method) if "protocol" in asked else None
    dataset = asked.get("dataset") or default_dataset(method, named_protocol)
    if need_data:
        datasets.refuse_unavailable(dataset)
    protocol = named_protocol or default_protocol(method, dataset)
    post_name = {**protocol.settings, **asked}.get("post")
    post = None if post_name is None else find_post(post_name, method)
    config_types = [RunConfig, method.config]
    if post is not None:
        refuse_names_of_step(post, method)
        config_types.append(post.config)
    defaults = default_options(protocol, dataset, method.name, *config_types)
    combined = _put_over(defaults, asked, sources or {}, method)
    check_options(combined.options, method, config_types)
    options, origins = _complete(combined, fields_of(*config_types))
    if not method.uses_public_data and "public_dataset" not in asked:
        options["public_dataset"] = None  # the protocol's, for the methods that need one
        origins["public_dataset"] = DEFAULT
    _refuse_combinations(_config_with(options, RunConfig), method, protocol)
    config = _config_with(options, ResolvedConfig)
    selection = protocol.selection
    if SELECTIONS[selection].needs_validation and config.validation == 0:
        selection = "last"
        origins["selection"] = NO_VALIDATION
    return Setup(
        method=method,
        config=config,
        method_config=_config_with(options, method.config),
        protocol=protocol,
        data_setting=protocol.datasets.get(dataset),
        partition=partition.from_flag(config.partition, config.remainder),
        selection=selection,
        device=find_device(config.device),
        origins=origins,
        post=post,
        post_config=None if post is None else _config_with(options, post.config),
    )


def _put_over(
    defaults: OptionsWithOrigins, asked: Mapping[str, Any], sources: Mapping[str, str], method: Method
) -> OptionsWithOrigins:
    """Returns the options that were asked for, and the defaults of the others.

    Args:
        defaults: The defaults, in which a user's file is meant as one beside the method's.
        asked: The options that were asked for, by name.
        sources: Where those of them come from that were not typed.
        method: The method.
    """
    options = {name: resolve_beside(method.file.parent, value) for name, value in defaults.options.items()}
    options |= asked
    origins = {**defaults.origins, **dict.fromkeys(asked, TYPED)}
    origins |= {name: of_source(text) for name, text in sources.items() if name in asked}
    return OptionsWithOrigins(options, origins)


def _complete(combined: OptionsWithOrigins, declared: Mapping[str, Field]) -> OptionsWithOrigins:
    """Returns the declared options in their types and spelling, and for a missing one the option that it follows."""
    from fedcli.core import partition

    options = {name: in_declared_type(field, combined.options[name]) for name, field in declared.items()}
    origins = dict(combined.origins)
    for name, other in FOLLOWS.items():
        if options[name] is None:
            options[name] = options[other]
            origins[name] = of_other_option(other)
    options["partition"] = partition.from_flag(options["partition"]).flag  # dirichlet:.5 is dirichlet:0.5
    return OptionsWithOrigins(options, origins)


def _config_with(options: Mapping[str, Any], config_type: type) -> Any:
    """Returns a dataclass of options, with those of these that it declares."""
    return config_type(**{name: options[name] for name in fields_of(config_type)})


def _with_imported_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """Imports data sets that are given as paths; returns the options with the full name of each data set."""
    from fedcli.data.imports import import_if_path

    named = dict(given)
    for option in ("dataset", "public_dataset"):
        if isinstance(given.get(option), str):
            named[option] = import_if_path(given[option])
    return named


def _as_recorded(name: str, value: Any, method: Method) -> Any:
    """Returns the value of an option as it is recorded: full names, absolute paths of a user's files."""
    if name == "clients_per_chunk":
        return str(value)
    if name == "checkpoint_every" and value == "auto":
        return None
    if not isinstance(value, str):
        if name in ("protocol", "dataset", "post") and value is not None:  # by which the other options are found
            raise UserError(f"{flag_of(name)} must be of type str (got {value!r}); give its name, as a text.")
        return value
    if name == "protocol" and not names_user_file(value):
        return find_protocol(value, method).name
    if name == "post" and not names_user_file(value):
        return find_post(value, method).name
    return make_absolute(value)


def default_dataset(method: Method, protocol: Protocol | None = None) -> str:
    """Returns the data set where none is given: the only one of a protocol, or a built-in one that the paper has."""
    from fedcli.data.catalog import BUILT_IN

    if protocol is None:
        suited = [name for name in BUILT_IN if name in default_protocol(method, name).datasets]
    else:
        suited = list(protocol.datasets) if len(protocol.datasets) == 1 else []
    return next(iter(suited), DEFAULT_DATASET)


def default_options(protocol: Protocol, dataset: str, method: str = "", *config_types: type) -> OptionsWithOrigins:
    """Returns the options of these dataclasses, or of `RunConfig` alone, where none is given."""
    declared = fields_of(*(config_types or (RunConfig,)))
    options = {name: field.default for name, field in declared.items()}
    options |= {"protocol": protocol.name, "dataset": dataset}
    origins = dict.fromkeys(options, DEFAULT)
    protocol_options = {**protocol.settings, **protocol.method_options.get(method, {})}
    options |= protocol_options
    origins |= dict.fromkeys(protocol_options, of_protocol(protocol.name))
    setting = protocol.datasets.get(dataset)
    if setting is not None:
        dataset_options = {"backbone": setting.backbone, **setting.settings, **setting.method_options.get(method, {})}
        options |= dataset_options
        origins |= dict.fromkeys(dataset_options, of_protocol(protocol.name, dataset))
    return OptionsWithOrigins(options, origins)


def _refuse_combinations(config: RunConfig, method: Method, protocol: Protocol) -> None:
    """Refuses options that cannot run together."""
    from fedcli.runs.chunking import parse_chunking

    parse_chunking(config.clients_per_chunk)
    parse_size(config.state_memory or "0")
    if config.cohort_size is not None and config.cohort_size > config.num_clients:
        raise UserError(
            f"--cohort-size {config.cohort_size} is larger than --num-clients {config.num_clients}; use as many or "
            "fewer."
        )
    _refuse_networks(config, method, protocol)
    if config.local_test and protocol.evaluation != "clients":
        raise UserError(f"the protocol {protocol.name} uses no --local-test (got {config.local_test:g}); leave it out.")
    _refuse_public_images(config, method)
    if method.optimizers and config.optimizer not in method.optimizers:
        raise UserError(
            f"'{method.name}' counts on steps along gradients (got --optimizer {config.optimizer}); choose --optimizer "
            f"{' or '.join(method.optimizers)}."
        )
    if config.per_client_every:
        _refuse_client_accuracies(config, method, protocol)
    if config.drift_every and protocol.evaluation == "clients":
        raise UserError(
            f"--drift-every {config.drift_every} needs common test images (got the protocol {protocol.name}, which has "
            "none); leave it out."
        )


def _refuse_networks(config: RunConfig, method: Method, protocol: Protocol) -> None:
    """Refuses networks that there are not, that the method cannot mix, or that what follows cannot use."""
    from fedcli.core import backbones

    networks = set(config.backbone.split(",")) if config.backbone else set()
    for name in networks:
        backbones.find(name)  # refuses an unknown one
    if not networks:
        raise UserError(
            f"the protocol {protocol.name} has networks for {', '.join(protocol.datasets) or 'no data set'} (got "
            f"--dataset {config.dataset} and no --backbone); choose one of these, or add --backbone, e.g. cnn-small."
        )
    if len(networks) > 1 and not method.mixed_networks:
        raise UserError(
            f"'{method.name}' needs one network for all clients (got --backbone {config.backbone}); name one of them."
        )
    if method.personal is not None or len(networks) > 1:
        reason = f"needs a global model of one network (got '{method.name}' with {config.backbone}); leave it out."
        if config.post:
            raise UserError(f"--post {config.post} {reason}")
        if config.drift_every:
            raise UserError(f"--drift-every {config.drift_every} {reason}")


def _refuse_public_images(config: RunConfig, method: Method) -> None:
    """Refuses public images for a method without a use for them, and a method that needs them without any."""
    if config.public_dataset and not method.uses_public_data:
        raise UserError(
            f"'{method.name}' uses no public images (got --public-dataset {config.public_dataset}); leave it out."
        )
    if method.uses_public_data and not config.public_dataset:
        raise UserError(
            f"'{method.name}' needs public images (got no --public-dataset); name a data set; 'fedcli data list' "
            "shows all."
        )


def _refuse_client_accuracies(config: RunConfig, method: Method, protocol: Protocol) -> None:
    """Refuses `--per-client-every` where rounds are not tested, or clients have nothing of their own to be tested."""
    if config.per_client_every % config.eval_every:
        raise UserError(
            f"--per-client-every {config.per_client_every} has rounds that are not tested (got --eval-every "
            f"{config.eval_every}); choose a multiple of it."
        )
    has_own_models = protocol.evaluation == "server" and method.personal is not None
    if not config.validation and protocol.evaluation != "clients" and not has_own_models:
        raise UserError(
            f"--per-client-every {config.per_client_every} needs images or models of the clients' own (got "
            f"--validation 0 and '{method.name}' under the protocol {protocol.name}); give --validation 0.1, or leave "
            "it out."
        )


def refuse_without_effect(setup: Setup) -> None:
    """Refuses typed options that have no effect; a protocol, a record and a file may have such."""
    from fedcli.core import partition

    options = setup.all_options()
    for name, field in fields_of(RunConfig, setup.method.config).items():
        spec = spec_of(field)
        is_typed = setup.origins[name] == TYPED and options[name] != field.default
        if is_typed and spec.is_idle(options):
            others = ", ".join(f"{flag_of(other)} {options[other]}" for other in spec.only_with)
            raise UserError(f"{flag_of(name)} is for {spec.need_text} (got {others}); leave it out.")
    is_typed = setup.origins["remainder"] == TYPED and setup.config.remainder != RunConfig.remainder
    if is_typed and not partition.takes_remainder(setup.config.partition):
        raise UserError(f"--remainder is for --partition classes:C (got {setup.config.partition}); leave it out.")


def find_device(name: str) -> Any:
    """Returns the `torch.device` of that name, if it is here; auto is CUDA where there is one."""
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
