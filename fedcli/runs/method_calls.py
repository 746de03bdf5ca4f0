"""How a run calls the functions of a method, which may be a user's: what it blames on them, and what it refuses."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedcli.core.client_states import find_stored_states
from fedcli.core.federation import Federation
from fedcli.core.trees import Tree, to_names
from fedcli.declarations import Method
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.isolation import unchanged
from fedcli.runs.resolve import Setup
from fedcli.runs.state_schema import check_state
from fedcli.runs.value_checks import Fault
from fedcli.userfiles import is_user_module

NO_MISTAKES = NonFiniteLoss, torch.OutOfMemoryError, OSError  # errors that are not blamed on the file that raises them


def initial_state(setup: Setup, fed: Federation, files: Iterable[str]) -> Any:
    """Returns a method's state before the first round; refuses one that changes PyTorch, as one of the `files` may."""
    method = setup.method
    refusing_draws = no_global_draws(f"init of '{method.name}'", fed.device)
    with method.blamed(*NO_MISTAKES), unchanged([*files]), refusing_draws:
        return method.init(fed, setup.method_config)


@contextmanager
def no_global_draws(what: str, device: torch.device, when: str = "") -> Iterator[None]:
    """Refuses draws from global generators, which a run that is resumed or repeated would make from other states.

    Raises:
        UserError: Names `what` has drawn, from which generator, and `when`.
    """
    before = _generator_states(device)
    yield
    for name, state in _generator_states(device).items():
        if state != before[name]:
            raise UserError(
                f"{what} draws from {name}'s global generator{when}; use fed.generator(...) on the server; a client "
                "must not draw."
            )


def _generator_states(device: torch.device) -> dict[str, Any]:
    """Returns the states of the global generators from which a method on a device could draw, by their library."""
    numpy_state: Any = np.random.get_state()  # its type has a dict too, which `legacy=False` alone returns
    _, key, position, *normal = numpy_state
    torch_states = [torch.get_rng_state().numpy().tobytes()]
    if device.type == "cuda":
        torch_states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return {"PyTorch": torch_states, "NumPy": (key.tobytes(), position, *normal), "Python": random.getstate()}


def refuse_other_kind(method: Method, state: Any, initial: Any, fed: Federation) -> None:
    """Refuses a state after a round that is not like the one of `init`, since a checkpoint with it would be refused.

    Raises:
        UserError: Says which part is not like it.
    """
    try:
        check_state(state, initial, fed)
    except Fault as fault:
        raise UserError(
            f"a run of '{method.name}' could not be resumed, as its state after a round is not like the one of init: "
            f"{fault}; let init give the whole state, as zeros of the shapes that rounds give it."
        ) from None


class StateCopy:
    """A copy of a state, by which is found what was changed in it; clients' states in a store are not looked at."""

    def __init__(self, state: Tree):
        """Copies the state."""
        self._structure, tensors = to_names(_without_stored(state))
        self._tensors = {path: tensor.clone() for path, tensor in tensors.items()}

    def changes(self, state: Tree) -> list[str]:
        """The paths of the state's tensors that have other values now, or of the dicts and lists that hold others."""
        structure, tensors = to_names(_without_stored(state))
        changed = []
        for path, before in self._tensors.items():
            if path not in tensors or not _is_same(tensors[path], before):
                changed.append(path)
        if structure != self._structure and not changed:
            changed.append("/")
        return changed


def _without_stored(state: Any) -> Any:
    """Returns a state without what a store keeps of the clients, which it may write into files meanwhile."""
    names = find_stored_states(state)
    return state._replace(**dict.fromkeys(names)) if names else state


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values, also where these are NaN, of the same type on the same device."""
    if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


@contextmanager
def no_changes_in_place(method: Method, state: Any, round: int) -> Iterator[None]:
    """Refuses a user's method that changes, in a round counted from 0, the state that it is given.

    What was tested of that state, and is held as the best round's, would change with it. Law 5 holds methods to the
    same, so that a packaged one is not looked at in its runs.

    Raises:
        UserError: Names the first part that has changed.
    """
    if not is_user_module(method.module):
        yield
        return
    before = StateCopy(state)
    yield
    changed = before.changes(state)
    if changed:
        raise UserError(
            f"run_round of '{method.name}' changes the state that it is given, in round {round + 1} (got other values "
            f"at '{changed[0]}'); make new tensors and dicts, as p + step in place of p.add_(step)."
        )
