"""The speed of the engine and of a plain PyTorch loop, both measured in the same run.

Both sides run under the same threads and precision; the engine, as in a run, by operations that give the same bits each
time, the plain loop by PyTorch's default ones. After a round each to warm up (of the engine on CUDA as many as it takes
until all steps are replays) they take turns, so that a noisy machine hits both. The ratio is the median over these
pairs of plain seconds over engine seconds: above 1 the engine is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from fedcli.bench.clock import measure_seconds
from fedcli.bench.lower_bounds import LowerBounds, measure_lower_bounds
from fedcli.bench.plain_loop import PlainRounds
from fedcli.bench.workloads import with_random_images
from fedcli.core.batches import count_batches
from fedcli.core.federation import Federation
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.runs.autotune import MAX_PASSES, autotune, peak_memory, until_captured
from fedcli.runs.machine import environment, flushed_denormals, machine_settings
from fedcli.runs.options import ResolvedConfig
from fedcli.runs.prepare import Prepared, prepare
from fedcli.runs.resolve import Setup
from fedcli.runs.rounds import one_round


class Spread(NamedTuple):
    """The least and the largest of some rounds' seconds."""

    least: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the plain loop took, and how it and the lower bounds compare with the engine.

    Attributes:
        plain_seconds_per_round: The median of the plain loop's seconds.
        plain_spread: The range of the plain loop's seconds.
        ratio: How many times as long a round of the plain loop takes as one of the engine; the median over pairs.
        bounds: The lower bounds of a round.
        bound_share: The larger bound over what a round of the engine took; above 1 the bound has failed.
    """

    plain_seconds_per_round: float
    plain_spread: Spread
    ratio: float
    bounds: LowerBounds
    bound_share: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison as files have it."""
        return {
            "plain_seconds_per_round": self.plain_seconds_per_round,
            "plain_spread": list(self.plain_spread),
            "ratio": self.ratio,
            "bound_seconds": self.bounds.bound_seconds,
            "bound_share": self.bound_share,
            "arithmetic_bound_seconds": self.bounds.arithmetic_seconds,
            "memory_bound_seconds": self.bounds.memory_seconds,
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
        threads: The number of threads of the process.
        way: The way in which clients were trained together, in words.
        seconds_per_round: The median, without the test after the round.
        seconds_spread: The range of the seconds of which that is the median.
        examples_per_second: The number of examples that clients train on in a second of a round.
        peak_bytes: The most memory in the engine's first round: on CUDA what PyTorch holds, on a CPU what the process
            does (the largest so far where the system cannot reset it).
        evaluation_seconds: The time of a test of every model that a round has changed.
        data_seconds_share: The part of a round for drawing batches and aggregation.
        whole_seconds: The time of all rounds and their tests; None for a workload, which has no end.
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
    way: str
    seconds_per_round: float
    seconds_spread: Spread
    examples_per_second: float
    peak_bytes: int
    evaluation_seconds: float
    data_seconds_share: float
    whole_seconds: float | None
    comparison: Comparison | None

    def as_dict(self) -> dict[str, Any]:
        """Returns the timing as `--json` and `--csv` write it; what was not measured is left out."""
        written: dict[str, Any] = {
            "workload": self.workload,
            "engine": self.way,
            "device": self.device,
            "method": self.method,
            "seconds_per_round": self.seconds_per_round,
            "seconds_spread": list(self.seconds_spread),
            "samples_per_second": self.examples_per_second,
            "peak_bytes": self.peak_bytes,
            "evaluation_seconds": self.evaluation_seconds,
            "data_seconds_share": self.data_seconds_share,
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


def check_repeats(name: str, setup: Setup, repeats: int) -> None:
    """Refuses to time more rounds of a run than it has after one that warms up."""
    most = setup.config.rounds - 1
    if repeats > most:
        raise UserError(
            f"--repeats {repeats} is too many for {name}: its run has {setup.config.rounds} rounds, one of which warms "
            f"up; give at most {most}."
        )


@flushed_denormals()
def time_workload(name: str, setup: Setup, repeats: int, progress: Callable[[str], Any], with_plain: bool) -> Timing:
    """Times the last rounds of a run, in which all of a method's terms have begun.

    Args:
        name: The name of the workload or of the protocol.
        setup: The run; see `prepare_workload`.
        repeats: The number of rounds to time; see `check_repeats`.
        progress: A function that is told what is being done.
        with_plain: Whether a round of the plain loop follows each round of the engine.
    """
    images = "real"
    if not datasets.is_present(setup.dataset):
        images = "random"
        setup = with_random_images(setup)
    config = setup.config
    timed_rounds = range(config.rounds - repeats, config.rounds)

    def report(text: str) -> None:
        progress(f"{name}: {text}")

    reset_peak_memory(setup.device)
    prepared = prepare(setup)
    fed = prepared.fed
    with machine_settings(fed):  # what a run would set, for both sides, as are denormal numbers
        autotune(fed)
        sides = _warm_up_sides(setup, prepared, timed_rounds.start - 1, with_plain)
        times = _time_rounds(sides, timed_rounds, report)
        comparison = None
        if sides.plain is not None:
            report("peak rates")
            comparison = _compare(times, measure_lower_bounds(fed, sides.plain.count_flops_per_example()))
        way = fed.engine.mode
        hardware = environment(setup.device)["hardware"]

    seconds_per_round = times.rounds.median()
    examples = sum(_count_examples(fed, number) for number in timed_rounds)
    whole_seconds = None
    if not with_plain:
        whole_seconds = config.rounds * times.rounds_with_test.median()
    return Timing(
        workload=name,
        method=setup.method.name,
        config=config,
        images=images,
        repeats=repeats,
        device=str(setup.device),
        hardware=hardware["name"],
        threads=hardware["threads"],
        way=way,
        seconds_per_round=seconds_per_round,
        seconds_spread=_find_spread(times.rounds),
        examples_per_second=examples / repeats / seconds_per_round,
        peak_bytes=sides.peak_bytes,
        evaluation_seconds=times.engine["evaluate"].median(),
        data_seconds_share=times.around_training.median() / seconds_per_round,
        whole_seconds=whole_seconds,
        comparison=comparison,
    )


def _count_examples(fed: Federation, number: int) -> int:
    """Returns how many examples the clients of a round train on, those of each epoch anew.

    Examples that are held out to validate on, or in a last batch that is dropped, do not count.
    """
    sizes = [len(fed.training[client]) for client in fed.cohort(number).client_ids]
    batches = count_batches(sizes, fed.batch_size, fed.config.drop_last)
    return fed.local_epochs * int(np.minimum(sizes, np.multiply(batches, fed.batch_size)).sum())


def reset_peak_memory(device: torch.device) -> None:
    """Lets `peak_memory` count from here on, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class _Sides(NamedTuple):
    """Both sides, warmed up."""

    setup: Setup
    fed: Federation
    state: Any  # the method's, after the engine's rounds so far
    plain: PlainRounds | None
    peak_bytes: int  # of the engine's rounds so far


def _warm_up_sides(setup: Setup, prepared: Prepared, round_number: int, with_plain: bool) -> _Sides:
    """Runs a round of the engine, and one of the plain loop if it takes part."""
    fed = prepared.fed
    state = warm_up(setup, fed, round_number)
    peak_bytes = peak_memory(setup.device)
    plain = None
    if with_plain:
        plain = PlainRounds(fed, prepared.dataset)
        plain.run_round(fed.cohort(round_number).client_ids)
    return _Sides(setup, fed, state, plain, peak_bytes)


def warm_up(setup: Setup, fed: Federation, round_number: int) -> Any:
    """Runs a round once, or until all its steps are replays of graphs; returns the method's state after it."""
    cohort = fed.cohort(round_number)
    state = setup.method.init(fed, setup.method_config)
    if fed.engine.graphs is None:
        state, _ = one_round(setup, fed, state, cohort)
        return state
    for _ in until_captured(fed.engine, MAX_PASSES):
        state, _ = one_round(setup, fed, state, cohort)
    return state


class _Times(NamedTuple):
    """The seconds of some rounds, a row a round."""

    engine: pd.DataFrame  # a column each for `data`, `train`, `aggregate` and `evaluate`
    plain: pd.Series  # the plain loop's; empty without it

    @property
    def around_training(self) -> pd.Series:
        """The seconds of the parts of each of the engine's rounds before and after local training."""
        return self.engine["data"] + self.engine["aggregate"]

    @property
    def rounds(self) -> pd.Series:
        """The seconds of each of the engine's rounds, without the test after it."""
        return self.engine["train"] + self.around_training

    @property
    def rounds_with_test(self) -> pd.Series:
        """The seconds of each of the engine's rounds and of the test after it."""
        return self.rounds + self.engine["evaluate"]


def _time_rounds(sides: _Sides, numbers: range, report: Callable[[str], None]) -> _Times:
    """Times rounds of the engine, each followed by one of the plain loop, if it takes part, with the same clients."""
    engine_seconds = []
    plain_seconds = []
    state = sides.state
    for repeat, number in enumerate(numbers, start=1):
        report(f"round {repeat} of {len(numbers)}")
        cohort = sides.fed.cohort(number)
        state, entry = one_round(sides.setup, sides.fed, state, cohort)
        engine_seconds.append(entry["seconds"])
        if sides.plain is not None:
            plain_round = partial(sides.plain.run_round, cohort.client_ids)
            plain_seconds.append(measure_seconds(plain_round, sides.setup.device))
    return _Times(pd.DataFrame(engine_seconds), pd.Series(plain_seconds, dtype=float))


def _compare(times: _Times, bounds: LowerBounds) -> Comparison:
    """Compares the plain loop and the lower bounds of a round with the engine."""
    return Comparison(
        plain_seconds_per_round=times.plain.median(),
        plain_spread=_find_spread(times.plain),
        ratio=(times.plain / times.rounds).median(),
        bounds=bounds,
        bound_share=bounds.bound_seconds / times.rounds.median(),
    )


def _find_spread(seconds: pd.Series) -> Spread:
    return Spread(least=float(seconds.min()), largest=float(seconds.max()))
