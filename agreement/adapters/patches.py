"""The patches of an adapter, each of which changes its peer for a row."""

from collections.abc import Callable
from typing import Any

from agreement.exchange import Problem

Patch = Callable[[Any, Problem], None]  # is given what it changes and the problem, before the first round


def patches_of(*patches: Patch) -> dict[str, Patch]:
    """Patches by their names, which `Change.patch` has."""
    return {patch.__name__: patch for patch in patches}


def change_nothing(target: Any, problem: Problem) -> None:
    """The patch of a row that runs the peer's code as it is."""
