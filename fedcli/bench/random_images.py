"""Random images in the shape of the workloads' data sets, for machines that do not have these."""

import numpy as np


def fmnist() -> dict[str, np.ndarray]:
    """As many grey images as Fashion-MNIST has."""
    return draw_images(60_000, 28, 28)


def cifar10() -> dict[str, np.ndarray]:
    """As many colour images as CIFAR-10 has."""
    return draw_images(50_000, 32, 32, 3)


def draw_images(count: int, *shape: int, tests: int = 10_000) -> dict[str, np.ndarray]:
    """Draws `count` images of this shape to train and others to test, of 10 classes."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(256, size=(count + tests, *shape), dtype=np.uint8), rng.integers(10, size=count + tests)
    return {"x_train": x[:count], "y_train": y[:count], "x_test": x[count:], "y_test": y[count:]}
