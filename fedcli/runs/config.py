"""The configuration of a run: its options, where each value comes from, and what is refused before anything starts.

Options are typed, or stand in a TOML file or the record of another run; lists of values make a grid.
"""

import html
import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from fedcli.data.files import reading
from fedcli.declarations import START, DataSetting, Method, Post, Protocol, check_value, flag_of, option
from fedcli.errors import UserError, unknown
from fedcli.registry import default_protocol, find_method, find_post, find_protocol, posts
from fedcli.userfiles import absolute, is_from_file, own_paths

DEFAULT_DATASET = "digits"


@dataclass(frozen=True)
class RunConfig:
    """The options of every method. None stands for what the data or the machine decide."""

    protocol: str | None = option(None, "A paper's set-up; has the value of every option below that you do not give")
    dataset: str | None = option(None, "Data set, or ./file.py:NAME; 'fedcli data list' shows all")
    public_dataset: str | None = option(None, "Data set of unlabelled public images, for methods that need it")
    public_examples: int | None = option(None, "Public images to use; all by default", low=1)
    partition: str = option(
        "iid",
        "How the examples are divided among clients: iid, dirichlet:A, classes:C, dominant:C, missing:X, domains, "
        "writers; file:split.json with your own lists; or ./file.py:NAME",
    )
    partition_seed: int | None = option(None, "Seed of the partition; by default the run's", low=0, high=2**32 - 1)
    num_clients: int = option(10, "Clients in the population", symbol="N", low=1)
    cohort_size: int | None = option(None, "Clients that take part in each round; all by default", symbol="K", low=1)
    rounds: int = option(10, "Communication rounds", symbol="T", low=1)
    post: str | None = option(None, "Step after the last round, on the global model; 'fedcli list --all' shows all")
    validation: float = option(0.0, "Share of a client's images for validation", low=0, high=1, open_high=True, off=0)
    local_test: float = option(0.0, "Share of a client's images for testing", low=0, high=1, open_high=True, off=0)
    train_examples: int | None = option(None, "Size of a stratified training subset", low=1)
    local_epochs: int = option(1, "Passes over a client's data in a round", symbol="E", low=1)
    batch_size: int = option(64, "Samples in a minibatch", symbol="B", low=1)
    public_batch_size: int = option(256, "Public images in a minibatch", low=1)
    drop_last: bool = option(False, "Leave out the last batch of an epoch where it is not full")
    optimizer: str = option("sgd", "Local optimizer, new in every round", choices=("sgd", "adam"))
    lr: float = option(0.01, "Learning rate", low=0, open_low=True)
    lr_decay: float = option(1.0, "Factor on the learning rate after each round", low=0, open_low=True, high=1, off=1)
    lr_schedule: str = option(
        "constant", "Schedule beside --lr-decay; linear falls to a tenth", choices=("constant", "linear")
    )
    momentum: float = option(0.0, "Momentum", low=0, high=1, open_high=True, off=0, only_with={"optimizer": ("sgd",)})
    weight_decay: float = option(0.0, "Coefficient of the L2 penalty's gradient", low=0, off=0)
    backbone: str | None = option(None, "Network, or ./file.py:NAME; a list A,B,C is assigned to the clients in turn")
    seed: int = option(0, "Seed of the initial model, the cohorts and the batches", low=0, high=2**32 - 1)
    device: str = option("auto", "auto, cpu, cuda or cuda:N; auto is cuda where there is one")
    precision: str = option("float32", "Arithmetic of training", choices=("float32", "float64", "tf32", "bf16"))
    clients_per_chunk: str = option(
        "auto",
        "Clients trained together, 1 to the cohort size: N stacks them in one computation, branches:N runs parallel "
        "branches; auto is 1 on a CPU and tuned on CUDA",
    )
    state_memory: str | None = option(None, "RAM for client states, e.g. 4G; a quarter by default; the rest is on disk")
    eval_every: int = option(1, "Evaluate every n rounds and after the last", low=1)
    drift_every: int = option(0, "Measure the drift of the clients' models every n rounds", low=0, off=0)
    checkpoint_every: int | None = option(None, "Checkpoint every n rounds; auto, the default, chooses n", low=1)
    keep_states: bool = option(False, "Keep all client states after the last round, not just some")


# The panels of `fedcli run METHOD --help`, by the first option of each.
PANELS = {"protocol": "Federation", "local_epochs": "Local training", "seed": "Machine", "eval_every": "Output"}
# Of an experiment and not of a run, typed like options, and most of them taken by `fedcli.run` too.
EXPERIMENT = (
    "seeds", "tuned", "out", "continue_", "jobs", "config", "from_", "log_file", "log", "quiet", "workers", "on",
    "cpus_per_run", "gpus_per_run", "time_limit",
)  # fmt: skip
RESERVED = {"method", "grid", "progress", "help", "exist_ok", *EXPERIMENT}  # names that no method's option may have
# What others call our options.
WORDS = {
    "epochs": "local_epochs", "clients_per_round": "cohort_size", "fraction": "cohort_size",
    "join_ratio": "cohort_size", "learning_rate": "lr", "wd": "weight_decay", "model": "backbone",
    "alpha": "partition", "gpu": "device", "resume": "continue_",
}  # fmt: skip


def fields_of(*kinds: type) -> dict[str, Field]:
    """The options that these configurations have, by name."""
    return {field.name: field for kind in kinds for field in fields(kind)}


def recorded_fields(method: Method) -> dict[str, Field]:
    """The options that a record of a method can have, by name: of the run, the method and all steps after it."""
    return fields_of(RunConfig, method.config, *(post.config for post in posts(method).values()))


def unknown_option(name: str, method: Method, steps: Mapping[str, Post], chosen: str | None) -> UserError:
    """An error, to be raised by the caller, for an option that a method does not have; `chosen` is `--post`.

    It suggests an option by its symbol or another toolkit's word for it.
    """
    options = fields_of(RunConfig, method.config, *(step.config for step in steps.values()))
    word = name.strip("-").replace("-", "_").lower()
    for step in steps.values():
        if word in fields_of(step.config):
            got = f"--post {chosen}" if chosen else "no --post"
            return UserError(f"{flag_of(name)} is for --post {step.name} (got {got}); give both or neither.")
    meant = {field.metadata["symbol"].lower(): name for name, field in options.items()} | WORDS
    guess = meant.get(html.unescape(f"&{word};"), meant.get(word))  # `mu` as the Greek letter too
    return unknown(
        f"option of '{method.name}'", flag_of(name), map(flag_of, [*options, *EXPERIMENT]),
        f"'fedcli run {method.name} --help' shows all.", flag_of(guess) if guess else "",
    )  # fmt: skip


def option_panels(method: Method, steps: Mapping[str, Post]) -> dict[str, dict[str, Field]]:
    """The options of a method as `{panel title: {name: field}}`: its own, those of steps after it, those of all.

    Raises:
        UserError: An option of the method has the name of another option.
    """
    after = {f"With --post {post.name}": fields_of(post.config) for post in steps.values()}
    for name in fields_of(method.config).keys() & {*fields_of(RunConfig), *RESERVED}.union(*after.values()):
        raise UserError(f"the option name '{name}' of '{method.name}' is reserved; rename it in {method.file}.")
    panels, title = {method.title: fields_of(method.config)} | ({} if method.personal else after), ""
    for name, field in fields_of(RunConfig).items():
        title = PANELS.get(name, title)
        panels.setdefault(title, {})[name] = field
    return panels


def filled_up(config: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
    """The options of a record, and those of these kinds that it lacks as their `before` says."""
    before = {name: field.metadata["before"] for name, field in fields_of(*kinds).items() if name not in config}
    return {**config, **before}


def recorded_options(config: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """The options by which `resolve` gives a record's run, also where options have been added since."""
    steps = [] if config.get("post") is None else [find_post(config["post"], method).config]
    return filled_up(config, RunConfig, method.config, *steps)


def num_images(dataset: str, local_test: float | None = None) -> int | None:
    """Images of a data set that clients have, with `local_test` also the test images; None where files must tell."""
    from fedcli.data import datasets  # late, here and below: help and refusals of options need no PyTorch

    try:
        described = datasets.describe(dataset)
    except UserError:
        return None
    sizes = described["train"], described["test"] if local_test else 0
    return None if None in sizes else sum(sizes)


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
    def data_sets(self) -> tuple[str, ...]:
        """The data sets that the run reads."""
        return tuple(filter(None, (self.run.dataset, self.run.public_dataset)))

    def values(self) -> dict[str, Any]:
        """All options, the run's, the method's and those of the step after it, as one flat dict."""
        return {**vars(self.run), **vars(self.options), **(vars(self.post_options) if self.post else {})}


def inactive_term(config: Mapping[str, Any], method: Method) -> str:
    """A remark on a run that ends before the method's own term starts; empty for another run."""
    start, (simpler, _) = config.get(START, 0), method.reduces_to or ("the method without it", {})
    late = f"the method's own term, which starts after {start} rounds: this run is {simpler}"
    return f"{late}; lower {flag_of(START)}, or give more --rounds" if start >= config["rounds"] else ""


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed on the command line, without those that are None."""
    flags = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no-{name}"))
        elif value is not None:
            flags.append(f"{flag_of(name)}={value}")
    return flags


def given_options(values: Mapping[str, Any], origin: Mapping[str, str]) -> dict[str, Any]:
    """The options of a run that were given in any way; the others follow from these."""
    return {
        name: value for name, value in values.items()
        if not origin.get(name, "default").startswith(("default", "protocol ", "seed", "num_clients"))
    }  # fmt: skip


def resolve(
    method: Method, given: Mapping[str, Any], *, sources: Mapping[str, str] | None = None, need_data: bool = True
) -> Setup:
    """Puts together what was given, the protocol's values and the defaults; reads no data.

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
    protocol = find_protocol(given["protocol"], method) if "protocol" in given else None
    dataset = given.get("dataset") or default_dataset(method, protocol)
    if need_data:
        datasets.available(dataset)
    protocol = protocol or default_protocol(method, dataset)
    name = {**protocol.settings, **given}.get("post")
    post = None if name is None else find_post(name, method)
    kinds = [RunConfig, method.config, *([post.config] if post else [])]
    values, origin = default_options(protocol, dataset, method.name, *kinds)
    values |= given
    origin |= {name: (sources or {}).get(name, "command line") for name in given}
    allowed = fields_of(*kinds)
    for name, value in values.items():
        if name not in allowed:
            raise unknown_option(name, method, posts(method, values["post"]), values["post"])
        check_value(allowed[name], value)
    for name, source in (("partition_seed", "seed"), ("cohort_size", "num_clients")):
        if values[name] is None:
            values[name], origin[name] = values[source], source
    if not method.uses_public_data and "public_dataset" not in given:
        values["public_dataset"] = None  # the protocol's, for the methods that need one
    values["partition"] = partition.from_flag(values["partition"]).flag  # dirichlet:.5 is dirichlet:0.5
    run, options, *post_options = (kind(**{name: values[name] for name in fields_of(kind)}) for kind in kinds)
    _refuse_combinations(run, method, protocol)
    selection = protocol.selection
    if selection == "best-validation" and run.validation == 0:
        selection, origin["selection"] = "last", "no validation part"
    return Setup(
        method, options, run, protocol, protocol.datasets.get(dataset), partition.from_flag(run.partition), selection,
        find_device(run.device), origin, post, *post_options,
    )  # fmt: skip


def _as_recorded(name: str, value: Any, method: Method) -> Any:
    """The value of an option as it is recorded: full names, absolute paths of a user's files."""
    from fedcli.data import datasets

    if name == "clients_per_chunk" or not isinstance(value, str):
        return str(value) if name == "clients_per_chunk" else value
    if name in ("protocol", "post") and not is_from_file(value):
        return (find_protocol if name == "protocol" else find_post)(value, method).name
    return absolute(datasets.find_name(value) if name in ("dataset", "public_dataset") else value)


def default_dataset(method: Method, protocol: Protocol | None = None) -> str:
    """The data set where none is given: the only one of a named protocol, or a built-in one that the paper has."""
    from fedcli.data import datasets

    if protocol is None:
        suited = [name for name in datasets.BUILT_IN if name in default_protocol(method, name).datasets]
    else:
        suited = protocol.datasets if len(protocol.datasets) == 1 else []
    return next(iter(suited), DEFAULT_DATASET)


def default_options(protocol: Protocol, dataset: str, method: str = "", *kinds: type) -> tuple[dict, dict]:
    """The options of these kinds, or of `RunConfig` alone, where none is given, and where each comes from."""
    values = {name: field.default for name, field in fields_of(*(kinds or (RunConfig,))).items()}
    values |= {"protocol": protocol.name, "dataset": dataset}
    origin, source = dict.fromkeys(values, "default"), f"protocol {protocol.name}"
    layers = {source: {**protocol.settings, **protocol.method_options.get(method, {})}}
    if setting := protocol.datasets.get(dataset):
        special = setting.method_options.get(method, {})
        layers[f"{source}, {dataset}"] = {"backbone": setting.backbone, **setting.settings, **special}
    for source, layer in layers.items():
        values |= layer
        origin |= dict.fromkeys(layer, source)
    return values, origin


def _refuse_combinations(run: RunConfig, method: Method, protocol: Protocol) -> None:
    """Refuses options that cannot run together."""
    from fedcli.core import backbones, engine

    networks = set(run.backbone.split(",")) if run.backbone else set()
    for name in networks:
        backbones.find(name)
    engine.parse_chunk(run.clients_per_chunk, 1)
    parse_size(run.state_memory or "0")
    mixed, on_clients, public = len(networks) > 1, protocol.evaluation == "clients", run.public_dataset
    drift, paper = f"--drift-every {run.drift_every}", f"the protocol {protocol.name}"
    no_model = f"needs a global model of one network (got '{method.name}' with {run.backbone}); leave it out"
    has_model = method.personal is None and not mixed
    faults = {
        f"--cohort-size {run.cohort_size} is larger than --num-clients {run.num_clients}; use as many or fewer":
            run.cohort_size > run.num_clients,
        f"{paper} has networks for {', '.join(protocol.datasets) or 'no data set'} (got --dataset {run.dataset} and no "
        "--backbone); choose one of these, or add --backbone, e.g. cnn-small": not networks,
        f"'{method.name}' needs one network for all clients (got --backbone {run.backbone}); name one of them":
            mixed and not method.mixed_networks,
        f"{paper} uses no --local-test (got {run.local_test:g}); leave it out":
            run.local_test and not on_clients,
        f"'{method.name}' uses no public images (got --public-dataset {public}); leave it out":
            public and not method.uses_public_data,
        f"'{method.name}' needs public images (got no --public-dataset); name a data set; 'fedcli data list' shows all":
            method.uses_public_data and not public,
        f"--post {run.post} {no_model}": run.post and not has_model,
        f"{drift} {no_model}": run.drift_every and not has_model,
        f"{drift} needs common test images (got {paper}, which has none); leave it out": run.drift_every and on_clients,
    }  # fmt: skip
    for text, is_wrong in faults.items():
        if is_wrong:
            raise UserError(f"{text}.")


def parse_size(text: str) -> int:
    """The bytes of `--state-memory`, a number, perhaps with K, M, G or T for powers of 1024."""
    size = re.fullmatch(r"([0-9]+)([KMGT]?)", text.upper())
    if size is None:
        raise UserError(f"--state-memory must be a number of bytes (got '{text}'); write it as 256M or 4G.")
    return int(size[1]) * 1024 ** " KMGT".index(size[2] or " ")


def find_device(name: str) -> Any:
    """The `torch.device` of that name, if it is here; auto is CUDA where there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    numbered = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if name not in ["cpu", *numbered, *(["cuda"] if numbered else [])]:
        raise UserError(
            f"--device must be auto, cpu, cuda or cuda:N (got '{name}'); this machine has {len(numbered)} CUDA devices."
        )
    return torch.device(name)


def parse_values(field: Field, text: str) -> tuple[Any, ...]:
    """The values of an option, each once, from a text with commas between them, as "0.01,0.1".

    Raises:
        UserError: A value is of the wrong type or out of range.
    """
    kinds, values = get_args(field.type) or (field.type,), []
    for part in map(str.strip, text.split(",")):
        value: Any = {"true": True, "false": False}.get(part.lower(), part) if bool in kinds else part
        for kind in (float, int):  # a whole number is an int where both are allowed
            with suppress(ValueError):
                value = kind(part) if kind in kinds else value
        check_value(field, value)
        values.append(value)
    return tuple(dict.fromkeys(values))


def typed_options(args: list[str]) -> dict[str, str]:
    """The options among arguments, by name, with their values; that of a switch is the word after it."""
    typed = {}
    for word, following in itertools.zip_longest(args, args[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            typed[flag[2:].replace("-", "_").removeprefix("no_")] = value if equals else following
    return typed


def expand(args: list[str], command: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of a command with the options that `--config` and `--from` stand for, the method first.

    Typed options override those of the file, and these those of the run; `--seed` overrides `--seeds`, and the other
    way round. A list in a file stands for several values.

    Returns:
        The arguments, and where the options come from that were not typed, by name.

    Raises:
        UserError: A file cannot be read, no method is named, or a file of the user's is not.
    """
    typed = typed_options(args)
    if not args[0].startswith("-"):
        typed["method"], *args = args
    in_file = _options_in_file(typed["config"]) if "config" in typed else {}
    in_run: dict[str, Any] = {}
    if "from" in typed:
        from fedcli.runs.records import read_record  # late, as it imports PyTorch

        record = read_record(Path(typed["from"]))
        # Not what came from the protocol: it comes from there again, and follows where another one is given.
        in_run = {
            "method": record["method_source"], "protocol": record["config"].get("protocol"),
            "dataset": record["config"].get("dataset"), **given_options(record["config"], record["origin"]),
        }  # fmt: skip
    seeds = {"seed", "seeds"}
    if seeds & {*typed, *in_file}:
        in_run.pop("seed", None)
    taken = typed.keys() | (seeds if seeds & typed.keys() else ())
    options = {name: value for name, value in {**in_run, **in_file}.items() if name not in taken}
    for name, value in options.items():
        if name not in in_file and own_paths([value]):
            part = value if name == "method" else f"{flag_of(name)} {value}"
            raise UserError(f"'{typed['from']}' has code of yours in {part}, run only if you name it; add {part}.")
    method = typed.get("method", options.pop("method", None))
    if not isinstance(method, str):
        raise UserError(
            f"no method given (got {args[0]}); write 'fedcli {command} METHOD', see 'fedcli list', or set method = "
            '"fedavg" in the --config file.'
        )
    if in_run and (chosen := find_method(method.split(",")[0])).name != record["method"]:
        options = {
            name: value for name, value in options.items() if name in in_file or name in recorded_fields(chosen)
        }  # fmt: skip
    sources = {name: f"file {typed['config']}" if name in in_file else f"run {typed['from']}" for name in options}
    return [method, *flags_of(options), *args], sources


def _options_in_file(path: str) -> dict[str, Any]:
    """The options in a TOML file for `--config`, and `method`; its keys have dashes or underscores."""
    with reading(path, "a TOML file, e.g. lr = 0.1"):
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    options = {}
    for key, value in table.items():
        if isinstance(value, dict) or key in ("config", "from"):
            raise UserError(f"'{key}' in '{path}' is no option with a value or a list (got {value!r}); leave it out.")
        if key not in ("quiet", "continue") or value is not False:  # these two have no form that begins with `--no-`
            options[key.replace("-", "_")] = ",".join(map(str, value)) if isinstance(value, list) else value
    return options


def read_tuned(path: str | Path, method: Method) -> tuple[dict[str, Any], str]:
    """The options for a method in `tuned.json`, which `fedcli tune` has written, and where they come from."""
    file = Path(path) / "tuned.json" if Path(path).is_dir() else Path(path)
    with reading(file, "what 'fedcli tune' wrote"):
        best = json.loads(file.read_text())
        if best["method"] != method.name:
            raise UserError(f"--tuned {path} has options of '{best['method']}' (got '{method.name}'); tune this one.")
        return dict(best["options"]), f"tuned by validation accuracy, seed {best['seed']}"
