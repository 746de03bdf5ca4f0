"""A toy federation, on which the laws are held: four clients with a few random images, in float64, in seconds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcli import registry
from fedcli.core.federation import Federation
from fedcli.core.parts import Parts
from fedcli.core.trees import Tree, leaves
from fedcli.data.dataset import Dataset
from fedcli.declarations import Method, fields_of
from fedcli.runs import prepare
from fedcli.runs.resolve import DEFAULT_DATASET, Setup, resolve

CLIENT_SIZES = (13, 7, 10, 4)  # examples of each client; with batches of 4 the last batches have 1, 3, 2 and 4
BATCHNORM = f"{__file__}:small_batchnorm"


def toy_dataset(num_train=60, channels=1, size=8, num_classes=3, seed=0, absent=()) -> Dataset:
    """Draw random images, brighter in every second class; the classes `absent` have no example."""
    draw = np.random.default_rng(seed)
    classes = [label for label in range(num_classes) if label not in absent]

    def draw_images(count: int) -> tuple[Tensor, Tensor]:
        labels = np.resize(classes, count)
        pixels = draw.integers(0, 150, (count, channels, size, size)) + 50 * labels[:, None, None, None] % 100
        return torch.tensor(pixels, dtype=torch.uint8), torch.tensor(labels)

    x_train, y_train = draw_images(num_train)
    x_test, y_test = draw_images(20)
    return Dataset("toy", x_train, y_train, x_test, y_test, class_names=tuple(map(str, range(num_classes))))


def toy_parts(sizes: Sequence[int] = CLIENT_SIZES) -> list[np.ndarray]:
    """Make disjoint clients of these sizes."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


TOY = {
    "dataset": DEFAULT_DATASET, "backbone": "cnn-small", "precision": "float64", "device": "cpu",
    "num_clients": len(CLIENT_SIZES), "cohort_size": None, "partition": "iid", "rounds": 20, "local_epochs": 2,
    "batch_size": 4, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "validation": 0.0,
}  # fmt: skip


def small_batchnorm(channels: int, image_size: int, num_classes: int) -> nn.Module:
    """Make a network with BatchNorm over 64 values an image, named by this file as a user's own is.

    Over few values, a difference of 1e-15 grows a hundredfold in each round (resnet10-3x3 on these images).
    """
    hidden = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(hidden, nn.Linear(4 * image_size**2, 8), nn.ReLU(), nn.Linear(8, num_classes))


def federation(
    method: Method | str, overrides: dict[str, Any] | None = None, *, data: Dataset | None = None,
    parts: list[np.ndarray] | None = None, federation_type: type[Federation] | None = None, **run: Any,
) -> tuple[Setup, Federation]:  # fmt: skip
    """Set up a method, or that of a name, on toy data, under a protocol of which every value is overridden.

    `overrides` are options of the method, `run` those of the run in place of `TOY`, `parts` positions of each client's
    examples, and `federation_type` the class of the federation.
    """
    method = registry.find_method(method) if isinstance(method, str) else method
    protocol = registry.default_protocol(registry.find_method("fedavg"), DEFAULT_DATASET)
    data = data or toy_dataset()
    public = None
    if method.uses_public_data:
        run = {"public_dataset": DEFAULT_DATASET, "public_batch_size": 5, **run}
        public = toy_dataset(12, data.channels, data.image_size, seed=7)  # batches of 5, 5 and 2
    defaults = {name: option.default for name, option in fields_of(method.config).items()}
    setup = resolve(method, {"protocol": protocol.name, **TOY, **defaults, **(overrides or {}), **run})
    positions = Parts(toy_parts() if parts is None else parts)
    federation_type = federation_type or Federation
    return setup, prepare.make_federation(setup, data, positions, public, federation_type=federation_type)


def simulate(
    setup: Setup, fed: Federation, rounds: int, cohorts: Any = None, *, state: Any = None, first: int = 0
) -> Any:
    """Return the state after `rounds` rounds, from `state`, which is that after `first`; cohorts are drawn if None."""
    state = setup.method.init(fed, setup.method_config) if state is None else state
    for number in range(first, rounds):
        cohort = fed.cohort(number) if cohorts is None else fed.cohort_of(number, cohorts[number])
        state, _ = setup.method.run_round(state, cohort, fed, setup.method_config)
    return state


def distance(tree: Tree, other: Tree) -> float:
    """Return the norm of the difference of two trees over the norm of the second; 0 where they are the same."""

    def vector(tree: Tree) -> Tensor:  # on the host, where what clients keep waits
        return torch.cat([torch.zeros(1).double(), *(leaf.cpu().double().flatten() for leaf in leaves(tree))])

    difference = (vector(tree) - vector(other)).norm()
    return float(difference / vector(other).norm()) if difference else 0.0


def tested_models(setup: Setup, state: Any) -> Tree:
    """Return parameters and buffers: of the global model, or by client of all clients' own models."""
    if setup.method.personal is None:
        return setup.method.model(state)
    return dict(sorted(setup.method.personal(state).items()))


def models_after(method: Method | str, overrides: dict[str, Any] | None, rounds: int, **run: Any) -> Tree:
    """Return the tested models after so many rounds."""
    setup, fed = federation(method, overrides, **run)
    return tested_models(setup, simulate(setup, fed, rounds))
