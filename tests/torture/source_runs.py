"""Runs of which trials spoil copies, and what a copy comes to."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch

import fedcli
from fedcli.measure import quality
from fedcli.measure.feature_files import MODEL_FEATURES
from fedcli.runs import resume
from fedcli.runs.models import NAMES_OF_ROUNDS
from fedcli.runs.record import params_hash
from tests.listeners import Stop, StopAfter
from tests.run_options import SHORT_RUN

THREE_SHORT_ROUNDS = {**SHORT_RUN, "train_examples": 60, "rounds": 3, "batch_size": 8, "backbone": "cnn-small"}
del THREE_SHORT_ROUNDS["dataset"]  # each method has its own built-in one
STOPPED_RUNS: dict[str, dict[str, Any]] = {
    "global model": {"method": "fedfm"},
    "client state": {"method": "scaffold"},
    "personal": {"method": "local"},
    "heterogeneous": {"method": "fedproto", "protocol": "fedsa:digits-mixed", "backbone": None},
    "public": {
        "method": "fccl-plus", "protocol": "fccl:digit-domains", "public_examples": 12, "public_batch_size": 6,
        "cohort_size": 4,
    },
    "server training": {"method": "fedgen"},
}  # fmt: skip


@dataclass(frozen=True)
class SourceRun:
    """A run; trials spoil copies of it.

    Attributes:
        folder: Where it is, which stays as it is.
        outcome_of: What a copy in a folder comes to, a text that stands for numbers.
    """

    folder: Path
    outcome_of: Callable[[Path], str]

    @cached_property
    def outcome(self) -> str:
        """The outcome of a copy that nobody has spoilt."""
        with TemporaryDirectory() as parent:
            return self.outcome_of(shutil.copytree(self.folder, Path(parent, "run")))


@lru_cache
def stopped_run(kind: str, seed: int = 0) -> SourceRun:
    """Makes a run that is stopped after two of three rounds; a copy comes to its parameters once it is resumed."""
    folder = Path(mkdtemp(), "run")
    with suppress(Stop):
        fedcli.run(**{**THREE_SHORT_ROUNDS, **STOPPED_RUNS[kind]}, seed=seed, out=folder, progress=StopAfter(2))
    return SourceRun(folder, resumed_hash)


@lru_cache
def run_with_features(seed: int = 0) -> SourceRun:
    """Makes a finished run whose features are measured; a copy comes to these and its models."""
    folder = Path(mkdtemp(), "run")
    fedcli.run("fedavg", **THREE_SHORT_ROUNDS, seed=seed, out=folder)
    quality.add_quality(folder)
    return SourceRun(folder, features_hash)


def resumed_hash(folder: Path) -> str:
    """Stands for the parameters of a run once it is resumed."""
    return resume.resume(folder).record["summary"]["params_sha256"]


def features_hash(folder: Path) -> str:
    """Stands for the features and the models of a finished run."""
    run = fedcli.load(folder)
    values = [*MODEL_FEATURES.read(folder, run.record).items()]
    for name in NAMES_OF_ROUNDS:
        values += run.model(round=name).state_dict().items()
    return params_hash((name, torch.as_tensor(value)) for name, value in values)
