"""Changes of the content of files with the states of a run: of a tensor, or of a part of what describes the tensors."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedcli.run_files import CHECKPOINT
from fedcli.runs.models import SELECTED
from tests.torture.nested_parts import VALUES, entry_at, part_at, paths_in
from tests.torture.signed_files import Content, content_of, digest_of_file, replace_digest, sign_state

TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "removed": lambda tensor: None,
    "shorter": lambda tensor: tensor.flatten()[1:],
    "of one more axis": lambda tensor: tensor[None],
    "of another type": lambda tensor: tensor.to(torch.float64),
    "of integers": lambda tensor: tensor.to(torch.int32),
}
REMOVED = object()  # in place of a part
PART_CHANGES: dict[str, Callable[[Any, random.Random], Any]] = {
    "another": lambda part, draw: draw.choice(VALUES),
    "nested": lambda part, draw: [part],
    "one more": lambda part, draw: part + 1,
    "emptied": lambda part, draw: [],
    "removed": lambda part, draw: REMOVED,
}


class TensorChange(NamedTuple):
    """A change of a tensor in a file of a run."""

    file: str
    name: str
    how: str

    def apply(self, content: Content, draw: random.Random) -> str:
        """Changes what the file holds; says how."""
        tensor = content.tensors.pop(self.name)
        changed = TENSOR_CHANGES[self.how](tensor)
        if changed is not None:
            content.tensors[self.name] = changed
        return f"{self.name} {self.how}"


class PartChange(NamedTuple):
    """A change of a part in a file of a run."""

    file: str
    path: tuple
    how: str

    def apply(self, content: Content, draw: random.Random) -> str:
        """Changes what the file holds; says how, or what stands there now."""
        container, key = entry_at(content.parts, self.path)
        changed = PART_CHANGES[self.how](container[key], draw)
        if changed is REMOVED:
            del container[key]
            return f"{self.path} removed"
        container[key] = changed
        return f"{self.path} {self.how}: {changed!r:.40}"


def changes_in(folder: Path) -> list[TensorChange | PartChange]:
    """Returns all changes of the checkpoint of a run, of its best models and of the last state of client 0."""
    files = [CHECKPOINT]
    if (folder / SELECTED).is_file():
        files.append(SELECTED)
    client_states = sorted(folder.glob("states/000000-*"))
    if client_states:
        files.append(f"states/{client_states[-1].name}")

    changes: list[TensorChange | PartChange] = []
    for file in files:
        content = content_of(folder / file)
        for path in paths_in(content.parts):
            ways = possible_ways(content.parts, path)
            changes += [PartChange(file, path, how) for how in ways]
        for name in sorted(content.tensors):  # a file is read in any order
            changes += [TensorChange(file, name, how) for how in TENSOR_CHANGES]
    return changes


def possible_ways(parts: dict[str, Any], path: tuple) -> list[str]:
    """Returns the names of those `PART_CHANGES` that a part can have."""
    part = part_at(parts, path)
    ways = ["another", "nested"]
    if type(part) is int:
        ways.append("one more")
    if type(part) is list:
        ways.append("emptied")
    if isinstance(path[-1], str) or path[0] == "tree":
        ways.append("removed")
    return ways


def change_file(folder: Path, change: TensorChange | PartChange, draw: random.Random) -> str:
    """Changes a file of a run and makes every digest of the run right again; says what it did."""
    file = folder / change.file
    old_digest = digest_of_file(file)
    content = content_of(file)
    description = change.apply(content, draw)
    new_digest = sign_state(file, content)

    is_client_state = change.file not in (CHECKPOINT, SELECTED)
    if is_client_state:
        replace_digest(folder / CHECKPOINT, old_digest, new_digest)
    return f"{change.file}, {description}"
