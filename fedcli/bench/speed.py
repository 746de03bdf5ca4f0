"""The speed of the engine and of a plain PyTorch loop, both measured in the same run.

Both sides run in the same precision and as many threads, but for a small network, which the engine trains in several
processes and the plain loop in one thread. The engine takes deterministic operations, as in a run, and the plain loop
PyTorch's default ones. After a round each to warm up (of the engine on CUDA as many as it takes
until all steps are replays) they take turns, so that a noisy machine hits both. The ratio is the median over these
pairs of plain seconds over engine seconds: above 1 the engine is faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fedcli.bench.clock import measure_seconds
from fedcli.bench.engine_rounds import EngineRounds, RoundSeconds, warmed_up_rounds
from fedcli.bench.estimate import Estimate, estimate_round
from fedcli.bench.plain_loop import PlainRounds
from fedcli.bench.timings import Comparison, Spread, Timing
from fedcli.bench.workloads import has_random_images, with_images_at_hand
from fedcli.core.batches import count_batches
from fedcli.core.federation import Federation
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.runs.machine import environment, flushed_denormals
from fedcli.runs.resolve import Setup


def check_repeats(name: str, setup: Setup, repeats: int) -> None:
    """Refuses to time more rounds of a run than it has after one that warms up."""
    most = setup.config.rounds - 1
    if most == 0:
        raise UserError(f"the run of {name} has one round, which warms up, so that none is left to time; name another.")
    if repeats > most:
        raise UserError(
            f"--repeats {repeats} is too many for {name}: its run has {setup.config.rounds} rounds, one of which warms "
            f"up; give at most {most}."
        )


def check_public_images(setup: Setup) -> None:
    """Refuses a run whose public images are not on this machine; random ones take the place of clients' images only."""
    public_dataset = setup.config.public_dataset
    if public_dataset is not None:
        datasets.refuse_unavailable(public_dataset)


@flushed_denormals()
def time_workload(name: str, setup: Setup, repeats: int, progress: Callable[[str], Any]) -> Timing:
    """Times the last rounds of a workload, each by the engine and then by the plain loop.

    Args:
        name: The name of the workload.
        setup: Its run; see `prepare_workload`.
        repeats: The number of rounds to time; see `check_repeats`.
        progress: A function that is told what is being done.
    """
    timed_rounds = _find_last_rounds(setup, repeats)
    warm_up_round = timed_rounds.start - 1
    seconds_of_rounds = []
    plain_seconds = []
    with warmed_up_rounds(with_images_at_hand(setup), warm_up_round) as ours:
        fed = ours.fed
        plain = PlainRounds(fed, ours.dataset)
        plain.run_round(fed.cohort(warm_up_round).client_ids)
        for repeat, number in enumerate(timed_rounds, start=1):
            progress(f"{name}: round {repeat} of {repeats}")
            seconds_of_rounds.append(ours.run_round(number))
            plain_round = partial(plain.run_round, fed.cohort(number).client_ids)
            plain_seconds.append(measure_seconds(plain_round, setup.device))
        progress(f"{name}: peak rates")
        estimate = estimate_round(fed, plain.count_flops_per_example())
        timing = _summarize(name, ours, timed_rounds, seconds_of_rounds)
    return replace(timing, comparison=_compare(seconds_of_rounds, plain_seconds, estimate))


@flushed_denormals()
def time_method(name: str, setup: Setup, repeats: int, progress: Callable[[str], Any]) -> Timing:
    """Times the last rounds of a method's own run, in which all of its terms have begun.

    The plain loop takes no part, since it trains FedAvg alone.

    Args:
        name: The name of the protocol.
        setup: The run.
        repeats: The number of rounds to time; see `check_repeats`.
        progress: A function that is told what is being done.
    """
    timed_rounds = _find_last_rounds(setup, repeats)
    seconds_of_rounds = []
    with warmed_up_rounds(with_images_at_hand(setup), timed_rounds.start - 1) as ours:
        for repeat, number in enumerate(timed_rounds, start=1):
            progress(f"{name}: round {repeat} of {repeats}")
            seconds_of_rounds.append(ours.run_round(number))
        timing = _summarize(name, ours, timed_rounds, seconds_of_rounds)
        num_tests = sum(ours.fed.is_tested(number) for number in range(setup.config.rounds))
    whole_seconds = setup.config.rounds * timing.seconds_per_round + num_tests * timing.evaluation_seconds
    return replace(timing, whole_seconds=whole_seconds)


def _find_last_rounds(setup: Setup, repeats: int) -> range:
    return range(setup.config.rounds - repeats, setup.config.rounds)


def _summarize(name: str, ours: EngineRounds, timed_rounds: range, seconds_of_rounds: Sequence[RoundSeconds]) -> Timing:
    """Returns what the engine took for the rounds that were timed, and under what conditions."""
    setup = ours.setup
    hardware = environment(setup.device)["hardware"]
    seconds = [round_seconds.without_test for round_seconds in seconds_of_rounds]
    seconds_per_round = median(seconds)
    around_training = median(round_seconds.around_training for round_seconds in seconds_of_rounds)
    examples = sum(_count_examples(ours.fed, number) for number in timed_rounds)
    # The last round of a run is tested and always among those that are timed.
    seconds_of_tests = [
        round_seconds.evaluate
        for number, round_seconds in zip(timed_rounds, seconds_of_rounds, strict=True)
        if ours.fed.is_tested(number)
    ]
    return Timing(
        workload=name,
        method=setup.method.name,
        config=setup.config,
        images="random" if has_random_images(setup) else "real",
        repeats=len(timed_rounds),
        device=str(setup.device),
        hardware=hardware["name"],
        threads=hardware["threads"],
        mode=ours.fed.engine.mode,
        seconds_per_round=seconds_per_round,
        seconds_spread=_find_spread(seconds),
        examples_per_second=examples / len(timed_rounds) / seconds_per_round,
        peak_bytes=ours.peak_bytes,
        evaluation_seconds=median(seconds_of_tests),
        around_training_share=around_training / seconds_per_round,
    )


def _count_examples(fed: Federation, number: int) -> int:
    """Returns how many examples the clients of a round train on, those of each epoch anew.

    Examples that are held out to validate on, or in a last batch that is dropped, do not count.
    """
    sizes = [len(fed.training[client]) for client in fed.cohort(number).client_ids]
    batches = count_batches(sizes, fed.batch_size, fed.config.drop_last)
    return fed.local_epochs * int(np.minimum(sizes, np.multiply(batches, fed.batch_size)).sum())


def _compare(
    seconds_of_rounds: Sequence[RoundSeconds], plain_seconds: Sequence[float], estimate: Estimate
) -> Comparison:
    """Compares the plain loop and the estimate of a round with the engine."""
    seconds = [round_seconds.without_test for round_seconds in seconds_of_rounds]
    ratios = [plain / engine for plain, engine in zip(plain_seconds, seconds, strict=True)]
    return Comparison(
        plain_seconds_per_round=median(plain_seconds),
        plain_spread=_find_spread(plain_seconds),
        ratio=median(ratios),
        estimate=estimate,
        estimate_share=estimate.seconds / median(seconds),
    )


def _find_spread(seconds: Sequence[float]) -> Spread:
    return Spread(least=min(seconds), largest=max(seconds))
