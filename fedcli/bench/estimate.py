"""An estimate of the time of a round, by what this machine does in one large matrix product and in one large copy.

It is the time that the arithmetic or the memory traffic takes, the larger of the two. Arithmetic: the FLOPs of the
plain loop's round over those of a large matrix product in the same precision, done by each thread or process alone.
Memory: the bytes of parameters, gradients and momentum, each read and written once in every step of every client, over
those of a large copy. It is no lower bound: a smaller product may run faster, and a cache may serve the memory traffic.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedcli.bench.clock import measure_seconds
from fedcli.bench.plain_loop import PlainRounds
from fedcli.core.federation import Federation
from fedcli.core.layers import use_live_taps
from fedcli.core.parallel import ItemRunner

MATMUL_SIDE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = 2**28  # beyond any cache
TRIES = 10  # of a product or a copy, of which the fastest counts


class MachineRates(NamedTuple):
    """What a machine does in a second of a large matrix product and of a large copy."""

    flops_per_second: float
    bytes_per_second: float


def measure_rates(device: torch.device, runner: ItemRunner, dtype: torch.dtype) -> MachineRates:
    """Measures the rates of a machine in a product of two square matrices of a type and in a copy.

    Args:
        device: The device that does both.
        runner: What does work on a CPU by all threads or processes.
        dtype: The type of the matrices.
    """
    side = MATMUL_SIDE[device.type]
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    products_per_second = measure_calls_per_second(partial(torch.matmul, left, right), device, runner)
    source = torch.zeros(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copies_per_second = measure_calls_per_second(partial(target.copy_, source), device, runner)
    return MachineRates(
        flops_per_second=2 * side**3 * products_per_second,
        bytes_per_second=2 * COPY_BYTES * copies_per_second,
    )


def measure_calls_per_second(work: Callable[[], Any], device: torch.device, runner: ItemRunner) -> float:
    """Measures how often some work is done in a second at best, on a CPU by all threads or processes, each alone."""
    processes = runner.processes

    def measure_alone(index: int) -> float:
        return 1 / min(measure_seconds(work, device) for _ in range(TRIES))

    if processes.count > 1:  # at once, and not as soon as it has shown that this is faster
        return sum(processes.map_with_forks(measure_alone, range(processes.count), count=processes.count))
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return sum(runner.map("measure this machine's rates", measure_alone, range(threads)))


class Estimate(NamedTuple):
    """How long a round takes at the rates of a machine."""

    arithmetic_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The larger one, which counts."""
        return max(self.arithmetic_seconds, self.memory_seconds)


def estimate_round(fed: Federation, plain_rounds: PlainRounds) -> Estimate:
    """Measures this machine's rates; returns how long a round of a workload takes at these.

    Args:
        fed: The federation; all its clients hold equally many examples.
        plain_rounds: The plain loop, whose floating-point operations are counted.
    """
    dtype = torch.bfloat16 if fed.config.precision == "bf16" else fed.dtype
    rates = measure_rates(fed.device, fed.engine.runner, dtype)
    examples_of_client = len(fed.training[0])
    passes = fed.config.cohort_size * fed.local_epochs  # over a client's examples, of all clients together
    flops = passes * examples_of_client * count_flops_per_example(plain_rounds)
    steps = passes * math.ceil(examples_of_client / fed.batch_size)
    # Parameter, gradient and momentum, each read and written.
    nbytes = steps * 2 * 3 * fed.sizes.parameters * fed.dtype.itemsize
    return Estimate(
        arithmetic_seconds=flops / rates.flops_per_second,
        memory_seconds=nbytes / rates.bytes_per_second,
    )


def count_flops_per_example(plain_rounds: PlainRounds) -> float:
    """Counts the floating-point operations of a training step of the plain loop, and divides them by its examples.

    Weights that meet padding only are left out, see `fedcli.core.layers.LiveConv2d`.
    """
    x, y = plain_rounds.load_first_batch()
    model = copy.deepcopy(plain_rounds.model)
    _, channels, height, _ = x.shape
    use_live_taps(model, channels, height)
    with FlopCounterMode(display=False) as counter:
        plain_rounds.compute_loss(model, x, y).backward()
    return counter.get_total_flops() / len(x)
