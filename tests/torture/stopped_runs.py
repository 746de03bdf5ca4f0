"""Runs that were stopped or are finished, of which trials spoil copies, and what each comes to."""

import shutil
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import torch

import fedcli
from fedcli.measure import quality
from fedcli.measure.feature_files import MODEL_FEATURES
from fedcli.runs import resume
from fedcli.runs.models import NAMES_OF_ROUNDS
from fedcli.runs.record import params_hash
from tests.tiny_runs import TINY, Stop, StopAfter

FEATURES = "finished, with features"
STOPPED_RUNS = {
    "global model": {"method": "fedfm"},
    "client state": {"method": "scaffold"},
    "personal": {"method": "local"},
    "heterogeneous": {"method": "fedproto", "protocol": "fedsa:digits-mixed", "backbone": None},
    "public": {
        "method": "fccl-plus", "protocol": "fccl:digit-domains", "public_examples": 12, "public_batch_size": 6,
        "cohort_size": 4,
    },
    "server training": {"method": "fedgen"},
    FEATURES: {"method": "fedavg"},
}  # fmt: skip


class StoppedRun(NamedTuple):
    """A run that stopped after two of three rounds, unless its kind says finished, and one with another seed."""

    folder: Path
    other_folder: Path
    outcome: str  # see `outcome_of`


@lru_cache
def stopped_run(kind: str) -> StoppedRun:
    """Makes the two runs of a kind."""
    parent = Path(mkdtemp())
    is_finished = kind.startswith("finished")
    rounds = 9 if is_finished else 2
    options = {**TINY, "train_examples": 60, "rounds": 3, "batch_size": 8, "backbone": "cnn-small"}
    options |= STOPPED_RUNS[kind]
    del options["dataset"]  # each method has its own built-in one
    for name, seed in (("run", 0), ("other", 1)):
        with suppress(Stop):
            fedcli.run(**options, seed=seed, out=parent / name, progress=StopAfter(rounds))
        if is_finished:
            quality.add_quality(parent / name)
    outcome = outcome_of(shutil.copytree(parent / "run", parent / "whole"))
    return StoppedRun(parent / "run", parent / "other", outcome)


def outcome_of(folder: Path) -> str:
    """What a run comes to: its parameters once it is resumed, or, where it has features, these and its models."""
    if not (folder / MODEL_FEATURES.name).is_file():
        return resume.resume(folder).record["summary"]["params_sha256"]
    run = fedcli.load(folder)
    values = [*MODEL_FEATURES.read(folder, run.record).items()]
    for name in NAMES_OF_ROUNDS:
        values += run.model(round=name).state_dict().items()
    return params_hash((name, torch.as_tensor(value)) for name, value in values)
