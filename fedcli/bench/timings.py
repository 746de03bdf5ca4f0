"""What was timed: the engine's rounds, with those of the plain loop or with the whole run that they are a part of."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from fedcli.bench.estimate import Estimate
from fedcli.runs.options import ResolvedConfig


class SecondsSummary(NamedTuple):
    """The median, the minimum and the maximum of the seconds of some rounds."""

    median: float
    minimum: float
    maximum: float


def summarize_seconds(seconds: Sequence[float]) -> SecondsSummary:
    """Returns the median, the minimum and the maximum of the seconds of some rounds."""
    return SecondsSummary(median=median(seconds), minimum=min(seconds), maximum=max(seconds))


class PlainTiming(NamedTuple):
    """What the plain loop took for the rounds of the engine."""

    round_seconds: SecondsSummary
    ratio: float  # to the engine's seconds, see `fedcli.bench.speed`
    estimate: Estimate  # of a round, see `fedcli.bench.estimate`


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What the engine took for rounds of a run, and under what conditions.

    Attributes:
        workload: The name of the workload or of the protocol.
        method: The name of the method.
        config: The options of the run.
        images: "real" or "random".
        repeats: The number of rounds that were timed.
        device: The device, as `--device` has it.
        hardware: The name of the processor.
        threads: The number of threads of the process during the run.
        mode: How clients were trained together, as the engine says it in words.
        round_seconds: The seconds of a round, without the test after it.
        examples_per_second: The number of examples that clients train on in a second of a round.
        peak_bytes: The most memory until the engine has warmed up. On CUDA what PyTorch holds, from the choice of the
            mode on, if there is one. On a CPU what the process holds, with what it takes to prepare the data, and
            without forked processes (the largest so far where the system cannot reset it).
        test_seconds: The median of a test of every model that a round has changed.
        around_training_share: The part of a round before and after local training, as the mean of the models.
        plain: What the plain loop took; None where it took no part.
        whole_seconds: An estimate, from the rounds and tests that were timed, of the seconds of all rounds of the run
            and of the tests that follow some; None for a workload.
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
    round_seconds: SecondsSummary
    examples_per_second: float
    peak_bytes: int
    test_seconds: float
    around_training_share: float
    plain: PlainTiming | None = None
    whole_seconds: float | None = None

    @property
    def estimate_share(self) -> float | None:
        """The estimate over what a round of the engine took; None where the plain loop took no part."""
        if self.plain is None:
            return None
        return self.plain.estimate.seconds / self.round_seconds.median

    def as_dict(self) -> dict[str, Any]:
        """Returns the timing by the names of the columns of `--csv`, without those for which it has nothing."""
        written = {
            "workload": self.workload,
            "mode": self.mode,
            "device": self.device,
            "method": self.method,
            "seconds_per_round": self.round_seconds.median,
            "seconds_spread": [self.round_seconds.minimum, self.round_seconds.maximum],
            "examples_per_second": self.examples_per_second,
            "peak_bytes": self.peak_bytes,
            "test_seconds": self.test_seconds,
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
        if self.plain is not None:
            written |= {
                "plain_seconds_per_round": self.plain.round_seconds.median,
                "plain_spread": [self.plain.round_seconds.minimum, self.plain.round_seconds.maximum],
                "ratio": self.plain.ratio,
                "estimate_seconds": self.plain.estimate.seconds,
                "estimate_share": self.estimate_share,
                "arithmetic_estimate_seconds": self.plain.estimate.arithmetic_seconds,
                "memory_estimate_seconds": self.plain.estimate.memory_seconds,
            }
        if self.whole_seconds is not None:
            written["whole_seconds"] = self.whole_seconds
        return written
