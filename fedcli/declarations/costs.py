"""Costs: the floats that a method's clients receive and send in a round, for `Method.costs`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Costs(NamedTuple):
    """Floats that the clients of a round receive and send, summed over the cohort."""

    down: int
    up: int


@dataclass(frozen=True)
class Sizes:
    """The sizes that a method's costs depend on, in floats or counts."""

    parameters: int
    num_classes: int
    feature_dim: int


def both_ways(floats: Callable[[Sizes], int]) -> Callable[..., Costs]:
    """Costs of a method whose clients each receive and send so many floats in a round."""

    def costs(state: Any, cohort: Any, fed: Any, config: Any) -> Costs:
        total = len(cohort.client_ids) * floats(fed.sizes)
        return Costs(down=total, up=total)

    return costs


def params_both_ways(state: Any, cohort: Any, fed: Any, config: Any) -> Costs:
    """Costs of a method whose clients each receive and send what its state has in `params`, a part of a model."""
    total = len(cohort.client_ids) * sum(value.numel() for value in state.params.values())
    return Costs(down=total, up=total)


def rows_by_class(width: Callable[[Sizes], int]) -> Callable[..., Costs]:
    """Costs of a method whose clients each receive a row for every class, and send rows of the classes they have."""

    def costs(state: Any, cohort: Any, fed: Any, config: Any) -> Costs:
        has_class = fed.class_counts(cohort) > 0
        row_floats = width(fed.sizes)
        return Costs(down=has_class.numel() * row_floats, up=int(has_class.sum()) * row_floats)

    return costs
