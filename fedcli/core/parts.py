"""A client's part of the examples, and its division: what it trains on, is validated on and is tested on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedcli.core.draws import generator
from fedcli.core.numbers_in_flags import exact_share
from fedcli.core.run_options import DivisionOptions
from fedcli.errors import UserError


@dataclass(frozen=True, eq=False)
class Parts(Sequence[np.ndarray]):
    """The clients' parts of the training examples, an array for each client."""

    positions: list[np.ndarray]  # in the training set, int64
    # How many of each client's first examples are its test examples; None where the partition names none.
    num_test: list[int] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, client: Any) -> Any:
        return self.positions[client]


class Division(NamedTuple):
    """The clients' parts by what they are for, positions in the training set `[K][...]`."""

    examples: list[np.ndarray]  # all of a client's but its test examples
    testing: list[np.ndarray]  # its test examples
    training: list[np.ndarray]
    validation: list[np.ndarray]


def divide(parts: Parts, run: DivisionOptions) -> Division:
    """Divides each client's part by `run.local_test` and `run.validation`.

    Raises:
        UserError: No client has enough to train on.
    """
    test_sizes = parts.num_test
    ordered = parts.positions
    if test_sizes is None:
        test_sizes = [int(len(part) * exact_share(run.local_test)) for part in parts]
        if run.local_test:
            ordered = _shuffle(parts, run.partition_seed or 0)
    division = Division(examples=[], testing=[], training=[], validation=[])
    for part, test_size in zip(ordered, test_sizes, strict=True):
        examples = part[test_size:]
        num_training = len(examples) - int(len(examples) * exact_share(run.validation))
        division.examples.append(examples)
        division.testing.append(part[:test_size])
        division.training.append(examples[:num_training])
        division.validation.append(examples[num_training:])
    largest = max(map(len, division.training), default=0)
    if largest == 0:
        raise UserError("no client has a training example (got an empty partition); use fewer clients or more data.")
    if run.drop_last and largest < run.batch_size:
        raise UserError(
            f"--batch-size {run.batch_size} is larger than every client's training part under --drop-last "
            f"(the largest has {largest} examples); use {largest} or less, or --no-drop-last."
        )
    return division


def _shuffle(parts: Parts, seed: int) -> list[np.ndarray]:
    """Returns each client's part in random order, so that its first examples are a fair test."""
    shuffled = []
    for client, part in enumerate(parts):
        order = generator(seed, client, "test part").permutation(len(part))
        shuffled.append(part[order])
    return shuffled
