"""The speed of the engine and of a plain PyTorch loop, both measured in the same run.

Both sides run in the same precision and as many threads, but for a small network, which the engine trains in several
processes and the plain loop in one thread. The engine takes deterministic operations, as in a run, and the plain loop
PyTorch's default ones. After a round each to warm up (of the engine on CUDA as many as it takes until all steps are
replays) they take turns, so that a noisy machine hits both. The ratio is the median over these pairs of plain seconds
over engine seconds: above 1 the engine is faster.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from fedcli.bench.clock import measure_seconds
from fedcli.bench.engine_rounds import EngineRounds, RoundSeconds, warmed_up_rounds
from fedcli.bench.estimate import estimate_round
from fedcli.bench.plain_loop import PlainRounds
from fedcli.bench.timings import EngineTiming, MethodTiming, WorkloadTiming, summarize_seconds
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
def time_workload(name: str, setup: Setup, repeats: int, progress: Callable[[str], Any]) -> WorkloadTiming:
    """Times the last rounds of a workload, each by the engine and then by the plain loop.

    Args:
        name: The name of the workload.
        setup: Its run; see `prepare_workload`.
        repeats: The number of rounds to time; see `check_repeats`.
        progress: A function that is told what is being done.
    """
    timed_rounds = _find_last_rounds(setup, repeats)
    warm_up_round = timed_rounds.start - 1
    engine_seconds = []
    plain_seconds = []
    with warmed_up_rounds(with_images_at_hand(setup), warm_up_round) as engine_rounds:
        fed = engine_rounds.fed
        plain_rounds = PlainRounds(fed, engine_rounds.dataset)
        plain_rounds.run_round(fed.cohort(warm_up_round).client_ids)
        for repeat, number in enumerate(timed_rounds, start=1):
            progress(f"{name}: round {repeat} of {repeats}")
            engine_seconds.append(engine_rounds.run_round(number))
            plain_round = partial(plain_rounds.run_round, fed.cohort(number).client_ids)
            plain_seconds.append(measure_seconds(plain_round, setup.device))
        progress(f"{name}: rates of this machine")
        estimate = estimate_round(fed, plain_rounds)
        engine_timing = _summarize_rounds(name, engine_rounds, timed_rounds, engine_seconds)
    pairs = zip(plain_seconds, engine_seconds, strict=True)
    return WorkloadTiming(
        engine=engine_timing,
        plain_seconds=summarize_seconds(plain_seconds),
        ratio=median(plain / engine.without_test for plain, engine in pairs),
        estimate=estimate,
    )


@flushed_denormals()
def time_method(name: str, setup: Setup, repeats: int, progress: Callable[[str], Any]) -> MethodTiming:
    """Times the last rounds of a method's own run, in which all of its terms have begun.

    The plain loop takes no part, since it trains FedAvg alone.

    Args:
        name: The name of the protocol.
        setup: The run.
        repeats: The number of rounds to time; see `check_repeats`.
        progress: A function that is told what is being done.
    """
    timed_rounds = _find_last_rounds(setup, repeats)
    engine_seconds = []
    with warmed_up_rounds(with_images_at_hand(setup), timed_rounds.start - 1) as engine_rounds:
        for repeat, number in enumerate(timed_rounds, start=1):
            progress(f"{name}: round {repeat} of {repeats}")
            engine_seconds.append(engine_rounds.run_round(number))
        engine_timing = _summarize_rounds(name, engine_rounds, timed_rounds, engine_seconds)
        num_tests = sum(engine_rounds.fed.is_tested(number) for number in range(setup.config.rounds))
    seconds_of_rounds = setup.config.rounds * engine_timing.round_seconds.median
    seconds_of_tests = num_tests * engine_timing.test_seconds
    return MethodTiming(engine=engine_timing, whole_seconds=seconds_of_rounds + seconds_of_tests)


def _find_last_rounds(setup: Setup, repeats: int) -> range:
    return range(setup.config.rounds - repeats, setup.config.rounds)


def _summarize_rounds(
    name: str, engine_rounds: EngineRounds, timed_rounds: range, engine_seconds: Sequence[RoundSeconds]
) -> EngineTiming:
    """Returns what the engine took for the rounds that were timed, and under what conditions."""
    setup = engine_rounds.setup
    fed = engine_rounds.fed
    hardware = environment(setup.device)["hardware"]
    round_seconds = summarize_seconds([seconds.without_test for seconds in engine_seconds])
    around_training = median(seconds.around_training for seconds in engine_seconds)
    examples_per_round = fmean(_count_examples(fed, number) for number in timed_rounds)
    # The last round of a run is tested and always among those that are timed.
    test_seconds = [
        seconds.test for number, seconds in zip(timed_rounds, engine_seconds, strict=True) if fed.is_tested(number)
    ]
    return EngineTiming(
        workload=name,
        method=setup.method.name,
        config=setup.config,
        images="random" if has_random_images(setup) else "real",
        repeats=len(timed_rounds),
        device=str(setup.device),
        hardware=hardware["name"],
        threads=hardware["threads"],
        mode=fed.engine.mode,
        round_seconds=round_seconds,
        examples_per_second=examples_per_round / round_seconds.median,
        peak_bytes=engine_rounds.peak_bytes,
        test_seconds=median(test_seconds),
        around_training_share=around_training / round_seconds.median,
    )


def _count_examples(fed: Federation, number: int) -> int:
    """Returns how many examples the clients of a round train on, those of each epoch anew.

    Examples that are held out to validate on, or in a last batch that is dropped, do not count.
    """
    sizes = [len(fed.training[client]) for client in fed.cohort(number).client_ids]
    batches = count_batches(sizes, fed.batch_size, fed.config.drop_last)
    return fed.local_epochs * int(np.minimum(sizes, np.multiply(batches, fed.batch_size)).sum())
