"""What a method file and a paper file declare: methods, protocols, tables, claims, and the options of all."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType, NoneType
from typing import Any, ClassVar, get_args

from fedcli.errors import UserError
from fedcli.userfiles import blame, file_hash, is_own


def flag_of(name: str) -> str:
    """An option's name as it is typed on the command line."""
    return "--" + name.strip("-_").replace("_", "-")


LARGEST = {int: 2**31 - 1, float: 3e38}  # of options without a bound of their own; what PyTorch takes as float32
FACTS = "option"  # the key of `OptionFacts` in the metadata of a field


@dataclass(frozen=True, kw_only=True)
class OptionFacts:
    """What the declaration of an option says of it; `option` explains each of these."""

    default: Any
    help: str
    symbol: str
    source: str
    unit: str
    low: float | None
    high: float | None
    open_low: bool
    open_high: bool
    off: Any
    choices: tuple[str, ...]
    tune: tuple[float, ...]
    before: Any
    only_with: Mapping[str, tuple[str, ...]]

    @property
    def range_text(self) -> str:
        """The values that the option allows; empty for any."""
        if self.choices:
            return " or ".join(self.choices)
        bounds = []
        if self.low is not None:
            sign = ">" if self.open_low else ">="
            bounds.append(f"{sign} {self.low}")
        if self.high is not None:
            sign = "<" if self.open_high else "<="
            bounds.append(f"{sign} {self.high}")
        return " and ".join(bounds)

    @property
    def need_text(self) -> str:
        """The options and values with which the option is used; empty for any."""
        needs = self.only_with.items()
        return " and ".join(f"{flag_of(name)} {' or '.join(values)}" for name, values in needs)

    @property
    def help_text(self) -> str:
        """The help of the option in a line."""
        text = self.help
        origin = ", ".join(filter(None, (self.symbol, self.source, self.unit)))
        if origin:
            text += f" ({origin})"
        if self.range_text:
            text += f"; {self.range_text}"
        if self.off is not None:
            text += f"; {self.off} switches it off"
        if self.only_with:
            text += f"; for {self.need_text}"
        return f"{text}."

    def is_idle(self, values: Mapping[str, Any]) -> bool:
        """Whether the option is not used beside these values of the others."""
        return any(values.get(name) not in needed for name, needed in self.only_with.items())

    def check(self, flag: str, value: Any) -> None:
        """Refuses a value, of a type that the option has, that it does not allow; `flag` is its name in the message.

        Raises:
            UserError: It is none of the choices or outside of the range.
        """
        if self.choices and value not in self.choices:
            raise UserError(f"{flag} must be {self.range_text} (got '{value}'); choose one of them.")
        if type(value) in LARGEST:
            self._check_range(flag, value)

    def _check_range(self, flag: str, value: float) -> None:
        """Refuses a number outside of the range, or larger than PyTorch takes."""
        largest = LARGEST[type(value)]
        low = -largest if self.low is None else self.low
        high = largest if self.high is None else self.high
        is_at_open_end = (value == low and self.open_low) or (value == high and self.open_high)
        is_inside = low <= value <= high and not is_at_open_end  # a NaN is not
        if not is_inside:
            is_too_large = not abs(value) <= largest
            bounded = replace(self, low=low, high=high) if is_too_large else self
            raise UserError(f"{flag} must be {bounded.range_text} (got {value}); choose a value in that range.")


def option(  # noqa: PLR0913  # a declaration: one keyword for each fact of an option
    default: Any,
    help: str,
    *,
    symbol: str = "",
    source: str = "",
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
    off: Any = None,
    choices: tuple[str, ...] = (),
    tune: tuple[float, ...] = (),
    before: Any = MISSING,
    only_with: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Any:
    """A dataclass field that becomes a command-line option by itself.

    Args:
        default: Its default value.
        help: What it is, in a sentence without a full stop.
        symbol: Its symbol in the paper.
        source: The equation, table or section it stands in.
        unit: Its unit.
        low: Smallest value allowed; None for no bound.
        high: Largest value allowed.
        open_low: Whether `low` itself is refused.
        open_high: Whether `high` itself is refused.
        off: The value that switches the term off, if there is one.
        choices: The strings allowed; empty for any.
        tune: Values worth trying where the option is tuned.
        before: Value that records without this option are taken to have; the default if not given.
        only_with: The option is used only when these options have one of these values.
    """
    facts = OptionFacts(
        default=default,
        help=help,
        symbol=symbol,
        source=source,
        unit=unit,
        low=low,
        high=high,
        open_low=open_low,
        open_high=open_high,
        off=off,
        choices=choices,
        tune=tune,
        before=default if before is MISSING else before,
        only_with=only_with,
    )
    return field(default=default, metadata={FACTS: facts})


def facts_of(field: Field) -> OptionFacts:
    """What the declaration of a configuration's option says of it.

    Raises:
        UserError: The field is not made by `option`.
    """
    if FACTS not in field.metadata:
        raise UserError(
            f"the option '{field.name}' has no help and no range (got a plain field of its Config); make it by "
            "fedcli.option(DEFAULT, HELP)."
        )
    return field.metadata[FACTS]


def paper_of(name: str) -> str:
    """The paper of a protocol, a table or a claim, whose names are `paper:ID`."""
    paper, _, _ = name.partition(":")
    return paper


START = "start_round"  # an option of this name says after how many rounds a method's own term starts
SELECTIONS = {  # rules for the headline of a run, in words
    "best-validation": "round with the best validation accuracy",
    "best-test": "round with the best test accuracy",
    "last": "last round",
    "mean-last-3": "mean of the last three tested rounds",
}


def check_value(field: Field, value: Any) -> None:
    """Refuses a value that an option, made by `option`, does not allow.

    Raises:
        UserError: It is of another type or outside of the range.
    """
    flag = flag_of(field.name)
    facts = facts_of(field)
    kinds = {*get_args(field.type)} or {field.type}
    is_whole_float = type(value) is int and float in kinds
    if type(value) not in kinds and not is_whole_float:
        names = " or ".join(sorted(kind.__name__ for kind in kinds - {NoneType}))
        raise UserError(f"{flag} must be of type {names} (got {value!r}); give a value of that type.")
    facts.check(flag, value)


@dataclass(frozen=True)
class DataSetting:
    """What a protocol says of one data set."""

    backbone: str
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    source: str  # where the constants come from
    augmentation: str = "none"
    top_k: int = 1  # a test image counts as right if its class is among the k most likely
    settings: Mapping[str, Any] = field(default_factory=dict)  # run options for this data set
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of single methods for it


@dataclass(frozen=True)
class PublicSetting:
    """What a protocol says of one set of public images."""

    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    source: str
    augmentation: str = "none"


@dataclass(frozen=True)
class Protocol:
    """An experimental set-up of a paper: what is fixed when methods are compared."""

    name: str  # `paper:setting`, as in `--protocol`
    summary: str  # one sentence
    source: str  # section or table of the paper
    settings: Mapping[str, Any]  # run options by field name of `RunConfig`; the command line overrides them
    datasets: Mapping[str, DataSetting]  # by data set; another one needs `--backbone`
    selection: str  # headline of a run, see `SELECTIONS`
    evaluation: str = "server"  # or "clients" or "domains", see fedcli/core/evaluation.py
    # By set of public images; another one is normalised by its own mean and not augmented.
    public: Mapping[str, PublicSetting] = field(default_factory=dict)
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of single methods; a data set's win
    notes: tuple[str, ...] = ()  # where each value comes from that the paper does not give
    # What the paper's text has where the protocol and the methods' defaults follow the authors' code, without a full
    # stop; empty where the two agree or there is no code. A run in full is by the one or by the other.
    text_has: str = ""

    @property
    def paper(self) -> str:
        """The paper, as its name begins."""
        return paper_of(self.name)


@dataclass(frozen=True)
class Cell:
    """A number of a paper's table, and the run that gives ours."""

    row: str  # as `method` in papers/reported.json
    column: str  # as `column` there
    method: str  # name of the method that is run
    settings: Mapping[str, Any]  # run and method options by field name, protocol and data set among them
    metric: str = "selected"  # what is read from the run's record; see fedcli/results/metrics.py


@dataclass(frozen=True)
class Gain:
    """A number of a paper's table that follows from others: some rows' mean less that of other rows."""

    row: str  # as `method` in papers/reported.json
    column: str  # as `column` there
    more: tuple[str, ...]  # the rows whose mean it is
    less: tuple[str, ...]  # the rows whose mean is subtracted
    of: str | tuple[str, ...] = ""  # the columns that are compared, by their mean; empty for its own
    best: bool = False  # subtract the best of `less` and not their mean

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are compared."""
        if isinstance(self.of, tuple):
            return self.of
        return (self.of or self.column,)


@dataclass(frozen=True)
class Table:
    """A table of a paper, as runs."""

    name: str  # `paper:ID`, as in `fedcli table paper:ID`
    title: str  # what the table shows, one line
    reported: tuple[str, str]  # the paper and the table in papers/reported.json
    cells: tuple[Cell, ...]  # row by row; cells of the same method and settings share their runs
    seeds: tuple[int, ...] = (0, 1, 2)  # of each run
    notes: tuple[str, ...] = ()  # what the paper leaves open, and rows that it does not have
    gains: tuple[Gain, ...] = ()  # numbers that follow from its cells


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper that can be right or wrong: a row of a table is ahead of another."""

    name: str  # `paper:ID`
    text: str  # the sentence in our words, without a full stop
    table: str  # name of the table whose cells are compared
    row: str  # the row that the sentence is about
    than: str | tuple[str, ...]  # the row that it is compared with, or several, of which each must be behind
    columns: tuple[str, ...]  # the mean of the differences counts
    direction: str = "higher"  # or "lower": the sign of the row minus the other in the paper
    # Options that a smaller form of the claim may have, with their values, or None for any; sizes (rounds, images,
    # clients, ...) may always be smaller.
    instead: Mapping[str, Any] = field(default_factory=dict)
    less: tuple[str, ...] = ()  # columns whose mean difference is subtracted: is the lead larger than in these?
    see: str = ""  # the study, if any, that limits what the runs say
    # The names of rows in columns where they do not stand under their own, as "FedAvg w/o skew" for "FedAvg".
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    # Columns of the row that it is compared with, where they are others than `columns`; then partitions may differ.
    than_columns: tuple[str, ...] = ()
    # Why it holds whatever is run, by construction or arithmetic, without a full stop; then it is not counted among
    # the reproduced.
    construction: str = ""
    # A row of `than` that has something of the row alone, and what: where the row is ahead of the others and not of
    # this one, that explains the lead.
    control: tuple[str, str] | None = None

    @property
    def paper(self) -> str:
        """The paper, as its name begins."""
        return paper_of(self.name)

    @property
    def others(self) -> tuple[str, ...]:
        """The rows of `than`."""
        return (self.than,) if isinstance(self.than, str) else self.than


def grid(
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    columns: Mapping[str, Mapping[str, Any]],
    metric: str = "selected",
) -> tuple[Cell, ...]:
    """Every row with every column.

    Args:
        rows: Method and settings of each row.
        columns: Settings of each column; a row's own override them.
        metric: What is read from each record.
    """
    cells = []
    for row, (method, of_row) in rows.items():
        for column, of_column in columns.items():
            cells.append(Cell(row, column, method, {**of_column, **of_row}, metric))
    return tuple(cells)


@dataclass(frozen=True)
class Sizes:
    """The sizes that a method's costs depend on, in floats or counts."""

    parameters: int
    num_classes: int
    feature_dim: int


def both_ways(floats: Callable[[Sizes], int]) -> Callable[..., tuple[int, int]]:
    """Costs of a method whose clients each receive and send so many floats in a round."""

    def costs(state: Any, cohort: Any, fed: Any, config: Any) -> tuple[int, int]:
        total = len(cohort.client_ids) * floats(fed.sizes)
        return total, total

    return costs


def params_both_ways(state: Any, cohort: Any, fed: Any, config: Any) -> tuple[int, int]:
    """Costs of a method whose clients each receive and send what its state has in `params`, a part of a model."""
    total = len(cohort.client_ids) * sum(value.numel() for value in state.params.values())
    return total, total


def rows_by_class(width: Callable[[Sizes], int]) -> Callable[..., tuple[int, int]]:
    """Costs of a method whose clients each receive a row for every class, and send rows of the classes they have."""

    def costs(state: Any, cohort: Any, fed: Any, config: Any) -> tuple[int, int]:
        has_class = fed.class_counts(cohort) > 0
        return has_class.numel() * width(fed.sizes), int(has_class.sum()) * width(fed.sizes)

    return costs


class _Declared(ABC):
    """What a method and a step know of the file that declares them."""

    _home: ClassVar[ModuleType | None] = None  # the user's file, see `declare_in`

    @property
    @abstractmethod
    def _function(self) -> Callable[..., Any]:
        """The function that does its work."""

    @property
    def module(self) -> ModuleType:
        """The module of the file."""
        return self._home or self.origin

    @property
    def origin(self) -> ModuleType:
        """The module of its function, which is another where a user's file changes a paper's method."""
        return sys.modules[self._function.__module__]

    def declare_in(self, module: ModuleType) -> None:
        """Says that a user's file declares it, unless another file has been said to."""
        if self._home is None:
            object.__setattr__(self, "_home", module)  # no field, so that `replace` does not copy it

    @property
    def file(self) -> Path:
        """The file."""
        assert self.module.__file__ is not None  # what is declared stands in a file
        return Path(self.module.__file__)

    @property
    def file_hash(self) -> str:
        """SHA-256 of the file, its first 16 hexadecimal digits."""
        return file_hash(self.file) if is_own(self.module) else _packaged_hash(self.file)

    def blamed(self, *passes: type[Exception]) -> AbstractContextManager[None]:
        """Blames a user's file, and no paper's, for what is raised inside, but for `passes`; see `blame`."""
        return blame(self.file, passes=passes) if is_own(self.module) else nullcontext()


@cache
def _packaged_hash(file: Path) -> str:
    """The hash of a file that stays as it is while a program runs."""
    return file_hash(file)


def global_model(state: Any) -> tuple[dict, dict]:
    """The fields `params` and `buffers` of a state."""
    if not (hasattr(state, "params") and hasattr(state, "buffers")):
        fault = f"the state has no params and buffers (got {type(state).__name__})"
        raise UserError(f"{fault}; let init and run_round return a NamedTuple with both, or declare Method(model=...).")
    return state.params, state.buffers


@dataclass(frozen=True)
class Method(_Declared):
    """A method, as its file declares it.

    Attributes:
        name: As on the command line.
        title: Full name of the method, one line.
        config: Frozen dataclass of its options, each made by `option`.
        init: `(fed, config) -> state` before the first round.
        run_round: `(state, cohort, fed, config) -> (state, terms)`; terms `[K]` by name, for the record.
        reduces_to: Law 1: `(method, overrides)` under which the parameters equal that method's; None without such.
        state_types: The NamedTuple classes of its state, by which a checkpoint is read. What a client keeps is called
            `ClientState`, in the field `clients` of the server's state.
        variants: Named options in place of the defaults, under which the laws must hold too.
        costs: Law 9: `(state, cohort, fed, config)` to the floats down and up, summed over the cohort, without buffers;
            None where training decides them.
        default_protocol: Used without `--protocol`; empty for the first of the method's file, or that of the method to
            which it reduces.
        client_memory: Floats that a client holds: copies of the model, one by default, and what the method adds.
        model: From a state to parameters and buffers of the global model that is tested; by default its fields
            `params` and `buffers`.
        personal: From a state to `(params, buffers)` by id of each client that has taken part, where every client
            keeps a model; None where a global one is tested.
        shared: From a state to parameters and buffers of the global model that there is beside personal ones; it is
            tested too, and the personal ones are the headline. None where there is none.
        prototypes: From a state to `(prototypes [C, D], has_class [C])`, where the method classifies by the nearest
            prototype; None where it classifies by the head.
        mixed_networks: Whether its clients may have different networks.
        uses_public_data: Whether it needs `--public-dataset`.
        optimizers: The values of `--optimizer` that it allows; empty for all. A method that takes what a client has
            moved for a multiple of gradients allows "sgd" alone.
        numerics: Version of its numbers, to be increased when a change of the file changes results; records with
            another one are outdated.
    """

    name: str
    title: str
    config: type
    init: Callable[..., Any]
    run_round: Callable[..., tuple[Any, dict]]
    reduces_to: tuple[str, dict[str, Any]] | None = None
    _: KW_ONLY
    state_types: tuple[type, ...]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    costs: Callable[..., tuple[int, int]] | None = None
    default_protocol: str = ""
    client_memory: Callable[[Sizes], int] = field(default=lambda sizes: sizes.parameters)
    model: Callable[[Any], tuple[dict, dict]] = global_model
    personal: Callable[[Any], dict[int, tuple[dict, dict]]] | None = None
    shared: Callable[[Any], tuple[dict, dict]] | None = None
    prototypes: Callable[[Any], tuple[Any, Any]] | None = None
    mixed_networks: bool = False
    uses_public_data: bool = False
    optimizers: tuple[str, ...] = ()
    numerics: int = 1

    @property
    def _function(self) -> Callable[..., Any]:
        return self.run_round

    @property
    def tested(self) -> str:
        """Which model the headline is of: "global" or "personal", each client's own."""
        return "global" if self.personal is None else "personal"


@dataclass(frozen=True)
class Post(_Declared):
    """A step on the global model after the last round, as its file declares it."""

    name: str  # as in `--post`
    title: str  # full name, one line
    config: type  # frozen dataclass of its options, each made by `option`; no other option has their names
    # `(params, buffers, fed, config) -> (params, buffers, floats_up)`: the model after the step, and the floats that a
    # client sends for it, as a mean over the clients.
    apply: Callable[..., tuple[dict, dict, int]]

    @property
    def _function(self) -> Callable[..., Any]:
        return self.apply
