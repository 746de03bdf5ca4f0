"""Files of the user's own: `./file.py:NAME` in an option, their paths and hashes, their import, and who is to blame."""

import ast
import builtins
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from fedcli.errors import UserError, unknown

_FROM_FILE = re.compile(r"(.*\.py)(?::(.+))?", re.DOTALL)
_PREFIX = "fedcli_file_"  # of the names of their modules


def is_from_file(text: str) -> bool:
    """Whether a text stands for a part in a file of the user's own: `./file.py:NAME`, or `./file.py` alone."""
    return _FROM_FILE.fullmatch(text) is not None


def absolute(text: str) -> str:
    """The same text with the paths of the user's files made absolute, in each of its parts between commas."""
    if text.startswith("file:"):
        return f"file:{Path(text.removeprefix('file:')).resolve()}"
    parts = text.split(",")
    return ",".join(":".join(filter(None, place(part))) if is_from_file(part) else part for part in parts)


def short_name(text: str) -> str:
    """What a part is called where a path would be too long: `NAME` of `./file.py:NAME`, the text itself of others."""
    return text if not is_from_file(text) else place(text)[1] or Path(text).stem


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
            names = _imported(file.read_bytes())
        except (SyntaxError, ValueError):  # its import will say so
            continue
        for name in names:
            beside = file.parent / f"{name}.py"
            if name not in found and beside != Path(path).resolve() and beside.is_file() and _leads_to(name, beside):
                found[name] = str(beside)
                todo.append(beside)
    return found


@lru_cache(maxsize=64)
def _imported(text: bytes) -> tuple[str, ...]:
    """The names of the modules that a file's text imports; every run asks for those of its method's file again."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [one.module for one in nodes if isinstance(one, ast.ImportFrom) and one.module and not one.level]
    return tuple(names)


def _leads_to(name: str, file: Path) -> bool:
    """Whether no other file than this one is the module of that name."""
    known = getattr(sys.modules.get(name), "__spec__", None) or PathFinder.find_spec(name)
    origin = getattr(known, "origin", None)
    return name not in sys.stdlib_module_names and (origin is None or Path(origin).resolve() == file)


def own_paths(values: Iterable[Any]) -> list[str]:
    """The absolute paths of the user's own files in a run's method and the values of its options, each once."""
    texts = [part for value in values if isinstance(value, str) for part in value.split(",") if is_from_file(part)]
    return list(dict.fromkeys(place(text)[0] for text in texts))


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
    parts = [(part, *(place(part) if is_from_file(part) else ("", ""))) for part in value.split(",")]
    return ",".join(
        ":".join(filter(None, (places.get(path, path), name))) if path else part for part, path, name in parts
    )


@dataclass(frozen=True)
class FromFile:
    """A function or class in a file of the user's; calling this calls it, and blames the file for what it raises."""

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
    """The function or class that `./file.py:NAME` stands for.

    Args:
        text: Path and name.
        kind: What it is used as, for a refusal; for example "backbone".

    Raises:
        UserError: There is no such file, or nothing to call of that name in it, or the file cannot be imported.
    """
    path, name = place(text)
    module = import_file(path, kind)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    if not name:
        raise UserError(f"the {kind} lacks a name (got '{text}'); write {text}:NAME, of {', '.join(own)}.")
    if not callable(getattr(module, name, None)):
        raise unknown(
            f"{kind} in '{path}'", name, own, f"it must be a function or a class; there are: {', '.join(own)}."
        )
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


def place(text: str) -> tuple[str, str]:
    """The absolute path and the name in `./file.py:NAME`; the name is empty where there is none."""
    path, name = _FROM_FILE.fullmatch(text).groups()
    return str(Path(path).resolve()), name or ""


def import_file(path: str, kind: str) -> ModuleType:
    """The module of a user's file, imported once as long as it stays the same.

    Its name is made from its path and content, so that a file called `papers.py` hides nothing.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no {kind} file at '{path}'; give the path of a Python file.")
    name = f"{_PREFIX}{hashlib.sha256(f'{path} {file_hash(path)}'.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
        sys.modules[name] = module
        try:
            if beside := files_beside(path):
                vars(module)["__builtins__"] = {**vars(builtins), "__import__": _importing(beside)}
            with blame(path):  # not by the loader, whose cached bytecode is blind to a change within a second
                exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def is_own(module: ModuleType) -> bool:
    """Whether a module is a user's file."""
    return module.__name__.startswith(_PREFIX)


def _importing(beside: Mapping[str, str]) -> Callable[..., ModuleType]:
    """What `import` calls in a user's file, which finds the files beside it; they stay out of `sys.modules`."""

    def import_(name: str, *arguments: Any, **keywords: Any) -> ModuleType:
        if name in beside:
            return import_file(beside[name], "Python")
        return builtins.__import__(name, *arguments, **keywords)

    return import_
