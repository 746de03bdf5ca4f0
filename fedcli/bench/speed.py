"""The speed of the engine and, for FedAvg, of a plain PyTorch loop, both measured in the same run.

Both sides run in the same precision and as many threads, but for a small network, which the engine trains in several
processes and the plain loop in one thread. The engine takes deterministic operations, as in a run, and the plain loop
PyTorch's default ones. Both warm up, and then take turns, so that a noisy machine hits both. A round is enough to warm
up, but on CUDA the engine goes on until all steps of a round are replays, by at most `MAX_PASSES` rounds; where these
are too few, rounds that are timed may still capture steps. The ratio is the median over the pairs of rounds of plain
seconds over engine seconds: above 1 the engine is faster.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from fedcli.bench.cases import BenchCase
from fedcli.bench.clock import measure_seconds
from fedcli.bench.engine_rounds import EngineRounds, RoundSeconds, warmed_up_rounds
from fedcli.bench.estimate import estimate_round
from fedcli.bench.plain_loop import PlainRounds
from fedcli.bench.timings import PlainTiming, Timing, summarize_seconds
from fedcli.bench.workloads import has_random_images, with_images_at_hand
from fedcli.core.batches import count_batches
from fedcli.core.federation import Federation
from fedcli.runs.machine import environment, flushed_denormals


@flushed_denormals()
def time_case(case: BenchCase, repeats: int, progress: Callable[[str], Any]) -> Timing:
    """Times the last rounds of a run, in which all terms of its method have begun.

    Args:
        case: The run, and whether the plain loop does its rounds too.
        repeats: The number of rounds to time; see `BenchCase.check`.
        progress: A function that is told what is being done.
    """
    setup = with_images_at_hand(case.setup)
    timed_rounds = range(setup.config.rounds - repeats, setup.config.rounds)
    warm_up_round = timed_rounds.start - 1
    engine_seconds = []
    plain_seconds = []
    ratios = []
    plain_rounds = None
    plain_timing = None
    with warmed_up_rounds(setup, warm_up_round) as engine_rounds:
        fed = engine_rounds.fed
        if case.has_plain_side:
            plain_rounds = PlainRounds(fed, engine_rounds.dataset)
            plain_rounds.run_round(fed.cohort(warm_up_round).client_ids)
        for repeat, round_index in enumerate(timed_rounds, start=1):
            progress(f"{case.name}: round {repeat} of {repeats}")
            seconds_of_engine = engine_rounds.run_round(round_index)
            engine_seconds.append(seconds_of_engine)
            if plain_rounds is not None:
                plain_round = partial(plain_rounds.run_round, fed.cohort(round_index).client_ids)
                seconds_of_plain_loop = measure_seconds(plain_round, setup.device)
                plain_seconds.append(seconds_of_plain_loop)
                ratios.append(seconds_of_plain_loop / seconds_of_engine.without_test)
        if plain_rounds is not None:
            progress(f"{case.name}: rates of this machine")
            plain_timing = PlainTiming(
                round_seconds=summarize_seconds(plain_seconds),
                ratio=median(ratios),
                estimate=estimate_round(fed, plain_rounds),
            )
        return _summarize_rounds(case, engine_rounds, timed_rounds, engine_seconds, plain_timing)


def _summarize_rounds(
    case: BenchCase,
    engine_rounds: EngineRounds,
    timed_rounds: range,
    engine_seconds: Sequence[RoundSeconds],
    plain_timing: PlainTiming | None,
) -> Timing:
    """Returns what the rounds that were timed took, and under what conditions."""
    setup = engine_rounds.setup
    fed = engine_rounds.fed
    hardware = environment(setup.device)["hardware"]
    round_seconds = summarize_seconds([seconds.without_test for seconds in engine_seconds])
    around_training = median(seconds.around_training for seconds in engine_seconds)
    examples_per_round = fmean(_count_examples(fed, round_index) for round_index in timed_rounds)
    # The last round of a run is tested and always among those that are timed.
    test_seconds = median(seconds.test for seconds in engine_seconds if seconds.test is not None)
    whole_seconds = None
    if case.workload is None:
        num_rounds = setup.config.rounds
        num_tests = sum(fed.is_tested(round_index) for round_index in range(num_rounds))
        whole_seconds = num_rounds * round_seconds.median + num_tests * test_seconds
    return Timing(
        workload=case.name,
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
        test_seconds=test_seconds,
        around_training_share=around_training / round_seconds.median,
        plain=plain_timing,
        whole_seconds=whole_seconds,
    )


def _count_examples(fed: Federation, round_index: int) -> int:
    """Returns how many examples the clients of a round train on, those of each epoch anew.

    Examples that are held out to validate on, or in a last batch that is dropped, do not count.
    """
    sizes = [len(fed.training[client]) for client in fed.cohort(round_index).client_ids]
    batches = count_batches(sizes, fed.batch_size, fed.config.drop_last)
    return fed.local_epochs * int(np.minimum(sizes, np.multiply(batches, fed.batch_size)).sum())
