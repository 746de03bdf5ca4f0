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
from tests.torture.faults import fault_of
from tests.torture.parts import VALUES, part_at, places
from tests.torture.stopped_runs import stopped_run

CRAFTED = ("client state", "global model")  # kinds of stopped runs
FINISHED_RUNS: dict[str, dict[str, Any]] = {
    "finished, best models kept": {"method": "fedfm", "rounds": 5, "validation": 0.2, "lr": 0.1, "seed": 2},
    "finished, own models": {"method": "local", "rounds": 2, "validation": 0},
    "finished, own models and a global one": {"method": "ditto", "rounds": 2, "validation": 0},
    "finished, prototypes": {"method": "fedproto", "rounds": 2, "protocol": "fedsa:digits"},
}
WITH_MODELS = tuple(FINISHED_RUNS)


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


def crafted_from(kind: str) -> Path:
    """The folder of the run of a kind whose files are crafted."""
    return finished_run(kind).folder if kind in WITH_MODELS else stopped_run(kind).folder


class Change(NamedTuple):
    """A change in a file of a run."""

    file: str
    path: tuple | str  # to a part, or the name of a tensor
    how: str


@lru_cache
def possible_changes(kind: str) -> list[Change]:
    """What may be changed in a run's checkpoint, in its best models, and in the last client state that it names."""
    folder = crafted_from(kind)
    files = [CHECKPOINT]
    if (folder / SELECTED).is_file():
        files.append(SELECTED)
    client_states = sorted(folder.glob("states/000000-*"))
    if client_states:
        files.append(f"states/{client_states[-1].name}")

    changes: list[Change] = []
    for file in files:
        content = content_of(folder / file)
        for path in places(content.parts):
            changes.append(Change(file, path, "another"))
            changes.append(Change(file, path, "nested"))
            part = part_at(content.parts, path)
            if type(part) is int:
                changes.append(Change(file, path, "one more"))
            if type(part) is list:
                changes.append(Change(file, path, "emptied"))
            if isinstance(path[-1], str) or path[0] == "tree":
                changes.append(Change(file, path, "removed"))
        for name in sorted(content.tensors):  # a file is read in any order
            changes += [Change(file, name, how) for how in TENSOR_CHANGES]
    return changes


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


def change_tensor(content: Content, name: str, how: str) -> str:
    """Changes a tensor of what a file holds; says how."""
    tensor = content.tensors.pop(name)
    changed = TENSOR_CHANGES[how](tensor)
    if changed is not None:
        content.tensors[name] = changed
    return how


def change_part(content: Content, path: tuple, how: str, draw: random.Random) -> str:
    """Changes a part of what a file holds; says how, or what stands there now."""
    *parents, key = path
    container = part_at(content.parts, parents)
    if how == "one more":
        container[key] += 1
        return how
    if how == "removed":
        del container[key]
        return how
    if how == "emptied":
        container[key] = []
        return how
    container[key] = draw.choice(VALUES) if how == "another" else [container[key]]
    return f"{container[key]!r:.40}"


def outcome_of_crafted(kind: str, folder: Path) -> str:
    """What a folder with a crafted file comes to: its models, or the state from which it goes on."""
    if kind in WITH_MODELS:
        return models_hash(folder)
    return checkpoint_hash(read_checkpoint(folder, *restored_run(kind).restored))


def craft(kind: str, number: int) -> str:
    """A checkpoint of another content is refused in a line where it is read, or is the same to the run."""
    changes = possible_changes(kind)
    file, path, how = changes[number % len(changes)]
    expected = finished_run(kind).models if kind in WITH_MODELS else restored_run(kind).state
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(crafted_from(kind), Path(parent, "run"))
        content = content_of(folder / file)
        if isinstance(path, str):
            changed = change_tensor(content, path, how)
        else:
            changed = change_part(content, path, how, random.Random(number))
        description = f"{kind}, {file}, {path} {changed}"

        digest = sign(folder / file, content)
        if file not in (CHECKPOINT, SELECTED):
            checkpoint = content_of(folder / CHECKPOINT)
            text = json.dumps(checkpoint.parts).replace(digest_in(kind, file), digest)
            sign(folder / CHECKPOINT, Content(json.loads(text), checkpoint.tensors))

        outcome = None

        def go_on() -> None:
            nonlocal outcome
            outcome = outcome_of_crafted(kind, folder)

        fault = fault_of(go_on, description, must_say=("safetensors", ";"))
    if outcome is None:
        return fault
    return "" if outcome == expected else f"{description}: taken for another state"


def digest_in(kind: str, file: str) -> str:
    """The SHA-256 by which a run's checkpoint names the file of a client's state."""
    match = DIGEST.search((crafted_from(kind) / file).read_bytes())
    assert match is not None
    return match[1].decode()


def craft_of_any_kind(number: int) -> str:
    """A crafted file of one kind of run or another."""
    kinds = CRAFTED + WITH_MODELS
    return craft(kinds[number % len(kinds)], number // len(kinds))
