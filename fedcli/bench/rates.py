"""How fast the work of a round could be done at best, by this machine's own peak rates.

Arithmetic: the FLOPs of the plain loop's round over those of the fastest of several matrix products and of the
network's own convolutions in the same precision, done by each thread alone. Memory: the bytes of parameters, gradients
and momentum, each read and written once in every step of every client, over those of a large copy. The lower bound of
a round's time is the larger of the two.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedcli.bench.rounds import seconds_of

MATMUL_SIDES = {"cpu": (2048, 1024, 512), "cuda": (8192, 4096)}
COPY_BYTES = 2**28  # beyond any cache
TRIES, LASTING = 4, 0.15  # tries of each rate, of which the fastest counts; seconds of a try, at least


def peak_flops(device: torch.device, dtype: torch.dtype, layers: Iterable[Callable[[], Any]]) -> float:
    """Measures the FLOPs a second of a device at best: in matrix products, and in layers of a network."""
    works = list(layers)
    for side in MATMUL_SIDES[device.type]:
        works.append(partial(torch.matmul, *torch.randn(2, side, side, device=device).to(dtype)))
    rates = []
    for work in works:
        with FlopCounterMode(display=False) as counter:
            work()
        rates.append(counter.get_total_flops() * times_per_second(work, device))
    return max(rates)


def peak_bandwidth(device: torch.device) -> float:
    """Measures the bytes a second that a device reads and writes at best."""
    source = torch.zeros(COPY_BYTES // 4, device=device)
    return 2 * COPY_BYTES * times_per_second(partial(torch.empty_like(source).copy_, source), device)


def times_per_second(work: Callable[[], Any], device: torch.device) -> float:
    """Returns how many times a second some work is done at best, by all threads, each alone."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1

    @torch.no_grad()
    def repeat(times: int) -> None:
        for _ in range(times):
            work()

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # On CUDA in this thread, where it has been set up.
        repeat_all = (lambda times: list(pool.map(repeat, [times] * threads))) if device.type == "cpu" else repeat
        times = math.ceil(LASTING / min(seconds_of(partial(repeat_all, 1), device) for _ in range(2)))
        seconds = min(seconds_of(partial(repeat_all, times), device) for _ in range(TRIES))
    torch.set_num_threads(threads)
    return threads * times / seconds
