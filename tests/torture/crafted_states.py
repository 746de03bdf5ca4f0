"""Checkpoints, client states and models whose content is changed, with digests that vouch for the new content."""

import json
import random
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch

import fedcli
from fedcli import registry
from fedcli.core.client_states import find_stored_states
from fedcli.core.trees import to_names
from fedcli.runs import resume
from fedcli.runs.checkpoints import Checkpoint, read_checkpoint
from fedcli.runs.models import NAMES_OF_ROUNDS
from fedcli.runs.record import params_hash, read_record
from tests.run_options import SHORT_RUN
from tests.torture.faults import attempt
from tests.torture.source_runs import SourceRun, stopped_run
from tests.torture.state_changes import PartChange, TensorChange, change_file, changes_in

STOPPED_KINDS = ("client state", "global model")  # of `STOPPED_RUNS`
FINISHED_RUNS: dict[str, dict[str, Any]] = {
    "finished, best models kept": {"method": "fedfm", "rounds": 5, "validation": 0.2, "lr": 0.1, "seed": 2},
    "finished, own models": {"method": "local", "rounds": 2, "validation": 0},
    "finished, own models and a global one": {"method": "ditto", "rounds": 2, "validation": 0},
    "finished, prototypes": {"method": "fedproto", "rounds": 2, "protocol": "fedsa:digits"},
}
FINISHED_KINDS = tuple(FINISHED_RUNS)


@lru_cache
def run_to_craft(kind: str) -> SourceRun:
    """Makes the run of a kind; trials change files in copies of it."""
    if kind in FINISHED_RUNS:
        return finished_run(FINISHED_RUNS[kind])
    return restorable_run(kind)


def finished_run(options: dict[str, Any]) -> SourceRun:
    """Makes a finished run; a copy comes to its models."""
    folder = Path(mkdtemp(), "run")
    fedcli.run(
        **{**SHORT_RUN, "batch_size": 8, "train_examples": 60, "protocol": "fedfm:digits", **options}, out=folder
    )
    return SourceRun(folder, models_hash)


def restorable_run(kind: str) -> SourceRun:
    """Makes a stopped run; a copy comes to the state from which it goes on."""
    folder = stopped_run(kind).folder
    restored = resume.restore(read_record(folder), ())

    def state_hash(copy: Path) -> str:
        return checkpoint_hash(read_checkpoint(copy, restored.record, restored.setup, restored.fed))

    return SourceRun(folder, state_hash)


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


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """Stands for the state and the number of rounds from which a run goes on."""
    kept_states = find_stored_states(checkpoint.state)
    clients = {name: dict(kept) for name, kept in kept_states.items()}
    sizes = [kept.nbytes for kept in kept_states.values()]  # by which memory is shared out
    state = checkpoint.state._replace(**clients)
    structure, tensors = to_names([state, sizes, len(checkpoint.record_part["rounds"])])
    return json.dumps(structure) + params_hash(sorted(tensors.items()))


@lru_cache
def possible_changes(kind: str) -> list[TensorChange | PartChange]:
    """Returns all changes that can be made in the run of a kind."""
    return changes_in(run_to_craft(kind).folder)


def read_crafted_file(kind: str, number: int) -> str | None:
    """A checkpoint of another content is refused in a line where it is read, or is the same to the run."""
    changes = possible_changes(kind)
    change = changes[number % len(changes)]
    source = run_to_craft(kind)
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(source.folder, Path(parent, "run"))
        changed = change_file(folder, change, random.Random(number))
        description = f"{kind}, {changed}"
        outcome, fault = attempt(lambda: source.outcome_of(folder), description, must_say=("safetensors", ";"))

    if outcome is None:
        return fault
    if outcome != source.outcome:
        return f"{description}: taken for another state"
    return None


def read_crafted_file_of_any_kind(number: int) -> str | None:
    """A crafted file of one kind of run or another."""
    kinds = STOPPED_KINDS + FINISHED_KINDS
    return read_crafted_file(kinds[number % len(kinds)], number // len(kinds))
