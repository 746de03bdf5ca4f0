"""The hash of a user's file, by which a record knows it again."""

import ast
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

_THEN = ", then "  # between the hashes of a file that was changed while a run rested
_LINE_OF_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", re.MULTILINE)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file and of those beside it, also in folders, that it imports, its first 16 hexadecimal digits."""
    return _hash_with(Path(path), imported_files(Path(path)))


def first_hash(recorded: str) -> str:
    """Returns the hash that a file had when the run began, of those that a record has of it."""
    first, _, _ = recorded.partition(_THEN)
    return first


def last_hash(recorded: str) -> str:
    """Returns the hash that a file had in the last rounds, of those that a record has of it."""
    _, _, last = recorded.rpartition(_THEN)
    return last


def add_hash(recorded: str, new_hash: str) -> str:
    """Returns the hashes of a file that has another one from now on, as a record has them."""
    return recorded + _THEN + new_hash if recorded else new_hash


def has_several_hashes(recorded: str) -> bool:
    """Whether a file was changed while the run rested."""
    return _THEN in recorded


def is_hash_of(recorded: str, path: str | Path) -> bool:
    """Whether a record's last hash is that of a file now, also as an older version would have computed it."""
    file = Path(path)
    last = last_hash(recorded)
    if last == file_hash(file):
        return True
    # Older versions took the file alone, later those beside it that lines beginning with an import seem to name, and
    # then those that it imports, but for folders.
    older_sets = [
        set(),
        _find_files_beside(file, _names_in_lines, _file_of_module),
        _find_files_beside(file, _imported_names, _file_of_module),
    ]
    return any(last == _hash_with(file, imported) for imported in older_sets)


def imported_files(path: Path) -> set[Path]:
    """Returns the files beside a file, also in folders, that it, or one of them, imports; not the file itself."""
    return _find_files_beside(path, _imported_names, _files_of_module)


def _find_files_beside(
    path: Path, find_names: Callable[[Path], Iterable[str]], find_files: Callable[[Path, str], Iterable[Path]]
) -> set[Path]:
    """Returns the files of the modules beside a file whose names are found in it, or in one of them; not itself.

    Args:
        path: The file.
        find_names: Returns the names of the modules that a file imports.
        find_files: Returns the files of a module of this name beside a file.
    """
    imported: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        for name in find_names(file):
            for beside in find_files(path, name):
                if beside not in {path, *imported}:
                    imported.add(beside)
                    waiting.append(beside)
    return imported


def _file_of_module(path: Path, name: str) -> list[Path]:
    """Returns the file of a module beside a file, in a list; none if it is no file there."""
    beside = path.with_name(f"{name}.py")
    return [beside] if beside.is_file() else []


def _files_of_module(path: Path, name: str) -> list[Path]:
    """Returns the file of a module beside a file, or all files of a package there; none if it is elsewhere."""
    package, _, _ = name.partition(".")
    return _file_of_module(path, name) or _files_of_package(path.with_name(package))


def _files_of_package(folder: Path) -> list[Path]:
    """Returns the Python files in a folder and those below it, in order; none if it is not there.

    Hidden ones are left out, which nothing imports: editors leave locks and copies.
    """
    files = []
    for file in sorted(folder.rglob("*.py")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not is_hidden:
            files.append(file)
    return files


def _imported_names(file: Path) -> list[str]:
    """Returns the names of the modules that a file imports, anywhere in it; none where it is no Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # the latter of a zero byte; whoever imports the file is told
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.append(node.module)
    return names


def _names_in_lines(file: Path) -> list[str]:
    """Returns the first word after an import that begins a line, and after each comma there."""
    names = []
    for line in _LINE_OF_IMPORT.findall(file.read_bytes()):
        for part in line.decode().split(","):
            words = part.split()  # of "import a as b" or "from a import b" without the first
            if words:
                names.append(words[0].lstrip("."))
    return names


def _hash_with(file: Path, others: Iterable[Path]) -> str:
    """Returns the hash of a file together with others; of the file alone where there are none."""
    hash_of_file = _hash_alone(file)
    hashes_of_others = sorted(map(_hash_alone, others))
    if not hashes_of_others:
        return hash_of_file
    return hashlib.sha256(" ".join([hash_of_file, *hashes_of_others]).encode()).hexdigest()[:16]


def _hash_alone(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
