"""What a side is given and what it returns."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_CLASSES = 10  # of MNIST and of Fashion-MNIST


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all sides train, by the names of fedcli's options."""

    method: str = "fedavg"
    backbone: str = "cnn-mcmahan"
    lr: float = 0.01
    num_clients: int = 100
    cohort_size: int
    local_epochs: int
    batch_size: int
    drop_last: bool = True  # whether a batch that is not full is left out
    seed: int = 0
    prototype_weight: float | None = None  # of FedProto

    @property
    def share_of_clients(self) -> float:
        """The share of the clients that takes part in a round."""
        return self.cohort_size / self.num_clients


@dataclass(frozen=True)
class Workload:
    """What is trained, and what fedcli alone is told besides."""

    training: Training
    fedcli_options: Mapping[str, Any]  # how the images are divided, and what the other sides do anyway

    @property
    def options(self) -> dict[str, Any]:
        """All options of fedcli."""
        shared = {name: value for name, value in asdict(self.training).items() if value is not None}
        return {**shared, **self.fedcli_options}


@dataclass(frozen=True)
class Job:
    """The rounds that every side trains."""

    folder: Path  # with the clients' images and the initial model, see `clients.py`
    workload: Workload
    rounds: int
    pfllib_checkout: str | None  # needed by the side pfllib alone

    @property
    def training(self) -> Training:
        """What all sides train."""
        return self.workload.training

    def to_json(self) -> str:
        """The job as an argument of a command."""
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """The job that `to_json` has written."""
        read = json.loads(text)
        training = Training(**read["workload"]["training"])
        workload = Workload(training, read["workload"]["fedcli_options"])
        return cls(Path(read["folder"]), workload, read["rounds"], read["pfllib_checkout"])


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
    torch_version: str
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
