"""Files of the user's own: `./file.py:NAME` in an option, their paths, hashes and import, trust, and who is to blame.

A path in a record is imported only if the user names the file, unchanged.
"""

import builtins
import hashlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, NamedTuple

from fedcli.errors import UserError, first_line, unknown
from fedcli.isolation import unchanged
from fedcli.vision import with_operators

# A part in a user's file. Commas separate several parts, so no path has one. Whatever asks whether a text names a file
# asks this, so that what `trust_files` does not see is not opened either.
_FROM_FILE = re.compile(r"([^,]*\.py)(?::([^,]+))?", re.DOTALL)
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", re.MULTILINE)
_PREFIX = "fedcli_file_"  # of the names of their modules
THEN = ", then "  # between the hashes of a file that was changed while a run rested


def is_from_file(text: str) -> bool:
    """Whether a text is `./file.py:NAME`, a part in a user's file, or `./file.py` alone."""
    return _FROM_FILE.fullmatch(text) is not None


class UserPart(NamedTuple):
    """Where a part of the user's own is."""

    path: str  # absolute, of the file
    name: str  # in it; may be empty


def path_and_name(text: str) -> UserPart:
    """The absolute path and the name in `./file.py:NAME`.

    Raises:
        UserError: No file can have this path, or the absolute one has a comma.
    """
    match = _FROM_FILE.fullmatch(text)
    assert match is not None  # `is_from_file` has said so
    path, name = match.groups()
    if "\0" in path:
        raise UserError(f"the path {path!r} is none (got a zero byte in it); give the path of a Python file.")
    full = os.path.realpath(path)
    if "," in full:
        raise UserError(f"the file '{full}' cannot be named (got a comma in its path); move it, or rename its folder.")
    return UserPart(full, name or "")


def short_name(text: str) -> str:
    """A part's name without a path: `NAME` of `./file.py:NAME`, the text itself of others."""
    if not is_from_file(text):
        return text
    return path_and_name(text).name or Path(text).stem


def absolute(text: str) -> str:
    """The text with absolute paths of user's files, in each of its parts between commas."""
    if text.startswith("file:"):  # a partition
        return f"file:{os.path.realpath(text.removeprefix('file:'))}"
    return replace_paths(text, {})


def own_paths(values: Iterable[Any]) -> list[str]:
    """The absolute paths of the user's files in a run's method and options, each once."""
    parts: list[str] = []
    for value in values:
        if isinstance(value, str):
            parts += value.split(",")
    paths = [path_and_name(part).path for part in parts if is_from_file(part)]
    return list(dict.fromkeys(paths))


def replace_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """An option's value with absolute paths of user's files, or in their place what `paths` says."""
    if not isinstance(value, str):
        return value
    parts = []
    for part in value.split(","):
        if is_from_file(part):
            path, name = path_and_name(part)
            new_path = paths.get(path, path)
            part = f"{new_path}:{name}" if name else new_path
        parts.append(part)
    return ",".join(parts)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file and of those beside it that it imports, its first 16 hexadecimal digits."""
    alone, *imported = map(_hash_alone, _with_imported(Path(path)))
    if not imported:
        return alone
    return hashlib.sha256(" ".join([alone, *sorted(imported)]).encode()).hexdigest()[:16]


def first_hash(recorded: str) -> str:
    """The hash that a file had when the run began, of those that a record has of it."""
    first, _, _ = recorded.partition(THEN)
    return first


def last_hash(recorded: str) -> str:
    """The hash that a file had in the last rounds, of those that a record has of it."""
    _, _, last = recorded.rpartition(THEN)
    return last


def is_hash_of(recorded: str, path: str | Path) -> bool:
    """Whether a record's last hash is that of a file now; older ones are of the file alone."""
    return last_hash(recorded) in (file_hash(path), _hash_alone(Path(path)))


def _hash_alone(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _with_imported(path: Path) -> list[Path]:
    """A file, and those beside it that it or one of them imports, as far as lines tell that begin with the import."""
    imported = [path]
    for file in imported:
        for line in _IMPORT.findall(file.read_bytes()):
            for part in line.decode().split(","):
                name, *_ = part.split() or [""]
                beside = path.with_name(f"{name.lstrip('.')}.py")
                if beside not in imported and beside.is_file():
                    imported.append(beside)
    return imported


def user_files(record: dict[str, Any]) -> dict[str, str]:
    """The user's files that a record needs, with their hashes; "" for one that the record's list lacks."""
    # Resolved again, since a recorded folder may be a link now.
    hashes = {os.path.realpath(path): recorded for path, recorded in record["user_files"].items()}
    needed = own_paths([record["method_source"], *record["config"].values()])
    return {path: hashes.get(path, "") for path in needed}


def trust_files(
    record: dict[str, Any], named: str | Path | Sequence[str | Path], changed: bool = False
) -> dict[str, Any]:
    """A run's record with the paths of the user's files now; imports none.

    Args:
        record: Of a run.
        named: The files that the user names; a moved one is known by its hash, or by its name where `changed`.
        changed: Accept a file with another hash.

    Raises:
        UserError: A file is not named, or has changed.
    """
    recorded = user_files(record)
    named_paths = [named] if isinstance(named, str | Path) else named
    named_files = own_paths(map(str, named_paths))
    paths = {}
    files = {}
    for path, old_hash in recorded.items():
        file = _find_moved(path, old_hash, named_files)
        if file is None:
            flags = " ".join(f"--method {shlex.quote(other)}" for other in recorded)
            fault = f"the run needs your code in '{path}' (hash {old_hash or 'unknown'}), run only if you name it"
            raise UserError(f"{fault}; add {flags}.")
        paths[path] = file
        is_same = is_hash_of(old_hash, file)
        if not is_same and not changed:
            raise UserError(
                f"the file '{file}' or one that it imports has changed since the run began (hash {file_hash(file)}, "
                f"was {old_hash or 'unknown'}); put it back, resume with --changed-method, or run anew."
            )
        files[file] = old_hash if is_same else old_hash + THEN + file_hash(file)
    return {
        **record,
        "method_source": replace_paths(record["method_source"], paths),
        "config": {name: replace_paths(value, paths) for name, value in record["config"].items()},
        "user_files": files,
    }


def _find_moved(path: str, old_hash: str, files: Sequence[str]) -> str | None:
    """The first of some files that is at a path or has its hash, else the first of its name; None without any."""
    for file in files:
        if file == path or is_hash_of(old_hash, file):
            return file
    for file in files:
        if Path(file).name == Path(path).name:
            return file
    return None


@dataclass(frozen=True)
class FromFile:
    """A function or class in a user's file; a call blames the file for what it raises."""

    function: Callable[..., Any]
    name: str
    path: Path  # absolute

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """What the function returns."""
        line = getattr(getattr(self.function, "__code__", None), "co_firstlineno", None)
        with unchanged([str(self.path)]), blame(self.path, line):
            return self.function(*args, **keywords)

    def refuse(self, fault: str, remedy: str) -> UserError:
        """An error, to be raised by the caller, for a function that does not give what it should."""
        return UserError(f"'{self.name}' in '{self.path}' {fault}; {remedy}.")


def from_file(text: str, kind: str) -> FromFile:
    """The function or class of `./file.py:NAME`, used as a `kind` of part, e.g. a "backbone".

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
    return FromFile(function, name, Path(path))


@contextmanager
def blame(path: str | Path, line: int | None = None, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns what a user's file raises into a UserError with the file and the line number.

    Args:
        path: The file, absolute.
        line: Named where no line of the file raises, as when a function gets other arguments than it takes.
        passes: Errors that are left as they are, beside UserError.
    """
    left_alone: tuple[type[BaseException], ...] = (UserError, KeyboardInterrupt, *passes)
    try:
        yield
    except left_alone:
        raise
    except BaseException as error:  # also SystemExit, of a script that ends the program when it is imported
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
    """The module of a user's file, imported once as long as it stays the same.

    Its name comes from path and content, so that a `papers.py` hides nothing. It imports files beside it first, as a
    script does, also by such names, so that two folders may have a `helpers.py`.
    """

    def import_(name: str, *arguments: Any, **keywords: Any) -> ModuleType:
        beside = Path(path).with_name(f"{name}.py")
        if beside.is_file():
            return import_file(str(beside), "Python")
        return with_operators(builtins.__import__, name, *arguments, **keywords)

    if not Path(path).is_file():
        raise UserError(f"there is no {kind} file at '{path}'; give the path of a Python file.")
    digest = hashlib.sha256(f"{path} {file_hash(path)}".encode()).hexdigest()
    name = f"{_PREFIX}{digest[:12]}"
    if name not in sys.modules:
        module = ModuleType(name)
        sys.modules[name] = module
        vars(module).update(__file__=path, __builtins__={**vars(builtins), "__import__": import_})
        try:
            # No loader, whose cached bytecode is blind to a change within a second.
            with unchanged([path]), blame(path):
                exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def is_own(module: ModuleType) -> bool:
    """Whether a module is a user's file."""
    return module.__name__.startswith(_PREFIX)
