"""Graphs of local steps on CUDA: captured, compared with the plain step, replayed, and forgotten.

A graph is a step captured once and replayed, which spares Python and the launches of hundreds of kernels. It reads and
writes the addresses that it was captured with and repeats what Python did then. What changes from step to step is
copied into tensors that stay, and a graph serves only steps that do the same: `graph_key`.
"""

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedcli.core.network import Network
from fedcli.core.trees import Tree, copy_tree, leaves, write_into
from fedcli.errors import first_line

Work = Callable[[], Any]
# Of what counts as the same by `==`.
PLAIN_TYPES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Network)

WARM_UP_STEPS = 3  # steps before one is captured, as PyTorch's notes on CUDA graphs have it
BURST_STEPS = 8  # steps of the larger graph
OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
MAX_STACKS = 4  # stacks cached for the rounds to come
MAX_CALLS = 32  # a network's step and its outputs, for full batches and for the last one, are four

# How far a replay may be from the plain step, as a share of the way that the step moves the clients. In both the same
# numbers are summed, at most in another order: float64 leaves that far below 1e-8; what is float32 here may be
# multiplied as TF32 or bfloat16, of 8 bits. A graph with a wrong batch, learning rate or context is off by about 1.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 3e-2, torch.float16: 3e-2}


class Graphs(Protocol):
    """What takes pieces of work in the place of Python: the graphs of a device, or what stands for them.

    Attributes:
        num_captured: How many have been made.
        num_plain: How many pieces of work were done by their operations, before they could be captured.
    """

    num_captured: int
    num_plain: int

    def warm_up(self, work: Work) -> None:
        """Does the work before it is captured."""

    def capture(self, work: Work) -> Work:
        """Captures the work; returns what does it again."""
        ...

    def branch(self, works: Sequence[Work]) -> list[Any]:
        """Does works that are independent of each other."""
        ...


class CudaGraphs:
    """Graphs of a CUDA device, which share their memory: none leaves in it what another one needs; see `Graphs`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None  # handle of the memory; None before the first capture and after one that has failed
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device)
        self._branches: list[torch.cuda.Stream] = []
        self.num_captured = 0
        self.num_plain = 0

    def warm_up(self, work: Work) -> None:
        """Does the work on a side stream."""
        self.num_plain += 1
        self._work_on([self._stream], [work])

    def capture(self, work: Work) -> Work:
        """Captures the work as a graph; returns its replay.

        Raises:
            RuntimeError: If a graph cannot hold the work, as where a value is brought to Python.
        """
        if self._pool is None:
            self._begin_pool()
        graph = self._capture(work)
        self.num_captured += 1
        return graph.replay

    def _begin_pool(self) -> None:
        """Begins to share new memory, with a graph that is never replayed: PyTorch gives it up with the last graph."""
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = self._capture(lambda: torch.zeros(1, device=self._device))

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        ambient = torch.cuda.current_stream(self._device)
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # giving up an older graph would end the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        except BaseException:
            self._pool = self._keeper = None  # PyTorch takes it to be in use by this capture from here on
            raise
        finally:
            torch.cuda.set_stream(ambient)  # a capture that fails leaves its own stream as the current one
            if was_enabled:
                gc.enable()
        return graph

    def branch(self, works: Sequence[Work]) -> list[Any]:
        """Does each work on a stream of its own; in a capture they become parallel branches."""
        while len(self._branches) < len(works):
            self._branches.append(torch.cuda.Stream(self._device))
        return self._work_on(self._branches[: len(works)], works)

    def _work_on(self, streams: list[torch.cuda.Stream], works: Sequence[Work]) -> list[Any]:
        """Does each work on its stream, after what was before and before what comes after."""
        ambient = torch.cuda.current_stream(self._device)
        results = []
        for work, stream in zip(works, streams, strict=True):
            stream.wait_stream(ambient)
            with torch.cuda.stream(stream):
                results.append(work())
        for stream in streams:
            ambient.wait_stream(stream)
        return results


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error of the device means that less memory might do.

    CUDA and its libraries, which allocate some of their own, raise no `OutOfMemoryError`.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


class Unrepeatable(Exception):
    """Says that another step may do something else."""


def graph_key(value: Any, shapes: bool = False) -> Hashable:
    """Returns what is equal for two things that make a step do the same.

    A function is its code, what it is closed over and the numbers and text that it reads from its module, as a method
    makes its objective anew in every round; a bound method its function and its object. Numbers and text count by
    value, dataclasses by their fields, networks by identity, and tensors, if `shapes`, by shape and type.

    Raises:
        Unrepeatable: For anything else. A tensor, above all, may be another one the next time.
    """
    if isinstance(value, PLAIN_TYPES):
        return (type(value), value)
    if isinstance(value, frozenset) and all(isinstance(part, PLAIN_TYPES) for part in value):
        return (frozenset, value)
    if shapes and isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, FunctionType):
        outside = (_read_closure(value), _read_globals(value), value.__defaults__, value.__kwdefaults__)
        return (value.__code__, graph_key(outside))
    if isinstance(value, MethodType):
        return (MethodType, graph_key((value.__func__, value.__self__)))
    if isinstance(value, partial):
        return (partial, graph_key((value.func, value.args, value.keywords)))
    if isinstance(value, tuple | list):
        return (type(value), *(graph_key(part, shapes) for part in value))
    if isinstance(value, dict):
        return (dict, *((key, graph_key(part, shapes)) for key, part in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(graph_key(getattr(value, field.name)) for field in dataclasses.fields(value)))
    raise Unrepeatable


def _read_closure(function: FunctionType) -> list[Any]:
    """Returns what a function is closed over.

    Raises:
        Unrepeatable: For a variable without a value.
    """
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise Unrepeatable from None


def _read_globals(function: FunctionType) -> dict[str, Any]:
    """Returns the numbers and text of its module that a function may read, itself or by functions of the module."""
    module = function.__globals__
    values = {}
    to_read = [function.__code__]
    seen = set()
    while to_read:
        code = to_read.pop()
        if code in seen:
            continue
        seen.add(code)
        to_read += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in module.keys() & set(code.co_names):
            value = module[name]
            if isinstance(value, FunctionType) and value.__globals__ is module:
                to_read.append(value.__code__)
            elif isinstance(value, PLAIN_TYPES):
                values[name] = value
    return dict(sorted(values.items()))


class GraphRecipe(NamedTuple):
    """What work with graphs is made of, apart from the tensors that it is given."""

    function: Callable[..., Any]  # of one client
    axes: Tree  # of what it is given
    way: str  # in which the clients are taken together


def find_key(recipe: GraphRecipe, tensors: Tree) -> Hashable | None:
    """Returns the key of work of a recipe with `tensors` of these shapes; None where it could not be known again."""
    try:
        return graph_key(recipe), graph_key(tensors, shapes=True)
    except (Unrepeatable, RecursionError):  # the latter of functions that are closed over each other
        return None


class Burst(NamedTuple):
    """Some steps in a row, all with padding or all without."""

    padded: bool
    num_steps: int


class Steps(NamedTuple):
    """The next steps of a stack, or of a call, each as many as a burst has."""

    eager: Callable[[Burst], None]  # operation by operation
    captured: Callable[[Burst], None]  # as a graph holds them


class StepState(NamedTuple):
    """All that a step changes, in tensors at fixed addresses.

    A stack takes a local step of its clients; a call is a function of stacked clients, or of their models.
    """

    updated: Tree  # packed: the clients of a stack, or the first argument of a call; its trees are compared one by one
    results: Tree  # sums of the terms and number of the next step of a stack; what a call has given


class StepGraphs:
    """Takes the steps of one stack of clients by graphs, once there are some.

    Attributes:
        device_graphs: None without any, and after a graph could not be made or was wrong.
        replays: Graphs by the steps that they take.
    """

    def __init__(self, device_graphs: Graphs | None, give_up: Callable[[str], None], is_reused: bool):
        """Prepares for a stack or a call; `give_up` is told why, if its step cannot be a graph.

        A graph of several steps is worth its capture where `is_reused`, as a stack in later rounds.
        """
        self.device_graphs = device_graphs
        self._give_up = give_up
        self._is_reused = is_reused
        self.replays: dict[Burst, Work] = {}
        self._warm_ups: Counter[bool] = Counter()  # steps before the first is captured, by whether they are padded

    def advance(self, steps: Steps, state: StepState, padded: bool, num_alike: int) -> int:
        """Takes some of the next steps, by a graph once there is one; returns how many.

        Args:
            steps: The steps.
            state: What they change.
            padded: Whether the next step has padding.
            num_alike: How many of the next steps are so, this one included.
        """
        burst = Burst(padded, 1)
        if self.device_graphs is None:
            steps.eager(burst)
            return 1
        if self._is_reused and num_alike >= BURST_STEPS and burst in self.replays:
            burst = Burst(padded, BURST_STEPS)
        if burst in self.replays:
            self.replays[burst]()
        elif self._warm_ups[padded] < WARM_UP_STEPS:
            self.device_graphs.warm_up(partial(steps.eager, burst))
            self._warm_ups[padded] += 1
        else:
            self._capture(steps, state, burst)
        return burst.num_steps

    def _capture(self, steps: Steps, state: StepState, burst: Burst) -> None:
        """Takes some steps twice, plainly and by a graph of them, which stays if both lead to the same clients."""
        assert self.device_graphs is not None  # `advance` has seen to it
        before = copy_tree(state)
        # Before the capture, so that its memory is free again for the graph.
        self.device_graphs.warm_up(partial(steps.eager, burst))
        plain = copy_tree(state)
        write_into(state, before)
        try:
            replay = self.device_graphs.capture(partial(steps.captured, burst))
        except Exception as error:
            cause = error.__context__ or error  # ending a capture that has gone wrong is an error of its own
            if is_out_of_memory(cause):
                raise cause from None
            reason = f"no CUDA graph of the step, its operations go one by one ({first_line(cause)})"
        else:
            replay()
            if agree(state, plain, before):
                self.replays[burst] = replay
                return
            reason = "a CUDA graph of the step gave other numbers than the step, whose operations now go one by one"
        write_into(state, plain)
        self.device_graphs = None
        self._give_up(reason)


class GraphCache(dict[Hashable, Any]):
    """Stacks or calls with their graphs by `find_key`, which serve when the same work comes again.

    Attributes:
        max_entries: How many there may be.
    """

    def __init__(self, max_entries: int):
        super().__init__()
        self.max_entries = max_entries

    def add(self, key: Hashable, work: Any) -> None:
        """Adds a stack or a call; the oldest makes way for it."""
        if len(self) == self.max_entries:
            oldest = next(iter(self))
            del self[oldest]
        self[key] = work


def agree(replayed: StepState, plain: StepState, before: StepState) -> bool:
    """Says whether two takes of a step lead to what differs by rounding only, see `TOLERANCE`.

    Args:
        replayed: After the replay.
        plain: After the plain step.
        before: Before both.
    """
    for new, right, old in zip(_compared_trees(replayed), _compared_trees(plain), _compared_trees(before), strict=True):
        if not _trees_agree(new, right, old):
            return False
    return True


def _compared_trees(state: StepState) -> list[Tree]:
    """Returns what is compared one by one: the clients' parameters, buffers and the like, and the results."""
    return [*state.updated, state.results]


def _trees_agree(replayed: Tree, plain: Tree, before: Tree) -> bool:
    error: float | Tensor = 0.0  # squared, as is what is allowed
    allowed: float | Tensor = 0.0
    for new, right, old in zip(leaves(replayed), leaves(plain), leaves(before), strict=True):
        if right.is_floating_point():
            rounding = 4 * torch.finfo(right.dtype).eps * right.nan_to_num(0, 0, 0).double().norm()
            error += _distance(new, right) ** 2
            allowed += (TOLERANCE[right.dtype] * _distance(right, old)) ** 2 + rounding**2
        elif not torch.equal(new, right):
            return False
    return bool(error <= allowed)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.where(a == b, 0.0, a - b), dtype=torch.float64)  # equal infinities: 0
