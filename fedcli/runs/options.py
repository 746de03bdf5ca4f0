"""The options of a run, and of the method and the step after it: what there are, and how they are typed."""

import html
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from typing import Any, Protocol, get_args

from fedcli.declarations import START, Method, check_value, facts_of, flag_of, option
from fedcli.errors import UserError, unknown
from fedcli.registry import find_post, posts


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


def fields_of(*kinds: type) -> dict[str, Field]:
    """The options that these configurations have, by name."""
    return {field.name: field for kind in kinds for field in fields(kind)}


def recorded_fields(method: Method) -> dict[str, Field]:
    """The options that a record of a method can have, by name: of the run, the method and all steps after it."""
    return fields_of(RunConfig, method.config, *(post.config for post in posts(method).values()))


def unknown_option(
    name: str,
    method: HasOptions,
    steps: Mapping[str, HasOptions],
    chosen: str | None,
    others: Sequence[HasOptions] = (),
) -> UserError:
    """An error, to be raised by the caller, for an option that a method does not have; `chosen` is `--post`.

    It suggests an option, also of the `others` that the command names, by its letters, its symbol or another toolkit's
    word for it.
    """
    kinds = [other.config for other in others] + [step.config for step in steps.values()]
    options = fields_of(RunConfig, method.config, *kinds)
    word = name.strip("-").replace("-", "_").lower()
    for step in steps.values():
        if word in fields_of(step.config):
            got = f"--post {chosen}" if chosen else "no --post"
            return UserError(f"{flag_of(name)} is for --post {step.name} (got {got}); give both or neither.")
    meant = {facts_of(field).symbol.lower(): name for name, field in options.items()} | WORDS
    guess = meant.get(html.unescape(f"&{word};"), meant.get(word))  # `mu` as the Greek letter too
    return unknown(
        f"option of '{method.name}'", flag_of(name), map(flag_of, [*options, *EXPERIMENT]),
        f"'fedcli run {method.name} --help' shows all.", flag_of(guess) if guess else "",
    )  # fmt: skip


def option_panels(method: MethodWithOptions, steps: Mapping[str, HasOptions]) -> dict[str, dict[str, Field]]:
    """The options of a method as `{panel title: {name: field}}`: its own, those of steps after it, those of all.

    Raises:
        UserError: An option of the method has the name of another option.
    """
    after = {f"With --post {post.name}": fields_of(post.config) for post in steps.values()}
    for name in fields_of(method.config).keys() & {*fields_of(RunConfig), *RESERVED}.union(*after.values()):
        raise UserError(f"the option name '{name}' of '{method.name}' is reserved; rename it in {method.file}.")
    panels = {method.title: fields_of(method.config)}
    if not method.personal:  # the steps need a global model
        panels |= after
    title = ""
    for name, field in fields_of(RunConfig).items():
        title = PANELS.get(name, title)
        panels.setdefault(title, {})[name] = field
    return panels


def filled_up(config: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
    """The options of a record, and those of these kinds that it lacks as their `before` says."""
    before = {name: facts_of(field).before for name, field in fields_of(*kinds).items() if name not in config}
    return {**config, **before}


def recorded_options(config: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """The options by which `resolve` gives a record's run, also where options have been added since."""
    steps = [] if config.get("post") is None else [find_post(config["post"], method).config]
    return filled_up(config, RunConfig, method.config, *steps)


def inactive_term(config: Mapping[str, Any], method: Method) -> str:
    """A remark on a run that ends before the method's own term starts; empty for another run."""
    start = config.get(START, 0)
    simpler, _ = method.reduces_to or ("the method without it", {})
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


def parse_size(text: str) -> int:
    """The bytes of `--state-memory`, a number, perhaps with K, M, G or T for powers of 1024."""
    size = re.fullmatch(r"([0-9]+)([KMGT]?)", text.upper())
    if size is None:
        raise UserError(f"--state-memory must be a number of bytes (got '{text}'); write it as 256M or 4G.")
    number, unit = size.groups()
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    return int(number) * 1024 ** powers[unit]


def parse_values(field: Field, text: str) -> tuple[Any, ...]:
    """The values of an option, each once, from a text with commas between them, as "0.01,0.1".

    Raises:
        UserError: A value is of the wrong type or out of range.
    """
    kinds = get_args(field.type) or (field.type,)
    values = []
    for part in text.split(","):
        value = _parse_value(part.strip(), kinds)
        check_value(field, value)
        values.append(value)
    return tuple(dict.fromkeys(values))


def _parse_value(text: str, kinds: Sequence[Any]) -> Any:
    """The value of one of these types that a text says; the text where it says none."""
    truths = {"true": True, "false": False}
    if bool in kinds and text.lower() in truths:
        return truths[text.lower()]
    for kind in (int, float):  # a whole number is an int where both are allowed
        if kind in kinds:
            with suppress(ValueError):
                return kind(text)
    return text


def typed_options(args: list[str]) -> dict[str, str]:
    """The options among arguments, by name, with their values; that of a switch is the word after it."""
    typed = {}
    for word, following in itertools.zip_longest(args, args[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            typed[flag[2:].replace("-", "_").removeprefix("no_")] = value if equals else following
    return typed
