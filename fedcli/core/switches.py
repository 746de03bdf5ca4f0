"""Switches that hold for one thread inside a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Whether an objective may not make numbers of tensors, see `NoReading` in `objectives`: in the first step of one client
# of a round, and in every step on a public batch, which all clients take.
refuse_reading: ContextVar[bool] = ContextVar("refuse_reading", default=False)
under_vmap: ContextVar[bool] = ContextVar("under_vmap", default=False)  # whether vmap runs now


@contextmanager
def set_to(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    """Sets a context variable inside a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
