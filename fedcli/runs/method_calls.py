"""How a run calls the functions of a method, which may be a user's: what it blames on them, and what it refuses."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedcli.core.federation import Federation, NonFiniteLoss
from fedcli.errors import UserError
from fedcli.isolation import unchanged
from fedcli.runs.resolve import Setup

NO_MISTAKES = NonFiniteLoss, torch.OutOfMemoryError, OSError  # errors that are not blamed on the file that raises them


def initial_state(setup: Setup, fed: Federation, files: Iterable[str]) -> Any:
    """The method's state before the first round; refuses a method that changes PyTorch, as one of the `files` may."""
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
