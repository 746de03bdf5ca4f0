"""The time of some work on a device."""

import time
from collections.abc import Callable
from typing import Any

import torch


def measure_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Measures the seconds of some work, until the device has done it."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
