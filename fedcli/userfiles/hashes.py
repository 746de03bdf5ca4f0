"""The hash of a user's file, by which a record knows it again."""

import hashlib
import re
from pathlib import Path

_THEN = ", then "  # between the hashes of a file that was changed while a run rested
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", re.MULTILINE)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file and of those beside it that it imports, its first 16 hexadecimal digits."""
    alone, *imported = map(_hash_alone, _with_imported(Path(path)))
    if not imported:
        return alone
    return hashlib.sha256(" ".join([alone, *sorted(imported)]).encode()).hexdigest()[:16]


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
