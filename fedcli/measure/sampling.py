"""Which images are measured where there are too many: a random choice, the same for all runs."""

import numpy as np

from fedcli.core.draws import generator

SEED = 0  # of these choices, of K-means and of t-SNE, whatever the seed of the run


def sample(count: int, at_most: int, *purpose: int | str) -> np.ndarray:
    """Chooses `at_most` of the positions 0 to `count` - 1, or all of them, in random order.

    Args:
        count: How many there are.
        at_most: How many are chosen.
        *purpose: What for, as the `key` of `generator`; each purpose has a choice of its own.
    """
    return generator(SEED, *purpose).permutation(count)[:at_most]
