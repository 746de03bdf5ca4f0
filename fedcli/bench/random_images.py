"""Random images in the shape of the workloads' data sets, for machines that do not have these."""

from functools import partial

import numpy as np


def draw_images(count: int, *shape: int, tests: int = 10_000) -> dict[str, np.ndarray]:
    """Draws `count` images of this shape to train and others to test, of 10 classes."""
    rng = np.random.default_rng(0)
    x = rng.integers(256, size=(count + tests, *shape), dtype=np.uint8)
    y = rng.integers(10, size=count + tests)
    return {"x_train": x[:count], "y_train": y[:count], "x_test": x[count:], "y_test": y[count:]}


fmnist = partial(draw_images, 60_000, 28, 28)
cifar10 = partial(draw_images, 50_000, 32, 32, 3)
