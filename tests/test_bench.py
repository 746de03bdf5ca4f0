"""The benchmark: both sides do the same work, and its numbers are what they say. No test looks at a time."""

import itertools
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch

from fedcli import registry
from fedcli.bench import (
    cases,
    csv_file,
    engine_rounds,
    estimate,
    joint_step,
    plain_loop,
    random_images,
    speed,
    workloads,
)
from fedcli.bench.cases import BenchCase, find_case
from fedcli.bench.csv_file import RENAMED_COLUMNS, append_csv
from fedcli.bench.table import TITLES, find_titles, format_count, format_timing
from fedcli.bench.timings import Timing
from fedcli.bench.workloads import Workload
from fedcli.core import evaluation
from fedcli.core.stacked import WAYS
from fedcli.data import imports
from fedcli.errors import UserError
from fedcli.runs import prepare
from fedcli.runs.machine import deterministic
from fedcli.runs.resolve import resolve
from fedcli.runs.rounds import one_round
from tests import laws
from tests.commands import PROGRAM, error_of, invoke, output_of
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_runs import early_captures, on_fake_cuda

TINY_CNN = Workload(
    name="tiny", dataset="fmnist", train_examples=80, num_clients=4, cohort_size=2, local_epochs=2, batch_size=8,
    backbone="cnn-mcmahan",
)  # fmt: skip
TINY_SMALL = replace(TINY_CNN, backbone=workloads.SMALL_NETWORK)
TINY_RESNET = replace(TINY_CNN, dataset="cifar10", train_examples=24, backbone="resnet18")
OF_ENGINE = [  # names in files, in their order
    "workload", "mode", "device", "method", "seconds_per_round", "seconds_spread", "examples_per_second", "peak_bytes",
    "test_seconds", "around_training_share", "images", "torch", "threads", "hardware", "precision", "cohort_size",
    "local_epochs", "batch_size", "seed", "repeats",
]  # fmt: skip
WRITTEN = [  # with the plain loop
    *OF_ENGINE, "plain_seconds_per_round", "plain_spread", "ratio", "estimate_seconds", "estimate_share",
    "arithmetic_estimate_seconds", "memory_estimate_seconds",
]  # fmt: skip
NAMES_OF_COLUMNS = [  # in files of the first version that wrote them, of later ones, and today
    ("engine", "way", "mode"),
    ("samples_per_second", "examples_per_second", "examples_per_second"),
    ("data_seconds_share", "around_training_share", "around_training_share"),
    ("evaluation_seconds", "evaluation_seconds", "test_seconds"),
    ("floor_seconds", "bound_seconds", "estimate_seconds"),
    ("floor_share", "bound_share", "estimate_share"),
    ("arithmetic_floor_seconds", "arithmetic_bound_seconds", "arithmetic_estimate_seconds"),
    ("memory_floor_seconds", "memory_bound_seconds", "memory_estimate_seconds"),
    ("evaluation_floor_seconds", "evaluation_bound_seconds", "test_estimate_seconds"),
]
FEW_IMAGES = """
from functools import partial
from fedcli.bench.random_images import draw_images
fmnist = partial(draw_images, (28, 28), num_train=90, num_test=10)
cifar10 = partial(draw_images, (32, 32, 3), num_train=90, num_test=10)
"""


def reduce_workloads(monkeypatch, folder):
    """Makes rates and workloads such that they are measured in no time, by images of a file in a folder."""
    monkeypatch.setattr(estimate, "MATMUL_SIDE", {"cpu": 32})
    monkeypatch.setattr(estimate, "COPY_BYTES", 2**12)
    monkeypatch.setattr(estimate, "TRIES", 1)
    monkeypatch.setattr(workloads, "PUBLIC_EXAMPLES", 20)
    (folder / "few.py").write_text(FEW_IMAGES)
    monkeypatch.setattr(workloads, "RANDOM_IMAGES", folder / "few.py")
    reduced = [replace(TINY_CNN, name=workload.name, alias=workload.alias) for workload in workloads.WORKLOADS]
    monkeypatch.setattr(workloads, "WORKLOADS", reduced)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(autouse=True)
def reduced_workloads(folder, monkeypatch):
    """Reduced workloads, and an empty working folder."""
    reduce_workloads(monkeypatch, folder)


def prepare_sides(workload, **options):
    """Prepares the setup, the federation and the plain loop of a workload, on a few random images."""
    setup = workloads.prepare_workload(workload, device="cpu", **options)
    setup = workloads.with_random_images(setup)
    dataset, _, fed = prepare.prepare(setup)
    return setup, fed, plain_loop.PlainRounds(fed, dataset)


def time_tiny(workload=TINY_CNN, repeats=1, **options):
    setup = workloads.prepare_workload(workload, device="cpu", **options)
    return speed.time_case(BenchCase(setup=setup, workload=workload), repeats, lambda text: None)


def flushes_denormals():
    """Whether this process has numbers below the least normal one be 0."""
    return sys.float_info.min / 2 == 0


class RoundRun(NamedTuple):
    """A round of the engine by its number, or one of the plain loop by its clients."""

    name: int | tuple[int, ...]
    flushes: bool  # numbers below the normal ones to 0


def fake_seconds(monkeypatch, engine, plain=()):
    """Rounds take the times given, of the engine by part, and rates are round numbers; returns the rounds run."""
    one_round = engine_rounds.one_round
    warm_up = {}
    engine_seconds = iter([warm_up, *engine])
    plain_seconds = iter(plain)
    rounds_run = []

    def engine_round(setup, fed, state, cohort):
        rounds_run.append(RoundRun(cohort.round, flushes_denormals()))
        state, entry = one_round(setup, fed, state, cohort)
        return state, {"seconds": entry["seconds"] | next(engine_seconds)}

    def measure_seconds(work, device):
        (client_ids,) = work.args
        rounds_run.append(RoundRun(tuple(client_ids), flushes_denormals()))
        work()
        return next(plain_seconds)

    monkeypatch.setattr(engine_rounds, "one_round", engine_round)
    monkeypatch.setattr(speed, "measure_seconds", measure_seconds)
    monkeypatch.setattr(estimate, "measure_rates", lambda device, runner, dtype: estimate.MachineRates(1e6, 1e3))
    return rounds_run


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


# Workloads and images


def test_real_images_are_taken_where_they_are_there(tmp_path, monkeypatch):
    arrays = random_images.draw_images((28, 28), num_train=100, num_test=20)
    np.savez(tmp_path / "own.npz", **arrays)
    imports.import_path("own", tmp_path / "own.npz")
    trained_on = []  # the images of each measurement
    prepare_run = prepare.prepare

    def watched(setup):
        prepared = prepare_run(setup)
        dataset, *_ = prepared
        trained_on.append({image.numpy().tobytes() for image in dataset.x_train})
        return prepared

    monkeypatch.setattr(engine_rounds, "prepare", watched)
    assert time_tiny(TINY_CNN).images == "random"
    assert time_tiny(replace(TINY_CNN, dataset="own")).images == "real"

    drawn, imported = trained_on
    assert len(drawn) == len(imported) == 80  # of 90 and 100, as many as the clients hold
    assert imported <= {image.tobytes() for image in arrays["x_train"]}


# Both sides do the same


class RoundOfBothSides(NamedTuple):
    """Sizes of minibatches of each side in the first round, and the images that the plain loop has seen."""

    engine_sizes: list[int]
    plain_sizes: list[int]
    plain_images: list[bytes]
    images: list[bytes]  # of the round's clients


def run_both_sides(chunk):
    engine_sizes = []
    plain_sizes = []
    plain_images = []
    setup, fed, plain = prepare_sides(TINY_CNN, clients_per_chunk=chunk)
    fed.engine.runner.listen(engine_sizes.append)

    def watch(module, inputs, output):
        (x,) = inputs
        plain_sizes.append(len(x))
        plain_images.extend(image.numpy().tobytes() for image in x)

    plain.model.register_forward_hook(watch)
    cohort = fed.cohort(0)
    one_round(setup, fed, laws.initial_state(setup, fed), cohort)
    plain.run_round(cohort.client_ids)

    tensors, _ = fed.engine.gather(np.concatenate([fed.training[client] for client in cohort.client_ids]))
    images = [image.contiguous().numpy().tobytes() for image in tensors]
    return RoundOfBothSides(engine_sizes, plain_sizes, plain_images, images)


@pytest.mark.parametrize("chunk", ["1", "2"])
def test_both_sides_take_the_same_steps_on_the_same_images(chunk):
    both = run_both_sides(chunk)
    assert sum(both.engine_sizes) == sum(both.plain_sizes) == 80
    assert sorted(both.plain_sizes) == 4 * [4] + 8 * [8]
    epochs = 2
    assert sorted(both.plain_images) == sorted(epochs * both.images)


def test_one_client_after_the_other_both_sides_have_minibatches_of_the_same_sizes():
    both = run_both_sides("1")
    assert sorted(both.engine_sizes) == sorted(both.plain_sizes)


@pytest.mark.slow
@pytest.mark.parametrize("workload", [TINY_CNN, TINY_SMALL, TINY_RESNET], ids=["cnn", "small", "resnet"])
def test_both_sides_end_with_the_same_model_where_the_order_of_samples_does_not_matter(workload):
    setup, fed, plain = prepare_sides(replace(workload, batch_size=workload.train_examples // 4), precision="float64")
    state = laws.initial_state(setup, fed)
    buffers = [name for name, _ in plain.model.named_buffers() if "num_batches_tracked" not in name]
    names = [name for name, _ in plain.model.named_parameters()] + buffers
    assert bool(buffers) == (workload is TINY_RESNET)

    for name, value in zip(names, [*state.params.values(), *state.buffers.values()], strict=True):
        plain.state[name].copy_(value)
    for number in range(2):
        state, _ = one_round(setup, fed, state, fed.cohort(number))
        plain.run_round(fed.cohort(number).client_ids)
    for name, value in zip(names, [*state.params.values(), *state.buffers.values()], strict=True):
        torch.testing.assert_close(plain.state[name], value, rtol=1e-7, atol=1e-9)


def test_no_value_of_a_protocol_enters():
    for method in registry.methods().values():
        setup = workloads.prepare_workload(TINY_CNN, method=method.name, device="cpu")
        config = setup.config
        assert config.lr == 0.01
        assert config.momentum == 0.9
        assert config.weight_decay == 0
        assert config.lr_decay == 1
        assert config.optimizer == "sgd"
        assert config.validation == 0
        assert config.drop_last is False
        assert config.partition == "iid"
        assert setup.data_setting is None
        assert config.num_clients == 4
        assert config.cohort_size == 2
        assert config.local_epochs == 2
        assert config.batch_size == 8
        assert setup.method_config == method.config()


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedmd", "fccl", "fedgen"])
def test_a_method_of_each_kind_can_be_timed_on_a_workload(name):
    result = time_tiny(method=name, clients_per_chunk="2", seed=3).as_dict()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    expected = {
        "workload": "tiny", "method": name, "mode": "stacked x 2", "device": "cpu", "seed": 3, "cohort_size": 2,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    assert result.items() >= expected.items()
    assert result["peak_bytes"] > 2**20
    assert list(result) == (WRITTEN if name == "fedavg" else OF_ENGINE)


# The numbers


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

    def measure_calls_per_second(work, device, runner):
        is_product = len(work.args) == 2
        return products_per_second if is_product else copies_per_second

    monkeypatch.setattr(estimate, "measure_calls_per_second", measure_calls_per_second)
    rates = estimate.measure_rates(fed.device, fed.engine.runner, torch.float64)
    assert rates == (2 * 32**3 * products_per_second, 2 * 2**12 * copies_per_second)


class ThreeRounds(NamedTuple):
    """A measurement of three rounds with times that are given."""

    timing: Timing
    rounds_run: list[RoundRun]
    can_flush: bool  # numbers below the normal ones to 0
    flushes_afterwards: bool


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        reduce_workloads(monkeypatch, tmp_path_factory.mktemp("reduced"))
        return measure_three_rounds(monkeypatch)


def measure_three_rounds(monkeypatch):
    times = zip((4.0, 18.0, 1.0), (6.0, 2.0, 39.0), (0.5, 0.25, 0.125), strict=True)
    engine = [{"train": train, "aggregate": rest, "data": 0.0, "evaluate": test} for train, rest, test in times]
    rounds_run = fake_seconds(monkeypatch, engine, [30.0, 20.0, 80.0])
    can_flush = torch.set_flush_denormal(False)
    timing = time_tiny(repeats=3)
    return ThreeRounds(timing, rounds_run, can_flush, flushes_denormals())


def test_rounds_of_both_sides_take_turns(three_rounds):
    _, fed, _ = prepare_sides(TINY_CNN)
    expected = [996]
    for number in (997, 998, 999):
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
def test_every_precision_is_measured_the_plain_side_by_default_operations(precision, item, dtype, monkeypatch):
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


def test_an_engine_that_goes_on_to_capture_steps_is_warmed_up_by_no_more_rounds_than_the_page_says(monkeypatch):
    setup, fed, _ = prepare_sides(TINY_CNN)
    fed.engine.graphs = SimpleNamespace(num_plain=0)
    rounds_run = []

    def run_plain_steps(self, round_index):
        rounds_run.append(round_index)
        fed.engine.graphs.num_plain += 1

    monkeypatch.setattr(engine_rounds.EngineRounds, "run_round", run_plain_steps)
    engine_rounds.EngineRounds(setup, fed, dataset=None).warm_up(999)
    assert rounds_run == 8 * [999]


# Counts


@pytest.mark.parametrize("way", ["stacked", "branches"])
def test_what_a_joint_step_reads_and_computes_is_counted_as_by_hand(way):
    step = joint_step.count_step(TINY_CNN, way, "float32")
    row = step.as_dict()
    *_, plain = prepare_sides(TINY_CNN)
    clients, batch_size = 2, 8
    assert row["gflop"] * 1e9 == pytest.approx(clients * batch_size * estimate.count_flops_per_example(plain))
    values = 2 * 582_026
    nbytes = Counter()
    for operation in step.operations:
        nbytes[operation.name] += operation.bytes
    assert nbytes["_fused_sgd_"] == 5 * 4 * values  # parameters and momentum read and written, gradients read
    assert not any(nbytes[name] >= 3 * 4 * values for name in ("where", "add", "stack", "cat"))
    assert row["kernels"] <= 88
    assert row["gigabytes"] <= {"stacked": 0.067, "branches": 0.055}[way]


def test_counts_are_printed_for_workloads_and_nothing_is_measured(folder, monkeypatch):
    monkeypatch.setattr(speed, "time_case", None)
    title, *lines = invoke("bench", "w1", "--count").stdout.splitlines()
    assert title.split()[:3] == ["Workload", "Mode", "Kernels"]
    assert [line.split()[:2] for line in lines] == [["w1", "stacked"], ["w1", "branches"]]

    _, line = invoke("bench", "w2", "--count", "--json").stdout.splitlines()
    row = json.loads(line)
    assert row["workload"] == "w2"
    assert row["mode"] == "branches x 2"
    assert row["precision"] == "float32"

    assert "unknown workload 'w9'" in error_of("bench", "w9", "--count")


@pytest.mark.parametrize("way", WAYS)
def test_a_count_knows_no_bf16(way):
    with pytest.raises(UserError, match=r"bf16 cannot be counted without a GPU .* choose float32, float64 or tf32"):
        joint_step.count_step(TINY_CNN, way, "bf16")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["float32", "float64", "tf32"])
def test_a_count_models_the_time_of_float32_alone(way, precision):
    step = joint_step.count_step(TINY_CNN, way, precision)
    written = step.as_dict()
    assert written["kernels"] > 0
    assert ("modelled_seconds" in written) == ("Modelled ms" in format_count(step)) == (precision == "float32")


def test_each_row_has_the_threads_of_its_own_workload(monkeypatch):
    """A small network trains in processes of one thread each."""
    small = [replace(workload, backbone=workloads.SMALL_NETWORK) for workload in workloads.WORKLOADS[1:2]]
    monkeypatch.setattr(workloads, "WORKLOADS", [workloads.WORKLOADS[0], *small])
    lines = [json.loads(line) for line in run_bench("w1", "w2", "--json").splitlines()]
    assert [line["threads"] for line in lines] == [torch.get_num_threads(), 1]


def test_each_option_of_bench_reaches_a_count_or_is_refused_beside_it(monkeypatch):
    steps = []
    count_step = joint_step.count_step

    def watched(workload, way, precision):
        steps.append(precision)
        return count_step(workload, way, precision)

    monkeypatch.setattr(joint_step, "count_step", watched)
    assert json.loads(output_of("bench", "w1", "--count", "--json", "--precision", "float64").splitlines()[0])
    assert set(steps) == {"float64"}

    read = {"workloads", "precision", "json", "count"}
    others = [option for option in PROGRAM.commands["bench"].params if option.name not in read]
    assert len(others) == 8
    for option in others:
        (flag,) = option.opts
        value = [] if option.is_flag else [option.default or 1]  # also the default, as it is typed
        fault = error_of("bench", "w1", "--count", flag, *value)
        assert fault.startswith(f"--count reads no other options than --precision and --json (got {flag}): ")
    assert len(steps) == 2


# The command


def run_bench(*arguments):
    """Returns what the command prints."""
    return output_of("bench", *arguments, "--device", "cpu", "--repeats", "1")


def test_options_reach_the_measurement_and_results_go_to_json_and_csv():
    options = ("--epochs", 1, "--precision", "float64", "--clients-per-chunk", 2, "--seed", 4, "--method", "fedfm")
    lines = run_bench("w2", "w1", "--json", "--csv", "deep/out.csv", *options).splitlines()
    results = [json.loads(line) for line in lines]
    expected = {
        "local_epochs": 1, "precision": "float64", "mode": "stacked x 2", "seed": 4, "method": "fedfm",
        "device": "cpu", "repeats": 1,
    }  # fmt: skip
    first, _ = results
    assert first.items() >= expected.items()

    # A file that another version wrote has its columns in another order.
    rows = pd.read_csv("deep/out.csv")
    rows[["workload", *sorted(rows.columns.drop("workload"))]].to_csv("deep/out.csv", index=False)
    run_bench("w1", "--csv", "deep/out.csv")

    rows = pd.read_csv("deep/out.csv")
    assert list(rows.workload) == ["w2", "w1", "w1"]
    assert list(rows.examples_per_second[:2]) == [result["examples_per_second"] for result in results]
    spreads = [json.loads(spread) for spread in rows.seconds_spread[:2]]
    assert spreads == [result["seconds_spread"] for result in results]
    assert set(rows.seed) == {4, 0}


def test_more_rounds_than_a_run_has_after_one_that_warms_up_are_refused_before_any_is_run(monkeypatch):
    monkeypatch.setattr(speed, "time_case", None)
    protocol = resolve(registry.find_method("fedavg"), {"dataset": "cifar10"}, need_data=False)
    rounds_of_case = {"w1": workloads.ROUNDS, "fedavg": protocol.config.rounds}
    for case, rounds in rounds_of_case.items():
        fault = error_of("bench", "w2", case, "--repeats", rounds, "--device", "cpu")
        assert f"has {rounds} rounds, one of which warms up; give at most {rounds - 1}." in fault

    case = BenchCase(setup=replace(protocol, config=replace(protocol.config, rounds=40)))
    with pytest.raises(UserError, match=rf"^--repeats 40 is too many for {case.name}: its run has 40 rounds, "):
        case.check(40)
    case.check(39)


def test_names_are_read_in_any_case_and_an_unknown_one_is_told_the_nearest_workload_or_method():
    assert find_case("W1", "FedAvg", {"device": "cpu"}).workload.name == "w1"
    assert find_case("FedFM", "fedavg", {"device": "cpu"}).setup.method.name == "fedfm"
    assert "unknown workload 'fedfn'; did you mean 'fedfm'? there are w1, " in error_of("bench", "fedfn")


OWN_PROTOCOL = """
from dataclasses import replace
from fedcli import Protocol, DataSetting
from fedcli.papers.baselines import fedavg
METHOD = replace(fedavg.METHOD, name="mine", default_protocol="mine:double")
PROTOCOL = Protocol("mine:double", "s", "s", {
    "rounds": 2, "num_clients": 2, "cohort_size": 2, "train_examples": 20, "local_epochs": 1, "batch_size": 5,
    "partition": "iid", "precision": "float64", "seed": 7,
}, {"cifar10": DataSetting("cnn-small", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "s")}, "last")
"""


def test_a_method_is_timed_as_its_protocol_says_but_for_what_is_given(folder):
    (folder / "mine.py").write_text(OWN_PROTOCOL)
    as_declared = json.loads(run_bench("./mine.py", "--json"))
    assert as_declared["precision"] == "float64"
    assert as_declared["seed"] == 7
    as_given = json.loads(run_bench("./mine.py", "--json", "--precision", "float32", "--seed", "0"))
    assert as_given["precision"] == "float32"
    assert as_given["seed"] == 0


def test_a_method_whose_protocol_has_no_network_for_the_images_is_refused_with_a_workload_instead():
    fault = error_of("bench", "fccl-plus", "--device", "cpu")
    assert "(got fccl:digits-4); time it on a workload: 'fedcli bench w1 --method fccl-plus'." in fault


def test_a_run_of_one_round_leaves_none_to_time():
    setup = workloads.prepare_workload(TINY_CNN, device="cpu")
    with pytest.raises(
        UserError, match=r"^the run of own:data has one round, which warms up, so that none is left to time"
    ):
        BenchCase(setup=replace(setup, config=replace(setup.config, rounds=1))).check(1)


@pytest.mark.parametrize(
    "text",
    [
        "workload,way\nw1,looped\nw1,looped,1,2\n",
        "workload,way\nw1,looped,\n",  # of which the first field would be lost
        "workload,way,engine\nw1,looped,looped\n",  # one column by two earlier names
        "workload,mode,way\nw1,looped,looped\n",  # one by its name today and an earlier one
        "workload,mode,mode\nw1,looped,looped\n",
        "workload,,\nw1,looped,looped\n",
    ],
)
def test_a_file_that_cannot_be_appended_to_is_refused_before_anything_is_timed(text, folder, monkeypatch):
    monkeypatch.setattr(speed, "time_case", None)
    (folder / "out.csv").write_text(text)
    assert "'out.csv' cannot be read" in error_of("bench", "w1", "--device", "cpu", "--csv", "out.csv")


def test_what_was_timed_before_a_case_failed_is_printed(monkeypatch):
    time_case = speed.time_case

    def time_or_fail(case, *arguments):
        if case.name == "w2":
            raise UserError("no memory.")
        return time_case(case, *arguments)

    monkeypatch.setattr(speed, "time_case", time_or_fail)
    outcome = invoke("bench", "w1", "w2", "--device", "cpu", "--repeats", "1")
    assert outcome.exit_code != 0
    assert outcome.stdout.splitlines()[1].startswith("w1 ")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_of_both_kinds_keep_all_their_numbers(order, three_rounds, tmp_path):
    of_workload = three_rounds.timing
    of_method = replace(of_workload, workload="fedfm:niid-1", plain=None, whole_seconds=3.5)
    written = [(of_workload, of_method)[kind].as_dict() for kind in order]
    for result in written:
        append_csv(tmp_path / "out.csv", result)
    rows = pd.read_csv(tmp_path / "out.csv", dtype=str)
    assert set(rows.columns) == set().union(*written)
    for (_, row), result in zip(rows.iterrows(), written, strict=True):
        expected = {name: str(value) for name, value in result.items() if value is not None}
        assert dict(row.dropna()) == expected


@pytest.mark.parametrize("version", [0, 1])
def test_columns_of_a_file_that_an_earlier_version_wrote_go_on_by_their_new_names(version, three_rounds, tmp_path):
    result = three_rounds.timing.as_dict()
    of_tests = "test_estimate_seconds"  # which only earlier versions measured
    earlier_names = {names[-1]: names[version] for names in NAMES_OF_COLUMNS}
    assert earlier_names.keys() <= {*result, of_tests}
    earlier = pd.DataFrame([{**result, of_tests: 0.5}]).rename(columns=earlier_names)
    earlier.to_csv(tmp_path / "out.csv", index=False)
    append_csv(tmp_path / "out.csv", result)
    rows = pd.read_csv(tmp_path / "out.csv")
    assert [*rows.columns] == [*result, of_tests]
    for name in earlier_names.keys() - {of_tests}:
        assert [*rows[name]] == [result[name]] * 2
    assert rows[of_tests][0] == 0.5


def test_results_of_several_processes_at_once_are_all_in_the_file(tmp_path, monkeypatch):
    """As of threads here, each with a descriptor of its own, which a lock tells apart as well."""
    read = csv_file._read

    def read_slowly(path):
        content = read(path)
        time.sleep(0.02)
        return content

    monkeypatch.setattr(csv_file, "_read", read_slowly)
    with ThreadPoolExecutor(4) as pool:
        for index in range(8):
            pool.submit(append_csv, tmp_path / "out.csv", {"workload": "w1", "seed": index})
    assert sorted(pd.read_csv(tmp_path / "out.csv").seed) == list(range(8))


def test_a_file_that_a_spreadsheet_wrote_goes_on(tmp_path):
    text = '"workload","note"\r\n"w1","of, the lab"\r\n'
    (tmp_path / "out.csv").write_text(text, encoding="utf-8-sig", newline="")
    csv_file.prepare_csv(tmp_path / "out.csv")
    append_csv(tmp_path / "out.csv", {"workload": "w2", "seed": 3})
    assert (tmp_path / "out.csv").read_text() == 'workload,note,seed\nw1,"of, the lab",\nw2,,3\n'


def test_every_earlier_name_of_a_column_is_tried():
    earlier_names = {}
    for *earlier, latest in NAMES_OF_COLUMNS:
        earlier_names |= {name: latest for name in earlier if name != latest}
    assert earlier_names == RENAMED_COLUMNS


def test_a_file_to_append_to_may_be_empty_and_is_a_file(folder):
    (folder / "out.csv").touch()
    run_bench("w1", "--csv", "out.csv")
    assert [*pd.read_csv("out.csv").workload] == ["w1"]
    os.mkfifo("pipe")
    (folder / "results").mkdir()
    for path in ("pipe", "results", "/dev/null"):
        assert f"'{path}' is not a file" in error_of("bench", "w1", "--device", "cpu", "--csv", path)


def test_by_any_of_its_names_a_workload_is_written_by_its_short_one():
    (line,) = run_bench("resnet18", "--json", "--csv", "out.csv").splitlines()
    assert json.loads(line)["workload"] == "w3"
    assert [*pd.read_csv("out.csv").workload] == ["w3"]
    for line in output_of("bench", "resnet18", "--count", "--json").splitlines():
        assert json.loads(line)["workload"] == "w3"


def test_public_images_that_are_missing_are_refused_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(speed, "time_case", None)
    resolve_run = resolve

    def resolve_with_public_images(*arguments, **options):
        setup = resolve_run(*arguments, **options)
        return replace(setup, config=replace(setup.config, public_dataset="cifar100"))

    monkeypatch.setattr(cases, "resolve", resolve_with_public_images)
    fault = error_of("bench", "w1", "fedavg", "--device", "cpu", "--repeats", "1")
    assert "the data set 'cifar100' is not on this machine" in fault


@pytest.mark.slow
def test_the_chosen_workloads_are_measured_into_a_table(monkeypatch):
    """By default these are the two short workloads, else those that are named, and those of scaling."""
    monkeypatch.setattr(workloads, "SCALING", [replace(TINY_CNN, name=name) for name in ("w1 K=1 B=8", "w1 K=2 B=8")])
    title, first, second, machine, meanings = run_bench().splitlines()
    assert [line.split()[0] for line in (title, first, second)] == ["Workload", "w1", "w2"]
    assert first.strip().endswith("random")
    assert f"torch {torch.__version__}, float32; one round" in machine
    assert meanings.startswith("Engine: seconds of a round by fedcli; Plain loop: seconds of a round by a plain ")
    titles = re.split("  +", title.strip())
    for line in (first, second):
        cells = re.split("  +", line.strip())
        assert cells[titles.index("Threads")] == str(torch.get_num_threads())
    lines = run_bench("w2", "--scaling").splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["w2", "w1 K=1 B=8", "w1 K=2 B=8"]
    lines = run_bench("--scaling").splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == ["w1", "w2", "w1 K=1 B=8", "w1 K=2 B=8"]


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
