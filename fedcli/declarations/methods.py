"""Methods, and steps after the last round, with the file that declares each."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from fedcli.declarations.checks import require_texts
from fedcli.declarations.costs import Costs, Sizes
from fedcli.errors import UserError
from fedcli.userfiles import blame, file_hash, hash_of_module, is_user_module


class _DeclaredInFile(ABC):
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
        """SHA-256 of the file as it was imported, its first 16 hexadecimal digits."""
        return hash_of_module(self.module) if is_user_module(self.module) else _packaged_hash(self.file)

    def blamed(self, *passes: type[Exception]) -> AbstractContextManager[None]:
        """Blames a user's file, and no paper's, for what is raised inside, but for `passes`; see `blame`."""
        if not is_user_module(self.module):
            return nullcontext()
        return blame(self.file, passes=lambda error: isinstance(error, passes))


@cache
def _packaged_hash(file: Path) -> str:
    """Returns the hash of a file that stays as it is while a program runs."""
    return file_hash(file)


ParamsAndBuffers = tuple[dict, dict]  # of a model, as `fedcli.core.Model` has them


def global_model(state: Any) -> ParamsAndBuffers:
    """Returns the fields `params` and `buffers` of a state."""
    if not (hasattr(state, "params") and hasattr(state, "buffers")):
        fault = f"the state has no params and buffers (got {type(state).__name__})"
        raise UserError(f"{fault}; let init and run_round return a NamedTuple with both, or declare Method(model=...).")
    return state.params, state.buffers


@dataclass(frozen=True)
class Method(_DeclaredInFile):
    """A method, as its file declares it.

    Attributes:
        name: As on the command line.
        title: Full name of the method, one line.
        config: Frozen dataclass of its options, each made by `option`.
        init: `(fed, config) -> state` before the first round.
        run_round: `(state, cohort, fed, config) -> (state, terms)`; terms `[K]` by name, for the record.
        reduces_to: Law 1: `(method, overrides)` under which the parameters equal that method's; None without such. The
            laws are explained in docs/add-your-method.md.
        state_types: The NamedTuple classes of its state, by which a checkpoint is read. What a client keeps is called
            `ClientState`, in the field `clients` of the server's state.
        variants: Named options in place of the defaults, under which the laws must hold too.
        costs: Law 9: `(state, cohort, fed, config)` to `Costs`, the floats down and up, without buffers; None where
            training decides them.
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
    costs: Callable[..., Costs] | None = None
    default_protocol: str = ""
    client_memory: Callable[[Sizes], int] = field(default=lambda sizes: sizes.parameters)
    model: Callable[[Any], ParamsAndBuffers] = global_model
    personal: Callable[[Any], Mapping[int, ParamsAndBuffers]] | None = None
    shared: Callable[[Any], ParamsAndBuffers] | None = None
    prototypes: Callable[[Any], tuple[Any, Any]] | None = None
    mixed_networks: bool = False
    uses_public_data: bool = False
    optimizers: tuple[str, ...] = ()
    numerics: int = 1

    def __post_init__(self) -> None:
        """Refuses a text for several optimizers, whose letters "adam" would be looked for in."""
        require_texts(f"optimizers of the method '{self.name}'", self.optimizers, "names")

    @property
    def _function(self) -> Callable[..., Any]:
        return self.run_round

    @property
    def tested(self) -> str:
        """Which model the headline is of: "global" or "personal", each client's own."""
        return "global" if self.personal is None else "personal"


@dataclass(frozen=True)
class Post(_DeclaredInFile):
    """A step on the global model after the last round, as its file declares it, which `--post` names.

    Attributes:
        name: As in `--post`.
        title: Full name of the step, one line.
        config: Frozen dataclass of its options, each made by `option`; no other option has their names.
        apply: `(params, buffers, fed, config) -> (params, buffers, floats_up)`: the model after the step, and the
            floats that a client sends for it, as a mean over the clients.
    """

    name: str
    title: str
    config: type
    apply: Callable[..., tuple[dict, dict, int]]

    @property
    def _function(self) -> Callable[..., Any]:
        return self.apply
