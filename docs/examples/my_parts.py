"""A backbone, a partition, a data set, a metric, a chart and a logger of one's own; see `docs/bring-your-own.md`."""

from pathlib import Path

import matplotlib.figure
import numpy as np
from torch import nn


def tiny(channels: int, image_size: int, num_classes: int) -> nn.Module:
    """A small network; its last Linear is the head, and what enters it are the features."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * image_size**2, 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )


def by_halves(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Half of the clients share the lower classes, the other half the upper ones."""
    order = rng.permutation(len(labels))
    upper = labels[order] >= np.median(labels)
    lower_parts = np.array_split(order[~upper], num_clients // 2)
    return [*lower_parts, *np.array_split(order[upper], num_clients - num_clients // 2)]


def blobs() -> dict[str, np.ndarray]:
    """Grey images of 8 x 8 pixels with a bright spot whose place is the class."""
    rng, labels = np.random.default_rng(0), np.arange(500) % 4
    images = rng.integers(0, 160, (500, 8, 8)).astype(np.uint8)
    images[np.arange(500), 2 * labels, 2 * labels] = 255
    return {"x_train": images[:400], "y_train": labels[:400], "x_test": images[400:], "y_test": labels[400:]}


def my_metric(record: dict) -> float | None:
    """The best test accuracy of any round."""
    tested = [entry["test_accuracy"] for entry in record["rounds"] if entry["test_accuracy"] is not None]
    return max(tested, default=None)


def my_chart(records: list[dict]) -> matplotlib.figure.Figure:
    """The seconds of every round, a line for each run."""
    figure = matplotlib.figure.Figure()
    axes = figure.add_subplot(xlabel="round", ylabel="seconds")
    for record in records:
        seconds = [sum(entry["seconds"].values()) for entry in record["rounds"]]
        axes.plot(range(1, len(seconds) + 1), seconds, label=record["method"])  # a record counts rounds from 0
    axes.legend()
    return figure


class MyLogger:
    """Adds a line to a file for every round."""

    def start(self, record: dict, folder: Path, samples_per_round: int, first_round: int) -> None:
        """The run is about to train its first round, or the first one after it was resumed."""
        self.file = (folder / "rounds.txt").open("a")

    def round(self, entry: dict) -> None:
        """A round has ended; `entry` is what the record says of it."""
        print(entry["round"] + 1, entry["test_accuracy"], file=self.file, flush=True)
