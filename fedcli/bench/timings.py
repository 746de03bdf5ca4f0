"""What was timed: the engine's rounds and, beside them, those of the plain loop and an estimate."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fedcli.bench.estimate import Estimate
from fedcli.runs.options import ResolvedConfig


class Spread(NamedTuple):
    """The least and the largest of some rounds' seconds."""

    least: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the plain loop took, and how it and the estimate compare with the engine.

    Attributes:
        plain_seconds_per_round: The median of the plain loop's seconds.
        plain_spread: Their least and largest.
        ratio: How many times as long a round of the plain loop takes as one of the engine; the median over pairs.
        estimate: How long a round takes at the machine's peak rates.
        estimate_share: The estimate over what a round of the engine took.
    """

    plain_seconds_per_round: float
    plain_spread: Spread
    ratio: float
    estimate: Estimate
    estimate_share: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison as files have it, which call the estimate a bound."""
        return {
            "plain_seconds_per_round": self.plain_seconds_per_round,
            "plain_spread": list(self.plain_spread),
            "ratio": self.ratio,
            "bound_seconds": self.estimate.seconds,
            "bound_share": self.estimate_share,
            "arithmetic_bound_seconds": self.estimate.arithmetic_seconds,
            "memory_bound_seconds": self.estimate.memory_seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was run, and what the engine took for it.

    Attributes:
        workload: The name of the workload or of the protocol.
        method: The name of the method.
        config: The options of the run.
        images: "real" or "random".
        repeats: The number of rounds that were timed.
        device: The device, as `--device` has it.
        hardware: The name of the processor.
        threads: The number of threads of the process during the run.
        mode: The way in which clients were trained together, in words.
        seconds_per_round: The median, without the test after the round.
        seconds_spread: The least and the largest of the seconds of which that is the median.
        examples_per_second: The number of examples that clients train on in a second of a round.
        peak_bytes: The most memory until the engine has warmed up. On CUDA what PyTorch holds, from the
            choice of the way on, if there is one. On a CPU what the process holds, with what it takes to prepare the
            data, and without forked processes (the largest so far where the system cannot reset it).
        evaluation_seconds: The median of a test of every model that a round has changed.
        around_training_share: The part of a round before and after local training, as the mean of the models.
        whole_seconds: The time of all rounds and of the tests that follow some; None for a workload, which has no
            end.
        comparison: The comparison with the plain loop; None for a method under its own protocol, which the plain loop
            does not train.
    """

    workload: str
    method: str
    config: ResolvedConfig
    images: str
    repeats: int
    device: str
    hardware: str
    threads: int
    mode: str
    seconds_per_round: float
    seconds_spread: Spread
    examples_per_second: float
    peak_bytes: int
    evaluation_seconds: float
    around_training_share: float
    whole_seconds: float | None = None
    comparison: Comparison | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the timing as `--json` and `--csv` write it; what was not measured is left out."""
        written: dict[str, Any] = {
            "workload": self.workload,
            "way": self.mode,
            "device": self.device,
            "method": self.method,
            "seconds_per_round": self.seconds_per_round,
            "seconds_spread": list(self.seconds_spread),
            "examples_per_second": self.examples_per_second,
            "peak_bytes": self.peak_bytes,
            "evaluation_seconds": self.evaluation_seconds,
            "around_training_share": self.around_training_share,
            "images": self.images,
            "torch": torch.__version__,
            "threads": self.threads,
            "hardware": self.hardware,
            "precision": self.config.precision,
            "cohort_size": self.config.cohort_size,
            "local_epochs": self.config.local_epochs,
            "batch_size": self.config.batch_size,
            "seed": self.config.seed,
            "repeats": self.repeats,
        }
        if self.whole_seconds is not None:
            written["whole_seconds"] = self.whole_seconds
        if self.comparison is not None:
            written |= self.comparison.as_dict()
        return written
