"""What a side is given and what it returns."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

NUM_CLASSES = 10  # of MNIST and of Fashion-MNIST


@dataclass(frozen=True)
class Training:
    """What all sides train, by the names of fedcli's options."""

    method: str
    backbone: str
    lr: float
    num_clients: int
    cohort_size: int
    local_epochs: int
    batch_size: int
    drop_last: bool
    seed: int
    prototype_weight: float | None = None  # of FedProto

    @property
    def share_of_clients(self) -> float:
        """The share of the clients that takes part in a round."""
        return self.cohort_size / self.num_clients


@dataclass(frozen=True)
class Job:
    """The rounds that every side trains."""

    folder: Path  # with the clients' images and the initial model, see `clients.py`
    options: Mapping[str, Any]  # of fedcli: those of `Training`, and how the images are divided
    rounds: int
    pfllib: str | None  # the checkout of PFLlib

    @property
    def training(self) -> Training:
        """The part of the options that all sides read."""
        names = [field.name for field in fields(Training)]
        return Training(**{name: self.options[name] for name in names if name in self.options})

    def to_json(self) -> str:
        """The job as an argument of a command."""
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """The job that `to_json` has written."""
        read = json.loads(text)
        return cls(**{**read, "folder": Path(read["folder"])})


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    seconds: list[float]  # of each round
    accuracy: float | None  # of the last model, a fraction; None where the side tests nothing
    versions: str  # of the toolkit and of what runs it


@dataclass(frozen=True)
class Measurement:
    """What the process of a side says."""

    outcome: Outcome
    torch: str  # its version
    cores: int  # of the machine

    def to_json(self) -> str:
        """The measurement in one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Measurement":
        """The measurement that `to_json` has written."""
        read = json.loads(text)
        return cls(**{**read, "outcome": Outcome(**read["outcome"])})


class RoundClock:
    """Notes when each round ends, and when it was made itself, before the first."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def end_round(self) -> None:
        """Is called as a round ends."""
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The seconds of each round, from the end of the one before."""
        starts = self._times[:-1]
        ends = self._times[1:]
        return [end - start for start, end in zip(starts, ends, strict=True)]
