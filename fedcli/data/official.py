"""Whether images are those that the publishers of a known data set have made, and the official names of its classes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedcli.data.catalog import KNOWN, MADE, UNSURE
from fedcli.data.dataset import Dataset
from fedcli.data.image_arrays import NAMES_OF, Columns
from fedcli.errors import UserError

_FACTS = {  # by which a set is told from the official one where its fingerprint is not known, in words
    "train": "training images",
    "test": "test images",
    "train_counts": "training images of its classes",
    "test_counts": "test images of its classes",
    "domain_counts": "images of its domains",
}


def is_official(name: str) -> bool:
    """Whether a name stands for images that its publishers have made, and not for some that are made here."""
    return name in KNOWN and name not in MADE


def refuse_other_images(dataset: Dataset) -> None:
    """Refuses a set with a known name that is not the official one, since its runs would stand in papers' tables.

    Raises:
        UserError: Its fingerprint is another one or, where only they are known, its numbers of images.
    """
    num_classes = dataset.num_classes
    train_counts = dataset.y_train.bincount(minlength=num_classes)
    test_counts = dataset.y_test.bincount(minlength=num_classes)
    domain_counts = torch.zeros(0)
    if dataset.domain_train is not None and dataset.domain_test is not None:
        domains = torch.cat([dataset.domain_train, dataset.domain_test])
        domain_counts = domains.bincount(minlength=len(dataset.domain_names))
    facts = {
        "fingerprint": dataset.fingerprint,
        "train": len(dataset.y_train),
        "test": len(dataset.y_test),
        "train_counts": tuple(train_counts.tolist()),
        "test_counts": tuple(test_counts.tolist()),
        "domain_counts": tuple(domain_counts.tolist()),
    }
    difference = _find_difference(dataset.name, facts)
    if difference:
        raise UserError(
            f"these are not the images of '{dataset.name}' (got {difference}); import them under a name of their own, "
            f"such as my-{dataset.name}, and leave '{dataset.name}' to the official ones."
        )


def _find_difference(name: str, facts: Mapping[str, Any]) -> str:
    """In what a set that is called by a known name differs from the official one, as text; empty where it is the same.

    `facts` has the set's `fingerprint`, its numbers of `train` and `test` images, and as tuples its `train_counts` and
    `test_counts` of each class and `domain_counts` of each domain.
    """
    info = KNOWN[name]
    if info.fingerprint:
        is_same = facts["fingerprint"] == info.fingerprint
        return "" if is_same else f"fingerprint {facts['fingerprint']}, not {info.fingerprint}"
    official = {
        "train": info.num_train,
        "test": info.num_test,
        "train_counts": info.train_counts,
        "test_counts": info.test_counts,
        "domain_counts": info.domain_counts,
    }
    if name in UNSURE:
        del official["train"], official["test"]
    for fact, expected in official.items():
        if expected and facts[fact] != expected:
            return f"{_in_words(facts[fact])} {_FACTS[fact]}, not {_in_words(expected)}"
    return ""


def _in_words(numbers: int | Sequence[int]) -> str:
    return f"{numbers:,}" if isinstance(numbers, int) else ", ".join(map(str, numbers[:10]))


def with_official_names(name: str, columns: Columns) -> Columns:
    """Returns the columns with the official labels, class names and domains of the known data set `name`.

    Raises:
        ValueError: Shape, classes or domains are others.
    """
    info = KNOWN[name]
    shape = columns["x"].shape[1:]
    remedy = f"as those of '{name}': choose another name for another data set"
    expected = (info.image_size, info.image_size, info.channels)
    if shape != expected:
        raise ValueError(f"the images are {shape}, the channels last, and not {expected} {remedy}")
    columns = _with_official(columns, "y", info.class_names, remedy)
    return _with_official(columns, "domain", info.domain_names, remedy)


def _with_official(columns: Columns, column: str, official: Sequence[str], remedy: str) -> Columns:
    """Returns the columns with the official numbers and names of classes, "y", or domains, "domain".

    Raises:
        ValueError: They are others.
    """
    names = columns[NAMES_OF[column]].tolist() if column in columns else []
    if official == ("",) * len(names):  # of which the number alone is known, or of which there are none
        return columns
    order = official_order(names, official) if any(official) else None
    if order is None:
        listed = f"{len(names)} ({', '.join(names[:3])}…)"
        listed_official = f"{len(official)} ({', '.join(filter(None, official[:4]))}…)"
        noun = {"y": "classes", "domain": "domains"}[column]
        raise ValueError(f"the {noun} are {listed} and not {listed_official} {remedy}")
    official_numbers = np.array(order)[columns[column]]
    return columns | {column: official_numbers, NAMES_OF[column]: np.array(official)}


def official_order(names: Sequence[str], official: Sequence[str]) -> list[int] | None:
    """For each name its position among the official ones; None where they are others.

    Numbers are positions, since labels without names come with them. Case, spaces and signs do not count, unless
    a set has both A and a; `T-shirt/top` is also written `t-shirt`.
    """
    positions = set(map(str, range(len(official))))
    if names and set(names) <= positions:
        return list(map(int, names))
    for spelling in (str, _letters_and_digits):
        labels = {spelling(name): label for label, name in enumerate(official)}
        if len(labels) == len(official) and sorted(map(spelling, names)) == sorted(labels):
            return [labels[spelling(name)] for name in names]
    return None


def _letters_and_digits(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower()).replace("tshirttop", "tshirt")
