"""Runs tests and methods on the fake CUDA device, in the process that has it, and methods on the CPU beside it."""

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from importlib import import_module
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from fedcli import toy
from fedcli.core.client_states import refuse_non_finite
from fedcli.core.federation import Federation
from fedcli.runs.machine import deterministic
from tests import laws
from tests.fake_cuda import FakeCuda, fused_sgd, register, to_host


def prepare_process() -> None:
    """Makes this process the one of the device."""
    torch.set_num_threads(1)
    register()  # before autograd makes its queues, one for each device that it knows


@cache
def device_process() -> ProcessPoolExecutor:
    """Returns the process that has the device, whose backend of PyTorch it keeps until it ends."""
    pool = ProcessPoolExecutor(1, get_context("spawn"), prepare_process)
    atexit.register(pool.shutdown)
    return pool


def end_process() -> None:
    """Ends the process of the device, if there is one; the next test on it makes another."""
    if device_process.cache_info().currsize:
        device_process().shutdown()
        device_process.cache_clear()


def call_test(module: str, name: str, arguments: dict[str, Any], environment: dict[str, str]) -> Any:
    """Calls a test in the process of the device, under an environment, as the fixtures for all tests would have it."""
    test = getattr(import_module(module), name).__wrapped__
    gc.collect()
    gc.freeze()  # a capture collects garbage, and need not look through what was there before the test
    torch.manual_seed(0)
    with patch.dict(os.environ, environment, clear=True):
        result = test(**arguments)
    assert torch.get_num_threads() == 1
    return result


def on_fake_cuda(test: Callable) -> Callable:
    """Makes a test run in the process of the device; its arguments must be such that can be pickled."""

    @wraps(test)
    def in_process(**arguments):
        call = device_process().submit(call_test, test.__module__, test.__name__, arguments, dict(os.environ))
        return call.result()

    return in_process


class FakeCudaRun(NamedTuple):
    """A run of some rounds on the device."""

    state: Any  # after the last round, on the host
    fed: Federation
    device: FakeCuda
    rounds: list[dict[str, int]]  # captures, launches and waits of each


class NoGraphs:
    """Takes the place of `CudaGraphs` on the CPU: a capture is the work itself, which a replay does again."""

    def __init__(self):
        self.num_captured = 0

    def warm_up(self, work):
        work()

    def capture(self, work):
        self.num_captured += 1
        return work

    def branch(self, works):
        return [work() for work in works]


@contextmanager
def early_captures(burst: int = 8) -> Iterator[None]:
    """Makes the engine capture its second step, and graphs of several steps hold `burst` of them."""
    with patch("fedcli.core.graphs.WARM_UP_STEPS", 1), patch("fedcli.core.graphs.BURST_STEPS", burst):
        yield


def count_so_far(device: FakeCuda) -> dict[str, int]:
    """Returns how many captures, launches and waits the device has counted since it began."""
    return {"captures": device.captures, "launches": device.launches, "waits": device.waits.total()}


def run_on_fake_cuda(
    method: Any, overrides: dict | None = None, rounds: int = 3, change: Callable | None = None,
    graphs: bool = True, **run_options: Any,
) -> FakeCudaRun:  # fmt: skip
    """Runs rounds of a method on the device, with operations that give the same bits each time.

    `change` is called with the federation before the first round.
    """
    with ExitStack() as stack:
        device = stack.enter_context(FakeCuda.running())
        stack.enter_context(deterministic(True))
        setup, fed = toy.federation(method, overrides, device="cuda", **run_options)
        if not graphs:
            fed.engine.graphs = None
        if change is not None:
            change(fed)

        state = laws.initial_state(setup, fed)
        counts_of_rounds = []
        for round in range(rounds):
            before = count_so_far(device)
            fed.start_round()
            state, _ = laws.method_round(setup, fed, state, fed.cohort(round))
            refuse_non_finite(state, round)
            counts_of_rounds.append({name: count - before[name] for name, count in count_so_far(device).items()})
        assert not device.unrepeatable, list(device.unrepeatable)
        return FakeCudaRun(to_host(state), fed, device, counts_of_rounds)


def run_on_cpu(
    method: Any, overrides: dict | None = None, rounds: int = 3, change: Callable | None = None,
    **run_options: Any,
) -> Any:  # fmt: skip
    """Returns the state after rounds on the CPU, whose steps are those of a CUDA device without captures."""
    setup, fed = toy.federation(method, overrides, **run_options)
    fed.engine.graphs = NoGraphs()
    fed.engine.joint_layers = True
    if change is not None:
        change(fed)
    with patch.object(torch, "_fused_sgd_", fused_sgd):  # which rounds as the device does
        return toy.simulate(setup, fed, rounds)
