"""Refuses a state that has become infinite or NaN, though no loss has shown it yet."""

from typing import Any

import torch

from fedcli.core.federation import NonFiniteLoss
from fedcli.core.trees import leaves, to_names


def refuse_non_finite(state: Any, before: Any, round: int) -> None:
    """Looks at the floating-point tensors that a round has made, where they lie; a device is waited for once.

    Args:
        state: The method's, after the round.
        before: Before it; what is still the same tensor was looked at then.
        round: Counted from 0.

    Raises:
        NonFiniteLoss: If one is not finite, with its place in the state.
    """
    known = {id(leaf) for leaf in leaves(before)}
    _, tensors = to_names(state)
    new = {path: leaf for path, leaf in tensors.items() if leaf.is_floating_point() and id(leaf) not in known}
    for device in {leaf.device for leaf in new.values()}:
        here = {path: leaf for path, leaf in new.items() if leaf.device == device}
        finite = torch.stack([torch.isfinite(leaf).all() for leaf in here.values()])
        if bad := [path for path, whole in zip(here, finite.tolist(), strict=True) if not whole]:
            raise NonFiniteLoss(
                f"'{bad[0][1:]}' of the state is not finite in round {round + 1}; a smaller --lr, or a smaller step of "
                "the server, usually helps."
            )
