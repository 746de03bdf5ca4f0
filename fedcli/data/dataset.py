"""A data set in memory, its subsets and what is computed of its images."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli.core.draws import generator
from fedcli.data.image_arrays import COLUMNS, SPLITS, Arrays
from fedcli.errors import UserError


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory, in canonical order."""

    name: str
    x_train: Tensor  # uint8 [N, channels, H, W]
    y_train: Tensor  # int64 [N]
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...]
    domain_train: Tensor | None = None  # int64 [N]
    domain_test: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    writer_train: Tensor | None = None  # int64 [N], who wrote or drew each example
    writer_test: Tensor | None = None
    place_train: Tensor | None = None  # int64 [N], position in the files; None in old cache files
    place_test: Tensor | None = None
    share: float = 1.0  # of the training images that are kept
    source: str = ""  # of a user's own: where it was imported from, and what was changed

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.class_names)

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return self.x_train.shape[1]

    @property
    def image_size(self) -> int:
        """Height and width in pixels."""
        return self.x_train.shape[2]

    def columns(self, split: str) -> dict[str, Tensor]:
        """Returns the columns of a split that there are, by their names in `image_arrays.COLUMNS`."""
        columns = {}
        for name in COLUMNS:
            values = getattr(self, f"{name}_{split}")
            if values is not None:
                columns[name] = values
        return columns

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a SHA-256 over pixels, labels, domains and writers of both splits."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for name, values in self.columns(split).items():
                if name != "place":
                    digest.update(values.numpy().reshape(-1).data)
        return digest.hexdigest()[:16]


def from_arrays(name: str, arrays: Arrays) -> Dataset:
    """Returns the data set of arrays that are in canonical order."""
    tensors = {key: torch.from_numpy(values) for key, values in arrays.items() if key.endswith(SPLITS)}
    for split in SPLITS:
        tensors[f"x_{split}"] = tensors[f"x_{split}"].permute(0, 3, 1, 2).contiguous()
    domain_names = arrays.get("domain_names", np.empty(0, str))
    return Dataset(
        name, x_train=tensors["x_train"], y_train=tensors["y_train"], x_test=tensors["x_test"],
        y_test=tensors["y_test"], class_names=tuple(arrays["class_names"].tolist()),
        domain_train=tensors.get("domain_train"), domain_test=tensors.get("domain_test"),
        domain_names=tuple(domain_names.tolist()), writer_train=tensors.get("writer_train"),
        writer_test=tensors.get("writer_test"), place_train=tensors.get("place_train"),
        place_test=tensors.get("place_test"), source=str(arrays.get("source", "")),
    )  # fmt: skip


def stratified_subset(dataset: Dataset, num_train: int, seed: int) -> Dataset:
    """Returns a subset of the training images, stratified by class and then by domain; the test images stay.

    Every class keeps at least one image. With the same seed, a smaller subset is contained in a larger one.

    Raises:
        UserError: There are fewer images than `num_train`, or more classes.
    """
    labels = dataset.y_train.numpy()
    count = len(labels)
    least = dataset.num_classes
    if not least <= num_train <= count:
        raise UserError(f"--train-examples {num_train} does not fit '{dataset.name}'; use {least} to {count}.")
    strata = labels
    if dataset.domain_train is not None:
        num_domains = max(len(dataset.domain_names), 1)
        strata = labels * num_domains + dataset.domain_train.numpy()
    mixed = generator(seed, "take").permutation(count)
    order = _interleave(_interleave(mixed, strata), labels)
    positions = torch.from_numpy(np.sort(order[:num_train]))
    taken: dict[str, Any] = {f"{name}_train": values[positions] for name, values in dataset.columns("train").items()}
    return replace(dataset, share=dataset.share * num_train / count, **taken)


def merge_splits(dataset: Dataset) -> Dataset:
    """Returns the set with its test images behind the training images."""
    train = dataset.columns("train")
    test = dataset.columns("test")
    if "place" in test:
        test["place"] = len(dataset.y_train) + test["place"]
    merged: dict[str, Any] = {f"{name}_train": torch.cat([train[name], test[name]]) for name in train}
    return replace(dataset, **merged)


class ChannelStatistics(NamedTuple):
    """Of the pixels of each channel, in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def channel_statistics(dataset: Dataset) -> ChannelStatistics:
    """Mean and standard deviation of each channel of the training images in [0, 1]; 1 for a deviation of 0."""
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(pixels.flatten(), minlength=256) for pixels in dataset.x_train.unbind(1)])
    shares = counts / counts.sum(1, keepdim=True).double()  # [channels, 256]
    mean = (shares * values).sum(1, keepdim=True)
    deviation = (shares * (values - mean) ** 2).sum(1).sqrt()
    std = tuple(value or 1.0 for value in deviation.tolist())
    return ChannelStatistics(tuple(mean.flatten().tolist()), std)


def _interleave(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Positions `[N]` rearranged so that every beginning holds each of the groups, `[N]`, in proportion."""
    group = groups[order]
    sizes = np.bincount(group)
    starts = sizes.cumsum() - sizes  # of each group where all are sorted by group
    place_if_sorted = np.argsort(np.argsort(group, kind="stable"))
    rank = place_if_sorted - starts[group]  # within its group
    return order[np.argsort(rank / sizes[group], kind="stable")]
