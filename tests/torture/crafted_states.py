"""Checkpoints and client states of another content, for which their digests vouch."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import torch
from safetensors import torch as safetensors

import fedcli
from fedcli import registry
from fedcli.core.client_states import stored
from fedcli.core.tree_files import CHECKPOINT, DIGEST, ZEROS, read_verified
from fedcli.core.trees import to_names
from fedcli.runs import resume
from fedcli.runs.checkpoints import Checkpoint, read_checkpoint
from fedcli.runs.models import ROUNDS, SELECTED
from fedcli.runs.record import params_hash, read_record
from tests.tiny_runs import TINY
from tests.torture.faults import attempt
from tests.torture.parts import VALUES, part_at, places
from tests.torture.stopped_runs import stopped_run

STOPPED_KINDS = ("client state", "global model")  # kinds of stopped runs
FINISHED_RUNS: dict[str, dict[str, Any]] = {
    "finished, best models kept": {"method": "fedfm", "rounds": 5, "validation": 0.2, "lr": 0.1, "seed": 2},
    "finished, own models": {"method": "local", "rounds": 2, "validation": 0},
    "finished, own models and a global one": {"method": "ditto", "rounds": 2, "validation": 0},
    "finished, prototypes": {"method": "fedproto", "rounds": 2, "protocol": "fedsa:digits"},
}
FINISHED_KINDS = tuple(FINISHED_RUNS)


class Content(NamedTuple):
    """What a file of a state holds."""

    parts: dict[str, Any]  # `tree` and `about`, see `fedcli.core.tree_files`
    tensors: dict[str, torch.Tensor]


def content_of(file: Path) -> Content:
    """Reads a file of a state."""
    tree, facts, tensors = read_verified(file)
    return Content({"tree": tree, "about": facts}, tensors)


def sign(file: Path, content: Content) -> str:
    """Writes a file of a state, whatever it holds, with its right SHA-256, which is returned."""
    text = json.dumps({"sha256": ZEROS.decode(), **content.parts})
    tensors = {name: tensor.contiguous() for name, tensor in content.tensors.items()}
    data = safetensors.save(tensors, {"fedcli": text})
    digest = hashlib.sha256(data).hexdigest()
    file.write_bytes(data.replace(ZEROS, digest.encode(), 1))
    return digest


TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "removed": lambda tensor: None,
    "shorter": lambda tensor: tensor.flatten()[1:],
    "of one more axis": lambda tensor: tensor[None],
    "of another type": lambda tensor: tensor.to(torch.float64),
    "of integers": lambda tensor: tensor.to(torch.int32),
}


class FinishedRun(NamedTuple):
    """A finished run of which models are kept."""

    folder: Path
    models: str  # see `models_hash`


@lru_cache
def finished_run(kind: str) -> FinishedRun:
    """Makes the run of a kind."""
    folder = Path(mkdtemp(), "run")
    options = {**TINY, "batch_size": 8, "train_examples": 60, "protocol": "fedfm:digits", **FINISHED_RUNS[kind]}
    fedcli.run(**options, out=folder)
    return FinishedRun(folder, models_hash(folder))


def models_hash(folder: Path) -> str:
    """Stands for the models of a finished run."""
    run = fedcli.load(folder)
    method = registry.find_method(run.record["method"])
    owners = []
    if method.personal is None or method.shared is not None:
        owners.append(None)  # the server
    if method.personal is not None:
        owners.append(0)
    by_prototypes = method.prototypes is not None
    values: list[tuple[str, torch.Tensor]] = []
    for owner in owners:
        for name in ROUNDS:
            values += run.model(owner, round=name, prototypes=by_prototypes).state_dict().items()
    return params_hash(values)


def source_folder(kind: str) -> Path:
    """The folder of the run of a kind, of which a copy is changed."""
    if kind in FINISHED_KINDS:
        return finished_run(kind).folder
    return stopped_run(kind).folder


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
        *parents, key = self.path
        container = part_at(content.parts, parents)
        if self.how == "one more":
            container[key] += 1
            return f"{self.path} one more"
        if self.how == "removed":
            del container[key]
            return f"{self.path} removed"
        if self.how == "emptied":
            container[key] = []
            return f"{self.path} emptied"
        if self.how == "nested":
            container[key] = [container[key]]
        else:
            container[key] = draw.choice(VALUES)
        return f"{self.path} {container[key]!r:.40}"


@lru_cache
def possible_changes(kind: str) -> list[TensorChange | PartChange]:
    """What may be changed in a run's checkpoint, in its best models, and in the last client state that it names."""
    folder = source_folder(kind)
    files = [CHECKPOINT]
    if (folder / SELECTED).is_file():
        files.append(SELECTED)
    client_states = sorted(folder.glob("states/000000-*"))
    if client_states:
        files.append(f"states/{client_states[-1].name}")

    changes: list[TensorChange | PartChange] = []
    for file in files:
        content = content_of(folder / file)
        for path in places(content.parts):
            ways = ways_to_change(content.parts, path)
            changes += [PartChange(file, path, how) for how in ways]
        for name in sorted(content.tensors):  # a file is read in any order
            changes += [TensorChange(file, name, how) for how in TENSOR_CHANGES]
    return changes


def ways_to_change(parts: dict[str, Any], path: tuple) -> list[str]:
    """How the part at a path may be changed, see `PartChange`."""
    part = part_at(parts, path)
    ways = ["another", "nested"]
    if type(part) is int:
        ways.append("one more")
    if type(part) is list:
        ways.append("emptied")
    if isinstance(path[-1], str) or path[0] == "tree":
        ways.append("removed")
    return ways


class RestoredRun(NamedTuple):
    """A stopped run that can go on."""

    restored: Any  # what a checkpoint of it is read with
    state: str  # see `checkpoint_hash`


@lru_cache
def restored_run(kind: str) -> RestoredRun:
    """Restores the stopped run of a kind."""
    folder = stopped_run(kind).folder
    restored = resume.restore(read_record(folder), ())
    return RestoredRun(restored, checkpoint_hash(read_checkpoint(folder, *restored)))


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """Stands for the state and the number of rounds from which a run goes on."""
    kept_states = stored(checkpoint.state)
    clients = {name: dict(kept) for name, kept in kept_states.items()}
    sizes = [kept.nbytes for kept in kept_states.values()]  # by which memory is shared out
    state = checkpoint.state._replace(**clients)
    structure, tensors = to_names([state, sizes, len(checkpoint.progress["rounds"])])
    return json.dumps(structure) + params_hash(sorted(tensors.items()))


def digest_of_file(file: Path) -> str:
    """The SHA-256 that a file of a state gives for itself."""
    match = DIGEST.search(file.read_bytes())
    assert match is not None
    return match[1].decode()


def change_file(folder: Path, change: TensorChange | PartChange, draw: random.Random) -> str:
    """Changes a file of a run and makes every digest of the run right again; says what it did."""
    file = folder / change.file
    old_digest = digest_of_file(file)
    content = content_of(file)
    description = change.apply(content, draw)
    new_digest = sign(file, content)

    is_client_state = change.file not in (CHECKPOINT, SELECTED)
    if is_client_state:
        replace_digest(folder / CHECKPOINT, old_digest, new_digest)
    return f"{change.file}, {description}"


def replace_digest(checkpoint: Path, old: str, new: str) -> None:
    """Replaces the SHA-256 by which a checkpoint names the file of a client's state, and signs the checkpoint."""
    parts, tensors = content_of(checkpoint)
    text = json.dumps(parts).replace(old, new)
    sign(checkpoint, Content(json.loads(text), tensors))


def expected_outcome(kind: str) -> str:
    """What the unchanged run of a kind comes to."""
    if kind in FINISHED_KINDS:
        return finished_run(kind).models
    return restored_run(kind).state


def outcome_of_crafted(kind: str, folder: Path) -> str:
    """What a folder with a crafted file comes to: its models, or the state from which it goes on."""
    if kind in FINISHED_KINDS:
        return models_hash(folder)
    return checkpoint_hash(read_checkpoint(folder, *restored_run(kind).restored))


def read_crafted_file(kind: str, number: int) -> str | None:
    """A checkpoint of another content is refused in a line where it is read, or is the same to the run."""
    changes = possible_changes(kind)
    change = changes[number % len(changes)]
    expected = expected_outcome(kind)
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(source_folder(kind), Path(parent, "run"))
        changed = change_file(folder, change, random.Random(number))
        description = f"{kind}, {changed}"
        outcome, fault = attempt(lambda: outcome_of_crafted(kind, folder), description, must_say=("safetensors", ";"))

    if outcome is None:
        return fault
    if outcome != expected:
        return f"{description}: taken for another state"
    return None


def read_crafted_file_of_any_kind(number: int) -> str | None:
    """A crafted file of one kind of run or another."""
    kinds = STOPPED_KINDS + FINISHED_KINDS
    return read_crafted_file(kinds[number % len(kinds)], number // len(kinds))
