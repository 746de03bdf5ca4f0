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

from fedcli.bench.clock import seconds_of
from fedcli.bench.lower_bounds import LowerBounds, lower_bounds
from fedcli.bench.plain_loop import PlainRounds
from fedcli.bench.workloads import with_random_images
from fedcli.core.batches import count_batches
from fedcli.core.federation import Federation
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.runs.autotune import MAX_PASSES, autotune, peak_memory, until_captured
from fedcli.runs.machine import environment, flushed_denormals, machine_settings
from fedcli.runs.prepare import prepare
from fedcli.runs.resolve import Setup
from fedcli.runs.rounds import one_round


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the plain loop took, and how it and the lower bounds compare with the engine.

    Attributes:
        plain_seconds_per_round: The median.
        plain_spread: The least and the largest seconds.
        ratio: How many times as long as a round of the engine; the median over pairs of rounds.
        bounds: Of a round.
        bound_share: The larger bound over what a round of the engine took; above 1 the bound has failed.
    """

    plain_seconds_per_round: float
    plain_spread: list[float]
    ratio: float
    bounds: LowerBounds
    bound_share: float

    def as_dict(self) -> dict[str, Any]:
        """Returns it as files have it."""
        return {
            "plain_seconds_per_round": self.plain_seconds_per_round,
            "plain_spread": self.plain_spread,
            "ratio": self.ratio,
            "bound_seconds": self.bounds.bound_seconds,
            "bound_share": self.bound_share,
            "arithmetic_bound_seconds": self.bounds.arithmetic_seconds,
            "memory_bound_seconds": self.bounds.memory_seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was run, and what the engine took for it, in the order of files.

    Attributes:
        workload: Its name, or that of a protocol.
        engine: How clients were trained together, in words.
        device: As `--device` has it.
        method: Its name.
        seconds_per_round: The median, without the test after the round.
        seconds_spread: The least and the largest seconds.
        samples_per_second: Trained on.
        peak_bytes: Of the engine's first round: on CUDA what PyTorch holds, on a CPU what the process does (the largest
            so far where the system cannot reset it).
        evaluation_seconds: Of a test of every model that a round has changed.
        data_seconds_share: Of a round, the part for drawing batches and aggregation.
        images: "real" or "random".
        torch: Its version.
        threads: Of the process.
        hardware: The processor.
        precision: Like the four after it, the run's option.
        repeats: Rounds that were timed.
        whole_seconds: Of all rounds and their tests; None for a workload, which has no end.
        comparison: With the plain loop; None for a method under its own protocol, which the plain loop does not train.
    """

    workload: str
    engine: str
    device: str
    method: str
    seconds_per_round: float
    seconds_spread: list[float]
    samples_per_second: float
    peak_bytes: int
    evaluation_seconds: float
    data_seconds_share: float
    images: str
    torch: str
    threads: int
    hardware: str
    precision: str
    cohort_size: int | None  # None for all clients
    local_epochs: int
    batch_size: int
    seed: int
    repeats: int
    whole_seconds: float | None
    comparison: Comparison | None

    def as_dict(self) -> dict[str, Any]:
        """Returns it as `--json` and `--csv` write it; what was not measured is left out."""
        written = {**vars(self)}
        del written["comparison"]
        if self.whole_seconds is None:
            del written["whole_seconds"]
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
        name: Of the workload, or of the protocol.
        setup: Of the run; see `prepare_workload`.
        repeats: Rounds to time; see `check_repeats`.
        progress: Told what is being done.
        with_plain: Whether a round of the plain loop follows each round of the engine.
    """
    images = "real"
    if not datasets.is_present(setup.dataset):
        images = "random"
        setup = with_random_images(setup)
    config = setup.config
    reset_peak_memory(setup.device)
    prepared = prepare(setup)
    fed = prepared.fed
    examples = len(prepared.dataset.y_train) // config.num_clients  # of a client
    passes = config.cohort_size * config.local_epochs  # in a round, over a client's examples
    warm_up_round = config.rounds - repeats - 1  # before the timed ones

    def report(text: str) -> None:
        progress(f"{name}: {text}")

    with machine_settings(fed):  # what a run would set, for both sides, as are denormal numbers
        autotune(fed)
        state = warm_up(setup, fed, warm_up_round)
        peak_bytes = peak_memory(setup.device)
        plain = None
        if with_plain:
            plain = PlainRounds(fed, prepared.dataset)
            plain.round(fed.cohort(warm_up_round).client_ids)
        timed_rounds = range(warm_up_round + 1, warm_up_round + 1 + repeats)
        times = _time_rounds(setup, fed, state, plain, timed_rounds, report)
        whole_seconds = None
        comparison = None
        if plain is None:
            tested = times.rounds + times.engine["evaluate"]
            whole_seconds = config.rounds * tested.median()
        else:
            report("peak rates")
            comparison = _compare(times, lower_bounds(fed, plain.flops_per_sample(), passes, examples))
        mode = fed.engine.mode
        hardware = environment(setup.device)["hardware"]
    seconds = times.rounds.median()
    return Timing(
        workload=name,
        engine=mode,
        device=str(setup.device),
        method=setup.method.name,
        seconds_per_round=seconds,
        seconds_spread=_spread(times.rounds),
        samples_per_second=sum(_samples_of_round(fed, number) for number in timed_rounds) / repeats / seconds,
        peak_bytes=peak_bytes,
        evaluation_seconds=times.engine["evaluate"].median(),
        data_seconds_share=times.around_training.median() / seconds,
        images=images,
        torch=torch.__version__,
        threads=hardware["threads"],
        hardware=hardware["name"],
        precision=config.precision,
        cohort_size=config.cohort_size,
        local_epochs=config.local_epochs,
        batch_size=config.batch_size,
        seed=config.seed,
        repeats=repeats,
        whole_seconds=whole_seconds,
        comparison=comparison,
    )


def _samples_of_round(fed: Federation, number: int) -> int:
    """How many examples the clients of a round train on, those of each epoch anew.

    None are held out to validate on, or in a last batch that is dropped.
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
    plain: pd.Series  # of the plain loop's; empty without it

    @property
    def around_training(self) -> pd.Series:
        """Of the parts of each of the engine's rounds before and after local training."""
        return self.engine["data"] + self.engine["aggregate"]

    @property
    def rounds(self) -> pd.Series:
        """Of each of the engine's rounds, without the test after it."""
        return self.engine["train"] + self.around_training


def _time_rounds(
    setup: Setup, fed: Federation, state: Any, plain: PlainRounds | None, numbers: range,
    report: Callable[[str], None],
) -> _Times:  # fmt: skip
    """Times rounds from a state on, each followed by one of the plain loop, if given, with the same clients."""
    engine_seconds = []
    plain_seconds = []
    for repeat, number in enumerate(numbers, start=1):
        report(f"round {repeat} of {len(numbers)}")
        cohort = fed.cohort(number)
        state, entry = one_round(setup, fed, state, cohort)
        engine_seconds.append(entry["seconds"])
        if plain is not None:
            plain_seconds.append(seconds_of(partial(plain.round, cohort.client_ids), setup.device))
    return _Times(pd.DataFrame(engine_seconds), pd.Series(plain_seconds, dtype=float))


def _compare(times: _Times, bounds: LowerBounds) -> Comparison:
    """Compares the plain loop and the lower bounds of a round with the engine."""
    return Comparison(
        plain_seconds_per_round=times.plain.median(),
        plain_spread=_spread(times.plain),
        ratio=(times.plain / times.rounds).median(),
        bounds=bounds,
        bound_share=bounds.bound_seconds / times.rounds.median(),
    )


def _spread(seconds: pd.Series) -> list[float]:
    return [*seconds.agg(["min", "max"])]
