"""Costs: the floats that a method's clients receive and send in a round, for `Method.costs`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The sizes that a method's costs depend on, in floats or counts."""

    parameters: int
    num_classes: int
    feature_dim: int


def both_ways(floats: Callable[[Sizes], int]) -> Callable[..., tuple[int, int]]:
    """Costs of a method whose clients each receive and send so many floats in a round."""

    def costs(state: Any, cohort: Any, fed: Any, config: Any) -> tuple[int, int]:
        total = len(cohort.client_ids) * floats(fed.sizes)
        return total, total

    return costs


def params_both_ways(state: Any, cohort: Any, fed: Any, config: Any) -> tuple[int, int]:
    """Costs of a method whose clients each receive and send what its state has in `params`, a part of a model."""
    total = len(cohort.client_ids) * sum(value.numel() for value in state.params.values())
    return total, total


def rows_by_class(width: Callable[[Sizes], int]) -> Callable[..., tuple[int, int]]:
    """Costs of a method whose clients each receive a row for every class, and send rows of the classes they have."""

    def costs(state: Any, cohort: Any, fed: Any, config: Any) -> tuple[int, int]:
        has_class = fed.class_counts(cohort) > 0
        return has_class.numel() * width(fed.sizes), int(has_class.sum()) * width(fed.sizes)

    return costs
