"""How fast the work of a round could be done at best, by this machine's own ceilings.

Arithmetic: the FLOPs of the plain loop's round over those of the fastest of several matrix products and of the
network's own convolutions in the same precision, done by all threads together and by each thread alone. Memory: the
bytes of parameters, gradients and momentum, each read and written once in every step of every client, over those of a
large copy. The floor is the larger of the two.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fedcli.bench.rounds import Convolution, seconds_of

MATMUL_SIDES = {"cpu": (2048, 1024, 512), "cuda": (8192, 4096)}
COPY_BYTES = 2**28  # beyond any cache
TRIES, LASTING = 4, 0.15  # tries of each ceiling, of which the fastest counts; seconds of a try, at least


class Ceilings(NamedTuple):
    """What the device does at best."""

    flops: float  # per second
    bandwidth: float  # bytes per second, read and written


@cache
def ceilings(device: torch.device, precision: str, convolutions: tuple[Convolution, ...]) -> Ceilings:
    """The ceilings of a device in the precision of a run, see the module's docstring."""
    dtype = {"float64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
    works: list[tuple[int, Callable[[], Any]]] = []  # FLOPs, and what takes them
    for side in MATMUL_SIDES[device.type]:
        left, right = torch.randn(2, side, side, device=device).to(dtype)
        works.append((2 * side**3, partial(torch.matmul, left, right)))
    for kind in convolutions:
        tensors = [torch.randn(size, device=device).to(dtype) for size in kind[:2]]
        x, weight = (tensor.to(memory_format=torch.channels_last, copy=True) for tensor in tensors)
        work = partial(F.conv2d, x, weight, stride=kind.stride, padding=kind.padding, groups=kind.groups)
        works.append((2 * work().numel() * weight[0].numel(), work))
    source = torch.zeros(COPY_BYTES // 4, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return Ceilings(max(_rate(*work, device) for work in works), _rate(2 * COPY_BYTES, copy, device))


def _rate(amount: int, work: Callable[[], Any], device: torch.device) -> float:
    """How much of an amount goes through some work in a second at best: by all threads together, or by each alone."""
    best = 0.0
    for workers in {1, torch.get_num_threads() if device.type == "cpu" else 1}:
        once = min(seconds_of(partial(_repeat, work, 1, workers), device) for _ in range(2))
        times = math.ceil(LASTING / once)
        seconds = min(seconds_of(partial(_repeat, work, times, workers), device) for _ in range(TRIES))
        best = max(best, workers * times * amount / seconds)
    return best


def _repeat(work: Callable[[], Any], times: int, workers: int) -> None:
    """Does some work so many times in each of some threads, among which those of PyTorch are divided."""

    def again(_: int) -> None:
        for _ in range(times):
            work()

    if workers == 1:  # in this thread, where CUDA has been set up
        return again(0)
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(workers, "", partial(torch.set_num_threads, threads // workers)) as pool:
        list(pool.map(again, range(workers)))
    torch.set_num_threads(threads)
