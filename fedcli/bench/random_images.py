"""Random images in the shape of the workloads' data sets, for machines that do not have these."""

from functools import partial

import numpy as np


def draw_images(shape: tuple[int, ...], num_train: int, num_test: int) -> dict[str, np.ndarray]:
    """Draws images of this shape to train and to test, of 10 classes."""
    rng = np.random.default_rng(0)
    x = rng.integers(256, size=(num_train + num_test, *shape), dtype=np.uint8)
    y = rng.integers(10, size=num_train + num_test)
    return {"x_train": x[:num_train], "y_train": y[:num_train], "x_test": x[num_train:], "y_test": y[num_train:]}


fmnist = partial(draw_images, shape=(28, 28), num_train=60_000, num_test=10_000)
cifar10 = partial(draw_images, shape=(32, 32, 3), num_train=50_000, num_test=10_000)
