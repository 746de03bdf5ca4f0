"""What the tests of `fedcli bench` share: reduced workloads, rounds of given times, and the command."""

import sys
from dataclasses import replace
from typing import NamedTuple

import torch

from fedcli.bench import engine_rounds, estimate, plain_loop, speed, workloads
from fedcli.bench.cases import BenchCase
from fedcli.bench.timings import Timing
from fedcli.bench.workloads import Workload
from fedcli.runs import prepare
from tests.commands import output_of

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
    run_plain_round = plain_loop.PlainRounds.run_round
    warm_up = {}
    engine_seconds = iter([warm_up, *engine])
    plain_seconds = iter(plain)
    rounds_run = []

    def engine_round(setup, fed, state, cohort):
        rounds_run.append(RoundRun(cohort.round, flushes_denormals()))
        state, entry = one_round(setup, fed, state, cohort)
        return state, {"seconds": entry["seconds"] | next(engine_seconds)}

    def plain_round(self, client_ids):
        rounds_run.append(RoundRun(tuple(client_ids), flushes_denormals()))
        run_plain_round(self, client_ids)

    def measure_seconds(work, device):
        work()
        return next(plain_seconds)

    monkeypatch.setattr(engine_rounds, "one_round", engine_round)
    monkeypatch.setattr(plain_loop.PlainRounds, "run_round", plain_round)
    monkeypatch.setattr(speed, "measure_seconds", measure_seconds)
    monkeypatch.setattr(estimate, "measure_rates", lambda device, runner, dtype: estimate.MachineRates(1e6, 1e3))
    return rounds_run


class ThreeRounds(NamedTuple):
    """A measurement of three rounds with times that are given."""

    timing: Timing
    rounds_run: list[RoundRun]
    can_flush: bool  # numbers below the normal ones to 0
    flushes_afterwards: bool


def measure_three_rounds(monkeypatch):
    times = zip((4.0, 18.0, 1.0), (6.0, 2.0, 39.0), (0.5, 0.25, 0.125), strict=True)
    engine = [{"train": train, "aggregate": rest, "data": 0.0, "evaluate": test} for train, rest, test in times]
    rounds_run = fake_seconds(monkeypatch, engine, [30.0, 20.0, 80.0])
    can_flush = torch.set_flush_denormal(False)
    timing = time_tiny(repeats=3)
    return ThreeRounds(timing, rounds_run, can_flush, flushes_denormals())


def run_bench(*arguments):
    """Returns what the command prints."""
    return output_of("bench", *arguments, "--device", "cpu", "--repeats", "1")
