"""The options of a run, and of the method and the step after it: what there are, and how they are typed."""

import html
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass
from typing import Any, NamedTuple, Protocol, get_args

from fedcli.declarations import START, Method, Post, check_value, fields_of, flag_of, option, spec_of
from fedcli.errors import UserError, unknown
from fedcli.registry import find_post, posts
from fedcli.runs.origins import DEFAULT, Kind, Origin


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
    remainder: str = option(
        "spread",
        "What classes:C does with images that do not divide into equal shards: spread them, or drop them from the last "
        "classes, as earlier versions did",
        choices=("spread", "drop"),
        before="drop",
    )
    partition_seed: int | None = option(None, "Seed of the partition; by default the run's", low=0, high=2**32 - 1)
    num_clients: int = option(10, "Clients in the population", symbol="N", low=1)
    cohort_size: int | None = option(None, "Clients that take part in each round; all by default", symbol="K", low=1)
    weighting: str = option(
        "examples", "What a client counts in the server's means: its examples, or as much as any", before="examples",
        choices=("examples", "uniform"),
    )  # fmt: skip
    rounds: int = option(10, "Communication rounds", symbol="T", low=1)
    post: str | None = option(None, "Step after the last round, on the global model; 'fedcli list --all' shows all")
    validation: float = option(0.0, "Share of a client's images for validation", low=0, high=1, open_high=True, off=0)
    local_test: float = option(0.0, "Share of a client's images for testing", low=0, high=1, open_high=True, off=0)
    train_examples: int | None = option(None, "Size of a stratified training subset", low=1)
    local_epochs: int = option(1, "Passes over a client's data in a round", symbol="E", low=1)
    batch_size: int = option(64, "Samples in a minibatch", symbol="B", low=1)
    public_batch_size: int = option(256, "Public images in a minibatch", low=1)
    drop_last: bool = option(False, "Leave out the last batch of an epoch where it is not full")
    optimizer: str = option("sgd", "Local optimizer, new in every round", choices=("sgd", "adam", "adamw"))
    lr: float = option(0.01, "Learning rate", low=0, open_low=True)
    lr_decay: float = option(1.0, "Factor on the learning rate after each round", low=0, open_low=True, high=1, off=1)
    lr_schedule: str = option(
        "constant",
        "Schedule over all rounds, beside --lr-decay: linear falls to a tenth, cosine to 0, step by ten after half and "
        "after three quarters",
        choices=("constant", "linear", "cosine", "step"),
    )
    warmup_rounds: int = option(0, "Rounds of a lower learning rate at the start, which rises linearly", low=0, off=0)
    momentum: float = option(0.0, "Momentum", low=0, high=1, open_high=True, off=0, only_with={"optimizer": ("sgd",)})
    weight_decay: float = option(0.0, "Coefficient of the L2 penalty's gradient; of adamw's own decay", low=0, off=0)
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
    per_class: bool = option(False, "Record each class's counts of every tested round, for macro-F1 and the like")
    per_client_every: int = option(0, "Record the clients' accuracies of every n-th round", low=0, off=0)
    drift_every: int = option(0, "Measure the drift of the clients' models every n rounds", low=0, off=0)
    checkpoint_every: int | None = option(None, "Checkpoint every n rounds; auto, the default, chooses n", low=1)
    keep_states: bool = option(False, "Keep all client states after the last round, not just some")


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(RunConfig):
    """The options of a run that can start: these have a value, and None stands for what data or machine decide."""

    protocol: str
    dataset: str
    partition_seed: int
    cohort_size: int
    backbone: str


# The panels of `fedcli run METHOD --help`, by the option that each begins with, in the order of `RunConfig`.
PANELS = {"protocol": "Federation", "local_epochs": "Local training", "seed": "Machine", "eval_every": "Output"}
# Options of an experiment rather than of a run; those of a call are keywords of `fedcli.run` too.
CALL_OPTIONS = ("seeds", "tuned", "out", "continue_", "jobs", "log")
EXPERIMENT_OPTIONS = (
    *CALL_OPTIONS, "config", "from_", "log_file", "quiet", "workers", "on", "cpus_per_run", "gpus_per_run",
    "time_limit",
)  # fmt: skip
# Options of a command that may be given several times: in a file a list of them is an option for each.
REPEATABLE_OPTIONS = {"set", "grid"}
# Names that no method's option may have, beside those of the options of a run: what else `run` and `tune` take, as
# commands and in Python.
RESERVED_NAMES = {"method", "progress", "help", "exist_ok", "trials", *REPEATABLE_OPTIONS, *EXPERIMENT_OPTIONS}
# The options that other toolkits call by these names.
FOREIGN_NAMES = {
    "epochs": "local_epochs", "clients_per_round": "cohort_size", "fraction": "cohort_size",
    "join_ratio": "cohort_size", "learning_rate": "lr", "wd": "weight_decay", "model": "backbone",
    "alpha": "partition", "gpu": "device", "resume": "continue_",
}  # fmt: skip


class HasOptions(Protocol):
    """A method or a step after the last round as its file declares it, or a summary of it."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def config(self) -> type:
        """The dataclass of its options."""


class MethodWithOptions(HasOptions, Protocol):
    """A method as its file declares it, or a summary of it."""

    @property
    def title(self) -> str:
        """Its title."""

    @property
    def file(self) -> Any:
        """The file that declares it."""

    @property
    def personal(self) -> Any:
        """Whether each client ends with a model of its own, by its truth."""


def recorded_fields(method: Method, post: Any = None) -> dict[str, Field]:
    """Returns the options that a record of a method can have, by name: of the run, the method and all steps after it.

    A step in a user's file is one of these where `post` names it, the value of `--post` or a tuple of several.
    """
    steps = posts(method)
    names = post if isinstance(post, tuple) else (post,)
    for name in names:
        if isinstance(name, str):
            steps |= posts(method, name)
    return fields_of(RunConfig, method.config, *(step.config for step in steps.values()))


def recorded_field(name: str, method: Method, post: Any = None) -> Field:
    """Returns the declaration of an option that a record of a method can have; see `recorded_fields`.

    Raises:
        UserError: The method has no such option.
    """
    declared = recorded_fields(method, post)
    if name not in declared:
        raise unknown_option(name, method, {}, None)
    return declared[name]


def check_options(options: Mapping[str, Any], method: Method, config_types: Sequence[type]) -> None:
    """Refuses options of a run that none of these dataclasses declares, and values that a declaration does not allow.

    Raises:
        UserError: Names the option.
    """
    declared = fields_of(*config_types)
    for name, value in options.items():
        if name not in declared:
            post = options["post"]
            raise unknown_option(name, method, posts(method, post), post, beside=CALL_OPTIONS)
        check_value(declared[name], value)


def unknown_option(
    name: str,
    method: HasOptions,
    post_steps: Mapping[str, HasOptions],
    post: str | None,
    others: Sequence[HasOptions] = (),
    beside: Sequence[str] = (),
) -> UserError:
    """Returns an error, to be raised by the caller, for an option that a method lacks; `post` is the value of `--post`.

    It suggests an option, also of the `others` that the command names or of those that it takes `beside` them, by its
    letters, its symbol or another toolkit's word for it.
    """
    flag = flag_of(name)
    if flag in map(flag_of, EXPERIMENT_OPTIONS):
        return UserError(
            f"{flag} is an option of the command 'fedcli run', and of no single run (got it among the options of "
            f"'{method.name}'); give it to the command, as in 'fedcli run {method.name} {flag} ...', or leave it out."
        )
    for step in post_steps.values():
        if _normalised(name) in fields_of(step.config):
            got = f"--post {post}" if post else "no --post"
            return UserError(f"{flag} is for --post {step.name} (got {got}); give both or neither.")
    config_types = [other.config for other in others] + [step.config for step in post_steps.values()]
    options = fields_of(RunConfig, method.config, *config_types)
    meant = _option_meant(name, options)
    return unknown(
        f"option of '{method.name}'", flag, map(flag_of, [*options, *beside]),
        f"'fedcli run {method.name} --help' shows all.", flag_of(meant) if meant else "",
    )  # fmt: skip


def _normalised(name: str) -> str:
    """Returns the name of an option as fields have it, from a flag or a word in any case."""
    return name.strip("-").replace("-", "_").lower()


def _option_meant(name: str, options: Mapping[str, Field]) -> str | None:
    """Returns the option that goes by a name in a paper or in another toolkit; None if there is none."""
    options_by_name = {spec_of(field).symbol.lower(): option for option, field in options.items()} | FOREIGN_NAMES
    word = _normalised(name)
    greek_letter = html.unescape(f"&{word};")  # `mu` as µ
    return options_by_name.get(greek_letter, options_by_name.get(word))


def refuse_reserved_names(method: MethodWithOptions, post_steps: Mapping[str, HasOptions]) -> None:
    """Refuses a method whose option has the name of an option of every run, or of a step after it.

    Raises:
        UserError: Names the option.
    """
    step_configs = [step.config for step in post_steps.values()]
    reserved = RESERVED_NAMES | fields_of(RunConfig, *step_configs).keys()
    names = fields_of(method.config).keys() & reserved
    if names:
        raise UserError(f"the option name '{min(names)}' of '{method.name}' is reserved; rename it in {method.file}.")


def refuse_names_of_step(step: Post, method: Method) -> None:
    """Refuses a step after the last round whose option has the name of one of the run or of the method.

    Raises:
        UserError: Names the option.
    """
    taken = RESERVED_NAMES | fields_of(RunConfig, method.config).keys()
    names = fields_of(step.config).keys() & taken
    if names:
        raise UserError(
            f"the option name '{min(names)}' of the step '{step.name}' is that of an option of the run or of "
            f"'{method.name}' (both would have its value); rename it in {step.file}."
        )


def option_panels(method: MethodWithOptions, post_steps: Mapping[str, HasOptions]) -> dict[str, dict[str, Field]]:
    """Returns the options of a method as `{panel title: {name: field}}`: its own, of steps after it, of all methods."""
    panels = {method.title: fields_of(method.config)}
    if not method.personal:  # the steps need a global model
        panels |= {f"With --post {step.name}": fields_of(step.config) for step in post_steps.values()}
    title = ""
    for name, field in fields_of(RunConfig).items():
        title = PANELS.get(name, title)
        panels.setdefault(title, {})[name] = field
    return panels


def filled_up(config: Mapping[str, Any], *config_types: type) -> dict[str, Any]:
    """Returns the options of a record, and those of these dataclasses that it lacks as their `before` says."""
    complete = dict(config)
    for name, field in fields_of(*config_types).items():
        if name not in config:
            complete[name] = spec_of(field).before
    return complete


def recorded_options(config: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """Returns the options by which `resolve` gives a record's run, also where options have been added since."""
    config_types = [RunConfig, method.config]
    if config.get("post") is not None:
        config_types.append(find_post(config["post"], method).config)
    return filled_up(config, *config_types)


def inactive_term(config: Mapping[str, Any], method: Method) -> str:
    """Returns a remark on a run that ends before the method's own term starts; empty for another run."""
    start = config.get(START, 0)
    if start < config["rounds"]:
        return ""
    simpler, _ = method.reduces_to or ("the method without it", {})
    return (
        f"the method's own term, which starts after {start} rounds: this run is {simpler}; lower {flag_of(START)}, or "
        "give more --rounds"
    )


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed on the command line, without those that are None."""
    flags = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no-{name}"))
        elif isinstance(value, list):  # it may be repeated
            flags += [f"{flag_of(name)}={item}" for item in value]
        elif value is not None:
            flags.append(f"{flag_of(name)}={value}")
    return flags


def given_options(options: Mapping[str, Any], origins: Mapping[str, Origin]) -> dict[str, Any]:
    """Returns the options of a run that the user has given in any way; the others follow from these."""
    return {name: value for name, value in options.items() if origins.get(name, DEFAULT).kind is Kind.USER}


def parse_size(text: str) -> int:
    """Returns the bytes of `--state-memory`, a number, perhaps with K, M, G or T for powers of 1024."""
    size = re.fullmatch(r"([0-9]+)([KMGT]?)", text.upper())
    if size is None:
        raise UserError(f"--state-memory must be a number of bytes (got '{text}'); write it as 256M or 4G.")
    number, unit = size.groups()
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    return int(number) * 1024 ** powers[unit]


def parse_values(field: Field, text: str) -> tuple[Any, ...]:
    """Returns the values of an option, each once, from a text with commas between them, as "0.01,0.1".

    Raises:
        UserError: A value is of the wrong type or out of range.
    """
    types = get_args(field.type) or (field.type,)
    values = []
    for part in text.split(","):
        value = _parse_value(part.strip(), types)
        check_value(field, value)
        values.append(value)
    return tuple(dict.fromkeys(values))


def _parse_value(text: str, types: Sequence[Any]) -> Any:
    """Returns the value of one of these types that a text says; the text where it says none."""
    truth_values = {"true": True, "false": False}
    if bool in types and text.lower() in truth_values:
        return truth_values[text.lower()]
    for number_type in (int, float):  # a whole number is an int where both are allowed
        if number_type in types:
            with suppress(ValueError):
                return number_type(text)
    return text


class TypedOption(NamedTuple):
    """An option as it is typed on a command line."""

    flag: str
    value: str  # of a switch, the word after it


def options_among(words: Sequence[str]) -> list[TypedOption]:
    """Returns the options among the words of a command line, in order; one may stand there twice."""
    typed = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            typed.append(TypedOption(flag, value if equals else following))
    return typed


def typed_options(args: Sequence[str]) -> dict[str, str]:
    """Returns the values of the options among arguments, by name; that of a switch, x or no_x, is the word after it."""
    return {typed.flag[2:].replace("-", "_"): typed.value for typed in options_among(args)}
