"""CUDA graphs: a step captured once and replayed, which spares the Python and the launches of its hundreds of kernels.

A graph reads and writes the addresses it was captured with and repeats what Python did then. So whatever changes from
step to step has to be copied into tensors that stay, and a graph may be used again only for a step that would do the
same: `identity` says so of two steps.
"""

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], Any]

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class Graphs(Protocol):
    """What the engine needs of a device that has graphs."""

    def warm_up(self, work: Work) -> None:
        """Does the work on the side, as it has to be done some times before it is captured."""

    def capture(self, work: Work) -> Work:
        """Records the work without doing it; returns what does it."""

    def fork(self, works: list[Work]) -> list[Any]:
        """Does pieces of work that are independent of each other; returns their results in order."""


class CudaGraphs:
    """Graphs of a CUDA device, each with memory of its own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._branches: list[torch.cuda.Stream] = []

    def warm_up(self, work: Work) -> None:
        """Does the work on a side stream."""
        ambient = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(ambient)
        with torch.cuda.stream(self._stream):
            work()
        ambient.wait_stream(self._stream)

    def capture(self, work: Work) -> Work:
        """Captures the work as a graph; returns its replay.

        Raises:
            RuntimeError: If the work does what a graph cannot hold, such as bringing a value to Python.
        """
        ambient, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                work()
        finally:
            torch.cuda.set_stream(ambient)  # a capture that fails leaves its own stream as the current one
        return graph.replay

    def fork(self, works: list[Work]) -> list[Any]:
        """Does each work on a stream of its own; in a capture they become parallel branches."""
        ambient, results = torch.cuda.current_stream(self._device), []
        while len(self._branches) < len(works):
            self._branches.append(torch.cuda.Stream(self._device))
        for work, stream in zip(works, self._branches, strict=False):
            stream.wait_stream(ambient)
            with torch.cuda.stream(stream):
                results.append(work())
        for stream in self._branches[: len(works)]:
            ambient.wait_stream(stream)
        return results


class Unrepeatable(Exception):
    """Of a step nobody can say whether another one would do the same."""


def identity(thing: Any) -> Hashable:
    """Equal for two things that make a step do the same.

    A function is its code and what it is closed over: a method makes its local objective anew in every round, from the
    same code, network and configuration. Numbers and text count by value, dataclasses by their fields, networks by
    being the same object.

    Raises:
        Unrepeatable: For anything else. A tensor, above all, may be another one the next time.
    """
    from fedcli.core.clients import Network

    if isinstance(thing, _PLAIN):
        return (type(thing), thing)
    if isinstance(thing, Network):
        return thing
    if isinstance(thing, FunctionType):
        closed = tuple(cell.cell_contents for cell in thing.__closure__ or ())
        return (thing.__code__, identity((*closed, thing.__defaults__, thing.__kwdefaults__)))
    if isinstance(thing, partial):
        return (partial, identity((thing.func, thing.args, thing.keywords)))
    if isinstance(thing, tuple | list):
        return (type(thing), *map(identity, thing))
    if isinstance(thing, dict):
        return (dict, *((key, identity(value)) for key, value in thing.items()))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return (type(thing), *(identity(getattr(thing, field.name)) for field in dataclasses.fields(thing)))
    raise Unrepeatable


def layout(tree: Any) -> Hashable:
    """The structure of a tree and the shapes of its tensors; leaves of other kinds by `identity`."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return (dict, *((key, layout(value)) for key, value in tree.items()))
    if isinstance(tree, tuple | list):
        return (type(tree), *map(layout, tree))
    return identity(tree)
