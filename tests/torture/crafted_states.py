"""Checkpoints and client states of another content, for which their digests vouch."""

import json
import random
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import torch

import fedcli
from fedcli import registry
from fedcli.core.client_states import stored
from fedcli.core.trees import to_names
from fedcli.runs import resume
from fedcli.runs.checkpoints import Checkpoint, read_checkpoint
from fedcli.runs.models import NAMES_OF_ROUNDS
from fedcli.runs.record import params_hash, read_record
from tests.tiny_runs import TINY
from tests.torture.faults import attempt
from tests.torture.state_changes import PartChange, TensorChange, change_file, changes_in
from tests.torture.stopped_runs import stopped_run

STOPPED_KINDS = ("client state", "global model")  # kinds of stopped runs
FINISHED_RUNS: dict[str, dict[str, Any]] = {
    "finished, best models kept": {"method": "fedfm", "rounds": 5, "validation": 0.2, "lr": 0.1, "seed": 2},
    "finished, own models": {"method": "local", "rounds": 2, "validation": 0},
    "finished, own models and a global one": {"method": "ditto", "rounds": 2, "validation": 0},
    "finished, prototypes": {"method": "fedproto", "rounds": 2, "protocol": "fedsa:digits"},
}
FINISHED_KINDS = tuple(FINISHED_RUNS)


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
        for name in NAMES_OF_ROUNDS:
            values += run.model(owner, round=name, prototypes=by_prototypes).state_dict().items()
    return params_hash(values)


def source_folder(kind: str) -> Path:
    """The folder of the run of a kind, of which a copy is changed."""
    if kind in FINISHED_KINDS:
        return finished_run(kind).folder
    return stopped_run(kind).folder


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
    structure, tensors = to_names([state, sizes, len(checkpoint.record_part["rounds"])])
    return json.dumps(structure) + params_hash(sorted(tensors.items()))


@lru_cache
def possible_changes(kind: str) -> list[TensorChange | PartChange]:
    """What may be changed in the run of a kind."""
    return changes_in(source_folder(kind))


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
