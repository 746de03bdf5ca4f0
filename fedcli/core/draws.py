"""Random numbers: a generator for each purpose, and the global ones left as they were."""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(seed: int, *key: int | str) -> np.random.Generator:
    """Makes the random generator of one purpose, as `generator(seed, round, client, "order", epoch)`."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else int(part) for part in key]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words])))


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Leaves the global generators of PyTorch on the CPU, of NumPy and of Python as they were."""
    of_numpy = np.random.get_state()
    of_python = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
