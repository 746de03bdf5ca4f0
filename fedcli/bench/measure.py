"""The speed of the engine and of a plain PyTorch loop, both measured in the same run.

Both sides run under the same threads and precision; the engine, as in a run, by operations that give the same bits each
time, the plain loop by PyTorch's default ones. After a round each to warm up (of the engine on CUDA as many as it takes
until all steps are replays) they take turns, so that a noisy machine hits both. The ratio is the median over these
pairs of plain seconds over engine seconds: above 1 the engine is faster.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from fedcli.bench.clock import seconds_of
from fedcli.bench.lower_bounds import LowerBounds, lower_bounds
from fedcli.bench.plain_loop import PlainRounds
from fedcli.bench.workloads import with_random_images
from fedcli.core.federation import Federation
from fedcli.data import datasets
from fedcli.runs.autotune import PASSES, autotune, peak_memory, until_captured
from fedcli.runs.machine import environment, flushed_denormals, machine_settings
from fedcli.runs.prepare import prepare
from fedcli.runs.resolve import Setup
from fedcli.runs.rounds import one_round


@flushed_denormals()
def measure(name: str, setup: Setup, repeats: int, progress: Callable[[str], Any], with_plain: bool) -> dict[str, Any]:
    """Times the last rounds of a run, in which all of a method's terms have begun.

    Args:
        name: Of the workload, or of the protocol.
        setup: Of the run; see `prepare_workload`.
        repeats: Rounds to time.
        progress: Told what is being done.
        with_plain: Whether a round of the plain loop follows each round of the engine.

    Returns:
        What was run and what it took; spreads are [least, largest]. `peak_bytes` is of the engine's first round: on
        CUDA what PyTorch holds, on a CPU what the process does (the largest so far where the system cannot reset it).
        `evaluation_seconds` is a test of every model that a round has changed, `data_seconds_share` what a round spends
        on drawing batches and on aggregation. Without the plain loop `whole_seconds`, of all rounds, replaces bounds.
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
    passes = setup.cohort_size * config.local_epochs  # in a round, over a client's examples
    warm_up = max(config.rounds - repeats - 1, 0)  # the round before the timed ones

    def report(text: str) -> None:
        progress(f"{name}: {text}")

    with machine_settings(fed):  # what a run would set, for both sides, as are denormal numbers
        autotune(fed)
        state = _warm_up(setup, fed, warm_up)
        peak_bytes = peak_memory(setup.device)
        plain = None
        if with_plain:
            plain = PlainRounds(fed, prepared.dataset)
            plain.round(fed.cohort(warm_up).client_ids)
        timed_rounds = range(warm_up + 1, warm_up + 1 + repeats)
        times = _time_rounds(setup, fed, state, plain, timed_rounds, report)
        result = {
            "workload": name,
            "engine": fed.engine.mode,
            "device": str(setup.device),
            "method": setup.method.name,
            **_engine_results(times, samples=passes * examples, peak_bytes=peak_bytes),
            "images": images,
            **_conditions(setup),
            "repeats": repeats,
        }
        if plain is None:
            tested = times.rounds + times.engine["evaluate"]
            return result | {"whole_seconds": config.rounds * tested.median()}
        report("peak rates")
        bounds = lower_bounds(fed, plain.flops_per_sample(), passes, examples)
        return result | _comparison(times) | _bound_results(bounds, times.rounds.median())


def reset_peak_memory(device: torch.device) -> None:
    """Lets `peak_memory` count from here on, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _warm_up(setup: Setup, fed: Federation, number: int) -> Any:
    """Runs a round once, or until all its steps are replays of graphs; returns the method's state after it."""
    cohort = fed.cohort(number)
    state = setup.method.init(fed, setup.method_config)
    if fed.engine.graphs is None:
        state, _ = one_round(setup, fed, state, cohort)
        return state
    for _ in until_captured(fed.engine, PASSES):
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


def _engine_results(times: _Times, samples: int, peak_bytes: int) -> dict[str, Any]:
    """What the engine took for a round of so many samples."""
    seconds = times.rounds.median()
    return {
        "seconds_per_round": seconds,
        "seconds_spread": _spread(times.rounds),
        "samples_per_second": samples / seconds,
        "peak_bytes": peak_bytes,
        "evaluation_seconds": times.engine["evaluate"].median(),
        "data_seconds_share": times.around_training.median() / seconds,
    }


def _conditions(setup: Setup) -> dict[str, Any]:
    """Under what a run was timed."""
    config = setup.config
    hardware = environment(setup.device)["hardware"]
    return {
        "torch": torch.__version__,
        "threads": hardware["threads"],
        "hardware": hardware["name"],
        "precision": config.precision,
        "cohort_size": config.cohort_size,
        "local_epochs": config.local_epochs,
        "batch_size": config.batch_size,
        "seed": config.seed,
    }


def _comparison(times: _Times) -> dict[str, Any]:
    """What the plain loop took, and how many times as long as the engine."""
    return {
        "plain_seconds_per_round": times.plain.median(),
        "plain_spread": _spread(times.plain),
        "ratio": (times.plain / times.rounds).median(),
    }


def _bound_results(bounds: LowerBounds, seconds_per_round: float) -> dict[str, Any]:
    """The lower bounds of a round, and the larger one's share of what a round took."""
    return {
        "floor_seconds": bounds.larger,
        "floor_share": bounds.larger / seconds_per_round,
        "arithmetic_floor_seconds": bounds.arithmetic,
        "memory_floor_seconds": bounds.memory,
    }


def _spread(seconds: pd.Series) -> list[float]:
    return [*seconds.agg(["min", "max"])]
