"""What a side is given and what it returns."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """The rounds that every side trains."""

    folder: str  # with the clients' images and the initial model, see `clients.py`
    options: dict[str, Any]  # of fedcli, which say what is trained
    rounds: int
    pfllib: str  # the checkout of PFLlib

    @property
    def path(self) -> Path:
        """The folder as a path."""
        return Path(self.folder)

    @property
    def share_of_clients(self) -> float:
        """The share of the clients that takes part in a round."""
        return self.options["cohort_size"] / self.options["num_clients"]


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    seconds: list[float]  # of each round but the first
    accuracy: float | None  # of the last model, a fraction; None where the side tests nothing
    versions: str  # of the toolkit and of what runs it


@dataclass(frozen=True)
class Measurement:
    """What the process of a side says."""

    outcome: Outcome
    torch: str  # its version
    threads: int


class RoundClock:
    """Notes when each round ends."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def end_round(self) -> None:
        """Is called as a round ends."""
        self._ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The seconds of each round but the first, from the end of the one before."""
        earlier = self._ends[:-1]
        later = self._ends[1:]
        return [end - start for start, end in zip(earlier, later, strict=True)]
