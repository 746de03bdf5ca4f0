"""CUDA graphs: a step captured once and replayed, which spares Python and the launches of hundreds of kernels.

A graph reads and writes the addresses that it was captured with and repeats what Python did then. What changes from
step to step is copied into tensors that stay, and a graph serves only steps that do the same: `graph_key`.
"""

import dataclasses
import gc
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fedcli.core.clients import Network

Work = Callable[[], Any]


class CudaGraphs:
    """Graphs of a CUDA device, which share their memory: none leaves in it what another one needs."""

    def __init__(self, device: torch.device):
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._branches: list[torch.cuda.Stream] = []
        self.captured = 0  # graphs made

    def warm_up(self, work: Work) -> None:
        """Does the work on a side stream."""
        self._work_on([self._stream], [work])

    def capture(self, work: Work) -> Work:
        """Captures the work as a graph; returns its replay.

        Raises:
            RuntimeError: If a graph cannot hold the work, as where a value is brought to Python.
        """
        ambient, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        collect = gc.enable if gc.isenabled() else gc.disable
        gc.collect()
        gc.disable()  # giving up an older graph would end the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        finally:
            torch.cuda.set_stream(ambient)  # a capture that fails leaves its own stream as the current one
            collect()
        self.captured += 1
        return graph.replay

    def fork(self, works: list[Work]) -> list[Any]:
        """Does each work on a stream of its own; in a capture they become parallel branches."""
        while len(self._branches) < len(works):
            self._branches.append(torch.cuda.Stream(self._device))
        return self._work_on(self._branches[: len(works)], works)

    def _work_on(self, streams: list[torch.cuda.Stream], works: list[Work]) -> list[Any]:
        """Does each work on its stream, after what was before and before what comes after."""
        ambient, results = torch.cuda.current_stream(self._device), []
        for work, stream in zip(works, streams, strict=True):
            stream.wait_stream(ambient)
            with torch.cuda.stream(stream):
                results.append(work())
        for stream in streams:
            ambient.wait_stream(stream)
        return results


class Unrepeatable(Exception):
    """Says that another step may do something else."""


def graph_key(thing: Any, shapes: bool = False) -> Hashable:
    """Returns what is equal for two things that make a step do the same.

    A function is its code and what it is closed over, as a method makes its objective anew in every round. Numbers and
    text count by value, dataclasses by their fields, networks by identity, and tensors, if `shapes`, by shape and type.

    Raises:
        Unrepeatable: For anything else. A tensor, above all, may be another one the next time.
    """
    plain = bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Network
    if isinstance(thing, plain):
        return (type(thing), thing)
    if shapes and isinstance(thing, Tensor):
        return (tuple(thing.shape), thing.dtype)
    if isinstance(thing, FunctionType):
        closed = (cell.cell_contents for cell in thing.__closure__ or ())
        return (thing.__code__, graph_key((*closed, thing.__defaults__, thing.__kwdefaults__)))
    if isinstance(thing, partial):
        return (partial, graph_key((thing.func, thing.args, thing.keywords)))
    if isinstance(thing, tuple | list):
        return (type(thing), *(graph_key(part, shapes) for part in thing))
    if isinstance(thing, dict):
        return (dict, *((key, graph_key(value, shapes)) for key, value in thing.items()))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return (type(thing), *(graph_key(getattr(thing, field.name)) for field in dataclasses.fields(thing)))
    raise Unrepeatable
