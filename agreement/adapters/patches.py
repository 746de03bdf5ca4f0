"""The patches of an adapter, each of which changes its peer for a row."""

from collections.abc import Callable, Mapping
from typing import Any

from agreement.exchange import Problem

Patch = Callable[[Any, Problem], None]  # is given what it changes and the problem, before the first round


def patches_of(*patches: Patch) -> dict[str, Patch]:
    """Patches by their names, which `PeerConfig.patch` has."""
    return {patch.__name__: patch for patch in patches}


def apply_patch(patches: Mapping[str, Patch], name: str, target: Any, problem: Problem) -> None:
    """Makes the change of a peer's run, if it has one."""
    if name:
        patches[name](target, problem)
