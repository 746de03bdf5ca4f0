"""Random numbers: a generator for each purpose, and the global ones left as they were."""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(seed: int, *purpose: int | str) -> np.random.Generator:
    """Makes the random generator of one purpose, as `generator(seed, round, client, "order", epoch)`."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else int(part) for part in purpose]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words])))


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Leaves the global generators of PyTorch on the CPU, of NumPy and of Python as they were."""
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
