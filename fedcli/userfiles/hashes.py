"""The hash of a user's file, by which a record knows it again."""

import hashlib
import re
from pathlib import Path

_THEN = ", then "  # between the hashes of a file that was changed while a run rested
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", re.MULTILINE)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file and of those beside it that it imports, its first 16 hexadecimal digits."""
    own_hash = _hash_alone(Path(path))
    imported = sorted(map(_hash_alone, imported_files(Path(path))))
    if not imported:
        return own_hash
    return hashlib.sha256(" ".join([own_hash, *imported]).encode()).hexdigest()[:16]


def first_hash(recorded: str) -> str:
    """The hash that a file had when the run began, of those that a record has of it."""
    first, _, _ = recorded.partition(_THEN)
    return first


def last_hash(recorded: str) -> str:
    """The hash that a file had in the last rounds, of those that a record has of it."""
    _, _, last = recorded.rpartition(_THEN)
    return last


def add_hash(recorded: str, new_hash: str) -> str:
    """The hashes of a file that has another one from now on, as a record has them."""
    return recorded + _THEN + new_hash


def has_several_hashes(recorded: str) -> bool:
    """Whether a file was changed while the run rested."""
    return _THEN in recorded


def is_hash_of(recorded: str, path: str | Path) -> bool:
    """Whether a record's last hash is that of a file now; older ones are of the file alone."""
    return last_hash(recorded) in (file_hash(path), _hash_alone(Path(path)))


def _hash_alone(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def imported_files(path: Path) -> set[Path]:
    """The files beside a file that it, or one of them, imports; not the file itself."""
    imported: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        for name in _imported_names(file):
            beside = path.with_name(f"{name.lstrip('.')}.py")
            if beside not in {path, *imported} and beside.is_file():
                imported.add(beside)
                waiting.append(beside)
    return imported


def _imported_names(file: Path) -> list[str]:
    """The names that a file imports, as far as lines tell that begin with the import."""
    names = []
    for line in _IMPORT.findall(file.read_bytes()):
        for part in line.decode().split(","):
            words = part.split()  # of "import a as b" or "from a import b" without the first
            if words:
                names.append(words[0])
    return names
