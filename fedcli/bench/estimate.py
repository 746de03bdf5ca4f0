"""An estimate of the time of a round, by what this machine does in one large matrix product and in one large copy.

It is the time that the arithmetic or the memory traffic takes, the larger of the two. Arithmetic: the FLOPs of the
plain loop's round over those of a large matrix product in the same precision, done by each thread or process alone.
Memory: the bytes of parameters, gradients and momentum, each read and written once in every step of every client, over
those of a large copy. It is no lower bound: a smaller product may run faster, and a cache may serve the memory traffic.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fedcli.bench.clock import measure_seconds
from fedcli.core.engine import Engine
from fedcli.core.federation import Federation

MATMUL_SIDE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = 2**28  # beyond any cache
TRIES = 10  # of each rate, of which the fastest counts


class PeakRates(NamedTuple):
    """What a machine does in a second of a large product and of a large copy."""

    flops: float
    bytes: float


def measure_peak_rates(engine: Engine, dtype: torch.dtype) -> PeakRates:
    """Measures the rates in a product of square matrices and in a large copy."""
    device = engine.images.device
    side = MATMUL_SIDE[device.type]
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    products = measure_rate(partial(torch.matmul, left, right), engine)
    source = torch.zeros(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copies = measure_rate(partial(target.copy_, source), engine)
    return PeakRates(flops=2 * side**3 * products, bytes=2 * COPY_BYTES * copies)


def measure_rate(work: Callable[[], Any], engine: Engine) -> float:
    """Returns how many times a second some work is done at best, on a CPU by all threads or processes, each alone."""
    device = engine.images.device
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    processes = engine.runner.processes

    def measure_rate_alone(number: int) -> float:
        return 1 / min(measure_seconds(work, device) for _ in range(TRIES))

    if processes.count > 1:  # at once, and not as soon as it has shown that this is faster
        return sum(processes.map_with_forks(measure_rate_alone, range(processes.count), count=processes.count))
    return sum(engine.runner.map("measure peak rates", measure_rate_alone, range(threads)))


class Estimate(NamedTuple):
    """How long a round takes at peak rates."""

    arithmetic_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The larger one, which counts."""
        return max(self.arithmetic_seconds, self.memory_seconds)


def estimate_round(fed: Federation, flops_per_example: float) -> Estimate:
    """Measures this machine's peak rates; returns how long a round of a workload takes at these.

    Args:
        fed: The federation; all its clients hold equally many examples.
        flops_per_example: The floating-point operations of a training step of the plain loop, over its examples.
    """
    dtype = torch.bfloat16 if fed.config.precision == "bf16" else fed.dtype
    rates = measure_peak_rates(fed.engine, dtype)
    examples_of_client = len(fed.training[0])
    passes = fed.config.cohort_size * fed.local_epochs  # over a client's examples, of all clients together
    flops = passes * examples_of_client * flops_per_example
    steps = passes * math.ceil(examples_of_client / fed.batch_size)
    # Parameter, gradient and momentum, each read and written.
    nbytes = steps * 2 * 3 * fed.sizes.parameters * fed.dtype.itemsize
    return Estimate(arithmetic_seconds=flops / rates.flops, memory_seconds=nbytes / rates.bytes)
