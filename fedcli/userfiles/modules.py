"""How a user's file is imported, and blamed for what it raises."""

import builtins
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from fedcli.errors import UserError, first_line, unknown
from fedcli.isolation import unchanged
from fedcli.userfiles.hashes import file_hash, imported_files
from fedcli.userfiles.paths import path_and_name
from fedcli.vision import with_operators

_PREFIX = "fedcli_file_"  # of the names of their modules
_hashes_of_modules: dict[str, str] = {}  # of each module's file when it was imported, by the module's name
_newest_modules: dict[str, str] = {}  # the name of the module that a file was last used as, by the file's path


@dataclass(frozen=True)
class UserFunction:
    """A function or class in a user's file; a call blames the file for what it raises."""

    function: Callable[..., Any]
    name: str
    path: Path  # absolute

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Returns what the function returns."""
        line = getattr(getattr(self.function, "__code__", None), "co_firstlineno", None)
        with unchanged([str(self.path)]), blame(self.path, line):
            return self.function(*args, **keywords)

    def refuse_other_order(self, *names: str, by_keyword: Sequence[str] = ()) -> None:
        """Refuses a function with arguments of these names in another order, as it is called by position.

        Args:
            names: The arguments that are given by position, in their order.
            by_keyword: Those that may be given by name after them.

        Raises:
            UserError: An argument of one of the names stands at another place, or one that is given by name at theirs.
        """
        try:
            parameters = signature(self.function).parameters
        except (TypeError, ValueError):  # some functions of C have none that Python can read
            return
        for position, (name, parameter) in enumerate(parameters.items()):
            is_at_another_place = name in names and names.index(name) != position
            takes_a_place = position < len(names) and parameter.kind != Parameter.KEYWORD_ONLY
            if is_at_another_place or (name in by_keyword and takes_a_place):
                raise self.refuse(
                    f"has its argument {name} at another place (got {', '.join(parameters)})",
                    f"begin with {', '.join(names)}, in this order",
                )

    def refuse(self, fault: str, remedy: str) -> UserError:
        """Returns an error, to be raised by the caller, for a function that does not give what it should."""
        return UserError(f"'{self.name}' in '{self.path}' {fault}; {remedy}.")


def find_user_function(text: str, kind: str) -> UserFunction:
    """Returns the function or class of `./file.py:NAME`, used as a `kind` of thing, e.g. a "backbone".

    Raises:
        UserError: There is no such file or function, or the file cannot be imported.
    """
    path, name = path_and_name(text)
    module = import_file(path, kind)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        remedy = f"write {path}:NAME with a function or class of it: {', '.join(names) or 'it has none'}."
        raise unknown(f"{kind} in '{path}'", name, names, remedy)
    return UserFunction(function, name, Path(path))


@contextmanager
def blame(
    path: str | Path, line: int | None = None, passes: Callable[[BaseException], bool] = lambda error: False
) -> Iterator[None]:
    """Turns what a user's file raises into a UserError with the file and the line number.

    Args:
        path: The file, absolute.
        line: Named where no line of the file raises, as when a function gets other arguments than it takes.
        passes: Says of an error whether it is left as it is, as a UserError always is.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit, of a script that ends the program when it is imported
        if passes(error):
            raise
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line = error.lineno
        for frame, number in walk_tb(error.__traceback__):
            if frame.f_code.co_filename == str(path):
                line = number
        where = f" in line {line}" if line else ""
        text = first_line(error) if str(error).strip() else "no message"
        got = f"got {type(error).__name__}: {text}"
        remedy = "'fedcli --traceback ...' shows more"
        if "vmap" in text or "functorch" in text:
            remedy = f"--clients-per-chunk 1 trains without vmap; {remedy}"
        raise UserError(f"the file '{path}' fails{where} ({got}); {remedy}.") from error


def import_file(path: str, kind: str) -> ModuleType:
    """Returns the module of a user's file, imported once as long as it stays the same.

    Its name comes from path and content, so that a `papers.py` hides nothing. It imports files beside it first, as a
    script does, also by such names, so that two folders may have a `helpers.py`.

    Args:
        path: The file, absolute.
        kind: What it is used as, in the message; e.g. "backbone".

    Raises:
        UserError: There is no such file, or it fails.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no {kind} file at '{path}'; give the path of a Python file.")
    hash_now = file_hash(path)
    digest = hashlib.sha256(f"{path} {hash_now}".encode()).hexdigest()
    name = f"{_PREFIX}{digest[:12]}"
    _hashes_of_modules[name] = hash_now
    if name not in sys.modules:
        _import_as(name, path, hash_now)
    _newest_modules[path] = name
    return sys.modules[name]


def hash_of_module(module: ModuleType) -> str:
    """Returns the hash that a user's file had when it was imported as this module; it may have been edited since."""
    return _hashes_of_modules[module.__name__]


def imported_hash(path: str) -> str:
    """Returns the hash that a user's file had when this process last imported it; that of now if it never did."""
    name = _newest_modules.get(path)
    return file_hash(path) if name is None else _hashes_of_modules[name]


def _import_as(name: str, path: str, expected_hash: str) -> None:
    """Imports a user's file as the module of a name, which imports files beside it first.

    A function may import one of them later: as it was when the file was imported, whose hash is of both.

    Raises:
        UserError: The file fails, or its content has no longer the hash by which a record would know it again.
    """
    content = Path(path).read_bytes()
    hashes = {file: file_hash(file) for file in imported_files(Path(path))}
    if file_hash(path) != expected_hash:
        raise UserError(f"the file '{path}' or one that it imports has changed while it was read; start again.")
    imported: dict[Path, ModuleType] = {}

    def import_(other: str, *arguments: Any, **keywords: Any) -> ModuleType:
        beside = Path(path).with_name(f"{other}.py")
        if beside in imported:
            return imported[beside]
        if not beside.is_file():
            _refuse_unseen_package(path, other)
            return with_operators(builtins.__import__, other, *arguments, **keywords)
        if beside in hashes and file_hash(beside) != hashes[beside]:
            raise UserError(f"the file '{beside}' has changed since '{path}' was imported; start again.")
        imported[beside] = import_file(str(beside), "Python")
        return imported[beside]

    module = ModuleType(name)
    vars(module).update(__file__=path, __builtins__={**vars(builtins), "__import__": import_})
    sys.modules[name] = module
    try:
        # No loader, whose cached bytecode is blind to a change within a second.
        with unchanged([path]), blame(path):
            exec(compile(content, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise


def _refuse_unseen_package(path: str, module: str) -> None:
    """Refuses to import a module of a package beside a user's file that Python does not see there.

    Packages are left to Python, which has one of each name for all files.
    """
    package, _, _ = module.partition(".")
    folder = Path(path).parent
    if package and (folder / package).is_dir() and find_spec(package) is None:
        raise UserError(
            f"the file '{path}' imports the folder '{package}' beside it (got no such package on Python's path); set "
            f"PYTHONPATH={folder}, or write what it needs into files beside it."
        )


def is_user_module(module: ModuleType) -> bool:
    """Whether a module is a user's file."""
    return module.__name__.startswith(_PREFIX)
