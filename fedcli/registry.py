"""What a method file and a paper file declare, and how they are found: by name, or in a file of the user's own."""

import ast
import builtins
import dataclasses
import hashlib
import importlib
import importlib.util
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from traceback import walk_tb
from types import ModuleType, NoneType
from typing import Any, ClassVar, TypeVar, get_args

from fedcli.errors import UserError, unknown


def option(
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
    before: Any = dataclasses.MISSING,
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
        off: The value that switches the term off; None where there is none.
        choices: The strings allowed; empty for any.
        tune: Values worth trying where the option is tuned.
        before: What runs did whose records lack the option, where that is not its default.
    """
    metadata = {
        "help": help, "symbol": symbol, "source": source, "unit": unit, "low": low, "high": high,
        "open_low": open_low, "open_high": open_high, "off": off, "choices": choices,
        "tune": tune, "before": default if before is dataclasses.MISSING else before,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """An option's name as it is typed on the command line."""
    return "--" + name.strip("-_").replace("_", "-")


def spelt(text: str, known: Iterable[str]) -> str:
    """The known name that a text is, whatever the case of its letters; the text itself where it is none."""
    known = list(known)
    return text if text in known else {name.lower(): name for name in known}.get(text.lower(), text)


def describe_range(metadata: Mapping[str, Any]) -> str:
    """The values an option allows, as text; empty where all are."""
    if metadata["choices"]:
        return " or ".join(metadata["choices"])
    low, high = metadata["low"], metadata["high"]
    parts = []
    if low is not None:
        parts.append(f"{'>' if metadata['open_low'] else '>='} {low}")
    if high is not None:
        parts.append(f"{'<' if metadata['open_high'] else '<='} {high}")
    return " and ".join(parts)


def help_text(metadata: Mapping[str, Any]) -> str:
    """The help of an option: what it is, symbol, source, unit, range and the value that switches it off."""
    place = ", ".join(part for part in (metadata["symbol"], metadata["source"], metadata["unit"]) if part)
    text = metadata["help"] + (f" ({place})" if place else "")
    if allowed := describe_range(metadata):
        text += f"; {allowed}"
    if metadata["off"] is not None:
        text += f"; {metadata['off']} switches it off"
    return text + "."


LARGEST = {int: 2**31 - 1, float: 3e38}  # of numbers without a bound of their own; what PyTorch takes as float32


def check_value(field: dataclasses.Field, value: Any) -> None:
    """Refuses a value of the wrong type or outside of an option's range.

    Args:
        field: A field made by `option`.
        value: What was given.

    Raises:
        UserError: Naming the option, the value and what is allowed.
    """
    flag, metadata = flag_of(field.name), field.metadata
    kinds = {*get_args(field.type)} or {field.type}
    if type(value) not in kinds | ({int} if float in kinds else set()):
        names = " or ".join(sorted(kind.__name__ for kind in kinds - {NoneType}))
        raise UserError(f"{flag} must be of type {names} (got {value!r}); give a value of that type.")
    allowed = describe_range(metadata)
    if metadata["choices"]:
        if value not in metadata["choices"]:
            raise UserError(f"{flag} must be {allowed} (got '{value}'); choose one of them.")
        return
    if isinstance(value, bool | str) or value is None:
        return
    low, high, most = metadata["low"], metadata["high"], LARGEST[type(value)]
    too_low = low is not None and (value <= low if metadata["open_low"] else value < low)
    too_high = high is not None and (value >= high if metadata["open_high"] else value > high)
    if isinstance(value, float) and not math.isfinite(value):
        allowed = f"finite and {allowed}" if allowed else "finite"
    elif high is None and abs(value) > most:
        allowed = f"from {-most if low is None else low} to {most}"
    elif not (too_low or too_high):
        return
    text = f"{value:g}" if isinstance(value, float) or abs(value) < 10**300 else "a number of over 300 digits"
    raise UserError(f"{flag} must be {allowed} (got {text}); choose a value in that range.")


@dataclass(frozen=True)
class DataSetting:
    """What a protocol says of one data set."""

    backbone: str
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    source: str  # where the constants come from
    augmentation: str = "none"
    top_k: int = 1  # a test image counts as right if its class is among the k most likely
    settings: Mapping[str, Any] = field(default_factory=dict)  # run options that differ for this data set
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # likewise of single methods


@dataclass(frozen=True)
class PublicSetting:
    """What a protocol says of one set of public images."""

    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    source: str
    augmentation: str = "none"


@dataclass(frozen=True)
class Protocol:
    """An experimental set-up of a paper: what is fixed when methods are compared.

    Attributes:
        name: `paper:setting`, as in `--protocol`.
        summary: One sentence.
        source: Section or table of the paper.
        settings: Run options by field name of `RunConfig`; each is overridden by the command line.
        datasets: What goes with which data set; another data set needs `--backbone`.
        selection: Headline of a run: "best-validation", "last", "mean-last-3" or "best-test".
        evaluation: "server", "clients" or "domains", see fedcli/core/evaluation.py.
        public: What goes with which set of public images; another one is normalised by its own mean and not augmented.
        method_options: Options of single methods under this protocol, by method; those of a data set go before them.
        notes: Where each value that the paper does not give comes from.
    """

    name: str
    summary: str
    source: str
    settings: Mapping[str, Any]
    datasets: Mapping[str, DataSetting]
    selection: str
    evaluation: str = "server"
    public: Mapping[str, PublicSetting] = field(default_factory=dict)
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One number of a paper's table, and the run that gives ours.

    Attributes:
        row: The row, as `method` in papers/reported.json.
        column: The column, as `column` there.
        method: Name of the method that is run.
        settings: Run and method options by field name, protocol and data set among them.
        metric: What is read from the run's record; see fedcli/results/metrics.py.
    """

    row: str
    column: str
    method: str
    settings: Mapping[str, Any]
    metric: str = "selected"


@dataclass(frozen=True)
class Gain:
    """One number of a paper's table that follows from others there: some rows' mean less that of others.

    Attributes:
        row: The row, as `method` in papers/reported.json.
        column: The column, as `column` there.
        of: The column of the table whose cells are compared; its own where empty.
        more: The rows whose mean it is.
        less: The rows whose mean is taken off.
        best: Take off the best of `less` in place of their mean.
    """

    row: str
    column: str
    more: tuple[str, ...]
    less: tuple[str, ...]
    of: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a paper, as runs.

    Attributes:
        name: `paper:ID`, as in `fedcli table paper:ID`.
        title: What the table shows, one line.
        reported: The paper and the table in papers/reported.json.
        cells: Its numbers, row by row; cells of the same method and settings share their runs.
        seeds: Seeds of each run.
        notes: Readings where the paper leaves something open, and rows of ours that it does not have.
        gains: Numbers that follow from its cells; they need no runs of their own.
    """

    name: str
    title: str
    reported: tuple[str, str]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    notes: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper that can be right or wrong: one row of a table is ahead of another.

    Attributes:
        name: `paper:ID`.
        text: The sentence, in words of ours, without a full stop.
        table: Name of the table whose cells are compared.
        row: The row that the sentence is about.
        than: The row that it is compared with.
        columns: The columns; of several, the mean of the differences counts.
        direction: "higher" or "lower": on which side of zero the paper sees the row less the other.
        instead: Options that a smaller form of the claim may have in place of the cells', with their values, or None
            for any value; sizes (rounds, images, clients, ...) may always be smaller.
    """

    name: str
    text: str
    table: str
    row: str
    than: str
    columns: tuple[str, ...]
    direction: str = "higher"
    instead: Mapping[str, Any] = field(default_factory=dict)


def grid(
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    columns: Mapping[str, Mapping[str, Any]],
    metric: str = "selected",
) -> tuple[Cell, ...]:
    """Every row with every column.

    Args:
        rows: Method and settings of each row.
        columns: Settings of each column; a row's own settings go before them.
        metric: What is read from each record.
    """
    return tuple(
        Cell(row, column, method, {**shared, **own}, metric)
        for row, (method, own) in rows.items()
        for column, shared in columns.items()
    )


@dataclass(frozen=True)
class Sizes:
    """The sizes that a method's costs depend on, in floats or counts."""

    parameters: int
    num_classes: int
    feature_dim: int


def one_model(sizes: Sizes) -> int:
    """Memory of a client that holds one copy of the model, in floats."""
    return sizes.parameters


def global_model(state: Any) -> tuple[dict, dict]:
    """Parameters and buffers of the global model in a server state that has these fields."""
    return state.params, state.buffers


class _Declared:
    """What is known of a declaration by the module it stands in: that of its function, or the user's file it is in."""

    _home: ClassVar[str | None] = None  # name of the user's module that declares it; set by `_claim` on an instance

    @property
    def module(self) -> ModuleType:
        """The module of its file."""
        return sys.modules[self._home or self.function.__module__]

    @property
    def file(self) -> Path:
        """The file it stands in."""
        return Path(self.module.__file__)

    @property
    def card(self) -> str:
        """The docstring of that file."""
        return (self.module.__doc__ or "").strip()

    @property
    def file_hash(self) -> str:
        """SHA-256 of that file, its first 16 hexadecimal digits."""
        return file_hash(self.file)

    @contextmanager
    def blamed(self, *passes: type[Exception]) -> Iterator[None]:
        """Blame a user's own file for what is raised inside, but for `passes`; see `blame`. A paper's file is not."""
        with blame(self.file, passes=passes) if self._home else nullcontext():
            yield


@dataclass(frozen=True)
class Method(_Declared):
    """A method, as its file declares it.

    Attributes:
        name: As on the command line.
        title: Full name of the method, one line.
        config: Frozen dataclass of its options, each made by `option`.
        init: `(fed, config) -> state` before the first round.
        run_round: `(state, cohort, fed, config) -> (state, terms)`; terms `[K]` by name, for the record.
        reduces_to: Law 1: `(method, overrides)` under which the parameters equal that method's; None where no
            overrides make it a simpler one.
        state_types: The NamedTuple classes of its state, so that a checkpoint can be read.
        default_protocol: Used where `--protocol` is not given; empty takes the first of the method's own file.
        client_memory: Floats a client must hold: copies of the model and what the method adds.
        model: From a state to the global model that is tested.
        personal: From a state to `(params, buffers)` of each client that has taken part, by id, where every client
            keeps its own model; None where there is one global model.
        prototypes: From a state to `(prototypes [C, D], has_class [C])`, where the method classifies by the nearest
            prototype; None where it classifies by the head.
        mixed_networks: Whether its clients may have different networks.
        uses_public_data: Whether it needs `--public-dataset`.
        numerics: Raised whenever its file changes the numbers of its runs; records with another one are outdated.
    """

    name: str
    title: str
    config: type
    init: Callable[..., Any]
    run_round: Callable[..., tuple[Any, dict]]
    reduces_to: tuple[str, dict[str, Any]] | None
    state_types: tuple[type, ...]
    default_protocol: str = ""
    client_memory: Callable[[Sizes], int] = one_model
    model: Callable[[Any], tuple[dict, dict]] = global_model
    personal: Callable[[Any], dict[int, tuple[dict, dict]]] | None = None
    prototypes: Callable[[Any], tuple[Any, Any]] | None = None
    mixed_networks: bool = False
    uses_public_data: bool = False
    numerics: int = 1

    @property
    def function(self) -> Callable[..., Any]:
        """What tells its file, unless a user's file declares it."""
        return self.run_round


@dataclass(frozen=True)
class Post(_Declared):
    """A step on the global model after the last round of any method that has one, as its file declares it.

    Attributes:
        name: As in `--post`.
        title: Full name, one line.
        config: Frozen dataclass of its options, each made by `option`; their names are no other option's.
        apply: `(params, buffers, fed, config) -> (params, buffers, floats_up)`: the model after the step, and the
            floats that a client sends for it, the mean over the clients.
    """

    name: str
    title: str
    config: type
    apply: Callable[..., tuple[dict, dict, int]]

    @property
    def function(self) -> Callable[..., Any]:
        """What tells its file, unless a user's file declares it."""
        return self.apply


Declaration = TypeVar("Declaration", Method, Post, Protocol, Table, Claim)
_FROM_FILE = re.compile(r"(.*\.py)(?::(.+))?", re.DOTALL)


def is_from_file(text: str) -> bool:
    """Whether a text stands for a part in a file of the user's own: `./file.py:NAME`, or `./file.py` alone."""
    return _FROM_FILE.fullmatch(text) is not None


def absolute(text: str) -> str:
    """The same text with the paths of the user's files made absolute, in each of its parts between commas."""
    if text.startswith("file:"):
        return f"file:{Path(text.removeprefix('file:')).resolve()}"
    parts = text.split(",")
    return ",".join(":".join(filter(None, _place(part))) if is_from_file(part) else part for part in parts)


def short_name(text: str) -> str:
    """What a part is called where a path would be too long: `NAME` of `./file.py:NAME`, the text itself of others."""
    return text if not is_from_file(text) else _place(text)[1] or Path(text).stem


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file and of those beside it that it imports, its first 16 hexadecimal digits."""
    files = [str(path), *sorted(files_beside(path).values())]
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


def files_beside(path: str | Path) -> dict[str, str]:
    """The files beside a user's file that it imports, and those that these import, by the names of their modules.

    A name that leads elsewhere too, to the standard library or a package that is installed, leads there.
    """
    found: dict[str, str] = {}
    todo = [Path(path).resolve()]
    while todo:
        file = todo.pop()
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (SyntaxError, ValueError):  # its import will say so
            continue
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        for name in names:
            beside = file.parent / f"{name}.py"
            if name not in found and beside != Path(path).resolve() and beside.is_file() and _leads_to(name, beside):
                found[name] = str(beside)
                todo.append(beside)
    return found


def _leads_to(name: str, file: Path) -> bool:
    """Whether no other file than this one is the module of that name."""
    known = getattr(sys.modules.get(name), "__spec__", None) or PathFinder.find_spec(name)
    origin = getattr(known, "origin", None)
    return name not in sys.stdlib_module_names and (origin is None or Path(origin).resolve() == file)


def own_paths(values: Iterable[Any]) -> list[str]:
    """The absolute paths of the user's own files in a run's method and the values of its options, each once."""
    texts = [part for value in values if isinstance(value, str) for part in value.split(",") if is_from_file(part)]
    return list(dict.fromkeys(_place(text)[0] for text in texts))


def user_files(values: Iterable[Any]) -> dict[str, str]:
    """Path and `file_hash` of each file of the user's own.

    Args:
        values: A run's method and the values of its options; those that name no file count for nothing.
    """
    return {path: file_hash(path) for path in own_paths(values)}


def replace_paths(value: Any, places: Mapping[str, str]) -> Any:
    """An option's value with other paths of the user's files, by their old absolute ones."""
    if not isinstance(value, str) or not own_paths([value]):
        return value
    parts = [(part, *(_place(part) if is_from_file(part) else ("", ""))) for part in value.split(",")]
    return ",".join(
        ":".join(filter(None, (places.get(path, path), name))) if path else part for part, path, name in parts
    )


@dataclass(frozen=True)
class FromFile:
    """A function in a file of the user's own; calling it calls the function, and blames the file for what it raises."""

    function: Callable[..., Any]
    name: str
    path: Path  # absolute

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """What the function returns."""
        with blame(self.path, getattr(getattr(self.function, "__code__", None), "co_firstlineno", None)):
            return self.function(*args, **keywords)

    def refuse(self, what: str, remedy: str) -> UserError:
        """An error, to be raised by the caller, for a function that does not give what it should."""
        return UserError(f"'{self.name}' in '{self.path}' {what}; {remedy}.")


def from_file(text: str, kind: str) -> FromFile:
    """The function that `./file.py:NAME` stands for.

    Args:
        text: Path and name.
        kind: What it is used as, for a refusal; for example "backbone".

    Raises:
        UserError: There is no such file or function, or the file cannot be imported.
    """
    path, name = _place(text)
    module = _import_file(path, kind)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    if not name:
        raise UserError(f"the {kind} lacks a name (got '{text}'); write {text}:NAME, of {', '.join(own)}.")
    if not callable(getattr(module, name, None)):
        raise unknown(f"{kind} in '{path}'", name, own, f"it must be a function; there are: {', '.join(own)}.")
    return FromFile(getattr(module, name), name, Path(path))


@contextmanager
def blame(path: str | Path, line: int | None = None, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns whatever a user's file raises into one line with the file and the line number; it is the cause of that.

    Args:
        path: The file, absolute.
        line: Named where the error comes from no line of the file, as that of a function with other arguments.
        passes: Errors that are left as they are, beside UserError.

    Raises:
        UserError: If anything is raised inside.
    """
    try:
        yield
    except (UserError, *passes):
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a script that ends the program when it is imported
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line = error.lineno
        for frame, number in walk_tb(error.__traceback__):
            line = number if frame.f_code.co_filename == str(path) else line
        text = (str(error).strip() or "no message").splitlines()[0]
        where = f" in line {line}" if line else ""
        raise UserError(
            f"the file '{path}' fails{where} (got {type(error).__name__}: {text}); mend it; 'fedcli --traceback ...' "
            "shows the whole traceback."
        ) from error


def _place(text: str) -> tuple[str, str]:
    """Absolute path and name of `./file.py:NAME`; the name is empty where there is none."""
    path, name = _FROM_FILE.fullmatch(text).groups()
    return str(Path(path).resolve()), name or ""


def _import_file(path: str, kind: str) -> ModuleType:
    """The module of a user's file, imported once as long as it stays the same.

    Its name is made from its path and content, so that a file called `papers.py` hides nothing.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no {kind} file at '{path}'; give the path of a Python file.")
    name = f"fedcli_file_{hashlib.sha256(f'{path} {file_hash(path)}'.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
        sys.modules[name] = module
        try:
            if beside := files_beside(path):
                vars(module)["__builtins__"] = {**vars(builtins), "__import__": _importing(beside)}
            with blame(path):  # not by the loader, whose cached bytecode is blind to a change within a second
                exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
                _claim(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _importing(beside: Mapping[str, str]) -> Callable[..., ModuleType]:
    """What `import` calls in a user's file, which finds the files beside it; they stay out of `sys.modules`."""

    def import_(name: str, *arguments: Any, **keywords: Any) -> ModuleType:
        if name in beside:
            return _import_file(beside[name], "Python")
        return builtins.__import__(name, *arguments, **keywords)

    return import_


def _claim(module: ModuleType) -> None:
    """Make what a user's file declares its own, also where the functions are a paper's; what it imports stays."""
    for kind in (Method, Post):
        for item in _items(kind, module):
            home = sys.modules[item.function.__module__]
            if item._home is None and (home is module or not any(item is one for one in _items(kind, home))):
                object.__setattr__(item, "_home", module.__name__)  # no field, so that `replace` does not copy it


def _items(kind: type[Declaration], module: ModuleType) -> list[Declaration]:
    """What a module holds of a kind: declared, or in any variable."""
    return [one for one in (*_declarations(kind, module).values(), *vars(module).values()) if isinstance(one, kind)]


@cache
def _modules() -> tuple[ModuleType, ...]:
    """The modules of `fedcli.papers`, papers before baselines, each in order of name."""
    papers = importlib.import_module("fedcli.papers")
    found = []
    for package in (papers, importlib.import_module("fedcli.papers.baselines")):
        for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
            if not info.ispkg:
                found.append(importlib.import_module(f"{package.__name__}.{info.name}"))
    return tuple(found)


def _declarations(kind: type[Declaration], *modules: ModuleType) -> dict[str, Declaration]:
    """What files declare of a kind, by name: of Method, each file's `METHOD`, then its `METHODS`."""
    one = kind.__name__.upper()
    found = [item for module in modules for item in (getattr(module, one, None), *getattr(module, one + "S", ()))]
    return {item.name: item for item in found if isinstance(item, kind)}


def _from_file(text: str, kind: type[Declaration]) -> Declaration:
    """What a user's file declares of a kind under the name of a variable or its own; without a name, the only one."""
    path, name = _place(text)
    module = _import_file(path, kind.__name__.lower())
    own = _declarations(kind, module)
    variables = {key: value for key, value in vars(module).items() if isinstance(value, kind)}
    default = kind.__name__.upper()
    if not name and (default in variables or len(own) == 1):
        return variables.get(default) or next(iter(own.values()))
    if not own and not variables:
        example = f"{default} = fedcli.{kind.__name__}(...)"
        raise UserError(f"the file '{path}' defines no {default}; add {example}, see the README.")
    if not name:
        raise UserError(f"the file '{path}' defines several (got {', '.join(own)}); name one: {text}:NAME.")
    if name not in {**variables, **own}:
        raise unknown(f"{default} in '{path}'", name, {**variables, **own}, f"there are {', '.join(own or variables)}.")
    return {**variables, **own}[name]


def methods() -> dict[str, Method]:
    """The registered methods by name: those of the papers, then their baselines."""
    return _declarations(Method, *_modules())


def protocols() -> dict[str, Protocol]:
    """The registered protocols by name, in the order of their papers' files."""
    return _declarations(Protocol, *_modules())


def tables() -> dict[str, Table]:
    """The registered tables by name, in the order of their papers' files."""
    return _declarations(Table, *_modules())


def claims(paper: str | None = None) -> list[Claim]:
    """The registered claims in the order of their papers' files, or those of one paper or of a user's file.

    Args:
        paper: What its claims' names begin with, whatever the case, or the path of a file; None for all papers.

    Raises:
        UserError: If there is no such paper, or the file declares no claim.
    """
    if paper is not None and is_from_file(paper):
        path = _place(paper)[0]
        module = _import_file(path, "claim")
        own = _declarations(Table, module)
        found = list(_declarations(Claim, module).values())
        if not found:
            raise UserError(f"the file '{path}' declares no CLAIMS; add CLAIMS = (fedcli.Claim(...),).")
        return [dataclasses.replace(one, table=f"{path}:{one.table}") if one.table in own else one for one in found]
    known = _declarations(Claim, *_modules()).values()
    names = list(dict.fromkeys(one.name.partition(":")[0] for one in known))
    if paper is not None and paper.lower() not in names:
        raise unknown("paper with claims", paper, names, f"there are {', '.join(names)}, and your own ./file.py.")
    return [one for one in known if paper is None or one.name.partition(":")[0] == paper.lower()]


def not_planned(module: ModuleType) -> dict[str, str]:
    """What a paper prints and no table of its file plans, each with the reason: the file's `NOT_PLANNED`.

    A key is a table of papers/reported.json, or "table: row", or "table: column"; or one that is not even there, such
    as a table of an appendix that cannot be had.
    """
    return dict(getattr(module, "NOT_PLANNED", {}))


def unaccounted(module: ModuleType, printed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The numbers a paper prints that belong to no cell of its file and have no reason in `NOT_PLANNED`.

    Args:
        module: The paper's file.
        printed: The paper's part of papers/reported.json, by table.

    Returns:
        Each as "table: row: column".
    """
    planned = {
        (table.reported[1], cell.row, cell.column) for table in module.TABLES for cell in (*table.cells, *table.gains)
    }
    reasons = not_planned(module)
    return [
        f"{table}: {entry['method']}: {entry['column']}"
        for table, content in printed.items()
        for entry in content["rows"]
        if any(isinstance(value, int | float) for value in entry.values())
        and (table, entry["method"], entry["column"]) not in planned
        and reasons.keys().isdisjoint({table, f"{table}: {entry['method']}", f"{table}: {entry['column']}"})
    ]


@cache
def _steps() -> dict[str, Post]:
    """The registered steps; a plan of many runs asks for them for each."""
    return _declarations(Post, *_modules())


def posts(method: Method | None = None, chosen: str | None = None) -> dict[str, Post]:
    """The steps after the last round by name: the registered ones, those of a method's file, and a user's own.

    Args:
        method: Whose file is looked into; None for none.
        chosen: What `--post` says, which may be `./file.py:NAME`.
    """
    found = {**_steps(), **(_declarations(Post, method.module) if method else {})}
    return {**found, chosen: _from_file(chosen, Post)} if chosen and is_from_file(chosen) else found


def find_post(name: str, method: Method | None = None) -> Post:
    """The step after the last round of that name, or in the file of that path.

    Args:
        name: Its name, or `./file.py:NAME`.
        method: A method in whose file it may stand.

    Raises:
        UserError: If there is none.
    """
    known = posts(method, name)
    name = spelt(name, known)
    if name not in known:
        raise unknown("step after the last round", name, known, "'fedcli list' shows all.")
    return known[name]


def find_table(name: str) -> Table:
    """The table of that name, whatever the case of its letters, or the one in the file of that path.

    The methods, protocols and steps of a user's own table may stand in its file.

    Raises:
        UserError: If there is none.
    """
    if is_from_file(name):
        path, table = _place(name)[0], _from_file(name, Table)
        module = _import_file(path, "table")
        own = {kind: _declarations(kind, module) for kind in (Method, Protocol, Post)}

        def spelt(kind: type, value: Any) -> Any:
            return f"{path}:{value}" if value in own[kind] else value

        cells = []
        for cell in table.cells:
            named = {key: spelt(kind, cell.settings.get(key)) for key, kind in (("protocol", Protocol), ("post", Post))}
            settings = {**cell.settings, **{key: value for key, value in named.items() if key in cell.settings}}
            cells.append(dataclasses.replace(cell, method=spelt(Method, cell.method), settings=settings))
        return dataclasses.replace(table, cells=tuple(cells))
    known = {known.lower(): table for known, table in tables().items()}
    if name.lower() not in known:
        raise unknown("table", name, tables(), "'fedcli list' shows all.")
    return known[name.lower()]


def find_method(name: str) -> Method:
    """The method of that name, whatever the case of its letters, or the one in the file of that path.

    Args:
        name: Its name, or `./file.py:NAME`, where NAME is its own or that of its variable; without it, `METHOD`.

    Raises:
        UserError: If there is none, or the file does not declare one.
    """
    if is_from_file(name):
        return _from_file(name, Method)
    known = methods()
    name = spelt(name, known)
    if name not in known:
        raise unknown("method", name, known, "'fedcli list' shows all.")
    return known[name]


def find_protocol(name: str, method: Method) -> Protocol:
    """The protocol of that name, among the registered ones and those of the method's own file, or in a user's file.

    Raises:
        UserError: If there is none.
    """
    if is_from_file(name):
        return _from_file(name, Protocol)
    known = _declarations(Protocol, *_modules(), method.module)
    name = spelt(name, known)
    if name not in known:
        raise unknown("protocol", name, known, "'fedcli list' shows all.")
    return known[name]


def default_protocol(method: Method, dataset: str | None) -> Protocol:
    """The protocol a method runs under where none is named.

    It is the method's default one, unless that does not know the data set and another of the same paper does.

    Args:
        method: The method.
        dataset: The data set; None for the default protocol whatever the data.
    """
    own = _declarations(Protocol, method.module, sys.modules[method.function.__module__])
    name = method.default_protocol or next(iter(own), "")
    if not name:
        raise UserError(f"the method '{method.name}' names no protocol; choose one with --protocol ('fedcli list').")
    first = find_protocol(name, method)
    if dataset is None or dataset in first.datasets:
        return first
    paper = first.name.split(":")[0]
    known = {**protocols(), **own}.values()
    same_paper = [protocol for protocol in known if protocol.name.split(":")[0] == paper]
    return next((protocol for protocol in same_paper if dataset in protocol.datasets), first)


def method_options(method: Method | Post, values: Mapping[str, Any]) -> Any:
    """The `Config` of a method, or of a step after the last round, with `values` in place of its defaults, checked.

    Raises:
        UserError: If a value is out of range or an option is not among its own.
    """
    fields = {field.name: field for field in dataclasses.fields(method.config)}
    for name, value in values.items():
        if name not in fields:
            remedy = f"'fedcli run {method.name} --help' shows all."
            raise unknown(f"option of {method.name}", name, fields, remedy)
        check_value(fields[name], value)
    return method.config(**values)
