"""The numbers of the benchmark are what they say. No test looks at a time."""

import itertools
import re
import threading
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fedcli import registry
from fedcli.bench import engine_rounds, estimate, speed, workloads
from fedcli.bench.cases import BenchCase
from fedcli.bench.table import TITLES, find_titles, format_timing
from fedcli.bench.workloads import Workload
from fedcli.core import evaluation
from fedcli.runs.machine import deterministic
from fedcli.runs.resolve import resolve
from tests.bench_parts import (
    TINY_CNN,
    TINY_RESNET,
    fake_seconds,
    prepare_sides,
    time_tiny,
)
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_runs import early_captures, on_fake_cuda

pytestmark = pytest.mark.usefixtures("reduced_workloads")


def count_samples(monkeypatch):
    """The number of samples that the engine reports of each round, in a list that grows."""
    one_round = engine_rounds.one_round
    samples_of_rounds = []

    def counted_round(setup, fed, state, cohort):
        samples = []
        fed.engine.runner.listen(samples.append)
        after_round = one_round(setup, fed, state, cohort)
        samples_of_rounds.append(sum(samples))
        return after_round

    monkeypatch.setattr(engine_rounds, "one_round", counted_round)
    return samples_of_rounds


def test_flops_of_layers_by_hand_without_taps_that_meet_padding_only(monkeypatch):
    conv1 = 2 * 24 * 24 * 32 * 25  # multiply-adds count twice; the images need no gradient, so it is passed twice
    conv2 = 2 * 8 * 8 * 64 * 32 * 25
    linear = 2 * 1024 * 512 + 2 * 512 * 10
    *_, plain = prepare_sides(TINY_CNN)
    assert estimate.count_flops_per_example(plain) == 2 * conv1 + 3 * (conv2 + linear)

    *_, plain = prepare_sides(TINY_RESNET)
    live = estimate.count_flops_per_example(plain)
    monkeypatch.setattr(estimate, "use_live_taps", lambda *arguments: False)
    dead_weights = 6_946_816  # each of which meets one place in the image
    assert estimate.count_flops_per_example(plain) - live == 3 * 2 * dead_weights


def test_rates_are_of_the_fastest_product_by_all_threads(monkeypatch, two_threads):
    _, fed, _ = prepare_sides(TINY_CNN)
    monkeypatch.setattr(estimate, "TRIES", 3)
    times = threading.local()  # three times for three tries: the fastest is among them, whichever thread goes on
    threads_of_calls = set()

    def work():
        threads_of_calls.add(torch.get_num_threads())

    def measure_seconds(work, device):
        work()
        if not hasattr(times, "of_tries"):
            times.of_tries = itertools.cycle([0.5, 0.004, 0.25])
        return next(times.of_tries)

    monkeypatch.setattr(estimate, "measure_seconds", measure_seconds)
    assert estimate.measure_calls_per_second(work, fed.device, fed.engine.runner) == 2 * 250
    assert threads_of_calls == {1}

    products_per_second = 4
    copies_per_second = 5

    measured = iter([products_per_second, copies_per_second])
    monkeypatch.setattr(estimate, "measure_calls_per_second", lambda work, device, runner: next(measured))
    rates = estimate.measure_rates(fed.device, fed.engine.runner, torch.float64)
    assert rates == (2 * 32**3 * products_per_second, 2 * 2**12 * copies_per_second)


def test_rounds_of_both_sides_take_turns(three_rounds):
    _, fed, _ = prepare_sides(TINY_CNN)
    expected = []
    for number in (996, 997, 998, 999):  # the first warms up
        expected += [number, tuple(fed.cohort(number).client_ids)]
    assert [round_run.name for round_run in three_rounds.rounds_run] == expected


def test_rounds_flush_numbers_below_the_normal_ones_where_they_can_and_nothing_else_does(three_rounds):
    assert {round_run.flushes for round_run in three_rounds.rounds_run} == {three_rounds.can_flush}
    assert not three_rounds.flushes_afterwards


def test_times_and_the_ratio_of_a_pair_are_medians(three_rounds):
    result = three_rounds.timing.as_dict()
    assert result["seconds_per_round"] == 20.0
    assert result["seconds_spread"] == [10.0, 40.0]
    assert result["plain_seconds_per_round"] == 30.0
    assert result["plain_spread"] == [20.0, 80.0]
    assert result["ratio"] == median([3.0, 1.0, 2.0])  # of the medians it would be 1.5
    assert result["around_training_share"] == 6 / 20
    assert result["examples_per_second"] == 80 / 20.0
    assert result["test_seconds"] == 0.25


def test_the_estimate_is_that_of_arithmetic_or_of_memory(three_rounds):
    *_, plain = prepare_sides(TINY_CNN)
    result = three_rounds.timing.as_dict()
    arithmetic_seconds = result["arithmetic_estimate_seconds"]
    assert result["estimate_seconds"] == max(arithmetic_seconds, result["memory_estimate_seconds"])
    assert result["estimate_share"] == result["estimate_seconds"] / 20.0
    assert arithmetic_seconds == pytest.approx(80 * estimate.count_flops_per_example(plain) / 1e6)


def test_a_timed_side_is_shown_with_its_spread_and_an_estimate_that_may_be_longer(three_rounds):
    cells = format_timing(three_rounds.timing)
    threads = str(three_rounds.timing.threads)
    shown = {"Engine": "20 (10-40)", "Plain loop": "30", "Ratio": "2x", "Test": "0.25", "Threads": threads}
    assert cells.items() >= shown.items()
    seconds, share = re.fullmatch(r"([\d,.]+) \((\d+)%\)", cells["Estimate"]).groups()
    assert float(share) == pytest.approx(100 * float(seconds.replace(",", "")) / 20, rel=0.01)
    assert float(share) > 100  # at these rates


def test_each_title_of_a_number_is_explained_below_the_table(three_rounds):
    in_workloads = format_timing(three_rounds.timing)
    in_methods = format_timing(replace(three_rounds.timing, plain=None, whole_seconds=3.5))
    of_conditions = {"Workload", "Method", "Mode", "Threads", "Images"}
    explained = {title for title, meaning in TITLES.items() if meaning}
    assert explained == {*in_workloads, *in_methods} - of_conditions


def test_titles_have_one_order_whichever_kind_is_timed_first(three_rounds):
    in_workloads = format_timing(three_rounds.timing)
    in_methods = format_timing(replace(three_rounds.timing, plain=None, whole_seconds=3.5))
    assert find_titles([in_workloads, in_methods]) == find_titles([in_methods, in_workloads]) == [*TITLES]
    assert "Whole run" not in find_titles([in_workloads])
    assert "Ratio" not in find_titles([in_methods])


@pytest.mark.parametrize(
    ("precision", "item", "dtype"),
    [("float32", 4, torch.float32), ("bf16", 4, torch.bfloat16), ("float64", 8, torch.float64)],  # bf16 keeps float32
)
def test_every_precision_is_timed_and_the_plain_loop_takes_default_operations(precision, item, dtype, monkeypatch):
    fake_seconds(monkeypatch, [{}], [1.0])
    result = time_tiny(precision=precision).as_dict()
    assert result["precision"] == precision
    assert result["memory_estimate_seconds"] == pytest.approx(12 * 6 * item * 582_026 / 1e3)

    *_, plain = prepare_sides(TINY_CNN, precision=precision)
    seen = set()

    def watch(module, inputs, output):
        seen.add((output.dtype, torch.are_deterministic_algorithms_enabled()))

    plain.model.register_forward_hook(watch)
    with deterministic(True):  # as in a run on CUDA
        plain.run_round([0])
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert seen == {(dtype, False)}


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_rounds_of_a_protocols_own_run_are_timed(method, monkeypatch):
    """The table also says what all rounds take with their tests."""
    options = {
        "dataset": "cifar10", "device": "cpu", "batch_size": 10, "partition": "iid", "local_epochs": 1,
        "train_examples": 60, "num_clients": 3, "cohort_size": 2, "backbone": "cnn-small", "rounds": 40,
        "validation": 0.3, "eval_every": 3,
    }  # fmt: skip
    setup = resolve(registry.find_method(method), options, need_data=False)
    seconds = [
        {"train": 3, "evaluate": 0.0, "data": 0, "aggregate": 0},
        {"train": 4, "evaluate": 0.25, "data": 0, "aggregate": 0},
        {"train": 5, "evaluate": 0.75, "data": 0, "aggregate": 0},
    ]
    rounds_run = fake_seconds(monkeypatch, seconds)
    samples_of_rounds = count_samples(monkeypatch)
    timing = speed.time_case(BenchCase(setup=setup), 3, lambda text: None)

    assert [round_run.name for round_run in rounds_run] == [36, 37, 38, 39]  # the last ones
    result = timing.as_dict()
    assert result["seconds_per_round"] == 4
    assert result["seconds_spread"] == [3, 5]
    assert result["test_seconds"] == 0.5
    assert result["whole_seconds"] == 40 * 4 + 14 * 0.5  # tests follow every third round and the last
    assert result["examples_per_second"] == pytest.approx(np.mean(samples_of_rounds[1:]) / 4)
    assert "estimate_seconds" not in result

    row = format_timing(timing)
    assert row["Method"] == method
    assert row["Workload"] == setup.protocol.name
    assert row["Whole run"] == "167"
    assert "Ratio" not in row


def test_a_workload_by_another_method_than_fedavg_is_timed_without_the_plain_loop(monkeypatch):
    rounds_run = fake_seconds(monkeypatch, [{}])
    timing = time_tiny(method="fedprox")
    assert [round_run.name for round_run in rounds_run] == [998, 999]
    assert timing.plain is timing.whole_seconds is None
    assert not {"Plain loop", "Ratio", "Estimate", "Whole run"} & format_timing(timing).keys()


def test_the_first_test_of_a_process_is_none_of_the_timed_ones(monkeypatch):
    options = {
        "dataset": "cifar10", "device": "cpu", "batch_size": 10, "partition": "iid", "local_epochs": 1,
        "train_examples": 20, "num_clients": 2, "cohort_size": 2, "backbone": "cnn-small", "rounds": 40,
        "eval_every": 30, "validation": 0,
    }  # fmt: skip
    setup = resolve(registry.find_method("fedavg"), options, need_data=False)
    events = []
    one_round = engine_rounds.one_round
    evaluate = evaluation.evaluate

    def watched_round(setup, fed, state, cohort):
        events.append(cohort.round)
        return one_round(setup, fed, state, cohort)

    def watched_test(*arguments):
        events.append("test")
        return evaluate(*arguments)

    monkeypatch.setattr(engine_rounds, "one_round", watched_round)
    monkeypatch.setattr(evaluation, "evaluate", watched_test)
    speed.time_case(BenchCase(setup=setup), 2, lambda text: None)
    assert events == [37, "test", 38, 39, "test"]


def test_an_engine_that_goes_on_to_capture_steps_is_warmed_up_by_eight_rounds_at_most(monkeypatch):
    setup, fed, _ = prepare_sides(TINY_CNN)
    fed.engine.graphs = SimpleNamespace(num_plain=0)
    rounds_run = []

    def run_plain_steps(self, round_index):
        rounds_run.append(round_index)
        fed.engine.graphs.num_plain += 1

    monkeypatch.setattr(engine_rounds.EngineRounds, "run_round", run_plain_steps)
    engine_rounds.EngineRounds(setup, fed, dataset=None).warm_up(999)
    assert rounds_run == 8 * [999]


@pytest.mark.slow
@on_fake_cuda
def test_a_bench_measures_replays_alone():
    """Of 13 examples a batch of 4 leaves one that is not full: a step of its kind, of which a round has but one."""
    one_round = engine_rounds.one_round
    not_replays = []  # steps of each round that were captured, or taken without a graph

    def counted(setup, fed, *arguments):
        graphs = fed.engine.graphs
        before = graphs.num_captured + graphs.num_plain
        results = one_round(setup, fed, *arguments)
        not_replays.append(graphs.num_captured + graphs.num_plain - before)
        return results

    workload = Workload(
        name="tiny", dataset="digits", num_clients=2, cohort_size=2, backbone="cnn-small", local_epochs=1,
        train_examples=26, batch_size=4,
    )  # fmt: skip
    with FakeCuda.running(), early_captures(), patch.object(engine_rounds, "one_round", counted):
        setup = workloads.prepare_workload(workload, device="cuda")
        timing = speed.time_case(BenchCase(setup=setup), 2, lambda text: None)

    assert timing.mode == "stacked x 2, captured"

    first, *_, second_last, last = not_replays
    assert first > 0
    assert second_last == last == 0
